"""Tent: entropy minimisation on the scales and shifts of normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from caster.models.protocol import FrozenModel
from caster_bench.methods.gradient_method import GradientMethod, OptimizerName, entropy
from caster_bench.methods.source import Source

REVISION = 1


class Tent(GradientMethod):
    """Answer each batch, then take one step to reduce its mean entropy.

    Wang et al. 2021. Defaults are those of its CIFAR experiments; preset "imagenet" is
    SGD at 2.5e-4, "imagenet-vit" is SGD at 1e-3 on LayerNorm.

    >>> import torch
    >>> from caster import wrap
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> list(Tent(wrap(net, head="0"), Source()).parameters)
    ['1.weight', '1.bias']
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "tent",
        norms: Sequence[str] = ("batch",),
        optimizer: OptimizerName = "adam",
        lr: float = 1e-3,
    ) -> None:
        super().__init__(model, source, name=name, norms=norms, optimizer=optimizer, lr=lr)

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Reduce the mean entropy."""
        self.descend(entropy(logits).mean())
