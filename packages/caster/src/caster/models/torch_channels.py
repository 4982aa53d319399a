"""Moments of channels and their map to the source's, in as few launches as torch has for them.

`caster.core.channels` says what is computed. Here it is computed at every site of every pass, where
a launch costs a GPU more than the arithmetic, and torch's BatchNorm does most of it in one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from caster.core.channels import ChannelMoments


def beside(found: ChannelMoments, other: Tensor | torch.device) -> ChannelMoments:
    """Moments of any kind of array as tensors, on a device or as another tensor is.

    >>> beside(ChannelMoments(2.0, [1.0], [2.0]), torch.zeros(0, dtype=torch.float64)).mean
    tensor([1.], dtype=torch.float64)
    """
    parts = (found.mean, found.variance, found.covariance)
    held = (None if part is None else torch.as_tensor(part).to(other) for part in parts)
    return ChannelMoments(found.count, *held)


def by_channel(values: Tensor, axis: int) -> Tensor:  # (n, ...) -> (m, c) or (n, c, ...)
    """The same values with their channels along the second axis; nothing is copied.

    >>> by_channel(torch.zeros(2, 5, 5, 3), -1).shape
    torch.Size([50, 3])
    """
    if axis % values.ndim == 1:
        return values
    if values.is_contiguous():
        return values.view(-1, values.shape[-1])
    return values.movedim(-1, 1)


def put_back(moved: Tensor, given: Tensor, values: Tensor) -> Tensor:
    """What became of `given`, the values by channel, as the values lie."""
    if given.ndim < values.ndim:
        return moved.view(values.shape)
    return moved if given is values else moved.movedim(1, -1)


def measure(values: Tensor, axis: int, samples: int) -> ChannelMoments:
    """`ChannelMoments.of`, of values that belong to so many samples; in float32 or wider.

    >>> found = measure(torch.tensor([[1.0], [3.0]]), 1, samples=2)
    >>> found.mean, found.variance
    (tensor([2.]), tensor([1.]))
    """
    given = by_channel(values, axis)
    # A GPU adds up halves in float32. A CPU does where running moments to be updated are float32.
    rough = values.dtype in (torch.float16, torch.bfloat16) and not values.is_cuda
    spare = values.new_zeros(2, given.shape[1], dtype=torch.float32) if rough else (None, None)
    mean, variance = torch.batch_norm_update_stats(given, spare[0], spare[1], 0.0)
    return ChannelMoments(float(samples), mean, variance)


def merged(past: ChannelMoments, batch: ChannelMoments) -> ChannelMoments:
    """`past + batch`, without covariances.

    >>> one, other = (measure(torch.tensor(x)[:, None], 1, len(x)) for x in ([1.0, 3.0], [5.0]))
    >>> both = merged(one, other)
    >>> both.count, both.mean, both.variance * 3
    (3.0, tensor([3.]), tensor([8.]))
    """
    count = past.count + batch.count
    share = batch.count / count
    mean, variance = _between(past, batch, share)
    step = batch.mean - past.mean
    return ChannelMoments(count, mean, variance.addcmul_(step, step, value=share * (1 - share)))


def blended(target: ChannelMoments, source: ChannelMoments, prior: float) -> ChannelMoments:
    """`shrunk`: a target's moments, and N samples of the source's.

    >>> source = ChannelMoments(9.0, torch.zeros(1), torch.ones(1))
    >>> blended(ChannelMoments(8.0, torch.tensor([4.0]), torch.tensor([3.0])), source, 8.0).mean
    tensor([2.])
    """
    count = prior + target.count
    share = target.count / count
    moments = ChannelMoments(count, *_between(source, target, share))
    if target.covariance is None or source.covariance is None:
        return moments
    return replace(moments, covariance=torch.lerp(source.covariance, target.covariance, share))


def _between(one: ChannelMoments, other: ChannelMoments, share: float) -> tuple[Tensor, ...]:
    ends = [one.mean, one.variance], [other.mean, other.variance]
    return torch._foreach_lerp(*ends, share)


class ToSource:
    """`to_source` of one site, and the values moved by it.

    A BatchNorm that is lent the target's moments does it, with the source's for its weights.

    >>> move = ToSource(ChannelMoments(9.0, torch.tensor([1.0]), torch.tensor([4.0])), eps=0.0)
    >>> target = ChannelMoments(9.0, torch.tensor([5.0]), torch.tensor([1.0]))
    >>> move(torch.tensor([[5.0], [6.0]]), target, axis=1)
    tensor([[1.],
            [3.]])
    """

    def __init__(self, source: ChannelMoments, eps: float) -> None:
        self.source = source
        self.eps = eps
        self._spread = (source.variance + eps).sqrt()

    def __call__(self, values: Tensor, target: ChannelMoments, axis: int) -> Tensor:
        """Values of a target with these moments, given the source's."""
        given = by_channel(values, axis)
        moved = functional.batch_norm(
            given,
            target.mean,
            target.variance,
            weight=self._spread,
            bias=self.source.mean,
            eps=self.eps,
        )
        return put_back(moved, given, values)
