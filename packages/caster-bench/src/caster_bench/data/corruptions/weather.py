"""Weather: snow, frost, fog, brightness, and spatter on the lens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from caster_bench.data.corruptions.blur import gaussian_filter, smear, zoom
from caster_bench.data.corruptions.constants import Rngs, Values
from caster_bench.data.corruptions.digital import channel_maximum
from caster_bench.data.corruptions.textures import plasma, plasma_side, textures_for

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]  # (n, H, W)
Gradient = NDArray[np.int32]  # (n, H, W)
Mask = NDArray[np.bool_]  # (n, H, W)

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # Rec. 601, as OpenCV's grey
WATER = np.array([175, 238, 238], dtype=np.float32) / np.float32(255)  # pale turquoise
MUD = np.array([63, 42, 20], dtype=np.float32) / np.float32(255)
EDGE = 20  # pixels from an edge beyond which a drop is flat
LIGHT = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]], dtype=np.float64)  # from the upper left
LEVEL = np.tan(np.pi / 8)  # slope up to which a gradient counts as horizontal
NEIGHBOURS = np.stack([np.zeros((3, 3)), np.ones((3, 3)), np.zeros((3, 3))])  # within one image


def brightness(images: Values, added: float, rngs: Rngs) -> Values:
    """Raise the value of HSV, keeping hue and saturation.

    >>> pixel = np.array([[[[0.2, 0.4, 0.0]]]], dtype=np.float32)
    >>> brightness(pixel, 0.2, [np.random.default_rng(0)]).round(3).tolist()
    [[[[0.3..., 0.6..., 0.0]]]]
    """
    value = channel_maximum(images)
    brighter: Values = np.minimum(value + np.float32(added), 1)
    # In RGB this scales the distances of the channels below the value.
    scale: Values = np.divide(brighter, value, out=np.zeros_like(value), where=value > 0)
    return brighter - (value - images) * scale


def fog(
    images: Values,
    constants: tuple[float, float],  # weight of the fog, decay of its roughness
    rngs: Rngs,
) -> Values:
    """Add a plasma fractal, then dim to the image's own maximum.

    >>> black = np.zeros((1, 8, 8, 3), dtype=np.float32)
    >>> float(fog(black, (1.5, 2), [np.random.default_rng(0)]).max())
    0.0
    """
    weight, decay = constants
    height, width = images.shape[1:3]
    clouds = plasma(plasma_side(height, width), decay, rngs)[:, :height, :width, np.newaxis]
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    dimmed = brightest / (brightest + np.float32(weight))
    foggy: Values = (images + np.float32(weight) * clouds.astype(np.float32)) * dimmed
    return foggy


def snow(
    images: Values,
    constants: tuple[float, float, float, float, float, float, float],
    rngs: Rngs,
) -> Values:
    """Add flakes that fall at an angle to a paler image.

    The constants: mean and sigma of the noise that makes flakes, their zoom, the threshold below
    which there are none, radius and sigma of their motion blur, weight of the image's own colours.

    >>> black = np.zeros((1, 32, 32, 3), dtype=np.float32)
    >>> light = (0.1, 0.2, 1, 0.6, 8, 3, 0.95)
    >>> round(float(snow(black, light, [np.random.default_rng(0)]).min()), 3)  # 5 % of 0.5
    0.025
    """
    mean, sigma, factor, threshold, radius, blur, share = constants
    layers = np.stack([rng.normal(mean, sigma, images.shape[1:3]) for rng in rngs])
    layers = zoom(layers, factor)
    layers[layers < threshold] = 0
    # Integers, as the reference passes a PNG to ImageMagick and back.
    grains = np.floor(np.clip(layers, 0, 1) * 255).astype(np.float32)[..., np.newaxis]
    angles = np.array([rng.uniform(-135, -45) for rng in rngs])
    flakes = np.rint(smear(grains, radius, blur, angles)) / np.float32(255)
    grey = (images * LUMA).sum(axis=3, keepdims=True)
    pale = np.maximum(images, grey * np.float32(1.5) + np.float32(0.5))
    image = np.float32(share) * images + np.float32(1 - share) * pale
    snowy: Values = image + flakes + flakes[:, ::-1, ::-1]
    return snowy


def frost(
    images: Values,
    constants: tuple[float, float],  # weight of the image, weight of the texture
    rngs: Rngs,
    textures: str | Path | None = None,  # a folder of photographs of frost
) -> Values:
    """Add a random crop of an ice texture.

    The textures are drawn by `caster_bench.data.corruptions.textures`, or are the photographs in
    a folder. The published images used five photographs (the reference lists six and draws among
    the first five), which are not part of this library.

    >>> black = np.zeros((1, 32, 32, 3), dtype=np.float32)
    >>> icy = frost(black, (1, 0.2), [np.random.default_rng(0)])
    >>> bool(0 < icy.mean() < 0.2)
    True
    """
    of_image, of_texture = (np.float32(weight) for weight in constants)
    height, width = images.shape[1:3]
    choice = textures_for(height, width, textures)
    result = of_image * images
    for image, rng in zip(result, rngs, strict=True):
        texture = choice[rng.integers(len(choice))]
        row = rng.integers(texture.shape[0] - height + 1)
        column = rng.integers(texture.shape[1] - width + 1)
        crop = texture[row : row + height, column : column + width]
        image += of_texture * (crop / np.float32(255))
    return result


# Spatter, by the rules of OpenCV


def spatter(
    images: Values,
    constants: tuple[float, float, float, float, float, int],
    rngs: Rngs,
) -> Values:
    """Add drops of water or mud where blurred noise passes a threshold.

    The constants: mean and sigma of the noise, sigma of its blur, threshold; then for water its
    intensity and 0, for mud the sigma of its outlines and 1.

    >>> white = np.ones((1, 32, 32, 3), dtype=np.float32)
    >>> muddy = spatter(white, (0.65, 0.1, 0.5, 0.68, 0.6, 1), [np.random.default_rng(0)])
    >>> red, green, blue = muddy[0].reshape(-1, 3).min(axis=0)
    >>> bool(0.3 > red > green > blue)  # brown
    True
    """
    mean, sigma, blur, threshold, intensity, mud = constants
    layer = np.stack([rng.normal(mean, sigma, images.shape[1:3]) for rng in rngs])
    layer = gaussian_filter(layer, blur)
    layer[layer < threshold] = 0
    if mud:
        cover = gaussian_filter((layer > threshold).astype(np.float64), intensity)
        cover[cover < 0.8] = 0
        share = cover.astype(np.float32)[..., np.newaxis]
        return images * (1 - share) + MUD * share
    # Bytes; a value above one wraps around in the reference, and counts as one here.
    drops = (np.minimum(layer, 1) * 255).astype(np.uint8)
    shine = (intensity * water(drops)).astype(np.float32)[..., np.newaxis]
    return images + shine * WATER


def water(drops: Bytes) -> Floats:  # (n, H, W), both
    """Light the drops from one side, by the equalised distance to their edges; the maximum is one.

    An image without a drop gets no light, where the reference divides by zero.
    """
    relief = _box_sum(_edge_distance(canny(drops, 50, 150))) / 9
    relief = _equalised((relief + 1e-6).astype(np.uint8))  # or a mean of equal numbers rounds down
    lit = np.clip(ndimage.correlate(relief, LIGHT, mode="mirror"), 0, 255)
    light = drops * np.rint(_box_sum(lit) / 9)
    peak = light.max(axis=(1, 2), keepdims=True)
    bright: Floats = light / np.where(peak > 0, peak, 1)
    return bright


def canny(layers: Bytes, low: float, high: float) -> Mask:
    """Find thin edges as OpenCV's Canny does, in many small images at once.

    The gradient strength is |dx| + |dy| of 3 x 3 Sobel filters. A pixel is thin if it is the
    strongest along its gradient, and an edge if it is stronger than `low` and connected, through
    others of that kind, to one stronger than `high`.

    >>> step = np.zeros((1, 4, 6), dtype=np.uint8)
    >>> step[:, :, 3:] = 200
    >>> canny(step, 50, 150)[0, 1].astype(int)
    array([0, 0, 1, 0, 0, 0])
    """
    values = layers.astype(np.int32)
    dx, dy = _sobel(values, axis=2), _sobel(values, axis=1)
    strength = np.abs(dx) + np.abs(dy)
    candidates = _thin(strength, dx, dy) & (strength > low)
    components, count = ndimage.label(candidates, structure=NEIGHBOURS)
    strong = np.zeros(count + 1, dtype=np.bool_)
    strong[components[candidates & (strength > high)]] = True
    edges: Mask = strong[components]
    return edges


def _sobel(values: Gradient, axis: int) -> Gradient:
    slope = ndimage.correlate1d(values, [-1, 0, 1], axis=axis, mode="nearest")
    smooth: Gradient = ndimage.correlate1d(slope, [1, 2, 1], axis=3 - axis, mode="nearest")
    return smooth


def _thin(strength: Gradient, dx: Gradient, dy: Gradient) -> Mask:
    """Mark the strongest pixels along the nearest of four gradient directions; outside is zero."""
    height, width = strength.shape[1:]
    padded = np.pad(strength, ((0, 0), (1, 1), (1, 1)))

    def at(row: int, column: int) -> Gradient:
        return padded[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    x, y = np.abs(dx), np.abs(dy)
    horizontal, vertical = y < LEVEL * x, y > (LEVEL + 2) * x
    # Of two equal neighbours on a line the first wins, or a plateau would have no edge.
    on_row = (strength > at(0, -1)) & (strength >= at(0, 1))
    on_column = (strength > at(-1, 0)) & (strength >= at(1, 0))
    falling = (strength > at(-1, -1)) & (strength > at(1, 1))
    rising = (strength > at(-1, 1)) & (strength > at(1, -1))
    diagonal = np.where((dx ^ dy) < 0, rising, falling)
    thin: Mask = np.where(horizontal, on_row, np.where(vertical, on_column, diagonal))
    return thin


def _edge_distance(edges: Mask) -> Floats:
    """Distance from every pixel to the nearest edge of its image, at most EDGE.

    The length of a chain of straight, diagonal and knight's moves of 1, 1.4 and 2.1969: OpenCV's
    distance with a 5 x 5 mask.
    """
    distances = np.full(edges.shape, float(EDGE))
    here = np.indices(edges.shape[1:])
    for distance, lines in zip(distances, edges, strict=True):
        if lines.any():
            nearest = ndimage.distance_transform_edt(
                ~lines, return_distances=False, return_indices=True
            )
            away = np.abs(nearest - here)
            short, long = away.min(axis=0), away.max(axis=0)
            knight = np.minimum(short, long - short)
            rest = np.where(long >= 2 * short, long - 2 * short, 1.4 * (2 * short - long))
            distance[...] = np.minimum(2.1969 * knight + rest, EDGE)
    return distances


def _box_sum(layers: Floats) -> Floats:
    """Sum 3 x 3 boxes, mirrored at the borders."""
    rows = ndimage.correlate1d(layers, [1, 1, 1], axis=1, mode="mirror")
    total: Floats = ndimage.correlate1d(rows, [1, 1, 1], axis=2, mode="mirror")
    return total


def _equalised(relief: Bytes) -> Floats:
    """Equalise each image's histogram over 0 to 255; a constant image stays as it is."""
    count, total = len(relief), relief[0].size
    bins = relief + np.arange(count).reshape(-1, 1, 1) * (EDGE + 1)
    counts = np.bincount(bins.ravel(), minlength=count * (EDGE + 1)).reshape(count, EDGE + 1)
    lowest = np.argmax(counts > 0, axis=1)
    of_lowest = np.take_along_axis(counts, lowest[:, np.newaxis], axis=1)
    rest = total - of_lowest
    table = np.rint((counts.cumsum(axis=1) - of_lowest) * (255 / np.maximum(rest, 1)))
    table = np.where(rest > 0, table, lowest[:, np.newaxis])
    spread: Floats = table.ravel()[bins]
    return spread
