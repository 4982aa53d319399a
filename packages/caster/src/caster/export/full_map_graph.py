"""Full maps of a settled stream in a graph: `core.channels.to_source_full` at every full site.

ONNX has no eigensolver, so matrix roots use products alone, in float64. Sites with the same number
of channels are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import FULL_MAP_EPS, FULL_MAP_ROWS, ChannelMoments
from caster.core.linalg import symmetric_roots
from caster.export import graph_arrays as xp
from caster.export.graph_arrays import GraphArray
from caster.export.matrix_roots import scaled_roots

Floats = NDArray[np.floating]
MIN_ROOT = 1e-6  # smallest invertible root of an eigenvalue, relative to the Frobenius norm
MAX_ROOT_ERROR = 1e-6  # largest accepted error of an inverse root


@dataclass(frozen=True, eq=False)
class FullSite:
    """Source moments at a site with a full map."""

    channels: slice  # among the channels of all sites
    mean: Floats  # (c,)
    covariance: Floats  # (c, c)
    positions: int  # per sample
    at: int  # offset of its covariance among those of all full sites

    @property
    def width(self) -> int:
        """Number of channels."""
        return len(self.mean)

    @property
    def eps(self) -> float:
        """Regularisation that is added to eigenvalues."""
        return FULL_MAP_EPS * float(self.covariance.diagonal().mean())


def full_sites(
    layers: Sequence[ChannelMoments],  # of all sites; full maps need a covariance
    positions: Sequence[int | None],
) -> tuple[FullSite, ...]:
    """Collect the sites that have a covariance."""
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
    """Evaluate a function of full sites, batched by width; return one array per site."""
    found: dict[int, GraphArray] = {}
    for width in sorted({site.width for site in sites}):
        group = [site for site in sites if site.width == width]
        together = compute(group)
        found |= {site.at: together[i] for i, site in enumerate(group)}
    return [found[site.at] for site in sites]


def matrices_of(joined: GraphArray, group: Sequence[FullSite]) -> GraphArray:  # -> (k, c, c)
    """Unpack the covariances of a group of sites."""
    c = group[0].width
    return xp.stack([joined[site.at : site.at + c * c].reshape(c, c) for site in group])


def vectors_of(joined: GraphArray, group: Sequence[FullSite]) -> GraphArray:  # (D,) -> (k, c)
    """Select the channels of a group of sites."""
    return xp.stack([joined[site.channels] for site in group])


def merged_covariances(
    sites: Sequence[FullSite],
    past: GraphArray,  # (sum of c^2,)
    batch: GraphArray,
    step: GraphArray,  # (D,), from the mean of the past to that of the batch
    share: GraphArray,  # (), of the batch
) -> GraphArray:  # (sum of c^2,)
    """Merge the covariances of the past and a batch."""

    def outer(group: list[FullSite]) -> GraphArray:
        steps, c = vectors_of(step, group), group[0].width
        return steps.reshape(0, c, 1) * steps.reshape(0, 1, c)

    between = xp.concat([each.reshape(-1) for each in of_width(sites, outer)])
    return past + share * (batch - past) + share * (1.0 - share) * between


def full_maps(
    sites: Sequence[FullSite],
    covariances: GraphArray,  # (sum of c^2,), of the target
    means: GraphArray,  # (D,), of the target, shrunk towards the source's
    scales: GraphArray,  # (D,), of the diagonal map
    own: GraphArray,  # (), weight of the target's covariances against the source's
    count: GraphArray,  # (), samples behind both
) -> tuple[list[GraphArray], list[GraphArray]]:  # (c, c), (c,) of each site
    """Find A and b that map mean and covariance of the target to the source's.

    A is diagonal if the target has too few samples or the root does not converge.
    """

    def matrix(group: list[FullSite]) -> GraphArray:
        c = group[0].width
        identity = xp.constant(np.eye(c))
        source = np.stack([site.covariance for site in group])
        eps = np.array([site.eps for site in group])[:, None, None]
        root = xp.constant(np.stack([symmetric_roots(s.covariance, s.eps)[0] for s in group]))
        target = matrices_of(covariances, group).astype(np.float64)
        target = (
            xp.constant(source) + own * (target - xp.constant(source)) + xp.constant(eps) * identity
        )
        inverse, usable = inverse_roots(root @ target @ root, c)
        rows = np.array([FULL_MAP_ROWS * c / site.positions for site in group])
        usable = usable & (count >= xp.constant(rows[:, None, None]))
        diagonal = vectors_of(scales, group).astype(np.float64).reshape(0, c, 1) * identity
        return xp.where(usable, root @ inverse @ root, diagonal)

    maps = of_width(sites, matrix)
    wide = means.astype(np.float64)
    shifts = [
        xp.constant(site.mean) - (A @ wide[site.channels].reshape(-1, 1)).reshape(-1)
        for site, A in zip(sites, maps, strict=True)
    ]
    return maps, shifts


def inverse_roots(
    matrices: GraphArray,  # (k, c, c), positive definite
    c: int,
) -> tuple[GraphArray, GraphArray]:  # (k, c, c), (k, 1, 1)
    """Inverse symmetric roots, and whether the iteration converged."""
    identity = xp.constant(np.eye(c))
    root, inverse, scale = scaled_roots(matrices, identity, MIN_ROOT)
    off = xp.absolute(inverse @ root - identity).max(2, keepdims=True).max(1, keepdims=True)
    return inverse / scale, off < MAX_ROOT_ERROR


def with_shifts(
    shift: GraphArray,  # (D,)
    sites: Sequence[FullSite],
    own: Sequence[GraphArray],  # (c,) of each full site
) -> GraphArray:  # (D,)
    """Replace the shifts of full sites."""
    parts, start = [], 0
    for site, each in zip(sites, own, strict=True):
        if site.channels.start > start:
            parts.append(shift[start : site.channels.start])
        parts.append(each.astype(np.float32))
        start = site.channels.stop
    return xp.concat([*parts, shift[start:]])
