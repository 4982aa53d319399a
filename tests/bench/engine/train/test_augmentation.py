"""Augmentation: crops, flips and erasing by hand, RandAugment's operations against Pillow's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from caster.models.preprocessing import Preprocessing
from caster_bench.engine.train import augmentation
from caster_bench.engine.train.augmentation import OPERATIONS, Pool, affine, erase, randaugment
from caster_bench.engine.train.recipe import Recipe

PLAIN = Recipe(
    optimizer="sgd", lr=0.1, weight_decay=0.0, epochs=1, warmup=0, batch_size=4, operations=0
)


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(n=10, size=32) -> torch.Tensor:
    """Images whose pixels hold the number of the image, the row and the column."""
    at = torch.arange(size)
    parts = (torch.arange(n)[:, None, None], at[:, None] + 1, at + 1)
    return torch.stack(torch.broadcast_tensors(*parts), dim=3).to(torch.uint8)


def test_batches_are_crops_of_the_images():
    pool = Pool.of(numbered(), torch.arange(10), (0.0,) * 3, (1 / 255,) * 3)  # pixels as they are
    seen, moves = [], set()
    for batch, labels in pool.batches(PLAIN, generator()):
        assert batch.shape == (4, 3, 32, 32)
        for image, code in zip(batch.round().int(), labels, strict=True):
            inside = image[1] > 0
            assert set(image[0][inside].tolist()) == {int(code)}
            rows, columns = image[1][inside].unique(), image[2][inside].unique()
            assert len(rows) >= 28
            assert len(columns) >= 28  # 4 pixels of border at most
            flipped = bool(image[2, 16, 15] > image[2, 16, 16])
            top = int(image[1, 16, 16]) - 17
            moves.add((flipped, top))
            assert -4 <= top <= 4
        seen += labels.tolist()
    assert len(seen) == len(set(seen)) == 8  # two of ten are left over
    assert {flipped for flipped, _ in moves} == {True, False}
    assert len({top for _, top in moves}) > 2


def test_chunks_of_several_batches(monkeypatch):
    monkeypatch.setattr(augmentation, "CHUNK", 8)  # two batches, and one at the end
    pool = Pool.of(numbered(22), torch.arange(22), (0.0,) * 3, (1 / 255,) * 3)
    batches = list(pool.batches(replace(PLAIN, operations=1, erase=0.5), generator()))
    assert [len(labels) for _, labels in batches] == [4] * 5
    assert [batch.shape for batch, _ in batches] == [(4, 3, 32, 32)] * 5
    seen = torch.cat([labels for _, labels in batches]).tolist()
    assert len(set(seen)) == 20
    plain = list(pool.batches(PLAIN, generator()))
    for batch, labels in plain:  # images keep their classes
        assert [int(p[0][p[1] > 0].max()) for p in batch.round().int()] == labels.tolist()


def test_without_flips():
    pool = Pool.of(numbered(), torch.arange(10), (0.0,) * 3, (1 / 255,) * 3)
    for batch, _ in pool.batches(replace(PLAIN, flip=False), generator()):
        middle = batch[:, 2, 16].round()
        assert (middle[:, 16] > middle[:, 15]).all()


def test_pixels_are_normalised_as_preprocessing_does():
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    images = np.random.default_rng(0).integers(0, 256, size=(3, 8, 8, 3), dtype=np.uint8)
    scale, shift = affine(mean, std, torch.device("cpu"))
    ours = torch.from_numpy(images).permute(0, 3, 1, 2) * scale + shift
    expected = Preprocessing(1.0, mean, std, "NCHW").batch(images)
    np.testing.assert_array_equal(ours.numpy(), expected)


def test_randaugment_changes_about_half_of_the_images():
    images = torch.randint(0, 256, (220, 3, 32, 32), generator=generator(1), dtype=torch.uint8)
    result = randaugment(images, 9.0, generator())
    changed = (result != images).flatten(1).any(1)
    assert 0.35 < changed.float().mean() < 0.65
    negatives = (result == 255 - images).flatten(1).all(1).sum()
    share = len(images) / len(OPERATIONS)
    assert 0.2 * share < negatives < 0.9 * share  # a half of the twenty that are inverted
    assert torch.equal(randaugment(images, 9.0, generator()), result)
    assert not torch.equal(randaugment(images, 9.0, generator(2)), result)


def test_a_batch_of_fewer_images_than_operations():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert randaugment(images, 5.0, generator()).shape == images.shape


def test_erased_boxes():
    batch = torch.ones(400, 3, 32, 32)
    gone = erase(batch, 0.25, generator()) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    erased = gone.flatten(1).any(1)
    assert 0.15 < erased.float().mean() < 0.35
    for box in gone[erased, 0]:
        rows, columns = box.any(1).sum(), box.any(0).sum()
        assert box.sum() == rows * columns  # a box, and all of it inside
        assert 0.01 < box.float().mean() < 0.45


@pytest.mark.parametrize(("n", "size"), [(10, 4), (7, 6), (3, 2)])
def test_batches_are_even_for_mixup(n, size):
    pool = Pool.of(numbered(n), torch.arange(n), (0.0,) * 3, (1 / 255,) * 3)
    recipe = replace(PLAIN, batch_size=4 if n == 10 else 64)
    assert {len(labels) for _, labels in pool.batches(recipe, generator())} == {size}


# --- RandAugment's operations --------------------------------------------------------------


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
    assert np.array_equal(applied(augmentation.solarise, make_images(), strength), expected)


@pytest.mark.parametrize(("strength", "bits"), [(0.0, 8), (0.25, 7), (0.5, 6), (0.9, 4), (1.0, 4)])
def test_posterise_as_pillow(strength, bits):
    expected = by_pillow(lambda image: ImageOps.posterize(image, bits), make_images())
    assert np.array_equal(applied(augmentation.posterise, make_images(), strength), expected)


def test_invert_and_equalise_as_pillow():
    images = make_images()
    for ours, theirs in (
        (augmentation.invert, ImageOps.invert),
        (augmentation.equalise, ImageOps.equalize),
    ):
        assert np.array_equal(applied(ours, images, 0.5), by_pillow(theirs, images))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_equalise_as_pillow_on_few_colours(seed, colours):
    """Where steps of the histogram are 0, or all of it is one colour."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, colours, size=(2, 20, 20, 3), dtype=np.uint8)
    expected = by_pillow(ImageOps.equalize, images)
    assert np.array_equal(applied(augmentation.equalise, images, 1.0), expected)


def test_autocontrast_as_pillow():
    """To a level: Pillow truncates a product of floats, which may be just below a whole number."""
    ours = applied(augmentation.autocontrast, make_images(), 0.5)
    theirs = by_pillow(ImageOps.autocontrast, make_images())
    assert np.abs(ours.astype(int) - theirs).max() <= 1
    assert (ours[2:].max((1, 2)) == 255).all()
    assert (ours[2:].min((1, 2)) == 0).all()


def test_solarise_add_by_its_rule():
    images = make_images()
    expected = np.where(images < 128, np.minimum(255, images.astype(int) + int(110 * 0.75)), images)
    assert np.array_equal(applied(augmentation.solarise_add, images, 0.75), expected)


def affine_of(name: str, amount: float, side: int) -> tuple[float, ...]:
    """Pillow's coefficients, from positions in the result to positions in the image."""
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
    """Inside only: Pillow blends the edge with black. Every second image goes the other way."""
    images, side = make_images(), 32
    ours = applied(getattr(augmentation, name), images, strength).astype(int)
    for number, image in enumerate(images):
        amount = strength if number % 2 == 0 else -strength
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
        assert np.abs(ours[number] - moved)[inside].max() <= 1
        outside = ~np.pad(seen[..., 0] > 0, 3)
        far = outside[3:-3, 3:-3]
        for dy in range(-2, 3):
            for dx in range(-2, 3):
                far = far & outside[3 + dy : 3 + dy + side, 3 + dx : 3 + dx + side]
        assert (ours[number][far] == 128).all()


NO_STRENGTH = (augmentation.invert, augmentation.autocontrast, augmentation.equalise)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o not in NO_STRENGTH])
def test_strength_zero_changes_nothing(operation):
    assert np.array_equal(applied(operation, make_images(), 0.0), make_images())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_images_are_independent(operation):
    """Each image is augmented independently, except that every second one goes the other way."""
    images = torch.from_numpy(make_images()).permute(0, 3, 1, 2)
    strength = torch.linspace(0.2, 1.0, len(images))
    together = operation(images, strength)
    for first in range(0, len(images), 2):
        two = slice(first, first + 2)
        assert torch.equal(operation(images[two], strength[two]), together[two])
