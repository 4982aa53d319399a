"""EATA, and ETA: entropy minimisation on samples that are reliable and not redundant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from caster.adapt.network import gradients
from caster.adapt.protocol import Retained, nbytes
from caster.adapt.source import Source
from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.methods.gradient.entropy import entropy
from caster_bench.methods.gradient.fisher import first_images, fisher_information
from caster_bench.methods.gradient.learner import Learner, Optimisers, check_from_zero

KEPT = 0.9  # of the running mean of probabilities, from one batch to the next
FISHER_BATCH = 64


class EATA(Learner):
    """One step down the weighted entropy of a batch's chosen samples, near the source's weights.

    Niu et al. 2022. A sample is chosen if its entropy is below `margin_e0` ln C, and, once there is
    a running mean of the chosen samples' probabilities, if its own have a cosine with that below
    `redundancy`. It weighs the more the lower its entropy. `fisher_strength` holds parameters back
    that the answers to the first `fisher_samples` source images (or all, if there are fewer) hang
    on: those should be in no order of class. Their labels are not used. A strength of 0 is ETA,
    and needs no source images. A batch with nothing to choose leaves the method as it was.

    Defaults are those of CIFAR-10; presets "cifar100", "imagenet" and "imagenet-vit".

    >>> from caster import wrap
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> eta = EATA(wrap(net, head="0"), Source(), fisher_strength=0)
    >>> eta.chosen(torch.tensor([[0.0, 9.0], [0.0, 0.1]]))
    tensor([0])
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "eata",
        norms: Sequence[str] = ("batch",),
        optimizer: Optimisers = "adam",
        lr: float = 1e-3,
        margin_e0: float = 0.4,
        redundancy: float = 0.4,
        fisher_strength: float = 1.0,
        fisher_samples: int = 2000,
    ) -> None:
        check_from_zero(
            name, margin_e0=margin_e0, redundancy=redundancy, fisher_strength=fisher_strength
        )
        if fisher_samples < 1:
            raise CasterError(f"fisher_samples of {name} is 1 or more, not {fisher_samples!r}")
        self.margin_e0 = margin_e0
        self.redundancy = redundancy
        self.fisher_strength = fisher_strength
        super().__init__(model, source, name=name, norms=norms, optimizer=optimizer, lr=lr)
        # Of the source, so no reset changes it; both end to end: a hundred small tensors one by
        # one would cost more than the rest of a step.
        self._fisher: Tensor | None = None
        self._origin: Tensor | None = None
        if fisher_strength > 0 and not self.inert:
            labelled = source.labelled(name)
            images = first_images(self.model, labelled, fisher_samples, FISHER_BATCH)
            with gradients():
                found = fisher_information(self.network, self.parameters, images)
                self._fisher, self._origin = _row(found.values()), _row(self.origin.values())

    @property
    def fisher(self) -> dict[str, Tensor]:
        """The Fisher information, by parameter; nothing without a hold on the source."""
        if self._fisher is None:
            return {}
        values = self.parameters.values()
        parts = torch.split(self._fisher, [value.numel() for value in values])
        shaped = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        return dict(zip(self.parameters, shaped, strict=True))

    def reset(self) -> None:
        """A new copy of the network, and no sample seen."""
        super().reset()
        self._mean: Tensor | None = None  # (C,), of the probabilities of chosen samples

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Lower the entropy of the chosen samples, if there are any."""
        chosen = self.chosen(logits.detach())
        if len(chosen):
            self._remember(logits.detach()[chosen].softmax(dim=1))
            self.descend(self.weighted_entropy(logits[chosen]) + self.penalty())

    def chosen(self, logits: Tensor) -> Tensor:  # (B, C) -> numbers of rows
        """Samples that are reliable, and not like those seen already."""
        good = entropy(logits) < self._margin(logits)
        if self._mean is not None:
            cosine = cosine_similarity(self._mean[None], logits.softmax(dim=1), dim=1)
            good &= cosine.abs() < self.redundancy
        return good.nonzero()[:, 0]

    def weighted_entropy(self, logits: Tensor) -> Tensor:  # (B, C) -> ()
        """Mean entropy, a sample weighing exp(margin - entropy)."""
        entropies = entropy(logits)
        weights = (self._margin(logits) - entropies.detach()).exp()
        return (weights * entropies).mean()

    def penalty(self) -> Tensor:
        """Squared distances from the source's parameters, by their Fisher information."""
        if self._fisher is None or self._origin is None:
            return torch.zeros((), device=self.model.device)
        moved = _row(self.parameters.values()) - self._origin
        return self.fisher_strength * (self._fisher * moved.square()).sum()

    def retained(self) -> Retained:
        """Also the Fisher information, where it is measured from, and the running mean."""
        own = nbytes(self._fisher, self._origin)
        return super().retained() + Retained(buffers=nbytes(self._mean), statistics=own)

    def _margin(self, logits: Tensor) -> float:
        return self.margin_e0 * math.log(logits.shape[1])

    def _remember(self, probabilities: Tensor) -> None:  # (n, C), n >= 1
        mean = probabilities.mean(dim=0)
        self._mean = mean if self._mean is None else KEPT * self._mean + (1 - KEPT) * mean


def _row(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors laid end to end."""
    return torch.cat([tensor.flatten() for tensor in tensors])
