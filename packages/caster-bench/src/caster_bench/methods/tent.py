"""Tent: entropy minimisation on the scales and shifts of normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from caster_bench.methods.gradient_method import GradientMethod, OptimizerName, entropy

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class Tent(GradientMethod):
    """Answer each batch, then take one step to reduce its mean entropy.

    Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021. The loss of
    a batch is the mean of H(p) = -sum_c p_c log p_c over its predictions p.

    Defaults are those of its CIFAR experiments; preset "imagenet" is SGD at 2.5e-4, "imagenet-vit"
    is SGD at 1e-3 on LayerNorm.

    >>> import torch
    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> list(Tent(wrap(net, head="0"), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "tent"
    norms: Sequence[str] = ("batch",)
    optimizer: OptimizerName = "adam"

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Reduce the mean entropy."""
        self.descend(entropy(logits).mean())
