"""Layer moments in state files: all sites concatenated, covariances as packed upper triangles.

Class moments are stored relative to those of all samples, in float16: for every class and channel,
(m_c - m) / sqrt(v) and sqrt(v_c / v). This is precise to 1e-3 of the channel's standard deviation,
whatever its unit, and takes a quarter of the size of float64 sums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.config import STATE_DTYPE
from caster.core.channels import ChannelMoments, Side, Site
from caster.core.class_moments import ClassChannelMoments
from caster.core.linalg import cholesky
from caster.errors import CasterError
from caster.io.signed_tensors import Arrays

LAYER_ARRAYS = ("layer_means", "layer_variances")
FULL, FULL_ARRAY = "full", "layer_covariances"  # of sites that can have full maps
CLASSES, CLASS_ARRAYS = "classes", ("layer_class_means", "layer_class_deviations")
CLASS_DTYPE = np.float16
# Largest size of all class moments of a state. The feature covariances of a ResNet-50 with 1,000
# ImageNet classes take 33 MB, and its state should stay below 60 MB.
CLASS_BYTES = 24_000_000
CLASS_ROUNDING = 2**-9  # largest error of pooled moments, in standard deviations or variances
ROUNDING = 1e-4  # relative to a trace: layer moments are sums of float32 products
AT_ONCE = 16  # matrices checked together: they fit the CPU cache

Layers = dict[Site, ChannelMoments]


def site_table(layers: Layers) -> str:
    """Return the table of sites for the file's metadata."""
    return json.dumps(
        [
            [site.module, site.side, site.axis, len(moments.mean), moments.count]
            + ([site.prefix_tokens] if site.prefix_tokens else [])
            + ([] if moments.covariance is None else [FULL])
            + ([] if moments.classes is None else [CLASSES])
            for site, moments in layers.items()
        ]
    )


def pack_layers(
    layers: Layers,
    counts: NDArray[Any],  # (C,), samples of each class
) -> Arrays:
    """Concatenate the moments of all sites."""
    none: list[NDArray[Any]] = [np.empty(0)]
    means = none + [moments.mean for moments in layers.values()]
    variances = none + [moments.variance for moments in layers.values()]
    rows = [np.concatenate(parts).astype(STATE_DTYPE) for parts in (means, variances)]
    arrays = dict(zip(LAYER_ARRAYS, rows, strict=True))
    full = [m.covariance for m in layers.values() if m.covariance is not None]
    if full:
        arrays[FULL_ARRAY] = np.concatenate([packed(C) for C in full]).astype(STATE_DTYPE)
    relative = []
    for site, moments in layers.items():
        if moments.classes is not None:
            if not np.array_equal(moments.classes.counts, counts):
                raise CasterError(f"its classes at {site} have other counts")
            relative.append(_relative(moments.classes, moments))
    if relative:
        columns = zip(*relative, strict=True)
        arrays |= {
            name: np.concatenate(parts, axis=1)
            for name, parts in zip(CLASS_ARRAYS, columns, strict=True)
        }
    return arrays


@dataclass(frozen=True)
class SiteRow:
    """A row of the table of sites."""

    site: Site
    width: int
    count: float
    full: bool
    classes: bool

    @classmethod
    def of(cls, module: str, side: Side, axis: int, width: int, count: float, *more: Any) -> Self:
        """Check a row read from a file."""
        classes = more[-1:] == (CLASSES,)
        more = more[:-1] if classes else more
        full = more[-1:] == (FULL,)
        prefix = more[:-1] if full else more
        site = Site(module, side, axis, *prefix[:1])
        if prefix[1:] or not _is_site(site):
            raise CasterError("its layers are not at valid sites")
        if type(width) is not int or width < 1:
            raise CasterError("its layers do not fit together")
        if type(count) not in (int, float) or not 1 <= count < math.inf or count % 1:
            raise CasterError("its layers have invalid counts")
        return cls(site, width, count, full, classes)

    @property
    def triangle(self) -> int:
        """Size of the packed covariance."""
        return self.width * (self.width + 1) // 2 if self.full else 0


def _is_site(site: Site) -> bool:
    known = isinstance(site.module, str) and site.side in ("in", "out")
    known = known and type(site.axis) is int and site.axis in (1, -1)
    count = site.prefix_tokens
    tokens = type(count) is int and (count == 0 or (count > 0 and site.axis == -1))
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
    by_class = [row.width for row in rows if row.classes]
    classes = {"class channels": sum(by_class)} if by_class else {}
    return {"channels": sum(row.width for row in rows)} | full | classes


def unpack_layers(arrays: Arrays, rows: list[SiteRow]) -> Layers:
    """Split arrays, whose sizes match the table, into the moments of every site."""
    means, variances = (arrays[name] for name in LAYER_ARRAYS)
    layers, start, corner, column = {}, 0, 0, 0
    for row in rows:
        channels = slice(start, start + row.width)
        covariance = None
        if row.full:
            triangle = arrays[FULL_ARRAY][corner : corner + row.triangle]
            covariance = unpacked(triangle, row.width)
            check_semidefinite(covariance[None], ROUNDING, f"covariances at {row.site}")
        moments = ChannelMoments(row.count, means[channels], variances[channels], covariance)
        if row.classes:
            if row.count != arrays["counts"].sum():
                raise CasterError(f"its classes at {row.site} have other counts")
            z, s = (arrays[name][:, column : column + row.width] for name in CLASS_ARRAYS)
            classes = _absolute(z, s, arrays["counts"].astype(np.float64), moments)
            moments = replace(moments, classes=classes)
            column += row.width
        layers[row.site] = moments
        start, corner = start + row.width, corner + row.triangle
    return layers


# --- class moments -------------------------------------------------------------------------------


def class_sites(widths: Mapping[Site, int], n_classes: int) -> set[Site]:
    """Sites whose class moments are stored: as many of the deepest as fit `CLASS_BYTES`.

    Moments of the shallowest sites depend least on the classes.

    >>> sites = [Site(f"blocks.{i}", "out", -1) for i in range(24)]
    >>> len(class_sites(dict.fromkeys(sites, 1024), n_classes=1000))
    5
    """
    item = len(CLASS_ARRAYS) * np.dtype(CLASS_DTYPE).itemsize
    kept, size = set(), 0
    for site, width in reversed(list(widths.items())):
        size += n_classes * width * item
        if size > CLASS_BYTES:
            break
        kept.add(site)
    return kept


def round_classes(classes: ClassChannelMoments, pooled: ChannelMoments) -> ClassChannelMoments:
    """Round class moments as saving and loading would, relative to stored pooled moments.

    >>> pooled = ChannelMoments(2.0, np.float32([2.0]), np.float32([5.0]))
    >>> found = ClassChannelMoments(np.ones(2), np.array([[1.0], [3.0]]), np.array([[4.0], [4.0]]))
    >>> round_classes(found, pooled).means.round(3).tolist()
    [[1.0], [3.0]]
    """
    return _absolute(*_relative(classes.centred_on(pooled), pooled), classes.counts, pooled)


def _relative(
    classes: ClassChannelMoments, pooled: ChannelMoments
) -> tuple[NDArray[Any], NDArray[Any]]:  # (C, c), (C, c)
    """Means and standard deviations in units of the pooled standard deviation, in float16.

    A channel that is constant up to rounding has no unit: its classes get the pooled moments.
    """
    mean, deviation = _unit(pooled)
    steps, variances = classes.means - mean, classes.variances
    live = deviation > np.finfo(STATE_DTYPE).eps * np.abs(mean)
    live &= steps.any(axis=0) | variances.any(axis=0)
    unit = np.where(live, deviation, 1.0)
    means = np.where(live, steps / unit, 0.0)
    deviations = np.where(live, np.sqrt(variances) / unit, 1.0)
    return means.astype(CLASS_DTYPE), deviations.astype(CLASS_DTYPE)


def _absolute(
    means: NDArray[Any],  # (C, c), from `_relative`
    deviations: NDArray[Any],  # (C, c)
    counts: NDArray[Any],  # (C,)
    pooled: ChannelMoments,
) -> ClassChannelMoments:
    """Class moments in the channels' units, in float64, so that rounding them again is exact."""
    z, s = means.astype(np.float64), deviations.astype(np.float64)
    pi = counts / counts.sum()
    law = np.abs(pi @ z), np.abs(pi @ (z**2 + s**2) - 1)
    if not all((error <= CLASS_ROUNDING).all() for error in law):
        raise CasterError("its class moments do not add up to those of all samples")
    mean, deviation = _unit(pooled)
    return ClassChannelMoments(counts, mean + deviation * z, (deviation * s) ** 2)


def _unit(pooled: ChannelMoments) -> tuple[NDArray[Any], NDArray[Any]]:  # (c,), (c,)
    return pooled.mean.astype(np.float64), np.sqrt(pooled.variance.astype(np.float64))


# --- symmetric matrices --------------------------------------------------------------------------


def packed(
    matrices: NDArray[Any],  # (..., k, k)
) -> NDArray[Any]:  # (..., k (k + 1) / 2)
    """Return the upper triangles of symmetric matrices, row by row.

    >>> packed(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    *stack, k, _ = matrices.shape
    upper = np.flatnonzero(np.triu(np.ones((k, k), dtype=bool)))
    return np.take(matrices.reshape(*stack, k * k), upper, axis=-1)  # indexing is 8 times as slow


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
    rounding: float,  # largest rounding error of an eigenvalue, relative to the trace
    name: str,
) -> None:
    """Raise if a covariance has an eigenvalue that is negative beyond rounding.

    >>> check_semidefinite(np.array([[[1.0, 2.0], [2.0, 1.0]]]), 1e-6, "covariances")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: its covariances are not positive semidefinite
    """
    tiny = np.finfo(np.float32).tiny  # for a class or channel that does not vary
    identity = np.eye(covariances.shape[-1])
    for start in range(0, len(covariances), AT_ONCE):
        chunk = covariances[start : start + AT_ONCE].astype(np.float64)
        traces = np.trace(chunk, axis1=1, axis2=2)
        factors = cholesky(chunk + (rounding * traces + tiny)[:, None, None] * identity)
        if not np.isfinite(factors).all():
            raise CasterError(f"its {name} are not positive semidefinite")
