"""What pictures show, by a classifier."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.training import answer
from recollect.errors import RecollectError


@dataclass(frozen=True)
class Classify:
    """Say what pictures show, by a classifier that compose or ask has saved."""

    classifier: Positional[Path]
    """classifier's .safetensors file"""
    pictures: Positional[tuple[Path, ...]]
    """picture files, or folders of them; pictures are resized, and made grey or RGB"""
    json: bool = False
    """print the answers as JSON, with the probabilities of all classes"""

    def perform(self) -> int:
        from recollect.classifier import Classifier

        if not self.pictures:
            raise RecollectError("no pictures named: recollect classify CLASSIFIER picture.png ...")
        answer(Classifier.load(self.classifier), self.pictures, self.json)
        return 0
