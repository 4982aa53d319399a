"""Noise: every value is disturbed independently."""

from __future__ import annotations

import numpy as np

from caster_bench.data.corruptions.constants import Rngs, Values


def gaussian_noise(images: Values, sigma: float, rngs: Rngs) -> Values:
    """Add noise of the same strength everywhere, as in low light: x + N(0, s²).

    >>> grey = np.full((1, 64, 64, 3), 0.5, dtype=np.float32)
    >>> round(float(gaussian_noise(grey, 0.1, [np.random.default_rng(0)]).std()), 2)
    0.1
    """
    return images + np.float32(sigma) * _normal(images, rngs)


def speckle_noise(images: Values, sigma: float, rngs: Rngs) -> Values:
    """Add noise in proportion to the value: x + x N(0, s²)."""
    return images + images * (np.float32(sigma) * _normal(images, rngs))


def shot_noise(images: Values, photons_at_white: float, rngs: Rngs) -> Values:
    """Count photons: Poisson(rate x) / rate."""
    expected = images * np.float64(photons_at_white)
    photons = np.empty_like(images)
    for mean, out, rng in zip(expected, photons, rngs, strict=True):
        out[...] = rng.poisson(mean)
    return photons / np.float32(photons_at_white)


def impulse_noise(images: Values, share: float, rngs: Rngs) -> Values:
    """Salt and pepper: replace values (not pixels) by 0 or 1 with equal probability.

    One number decides both whether and by which; scikit-image draws two, to the same odds.
    """
    draw = np.empty_like(images)
    for out, rng in zip(draw, rngs, strict=True):
        rng.random(out=out, dtype=np.float32)
    salted = np.where(draw < share / 2, np.float32(1), images)
    return np.where((draw >= share / 2) & (draw < share), np.float32(0), salted)


def _normal(images: Values, rngs: Rngs) -> Values:
    noise = np.empty_like(images)
    for out, rng in zip(noise, rngs, strict=True):
        rng.standard_normal(out=out, dtype=np.float32)
    return noise
