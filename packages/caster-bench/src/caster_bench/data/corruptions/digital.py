"""Changes of colour and coding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from caster.errors import CasterError
from caster_bench.data.corruptions.make import ImageBatch, Values

if TYPE_CHECKING:
    from PIL.Image import Image

Rngs = Sequence[np.random.Generator]


def brightness(
    images: Values,  # (n, H, W, 3)
    constants: float,  # what is added to the value of HSV
    rngs: Rngs,
) -> Values:
    """Every pixel brighter, of the hue and saturation it had.

    >>> pixel = np.array([[[[0.2, 0.4, 0.0]]]], dtype=np.float32)
    >>> brightness(pixel, 0.2, [np.random.default_rng(0)]).round(3).tolist()
    [[[[0.3..., 0.6..., 0.0]]]]
    """
    value = _largest(images)
    brighter: Values = np.minimum(value + np.float32(constants), 1)
    # All that HSV's way there and back does is to scale how far the channels lie below the value.
    scale: Values = np.divide(brighter, value, out=np.zeros_like(value), where=value > 0)
    return brighter - (value - images) * scale


def saturate(
    images: Values,  # (n, H, W, 3)
    constants: tuple[float, float],  # factor and offset of HSV's saturation
    rngs: Rngs,
) -> Values:
    """Colours paler or stronger, of the hue and value they had; grey has the hue of red."""
    factor, offset = (np.float32(constant) for constant in constants)
    value = _largest(images)
    below = value - images
    depth = _largest(below)  # the saturation is depth / value
    saturation: Values = np.divide(depth, value, out=np.zeros_like(value), where=value > 0)
    deeper: Values = value * np.clip(saturation * factor + offset, 0, 1)
    scale: Values = np.divide(deeper, depth, out=np.zeros_like(depth), where=depth > 0)
    red = np.array([0, 1, 1], dtype=np.float32)
    return value - np.where(depth > 0, below * scale, deeper * red)


def contrast(
    images: Values,  # (n, H, W, 3)
    constants: float,  # the factor
    rngs: Rngs,
) -> Values:
    """Every channel nearer to its mean over the image."""
    # Whole numbers add up to the same sum in any order, so that the batch has no say in it.
    sums = _levels(images).sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    mean: Values = (sums / (255 * images.shape[1] * images.shape[2])).astype(np.float32)
    return (images - mean) * np.float32(constants) + mean


def pixelate(
    images: Values,  # (n, H, W, 3)
    constants: float,  # the factor of the side
    rngs: Rngs,
) -> Values:
    """Smaller and back to its size, by the mean over boxes."""
    image = pillow()
    height, width = images.shape[1:3]
    small = max(int(width * constants), 1), max(int(height * constants), 1)

    def blocks(pixels: Image) -> Image:
        box = image.Resampling.BOX
        return pixels.resize(small, box).resize((width, height), box)

    return _each(images, blocks)


def jpeg_compression(
    images: Values,  # (n, H, W, 3)
    constants: int,  # the quality
    rngs: Rngs,
) -> Values:
    """Encoded as JPEG and decoded."""
    image = pillow()

    def coded(pixels: Image) -> Image:
        file = BytesIO()
        pixels.save(file, "JPEG", quality=constants)
        decoded: Image = image.open(file, formats=["JPEG"])
        return decoded

    return _each(images, coded)


def _largest(values: Values) -> Values:  # (n, H, W, 1)
    """The largest of the three channels; `max` takes ten times as long over so short an axis."""
    return np.maximum(np.maximum(values[..., :1], values[..., 1:2]), values[..., 2:])


def _levels(images: Values) -> ImageBatch:
    """The 256 levels the values were."""
    return np.rint(images * 255).astype(np.uint8)


def _each(images: Values, change: Callable[[Image], Image]) -> Values:
    """Images changed by Pillow one by one."""
    image = pillow()
    levels = _levels(images)
    for pixels in levels:
        pixels[...] = change(image.fromarray(pixels))
    return np.divide(levels, 255, dtype=np.float32)


def pillow() -> Any:
    """`PIL.Image`, or a line that says how to get it."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise CasterError(
            "pixelate and jpeg_compression need Pillow: pip install 'caster-tta[images]'"
        ) from None
    return Image
