"""Tent: entropy minimisation on the scales and shifts of normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from caster.adapt.source import Source
from caster.models.protocol import FrozenModel
from caster_bench.methods.gradient.entropy import entropy
from caster_bench.methods.gradient.learner import Learner, Optimisers


class Tent(Learner):
    """One step down the mean entropy of every batch, answered before the step.

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
        optimizer: Optimisers = "adam",
        lr: float = 1e-3,
    ) -> None:
        super().__init__(model, source, name=name, norms=norms, optimizer=optimizer, lr=lr)

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Lower the mean entropy."""
        self.descend(entropy(logits).mean())
