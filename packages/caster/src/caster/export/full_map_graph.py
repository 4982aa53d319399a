"""Full maps of a settled stream as a graph: `core.channels.to_source_full` at every full site.

ONNX has no eigenvalues, so roots are found by products alone, in float64. Sites with equally many
channels are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import FULL_MAP_EPS, FULL_MAP_ROWS, ChannelMoments
from caster.core.linalg import symmetric_roots
from caster.export.graph_arrays import (
    GraphArray,
    absolute,
    concat,
    constant,
    stack,
    where,
)
from caster.export.matrix_roots import scaled_roots

Floats = NDArray[np.floating]
SMALLEST = 1e-6  # root of an eigenvalue, relative to the Frobenius norm, that can be inverted
CLOSE = 1e-6  # largest error of an inverse root that is used


@dataclass(frozen=True, eq=False)
class FullSite:
    """The source at a site with a full map."""

    channels: slice  # among those of all sites
    mean: Floats  # (c,)
    covariance: Floats  # (c, c)
    positions: int  # per sample
    at: int  # where its covariance starts among those of all full sites

    @property
    def width(self) -> int:
        """Number of channels."""
        return len(self.mean)

    @property
    def eps(self) -> float:
        """What is added to eigenvalues."""
        return FULL_MAP_EPS * float(self.covariance.diagonal().mean())


def full_sites(
    layers: Sequence[ChannelMoments],  # of all sites; those with a covariance have a full map
    positions: Sequence[int | None],
) -> tuple[FullSite, ...]:
    """The full sites of a network."""
    found, start, at = [], 0, 0
    for moments, count in zip(layers, positions, strict=True):
        stop = start + len(moments.mean)
        if moments.covariance is not None:
            mean, C = (np.asarray(p, np.float64) for p in (moments.mean, moments.covariance))
            found.append(FullSite(slice(start, stop), mean, C, count or 1, at))
            at += (stop - start) ** 2
        start = stop
    return tuple(found)


def of_width(
    sites: Sequence[FullSite], compute: Callable[[list[FullSite]], GraphArray]
) -> list[GraphArray]:
    """Compute something of the full sites, those of one width together: (k, ...) -> (...) each."""
    found: dict[int, GraphArray] = {}
    for width in sorted({site.width for site in sites}):
        group = [site for site in sites if site.width == width]
        together = compute(group)
        found |= {site.at: together[i] for i, site in enumerate(group)}
    return [found[site.at] for site in sites]


def matrices_of(joined: GraphArray, group: Sequence[FullSite]) -> GraphArray:  # -> (k, c, c)
    """The covariances of some sites among those of all."""
    c = group[0].width
    return stack([joined[site.at : site.at + c * c].reshape(c, c) for site in group])


def vectors_of(joined: GraphArray, group: Sequence[FullSite]) -> GraphArray:  # (D,) -> (k, c)
    """The channels of some sites among those of all."""
    return stack([joined[site.channels] for site in group])


def merged_covariances(
    sites: Sequence[FullSite],
    past: GraphArray,  # (sum of c^2,)
    batch: GraphArray,
    step: GraphArray,  # (D,), from the mean of the past to that of the batch
    share: GraphArray,  # (), of the batch
) -> GraphArray:  # (sum of c^2,)
    """Covariances of all samples together."""

    def outer(group: list[FullSite]) -> GraphArray:
        steps, c = vectors_of(step, group), group[0].width
        return steps.reshape(0, c, 1) * steps.reshape(0, 1, c)

    between = concat([each.reshape(-1) for each in of_width(sites, outer)])
    return past + share * (batch - past) + share * (1.0 - share) * between


def full_maps(
    sites: Sequence[FullSite],
    covariances: GraphArray,  # (sum of c^2,), of the target
    means: GraphArray,  # (D,), of the target, shrunk towards the source's
    scales: GraphArray,  # (D,), of the diagonal map
    own: GraphArray,  # (), weight of the target's covariances, the rest is the source's
    count: GraphArray,  # (), samples behind both
) -> tuple[list[GraphArray], list[GraphArray]]:  # (c, c), (c,) of each site
    """A and b that map mean and covariance of the target to the source's.

    Diagonal where the target rests on too few values, or a root cannot be found.
    """

    def matrix(group: list[FullSite]) -> GraphArray:
        c = group[0].width
        identity = constant(np.eye(c))
        source = np.stack([site.covariance for site in group])
        eps = np.array([site.eps for site in group])[:, None, None]
        root = constant(np.stack([symmetric_roots(s.covariance, s.eps)[0] for s in group]))
        target = matrices_of(covariances, group).astype(np.float64)
        target = constant(source) + own * (target - constant(source)) + constant(eps) * identity
        inverse, usable = inverse_roots(root @ target @ root, c)
        rows = np.array([FULL_MAP_ROWS * c / site.positions for site in group])
        usable = usable & (count >= constant(rows[:, None, None]))
        diagonal = vectors_of(scales, group).astype(np.float64).reshape(0, c, 1) * identity
        return where(usable, root @ inverse @ root, diagonal)

    maps = of_width(sites, matrix)
    wide = means.astype(np.float64)
    shifts = [
        constant(site.mean) - (A @ wide[site.channels].reshape(-1, 1)).reshape(-1)
        for site, A in zip(sites, maps, strict=True)
    ]
    return maps, shifts


def inverse_roots(
    matrices: GraphArray,  # (k, c, c), positive definite
    c: int,
) -> tuple[GraphArray, GraphArray]:  # (k, c, c), (k, 1, 1)
    """Inverse symmetric roots, and whether they are close."""
    identity = constant(np.eye(c))
    root, inverse, scale = scaled_roots(matrices, identity, SMALLEST)
    off = absolute(inverse @ root - identity).max(2, keepdims=True).max(1, keepdims=True)
    return inverse / scale, off < CLOSE


def with_shifts(
    shift: GraphArray,  # (D,)
    sites: Sequence[FullSite],
    own: Sequence[GraphArray],  # (c,) of each
) -> GraphArray:  # (D,)
    """The shifts of all sites, those of full sites replaced."""
    parts, start = [], 0
    for site, each in zip(sites, own, strict=True):
        if site.channels.start > start:
            parts.append(shift[start : site.channels.start])
        parts.append(each.astype(np.float32))
        start = site.channels.stop
    return concat([*parts, shift[start:]])
