"""The nineteen common corruptions of Hendrycks and Dietterich (2019), at five severities."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster_bench.data.corruptions.constants import (
    CORRUPTIONS,
    Values,
    as_integer,
    check_corruption,
    constants_for,
)
from caster_bench.sweeps.spec import CORRUPTION_FAMILIES, REPORTED, SPARE

__all__ = ["CORRUPTIONS", "REPORTED", "SPARE", "ImageBatch", "corrupt"]

ImageBatch = NDArray[np.uint8]  # (N, H, W, 3)
Change = Callable[..., Values]

# A module for each family, which holds its spare corruption too.
MODULES = {name: family for family, names in CORRUPTION_FAMILIES.items() for name in names}
MODULES |= dict(zip(SPARE, CORRUPTION_FAMILIES, strict=True))
CHUNK_VALUES = 2**20  # values processed at once; larger chunks are no faster


def corrupt(
    images: ImageBatch,  # (N, H, W, 3)
    corruption: str,
    severity: int,  # 1 to 5
    seed: int = 0,
    **options: Any,  # for one corruption: frost takes `textures`
) -> ImageBatch:  # (N, H, W, 3)
    """Corrupt uint8 images.

    The random numbers of an image depend only on its pixels, the corruption, the severity and the
    seed: not on its position, the batch or the number of workers. The constants are CIFAR-C's for
    images of up to 32 pixels, Tiny-ImageNet-C's for up to 64, and ImageNet-C's for larger ones.

    >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
    >>> float(corrupt(images, "brightness", severity=3).mean())
    138.0
    """
    _check_images(images)
    change = _change(corruption, options)
    severity, seed = as_integer("severity", severity), as_integer("seed", seed)
    height, width = images.shape[1:3]
    constants = constants_for(corruption, severity, height, width)
    salt = f"{corruption} {severity} {seed} {(height, width)}:".encode()
    corrupted = np.empty(images.shape, dtype=np.uint8)
    for part in chunks(images.shape, CHUNK_VALUES):
        pixels = np.ascontiguousarray(images[part])
        rngs = [_image_rng(image, salt) for image in pixels]
        values = change(pixels / np.float32(255), constants, rngs, **options)
        corrupted[part] = np.clip(values, 0, 1) * 255  # truncates, as the reference does
    return corrupted


def _image_rng(
    image: ImageBatch,  # (H, W, 3), contiguous
    salt: bytes,
) -> np.random.Generator:
    digest = hashlib.sha256(salt)
    digest.update(image.data)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def _change(corruption: str, options: dict[str, Any]) -> Change:
    """Find the function of a corruption, and check that it takes the options."""
    module = import_module(f"{__name__}.{MODULES[check_corruption(corruption)]}")
    change: Change = getattr(module, corruption)
    _, _, _, *accepted = inspect.signature(change).parameters
    if unknown := [option for option in options if option not in accepted]:
        hint = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
        raise CasterError(f"{corruption} has no option {unknown[0]!r}: {hint}")
    return change


def _check_images(images: Any) -> None:
    if not isinstance(images, np.ndarray):
        problem = f"are of type {type(images).__name__}: give a NumPy array"
    elif images.dtype != np.uint8:
        problem = f"are {images.dtype}: give pixels from 0 to 255 as uint8"
    elif images.ndim == 3 and images.shape[-1] == 3:
        problem = f"are one image of shape {images.shape}: give images[None]"
    elif images.ndim == 4 and images.shape[1] == 3 != images.shape[-1]:
        problem = f"have shape {images.shape}: give images.transpose(0, 2, 3, 1)"
    elif images.ndim != 4 or images.shape[-1] != 3:
        problem = f"have shape {images.shape}: it must be (N, H, W, 3)"
    elif 0 in images.shape[1:]:
        problem = f"have shape {images.shape}: they have no pixels"
    else:
        return
    raise CasterError(f"the images {problem}")


def chunks(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """Split images into slices of at most `most` values, and at least one image.

    >>> list(chunks((5, 2, 2, 3), most=24))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    count, height, width, channels = shape
    step = max(most // (height * width * channels), 1)
    return (slice(start, start + step) for start in range(0, count, step))
