"""A classifier for classes of several memories."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from recollect.commands.inputs import Files, memory_path
from recollect.commands.training import Training, check_use, trained, use
from recollect.errors import RecollectError
from recollect.hub import PREFIX
from recollect.show import terminal


@dataclass(frozen=True)
class Compose(Files, Training):
    """Train a classifier for classes of several memories, which need never have been seen together."""

    memories: Positional[tuple[str, ...]]
    """memory files (folders of runs, names of the zoo, hub:owner/name), each with its classes: a.safetensors:cat,dog
    b.safetensors:truck. Without them: all its classes"""
    test: tuple[str, ...] = ()
    """datasets to test the classifier on: accuracy and confusion matrix"""
    on: Literal["test", "validation"] = "test"
    """split of the test data to report; choose settings on validation"""

    def perform(self) -> int:
        from recollect.composition import compose
        from recollect.memory import Memory

        if not self.memories:
            raise RecollectError("no memory named: recollect compose a.safetensors:cat,dog b.safetensors:truck")
        chosen = _chosen(self.memories)
        first = chosen[0] if isinstance(chosen[0], Memory) else chosen[0].memory
        check_use(first.image_shape, self)
        tests = [self.load(name, first.header) for name in self.test]
        composition = compose(chosen, tests)
        tested = composition.split(*tests, on=self.on) if tests else None
        classifier = trained(composition, self)
        if tested is not None:
            terminal.confusion(classifier.class_names, classifier.confusion(tested).tolist(), self.on)
        use(classifier, self)
        return 0


def _chosen(texts: Sequence[str]):
    """What each PATH or PATH:class,class stands for. A path may hold a colon, and the name of a class a comma."""
    from recollect.memory import Memory

    loaded: dict[Path, Memory] = {}
    chosen = []
    for text in texts:
        first = len(PREFIX) if text.startswith(PREFIX) else 1
        ends = [len(text), *(place for place in range(len(text) - 1, first - 1, -1) if text[place] == ":")]
        end = next((end for end in ends if Path(text[:end]).exists()), ends[-1])
        path, names = memory_path(Path(text[:end])), text[end + 1 :]
        if path.resolve() not in loaded:
            loaded[path.resolve()] = Memory.load(path)
        memory = loaded[path.resolve()]
        if end == len(text):
            chosen.append(memory)
        else:
            chosen.append(memory[names if names in memory.class_names else names.split(",")])
    return chosen
