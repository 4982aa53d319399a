"""Fog, snow, frost and spatter against loops written from their definitions, and laws."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from caster_bench.data.corruptions import corrupt, textures, weather
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET
from caster_bench.data.corruptions.textures import plasma
from caster_bench.data.corruptions.weather import canny, water
from tests.support.messages import error_line
from tests.support.sampling import sampled

WEATHER = ("fog", "snow", "frost", "spatter")
SIZES = ((32, 32), (33, 47))
TABLES = {"cifar": (CIFAR, 32), "imagenet": (IMAGENET, 96)}


def rngs(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, i)) for i in range(count)]


def make_images(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth images, bytes as float32 from 0 to 1."""
    noise = np.random.default_rng(seed).normal(size=(count, height, width, 3))
    smooth = ndimage.gaussian_filter(noise, (0, 2, 2, 0), mode="wrap")
    bytes_ = np.floor(255 * (0.4 + 0.15 * smooth / smooth.std()).clip(0, 1))
    return bytes_.astype(np.float32) / np.float32(255)


def run(name: str, images: np.ndarray, constants, seed: int = 0, **options) -> np.ndarray:
    result = getattr(weather, name)(images, constants, rngs(len(images), seed), **options)
    assert result.dtype == np.float32
    assert result.shape == images.shape
    return result


def plasma_loop(size: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Point by point: squares, then the points above and left of their centres."""
    height = np.zeros((size, size))
    step, wibble = size, 100.0
    while step > 1:
        half = step // 2
        grid = [(r, c) for r in range(0, size, step) for c in range(0, size, step)]
        diagonal = [(-half, -half), (-half, half), (half, -half), (half, half)]
        straight = [(-half, 0), (half, 0), (0, -half), (0, half)]
        for down, right, around in (
            (half, half, diagonal),
            (0, half, straight),
            (half, 0, straight),
        ):
            for r, c in grid:
                known = [height[(r + down + a) % size, (c + right + b) % size] for a, b in around]
                noise = wibble * rng.uniform(-wibble, wibble)
                height[r + down, c + right] = sum(known) / 4 + noise
        step, wibble = half, wibble / decay
    height -= height.min()
    return height / height.max()


@pytest.mark.parametrize(("size", "decay"), [(2, 3), (8, 2), (32, 3), (32, 1.75), (64, 1.4)])
def test_plasma(size, decay):
    made = plasma(size, decay, rngs(3))
    for heights, rng in zip(made, rngs(3), strict=True):
        np.testing.assert_allclose(heights, plasma_loop(size, decay, rng), atol=1e-9)


def roughness(decay: float) -> float:
    heights = plasma(64, decay, rngs(20))
    return float((np.diff(heights, axis=1) ** 2).mean() / heights.var())


def test_a_slow_decay_makes_rough_clouds():
    assert roughness(3) < roughness(2) < roughness(1.5)


@pytest.mark.parametrize(("size", "side"), [((32, 32), 32), ((33, 47), 64), ((20, 9), 32)])
@pytest.mark.parametrize("constants", [CIFAR["fog"][0], IMAGENET["fog"][4]])
def test_fog(size, side, constants):
    weight, decay = constants
    images = make_images(2, *size)
    made = run("fog", images, constants)
    for image, result, rng in zip(images, made, rngs(2), strict=True):
        clouds = plasma_loop(side, decay, rng)[: size[0], : size[1], np.newaxis]
        image = image.astype(np.float64)
        expected = (image + weight * clouds) * image.max() / (image.max() + weight)
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("severity", range(5))
def test_fog_lights_the_dark_and_takes_contrast(severity):
    dark = 0.2 * make_images(20, 32, 32)
    dark[:, 0, 0] = 1
    changed = dark.copy()
    changed[:, 10:20, 10:20] += 0.1
    foggy, other = (run("fog", x, CIFAR["fog"][severity]) for x in (dark, changed))
    assert (foggy.mean(axis=(1, 2, 3)) > dark.mean(axis=(1, 2, 3))).all()
    factor = 1 / (1 + CIFAR["fog"][severity][0])
    np.testing.assert_allclose((other - foggy)[:, 10:20, 10:20], 0.1 * factor, atol=1e-6)


def snow_loop(image: np.ndarray, constants, rng: np.random.Generator) -> np.ndarray:
    mean, sigma, factor, threshold, radius, blur, share = constants
    height, width = image.shape[:2]
    layer = rng.normal(mean, sigma, (height, width))
    crop = [math.ceil(size / factor) for size in (height, width)]
    top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
    layer = ndimage.zoom(
        layer[top : top + crop[0], left : left + crop[1]], factor, order=1, mode="nearest"
    )
    top, left = (layer.shape[0] - height) // 2, (layer.shape[1] - width) // 2
    layer = layer[top : top + height, left : left + width]
    flakes = np.where(layer < threshold, 0, np.floor(layer.clip(0, 1) * 255))
    angle = math.radians(rng.uniform(-135, -45))
    weights = [math.exp(-(i**2) / (2 * blur**2)) for i in range(2 * radius + 1)]
    streaks = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            for i, weight in enumerate(weights):
                r = min(max(row + math.ceil(i * math.sin(angle) - 0.5), 0), height - 1)
                c = min(max(column + math.ceil(i * math.cos(angle) - 0.5), 0), width - 1)
                streaks[row, column] += weight / sum(weights) * flakes[r, c]
    streaks = np.rint(streaks) / 255
    result = np.empty(image.shape)
    for row in range(height):
        for column in range(width):
            red, green, blue = image[row, column].astype(np.float64)
            pale = 1.5 * (0.299 * red + 0.587 * green + 0.114 * blue) + 0.5
            both = streaks[row, column] + streaks[height - 1 - row, width - 1 - column]
            for channel, value in enumerate((red, green, blue)):
                mixed = share * value + (1 - share) * max(value, pale)
                result[row, column, channel] = mixed + both
    return result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "constants", [CIFAR["snow"][0], CIFAR["snow"][3], IMAGENET["snow"][3], CIFAR["snow"][4]]
)
def test_snow(size, constants):
    images = make_images(1, *size)
    made = run("snow", images, constants)
    off = np.abs(made[0] - snow_loop(images[0], constants, rngs(1)[0]))
    # A value on the edge of two bytes may go to either.
    assert np.quantile(off, 0.98) < 1e-6
    assert off.max() < 1.01 / 255


@pytest.mark.parametrize("constants", [*CIFAR["snow"], *IMAGENET["snow"]])
def test_snow_only_brightens(constants):
    images = make_images(4, 33, 47)
    assert (run("snow", images, constants) >= images - 1e-6).all()


@pytest.mark.parametrize("size", [*SIZES, (700, 90)])
def test_frost_is_a_crop_of_a_texture(size):
    images = make_images(4, *size)
    choice = textures.textures_for(*size)
    made = run("frost", images, (0.75, 0.45))
    assert np.array_equal(made, run("frost", images, (0.75, 0.45)))
    assert not np.array_equal(made, run("frost", images, (0.75, 0.45), seed=1))
    for image, result in zip(images, made, strict=True):
        piece = (result.astype(np.float64) - 0.75 * image) / 0.45 * 255
        assert any(contains(texture, np.rint(piece)) for texture in choice)


def contains(texture: np.ndarray, piece: np.ndarray) -> bool:
    """Whether a texture contains a crop."""
    height, width = piece.shape[:2]
    rows, columns = texture.shape[0] - height + 1, texture.shape[1] - width + 1
    corners = (texture[:rows, :columns] == piece[0, 0]).all(axis=2)
    return any(
        (texture[r : r + height, c : c + width] == piece).all() for r, c in np.argwhere(corners)
    )


# Weights of the image and of the texture, as make_cifar_c.py, make_tinyimagenet_c.py and
# make_imagenet_c.py have them.
FROST = {
    32: ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    64: ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
    224: ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
}


@pytest.mark.parametrize(("side", "severity"), sampled(product(FROST, range(1, 6)), 5))
def test_frost_by_its_published_weights(side, severity, tmp_path):
    """Black shows the texture times its weight, and a grey image adds its own share.

    Of a texture that is all one colour, every piece is the same, so the levels are exact.
    """
    from PIL import Image

    own, ice = FROST[side][severity - 1]
    colour = np.array([78, 149, 166])
    Image.new("RGB", (1200, 1200), tuple(colour.tolist())).save(tmp_path / "ice.png")
    for level in (0, 100, 255):
        flat = np.full((2, side, side, 3), level, dtype=np.uint8)
        exact = np.minimum(own * level + ice * colour, 255)
        made = corrupt(flat, "frost", severity, seed=3, textures=tmp_path)
        assert (np.abs(made - (exact - 0.5)) <= 0.5 + 1e-3).all()  # truncated


@pytest.mark.parametrize("severity", range(1, 6))
def test_black_under_frost_is_a_drawn_texture_times_its_weight(severity):
    """At 224 pixels: within the crop only the weight determines a level."""
    weight = FROST[224][severity - 1][1]
    (made,) = corrupt(np.zeros((1, 224, 224, 3), dtype=np.uint8), "frost", severity)
    dimmed = [
        (t * np.float64(weight) + 1e-3).astype(np.uint8) for t in textures.textures_for(224, 224)
    ]
    assert any(contains(texture, made) for texture in dimmed)


def test_textures_are_scaled_as_the_references_do():
    texture = textures.drawn(textures.ICE[4])
    assert np.array_equal(textures.textures_for(32, 32)[4], texture[2::5, 2::5])
    at = np.clip((np.arange(150) + 0.5) / 0.3 - 0.5, 0, 499)
    places = np.stack(np.broadcast_arrays(at[:, None, None], at[:, None], np.arange(3)))
    expected = ndimage.map_coordinates(texture.astype(np.float64), places, order=1)
    assert np.abs(textures.textures_for(64, 33)[4] - expected).max() <= 0.5 + 1e-9
    assert np.array_equal(textures.textures_for(65, 20)[4], texture)


def test_drawn_textures():
    again = [textures.drawn.__wrapped__(kind) for kind in textures.ICE]
    for kind, texture in zip(textures.ICE, again, strict=True):
        assert np.array_equal(texture, textures.drawn(kind))
        np.testing.assert_allclose(texture.mean(axis=(0, 1)), kind.colour, atol=1.5)
        brightness = texture.mean(axis=2) / 255
        assert brightness.std() == pytest.approx(kind.contrast, rel=0.03)
        # As rough as photographs of frost, whose neighbours differ by 0.29 to 0.46, and
        # 0.65 to 1.04 between every fifth pixel; white noise has 2.
        fine, coarse = brightness, brightness[2::5, 2::5]
        assert 0.2 < (np.diff(fine, axis=0) ** 2).mean() / fine.var() < 0.5
        assert 0.6 < (np.diff(coarse, axis=0) ** 2).mean() / coarse.var() < 1.2
    assert len({texture.tobytes() for texture in again}) == 5


def test_photographs(tmp_path):
    from PIL import Image

    photographs = np.random.default_rng(0).integers(256, size=(2, 203, 307, 3), dtype=np.uint8)
    for i, photograph in enumerate(photographs):
        Image.fromarray(photograph).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.txt").write_text("where they come from")
    large = textures.textures_for(100, 200, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(large, photographs, strict=True))
    small = textures.textures_for(32, 32, str(tmp_path))
    for a, b in zip(small, photographs, strict=True):
        # A fifth of the size: centres of new pixels, in the coordinates of the old.
        rows, columns = (
            [round((i + 0.5) / 0.2 - 0.5, 9) for i in range(round(size / 5))]
            for size in b.shape[:2]
        )
        assert all(at == int(at) for at in (*rows, *columns))
        assert np.array_equal(a, b[np.ix_(np.int64(rows), np.int64(columns))])
    black = np.zeros((3, 32, 32, 3), dtype=np.float32)
    for piece in run("frost", black, (1, 1), textures=tmp_path):
        assert any(contains(texture, np.rint(piece * 255)) for texture in small)


def test_unsuitable_photographs(tmp_path):
    from PIL import Image

    error_of = partial(error_line, textures.textures_for, 32, 32)
    assert "cannot read the textures" in error_of(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "has no texture" in error_of(tmp_path / "empty")
    (tmp_path / "small").mkdir()
    Image.new("RGB", (300, 150)).save(tmp_path / "small" / "ice.png")
    message = error_of(tmp_path / "small")
    assert "ice.png has 60 x 30 pixels after scaling by 0.2" in message
    (tmp_path / "small" / "ice.png").write_bytes(b"no image")
    textures.photographs.cache_clear()
    assert "ice.png" in error_of(tmp_path / "small")


def canny_loop(layer: np.ndarray, low: float, high: float) -> np.ndarray:
    """Pixel by pixel: gradient, thinning in four directions, then spreading from strong pixels."""
    height, width = layer.shape

    def at(row: int, column: int) -> int:
        return int(layer[min(max(row, 0), height - 1), min(max(column, 0), width - 1)])

    across, down, strength = {}, {}, {}
    for r in range(height):
        for c in range(width):
            column = [at(r + i, c + 1) - at(r + i, c - 1) for i in (-1, 0, 1)]
            row = [at(r + 1, c + i) - at(r - 1, c + i) for i in (-1, 0, 1)]
            across[r, c] = column[0] + 2 * column[1] + column[2]
            down[r, c] = row[0] + 2 * row[1] + row[2]
            strength[r, c] = abs(across[r, c]) + abs(down[r, c])
    candidates = set()
    for (r, c), own in strength.items():
        angle = math.degrees(math.atan2(abs(down[r, c]), abs(across[r, c])))
        if angle < 22.5:
            thin = own > strength.get((r, c - 1), 0) and own >= strength.get((r, c + 1), 0)
        elif angle > 67.5:
            thin = own > strength.get((r - 1, c), 0) and own >= strength.get((r + 1, c), 0)
        else:
            s = -1 if across[r, c] * down[r, c] < 0 else 1
            thin = own > max(strength.get((r - 1, c - s), 0), strength.get((r + 1, c + s), 0))
        if thin and own > low:
            candidates.add((r, c))
    edges = np.zeros(layer.shape, dtype=bool)
    todo = [place for place in candidates if strength[place] > high]
    while todo:
        r, c = todo.pop()
        if not edges[r, c]:
            edges[r, c] = True
            around = [(r + i, c + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            todo += [place for place in around if place in candidates]
    return edges


def drops(count: int, height: int, width: int, blur: float, seed: int = 0) -> np.ndarray:
    """Layers that spatter makes drops from, and faint ones for the lower threshold."""
    noise = np.random.default_rng(seed).normal(size=(count, height, width))
    smooth = ndimage.gaussian_filter(noise, (0, blur, blur))
    smooth /= smooth.std()
    return np.where(smooth > 0.8, (150 + 40 * smooth).clip(0, 255), 8 * smooth.clip(0, 3)).astype(
        np.uint8
    )


@pytest.mark.parametrize("blur", [0.3, 1, 2.5])
def test_canny(blur):
    layers = drops(6, 25, 31, blur)
    made = canny(layers, 50, 150)
    assert 0.02 < made.mean() < 0.6
    for layer, edges in zip(layers, made, strict=True):
        assert np.array_equal(edges, canny_loop(layer, 50, 150))


def chain_lengths(reach: int) -> np.ndarray:
    """Shortest paths from a corner of a grid, by relaxation."""
    lengths = np.full((reach + 5, reach + 5), np.inf)
    lengths[2, 2] = 0  # two rows and columns around it are never reached
    steps = {(0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.4, (1, 2): 2.1969, (2, 1): 2.1969}
    for row in range(2, reach + 3):
        for column in range(2, reach + 3):
            for (down, right), step in steps.items():
                before = lengths[row - down, column - right]
                lengths[row, column] = min(lengths[row, column], before + step)
    return lengths[2:-2, 2:-2]


def water_loop(layer: np.ndarray) -> np.ndarray:
    height, width = layer.shape
    edges = np.argwhere(canny_loop(layer, 50, 150))

    def around(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        padded = np.pad(values, 1, mode="reflect")
        return sum(
            weights[i, j] * padded[i : i + height, j : j + width]
            for i in range(3)
            for j in range(3)
        )

    relief = np.full((height, width), 20.0)
    lengths = chain_lengths(max(height, width))
    for place in np.ndindex(height, width) if len(edges) else ():
        relief[place] = min(20.0, lengths[tuple(np.abs(edges - place).T)].min())
    relief = np.floor(around(relief, np.full((3, 3), 1 / 9)) + 1e-6).astype(int)
    total, lowest = relief.size, relief.min()
    if (relief > lowest).any():
        scale = 255 / (total - (relief == lowest).sum())
        table = {v: ((relief <= v) & (relief > lowest)).sum() * scale for v in np.unique(relief)}
        relief = np.vectorize(table.get, otypes=[float])(relief).round()
    lit = around(relief, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])).clip(0, 255)
    light = layer * around(lit, np.full((3, 3), 1 / 9)).round()
    return light / max(light.max(), 1e-9)


@pytest.mark.parametrize("blur", [0.7, 2])
def test_water(blur):
    layers = drops(4, 25, 31, blur)
    layers[3] = 0  # no drop at all
    made = water(layers)
    assert (made[3] == 0).all()
    for layer, light in zip(layers, made, strict=True):
        off = np.abs(light - water_loop(layer))
        assert np.quantile(off, 0.98) < 1e-9  # roundings of a half may go either way
        assert off.max() < 0.02


def test_flat_water_stays():
    assert water(np.full((1, 9, 9), 200, dtype=np.uint8)).max() == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("constants", [CIFAR["spatter"][i] for i in (1, 3, 4)])
def test_spatter(size, constants):
    mean, sigma, blur, threshold, strength, mud = constants
    images = make_images(2, *size)
    made = run("spatter", images, constants)
    for image, result, rng in zip(images, made, rngs(2), strict=True):
        layer = ndimage.gaussian_filter(rng.normal(mean, sigma, size), blur, mode="nearest")
        layer = np.where(layer < threshold, 0, layer)
        assert (layer > 0).any()
        if mud:
            share = ndimage.gaussian_filter((layer > 0).astype(float), strength, mode="nearest")
            share = np.where(share < 0.8, 0, share)[..., np.newaxis]
            expected = image * (1 - share) + np.array([63, 42, 20]) / 255 * share
        else:
            light = water_loop(np.floor(255 * layer.clip(0, 1)).astype(np.uint8))
            expected = image + strength * light[..., np.newaxis] * np.array([175, 238, 238]) / 255
        off = np.abs(result - expected)
        assert np.quantile(off, 0.98) < 1e-6
        assert off.max() < 0.02


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_spatter_on_any_size(severity, height, width, seed):
    images = np.full((2, height, width, 3), 0.5, dtype=np.float32)
    result = run("spatter", images, CIFAR["spatter"][severity], seed)
    assert np.isfinite(result).all()
    assert (result >= 0.5).all() if severity < 3 else (result <= 0.5).all()


def likeness(images: np.ndarray, corrupted: np.ndarray) -> float:
    """Mean correlation; brightness and contrast alone leave it at one."""
    flat = [x.reshape(len(images), -1).astype(np.float64) for x in (images, corrupted.clip(0, 1))]
    centred = [x - x.mean(axis=1, keepdims=True) for x in flat]
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in centred]
    return float((unit[0] * unit[1]).sum(axis=1).mean())


@pytest.mark.parametrize("table", TABLES)
def test_snow_is_worse_with_severity(table):
    constants, side = TABLES[table]
    images = make_images(40, side, side)
    made = (run("snow", images, c).clip(0, 1) for c in constants["snow"])
    lost = [float(((corrupted - images) ** 2).mean()) for corrupted in made]
    assert lost[0] > 1e-4
    assert all(before < after for before, after in pairwise(lost)), lost


@pytest.mark.parametrize("name", ["fog", "frost"])
@pytest.mark.parametrize("table", TABLES)
def test_less_alike_with_severity(name, table):
    """Not by squared error, which a darker image under a brighter layer may lower."""
    constants, side = TABLES[table]
    images = make_images(40, side, side)
    alike = [likeness(images, run(name, images, c)) for c in constants[name]]
    assert alike[0] < 0.995
    assert all(before > after for before, after in pairwise(alike)), alike
