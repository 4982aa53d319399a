"""EATA and ETA: entropy minimisation on reliable, non-redundant samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.functional import cross_entropy as label_cross_entropy

from caster_bench.methods.gradient_method import GradientMethod, OptimizerName, entropy
from caster_bench.methods.network import Network, first_source_images, gradients
from caster_bench.methods.protocol import Retained, count, nbytes, number
from caster_bench.methods.source import Source

REVISION = 2  # SGD by default, before: Adam
MEAN_DECAY = 0.9  # of the running mean of probabilities, per batch
FISHER_BATCH = 64


@dataclass(eq=False, repr=False, kw_only=True)
class EATA(GradientMethod):
    """Reduce the weighted entropy of selected samples, anchored to the source weights.

    Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022. With the
    entropy H(p) of a prediction p and E_0 = `margin_e0` ln C, a sample is reliable if H(p) < E_0,
    and non-redundant if |cos(p, m)| < `redundancy`, where m is the running mean of p over the
    samples selected so far. The loss is the mean of exp(E_0 - H(p)) H(p) over selected samples,
    plus `fisher_strength` sum_i F_i (θ_i - θ_i⁰)² over parameters θ with source values θ⁰. A batch
    without a selected sample changes nothing.

    F is the Fisher information on the first `fisher_samples` source images (or all, if there are
    fewer), which should not be sorted by class; their labels are not used. Strength 0 is ETA and
    needs no source images.

    SGD with momentum is the authors' optimizer. Their code has a rate for ImageNet only (preset
    "imagenet"); 1e-3 and the other defaults are those of ports to CIFAR-10, which use SGD or Adam
    (preset "adam"). Other presets are "cifar100", "imagenet-vit" and "layer-norm".

    >>> from caster import wrap
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    >>> eta = EATA(wrap(net, head="0"), Source(), fisher_strength=0)
    >>> eta.selected(torch.tensor([[0.0, 9.0], [0.0, 0.1]]))
    tensor([0])
    """

    name: str = "eata"
    norms: Sequence[str] = ("batch",)
    optimizer: OptimizerName = "sgd"
    margin_e0: float = number(0.4)
    redundancy: float = number(0.4)
    fisher_strength: float = number(1.0)
    fisher_samples: int = count(2000)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        # Fixed by the source, so no reset changes them. Both are flattened: a hundred small
        # tensors would cost more than the rest of a step.
        self.fisher: Tensor | None = None  # information of all parameters, flat
        self._origin: Tensor | None = None
        if self.fisher_strength > 0 and not self.inert:
            images = first_source_images(self.model, source, self.fisher_samples, self.name)
            batches = rebatched(images, FISHER_BATCH)
            with gradients():
                found = fisher_information(self.network, self.parameters, batches)
                self.fisher, self._origin = _flat(found.values()), _flat(self.origin.values())

    def reset(self) -> None:
        """Start over with a new copy of the network and no running mean."""
        super().reset()
        self._mean: Tensor | None = None  # (C,), of the probabilities of selected samples

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Reduce the entropy of the selected samples, if there are any."""
        selected = self.selected(logits.detach())
        if len(selected):
            self._update_mean(logits.detach()[selected].softmax(dim=1))
            self.descend(self.weighted_entropy(logits[selected]) + self.penalty())

    def selected(self, logits: Tensor) -> Tensor:  # (B, C) -> row numbers
        """Rows of reliable, non-redundant samples."""
        good = entropy(logits) < self._margin(logits)
        if self._mean is not None:
            cosine = cosine_similarity(self._mean[None], logits.softmax(dim=1), dim=1)
            good &= cosine.abs() < self.redundancy
        return good.nonzero()[:, 0]

    def weighted_entropy(self, logits: Tensor) -> Tensor:  # (B, C) -> ()
        """Mean of exp(E_0 - H) H over selected samples."""
        entropies = entropy(logits)
        weights = (self._margin(logits) - entropies.detach()).exp()
        return (weights * entropies).mean()

    def penalty(self) -> Tensor:
        """Squared distance from the source parameters, weighted by Fisher information."""
        if self.fisher is None or self._origin is None:
            return torch.zeros((), device=self.model.device)
        moved = _flat(self.parameters.values()) - self._origin
        return self.fisher_strength * (self.fisher * moved.square()).sum()

    def retained(self) -> Retained:
        """Bytes of the network, the optimizer, the Fisher information and the running mean."""
        own = nbytes(self.fisher, self._origin)
        return super().retained() + Retained(buffers=nbytes(self._mean), statistics=own)

    def _margin(self, logits: Tensor) -> float:
        return self.margin_e0 * math.log(logits.shape[1])

    def _update_mean(self, probabilities: Tensor) -> None:  # (n, C), n >= 1
        mean = probabilities.mean(dim=0)
        if self._mean is not None:
            mean = MEAN_DECAY * self._mean + (1 - MEAN_DECAY) * mean
        self._mean = mean


def fisher_information(
    network: Network,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Tensor],  # source images on the model's device
) -> dict[str, Tensor]:  # shaped as the parameters
    """Squared gradients of the loss on the network's own predictions, averaged over batches.

    As in the authors' code, the gradient of the batch's mean loss is squared, not that of every
    sample as in the definition of Fisher information.
    """
    values = list(parameters.values())
    squares = [torch.zeros_like(value) for value in values]
    n = 0
    for batch in batches:
        logits = network(batch)
        loss = label_cross_entropy(logits, logits.argmax(dim=1))
        grads = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        squares = [total + grad.square() for total, grad in zip(squares, grads, strict=True)]
        n += 1
    return {name: total / n for name, total in zip(parameters, squares, strict=True)}


def rebatched(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut consecutive batches into batches of one size; the last may be smaller.

    >>> [len(cut) for cut in rebatched([torch.zeros(5)] * 3, size=4)]
    [4, 4, 4, 3]
    """
    pending: Tensor | None = None
    for batch in batches:
        pending = batch if pending is None else torch.cat([pending, batch])
        while len(pending) >= size:
            yield pending[:size]
            pending = pending[size:]
    if pending is not None and len(pending):
        yield pending


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten and concatenate tensors."""
    return torch.cat([tensor.flatten() for tensor in tensors])
