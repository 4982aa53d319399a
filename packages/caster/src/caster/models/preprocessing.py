"""Convert decoded images to the batches that a model expects: fully specified, never guessed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.files import read_toml
from caster.io.image_files import ImageArray

INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
REQUIRED = ("range", "mean", "std", "layout")
CHANNELS = {"RGB": 3, "BGR": 3, "grey": 1}
LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)  # Pillow's weights of red, green and blue


@dataclass(frozen=True)
class Preprocessing:
    """The steps from a decoded RGB image to a row of a batch: resize, crop, scale, normalise.

    >>> half = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")
    >>> half.batch([np.full((2, 2, 3), 255, dtype=np.uint8)]).shape
    (1, 3, 2, 2)
    """

    range: float  # largest pixel value: 1 or 255
    mean: tuple[float, ...]  # per channel, in units of the range
    std: tuple[float, ...]  # per channel, in units of the range
    layout: str  # "NCHW" or "NHWC"
    resize: int | tuple[int, int] | None = None  # shorter side, or height and width
    interpolation: str | None = None  # of the resize
    crop: tuple[int, int] | None = None  # height and width of a centre crop
    channels: str = "RGB"  # or "BGR", also the order of mean and std; or "grey", a single channel
    dtype: str = "float32"  # or "float16", "uint8"

    def __post_init__(self) -> None:
        known = _is_number(self.range) and self.range in (1, 255)
        _check(known, f"range must be 1 or 255, not {self.range!r}")
        known = isinstance(self.channels, str) and self.channels in CHANNELS
        _check(known, f"channels must be RGB, BGR or grey, not {self.channels!r}")
        count = "three numbers" if self.depth == 3 else "one number"
        for name in ("mean", "std"):
            values = getattr(self, name)
            numbers = _has_length(values, self.depth) and all(map(_is_number, values))
            _check(numbers, f"{name} must be {count}, not {values!r}")
        _check(all(value > 0 for value in self.std), f"std must be above 0, not {self.std!r}")
        _check(self.layout in ("NCHW", "NHWC"), f"layout must be NCHW or NHWC, not {self.layout!r}")
        _check(
            self.dtype in ("float32", "float16", "uint8"),
            f"dtype must be float32, float16 or uint8, not {self.dtype!r}",
        )
        unchanged = self.range == 255 and set(self.mean) == {0} and set(self.std) == {1}
        _check(
            self.dtype != "uint8" or unchanged,
            "dtype uint8 leaves pixels unchanged: set range to 255, mean to 0 and std to 1",
        )
        _check(
            (self.resize is None) == (self.interpolation is None)
            and self.interpolation in (None, *INTERPOLATIONS),
            f"a resize needs an interpolation: one of {', '.join(INTERPOLATIONS)}",
        )
        for name in ("resize", "crop"):
            value = getattr(self, name)
            sides = (value, value) if name == "resize" and isinstance(value, int) else value
            whole = _has_length(sides, 2) and all(type(side) is int and side > 0 for side in sides)
            _check(value is None or whole, f"{name} must be positive integers, not {value!r}")

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file, in which `range`, `mean`, `std` and `layout` are required."""
        values, _ = read_toml(path)
        known = [field.name for field in fields(cls)]
        unknown = ", ".join(sorted(set(values) - set(known)))
        missing = [name for name in REQUIRED if name not in values]
        _check(not unknown, f"{path} has unknown keys: `{unknown}`; it may have {', '.join(known)}")
        _check(not missing, f"{path} lacks `{', '.join(missing)}`: there are no defaults for these")
        try:
            depth = CHANNELS.get(str(values.get("channels", "RGB")), 3)
            return cls(**{name: _from_toml(name, value, depth) for name, value in values.items()})
        except (CasterError, TypeError) as error:
            raise CasterError(f"{path}: {error}") from None

    @classmethod
    def in_graph(cls, layout: str, dtype: str, channels: str = "RGB") -> Self:
        """Leave pixels unchanged, 0 to 255, for a model that resizes and normalises them itself."""
        depth = CHANNELS[channels]
        return cls(255.0, (0.0,) * depth, (1.0,) * depth, layout, channels=channels, dtype=dtype)

    @classmethod
    def from_timm(cls, config: dict[str, Any]) -> Self:
        """Convert the result of timm's `resolve_model_data_config`."""
        channels, height, width = config["input_size"]
        mode, share = config["crop_mode"], config["crop_pct"]
        known = mode == "squash" or (mode == "center" and height == width)
        _check(
            known and channels == 3 and share <= 1,  # above 1 it pads with black
            f"timm's crop mode {mode!r} of {share} to {channels}x{height}x{width} is not "
            "supported: state the preprocessing in a TOML file",
        )
        scaled = tuple(math.floor(side / share) for side in (height, width))
        return cls(
            range=1.0,
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            layout="NCHW",
            resize=scaled[0] if mode == "center" else (scaled[0], scaled[1]),
            interpolation=config["interpolation"],
            crop=(height, width),
        )

    @property
    def depth(self) -> int:
        """Number of channels of a batch."""
        return CHANNELS[self.channels]

    @property
    def sha256(self) -> str:
        """Digest of the values; comments, key order and 1 for 1.0 make no difference."""
        mean, std = (tuple(map(float, values)) for values in (self.mean, self.std))
        values = asdict(self) | {"range": float(self.range), "mean": mean, "std": std}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def resize_and_crop(self, image: ImageArray, limits: Limits = DEFAULT_LIMITS) -> ImageArray:
        """Resize and crop an image; LimitError if the result would exceed the limit."""
        if self.resize is not None:
            image = _resized(image, self.resize, str(self.interpolation), limits)
        if self.crop is not None:
            image = _centre_crop(image, self.crop)
        return image

    def batch(
        self,
        images: Sequence[ImageArray] | ImageArray,
        empty: Callable[[tuple[int, ...], str], NDArray[Any]] = np.empty,
    ) -> NDArray[Any]:
        """Normalise resized images of one size into a batch, allocated with `empty`."""
        rgb = [p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 for p in images]
        _check(len(rgb) > 0 and all(rgb), "a batch needs images, uint8 (height, width, 3)")
        sizes = {image.shape[:2] for image in images}
        if len(sizes) > 1:
            some = " and ".join(f"{w}x{h}" for h, w in sorted(sizes)[:2])
            raise CasterError(
                f"images of a batch differ in size ({some}): add a resize to the preprocessing"
            )
        height, width = sizes.pop()
        shape = self._shape(height, width)
        batch = empty((len(images), *shape), self.dtype)
        for row, image in zip(batch, images, strict=True):  # one by one, to stay in the CPU cache
            self._fill(row, image)
        return batch

    def _fill(self, row: NDArray[Any], image: ImageArray) -> None:
        """Compute (pixel * range / 255 - mean) / std as one product and one sum."""
        if self.channels == "BGR":
            image = image[..., ::-1]
        elif self.channels == "grey":  # exact if red, green and blue are equal
            image = ((image @ LUMA + 2**15) >> 16).astype(np.uint8)[..., np.newaxis]
        if self.layout == "NCHW":
            image = image.transpose(2, 0, 1)
        scale, shift = self._affine
        if scale is None:
            row[...] = image
        elif row.dtype == np.float32:
            row[...] = image  # convert first: NumPy buffers products of mixed dtypes
            row *= scale
            row += shift
        else:  # compute in float32 and round once
            row[...] = image * scale + shift

    @property
    def value_range(self) -> tuple[NDArray[Any], NDArray[Any]]:  # (c, 1, 1) or (1, 1, c), each
        """Lowest and highest possible values of a batch, per channel.

        >>> half = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")
        >>> [float(end[0, 0, 0]) for end in half.value_range]
        [-1.0, 1.0]
        """
        black, white = self.batch([np.full((1, 1, 3), end, dtype=np.uint8) for end in (0, 255)])
        return black, white

    @cached_property
    def _affine(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Scale and shift per channel; None if pixels stay unchanged."""
        shape = self._shape(1, 1)
        std = np.asarray(self.std, dtype=np.float64)
        scale = (self.range / 255 / std).astype(np.float32).reshape(shape)
        shift = (-np.asarray(self.mean) / std).astype(np.float32).reshape(shape)
        unchanged = bool(np.all(scale == 1) and np.all(shift == 0))
        return (None, None) if unchanged else (scale, shift)

    def _shape(self, height: int, width: int) -> tuple[int, int, int]:
        nchw = self.layout == "NCHW"
        return (self.depth, height, width) if nchw else (height, width, self.depth)


def _from_toml(name: str, value: Any, depth: int) -> Any:
    """Turn lists into tuples, and a single number into one per channel or side."""
    if isinstance(value, list):
        return tuple(value)
    if name in ("mean", "std"):
        return (value,) * depth
    return (value, value) if name == "crop" else value


def _resized(
    image: ImageArray, size: int | tuple[int, int], interpolation: str, limits: Limits
) -> ImageArray:
    height, width = image.shape[:2]
    if isinstance(size, int):  # the shorter side; the longer one is truncated, as in torchvision
        short = min(height, width)
        size = (int(size * height / short), int(size * width / short))
    if size == (height, width):
        return image
    largest = size[1] * max(size[0], height)  # Pillow resizes horizontally first
    what = f"{width:,} x {height:,} pixels resized to {size[1]:,} x {size[0]:,} take {largest:,}"
    limits.check("pixels", largest, what)
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise CasterError("resizing needs Pillow: pip install 'caster-tta[images]'") from None
    how = Image.Resampling[interpolation.upper()]
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), how))


def _centre_crop(image: ImageArray, size: tuple[int, int]) -> ImageArray:
    height, width = image.shape[:2]
    if height < size[0] or width < size[1]:
        raise CasterError(
            f"an image of {width}x{height} is smaller than the crop of {size[1]}x{size[0]}: add a "
            "resize to the preprocessing"
        )
    top, left = (round((have - want) / 2) for have, want in zip((height, width), size, strict=True))
    return image[top : top + size[0], left : left + size[1]]


def _is_number(value: Any) -> bool:  # within the range of float32
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


def _has_length(values: Any, length: int) -> bool:
    return isinstance(values, tuple | list) and len(values) == length


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise CasterError(message)
