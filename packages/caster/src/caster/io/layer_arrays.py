"""Layer moments in state files: all sites concatenated, covariances as packed upper triangles."""

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
from caster.core.linalg import cholesky
from caster.errors import CasterError
from caster.io.signed_tensors import Arrays

LAYER_ARRAYS = ("layer_means", "layer_variances")
FULL, FULL_ARRAY = "full", "layer_covariances"  # of sites that can have full maps
ROUNDING = 1e-4  # relative to a trace: moments of a layer are sums of float32 products
AT_ONCE = 16  # matrices checked together: they fit the CPU cache

Layers = dict[Site, ChannelMoments]


def has_full(layers: Mapping[Site, ChannelMoments] | None) -> bool:
    """Whether any site has the covariance that a full map needs.

    >>> has_full({Site("norm", "in", 1): ChannelMoments(9.0, np.zeros(2), np.ones(2))})
    False
    """
    return any(moments.covariance is not None for moments in (layers or {}).values())


def site_table(layers: Layers) -> str:
    """Return the table of sites for the file's metadata."""
    return json.dumps(
        [
            [site.module, site.side, site.axis, len(moments.mean), moments.count]
            + ([site.added] if site.added else [])
            + ([] if moments.covariance is None else [FULL])
            for site, moments in layers.items()
        ]
    )


def pack_layers(layers: Layers) -> Arrays:
    """Concatenate the moments of all sites."""
    none: list[NDArray[Any]] = [np.empty(0)]
    means = none + [moments.mean for moments in layers.values()]
    variances = none + [moments.variance for moments in layers.values()]
    rows = [np.concatenate(parts).astype(STATE_DTYPE) for parts in (means, variances)]
    arrays = dict(zip(LAYER_ARRAYS, rows, strict=True))
    full = [m.covariance for m in layers.values() if m.covariance is not None]
    if full:
        arrays[FULL_ARRAY] = np.concatenate([packed(C) for C in full]).astype(STATE_DTYPE)
    return arrays


@dataclass(frozen=True)
class SiteRow:
    """A row of the table of sites."""

    site: Site
    width: int
    count: float
    full: bool

    @classmethod
    def of(cls, module: str, side: Side, axis: int, width: int, count: float, *more: Any) -> Self:
        """Check a row read from a file."""
        full = more[-1:] == (FULL,)
        added = more[:-1] if full else more
        site = Site(module, side, axis, *added[:1])
        if added[1:] or not _is_site(site):
            raise CasterError("its layers are not at valid sites")
        if type(width) is not int or width < 1:
            raise CasterError("its layers do not fit together")
        if type(count) not in (int, float) or not 1 <= count < math.inf or count % 1:
            raise CasterError("its layers have invalid counts")
        return cls(site, width, count, full)

    @property
    def triangle(self) -> int:
        """Size of the packed covariance."""
        return self.width * (self.width + 1) // 2 if self.full else 0


def _is_site(site: Site) -> bool:
    known = isinstance(site.module, str) and site.side in ("in", "out")
    known = known and type(site.axis) is int and site.axis in (1, -1)
    tokens = type(site.added) is int and (site.added == 0 or (site.added > 0 and site.axis == -1))
    return known and tokens


def read_site_table(table: str) -> list[SiteRow]:
    """Read and check the table of sites in a file's metadata."""
    rows = [SiteRow.of(*row) for row in json.loads(table)]
    if len({str(row.site) for row in rows}) < len(rows):
        raise CasterError("its layers name a site twice")
    return rows


def layer_sizes(rows: list[SiteRow] | None) -> dict[str, int]:
    """Return the sizes of the layer arrays, by dimension; none without layers."""
    if rows is None:
        return {}
    triangles = sum(row.triangle for row in rows)
    full = {"layer triangles": triangles} if any(row.full for row in rows) else {}
    return {"channels": sum(row.width for row in rows)} | full


def unpack_layers(arrays: Arrays, rows: list[SiteRow]) -> Layers:
    """Split arrays, whose sizes match the table, into the moments of every site."""
    means, variances = (arrays[name] for name in LAYER_ARRAYS)
    layers, start, corner = {}, 0, 0
    for row in rows:
        channels = slice(start, start + row.width)
        covariance = None
        if row.full:
            triangle = arrays[FULL_ARRAY][corner : corner + row.triangle]
            covariance = unpacked(triangle, row.width)
            check_semidefinite(covariance[None], ROUNDING, f"covariances at {row.site}")
        layers[row.site] = ChannelMoments(
            row.count, means[channels], variances[channels], covariance
        )
        start, corner = start + row.width, corner + row.triangle
    return layers


def packed(
    matrices: NDArray[Any],  # (..., k, k)
) -> NDArray[Any]:  # (..., k (k + 1) / 2)
    """Return the upper triangles of symmetric matrices, row by row.

    >>> packed(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    upper: NDArray[Any] = matrices[..., *np.triu_indices(matrices.shape[-1])]
    return upper


def unpacked(
    triangles: NDArray[Any],  # (..., k (k + 1) / 2)
    k: int,
) -> NDArray[Any]:  # (..., k, k)
    """Return the symmetric matrices with these upper triangles.

    >>> unpacked(np.array([1.0, 2.0, 3.0]), 2)
    array([[1., 2.],
           [2., 3.]])
    """
    rows, columns = np.triu_indices(k)
    matrices = np.empty((*triangles.shape[:-1], k, k), dtype=triangles.dtype)
    matrices[..., rows, columns] = triangles
    matrices[..., columns, rows] = triangles
    return matrices


def check_semidefinite(
    covariances: NDArray[Any],  # (n, k, k), symmetric
    rounding: float,  # relative to a trace: what rounding may take from an eigenvalue
    name: str,
) -> None:
    """Raise if a covariance has an eigenvalue that is negative beyond rounding.

    >>> check_semidefinite(np.array([[[1.0, 2.0], [2.0, 1.0]]]), 1e-6, "covariances")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: its covariances are not positive semidefinite
    """
    tiny = np.finfo(np.float32).tiny  # a class or channel may not vary at all
    identity = np.eye(covariances.shape[-1])
    for start in range(0, len(covariances), AT_ONCE):
        chunk = covariances[start : start + AT_ONCE].astype(np.float64)
        traces = np.trace(chunk, axis1=1, axis2=2)
        factors = cholesky(chunk + (rounding * traces + tiny)[:, None, None] * identity)
        if not np.isfinite(factors).all():
            raise CasterError(f"its {name} are not positive semidefinite")
