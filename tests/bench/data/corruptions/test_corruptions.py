"""Properties that all nineteen corruptions share."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caster_bench.data import corruptions
from caster_bench.data.corruptions import CORRUPTIONS, REPORTED, SPARE, corrupt
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET, TINY, constants_for
from tests.support.messages import error_line
from tests.support.scenes import scenes

RANDOM = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "elastic_transform")
# Not saturate, which first removes colour and then adds it, nor elastic_transform, whose affine map
# shrinks while the displacement grows.
WORSE = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "speckle_noise",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return float(10 * np.log10(255**2 / error))


error_of = partial(error_line, corrupt)


def test_fifteen_reported_and_four_spare():
    assert len(set(CORRUPTIONS)) == 19
    assert len(REPORTED) == 15
    assert set(SPARE) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}
    assert CORRUPTIONS == REPORTED + SPARE


def test_tables_have_the_same_structure():
    tables = CIFAR, TINY, IMAGENET
    assert all(set(table) == set(CORRUPTIONS) for table in tables)
    for name in CORRUPTIONS:
        assert all(len(table[name]) == 5 for table in tables)
        assert len({np.shape(entry) for table in tables for entry in table[name]}) == 1


def test_constants_by_size():
    assert constants_for("contrast", 1, 32, 32) == 0.75
    assert constants_for("jpeg_compression", 1, 64, 33) == 65
    assert constants_for("jpeg_compression", 1, 64, 65) == 25
    assert constants_for("elastic_transform", 2, 32, 32) == pytest.approx((1.6, 6.4, 2.24))
    assert constants_for("elastic_transform", 1, 224, 224) == pytest.approx((488, 170.8, 24.4))


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), severity=st.integers(1, 5))
def test_an_image_does_not_depend_on_its_batch(name, data, severity):
    height, width = data.draw(st.sampled_from([(32, 32), (33, 47), (24, 17), (70, 65)]))
    images = scenes(6, height, width, data.draw(st.integers(0, 9)))
    before = images.copy()
    whole = corrupt(images, name, severity, seed=7)
    assert np.array_equal(images, before)
    order = data.draw(st.permutations(range(6)))
    chunk = data.draw(st.integers(1, 4)) * height * width * 3
    with patch.object(corruptions, "CHUNK_VALUES", chunk):
        assert np.array_equal(corrupt(images[order], name, severity, seed=7), whole[order])
    one = data.draw(st.integers(0, 5))
    assert np.array_equal(corrupt(images[one : one + 1], name, severity, seed=7)[0], whole[one])


@pytest.mark.parametrize("name", ["elastic_transform", "contrast", "shot_noise"])
def test_large_images_and_workers(name):
    images = scenes(5, 120, 96)
    with ThreadPoolExecutor(3) as pool:
        parts = pool.map(lambda i: corrupt(images[i : i + 1], name, 2), range(5))
        assert np.array_equal(np.concatenate(list(parts)), corrupt(images, name, 2))


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_output_has_the_form_of_the_input(name, size):
    images = scenes(3, *size)
    images[1], images[2] = 0, 255
    before = images.copy()
    changed = corrupt(images, name, 3)
    assert changed.dtype == np.uint8
    assert changed.shape == images.shape
    assert np.array_equal(images, before)
    assert not np.array_equal(changed[0], images[0])
    empty = corrupt(images[:0], name, 3)
    assert empty.shape == (0, *size, 3)
    assert empty.dtype == np.uint8


@pytest.mark.parametrize("name", RANDOM)
def test_seed_severity_and_pixels_count(name):
    images = np.repeat(scenes(1, 32, 32), 2, axis=0)
    images[1, 0, 0, 0] ^= 1
    noise = corrupt(images, name, 4).astype(int) - images
    assert np.abs(noise[0] - noise[1]).sum() > 1000
    assert np.array_equal(corrupt(images, name, 4, seed=0), corrupt(images, name, 4))
    assert not np.array_equal(corrupt(images, name, 4, seed=1), corrupt(images, name, 4))


def test_the_random_numbers_are_the_documented_ones():
    """The documented seed reproduces bytes that were written once."""
    image = scenes(1, 5, 4)[0]
    digest = hashlib.sha256(b"gaussian_noise 2 -3 (5, 4):" + image.tobytes()).digest()
    noise = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(
        image.shape, dtype=np.float32
    )
    expected = np.clip(image / 255 + 0.06 * noise.astype(np.float64), 0, 1) * 255
    made = corrupt(image[np.newaxis], "gaussian_noise", np.int64(2), seed=-3)[0]
    assert np.array_equal(made, expected.astype(np.uint8))


@pytest.mark.parametrize("order", ["strided", "fortran", "read-only"])
def test_any_memory_order(order):
    images = scenes(4, 16, 16)
    expected = corrupt(images, "gaussian_noise", 1)
    if order == "strided":
        images = np.repeat(images, 2, axis=2)[:, :, ::2]
    elif order == "fortran":
        images = np.asfortranarray(images)
    else:
        images.setflags(write=False)
    assert np.array_equal(corrupt(images, "gaussian_noise", 1), expected)


@pytest.mark.parametrize("name", WORSE)
@pytest.mark.parametrize("side", [32, 96])
def test_worse_with_severity(name, side):
    images = scenes(24, side, side)
    ratios = [psnr(images, corrupt(images, name, severity)) for severity in range(1, 6)]
    assert ratios == sorted(ratios, reverse=True)
    assert len(set(ratios)) == 5


def test_errors():
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    assert "did you mean 'gaussian_blur'?" in error_of(images, "gausian_blur", 1)
    assert "choose from gaussian_noise, " in error_of(images, "???", 1)
    assert "no severity 6: choose 1, 2" in error_of(images, "fog", 6)
    assert "no severity 0" in error_of(images[:0], "fog", 0)
    assert "severity is 1.0: it must be an integer" in error_of(images, "fog", 1.0)
    assert "severity is True" in error_of(images, "fog", True)
    assert "seed is 'a'" in error_of(images, "fog", 1, seed="a")
    assert "contrast has no option 'folder': it takes none" in error_of(
        images, "contrast", 1, folder="x"
    )
    assert "are float64: give pixels from 0 to 255" in error_of(images / 255, "fog", 1)
    assert "give images[None]" in error_of(images[0], "fog", 1)
    assert "transpose(0, 2, 3, 1)" in error_of(images.transpose(0, 3, 1, 2), "fog", 1)
    assert "must be (N, H, W, 3)" in error_of(images[..., 0], "fog", 1)
    assert "no pixel" in error_of(images[:, :0], "fog", 1)
    assert "type list" in error_of(images.tolist(), "fog", 1)
