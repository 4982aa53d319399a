"""Muon: steps of weight matrices whose singular values are all alike.

After Jordan et al. 2024 and Liu et al. 2025. torch has one, which works on one matrix at a time: a
thousand small kernels a step of a ViT-B. Here matrices of one shape are worked on together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95  # Nesterov's
# Of the odd polynomial that drives singular values towards 1, and how often it is applied.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
TIMES = 5
RMS = 0.2  # of an update at learning rate 1, as AdamW's are: learning rates of one suit the other


class Muon(torch.optim.Optimizer):
    """An optimiser of matrices of one shape a group, with weight decay apart from the gradient.

    A group's `parts` says how many matrices lie in each of its parameters, one above the other:
    three where queries, keys and values are one parameter.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if values:
                self._step(values, group["parts"], group["lr"], group["weight_decay"])

    def _step(self, values: list[Tensor], parts: int, lr: float, weight_decay: float) -> None:
        gradients = [value.grad for value in values if value.grad is not None]
        means = [self._mean(value) for value in values]
        torch._foreach_lerp_(means, gradients, 1 - MOMENTUM)
        ahead = torch.stack(torch._foreach_lerp(gradients, means, MOMENTUM))  # (n, rows, columns)
        _, rows, columns = ahead.shape
        matrices = ahead.reshape(-1, rows // parts, columns)
        updates = orthogonal(matrices).reshape(ahead.shape).to(ahead.dtype)
        size = RMS * math.sqrt(max(rows // parts, columns))
        torch._foreach_mul_(values, 1 - lr * weight_decay)
        torch._foreach_add_(values, updates.unbind(), alpha=-lr * size)

    def _mean(self, value: Tensor) -> Tensor:
        state = self.state[value]
        if not state:
            state["mean"] = torch.zeros_like(value)
        held: Tensor = state["mean"]
        return held


def orthogonal(matrices: Tensor) -> Tensor:  # (n, rows, columns)
    """Matrices with their singular vectors and singular values of about 1.

    >>> orthogonal(torch.diag(torch.tensor([3.0, 1.0]))[None]).diagonal(dim1=1, dim2=2).round()
    tensor([[1., 1.]])
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    if x.is_cuda:  # where it is fast; an update needs no more digits
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    a, b, c = POLYNOMIAL
    for _ in range(TIMES):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
