"""Fitting: one picture becomes pixels. It is decoded within limits, set upright, made grey or RGB, brought to a size, and laid on
a background where it is transparent.

Pillow decodes and resizes. Every picture of a dataset, and every new one for a classifier, goes this way.
"""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recollect import limits
from recollect.data.readers import content
from recollect.errors import RecollectError
from recollect.reading import Reading, rgb

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS_READ = "PNG, JPEG, WebP, GIF or BMP"
PIXEL_BYTES = 16  # of a picture while it is decoded and converted
SIDEWAYS = ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
TURNS = dict(enumerate(("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", *SIDEWAYS), 2))  # what undoes a camera's orientation
FULL = "full size"  # where a picture's is kept
GROUNDS = ("white", "black", "grey")  # the first on which the fewest pictures vanish
VANISHES = 32  # mean difference from the background, of 255, below which nobody sees a picture


class Fitted(NamedTuple):
    """A picture of its final size and kind, before it is laid on a background."""

    pixels: np.ndarray
    """uint8 [1 or 3, H, W]"""
    alpha: np.ndarray | None
    """uint8 [H, W]: 0 is transparent or padded. None: opaque everywhere"""
    is_clear: bool
    """whether the picture itself is transparent in parts"""

    def on(self, background: str) -> np.ndarray:
        """uint8 [1 or 3, H, W] on a colour."""
        if self.alpha is None:
            return self.pixels
        weight = self.alpha.astype(np.float32) / 255
        return np.rint(weight * self.pixels + (1 - weight) * ground(background, len(self.pixels))).astype(np.uint8)

    def vanishes(self, background: str) -> bool:
        """Whether what is to be seen has nearly the colour of this background."""
        weight = np.ones(self.pixels.shape[1:]) if self.alpha is None else self.alpha.astype(np.float64)
        apart = np.abs(self.pixels - ground(background, len(self.pixels))).max(0)
        return bool((weight * apart).sum() < VANISHES * weight.sum())


def ground(background: str, channels: int) -> np.ndarray:
    """float32 [channels, 1, 1] of a colour, or its luminance."""
    colour = np.array(rgb(background), np.float32)
    return (colour if channels == 3 else colour @ np.array([[0.299], [0.587], [0.114]], np.float32))[:, None, None]


def named(background: str) -> str:
    """A colour's name, if it is one of ours."""
    return next((name for name in GROUNDS if rgb(name) == rgb(background)), background)


def contrasting(pictures: Sequence[Fitted]) -> str:
    """A background for pictures that are transparent in parts."""
    vanishing = {name: sum(picture.vanishes(name) for picture in pictures) for name in GROUNDS}
    return min(GROUNDS, key=vanishing.__getitem__)


def background_for(reading: Reading, pictures: Sequence[Fitted]) -> str | None:
    """The colour that a reading has, or that suits these pictures; None where nothing is to be seen of one."""
    clear = [picture for picture in pictures if picture.is_clear]
    return reading.background or (contrasting(clear) if clear else "black" if reading.fit == "pad" else None)


def open_picture(path: Path, size: int | None = None) -> "Image":
    """A picture of a file, decoded and upright. See `decoded`."""
    return decoded(str(path), content(path), size)


def decoded(name: str, raw: bytes, size: int | None = None) -> "Image":
    """A picture of its bytes, upright. Its size is known, and refused, before it is decoded; other formats' decoders start
    programs, or are seldom looked at.

    Arguments:
        size: pixels a side that it will be brought to. A JPEG is decoded no larger than that needs, which is faster by far.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):  # the limit is ours
            opened = Image.open(io.BytesIO(raw), formats=FORMATS)
    except UnidentifiedImageError:
        raise RecollectError(f"{name}: not a picture, or a damaged one: give a {FORMATS_READ} file") from None
    limits.check(f"{name}: a picture of {opened.width}x{opened.height}", PIXEL_BYTES * opened.width * opened.height, len(raw))
    full = opened.size
    if size is not None:
        opened.draft(None, (2 * size, 2 * size))
    opened.load()
    if turn := TURNS.get(_orientation(opened)):
        opened = opened.transpose(Image.Transpose[turn])
        full = full[::-1] if turn in SIDEWAYS else full
    opened.info[FULL] = full
    return opened


def _orientation(picture: "Image") -> int:
    """As its camera held it; 1, upright, where that is not known. Damaged words on a whole picture are no reason to refuse it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return picture.getexif().get(0x0112, 1)
    except Exception:  # these raise almost anything
        return 1


def full_size(picture: "Image") -> tuple[int, int]:
    """(width, height) of a picture's file, upright."""
    return picture.info.get(FULL, picture.size)


def is_clear(picture: "Image") -> bool:
    """Whether any of it is transparent."""
    if not picture.has_transparency_data or picture.mode.startswith("I"):
        return False
    return int(np.asarray(picture.convert("RGBA"))[..., 3].min()) < 255


def is_grey(picture: "Image") -> bool:
    """Whether its file has shades of grey alone."""
    return picture.mode in ("1", "L", "LA") or picture.mode.startswith("I")


def fitted(name: str, picture: "Image | None", size: tuple[int, int] | None, reading: Reading) -> Fitted:
    """Pixels of one picture; 16 bits lose the lower 8.

    Arguments:
        name: of the picture, for errors.
        size: (height, width) to bring it to; None leaves it as it is.
        reading: colour (None: as the picture has it) and fit.
    """
    from PIL import Image

    if picture is None or picture.mode == "F":
        raise RecollectError(f"{name}: not a picture of whole numbers: save it as PNG or JPEG, or leave it out")
    grey, clear = is_grey(picture) if reading.colour is None else reading.colour == "grey", is_clear(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
    if picture.mode == "P":  # a palette's transparency is only understood on the way to RGBA
        picture = picture.convert("RGBA")
    opaque, seen_through = ("L", "LA") if grey else ("RGB", "RGBA")
    picture = picture.convert(seen_through if clear or (size and reading.fit == "pad") else opaque)
    if size is not None:
        limits.check(f"{name}: {size[1]}x{size[0]} pixels", PIXEL_BYTES * size[0] * size[1])
        picture = _of_size(picture, size, reading.fit)
    planes = np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
    return Fitted(planes, None, False) if picture.mode == opaque else Fitted(planes[:-1], planes[-1], clear)


def _of_size(picture: "Image", size: tuple[int, int], fit: str) -> "Image":
    """By Pillow's antialiased bilinear filter. Padding is transparent."""
    from PIL import Image

    (height, width), bilinear = size, Image.Resampling.BILINEAR
    across, down = width / picture.width, height / picture.height
    if fit == "stretch" or across == down:
        return picture.resize((width, height), bilinear)
    if fit == "crop":
        scale = max(across, down)
        x, y = max(0.0, (picture.width - width / scale) / 2), max(0.0, (picture.height - height / scale) / 2)
        return picture.resize((width, height), bilinear, box=(x, y, picture.width - x, picture.height - y))
    scale = min(across, down)
    inside = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    canvas = Image.new(picture.mode, (width, height))
    canvas.paste(picture.resize(inside, bilinear), ((width - inside[0]) // 2, (height - inside[1]) // 2))
    return canvas
