"""CoTTA's augmentations, against torchvision, colorsys, SciPy and plain cases."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import correlate1d

from caster.models.preprocessing import Preprocessing
from caster_bench.methods.gradient.augment import (
    COLOURS,
    Augmentation,
    blur,
    brighten,
    contrast,
    draw_seed,
    grey,
    raise_to,
    saturate,
    turn_hue,
    warp,
)
from caster_bench.methods.gradient.pixels import Scale

SIDES = [(8, 8), (6, 9), (32, 32)]


def pixels(height=8, width=8, n=3, channels=3, seed=0):
    return torch.from_numpy(
        np.random.default_rng(seed).uniform(size=(n, channels, height, width)).astype(np.float32)
    )


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_as_constructed_it_changes_nothing(sides, channels):
    images = pixels(*sides, channels=channels)
    torch.testing.assert_close(Augmentation()(images), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", COLOURS)
def test_every_colour_operation_has_a_neutral_value(name):
    images = pixels()
    neutral = getattr(Augmentation(), name)
    torch.testing.assert_close(COLOURS[name](images, neutral), images, atol=1e-6, rtol=0)
    assert not torch.allclose(COLOURS[name](images, neutral + 0.3), images, atol=1e-2)


def test_simple_cases_of_colours():
    images = torch.tensor([0.2, 0.4, 0.6]).reshape(1, 3, 1, 1).expand(2, 3, 2, 2)
    weight = 0.2989 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    assert brighten(images, 2.0)[0, :, 0, 0].tolist() == pytest.approx([0.4, 0.8, 1.0])
    assert grey(images)[0, 0, 0, 0].item() == pytest.approx(weight)
    assert saturate(images, 0.0)[0, :, 0, 0].tolist() == pytest.approx([weight] * 3)
    assert contrast(images, 0.0)[1, :, 1, 1].tolist() == pytest.approx([weight] * 3)
    assert raise_to(images, 2.0)[0, :, 0, 0].tolist() == pytest.approx([0.04, 0.16, 0.36])


def test_contrast_is_about_every_images_own_mean():
    images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    torch.testing.assert_close(contrast(images, 0.5), images, atol=1e-3, rtol=0)


CHANNEL = st.integers(0, 8).map(lambda level: level / 8)  # ties, black, white and greys too


@given(st.tuples(CHANNEL, CHANNEL, CHANNEL), st.floats(-1, 1))
def test_hue_turns_as_in_colorsys(colour, turn):
    h, s, v = colorsys.rgb_to_hsv(*colour)
    expected = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
    found = turn_hue(torch.tensor(colour).reshape(1, 3, 1, 1), turn).flatten()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("sides", SIDES)
def test_a_shift_moves_pixels_and_the_edge_goes_on(sides):
    images = pixels(*sides)
    right = torch.cat([images[..., :1], images[..., :1], images[..., :-2]], dim=3)
    down = torch.cat([images[:, :, :1], images[:, :, :-1]], dim=2)
    torch.testing.assert_close(warp(images, 0, 1, (2, 0)), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(warp(images, 0, 1, (0, 1)), down, atol=1e-5, rtol=0)


def test_a_quarter_turn_is_clockwise():
    images = pixels()
    turned = images.rot90(-1, (2, 3))
    torch.testing.assert_close(warp(images, 90, 1, (0, 0)), turned, atol=1e-5, rtol=0)


def test_twice_the_scale_shows_the_middle_half():
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    found = warp(ramp, 0, 2, (0, 0))[0, 0, 0]
    assert found.tolist() == pytest.approx([1.75, 2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25])


def test_a_margin_is_what_padding_by_the_edge_gives():
    images = pixels()
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="replicate")
    torch.testing.assert_close(warp(images, 0, 1, (0, 0), 2), padded, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sigma", [0.2, 0.5, 3.0])
def test_blur_against_scipy(sigma):
    images = pixels(12, 10)
    bell = np.exp(-0.5 * (np.arange(-2, 3) / sigma) ** 2)
    expected = images.double().numpy()
    for axis in (2, 3):
        expected = correlate1d(expected, bell / bell.sum(), axis=axis)
    np.testing.assert_allclose(blur(images, sigma), expected[:, :, 2:-2, 2:-2], atol=1e-6)


def test_a_narrow_blur_changes_nothing():
    images = pixels(12, 12)
    for sigma in (0.0, 0.001):
        assert torch.equal(blur(images, sigma), images[:, :, 2:-2, 2:-2])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("side", [32, 33])
def test_drawn_ones_against_torchvision(seed, side):
    """The chain of the reference: pad by the edge, turn, blur, crop the middle, flip."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F  # noqa: N812

    drawn = Augmentation.draw(generator(seed), side, side)
    images = pixels(side, side, seed=seed)
    adjust = {
        "brightness": F.adjust_brightness,
        "contrast": F.adjust_contrast,
        "saturation": F.adjust_saturation,
        "hue": F.adjust_hue,
        "gamma": lambda x, gamma: F.adjust_gamma(x.clamp(1e-8, 1.0), gamma),
    }
    expected = images
    for name in drawn.order:
        expected = adjust[name](expected, getattr(drawn, name))
    expected = F.pad(expected, [side // 2], padding_mode="edge")
    expected = F.affine(
        expected, drawn.angle, list(drawn.shift), drawn.scale, [0.0], InterpolationMode.BILINEAR
    )
    expected = F.gaussian_blur(expected, [5, 5], [drawn.blur] * 2)
    expected = F.center_crop(expected, [side])
    expected = F.hflip(expected) if drawn.flip else expected
    noise = torch.randn(images.shape, generator=generator(drawn.seed))
    expected = (expected + 0.005 * noise).clamp(0, 1)
    torch.testing.assert_close(drawn(images), expected, atol=2e-4, rtol=0)


def test_draws_fill_the_published_ranges():
    source = generator(1)
    drawn = [Augmentation.draw(source, 32, 48) for _ in range(1000)]
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
        "angle": (-15, 15),
        "scale": (0.9, 1.1),
        "blur": (0.001, 0.5),
    }
    for name, (low, high) in ranges.items():
        values = np.array([getattr(one, name) for one in drawn])
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    shifts = np.array([one.shift for one in drawn])
    assert shifts.min(axis=0).tolist() == [-6, -4]  # a sixteenth of 96 and of 64
    assert shifts.max(axis=0).tolist() == [6, 4]
    assert 0.45 < np.mean([one.flip for one in drawn]) < 0.55
    assert len({one.order for one in drawn}) == 120
    assert len({one.seed for one in drawn}) == 1000
    assert {one.noise for one in drawn} == {0.005}


def test_noise_has_its_deviation_and_every_image_its_own():
    images = torch.full((2, 3, 64, 64), 0.5)
    noisy = Augmentation(noise=0.01, seed=5)(images)
    assert noisy.std().item() == pytest.approx(0.01, rel=0.05)
    assert not torch.allclose(noisy[0], noisy[1])
    assert torch.equal(noisy, Augmentation(noise=0.01, seed=5)(images))


@pytest.mark.parametrize("n", [1, 2])
def test_images_of_a_batch_do_not_mix(n):
    drawn = Augmentation.draw(generator(3), 8, 8)
    both = pixels(n=2)
    noiseless = Augmentation(**{**vars(drawn), "noise": 0.0})
    torch.testing.assert_close(noiseless(both)[:n], noiseless(both[:n]), atol=1e-6, rtol=0)


def test_the_same_seed_draws_the_same_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    one, two = ([Augmentation.draw(g, 8, 8) for _ in range(3)] for g in (generator(), generator()))
    assert one == two
    assert draw_seed(generator(1)) != draw_seed(generator(2))
    one[0](pixels())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize("largest", [1.0, 255.0])
def test_pixels_of_a_stated_preprocessing(channels, largest):
    mean, std = (0.4 * largest, 0.5 * largest, 0.6 * largest), (0.2, 0.3 * largest, 0.4)
    how = Preprocessing(largest, mean, std, "NCHW", channels=channels)
    images = np.random.default_rng(0).integers(256, size=(4, 5, 6, 3), dtype=np.uint8)
    batch = torch.from_numpy(how.batch(images))
    scale = Scale.stated(how)
    expected = images.transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(scale.pixels(batch), expected, atol=1e-5)
    torch.testing.assert_close(
        scale.values(scale.pixels(batch), batch), batch, atol=1e-3, rtol=1e-4
    )


def test_a_batch_alone_says_what_is_black_and_white():
    batch = torch.tensor([-3.0, 1.0, 5.0]).reshape(1, 3, 1, 1)
    scale = Scale.of(batch)
    assert scale.pixels(batch).flatten().tolist() == [0.0, 0.5, 1.0]
    torch.testing.assert_close(scale.values(scale.pixels(batch), batch), batch)
    flat = torch.full((2, 3, 4, 4), 7.0)
    assert torch.equal(Scale.of(flat).values(Scale.of(flat).pixels(flat), flat), flat)


def test_what_lies_outside_is_clipped_and_the_dtype_kept():
    batch = torch.tensor([-9.0, 9.0], dtype=torch.bfloat16).reshape(2, 1, 1, 1)
    scale = Scale.normalised(0.5, 0.25).beside(batch)
    found = scale.values(scale.pixels(batch), batch)
    assert found.flatten().tolist() == [-2.0, 2.0]
    assert found.dtype == torch.bfloat16
