"""Noise: every value of an image is disturbed by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caster_bench.data.corruptions.make import Values

Rngs = Sequence[np.random.Generator]


def gaussian_noise(
    images: Values,  # (n, H, W, 3)
    constants: float,  # the standard deviation
    rngs: Rngs,
) -> Values:
    """Noise of the same strength everywhere, as in the dark: x + N(0, s²).

    >>> grey = np.full((1, 64, 64, 3), 0.5, dtype=np.float32)
    >>> round(float(gaussian_noise(grey, 0.1, [np.random.default_rng(0)]).std()), 2)
    0.1
    """
    return images + np.float32(constants) * _normal(images, rngs)


def speckle_noise(
    images: Values,  # (n, H, W, 3)
    constants: float,  # the standard deviation, relative to the value
    rngs: Rngs,
) -> Values:
    """Noise that grows with the light: x + x N(0, s²)."""
    return images + images * (np.float32(constants) * _normal(images, rngs))


def shot_noise(
    images: Values,  # (n, H, W, 3)
    constants: float,  # photons that make full white
    rngs: Rngs,
) -> Values:
    """Light counted photon by photon: Poisson(rate x) / rate."""
    expected = images * np.float64(constants)
    photons = np.empty_like(images)
    for mean, out, rng in zip(expected, photons, rngs, strict=True):
        out[...] = rng.poisson(mean)
    return photons / np.float32(constants)


def impulse_noise(
    images: Values,  # (n, H, W, 3)
    constants: float,  # the share of values that are lost
    rngs: Rngs,
) -> Values:
    """Salt and pepper: values, not pixels, are lost to 0 or 1, as often to the one as the other.

    One number decides both whether and which, where scikit-image draws two: the odds are the same.
    """
    lot = np.empty_like(images)
    for out, rng in zip(lot, rngs, strict=True):
        rng.random(out=out, dtype=np.float32)
    salted = np.where(lot < constants / 2, np.float32(1), images)
    return np.where((lot >= constants / 2) & (lot < constants), np.float32(0), salted)


def _normal(images: Values, rngs: Rngs) -> Values:
    """A standard normal number for every value."""
    noise = np.empty_like(images)
    for out, rng in zip(noise, rngs, strict=True):
        rng.standard_normal(out=out, dtype=np.float32)
    return noise
