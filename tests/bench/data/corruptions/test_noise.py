"""Noise against its distribution, within five standard errors, with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from caster_bench.data.corruptions import corrupt
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET
from caster_bench.data.corruptions.noise import (
    gaussian_noise,
    impulse_noise,
    shot_noise,
    speckle_noise,
)

COUNT = 40  # images of 3072 values


def flat(value: float) -> np.ndarray:
    return np.full((COUNT, 32, 32, 3), value, dtype=np.float32)


def rngs() -> list[np.random.Generator]:
    return [np.random.default_rng([3, i]) for i in range(COUNT)]


def close(measured: float, expected: float, error: float) -> bool:
    return abs(measured - expected) < 5 * error


def constants(name: str) -> list[float]:
    return [*CIFAR[name], *IMAGENET[name]]


@pytest.mark.parametrize("sigma", constants("gaussian_noise"))
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_gaussian(sigma, value):
    noise = gaussian_noise(flat(value), sigma, rngs()).astype(np.float64) - value
    assert close(noise.mean(), 0, sigma / noise.size**0.5)
    assert close(noise.var(), sigma**2, sigma**2 * (2 / noise.size) ** 0.5)
    assert stats.kstest(noise.ravel()[:20000] / sigma, "norm").pvalue > 1e-4


@pytest.mark.parametrize("sigma", constants("speckle_noise"))
@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_speckle(sigma, value):
    noise = speckle_noise(flat(value), sigma, rngs()).astype(np.float64) - value
    if value == 0:
        assert not noise.any()
        return
    assert close(noise.mean(), 0, value * sigma / noise.size**0.5)
    assert close(noise.var(), (value * sigma) ** 2, (value * sigma) ** 2 * (2 / noise.size) ** 0.5)


@pytest.mark.parametrize("rate", constants("shot_noise"))
@pytest.mark.parametrize("value", [0.2, 1.0])
def test_shot(rate, value):
    photons = shot_noise(flat(value), rate, rngs()).astype(np.float64) * rate
    counts = np.rint(photons)
    assert np.abs(photons - counts).max() < 1e-4
    mean = value * rate
    assert close(counts.mean(), mean, (mean / counts.size) ** 0.5)
    fourth = 3 * mean**2 + mean  # the central moment of a Poisson distribution
    assert close(counts.var(), mean, ((fourth - mean**2) / counts.size) ** 0.5)
    for count in (int(mean), int(mean) + 1):
        share = stats.poisson.pmf(count, mean)
        assert close(np.mean(counts == count), share, (share * (1 - share) / counts.size) ** 0.5)


def test_no_light_no_photons():
    assert not shot_noise(flat(0), 5, rngs()).any()


@pytest.mark.parametrize("share", constants("impulse_noise"))
def test_impulse(share):
    noisy = impulse_noise(flat(0.5), share, rngs())
    assert set(np.unique(noisy)) == {0, 0.5, 1}
    half = share / 2
    for extreme in (0, 1):
        error = (half * (1 - half) / noisy.size) ** 0.5
        assert close(np.mean(noisy == extreme), half, error)
    lost = noisy != 0.5
    assert lost.any(axis=0).mean() > 1 - 2 * (1 - share) ** COUNT  # anywhere
    red, green, _ = (lost[..., channel].ravel() for channel in range(3))
    assert close(np.corrcoef(red, green)[0, 1], 0, red.size**-0.5)  # values, not pixels


def test_impulse_keeps_the_rest():
    images = np.random.default_rng(0).integers(1, 255, (8, 32, 32, 3), dtype=np.uint8)
    noisy = corrupt(images, "impulse_noise", 5)
    lost = noisy != images
    assert np.isin(noisy[lost], (0, 255)).all()
    assert close(lost.mean(), 0.07, (0.07 * 0.93 / images.size) ** 0.5)


@pytest.mark.parametrize("noise", [gaussian_noise, speckle_noise])
def test_everything_is_independent(noise):
    values = noise(flat(0.5), 0.1, rngs())[:, :, :, :] - np.float32(0.5)
    pairs = {
        "images": (values[1:], values[:-1]),
        "rows": (values[:, 1:], values[:, :-1]),
        "columns": (values[:, :, 1:], values[:, :, :-1]),
        "channels": (values[..., 1:], values[..., :-1]),
    }
    for one, other in pairs.values():
        assert close(np.corrcoef(one.ravel(), other.ravel())[0, 1], 0, one.size**-0.5)
