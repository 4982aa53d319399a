"""Detect samples that no image could have produced, at the first site of a pass.

An attacker who shares a stream can move its statistics as far as input values go, but images have a
bounded range. A sample outside it, with more energy in a channel of the first site than the most
extreme images have there, is not an image, however shifted.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from caster.adapt.layer_passes import Range
from caster.core.channels import ChannelMoments, Site
from caster.models.activation_statistics import hook_on
from caster.models.torch import TorchModel

MARGIN = 2.0  # times the energy that extreme images have in a channel
SLACK = 1e-3  # of the range: how far rounding may lead out of it
GREYS = 9  # even images from the lowest value to the highest, for layers that raise contrasts
UNKNOWN_RANGE = 100.0  # times the source's variance, where the range of images is not known
BLOCKS = (4, 16, 64)  # blocks a side of random images, beside single pixels
DRAWS = 4  # random images of each kind


def energies(values: Tensor, axis: int, samples: int, mean: Tensor) -> Tensor | None:
    """Mean squared distance from the source's mean, by sample and channel: (n, ...) -> (n, c).

    None where the first axis does not hold the samples, each as often as the others.

    >>> energies(torch.tensor([[3.0, 5.0], [0.0, 0.0]]), -1, 2, torch.tensor([1.0, 1.0]))
    tensor([[ 4., 16.],
            [ 1.,  1.]])
    """
    if values.shape[0] % samples:
        return None
    parts = values.reshape(samples, -1, *values.shape[1:])  # several where an image has windows
    channels = axis + 1 if axis > 0 else parts.ndim - 1
    others = [i for i in range(1, parts.ndim) if i != channels]
    # Two reads that keep nothing; half precision would overflow.
    wide = torch.promote_types(values.dtype, torch.float32)
    squares: Tensor = torch.linalg.vector_norm(parts, dim=others, dtype=wide) ** 2
    own = parts.mean(others, dtype=wide)
    positions = values.numel() // own.numel()
    return squares.div(positions).sub(2 * mean * own).add(mean**2)


def plausible(found: Tensor | None, limits: Tensor, samples: int) -> Tensor:  # (n, c), (c,) -> (n,)
    """Whether all channels of a sample are within their limits; NaN is not.

    >>> plausible(torch.tensor([[1.0, 2.0], [1.0, torch.nan]]), torch.tensor([2.0, 2.0]), 2)
    tensor([ True, False])
    """
    if found is None:
        return limits.new_ones(samples, dtype=torch.bool)
    kept: Tensor = found.le(limits).all(1)
    return kept


def broad_limits(source: ChannelMoments) -> Tensor:  # (c,)
    """Limits if only the source's moments are known."""
    variance: Tensor = source.variance.float()
    return variance.clamp(min=variance.mean()).mul(UNKNOWN_RANGE)


def sharp_limits(
    twin: TorchModel,  # to put hooks on
    sources: dict[Site, ChannelMoments],
    images: Tensor,  # extreme ones
) -> dict[Site, Tensor]:  # (c,)
    """Limits at the first site of a pass, measured on extreme images."""
    found: dict[Site, Tensor] = {}

    def stop(site: Site, layer: nn.Module, values: Tensor) -> None:
        source = sources[site]
        seen = energies(site.of_images(values), site.axis, len(images), source.mean)
        if seen is not None:
            found[site] = MARGIN * torch.maximum(seen.amax(0), source.variance.float())
        raise _Met

    for site in sources:
        hook_on(twin.module, site, partial(stop, site), "fit again")
    with suppress(_Met):
        twin.run_placed(images)
    return found


class _Met(Exception):  # noqa: N818 - no error: the rest of a pass is not needed
    """Stop a pass at its first site."""


def within(ends: Range, batch: Tensor) -> Tensor:  # (n, ...) -> (n,)
    """Whether all values of a sample are in the range of images.

    >>> within((0.0, 1.0), torch.tensor([[0.0, 1.0], [0.5, 2.0]]))
    tensor([ True, False])
    """
    low, high = (torch.as_tensor(end, dtype=torch.float32, device=batch.device) for end in ends)
    slack = SLACK * (high - low)
    inside: Tensor = (batch >= low - slack) & (batch <= high + slack)
    return inside.flatten(1).all(1)


def extremes(ends: Range, batch: Tensor) -> Tensor:
    """Extreme images in the shape of a batch: constant ones, random blocks, random pixels.

    >>> found = extremes((0.0, 1.0), torch.zeros(2, 3, 8, 8))
    >>> found.shape, found.min(), found.max()
    (torch.Size([23, 3, 8, 8]), tensor(0.), tensor(1.))
    """
    own = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers stay as they were

    def drawn(*shape: int) -> Tensor:
        return torch.randint(2, (DRAWS, *shape), generator=own).float()

    shape = batch.shape[1:]
    greys = torch.linspace(0, 1, GREYS).reshape(-1, *(1 for _ in shape))
    parts = [greys.expand(-1, *shape), drawn(*shape)]
    if len(shape) == 3:
        channels, *sides = shape
        if channels <= 3:
            corners = torch.tensor(list(product((0.0, 1.0), repeat=channels))[1:-1])
            parts.append(corners.reshape(-1, channels, 1, 1).expand(-1, *shape))
        grids = [drawn(channels, count, count) for count in BLOCKS if count < min(sides)]
        parts += [functional.interpolate(grid, tuple(sides)) for grid in grids]
    corners = torch.cat(parts)
    low, high = (torch.as_tensor(end, dtype=torch.float32) for end in ends)
    return (low + (high - low) * corners).to(batch)
