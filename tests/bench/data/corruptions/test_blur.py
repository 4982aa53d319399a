"""Five blurs against loops written from their definitions, and laws of blurs."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from caster_bench.data.corruptions import blur
from caster_bench.data.corruptions.blur import axis_zoom, disk, displaced, half_gaussian, smear
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET

BLURS = ("gaussian_blur", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur")
SIZES = ((32, 32), (33, 47), (9, 40))


def rngs(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, i)) for i in range(count)]


def make_images(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Bytes as float32, from 0 to 1."""
    pixels = np.random.default_rng(seed).integers(256, size=(count, height, width, 3))
    return pixels.astype(np.float32) / np.float32(255)


def smooth_images(count: int, side: int) -> np.ndarray:
    noise = np.random.default_rng(1).normal(size=(count, side, side, 3))
    smooth = ndimage.gaussian_filter(noise, (0, side / 20, side / 20, 0), mode="wrap")
    return (0.5 + 0.15 * smooth / smooth.std()).clip(0, 1).astype(np.float32)


def run(name: str, images: np.ndarray, constants, seed: int = 0) -> np.ndarray:
    result = getattr(blur, name)(images, constants, rngs(len(images), seed))
    assert result.dtype == np.float32
    assert result.shape == images.shape
    return result


def weighted(image: np.ndarray, taps, border) -> np.ndarray:
    """The sum of weight times the pixel at an offset, in double precision."""
    height, width = image.shape[:2]
    total = np.zeros(image.shape)
    for row, column, weight in taps:
        rows = [border(r + row, height) for r in range(height)]
        columns = [border(c + column, width) for c in range(width)]
        total += weight * image.astype(np.float64)[rows][:, columns]
    return total


def clamped(index: int, size: int) -> int:
    return min(max(index, 0), size - 1)


def mirrored(index: int, size: int) -> int:
    """Without repeating the pixel at the edge."""
    while not 0 <= index < size:
        index = -index if index < 0 else 2 * (size - 1) - index
    return index


def gaussian_loop(image: np.ndarray, sigma: float) -> np.ndarray:
    reach = int(4 * sigma + 0.5)
    steps = range(-reach, reach + 1)
    weights = {s: math.exp(-s * s / (2 * sigma * sigma)) for s in steps}
    total = sum(weights.values())
    down = [(s, 0, weights[s] / total) for s in steps]
    across = [(0, s, weights[s] / total) for s in steps]
    return weighted(weighted(image, down, clamped), across, clamped)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sigma", [*CIFAR["gaussian_blur"], 2])
def test_gaussian(size, sigma):
    images = make_images(2, *size)
    blurred = run("gaussian_blur", images, sigma)
    for image, result in zip(images, blurred, strict=True):
        np.testing.assert_allclose(result, gaussian_loop(image, sigma), atol=1e-6)


def disk_loop(radius: float, sigma: float) -> dict[tuple[int, int], float]:
    reach, half = (8, 1) if radius <= 8 else (radius, 2)
    square = [(r, c) for r in range(-reach, reach + 1) for c in range(-reach, reach + 1)]
    inside = {(r, c) for r, c in square if r * r + c * c <= radius * radius}
    soft = {s: math.exp(-s * s / (2 * sigma * sigma)) for s in range(-half, half + 1)}
    norm = sum(soft.values()) ** 2 * len(inside)

    def back(index: int) -> int:
        return mirrored(index + reach, 2 * reach + 1) - reach

    return {
        (r, c): sum(
            soft[dr] * soft[dc] / norm
            for dr in soft
            for dc in soft
            if (back(r + dr), back(c + dc)) in inside
        )
        for r, c in square
    }


@pytest.mark.parametrize("constants", [*CIFAR["defocus_blur"], *IMAGENET["defocus_blur"]])
def test_defocus(constants):
    kernel = disk_loop(*constants)
    made = disk(*constants)
    reach = made.shape[0] // 2
    for (row, column), weight in kernel.items():
        assert made[row + reach, column + reach] == pytest.approx(weight, abs=1e-12)
    taps = [(row, column, weight) for (row, column), weight in kernel.items() if weight > 1e-14]
    images = make_images(1, 33, 47)
    expected = weighted(images[0], taps, mirrored)
    np.testing.assert_allclose(run("defocus_blur", images, constants)[0], expected, atol=1e-6)


def test_the_published_disk_of_radius_8_is_too_bright():
    assert disk(8, 0.5).sum() == pytest.approx(1.013, abs=5e-4)
    for radius, sigma in CIFAR["defocus_blur"]:
        assert disk(radius, sigma).sum() == pytest.approx(1, abs=1e-12)


def glass_loop(image: np.ndarray, constants, rng: np.random.Generator) -> np.ndarray:
    """Pixel by pixel, and by NumPy's rule for views: the pixel is overwritten, never swapped."""
    sigma, reach, rounds = constants
    pixels = np.floor(gaussian_loop(image, sigma) * 255 + 1e-4)
    height, width = image.shape[:2]
    for _ in range(rounds):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                right, down = rng.integers(-reach, reach, size=2)
                first, second = pixels[row, column], pixels[row + down, column + right]
                first[...] = second
    return gaussian_loop(pixels / 255, sigma)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("constants", [CIFAR["glass_blur"][0], CIFAR["glass_blur"][4], (0.4, 4, 2)])
def test_glass(size, constants):
    images = make_images(2, *size)
    made = run("glass_blur", images, constants)
    for image, result, rng in zip(images, made, rngs(2), strict=True):
        off = np.abs(result - glass_loop(image, constants, rng))
        # A value on the edge of two bytes may be truncated to either.
        assert np.quantile(off, 0.99) < 1e-6
        assert off.max() < 1.01 / 255


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_moves_no_pixel_further_than_its_chain(reach):
    height, width = 33, 47
    sources = displaced(height, width, reach, np.random.default_rng(0)).reshape(height, width)
    here = np.arange(height * width).reshape(height, width)
    assert (sources[: reach + 1] == here[: reach + 1]).all()
    assert (sources[:, : reach + 1] == here[:, : reach + 1]).all()
    assert (sources != here).mean() > 0.6 * (1 - 1 / (2 * reach) ** 2)
    if reach == 1:  # only pixels not displaced yet: one up, one left, both, or neither
        up, left = here // width - sources // width, here % width - sources % width
        moved = np.stack([up, left], axis=-1)[2:, 2:]
        assert set(map(tuple, moved.reshape(-1, 2))) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def motion_taps(radius: int, sigma: float, angle: float) -> list[tuple[int, int, float]]:
    weights = [math.exp(-i * i / (2 * sigma * sigma)) for i in range(2 * radius + 1)]
    down, across = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    return [
        (math.ceil(i * down - 0.5), math.ceil(i * across - 0.5), weight / sum(weights))
        for i, weight in enumerate(weights)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("constants", [CIFAR["motion_blur"][0], IMAGENET["motion_blur"][4]])
def test_motion(size, constants):
    images = make_images(3, *size)
    made = run("motion_blur", images, constants)
    for image, result, rng in zip(images, made, rngs(3), strict=True):
        taps = motion_taps(*constants, rng.uniform(-45, 45))
        expected = weighted(image, taps, clamped)
        assert np.abs(result - expected).max() <= 0.501 / 255
        np.testing.assert_allclose(result * 255, np.rint(result * 255), atol=1e-4)


def test_motion_is_one_sided():
    """At 0 degrees a bright pixel smears to its left only, at -90 downwards only."""
    dot = np.zeros((2, 33, 33, 1), dtype=np.float32)
    dot[:, 16, 16] = 1
    level, falling = smear(dot, 6, 2.0, np.array([0.0, -90.0]))[..., 0]
    np.testing.assert_allclose(level[16, 16:3:-1], half_gaussian(6, 2.0), atol=1e-7)
    np.testing.assert_allclose(falling[16:29, 16], half_gaussian(6, 2.0), atol=1e-7)
    assert level.sum() == pytest.approx(1, abs=1e-6)
    assert falling.sum() == pytest.approx(1, abs=1e-6)


def zoom_loop(image: np.ndarray, factor: float) -> np.ndarray:
    """SciPy's zoom of the centre, cropped to its centre."""
    crops = [math.ceil(size / factor) for size in image.shape[:2]]
    starts = [(size - crop) // 2 for size, crop in zip(image.shape, crops, strict=False)]
    middle = image[starts[0] : starts[0] + crops[0], starts[1] : starts[1] + crops[1]]
    large = ndimage.zoom(middle.astype(np.float64), (factor, factor, 1), order=1, mode="nearest")
    cut = [(a - b) // 2 for a, b in zip(large.shape, image.shape, strict=True)]
    return large[cut[0] : cut[0] + image.shape[0], cut[1] : cut[1] + image.shape[1]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("constants", [*CIFAR["zoom_blur"], *IMAGENET["zoom_blur"]])
def test_zoom(size, constants):
    images = make_images(2, *size)
    made = run("zoom_blur", images, constants)
    factors = np.arange(1, *constants)
    for image, result in zip(images, made, strict=True):
        zooms = [zoom_loop(image, factor) for factor in factors]
        expected = (image + sum(zooms)) / (len(zooms) + 1)
        np.testing.assert_allclose(result, expected, atol=1e-6)


@given(st.integers(1, 70), st.floats(1, 5))
def test_zoom_interpolates_neighbours(size, factor):
    matrix = axis_zoom(size, factor).toarray()
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    assert (np.diff(matrix @ np.arange(size)) > -1e-9).all()


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(BLURS),
    st.integers(0, 4),
    st.integers(0, 255),
    st.integers(4, 40),
    st.integers(),
)
def test_a_flat_image_is_unchanged(name, severity, grey, side, seed):
    images = np.full((1, side, side + 1, 3), grey, dtype=np.float32) / np.float32(255)
    result = run(name, images, CIFAR[name][severity], abs(seed))
    assert ((result * 255).astype(np.uint8) == grey).all()


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "motion_blur"])
@pytest.mark.parametrize("severity", range(5))
def test_mean_brightness_is_preserved(name, severity):
    """Light far from the borders is spread, not lost."""
    images = np.zeros((3, 71, 73, 3), dtype=np.float32)
    images[:, 28:45, 28:45] = make_images(3, 17, 17)
    result = run(name, images, CIFAR[name][severity])
    np.testing.assert_allclose(result.mean(axis=(1, 2)), images.mean(axis=(1, 2)), rtol=2e-3)


def fine_energy(images: np.ndarray) -> float:
    """Fraction of the power in the upper half of the frequencies."""
    power = np.abs(np.fft.fft2(images.mean(axis=3), axes=(1, 2))) ** 2
    rows, columns = (np.abs(np.fft.fftfreq(size)) for size in images.shape[1:3])
    fine = np.maximum(rows[:, np.newaxis], columns) > 0.25
    return float(power[:, fine].sum())


def steps(table: dict, name: str) -> list:
    """Distinct constants: motion blur at 32 pixels has the same weights at 3 and 4."""
    skipped = {3} if (name == "motion_blur" and table is CIFAR) else set()
    return [c for i, c in enumerate(table[name]) if i not in skipped]


# Not glass, which does not blur fine structure, nor large zooms, whose steps leave ghosts.
@pytest.mark.parametrize(
    ("name", "table"),
    [*((n, CIFAR) for n in BLURS if n != "glass_blur"), *((n, IMAGENET) for n in BLURS[:2])],
)
def test_fine_structure_falls_with_severity(name, table):
    side = 32 if table is CIFAR else 96
    images = make_images(12, side, side)
    left = [fine_energy(images), *(fine_energy(run(name, images, c)) for c in steps(table, name))]
    assert all(after < before for before, after in pairwise(left)), left


def squared_loss(name: str, table: dict) -> list[float]:
    images = smooth_images(12, 32 if table is CIFAR else 96)
    return [float(((run(name, images, c) - images) ** 2).mean()) for c in steps(table, name)]


@pytest.mark.parametrize("name", [name for name in BLURS if name != "glass_blur"])
@pytest.mark.parametrize("table", [CIFAR, IMAGENET], ids=["cifar", "imagenet"])
def test_worse_with_severity(name, table):
    lost = squared_loss(name, table)
    assert lost[0] > 0
    assert all(before < after for before, after in pairwise(lost)), lost


def test_glass_is_worse_with_rounds_and_reach():
    """The published constants are not ordered by squared error; these pairs are."""
    once, twice = np.split(np.array(squared_loss("glass_blur", CIFAR)), [3])
    assert 0 < once.max() < twice.min()
    near, far = np.split(np.array(squared_loss("glass_blur", IMAGENET)), [2])
    assert 0 < near.max() < far.min()
