"""The layers' part of a state file: moments of every site of a network, one after the other.

Sites that can have full maps also have packed upper triangles of their covariances.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.config import STATE_DTYPE
from caster.core.channels import ChannelMoments, Side, Site
from caster.errors import CasterError
from caster.io.sealed import Arrays
from caster.io.triangles import check_semidefinite, packed, unpacked

LAYER_ARRAYS = ("layer_means", "layer_variances")
FULL, FULL_ARRAY = "full", "layer_covariances"  # of sites that can have full maps
ROUNDING = 1e-4  # of a trace: sums over a layer's positions are made of float32 products

Layers = dict[Site, ChannelMoments]


def has_full(layers: Mapping[Site, ChannelMoments] | None) -> bool:
    """Whether any site has the covariance that a full map needs.

    >>> has_full({Site("norm", "in", 1): ChannelMoments(9.0, np.zeros(2), np.ones(2))})
    False
    """
    return any(found.covariance is not None for found in (layers or {}).values())


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


@dataclass(frozen=True)
class Row:
    """A site in the table."""

    site: Site
    width: int
    count: float
    full: bool

    @classmethod
    def of(cls, module: str, side: Side, axis: int, width: int, count: float, *more: Any) -> Self:
        """Check a row that was read."""
        full = more[-1:] == (FULL,)
        added = more[:-1] if full else more
        site = Site(module, side, axis, *added[:1])
        if added[1:] or not _is_site(site):
            raise CasterError("its layers name no sites")
        if type(width) is not int or width < 1:
            raise CasterError("its layers do not fit together")
        if type(count) not in (int, float) or not 1 <= count < math.inf or count % 1:
            raise CasterError("its layers hold no moments")
        return cls(site, width, count, full)


def read_rows(table: str) -> list[Row]:
    """The sites of a file's metadata, checked."""
    rows = [Row.of(*row) for row in json.loads(table)]
    if len({str(row.site) for row in rows}) < len(rows):
        raise CasterError("its layers name a site twice")
    return rows


def layer_sizes(rows: list[Row] | None) -> dict[str, int]:
    """The sizes of the arrays of these sites; none without layers."""
    if rows is None:
        return {}
    full = {"layer triangles": sum(map(_triangle, rows))} if any(row.full for row in rows) else {}
    return {"channels": sum(row.width for row in rows)} | full


def _triangle(row: Row) -> int:
    return row.width * (row.width + 1) // 2 if row.full else 0


def take(arrays: Arrays, rows: list[Row]) -> Layers:
    """The sites' moments, out of arrays of the sizes that their table has."""
    means, variances = (arrays[name] for name in LAYER_ARRAYS)
    layers, start, corner = {}, 0, 0
    for row in rows:
        at = slice(start, start + row.width)
        covariance = None
        if row.full:
            triangle = arrays[FULL_ARRAY][corner : corner + _triangle(row)]
            covariance = unpacked(triangle, row.width)
            check_semidefinite(covariance[None], ROUNDING, f"covariances at {row.site}")
        layers[row.site] = ChannelMoments(row.count, means[at], variances[at], covariance)
        start, corner = start + row.width, corner + _triangle(row)
    return layers


def _is_site(site: Site) -> bool:
    """Whether a site that was read is one."""
    named = isinstance(site.module, str) and site.side in ("in", "out")
    named = named and type(site.axis) is int and site.axis in (1, -1)
    tokens = type(site.added) is int and (site.added == 0 or (site.added > 0 and site.axis == -1))
    return named and tokens
