"""Experts: networks trained once on real images, with their weights of every epoch, for the objective trajectories.

A folder has a file for each, written when it is finished; called again, what is there stays and the others are made.
"""

from collections.abc import Callable
from pathlib import Path

from recollect.config import Recipe, to_json
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.files import held
from recollect.nets import Constructor, Network, Params
from recollect.objectives.trajectories import Expert, write_expert
from recollect.seeds import Purpose, network_seed
from recollect.training import Progress, train


def train_experts(
    images: Images,
    folder: "Path | str",
    recipe: Recipe,
    *,
    count: int = 10,
    network: Constructor | None = None,
    preprocess: str = "normalise",
    use_validation: bool = False,
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[Progress], None] | None = None,
) -> list[Path]:
    """Train `count` networks on real images, and keep the weights of each, fresh and after every epoch.

    Arguments:
        folder: one file an expert; those that are there already stay, if they were made in the same way.
        recipe: how they are trained; published: Recipe(epochs=50, batch=256, lr=0.01, momentum=0.0).
        network: a function (image shape, classes) -> nn.Module, instead of the recipe's named network.
        preprocess: "normalise" or "zca", fitted to the training images; the distillation must have the same.
        use_validation: train on the validation split too, for a distillation that does.
        progress: told how far each training is.

    Returns:
        the files.
    """
    if count < 1:
        raise RecollectError(f"number of experts is {count}: give 1 or more")
    if images.train.targets is not None:
        raise RecollectError(f"experts tell classes apart, and {images.name} has continuous targets: give data with classes")
    device, split = find_device(device), images.train + images.validation if use_validation else images.train
    net = Network(network or recipe.network, images.shape, images.classes)
    prepared = Preprocess.fit(split.images, preprocess, device, images.columns)
    name = f"custom {getattr(network, '__qualname__', 'network')}" if network else recipe.network
    about: dict[str, object] = {
        "network": name,
        "recipe": to_json(recipe),
        "dataset": images.name,
        "fingerprint": split.fingerprint,
    }
    about |= {"preprocessing": prepared.to_json()}
    paths, part = [Path(folder) / f"expert-{number:03}.safetensors" for number in range(count)], None
    with held(Path(folder)):
        for number, path in enumerate(paths):
            own = about | {"seed": (drawn := network_seed(seed, Purpose.EXPERT, number))}
            if path.exists():
                _refuse_another(Expert.open(path), own)
                continue
            part = part or (prepared.on(device, split.images), split.labels)
            epochs = [net.fresh(drawn)]

            def keep(trained: list[Params], epochs: list[Params] = epochs) -> None:
                epochs.append({name: p.detach().cpu().clone() for name, p in trained[0].items()})

            train(net, [part], recipe, [drawn], device, progress=progress, every_epoch=keep)
            if not all(p.isfinite().all() for p in epochs[-1].values()):
                raise RecollectError(f"expert {number} diverged: lower its learning rate ({recipe.lr:g}, --lr)")
            write_expert(path, own, epochs)
    return paths


def _refuse_another(expert: Expert, own: dict[str, object]) -> None:
    for name, value in own.items():
        if expert.about[name] != value:  # pyright: ignore[reportTypedDictNotRequiredAccess]
            raise RecollectError(f"{expert.path} was made with another {name}: give another folder (--out), or delete it")
