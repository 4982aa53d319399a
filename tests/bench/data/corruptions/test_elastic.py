"""The elastic transform against SciPy's resampling in float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter, map_coordinates

from caster_bench.data.corruptions import corrupt
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET
from caster_bench.data.corruptions.digital import elastic_transform, mirrored, reflected
from tests.support.scenes import scenes


def rngs(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng([5, i]) for i in range(count)]


def forward_matrix(corners: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The affine map from three points to three others: six equations for six numbers."""
    equations, right = [], []
    for (x, y), goal in zip(corners, moved, strict=True):
        equations += [[x, y, 1, 0, 0, 0], [0, 0, 0, x, y, 1]]
        right += list(goal)
    return np.vstack([np.linalg.solve(equations, right).reshape(2, 3), [0, 0, 1]])


def reference(image: np.ndarray, entry, rng: np.random.Generator) -> np.ndarray:
    length, sigma, shift = entry
    height, width, _ = image.shape
    middle, s = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = middle + np.array([[s, s], [s, -s], [-s, -s]])
    forward = forward_matrix(corners, corners + rng.uniform(-shift, shift, (3, 2)))
    y, x = np.mgrid[:height, :width].astype(float)
    from_x, from_y, _ = np.linalg.inv(forward) @ np.stack([x.ravel(), y.ravel(), np.ones(x.size)])
    warped = resampled(image, from_y.reshape(x.shape), from_x.reshape(x.shape), "mirror")
    if not length:
        return warped
    dx, dy = (
        gaussian_filter(rng.uniform(-1, 1, x.shape), sigma, mode="reflect", truncate=3) * length
        for _ in range(2)
    )
    return resampled(warped, y + dy, x + dx, "reflect")


def resampled(image: np.ndarray, y: np.ndarray, x: np.ndarray, mode: str) -> np.ndarray:
    channels = np.moveaxis(image, 2, 0)
    return np.stack([map_coordinates(c, [y, x], order=1, mode=mode) for c in channels], axis=2)


CASES = [
    *((entry, shape) for entry in CIFAR["elastic_transform"] for shape in ((32, 32), (33, 47))),
    *((entry, (96, 72)) for entry in IMAGENET["elastic_transform"]),
    (IMAGENET["elastic_transform"][0], (224, 224)),  # smoothed over more than the whole image
]


@pytest.mark.parametrize(("entry", "shape"), CASES)
def test_elastic(entry, shape):
    images = (scenes(2, *shape) / 255).astype(np.float32)
    changed = elastic_transform(images, entry, rngs(2))
    for image, got, rng in zip(images, changed, rngs(2), strict=True):
        expected = reference(image.astype(np.float64), entry, rng)
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("side", [1, 2, 3, 7])
def test_folding(side):
    """Like NumPy's padding, which also repeats beyond the second border."""
    places, beyond = np.arange(-3 * side, 4 * side), (3 * side, 3 * side)
    inside = np.arange(side)
    assert mirrored(places, side).tolist() == np.pad(inside, beyond, mode="reflect").tolist()
    assert reflected(places, side).tolist() == np.pad(inside, beyond, mode="symmetric").tolist()


@pytest.mark.parametrize("severity", range(1, 6))
def test_flat_stays_flat(severity):
    for level in (0, 37, 255):
        flat = np.full((1, 32, 32, 3), level, dtype=np.uint8)
        assert np.array_equal(corrupt(flat, "elastic_transform", severity), flat)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 3), (4, 1)])
@pytest.mark.parametrize("severity", [1, 5])
def test_images_of_a_few_pixels(shape, severity):
    image = np.random.default_rng(0).integers(0, 256, (3, *shape, 3), dtype=np.uint8)
    changed = corrupt(image, "elastic_transform", severity)
    assert (changed <= image.max(axis=(1, 2), keepdims=True)).all()
    assert (changed >= image.min(axis=(1, 2), keepdims=True)).all()


def test_the_centre_moves_with_the_expected_variance():
    """The displacement of a bright spot at the centre has the expected variance."""
    y, x = np.mgrid[:32, :32]
    hill = np.exp(-((y - 16) ** 2 + (x - 16) ** 2) / 18)[..., np.newaxis]
    images = np.repeat(hill, 3, axis=2)[np.newaxis].repeat(400, axis=0).astype(np.float32)
    changed = elastic_transform(images, (0, 0, 2.56), rngs(400))[..., 0].astype(np.float64)
    weight = changed.sum(axis=(1, 2))
    moved = (changed * x).sum(axis=(1, 2)) / weight - 16
    # The middle is half of the first and half of the third corner, each uniform within 2.56.
    expected = (2.56**2 / 3) / 2
    assert abs(moved.mean()) < 5 * (expected / 400) ** 0.5
    assert abs(moved.var() / expected - 1) < 5 * (2 / 400) ** 0.5
