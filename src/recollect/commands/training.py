"""What commands that train a classifier share: how it is trained, and what becomes of it."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recollect.commands.inputs import write_to
from recollect.config import Recipe
from recollect.errors import RecollectError
from recollect.show import terminal


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a classifier is trained, and what becomes of it."""

    save: Path | None = None
    """file to write the classifier to, .safetensors"""
    classify: tuple[Path, ...] = ()
    """pictures to classify, or folders of them"""
    network: str | None = None
    """network to train. Default: that of the memory's recipe"""
    epochs: int | None = None
    """passes over the recalled images. Default: those of the memory's recipe"""
    batch: int | None = None
    """images of a training step. Default: those of the memory's recipe"""
    lr: float | None = None
    """learning rate of SGD, constant. Default: that of the memory's recipe"""
    momentum: float | None = None
    """momentum of SGD. Default: that of the memory's recipe"""
    augment: str | None = None
    """augmentation: any of flip, rotate, scale, crop, cutout, brightness, contrast, saturation, joined by +. Default: that of the
    memory's recipe"""
    seed: int = 0
    """seed of the network"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    quiet: bool = False
    """print the result alone"""


def check_use(image_shape: tuple[int, int, int], command: Training) -> None:
    """Refuse what cannot be written or read, before a classifier is trained."""
    from recollect.classifier import read_picture

    if command.save and command.save.exists():
        raise RecollectError(f"{command.save} already exists: give another name (--save)")
    for picture in command.classify:
        if not picture.is_dir():
            read_picture(picture, image_shape)


def trained(composition, command: Training):
    """A classifier trained on a composition, by the recipe of its memory and what the command changes of it."""
    given = {field.name: getattr(command, field.name) for field in dataclasses.fields(Recipe)}
    recipe = dataclasses.replace(composition.recipe, **{name: v for name, v in given.items() if v is not None})
    with terminal.trainings("classifier", command.quiet) as progress:
        classifier = composition.train(recipe, command.seed, command.device, progress)
    where = f" ({composition.notice})" if composition.notice else ""
    terminal.say(f"{recipe.network} trained on {len(composition.labels):,} recalled images{where}")
    return classifier


def use(classifier, command: Training) -> None:
    if command.save:
        classifier.save(command.save)
        terminal.say(f"classifier  {command.save}")
    if command.classify:
        answer(classifier, command.classify)


def answer(classifier, pictures: Sequence[Path], as_json: bool = False) -> None:
    """What each picture shows, a folder's too; in a folder, what is no picture is said and left out."""
    found = []
    for given in pictures:
        for picture in sorted(path for path in given.rglob("[!.]*") if path.is_file()) if given.is_dir() else [given]:
            try:
                found += [(picture, *classifier.classify(picture))]
            except RecollectError as error:
                if picture is given:
                    raise
                print(f"left out: {terminal.plain(str(error))}", file=sys.stderr)
    if as_json:
        write_to(Path("-"), [{"picture": str(picture)} | each._asdict() for picture, each in found])
        return
    for picture, each in found:
        notice = f"  [{each.notice}]" if each.notice else ""
        terminal.say(f"{picture}: {each.class_name}, {100 * each.probability:.1f} %{notice}")
