"""What comes from outside: bodies of a limited size, and pictures of a limited number of pixels."""

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from recollect.data.readers import parsing
from recollect.errors import RecollectError

MOST_BYTES = 8 * 2**20  # of any body
MOST_PIXELS = 2**24  # of a picture, which a few bytes can claim to have


def picture(data: bytes) -> Image.Image:
    """A picture that was sent; its size is known, and refused, before anything is decoded."""
    remedy = "give a PNG, JPEG, WebP, GIF or BMP file"
    with parsing("the picture cannot be read", remedy):
        try:
            opened = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP", "GIF", "BMP"))
        except UnidentifiedImageError:
            raise RecollectError(f"this is not a picture: {remedy}") from None
        if opened.width * opened.height > MOST_PIXELS:
            raise RecollectError(f"the picture is {opened.width}x{opened.height}: give one of at most {MOST_PIXELS:,} pixels")
        opened.load()
        return ImageOps.exif_transpose(opened)
