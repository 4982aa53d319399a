"""Full maps of sites with few channels and many positions: all covariances, not variances alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from caster.core.channels import ChannelMoments, optimal_map
from caster.core.linalg import identity_like, symmetric_roots
from caster.models.torch_channels import by_channel, measure, put_back

MOST_CHANNELS = 128  # c of a site that gets one: its cost is a root of a c x c matrix a batch
ROWS = 50  # times c: so many values a channel must have, be they of samples or positions
EPS = 1e-3  # added to eigenvalues, in units of a site's mean variance: smaller ones are noise


def has_full_map(values: Tensor, axis: int) -> bool:
    """Whether a site can have a full map: few channels, and more than one position."""
    return values.ndim > 2 and values.shape[axis] <= MOST_CHANNELS


def measure_full(values: Tensor, axis: int, samples: int) -> ChannelMoments:
    """`ChannelMoments.of` with the covariance, in float32 or wider.

    >>> found = measure_full(torch.tensor([[[1.0, 3.0], [0.0, 4.0]]]), 1, samples=1)
    >>> found.covariance
    tensor([[1., 2.],
            [2., 4.]])
    """
    found = measure(values, axis, samples)
    given = by_channel(values, axis)
    rows = given.transpose(0, 1).flatten(1).to(found.mean.dtype) - found.mean[:, None]
    return replace(found, covariance=rows @ rows.T / rows.shape[1])


class FullToSource:
    """`to_source_full` of one site, and the values moved by it.

    >>> source = measure_full(torch.tensor([[[1.0, 3.0, 5.0], [0.0, 4.0, 2.0]]]), 1, samples=1)
    >>> x = torch.tensor([[[1.0, -1.0, 2.0], [3.0, 3.0, 9.0]]])
    >>> moved = FullToSource(source)(x, measure_full(x, 1, samples=1), axis=1)
    >>> found = measure_full(moved, 1, samples=1)
    >>> bool((found.covariance - source.covariance).abs().max() < 0.02)  # but for EPS
    True
    """

    def __init__(self, source: ChannelMoments) -> None:
        assert source.covariance is not None
        self.source = source
        self._eps = EPS * source.variance.double().mean()
        covariance = _raised(source.covariance, self._eps)
        self._variance = covariance.diagonal()
        self._root, _ = symmetric_roots(covariance, 0.0)

    def __call__(self, values: Tensor, target: ChannelMoments, axis: int) -> Tensor:
        """Values of a target with these moments, given the source's."""
        assert target.covariance is not None
        C_t = _raised(target.covariance, self._eps)
        A = optimal_map(C_t, self._root)
        # On a GPU roots are had without waiting, or are NaN: then this is the diagonal map.
        plain = (self._variance / C_t.diagonal()).sqrt().diag()
        A = torch.where(A.isfinite().all(), A, plain).to(target.mean.dtype)
        b = self.source.mean - A @ target.mean
        given = by_channel(values, axis)
        rows = given.movedim(1, -1)
        if rows.is_contiguous():
            moved = torch.addmm(b, rows.view(-1, len(b)).to(A.dtype), A).view(rows.shape)
            moved = moved.movedim(-1, 1)
        else:
            wide = given.flatten(2).to(A.dtype)
            moved = torch.baddbmm(b[:, None], A.expand(len(wide), -1, -1), wide).view(given.shape)
        return put_back(moved.to(values.dtype), given, values)


def _raised(covariance: Tensor, eps: Tensor) -> Tensor:
    """A covariance in float64, with eps added to its eigenvalues."""
    wide = covariance.double()
    raised: Tensor = wide + eps * identity_like(wide)
    return raised
