"""RandAugment's operations against Pillow's, and against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from caster_bench.engine.train import operations
from caster_bench.engine.train.operations import OPERATIONS


def make_images(n=6, side=32, seed=0) -> np.ndarray:  # (n, side, side, 3)
    """Smooth images of different ranges, one of them of a single colour."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, size=(n, 5, 5, 3), dtype=np.uint8)
    large = [Image.fromarray(c).resize((side, side), Image.Resampling.BICUBIC) for c in coarse]
    made = np.stack([np.asarray(image) for image in large])
    made[0] = made[0] // 3 + 40
    made[1] = 77
    return made


def applied(operation, images: np.ndarray, strength) -> np.ndarray:
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    strengths = torch.full((len(images),), float(strength))
    result = operation(tensor, strengths)
    assert result.dtype == torch.uint8
    return result.permute(0, 2, 3, 1).numpy()


def by_pillow(change, images: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in images])


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_solarise_as_pillow(strength):
    threshold = 256 * (1 - strength)
    expected = by_pillow(lambda image: ImageOps.solarize(image, threshold), make_images())
    assert np.array_equal(applied(operations.solarise, make_images(), strength), expected)


@pytest.mark.parametrize(("strength", "bits"), [(0.0, 8), (0.25, 7), (0.5, 6), (0.9, 4), (1.0, 4)])
def test_posterise_as_pillow(strength, bits):
    expected = by_pillow(lambda image: ImageOps.posterize(image, bits), make_images())
    assert np.array_equal(applied(operations.posterise, make_images(), strength), expected)


def test_invert_and_equalise_as_pillow():
    images = make_images()
    for ours, theirs in (
        (operations.invert, ImageOps.invert),
        (operations.equalise, ImageOps.equalize),
    ):
        assert np.array_equal(applied(ours, images, 0.5), by_pillow(theirs, images))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_equalise_as_pillow_on_few_colours(seed, colours):
    """Where steps of the histogram are 0, or all of it is one colour."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, colours, size=(2, 20, 20, 3), dtype=np.uint8)
    expected = by_pillow(ImageOps.equalize, images)
    assert np.array_equal(applied(operations.equalise, images, 1.0), expected)


def test_autocontrast_as_pillow():
    """To a level: Pillow truncates a product of floats, which may be just below a whole number."""
    ours = applied(operations.autocontrast, make_images(), 0.5)
    theirs = by_pillow(ImageOps.autocontrast, make_images())
    assert np.abs(ours.astype(int) - theirs).max() <= 1
    assert (ours[2:].max((1, 2)) == 255).all()
    assert (ours[2:].min((1, 2)) == 0).all()


def test_solarise_add_by_its_rule():
    images = make_images()
    expected = np.where(images < 128, np.minimum(255, images.astype(int) + int(110 * 0.75)), images)
    assert np.array_equal(applied(operations.solarise_add, images, 0.75), expected)


def affine_of(name: str, amount: float, side: int) -> tuple[float, ...]:
    """Pillow's map, from a place in the result to one in the image, about the middle."""
    cos, sin = math.cos(math.radians(30 * amount)), math.sin(math.radians(30 * amount))
    a, b, d, e, x, y = {
        "rotate": (cos, -sin, sin, cos, 0, 0),
        "shear_x": (1, 0.3 * amount, 0, 1, 0, 0),
        "shear_y": (1, 0, 0.3 * amount, 1, 0, 0),
        "translate_x": (1, 0, 0, 1, 0.3 * amount * side, 0),
        "translate_y": (1, 0, 0, 1, 0, 0.3 * amount * side),
    }[name]
    middle = side / 2
    return (
        a, b, middle - a * middle - b * middle + x,
        d, e, middle - d * middle - e * middle + y,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_maps_as_pillow(name, strength):
    """Inside: at the edge Pillow interpolates with nothing. Every second image the other way."""
    images, side = make_images(), 32
    ours = applied(getattr(operations, name), images, strength).astype(int)
    for context, image in enumerate(images):
        amount = strength if context % 2 == 0 else -strength
        coefficients = affine_of(name, amount, side)
        moved, seen = (
            np.asarray(
                Image.fromarray(what).transform(
                    (side, side), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
                )
            ).astype(int)
            for what in (image, np.full_like(image, 255))
        )
        inside = np.pad(seen[1:-1, 1:-1, 0] == 255, 1)
        for axis in (0, 1):  # a pixel away from what is not seen
            inside &= np.roll(inside, 1, axis) & np.roll(inside, -1, axis)
        assert inside.sum() > side * side / 4
        assert np.abs(ours[context] - moved)[inside].max() <= 1
        outside = ~np.pad(seen[..., 0] > 0, 3)
        far = outside[3:-3, 3:-3]
        for dy in range(-2, 3):
            for dx in range(-2, 3):
                far = far & outside[3 + dy : 3 + dy + side, 3 + dx : 3 + dx + side]
        assert (ours[context][far] == 128).all()


WHOLE = (operations.invert, operations.autocontrast, operations.equalise)  # have no strength


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o not in WHOLE])
def test_no_strength_changes_nothing(operation):
    assert np.array_equal(applied(operation, make_images(), 0.0), make_images())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_images_do_not_meet(operation):
    """What becomes of an image is its own business, but for the side every second one goes to."""
    images = torch.from_numpy(make_images()).permute(0, 3, 1, 2)
    strength = torch.linspace(0.2, 1.0, len(images))
    together = operation(images, strength)
    for first in range(0, len(images), 2):
        two = slice(first, first + 2)
        assert torch.equal(operation(images[two], strength[two]), together[two])
