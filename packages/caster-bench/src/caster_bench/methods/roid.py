"""ROID: certain and diverse samples, weights averaged with the source's, and a prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from caster_bench.methods.augmented_views import Augmentation, AugmentingMethod
from caster_bench.methods.gradient_method import (
    OptimizerName,
    cross_entropy,
    entropy,
)
from caster_bench.methods.protocol import Prediction, Retained, nbytes, number

REVISION = 1
MEAN_DECAY = 0.9  # of the running mean of probabilities, per batch
LARGEST, FLOOR = 0.99, 1e-5  # of probabilities, and added to their odds, in the likelihood ratio


@dataclass(eq=False, repr=False, kw_only=True)
class ROID(AugmentingMethod):
    """Raise the likelihood ratio of certain, diverse samples, consistently under augmentation.

    Marsden, Döbler and Yang, "Universal Test-Time Adaptation through Weight Ensembling, Diversity
    Weighting, and Prior Correction", WACV 2024. Samples closer than average to the running mean of
    predictions are left out; the others have the weight exp(diversity x certainty /
    `temperature`), both scaled to [0, 1] over the batch. One step reduces their weighted soft
    likelihood ratio plus a symmetric cross-entropy between their predictions and those of an
    augmented copy. Then every parameter becomes `momentum` θ + (1 - `momentum`) θ⁰, with θ⁰ the
    source's. The answer is the logits times the batch's mean prediction, smoothed, as a prior.
    Scales and shifts of all normalisation layers are learnt.

    Needs the values of black and white (see `ImageRange`); keeps a running mean of C numbers.
    Defaults are the authors' for CIFAR; preset "imagenet" is SGD at 2.5e-4.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    >>> list(ROID(wrap(net, head="0"), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "roid"
    norms: Sequence[str] = ("batch", "layer", "group")
    optimizer: OptimizerName = "adam"
    momentum: float = number(0.99, high=1)
    temperature: float = number(1 / 3, above=True)

    def reset(self) -> None:
        """Start over with a new copy of the network and the same random numbers."""
        super().reset()
        self._mean: Tensor | None = None  # (C,), of predictions; uniform before the first batch
        self._generator = torch.Generator().manual_seed(self.seed)

    def place(self, images: Any) -> Tensor:
        """Move a batch of images to the model's device."""
        return self._range.image_batch(images)

    def predict(self, images: Any) -> Prediction:
        """Answer with the current weights and the batch's prior, then take a step."""
        found = super().predict(images)
        return found if self.inert else replace(found, logits=with_prior(found.logits))

    def forward(self, images: Any) -> Any:  # (B, C)
        """Logits that `predict` would give now, without its step."""
        logits = super().forward(images)
        return logits if self.inert else with_prior(logits)

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Take a step on the weighted samples, and average the weights with the source's."""
        probabilities = logits.detach().softmax(dim=1)
        mean = torch.full_like(probabilities[0], 1 / len(probabilities[0]))
        mean = mean if self._mean is None else self._mean
        chosen, weights = sample_weights(logits.detach(), mean, self.temperature)
        self._mean = torch.lerp(probabilities.mean(dim=0), mean, MEAN_DECAY)
        scale = self._range.of(batch)
        drawn = Augmentation.draw(self._generator, *batch.shape[2:])
        augment = replace(drawn, blur=0.0, noise=0.0, reflect=True)
        pixels = scale.pixels(batch[chosen])
        augmented = self.network(scale.values(augment(pixels), batch))
        own = logits[chosen]
        consistency = (cross_entropy(augmented, own) + cross_entropy(own, augmented)) / 2
        losses = likelihood_ratio(own) + consistency
        self.descend((weights * losses).sum() / len(batch))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.lerp_(self.origin[name], 1 - self.momentum)

    def retained(self) -> Retained:
        """Bytes of the network, the optimizer and the running mean."""
        return super().retained() + Retained(buffers=nbytes(self._mean))


def sample_weights(
    logits: Tensor,  # (B, C)
    mean: Tensor,  # (C,), running mean of predictions
    temperature: float,
) -> tuple[Tensor, Tensor]:  # rows that are no nearer to the mean than average, their weights
    """Choose diverse samples, and weight them by diversity and certainty.

    >>> logits = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.1, 0.0]])
    >>> sample_weights(logits, torch.tensor([0.9, 0.1]), 1.0)[0]
    tensor([1])
    """
    diversity = _unit_range(1 - cosine_similarity(mean[None], logits.softmax(dim=1), dim=1))
    certainty = _unit_range(-entropy(logits))
    chosen = (diversity >= diversity.mean()).nonzero()[:, 0]
    return chosen, (diversity * certainty / temperature).exp()[chosen]


def likelihood_ratio(logits: Tensor) -> Tensor:  # (B, C) -> (B,)
    """Negative expected log-odds of the classes, for probabilities of at most 0.99.

    >>> likelihood_ratio(torch.tensor([[0.0, 0.0]]))
    tensor([-1.0014e-05])
    """
    p = logits.softmax(dim=1).clamp(0.0, LARGEST)
    return -(p * (p / (1 - p) + FLOOR).log()).sum(dim=1)


def with_prior(logits: Tensor) -> Tensor:  # (B, C) -> (B, C)
    """Multiply logits by the batch's mean prediction, smoothed by 1/B or 1/C over its largest."""
    prior = logits.softmax(dim=1).mean(dim=0)
    smooth = max(1 / logits.shape[0], 1 / logits.shape[1]) / prior.max()
    return logits * (prior + smooth) / (1 + smooth * logits.shape[1])


def _unit_range(values: Tensor) -> Tensor:  # (B,)
    """Scale to [0, 1]; equal values become 0."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high > low, high - low, 1)
