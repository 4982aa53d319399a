"""Weather: fog, snow and frost; spatter has a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from caster_bench.data.corruptions.make import Values
from caster_bench.data.corruptions.motion import smeared
from caster_bench.data.corruptions.plasma import plasma, size_for
from caster_bench.data.corruptions.spatter import spatter
from caster_bench.data.corruptions.textures import textures_for
from caster_bench.data.corruptions.zoom import zoomed

__all__ = ["fog", "frost", "snow", "spatter"]

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of Rec. 601, as OpenCV's grey


def fog(
    images: Values,
    constants: tuple[float, float],  # weight of the fog, decay of its wibble
    rngs: Sequence[np.random.Generator],
) -> Values:
    """Clouds of a plasma fractal on top, dimmed so that the image's maximum can still be reached.

    >>> black = np.zeros((1, 8, 8, 3), dtype=np.float32)
    >>> float(fog(black, (1.5, 2), [np.random.default_rng(0)]).max())
    0.0
    """
    weight, decay = constants
    height, width = images.shape[1:3]
    clouds = plasma(size_for(height, width), decay, rngs)[:, :height, :width, np.newaxis]
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    dimmed = brightest / (brightest + np.float32(weight))
    foggy: Values = (images + np.float32(weight) * clouds.astype(np.float32)) * dimmed
    return foggy


def snow(
    images: Values,
    constants: tuple[float, float, float, float, float, float, float],
    rngs: Sequence[np.random.Generator],
) -> Values:
    """Flakes that fall at an angle, over a paler image.

    The constants: mean and sigma of the noise that flakes are made of, their zoom, the threshold
    below which there is none, radius and sigma of their motion blur, share of the image's own
    colours.

    >>> black = np.zeros((1, 32, 32, 3), dtype=np.float32)
    >>> light = (0.1, 0.2, 1, 0.6, 8, 3, 0.95)
    >>> round(float(snow(black, light, [np.random.default_rng(0)]).min()), 3)  # 5 % of 0.5
    0.025
    """
    mean, sigma, zoom, threshold, radius, blur, share = constants
    layers = np.stack([rng.normal(mean, sigma, images.shape[1:3]) for rng in rngs])
    layers = zoomed(layers, zoom)
    layers[layers < threshold] = 0
    # Whole bytes, as the reference writes a PNG for ImageMagick, and reads one back.
    grains = np.floor(np.clip(layers, 0, 1) * 255).astype(np.float32)[..., np.newaxis]
    angles = np.array([rng.uniform(-135, -45) for rng in rngs])
    flakes = np.rint(smeared(grains, radius, blur, angles)) / np.float32(255)
    grey = (images * LUMA).sum(axis=3, keepdims=True)
    pale = np.maximum(images, grey * np.float32(1.5) + np.float32(0.5))
    image = np.float32(share) * images + np.float32(1 - share) * pale
    snowy: Values = image + flakes + flakes[:, ::-1, ::-1]
    return snowy


def frost(
    images: Values,
    constants: tuple[float, float],  # weight of the image, weight of the texture
    rngs: Sequence[np.random.Generator],
    textures: str | Path | None = None,  # a folder of photographs of frost
) -> Values:
    """Ice on the window: a piece of a texture, cut out at random, on top of the image.

    The textures are drawn by `caster_bench.data.corruptions.textures`, or are the photographs in a
    folder, any of them. The published images were made with five photographs (the reference
    lists six and draws among the first five), which are no part of this library.

    >>> black = np.zeros((1, 32, 32, 3), dtype=np.float32)
    >>> icy = frost(black, (1, 0.2), [np.random.default_rng(0)])
    >>> bool(0 < icy.mean() < 0.2)
    True
    """
    of_image, of_texture = (np.float32(weight) for weight in constants)
    height, width = images.shape[1:3]
    choice = textures_for(height, width, textures)
    result = of_image * images
    for image, rng in zip(result, rngs, strict=True):
        texture = choice[rng.integers(len(choice))]
        row = rng.integers(texture.shape[0] - height + 1)
        column = rng.integers(texture.shape[1] - width + 1)
        piece = texture[row : row + height, column : column + width]
        image += of_texture * (piece / np.float32(255))
    return result
