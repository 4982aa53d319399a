"""Which parameters decay, and the learning rate of every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from caster.bench.train.recipe import Recipe

MOMENTUM = 0.9
TOKENS = ("cls_token", "pos_embed", "relative_position_bias_table")  # of more than one dimension


def optimiser(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser; the learning rate is set at every step."""
    groups = parameter_groups(net, recipe.weight_decay)
    fused = next(net.parameters()).device.type == "cuda"
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            groups, recipe.lr, momentum=MOMENTUM, nesterov=True, fused=fused or None
        )
    return torch.optim.AdamW(groups, recipe.lr, fused=fused or None)


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels, which decay, and the rest, which does not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, value in net.named_parameters():
        shrinks = value.ndim > 1 and name.rpartition(".")[2] not in TOKENS
        (decayed if shrinks else free).append(value)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def rate(step: int, steps: int, recipe: Recipe) -> float:
    """The learning rate of one of all steps: up in a line, then down half a cosine.

    >>> recipe = Recipe.of("resnet18")  # 5 of 80 epochs to warm up
    >>> [round(rate(step, 80, recipe), 3) for step in (0, 4, 79)]
    [0.08, 0.4, 0.0]
    """
    # A run cut short by hand must still come down.
    rising = min(steps * recipe.warmup // recipe.epochs, steps // 4)
    if step < rising:
        return recipe.lr * (step + 1) / rising
    done = (step - rising) / (steps - rising)
    return recipe.lr * (1 + math.cos(math.pi * done)) / 2
