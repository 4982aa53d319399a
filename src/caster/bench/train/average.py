"""The average of weights over steps: what is kept of a run."""

from __future__ import annotations

import copy

import torch
from torch import nn

WARM = 10  # steps after which the average begins to reach back


class Average:
    """An exponential mean of a network's parameters and buffers, in a network of its own.

    The first steps weigh more, as long as a mean of few says more than the start.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay
        self._pairs = [
            (mean, value)
            for mean, value in zip(
                self.net.state_dict().values(), net.state_dict().values(), strict=True
            )
        ]

    def update(self, step: int) -> None:
        """Take in the network as it is after a step; steps count from 0."""
        decay = min(self.decay, (1 + step) / (WARM + step))
        real = [(m, v) for m, v in self._pairs if m.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_([m for m, _ in real], [v for _, v in real], 1 - decay)
            for mean, value in self._pairs:
                if not mean.is_floating_point():  # a counter has no mean
                    mean.copy_(value)
