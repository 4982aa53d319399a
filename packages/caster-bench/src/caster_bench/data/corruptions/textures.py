"""Textures of frost: drawn here, or photographs that a user names."""

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
from caster.io.decode import decode, formats
from caster_bench.data.corruptions.make import CIFAR_SIDE, TINY_SIDE
from caster_bench.data.corruptions.plasma import plasma, size_for

Floats = NDArray[np.float64]
Texture = NDArray[np.uint8]  # (H, W, 3)
SIDE = 500  # pixels of a drawn texture


@dataclass(frozen=True)
class Kind:
    """What one drawn texture looks like."""

    seed: int
    stems: int  # ferns
    length: float  # of a stem, pixels
    opening: float  # radians between a stem and its branches; ice likes 60 degrees
    curl: float  # radians that a stem turns on its way
    grains: int  # crystals that the haze is divided into
    haze: float  # share of haze
    colour: tuple[float, float, float]  # mean red, green and blue
    contrast: float  # standard deviation of the brightness, from 0 to 1


# Colours and contrasts are those of the five photographs that the published images were made
# with, measured on their copies in the package `imagecorruptions` 1.1.2, where the second and the
# third are the same.
KINDS = (
    Kind(1, 120, 90, np.pi / 4, 2.0, 20_000, 1.0, (78, 149, 166), 0.070),
    Kind(2, 260, 110, np.pi / 8, 0.3, 12_000, 0.6, (201, 205, 214), 0.086),
    Kind(3, 320, 80, np.pi / 6, 0.2, 16_000, 0.6, (201, 205, 214), 0.086),
    Kind(4, 160, 60, np.pi / 3, 0.8, 24_000, 0.9, (138, 153, 165), 0.113),
    Kind(5, 220, 90, np.pi / 3, 0.5, 12_000, 0.5, (112, 123, 135), 0.169),
)


def textures_for(height: int, width: int, folder: str | Path | None = None) -> tuple[Texture, ...]:
    """Textures that an image of this size can be cut from.

    For images of up to 32 pixels textures are scaled by 0.2, for those of up to 64 by 0.3, as the
    references of CIFAR-C and Tiny-ImageNet-C do.

    >>> [texture.shape for texture in textures_for(32, 32)[:2]]
    [(100, 100, 3), (100, 100, 3)]
    """
    if folder is not None:
        found = photographs(os.fspath(folder))
        names, textures = list(found), tuple(found.values())
    else:
        names, textures = [], tuple(drawn(kind) for kind in KINDS)
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
    """Interpolated at the centres of the new pixels, without smoothing: 0.2 is every fifth."""
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
    """Continued by its mirror images until an image fits in with some freedom."""
    need = (height + height // 4, width + width // 4)
    more = [max(0, wanted - had) for wanted, had in zip(need, texture.shape[:2], strict=True)]
    return np.pad(texture, ((0, more[0]), (0, more[1]), (0, 0)), mode="symmetric")


@lru_cache(maxsize=1)
def photographs(folder: str) -> dict[str, Texture]:
    """The photographs in a folder by their names; read once."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CasterError(f"cannot read the textures in {folder}: {error.strerror}") from None
    images = [name for name in names if os.path.splitext(name)[1].lower() in formats()]
    if not images:
        raise CasterError(f"{folder} holds no texture: put photographs of frost into it")
    return {name: decode(Path(folder, name)) for name in images}


@lru_cache(maxsize=len(KINDS))
def drawn(kind: Kind) -> Texture:
    """A texture of ferns of ice and grainy haze, always the same for a kind.

    >>> drawn(KINDS[0]).shape
    (500, 500, 3)
    """
    rng = np.random.default_rng(kind.seed)
    ferns = _ferns(kind, rng)
    crystals = 1 - np.exp(-ferns / (0.3 + ndimage.gaussian_filter(ferns, 8)))  # thick ice has lines
    clouds = plasma(size_for(SIDE, SIDE), 1.5, [rng])[0, :SIDE, :SIDE]
    haze = kind.haze * clouds * (0.6 + 0.4 * _grains(kind.grains, rng))
    light = crystals + haze + 0.08 * rng.standard_normal(crystals.shape)  # grain of a photograph
    light = (light - light.mean()) / light.std()
    bright: Floats = np.asarray(kind.colour) + 255 * kind.contrast * light[..., np.newaxis]
    return bright.round().clip(0, 255).astype(np.uint8)


def _grains(count: int, rng: np.random.Generator) -> Floats:  # (SIDE, SIDE)
    """Cells about random points, each of its own brightness and paler towards its rim."""
    points = rng.uniform(0, SIDE, (count, 2))
    places = np.indices((SIDE, SIDE)).reshape(2, -1).T
    distances, nearest = KDTree(points).query(places, k=2)
    rim = np.exp(-(distances[:, 1] - distances[:, 0]) / 1.5)
    shades = rng.uniform(0, 1, count)[nearest[:, 0]]
    cells: Floats = np.clip(0.7 * shades + 0.5 * rim, 0, 1).reshape(SIDE, SIDE)
    return cells


def _ferns(kind: Kind, rng: np.random.Generator) -> Floats:  # (SIDE, SIDE)
    """How much ice lies on every pixel: stems, their branches, and the branches of those."""
    where = rng.uniform(0, SIDE, (kind.stems, 2))
    heading = rng.uniform(0, 2 * np.pi, kind.stems)
    length = rng.uniform(0.4, 1.6, kind.stems) * kind.length
    curl = rng.normal(0, kind.curl, kind.stems)
    ice = np.zeros((SIDE, SIDE))
    for weight, spacing, share in ((1.5, 6, 0.4), (1.0, 4, 0.4), (0.7, 0, 0.0)):
        # The chord of an arc points halfway between its two ends' directions.
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
