"""recollect: distil a dataset into a tiny addressable memory, and recall from it what you need later.

The public names. Each is imported when it is first used, so that `import recollect` and `recollect --help` do not wait
for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.ask import ask
    from recollect.compose import Classifier, compose
    from recollect.config import DistillConfig, Recipe, preset
    from recollect.data import Images, Split, load
    from recollect.data.preprocess import Preprocess
    from recollect.distill import distill
    from recollect.errors import RecollectError
    from recollect.evaluate import Evaluation, evaluate
    from recollect.memory import Budget, Memory
    from recollect.nets import Network
    from recollect.select import select
    from recollect.unroll import metagradient

__version__ = "0.1.0"

_HOME = {
    "Budget": "memory",
    "Classifier": "compose",
    "DistillConfig": "config",
    "Evaluation": "evaluate",
    "Images": "data",
    "Memory": "memory",
    "Network": "nets",
    "Preprocess": "data.preprocess",
    "Recipe": "config",
    "RecollectError": "errors",
    "Split": "data",
    "ask": "ask",
    "compose": "compose",
    "distill": "distill",
    "evaluate": "evaluate",
    "load": "data",
    "metagradient": "unroll",
    "preset": "config",
    "select": "select",
}

__all__ = [
    "Budget",
    "Classifier",
    "DistillConfig",
    "Evaluation",
    "Images",
    "Memory",
    "Network",
    "Preprocess",
    "Recipe",
    "RecollectError",
    "Split",
    "ask",
    "compose",
    "distill",
    "evaluate",
    "load",
    "metagradient",
    "preset",
    "select",
]


class _Package(ModuleType):
    """Public names win over modules of the same name: `recollect.distill` is the function, whatever was imported before."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect' has no attribute '{name}'")
        return getattr(import_module(f"recollect.{_HOME[name]}"), name)

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
