"""A whole array of pictures corrupted, every picture by random numbers of its own."""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.data.corruptions.constants import CIFAR, IMAGENET
from caster.errors import CasterError

Pictures = NDArray[np.uint8]  # (N, H, W, 3)
Values = NDArray[np.float32]  # (N, H, W, 3), from 0 to 1
Change = Callable[..., Values]

HOME = {  # which module each is in
    "gaussian_noise": "noise",
    "shot_noise": "noise",
    "impulse_noise": "noise",
    "speckle_noise": "noise",
    "defocus_blur": "blur",
    "glass_blur": "blur",
    "motion_blur": "blur",
    "zoom_blur": "blur",
    "gaussian_blur": "blur",
    "snow": "weather",
    "frost": "weather",
    "fog": "weather",
    "spatter": "weather",
    "brightness": "digital",
    "contrast": "digital",
    "elastic_transform": "elastic",
    "pixelate": "digital",
    "jpeg_compression": "digital",
    "saturate": "digital",
}
SPARE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # for choosing constants
REPORTED = tuple(name for name in HOME if name not in SPARE)
CORRUPTIONS = (*REPORTED, *SPARE)
SMALL = 64  # pixels up to which CIFAR-C's constants are meant
AT_ONCE = 2**20  # numbers of a chunk that is worked on at once; larger ones are no faster


def corrupt(
    images: Pictures,  # (N, H, W, 3)
    corruption: str,
    severity: int,  # 1 to 5
    seed: int = 0,
    **options: Any,  # of one corruption: frost takes textures
) -> Pictures:
    """Pictures under a corruption, uint8 in and out.

    The random numbers of a picture depend on its pixels, the corruption, the severity and the
    seed, and on nothing else: not on its place, the batch or the number of workers. Constants are
    those of CIFAR-C for pictures of up to 64 pixels, and of ImageNet-C for larger ones.

    >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
    >>> float(corrupt(images, "brightness", severity=3).mean())
    138.0
    """
    _check_images(images)
    change = _change(corruption, options)
    severity, seed = _whole("severity", severity), _whole("seed", seed)
    constants = published(corruption, severity, images.shape[1], images.shape[2])
    salt = f"{corruption} {severity} {seed} {images.shape[1:3]}:".encode()
    corrupted = np.empty(images.shape, dtype=np.uint8)
    for part in _parts(images.shape):
        pictures = np.ascontiguousarray(images[part])
        rngs = [generator(picture, salt) for picture in pictures]
        values = change(pictures / np.float32(255), constants, rngs, **options)
        corrupted[part] = np.clip(values, 0, 1) * 255  # truncates, as the published ones do
    return corrupted


def published(corruption: str, severity: int, height: int, width: int) -> Any:
    """The constants of a corruption, for pictures of a size.

    >>> published("shot_noise", 5, 32, 32), published("shot_noise", 5, 224, 224)
    (50, 3)
    """
    if not 1 <= _whole("severity", severity) <= 5:
        raise CasterError(f"there is no severity {severity}: say 1, 2, 3, 4 or 5")
    table = CIFAR if max(height, width) <= SMALL else IMAGENET
    return table[known(corruption)][severity - 1]


def known(corruption: str) -> str:
    """The name of a corruption, if it is one.

    >>> known("fogg")
    Traceback (most recent call last):
    caster.errors.CasterError: there is no corruption 'fogg': did you mean 'fog'?
    """
    if corruption in CORRUPTIONS:
        return corruption
    near = get_close_matches(str(corruption), CORRUPTIONS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CORRUPTIONS)}"
    raise CasterError(f"there is no corruption {corruption!r}: {hint}")


def generator(
    picture: Pictures,  # (H, W, 3), contiguous
    salt: bytes,
) -> np.random.Generator:
    """Random numbers that belong to a picture under a corruption.

    >>> grey = np.zeros((2, 2, 3), dtype=np.uint8)
    >>> generator(grey, b"fog").random() == generator(grey.copy(), b"fog").random()
    True
    """
    digest = hashlib.sha256(salt)
    digest.update(picture.data)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Pieces of the array that are small enough to work on."""
    count, height, width, channels = shape
    step = max(AT_ONCE // (height * width * channels), 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _change(corruption: str, options: dict[str, Any]) -> Change:
    """The function that makes a corruption, once it is sure to take the options."""
    module = import_module(f"caster.data.corruptions.{HOME[known(corruption)]}")
    change: Change = getattr(module, corruption)
    _, _, _, *taken = inspect.signature(change).parameters
    if strange := [option for option in options if option not in taken]:
        takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise CasterError(f"{corruption} has no option {strange[0]!r}: {takes}")
    return change


def _check_images(images: Pictures) -> None:
    problem = ""
    if not isinstance(images, np.ndarray):
        problem = f"are of type {type(images).__name__}: give a NumPy array"
    elif images.dtype != np.uint8:
        problem = f"are {images.dtype}: give pixels from 0 to 255 as uint8"
    elif images.ndim == 3 and images.shape[-1] == 3:
        problem = f"are one picture of shape {images.shape}: give images[None]"
    elif images.ndim == 4 and images.shape[1] == 3 != images.shape[-1]:
        problem = f"have shape {images.shape}: give images.transpose(0, 2, 3, 1)"
    elif images.ndim != 4 or images.shape[-1] != 3:
        problem = f"have shape {images.shape}: it must be (N, H, W, 3)"
    elif 0 in images.shape[1:]:
        problem = f"have shape {images.shape}: there is no pixel in them"
    if problem:
        raise CasterError(f"the images {problem}")


def _whole(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise CasterError(f"{name} is {value!r}: it must be a whole number") from None
