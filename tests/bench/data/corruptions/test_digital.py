"""Brightness, saturation, contrast, pixelation and JPEG against their definitions."""

from __future__ import annotations

import colorsys
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image
from scipy.fft import dctn, idctn

from caster import CasterError
from caster_bench.data.corruptions import corrupt
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET, TINY
from caster_bench.data.corruptions.digital import (
    contrast,
    jpeg_compression,
    pixelate,
    saturate,
)
from caster_bench.data.corruptions.weather import brightness
from tests.support.scenes import scenes

NONE = [np.random.default_rng(0)] * 2
# Table K.1 of ITU-T T.81, which libjpeg scales by the quality
LUMINANCE = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)


def colours() -> np.ndarray:
    """Random pixels with black, white, greys and pure colours: float32 (2, 9, 7, 3)."""
    levels = np.random.default_rng(1).integers(0, 256, (2, 9, 7, 3))
    levels[0, 0] = [[k, k, k] for k in (0, 1, 100, 200, 254, 255, 7)]
    levels[0, 1, :6] = np.eye(6, 3) * 255
    levels[1, 0, :2] = [[9, 9, 8], [255, 254, 254]]
    return levels.astype(np.float32) / np.float32(255)


def by_hsv(images, change) -> np.ndarray:
    result = np.empty(images.shape)
    for at in np.ndindex(images.shape[:3]):
        result[at] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*images[at].astype(float))))
    return result


@pytest.mark.parametrize("added", [*CIFAR["brightness"], *IMAGENET["brightness"]])
def test_brightness(added):
    expected = by_hsv(colours(), lambda h, s, v: (h, s, min(v + added, 1)))
    np.testing.assert_allclose(brightness(colours(), added, NONE), expected, atol=1e-6)


@pytest.mark.parametrize("entry", [*CIFAR["saturate"], *IMAGENET["saturate"]])
def test_saturate(entry):
    factor, offset = entry
    expected = by_hsv(colours(), lambda h, s, v: (h, min(s * factor + offset, 1), v))
    np.testing.assert_allclose(saturate(colours(), entry, NONE), expected, atol=1e-5)


@pytest.mark.parametrize("factor", [*CIFAR["contrast"], *IMAGENET["contrast"]])
def test_contrast(factor):
    images = colours()
    changed = contrast(images, factor, NONE)
    for image, result in zip(images.astype(np.float64), changed, strict=True):
        for channel in range(3):
            mean = math.fsum(image[..., channel].ravel()) / image[..., channel].size
            expected = mean + factor * (image[..., channel] - mean)
            np.testing.assert_allclose(result[..., channel], expected, atol=1e-6)


@pytest.mark.parametrize("severity", range(1, 6))
def test_levels_are_truncated(severity):
    greys = np.arange(256, dtype=np.uint8)[:, np.newaxis, np.newaxis, np.newaxis]
    images = np.broadcast_to(greys, (256, 2, 2, 3))
    added = Fraction(str(CIFAR["brightness"][severity - 1])) * 255
    expected = [min(math.floor(k + added), 255) for k in range(256)]
    assert corrupt(images, "brightness", severity)[:, 1, 1, 2].tolist() == expected


def test_values_are_clipped():
    images = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    dark = corrupt(images, "gaussian_noise", 5)
    assert 0.4 < np.mean(dark == 0) < 0.6  # half of the noise is negative
    assert dark.max() < 255 * 0.1 * 6


@pytest.mark.parametrize("name", ["pixelate", "jpeg_compression"])
@pytest.mark.parametrize("severity", [1, 5])
def test_as_pillow_does(name, severity, tmp_path):
    images = scenes(2, 33, 47)
    constant = TINY[name][severity - 1]
    for image, changed in zip(images, corrupt(images, name, severity), strict=True):
        if name == "pixelate":
            small = int(47 * constant), int(33 * constant)
            shrunk = Image.fromarray(image).resize(small, Image.Resampling.BOX)
            expected = shrunk.resize((47, 33), Image.Resampling.BOX)
        else:
            Image.fromarray(image).save(tmp_path / "a.jpg", quality=constant)
            expected = Image.open(tmp_path / "a.jpg")
        assert np.array_equal(changed, np.asarray(expected))


def test_pixelate_means_over_blocks():
    levels = np.random.default_rng(0).integers(0, 256, (2, 6, 8, 3))
    pairs = (levels[:, :, ::2] + levels[:, :, 1::2] + 1) // 2  # rounds up, along rows first
    blocks = (pairs[:, ::2] + pairs[:, 1::2] + 1) // 2
    expected = blocks.repeat(2, axis=1).repeat(2, axis=2)
    got = pixelate(levels.astype(np.float32) / np.float32(255), 0.5, NONE) * 255
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_pixelate_leaves_at_least_a_pixel():
    image = np.random.default_rng(0).random((1, 3, 1, 3), dtype=np.float32)
    assert np.ptp(pixelate(image, 0.25, NONE), axis=1).max() == 0


@pytest.mark.parametrize("quality", [80, 50, 40, 7])
def test_jpeg_rounds_cosines(quality):
    """A grey image, with SciPy's transform and the standard's table."""
    grey = scenes(1, 32, 32)[0, ..., 0]
    percent = 200 - 2 * quality if quality >= 50 else 5000 // quality
    table = np.clip((LUMINANCE * percent + 50) // 100, 1, 255)
    expected = np.empty(grey.shape)
    for row, column in np.ndindex(4, 4):
        block = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
        cosines = dctn(grey[block] - 128.0, norm="ortho")
        expected[block] = idctn(np.rint(cosines / table) * table, norm="ortho") + 128
    image = np.repeat(grey[np.newaxis, ..., np.newaxis], 3, axis=3) / np.float32(255)
    got = jpeg_compression(image, quality, NONE)[0, ..., 0] * 255
    # A coefficient halfway between two steps may be rounded either way, in a few blocks.
    assert np.quantile(np.abs(got - np.clip(expected, 0, 255)), 0.9) < 1
    assert np.abs(got - grey).mean() > 0.3


@pytest.mark.parametrize("name", ["pixelate", "jpeg_compression"])
def test_without_pillow(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CasterError, match=r"pip install 'caster-tta\[images\]'"):
        corrupt(scenes(1, 8, 8), name, 1)
