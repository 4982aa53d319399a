"""The layers' part of a state file: moments of every site of a network, one after the other.

Sites that can have full maps also have packed upper triangles of their covariances.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.config import STATE_DTYPE
from caster.core.layers import ChannelMoments, Side, Site
from caster.errors import CasterError
from caster.sealed import Arrays
from caster.state.triangles import packed, unpacked

LAYER_ARRAYS = ("layer_means", "layer_variances")
FULL, FULL_ARRAY = "full", "layer_covariances"  # of sites that can have full maps

Layers = dict[Site, ChannelMoments]


def has_full(layers: Mapping[Site, ChannelMoments] | None) -> bool:
    """Whether any site has the covariance that a full map needs.

    >>> has_full({Site("norm", "in", 1): ChannelMoments(9.0, np.zeros(2), np.ones(2))})
    False
    """
    return any(found.covariance is not None for found in (layers or {}).values())


def has_added_tokens(layers: Mapping[Site, ChannelMoments]) -> bool:
    """Whether any site is of a part of the tokens.

    >>> moments = ChannelMoments(9.0, np.zeros(2), np.ones(2))
    >>> has_added_tokens({Site("blocks.0", "out", -1, added=1): moments})
    True
    """
    return any(site.added for site in layers)


def listed(layers: Layers) -> str:
    """A table of the sites, as the file's metadata has it."""
    return json.dumps(
        [
            [site.module, site.side, site.axis, len(found.mean), found.count]
            + ([site.added] if site.added else [])
            + ([] if found.covariance is None else [FULL])
            for site, found in layers.items()
        ]
    )


def pack(layers: Layers) -> Arrays:
    """The moments of all sites, one site after the other."""
    none: list[NDArray[Any]] = [np.empty(0)]
    means = none + [found.mean for found in layers.values()]
    variances = none + [found.variance for found in layers.values()]
    rows = [np.concatenate(parts).astype(STATE_DTYPE) for parts in (means, variances)]
    arrays = dict(zip(LAYER_ARRAYS, rows, strict=True))
    full = [m.covariance for m in layers.values() if m.covariance is not None]
    if full:
        arrays[FULL_ARRAY] = np.concatenate([packed(C) for C in full]).astype(STATE_DTYPE)
    return arrays


def take(arrays: Arrays, table: str) -> Layers:
    """The sites' moments, taken out of a file's arrays by the table of them, and checked."""
    rows = [_Row.of(*row) for row in json.loads(table)]
    if len({str(row.site) for row in rows}) < len(rows):
        raise CasterError("its layers name a site twice")
    means, variances = (arrays.pop(name) for name in LAYER_ARRAYS)
    widths = [row.width for row in rows]
    positive = all(type(width) is int and width > 0 for width in widths)
    if not positive or not means.shape == variances.shape == (sum(widths),):
        raise CasterError("its layers do not fit together")
    sound = np.isfinite(means).all() and np.isfinite(variances).all()
    if not sound or (variances < 0).any() or not all(0 < row.count < np.inf for row in rows):
        raise CasterError("its layers hold no moments")
    full = _take_triangles(arrays, [row.width for row in rows if row.full])
    layers, start = {}, 0
    for row in rows:
        at = slice(start, start + row.width)
        covariance = full.pop(0) if row.full else None
        layers[row.site] = ChannelMoments(row.count, means[at], variances[at], covariance)
        start += row.width
    return layers


@dataclass(frozen=True)
class _Row:
    """A site in the table."""

    site: Site
    width: int
    count: float
    full: bool

    @classmethod
    def of(cls, module: str, side: Side, axis: int, width: int, count: float, *more: Any) -> Self:
        """What was read, if it is a site."""
        full = more[-1:] == (FULL,)
        added = more[:-1] if full else more
        site = Site(module, side, axis, *added[:1])
        if added[1:] or not _is_site(site):
            raise CasterError("its layers name no sites")
        return cls(site, width, count, full)


def _take_triangles(arrays: Arrays, orders: list[int]) -> list[NDArray[Any]]:
    """Covariances of these orders, taken out of a file's arrays and checked."""
    if not orders:
        return []
    joined = arrays.pop(FULL_ARRAY)
    ends = np.cumsum([order * (order + 1) // 2 for order in orders])
    if joined.shape != (ends[-1],):
        raise CasterError("its covariances of layers do not fit together")
    if not np.isfinite(joined).all():
        raise CasterError("its layers hold no moments")
    parts = np.split(joined, ends[:-1])
    return [unpacked(part, order) for part, order in zip(parts, orders, strict=True)]


def _is_site(site: Site) -> bool:
    """Whether a site that was read is one."""
    named = isinstance(site.module, str) and site.side in ("in", "out") and site.axis in (1, -1)
    tokens = type(site.added) is int and (site.added == 0 or (site.added > 0 and site.axis == -1))
    return named and tokens
