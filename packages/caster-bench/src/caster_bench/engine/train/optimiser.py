"""Which optimiser learns which parameters, which decay, and the learning rate of every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from caster.errors import CasterError
from caster_bench.engine.train.muon import Muon
from caster_bench.engine.train.recipe import Recipe

MOMENTUM = 0.9
TOKENS = ("cls_token", "pos_embed", "relative_position_bias_table")  # of more than one dimension


def optimisers(net: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimisers, which share out the parameters; the rate is set at every step."""
    named = dict(net.named_parameters())
    fused = next(net.parameters()).device.type == "cuda" or None
    if recipe.optimizer == "sgd":
        groups = parameter_groups(named, recipe.weight_decay)
        return [torch.optim.SGD(groups, recipe.lr, momentum=MOMENTUM, nesterov=True, fused=fused)]
    found: list[torch.optim.Optimizer] = []
    if recipe.optimizer == "muon":
        groups = matrix_groups(named)
        if not groups:
            raise CasterError(f"a {type(net).__name__} has no blocks of matrices for Muon to learn")
        found.append(Muon(groups, recipe.lr, recipe.weight_decay))
        taken = {id(value) for group in groups for value in group["params"]}
        named = {name: value for name, value in named.items() if id(value) not in taken}
    groups = parameter_groups(named, recipe.weight_decay)
    return [*found, torch.optim.AdamW(groups, recipe.lr, fused=fused)]


def matrix_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """What Muon learns: the weight matrices inside blocks, in groups of one shape.

    Patches, positions, tokens, norms, biases and the head, which meets the classes, are not.
    """
    groups: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
    for name, value in named.items():
        if _decays(name, value) and value.ndim == 2 and "blocks" in name.split("."):
            parts = 3 if name.endswith("qkv.weight") else 1
            groups.setdefault((value.shape, parts), []).append(value)
    return [{"params": values, "parts": parts} for (_, parts), values in groups.items()]


def parameter_groups(named: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels, which decay, and the rest, which does not."""
    decayed = [value for name, value in named.items() if _decays(name, value)]
    free = [value for name, value in named.items() if not _decays(name, value)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def _decays(name: str, value: nn.Parameter) -> bool:
    return value.ndim > 1 and name.rpartition(".")[2] not in TOKENS


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
