"""Eight of the fifteen reported corruptions, (N, 32, 32, 3) in [0, 1] in and out; the spare four.

Constants as published for CIFAR-C.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import convolve

sys.path.append(str(Path(__file__).parents[1] / "coverage"))  # the spare corruptions

import corruptions as spare

Array = NDArray[Any]


def gaussian_noise(x: Array, severity: int, rng: np.random.Generator) -> Array:
    return x + rng.normal(scale=(0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1], size=x.shape)


def impulse_noise(x: Array, severity: int, rng: np.random.Generator) -> Array:
    """Salt or pepper on a share of all values, not of all pixels."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    struck = rng.random(x.shape)
    return np.where(struck < share, struck < share / 2, x)


def defocus_blur(x: Array, severity: int, rng: np.random.Generator) -> Array:
    """A disk, its edge softened by a Gaussian of 3 x 3."""
    constants = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
    radius, sigma = constants[severity - 1]
    at = np.arange(-3, 4)
    disk = ((at**2)[:, None] + at**2 <= radius**2).astype(float)
    soft = np.exp(-(np.arange(-1, 2) ** 2) / (2 * sigma**2))
    kernel = convolve(disk, np.outer(soft, soft), mode="constant")
    return convolve(x, (kernel / kernel.sum())[None, :, :, None], mode="mirror")


def fog(x: Array, severity: int, rng: np.random.Generator) -> Array:
    weight, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    peak = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + weight * plasma(len(x), decay, rng)[..., None]) * peak / (peak + weight)


def plasma(n: int, decay: float, rng: np.random.Generator, size: int = 32) -> Array:
    """Fractals by diamonds and squares on a torus, each from 0 to 1."""
    field, scale, step = np.zeros((n, size, size)), 1.0, size

    def between(*neighbours: Array) -> Array:
        noise = rng.uniform(-scale, scale, neighbours[0].shape)
        return sum(neighbours) / len(neighbours) + noise

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        below = np.roll(corners, -1, axis=1)
        right = np.roll(corners, -1, axis=2)
        centres = between(corners, below, right, np.roll(below, -1, axis=2))
        field[:, half::step, half::step] = centres
        field[:, ::step, half::step] = between(corners, right, centres, np.roll(centres, 1, axis=1))
        field[:, half::step, ::step] = between(corners, below, centres, np.roll(centres, 1, axis=2))
        step, scale = half, scale / decay**2  # published: noise times its range, which decays too
    field -= field.min(axis=(1, 2), keepdims=True)
    return field / field.max(axis=(1, 2), keepdims=True)


def brightness(x: Array, severity: int, rng: np.random.Generator) -> Array:
    """HSV value raised, in closed form: hue and saturation stay."""
    value = x.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1], 1)
    return np.where(value > 0, x * brighter / np.where(value > 0, value, 1), brighter)


def contrast(x: Array, severity: int, rng: np.random.Generator) -> Array:
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] + mean


def pixelate(x: Array, severity: int, rng: np.random.Generator) -> Array:
    side = int(x.shape[1] * (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1])

    def change(picture: Image.Image) -> Image.Image:
        small = picture.resize((side, side), Image.Resampling.BOX)
        return small.resize(picture.size, Image.Resampling.BOX)

    return each_picture(x, change)


def jpeg_compression(x: Array, severity: int, rng: np.random.Generator) -> Array:
    quality = (80, 65, 58, 50, 40)[severity - 1]

    def change(picture: Image.Image) -> Image.Image:
        file = BytesIO()
        picture.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return each_picture(x, change)


def each_picture(x: Array, change: Any) -> Array:
    """What Pillow makes of every picture."""
    pictures = np.round(x * 255).astype(np.uint8)
    return np.stack([np.asarray(change(Image.fromarray(p))) for p in pictures]) / 255


REPORTED = (
    gaussian_noise,
    fog,
    jpeg_compression,
    contrast,
    defocus_blur,
    impulse_noise,
    brightness,
    pixelate,
)
SPARE = tuple(corruption.__name__ for corruption in spare.CORRUPTIONS)


def conditions(corruptions: tuple[Any, ...], severities: tuple[int, ...]) -> list[str]:
    """Names of conditions, as "fog-5"; what a run that is cut off must have comes first."""
    names = [f"{corruption.__name__}-{s}" for s in severities for corruption in corruptions]
    return [*names[: len(corruptions)], "clean", *names[len(corruptions) :]]


def corrupt(images: Array, condition: str) -> Array:
    """The uint8 images under one condition; its name is its seed."""
    name, _, severity = condition.partition("-")
    if name in ("clean", *SPARE):
        return spare.corrupt(images, condition)
    number = [corruption.__name__ for corruption in REPORTED].index(name)
    # The streams of the spare ones have seeds of one number.
    rng = np.random.default_rng((number, int(severity)))
    changed = REPORTED[number](images / 255, int(severity), rng)
    # Truncates, as published; what is within rounding of a whole number is one.
    return (np.clip(changed, 0, 1) * 255 + 1e-9).astype(np.uint8)
