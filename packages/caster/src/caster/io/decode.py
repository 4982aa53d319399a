"""One image file to RGB pixels, through Pillow (the extra `images`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image


ImageArray = NDArray[np.uint8]  # (H, W, 3), RGB
FORMATS = {  # Pillow's name of the format, by the suffix of the file; every Pillow reads these
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jfif": "JPEG",
    ".jpe": "JPEG",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pgm": "PPM",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
HEIF = (".heic", ".heif")


class UnreadableImage(CasterError):  # noqa: N818
    """An image that is there and cannot be decoded; the message names it and says why."""


@cache
def formats() -> Mapping[str, str]:
    """Format by suffix, of all that can be decoded here; Pillow's others may start a program.

    AVIF depends on how Pillow was built, HEIC on the package pillow-heif.
    """
    found = dict(FORMATS)
    with suppress(ImportError):
        from PIL import features

        if "avif" in features.modules and features.check("avif"):
            found[".avif"] = "AVIF"
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
        found |= dict.fromkeys(HEIF, "HEIF")
    return found


def decode(path: Path, limits: Limits = DEFAULT_LIMITS) -> ImageArray:
    """The pixels of a file as uint8 (H, W, 3) RGB.

    What the file holds counts, not its suffix, and it must be one of the `formats`. Its
    header must state no more pixels than the limit, which is checked before anything is decoded.
    A camera's note to turn the image (EXIF) is left alone, and so is transparency, as torchvision
    and timm do: a model sees what it was trained on. Pillow's warnings go where all warnings go;
    where the user made them errors, an image that causes one cannot be read.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise CasterError("reading images needs Pillow: pip install 'caster-tta[images]'") from None
    allowed = tuple(sorted(set(formats().values())))
    pillows = Image.MAX_IMAGE_PIXELS  # of the whole process: raised for a user who asks for more
    if pillows is not None and limits.pixels > max(pillows, DEFAULT_LIMITS.pixels):
        Image.MAX_IMAGE_PIXELS = limits.pixels
    try:
        with open_regular(path) as file, Image.open(file, formats=allowed) as image:
            width, height = image.size
            limits.check("pixels", width * height, f"it has {width:,} x {height:,} pixels")
            return _rgb(image)
    except UnidentifiedImageError:
        reason = (
            f"it is empty, damaged or in a format that is not allowed ({', '.join(allowed)} are)"
        )
    except MemoryError:
        reason = "not enough memory"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = _over_pillows_limit(str(error), limits)
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        reason = reason or type(error).__name__
    raise UnreadableImage(f"cannot read {path}: {reason}")


def _over_pillows_limit(message: str, limits: Limits) -> str:
    """Our line for an image that Pillow rejects, where it is over our limit too."""
    pixels = re.search(r"(\d+) pixels", message)
    try:
        limits.check("pixels", int(pixels[1]) if pixels else 0, "it is too large")
    except CasterError as error:
        return str(error)
    return message


def _rgb(image: Image) -> ImageArray:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of type {image.mode} have no fixed range: save 8 or 16 bits")
    # It changes no colour, and Pillow warns about one it cannot carry over.
    image.info.pop("transparency", None)
    return np.asarray(image.convert("RGB"))


def _from_16_bits(image: Image) -> ImageArray:
    """The upper byte, as Pillow reads 16-bit colour; its own conversion clips grey to white."""
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, np.newaxis], 3, axis=2)
