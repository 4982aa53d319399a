"""The average of weights over steps: what is kept of a run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

WARM = 10  # steps after which the average begins to reach back


class Average:
    """An exponential mean of a network's parameters and buffers, in a network of its own.

    The first steps weigh more, as long as a mean of few says more than the start.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay
        pairs = list(zip(self.net.state_dict().values(), net.state_dict().values(), strict=True))
        real = [pair for pair in pairs if pair[0].is_floating_point()]
        counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self._means, self._values = _apart(real)
        self._counted, self._counters = _apart(counters)

    def update(self, step: int) -> None:
        """Take in the network as it is after a step; steps count from 0."""
        decay = min(self.decay, (1 + step) / (WARM + step))
        with torch.no_grad():
            torch._foreach_lerp_(self._means, self._values, 1 - decay)
            if self._counted:  # a counter has no mean
                torch._foreach_copy_(self._counted, self._counters)


def _apart(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [mean for mean, _ in pairs], [value for _, value in pairs]
