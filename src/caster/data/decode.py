"""One picture file to RGB pixels, through Pillow (the extra `images`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caster.errors import CasterError
from caster.frozen.preprocessing import Picture

if TYPE_CHECKING:
    from PIL.Image import Image


class UnreadablePicture(CasterError):  # noqa: N818
    """A picture that is there and cannot be decoded; the message names it and says why."""


def decode(path: Path) -> Picture:
    """The pixels of a file as uint8 (H, W, 3) RGB.

    What the file holds counts, not its suffix. A camera's note to turn the picture (EXIF) is left
    alone, and so is transparency, as torchvision and timm do: a model sees what it was trained on.
    Pillow's warnings go where all warnings go; where the user made them errors, a picture that
    causes one cannot be read.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise CasterError(
            "reading pictures needs Pillow: pip install 'caster-tta[images]'"
        ) from None
    try:
        with open(path, "rb") as file, Image.open(file) as image:
            return _rgb(image)
    except UnidentifiedImageError:
        reason = "it is empty, damaged or in no image format that Pillow knows"
    except MemoryError:
        reason = "not enough memory"
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        reason = reason or type(error).__name__
    raise UnreadablePicture(f"cannot read {path}: {reason}")


def _rgb(image: Image) -> Picture:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of type {image.mode} have no fixed range: save 8 or 16 bits")
    # It changes no colour, and Pillow warns about one it cannot carry over.
    image.info.pop("transparency", None)
    return np.asarray(image.convert("RGB"))


def _from_16_bits(image: Image) -> Picture:
    """The upper byte, as Pillow reads 16-bit colour; its own conversion clips grey to white."""
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, np.newaxis], 3, axis=2)
