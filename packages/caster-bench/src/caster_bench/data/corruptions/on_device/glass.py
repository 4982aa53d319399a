"""Frosted glass in torch: chains of displaced pixels, followed in all images at once."""

from __future__ import annotations

import torch
from torch import Tensor

from caster_bench.data.corruptions.on_device.draws import Draws


def displaced(
    height: int,
    width: int,
    reach: int,
    draws: Draws,
) -> Tensor:  # (n, H W) int64
    """Which pixel each one has the colour of, after a round; NumPy's `displaced` says how."""
    rows, columns = (range(side - reach, reach, -1) for side in (height, width))
    lots = draws.uniform(len(rows), len(columns), 2)
    shifts = (lots * (2 * reach)).long() - reach
    place = lots.device
    here = torch.arange(height * width, device=place)
    turns = here.view(height, width)[list(rows)][:, list(columns)].flatten()
    inside = torch.zeros(height * width, dtype=torch.bool, device=place)
    inside[turns] = True
    sources = here.repeat(len(lots), 1)
    sources[:, turns] += (shifts[..., 0] + shifts[..., 1] * width).flatten(1)
    done_before = inside & inside[sources] & (sources > here)
    while done_before.any():
        done_after = done_before.gather(1, sources)
        sources = torch.where(done_before, sources.gather(1, sources), sources)
        done_before &= done_after
    return sources
