"""Reading: how pictures of a folder are found and made alike, as command line, Python, config.json and headers say it."""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from recollect.errors import RecollectError, unknown

Fit = Literal["stretch", "crop", "pad"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How pictures of a folder are found, and made alike."""

    colour: Literal["rgb", "grey"] | None = None
    """make every picture rgb or grey. Default: left as they are, which must be one of the two"""
    fit: Fit = "stretch"
    """how a picture becomes a square of --size: stretch it, crop to its middle, or pad it to a square"""
    background: str | None = None
    """colour behind what is transparent and padded, as white or #00ff00. Default: white, or where pictures vanish on it black or
    grey; padding alone is black"""
    labels: Path | None = None
    """file of labels: a .csv with the columns file and label, for pictures anywhere in the folder"""
    pattern: str | None = None
    """place of the label in the paths of pictures, as in '{label}/**/*.png'; {split} is the place of train, val or test"""
    skip_bad: bool = False
    """leave out files that are damaged or no pictures, and say which"""

    def given(self) -> dict[str, Any]:
        """What is not as usual, as JSON has it."""
        usual = Reading()
        found = {name: value for name, value in asdict(self).items() if value != getattr(usual, name)}
        return found | ({"labels": str(Path(self.labels).resolve())} if self.labels else {})

    def stated(self) -> dict[str, str]:
        """What a header says, once it is known: how new pictures are made like these."""
        return {"fit": self.fit} | ({"background": self.background} if self.background else {})


OPTIONS = tuple(field.name for field in fields(Reading))


def reading(**options: Any) -> Reading:
    """A Reading of options by their names; one that there is not, or that cannot be, is an error."""
    for name in options:
        if name not in OPTIONS:
            raise unknown("option of pictures", name, OPTIONS)
    found = Reading(**options)
    for name, known in (("colour", (None, "rgb", "grey")), ("fit", get_args(Fit))):
        if getattr(found, name) not in known:
            raise unknown(name, str(getattr(found, name)), [each for each in known if each])
    if found.background is not None:
        rgb(found.background)
    if found.labels and found.pattern:
        raise RecollectError("labels come from a .csv file or from a pattern: give --labels or --pattern")
    return found


def rgb(colour: str) -> tuple[int, int, int]:
    """A colour's red, green and blue, 0..255."""
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(colour)[:3]
    except ValueError:
        raise RecollectError(f"background '{colour[:40]}' is no colour: give one such as white or #00ff00") from None
    return red, green, blue


def is_stated(value: object) -> bool:
    """Whether a header's word on its pictures is one of ours."""
    if not isinstance(value, dict) or value.get("fit") not in get_args(Fit):
        return False
    background = value.get("background", "#000000")
    return isinstance(background, str) and bool(re.fullmatch("#[0-9a-f]{6}", background))
