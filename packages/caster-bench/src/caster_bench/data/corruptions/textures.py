"""Textures: plasma fractals for fog, and for frost drawn ice or photographs that a user names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import KDTree

from caster.errors import CasterError
from caster.io.image_files import decode, formats
from caster_bench.data.corruptions.constants import CIFAR_SIDE, TINY_SIDE, Rngs

Floats = NDArray[np.float64]
Texture = NDArray[np.uint8]  # (H, W, 3)
ROUGHNESS = 100.0  # of the first step; only its decay matters, as maps are scaled at the end
SIDE = 500  # pixels of a drawn texture


def plasma(
    side: int,  # a power of two
    decay: float,
    rngs: Rngs,
) -> Floats:  # (n, side, side)
    """Draw height maps from 0 to 1 by the diamond-square algorithm, with opposite edges joined.

    Every step sets the points halfway between known ones to the mean of four of them plus noise:
    the roughness times a uniform number within plus or minus the roughness. The roughness is
    divided by the decay after each step, so the noise falls with the square of the decay.

    >>> heights = plasma(8, 2.0, [np.random.default_rng(0)])
    >>> heights.shape, float(heights.min()), float(heights.max())
    ((1, 8, 8), 0.0, 1.0)
    """
    heights = np.zeros((len(rngs), side, side))
    noise = 2 * np.stack([rng.random(side * side - 1) for rng in rngs]) - 1
    roughness, step, used = ROUGHNESS, side, 0
    while step >= 2:
        half, count = step // 2, side // step
        fresh = roughness**2 * noise[:, used : used + 3 * count**2]
        squares, above, left = fresh.reshape(len(rngs), 3, count, count).swapaxes(0, 1)
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        middles = (pairs + np.roll(pairs, -1, axis=2)) / 4 + squares
        heights[:, half::step, half::step] = middles
        across = corners + np.roll(corners, -1, axis=2)
        heights[:, ::step, half::step] = (
            middles + np.roll(middles, 1, axis=1) + across
        ) / 4 + above
        heights[:, half::step, ::step] = (middles + np.roll(middles, 1, axis=2) + pairs) / 4 + left
        roughness, step, used = roughness / decay, half, used + 3 * count**2
    heights -= heights.min(axis=(1, 2), keepdims=True)
    heights /= heights.max(axis=(1, 2), keepdims=True)
    return heights


def plasma_side(height: int, width: int) -> int:
    """Return the smallest power of two that covers an image: 32 for 32 pixels, 256 for 224.

    >>> plasma_side(32, 32), plasma_side(224, 224), plasma_side(33, 47)
    (32, 256, 64)
    """
    return 1 << max(1, (max(height, width) - 1).bit_length())


# Frost


@dataclass(frozen=True)
class IceTexture:
    """Parameters of one drawn texture."""

    seed: int
    stems: int  # number of ferns
    length: float  # stem length, pixels
    opening: float  # radians between a stem and its branches; 60 degrees in real ice
    curl: float  # radians that a stem turns over its length
    grains: int  # number of crystals in the haze
    haze: float  # weight of the haze
    colour: tuple[float, float, float]  # mean red, green and blue
    contrast: float  # standard deviation of the brightness, from 0 to 1


# Colours and contrasts of the five photographs behind the published images, measured on their
# copies in the package `imagecorruptions` 1.1.2, where the second and third are the same.
ICE = (
    IceTexture(1, 120, 90, np.pi / 4, 2.0, 20_000, 1.0, (78, 149, 166), 0.070),
    IceTexture(2, 260, 110, np.pi / 8, 0.3, 12_000, 0.6, (201, 205, 214), 0.086),
    IceTexture(3, 320, 80, np.pi / 6, 0.2, 16_000, 0.6, (201, 205, 214), 0.086),
    IceTexture(4, 160, 60, np.pi / 3, 0.8, 24_000, 0.9, (138, 153, 165), 0.113),
    IceTexture(5, 220, 90, np.pi / 3, 0.5, 12_000, 0.5, (112, 123, 135), 0.169),
)


def textures_for(height: int, width: int, folder: str | Path | None = None) -> tuple[Texture, ...]:
    """Return textures large enough to crop an image of this size from.

    Textures are scaled by 0.2 for images of up to 32 pixels and by 0.3 for up to 64, as in the
    references of CIFAR-C and Tiny-ImageNet-C.

    >>> [texture.shape for texture in textures_for(32, 32)[:2]]
    [(100, 100, 3), (100, 100, 3)]
    """
    if folder is not None:
        found = photographs(os.fspath(folder))
        names, textures = list(found), tuple(found.values())
    else:
        names, textures = [], tuple(drawn(kind) for kind in ICE)
    side = max(height, width)
    factor = 0.2 if side <= CIFAR_SIDE else 0.3 if side <= TINY_SIDE else 1.0
    textures = tuple(_scaled(texture, factor) for texture in textures)
    for name, texture in zip(names, textures, strict=False):
        if texture.shape[0] < height or texture.shape[1] < width:
            scaled = f" after scaling by {factor}" if factor < 1 else ""
            raise CasterError(
                f"the texture {name} has {texture.shape[1]} x {texture.shape[0]} pixels{scaled}, "
                f"less than an image of {width} x {height}: use a larger one"
            )
    return textures if names else tuple(_large(texture, height, width) for texture in textures)


def _scaled(texture: Texture, factor: float) -> Texture:
    """Interpolate at the centres of the new pixels, without smoothing: 0.2 takes every fifth."""
    if factor == 1:
        return texture
    values: Floats = texture.astype(np.float64)
    for axis in (0, 1):
        count = round(texture.shape[axis] * factor)
        at = np.clip((np.arange(count) + 0.5) / factor - 0.5, 0, texture.shape[axis] - 1)
        first = np.minimum(at.astype(np.intp), texture.shape[axis] - 2)
        share = (at - first).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        low, high = (np.take(values, first + step, axis=axis) for step in (0, 1))
        values = low + share * (high - low)
    return np.round(values).astype(np.uint8)


def _large(texture: Texture, height: int, width: int) -> Texture:
    """Extend a texture by its mirror images until a crop has some freedom."""
    need = (height + height // 4, width + width // 4)
    more = [max(0, wanted - had) for wanted, had in zip(need, texture.shape[:2], strict=True)]
    return np.pad(texture, ((0, more[0]), (0, more[1]), (0, 0)), mode="symmetric")


@lru_cache(maxsize=1)
def photographs(folder: str) -> dict[str, Texture]:
    """Read the photographs in a folder, by name."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CasterError(f"cannot read the textures in {folder}: {error.strerror}") from None
    images = [name for name in names if os.path.splitext(name)[1].lower() in formats()]
    if not images:
        raise CasterError(f"{folder} has no texture: put photographs of frost into it")
    return {name: decode(Path(folder, name)) for name in images}


@lru_cache(maxsize=len(ICE))
def drawn(kind: IceTexture) -> Texture:
    """Draw ice ferns and grainy haze, always the same for the same parameters.

    >>> drawn(ICE[0]).shape
    (500, 500, 3)
    """
    rng = np.random.default_rng(kind.seed)
    ferns = _ferns(kind, rng)
    crystals = 1 - np.exp(
        -ferns / (0.3 + ndimage.gaussian_filter(ferns, 8))
    )  # keeps lines in thick ice
    clouds = plasma(plasma_side(SIDE, SIDE), 1.5, [rng])[0, :SIDE, :SIDE]
    haze = kind.haze * clouds * (0.6 + 0.4 * _grains(kind.grains, rng))
    light = crystals + haze + 0.08 * rng.standard_normal(crystals.shape)  # film grain
    light = (light - light.mean()) / light.std()
    bright: Floats = np.asarray(kind.colour) + 255 * kind.contrast * light[..., np.newaxis]
    return bright.round().clip(0, 255).astype(np.uint8)


def _grains(count: int, rng: np.random.Generator) -> Floats:  # (SIDE, SIDE)
    """Draw cells around random points, each with its own brightness and a paler rim."""
    points = rng.uniform(0, SIDE, (count, 2))
    pixels = np.indices((SIDE, SIDE)).reshape(2, -1).T
    distances, nearest = KDTree(points).query(pixels, k=2)
    rim = np.exp(-(distances[:, 1] - distances[:, 0]) / 1.5)
    shades = rng.uniform(0, 1, count)[nearest[:, 0]]
    cells: Floats = np.clip(0.7 * shades + 0.5 * rim, 0, 1).reshape(SIDE, SIDE)
    return cells


def _ferns(kind: IceTexture, rng: np.random.Generator) -> Floats:  # (SIDE, SIDE)
    """Draw the thickness of ice: stems, their branches, and the branches of those."""
    where = rng.uniform(0, SIDE, (kind.stems, 2))
    heading = rng.uniform(0, 2 * np.pi, kind.stems)
    length = rng.uniform(0.4, 1.6, kind.stems) * kind.length
    curl = rng.normal(0, kind.curl, kind.stems)
    ice = np.zeros((SIDE, SIDE))
    for weight, spacing, share in ((1.5, 6, 0.4), (1.0, 4, 0.4), (0.7, 0, 0.0)):
        # The chord of an arc points halfway between the directions at its ends.
        owner = np.repeat(np.arange(len(length)), length.astype(np.int64) + 1)
        walked = np.arange(len(owner)) - np.searchsorted(owner, owner)
        turned = curl[owner] * walked / length[owner]
        chord = heading[owner] + turned / 2
        points = where[owner] + walked[:, np.newaxis] * np.stack([np.sin(chord), np.cos(chord)], 1)
        rows, columns = np.rint(points).astype(np.int64).T
        inside = (rows >= 0) & (rows < SIDE) & (columns >= 0) & (columns < SIDE)
        np.add.at(ice, (rows[inside], columns[inside]), weight)
        if spacing:
            buds = np.flatnonzero(inside & (walked % spacing == spacing - 1)).repeat(2)
            sides = np.where(np.arange(len(buds)) % 2, 1.0, -1.0)
            where = points[buds]
            bent = kind.opening * sides + rng.normal(0, 0.08, len(buds))
            heading = heading[owner[buds]] + turned[buds] + bent
            left = length[owner[buds]] - walked[buds]
            length = np.maximum(1.0, share * left * rng.uniform(0.5, 1.2, len(buds)))
            curl = rng.normal(0, 0.3, len(buds))
    smooth: Floats = ndimage.gaussian_filter(ice, 0.7)
    return smooth
