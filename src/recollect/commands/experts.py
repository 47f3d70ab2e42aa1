"""Expert trajectories for the objective trajectories."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes

from recollect.commands.inputs import Data, loaded, spec
from recollect.config import Recipe
from recollect.show import terminal


@dataclass(frozen=True)
class Experts:
    """Train networks on real images, and keep their weights of every epoch: what the objective trajectories is matched to. The
    same command again makes only those that are missing."""

    images: OmitArgPrefixes[Data]
    count: int = 10
    """number of networks (published: 100)"""
    out: Path | None = None
    """folder of the experts. Default: experts/DATASET"""
    network: str = "convnet"
    """network to train: convnet, resnet12, alexnet, mlp or lamaml, with options: convnet:width=64,depth=4"""
    epochs: int = 10
    """passes over the training images (published: 50, of which the objective looks at the first seven)"""
    batch: int = 256
    """images of a training step"""
    lr: float = 0.01
    """learning rate of SGD, constant"""
    momentum: float = 0.0
    """momentum of SGD"""
    augment: str = "none"
    """augmentation, fresh for every image and step: any of flip, rotate, scale, crop, cutout, brightness, contrast, saturation,
    joined by +"""
    preprocess: Literal["auto", "normalise", "zca"] = "auto"
    """preprocessing, the same as recollect distill will have: ZCA whitening or not. Auto: ZCA for svhn, cifar10 and cifar100"""
    use_validation: bool = False
    """train on the validation split too: for a distillation that does"""
    seed: int = 0
    """seed of the networks"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        from recollect.decisions import preprocess_of
        from recollect.experts import train_experts

        images = loaded(spec(self.images))
        folder, preprocess = self.out or Path("experts") / images.name, preprocess_of(self.preprocess, images)
        recipe = Recipe(self.network, self.epochs, self.batch, self.lr, self.momentum, self.augment)
        with terminal.trainings("expert", self.quiet) as progress:
            files = train_experts(
                images, folder, recipe, count=self.count, preprocess=preprocess, use_validation=self.use_validation,
                seed=self.seed, device=self.device, progress=progress,
            )  # fmt: skip
        each = files[0].stat().st_size / 2**20
        terminal.say(f"{len(files)} experts of {self.epochs} epochs in {folder} ({each:,.1f} MiB each)")
        return 0
