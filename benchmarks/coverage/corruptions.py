"""The four spare corruptions: (N, 32, 32, 3) in [0, 1] in, the same out.

Constants as published for CIFAR-C.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[Any]
SEVERITIES = (1, 3, 5)


def speckle_noise(x: Array, severity: int, rng: np.random.Generator) -> Array:
    sigma = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return x + x * rng.normal(scale=sigma, size=x.shape)


def gaussian_blur(x: Array, severity: int, rng: np.random.Generator) -> Array:
    return _blur(x, (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1])


def spatter(x: Array, severity: int, rng: np.random.Generator) -> Array:
    """Thresholded blurred noise as water or mud; water without its published edge shading."""
    mean, sigma, blur, threshold, intensity, mud = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1.0, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )[severity - 1]
    liquid = _blur(rng.normal(mean, sigma, (*x.shape[:3], 1)), blur)
    if mud:
        cover = _blur((liquid > threshold).astype(np.float64), intensity)
        cover[cover < 0.8] = 0
        return x * (1 - cover) + cover * np.array([63, 42, 20]) / 255
    liquid[liquid < threshold] = 0
    peak = liquid.max(axis=(1, 2, 3), keepdims=True)
    cover = intensity * liquid / np.where(peak > 0, peak, 1)
    return x + cover * np.array([175, 238, 238]) / 255


def saturate(x: Array, severity: int, rng: np.random.Generator) -> Array:
    """HSV saturation s -> clip(factor * s + offset), in closed form: hue and value stay."""
    factor, offset = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    value = x.max(axis=-1, keepdims=True)
    chroma = value - x.min(axis=-1, keepdims=True)
    # Grey has no hue: HSV calls it 0, red.
    shape = np.where(chroma > 0, (value - x) / np.where(chroma > 0, chroma, 1), [0, 1, 1])
    saturation = chroma / np.where(value > 0, value, 1)
    return value * (1 - shape * np.clip(factor * saturation + offset, 0, 1))


def _blur(x: Array, sigma: float) -> Array:
    return gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest")


CORRUPTIONS = (speckle_noise, gaussian_blur, spatter, saturate)
CONDITIONS = ("clean", *(f"{c.__name__}-{s}" for c in CORRUPTIONS for s in SEVERITIES))


def corrupt(images: Array, condition: str) -> Array:
    """The uint8 images under one condition; its name is its seed."""
    if condition == "clean":
        return images
    name, severity = condition.split("-")
    corruption = next(c for c in CORRUPTIONS if c.__name__ == name)
    rng = np.random.default_rng(CONDITIONS.index(condition))
    changed = corruption(images / 255, int(severity), rng)
    return (np.clip(changed, 0, 1) * 255).astype(np.uint8)
