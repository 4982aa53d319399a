"""Drops of water or mud on the lens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from caster_bench.data.corruptions.blur import blurred
from caster_bench.data.corruptions.edges import canny
from caster_bench.data.corruptions.make import Values

Floats = NDArray[np.float64]
WATER = np.array([175, 238, 238], dtype=np.float32) / np.float32(255)  # pale turquoise
MUD = np.array([63, 42, 20], dtype=np.float32) / np.float32(255)
FAR = 20  # pixels from an edge beyond which a drop is flat
LIGHT = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]], dtype=np.float64)  # from the upper left


def spatter(
    images: Values,
    constants: tuple[float, float, float, float, float, int],
    rngs: Sequence[np.random.Generator],
) -> Values:
    """Drops where a blurred layer of noise passes a threshold.

    The constants: mean and sigma of the noise, sigma of its blur, threshold, then for water its
    strength and a zero, for mud the sigma of its outlines and a one.

    >>> white = np.ones((1, 32, 32, 3), dtype=np.float32)
    >>> muddy = spatter(white, (0.65, 0.1, 0.5, 0.68, 0.6, 1), [np.random.default_rng(0)])
    >>> red, green, blue = muddy[0].reshape(-1, 3).min(axis=0)
    >>> bool(0.3 > red > green > blue)  # brown
    True
    """
    mean, sigma, blur, threshold, intensity, mud = constants
    layer = np.stack([rng.normal(mean, sigma, images.shape[1:3]) for rng in rngs])
    layer = blurred(layer, blur)
    layer[layer < threshold] = 0
    if mud:
        cover = blurred((layer > threshold).astype(np.float64), intensity)
        cover[cover < 0.8] = 0
        share = cover.astype(np.float32)[..., np.newaxis]
        return images * (1 - share) + MUD * share
    # Whole bytes; a value above one would wrap round there, and counts as one here.
    drops = (np.minimum(layer, 1) * 255).astype(np.uint8)
    shine = (intensity * water(drops)).astype(np.float32)[..., np.newaxis]
    return images + shine * WATER


def water(drops: NDArray[np.uint8]) -> Floats:  # (n, H, W), both
    """How much light the drops throw, the brightest place of each image one.

    The distance from the nearest edge, equalised, lit from one side. An image without a drop gets
    none, where the reference divides by zero.
    """
    edges = canny(drops, 50, 150)
    relief = _box_sum(_distance(edges)) / 9
    relief = _equalised((relief + 1e-6).astype(np.uint8))  # a mean of equal numbers is not below
    lit = np.clip(ndimage.correlate(relief, LIGHT, mode="mirror"), 0, 255)
    light = drops * np.rint(_box_sum(lit) / 9)
    peak = light.max(axis=(1, 2), keepdims=True)
    bright: Floats = light / np.where(peak > 0, peak, 1)
    return bright


def _distance(edges: NDArray[np.bool_]) -> Floats:
    """From every pixel to the nearest edge of its image, at most FAR.

    As the length of a chain of steps to the side, aslant, or of a knight in chess: 1, 1.4 and
    2.1969, which is what OpenCV means by a distance with a mask of five by five.
    """
    distances = np.full(edges.shape, float(FAR))
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
            distance[...] = np.minimum(2.1969 * knight + rest, FAR)
    return distances


def _box_sum(layers: Floats) -> Floats:
    """The sum of three by three, mirrored at the borders."""
    rows = ndimage.correlate1d(layers, [1, 1, 1], axis=1, mode="mirror")
    total: Floats = ndimage.correlate1d(rows, [1, 1, 1], axis=2, mode="mirror")
    return total


def _equalised(relief: NDArray[np.uint8]) -> Floats:
    """Each image's values spread over 0 to 255 by their ranks, the lowest to zero."""
    count, total = len(relief), relief[0].size
    places = relief + np.arange(count).reshape(-1, 1, 1) * (FAR + 1)
    counts = np.bincount(places.ravel(), minlength=count * (FAR + 1)).reshape(count, FAR + 1)
    lowest = np.argmax(counts > 0, axis=1)
    of_lowest = np.take_along_axis(counts, lowest[:, np.newaxis], axis=1)
    rest = total - of_lowest
    table = np.rint((counts.cumsum(axis=1) - of_lowest) * (255 / np.maximum(rest, 1)))
    table = np.where(rest > 0, table, lowest[:, np.newaxis])  # one value all over stays
    spread: Floats = table.ravel()[places]
    return spread
