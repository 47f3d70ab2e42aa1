"""Ask: a classifier from a few pictures whose labels nobody knows.

Each group of pictures is a class of the new classifier. The memory's encoder makes a query vector of each picture, or of the
group, the memory recalls training images for it, and a fresh network learns to tell the groups apart.

ask(memory, {"these": [...], "those": [...]})  ->  Composition  --train-->  Classifier
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recollect.compose import Composition, Picture, Source, read_picture
from recollect.data import Images
from recollect.data.pictures import visible
from recollect.errors import RecollectError
from recollect.evaluate import memory_recipe
from recollect.memory import Memory

MOST_NOTICES = 3  # of a group: folders hold pictures of many sizes


def ask(
    memory: Memory, groups: "Mapping[str, Sequence[Picture] | Tensor]", images: "Images | None" = None
) -> Composition:
    """What a memory recalls for groups of pictures, as a training set.

    Arguments:
        memory: one that is asked with pictures (distilled with query "images").
        groups: for each new class its pictures: files, PIL images, or uint8 pixels [N, C, H, W].
        images: the memory's own dataset, from which a whitening file that is not at hand is fitted again.
    """
    if not memory.header.query:
        raise RecollectError(
            f"{memory.name} is asked with labels, not with pictures: compose names its classes "
            "(a memory for pictures is distilled with --query images)"
        )
    if len(groups) < 2:
        raise RecollectError(f"a classifier needs two groups of pictures or more, not {len(groups)}: give another")
    shots, notices, pictures = memory.header.query["shots"], [], []
    for name, given in groups.items():
        if len(given) < shots:
            has = f"{len(given)} picture{'' if len(given) == 1 else 's'}"
            raise RecollectError(
                f"group '{name}' has {has}, and {memory.name} was made for {shots}: give {shots} or more, "
                f"or distil a memory for fewer (--shots {max(1, len(given))})"
            )
        pixels, notice = _pixels(given, memory)
        notices += [f"{name}: {notice}"] if notice else []
        pictures.append(pixels)
    preprocess = memory.preprocess(images)
    with torch.no_grad():
        recalled = [memory.recall(memory.encode(preprocess(pixels)))[0] for pixels in pictures]
    most = max(map(len, recalled))
    answer = torch.cat([some[torch.arange(most) % len(some)] for some in recalled])
    labels = torch.arange(len(groups)).repeat_interleave(most)
    sources = tuple(Source(memory.name, memory.header.dataset, name) for name in groups)
    return Composition(answer, labels, tuple(groups), preprocess, memory_recipe(memory), sources, "; ".join(notices))


def _pixels(given: "Sequence[Picture] | Tensor", memory: Memory) -> tuple[Tensor, str]:
    """uint8 [N, C, H, W], and a word on what had to be done to the pictures."""
    if not isinstance(given, Tensor):
        read = [read_picture(picture, memory.image_shape) for picture in given]
        notices = sorted({each for _, notice in read for each in notice.split("; ") if each}, reverse=True)
        more = [f"{len(notices) - MOST_NOTICES} other sizes"] * (len(notices) > MOST_NOTICES)
        return torch.stack([pixels for pixels, _ in read]), "; ".join([*notices[:MOST_NOTICES], *more])
    if given.dtype != torch.uint8 or given.shape[1:] != torch.Size(memory.image_shape):
        shape = ", ".join(map(str, memory.image_shape))
        raise RecollectError(f"the pixels are {given.dtype} {list(given.shape)}: give uint8 [N, {shape}]")
    return given, ""


def folders(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Groups of pictures by folder: the folders given, or those inside the one folder given."""
    if not paths:
        raise RecollectError("no pictures named: recollect ask MEMORY these-pictures those-pictures")
    for path in paths:
        if not path.is_dir():
            raise RecollectError(f"{path} is not a folder: give a folder of pictures for each class")
    if len(paths) == 1:
        inside = [path for path in visible(paths[0]) if path.is_dir()]
        if len(inside) < 2:
            raise RecollectError(
                f"{paths[0]} is one class: give a folder of pictures for each, or one that holds such folders"
            )
        paths = inside
    groups: dict[str, list[Path]] = {}
    for path in paths:
        name = path.resolve().name
        if name in groups:
            raise RecollectError(f"two folders are called '{name}': rename one, its name is that of the class")
        groups[name] = visible(path)
    return groups
