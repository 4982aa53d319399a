"""Noise in torch; the definitions are those of `caster_bench.data.corruptions.noise`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

from caster_bench.data.corruptions.on_device.draws import Draws


def gaussian_noise(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # the standard deviation
    draws: Draws,
) -> Tensor:
    """Noise of the same strength everywhere: x + N(0, s²)."""
    return images + constants * draws.normal(*images.shape[1:]).float()


def speckle_noise(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # the standard deviation, relative to the value
    draws: Draws,
) -> Tensor:
    """Noise that grows with the light: x + x N(0, s²)."""
    return images + images * (constants * draws.normal(*images.shape[1:]).float())


def shot_noise(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # photons that make full white
    draws: Draws,
) -> Tensor:
    """Light counted photon by photon: Poisson(rate x) / rate, by inversion.

    Images have 256 levels, so there are 256 distributions. Their tables lie end to end, each one
    higher than the one before, and one search finds level and count at once.
    """
    table = photons(constants)
    ends = torch.from_numpy(table + np.arange(256)[:, np.newaxis]).to(images.device)
    levels = (images * 255).round().double()
    places = torch.searchsorted(
        ends.flatten(), levels + draws.uniform(*images.shape[1:]), right=True
    )
    counts: Tensor = places - levels * table.shape[1]
    return (counts / constants).float()  # CUDA would round the quotient of singles otherwise


def photons(rate: float) -> NDArray[np.float64]:  # (256, counts)
    """How likely at most so many photons are, for each of 256 levels.

    >>> photons(3)[255, :3].round(4)  # a Poisson distribution of mean 3
    array([0.0498, 0.1991, 0.4232])
    """
    most = int(stats.poisson.isf(2**-34, rate)) + 1  # rarer than the draws can tell
    chances: NDArray[np.float64] = special.pdtr(
        np.arange(most + 1), rate * np.arange(256)[:, np.newaxis] / 255
    )
    return chances


def impulse_noise(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # the share of values that are lost
    draws: Draws,
) -> Tensor:
    """Salt and pepper: values, not pixels, are lost to 0 or 1, as often to the one as the other."""
    lot = draws.uniform(*images.shape[1:])
    salted = torch.where(lot < constants / 2, 1, images)
    return torch.where((lot >= constants / 2) & (lot < constants), 0, salted)
