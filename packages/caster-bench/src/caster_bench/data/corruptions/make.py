"""A whole array of images corrupted, every image by random numbers of its own."""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from caster.core.arrays import to_numpy
from caster.errors import CasterError
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET, TINY

ImageBatch = NDArray[np.uint8]  # (N, H, W, 3)
Values = NDArray[np.float32]  # (N, H, W, 3), from 0 to 1
Change = Callable[..., Values]
Images = TypeVar("Images")  # a NumPy array or a torch tensor

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
ON_DEVICE = tuple(  # those with a torch path; drops and a codec go on from pixel to pixel
    name for name in CORRUPTIONS if name not in ("jpeg_compression", "spatter")
)
CIFAR_SIDE, TINY_SIDE = 32, 64  # pixels up to which CIFAR-C's and Tiny-ImageNet-C's are meant
AT_ONCE = 2**20  # numbers of a chunk that is worked on at once; larger ones are no faster


def corrupt(
    images: Images,  # (N, H, W, 3) uint8: a NumPy array or, with a device, a torch tensor
    corruption: str,
    severity: int,  # 1 to 5
    seed: int = 0,
    device: Any = None,  # "cuda", "cpu" or a torch.device; None is NumPy
    **options: Any,  # of one corruption: frost takes textures
) -> Images:  # of the kind that was given
    """Images under a corruption, uint8 in and out.

    The random numbers of an image depend on its pixels, the corruption, the severity and the
    seed, and on nothing else: not on its place, the batch or the number of workers. Constants are
    those of CIFAR-C for images of up to 32 pixels, of Tiny-ImageNet-C for those of up to 64, and
    of ImageNet-C for larger ones.

    With a device the corruptions of `ON_DEVICE` are computed there, by torch, and the others by
    NumPy as always; a tensor comes back as a tensor on that device. Both paths have the same
    definitions, but random numbers of their own: they agree statistically, not byte for byte.

    >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
    >>> float(corrupt(images, "brightness", severity=3).mean())
    138.0
    >>> float(corrupt(images, "brightness", severity=3, device="cpu").mean())
    138.0
    """
    _check_images(images, device)
    change = _change(corruption, options)
    severity, seed = whole("severity", severity), whole("seed", seed)
    pixels: Any = images
    height, width = pixels.shape[1:3]
    constants = published(corruption, severity, height, width)
    salt = f"{corruption} {severity} {seed} {(height, width)}:".encode()
    if device is None:
        return cast(Images, _in_numpy(pixels, change, constants, salt, options))
    entry = _torch_path(device)
    place = entry.found(device)
    if corruption in ON_DEVICE:
        made = entry.corrupted(pixels, corruption, constants, salt, place, options)
    else:
        made = _in_numpy(to_numpy(pixels), change, constants, salt, options)
        made = entry.on_device(made, place) if is_torch_array(images) else made
    return cast(Images, made)


def _in_numpy(
    images: ImageBatch, change: Change, constants: Any, salt: bytes, options: dict[str, Any]
) -> ImageBatch:
    corrupted = np.empty(images.shape, dtype=np.uint8)
    for part in parts(images.shape, AT_ONCE):
        pixels = np.ascontiguousarray(images[part])
        rngs = [generator(image, salt) for image in pixels]
        values = change(pixels / np.float32(255), constants, rngs, **options)
        corrupted[part] = np.clip(values, 0, 1) * 255  # truncates, as the published ones do
    return corrupted


def _torch_path(device: Any) -> Any:
    """The module that works on a device; nothing else here imports torch."""
    try:
        return import_module("caster_bench.data.corruptions.on_device.entry")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise CasterError(
            f"device {str(device)!r} needs torch: pip install 'caster-tta[torch]'"
        ) from None


def published(corruption: str, severity: int, height: int, width: int) -> Any:
    """The constants of a corruption, for images of a size.

    >>> published("shot_noise", 5, 32, 32), published("shot_noise", 5, 224, 224)
    (50, 3)
    """
    if not 1 <= whole("severity", severity) <= 5:
        raise CasterError(f"there is no severity {severity}: say 1, 2, 3, 4 or 5")
    side = max(height, width)
    table = CIFAR if side <= CIFAR_SIDE else TINY if side <= TINY_SIDE else IMAGENET
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
    image: ImageBatch,  # (H, W, 3), contiguous
    salt: bytes,
) -> np.random.Generator:
    """Random numbers that belong to an image under a corruption.

    >>> grey = np.zeros((2, 2, 3), dtype=np.uint8)
    >>> generator(grey, b"fog").random() == generator(grey.copy(), b"fog").random()
    True
    """
    digest = hashlib.sha256(salt)
    digest.update(image.data)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def parts(shape: tuple[int, ...], at_once: int) -> Iterator[slice]:
    """Pieces of the array that are small enough to work on.

    >>> list(parts((5, 2, 2, 3), at_once=24))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    count, height, width, channels = shape
    step = max(at_once // (height * width * channels), 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _change(corruption: str, options: dict[str, Any]) -> Change:
    """The function that makes a corruption, once it is sure to take the options."""
    module = import_module(f"caster_bench.data.corruptions.{HOME[known(corruption)]}")
    change: Change = getattr(module, corruption)
    _, _, _, *taken = inspect.signature(change).parameters
    if strange := [option for option in options if option not in taken]:
        takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise CasterError(f"{corruption} has no option {strange[0]!r}: {takes}")
    return change


def _check_images(images: Any, device: Any) -> None:
    problem, tensor = "", is_torch_array(images)
    if tensor and device is None:
        problem = "are a tensor: name the device to work on, or give a NumPy array"
    elif not tensor and not isinstance(images, np.ndarray):
        problem = f"are of type {type(images).__name__}: give a NumPy array"
    elif (kind := str(images.dtype).removeprefix("torch.")) != "uint8":
        problem = f"are {kind}: give pixels from 0 to 255 as uint8"
    elif (shape := tuple(images.shape))[-1:] == (3,) and len(shape) == 3:
        problem = f"are one image of shape {shape}: give images[None]"
    elif len(shape) == 4 and shape[1] == 3 != shape[-1]:
        channels_last = "permute" if tensor else "transpose"
        problem = f"have shape {shape}: give images.{channels_last}(0, 2, 3, 1)"
    elif len(shape) != 4 or shape[-1] != 3:
        problem = f"have shape {shape}: it must be (N, H, W, 3)"
    elif 0 in shape[1:]:
        problem = f"have shape {shape}: there is no pixel in them"
    if problem:
        raise CasterError(f"the images {problem}")


def whole(name: str, value: Any) -> int:
    """A value that must be a whole number, and is none of the truth values.

    >>> whole("seed", 1.7)
    Traceback (most recent call last):
    caster.errors.CasterError: seed is 1.7: it must be a whole number
    """
    try:
        if isinstance(value, bool | np.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise CasterError(f"{name} is {value!r}: it must be a whole number") from None
