"""SAR: sharpness-aware entropy minimisation on reliable samples, with recovery."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from caster.adapt.network import affine_parameters, norm_layers
from caster.adapt.source import Source
from caster.models.protocol import FrozenModel
from caster_bench.methods.gradient.entropy import entropy
from caster_bench.methods.gradient.last import before_last, without
from caster_bench.methods.gradient.learner import Learner, check_from_zero

log = logging.getLogger("caster")

KEPT = 0.9  # of the running mean of the loss, from one batch to the next


class SAR(Learner):
    """One step down the entropy of reliable samples, as it is at the worst point within `rho`.

    Niu et al. 2023. A sample is reliable if its entropy is below `margin_e0` ln C, at the weights
    and at that worst point. Where no sample is, nothing is learnt. When the running mean of the
    loss falls below `recovery` (for 1,000 classes; it is scaled by ln C), the answers have become
    too sure to be trusted, and the method starts over from the source.

    Learnt are normalisation layers of the kinds in `norms`, except those of the last blocks and
    after (see `before_last`); `skip` names others to leave out instead, as patterns of layers or of
    modules they are in: ("layer4", "norm").

    The rate of 1e-3 is that of ports to CIFAR; preset "imagenet" is 2.5e-4, the authors' for
    ResNet-50, "imagenet-vit" is 1e-3, theirs for ViT, both at 64 samples a batch.

    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2))
    >>> list(SAR(wrap(net, head="0"), Source()).parameters)
    ['1.weight', '1.bias']
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "sar",
        norms: Sequence[str] = ("batch", "layer", "group"),
        skip: Sequence[str] | None = None,
        lr: float = 1e-3,
        margin_e0: float = 0.4,
        rho: float = 0.05,
        recovery: float = 0.2,
    ) -> None:
        check_from_zero(name, margin_e0=margin_e0, rho=rho, recovery=recovery)
        self.skip = skip
        self.margin_e0 = margin_e0
        self.rho = rho
        self.recovery = recovery
        super().__init__(model, source, name=name, norms=norms, optimizer="sgd", lr=lr)

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Scales and shifts of the normalisation layers before the last blocks."""
        layers = norm_layers(module, self.norms)
        if self.skip is None:
            return affine_parameters(before_last(module, layers))
        return affine_parameters(without(layers, self.skip, self.name))

    def reset(self) -> None:
        """A new copy of the network, and no loss seen."""
        super().reset()
        self._loss: float | None = None  # running mean

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Lower the entropy of the reliable samples, if there are any."""
        log_classes = math.log(logits.shape[1])
        margin = self.margin_e0 * log_classes
        entropies = entropy(logits)
        reliable = (entropies.detach() < margin).nonzero()[:, 0]
        if not len(reliable):
            return
        values = list(self.parameters.values())
        with climbed(values, entropies[reliable].mean(), self.rho):
            second = entropy(self.network(batch))[reliable]
            second = second[second.detach() < margin]
            if not len(second):
                return
            loss = second.mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._watch(loss.item(), self.recovery * log_classes / math.log(1000))

    def _watch(self, loss: float, least: float) -> None:
        """Take a loss into the running mean, and start over if that is too low."""
        self._loss = loss if self._loss is None else KEPT * self._loss + (1 - KEPT) * loss
        if self._loss < least:
            log.info(
                "%s starts over: its mean loss is %.3g, below %.3g", self.name, self._loss, least
            )
            with torch.no_grad():
                for name, value in self.origin.items():  # nothing else has changed
                    self.parameters[name].copy_(value)
            self.optimizer.state.clear()
            self._loss = None


@contextmanager
def climbed(parameters: list[nn.Parameter], loss: Tensor, rho: float) -> Iterator[None]:
    """Parameters a distance rho up a loss, and afterwards exactly where they were.

    >>> at = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> with climbed([at], at.square().sum(), rho=5.0):
    ...     print(at.detach())
    tensor([6., 8.])
    >>> at.detach()
    tensor([3., 4.])
    """
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    before = [parameter.detach().clone() for parameter in parameters]
    norm = torch.stack([slope.norm() for slope in slopes]).norm()
    step = rho / (norm + 1e-12)
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.add_(step * slope)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
