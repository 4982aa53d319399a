"""NOTE: instance-aware BatchNorm, trained on a memory balanced over predictions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster_bench.methods.gradient_method import GradientMethod
from caster_bench.methods.network import override_batchnorm, training
from caster_bench.methods.protocol import Retained, count, nbytes, number

REVISION = 1
FLOOR = 1e-6  # added to probabilities before their logarithm, as in the authors' code


@dataclass(eq=False, repr=False, kw_only=True)
class NOTE(GradientMethod):
    """Correct BatchNorm by the statistics of each image, and minimise entropy on a memory.

    Gong et al., "NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation", NeurIPS
    2022. BatchNorm normalises by its running statistics; where the mean or variance of an image
    differs from them by more than `deviations` standard errors, it is corrected by the excess (see
    `instance_aware`). Each image replaces another in a memory of `memory` images, balanced over
    predicted classes. After every `memory` images, one step on the scales and shifts of BatchNorm
    reduces the entropy of the memory, and running statistics move towards its own by `momentum`.

    Needs BatchNorm and gradients; keeps `memory` images. Defaults are the authors'. They train
    the source network with these layers in it; here they replace the BatchNorm of any network. The
    whole batch is answered before it enters the memory, which is the authors' order if `memory` is
    a multiple of the batch size.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    >>> list(NOTE(wrap(net), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "note"
    lr: float = number(1e-4)
    deviations: float = number(4.0)
    memory: int = count(64)
    momentum: float = number(0.01, high=1)
    seed: int = 0

    def configure(self, module: nn.Module) -> None:
        """Make every BatchNorm instance-aware."""
        forward = partial(instance_aware, deviations=self.deviations, momentum=self.momentum)
        self._layers = override_batchnorm(module, forward)

    def reset(self) -> None:
        """Start over with a new copy of the network and an empty memory."""
        super().reset()
        self._memory = BalancedReservoir(self.memory, self.seed)
        self._since = 0  # images since the last step

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:  # (B, C)
        """Logits with the current weights; only the memory is learnt from."""
        return self.network(batch)

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Add images to the memory; after every `memory` images, reduce its entropy."""
        for image, predicted in zip(batch, logits.argmax(dim=1).tolist(), strict=True):
            self._memory.add(image, predicted)
            self._since += 1
            if self._since == self.memory:
                self._since = 0
                with training(self._layers):
                    p = self.network(torch.stack(self._memory.images)).softmax(dim=1)
                self.descend(-(p * (p + FLOOR).log()).mean())

    def retained(self) -> Retained:
        """Bytes of the network, the optimizer and the memory."""
        return super().retained() + Retained(features=nbytes(*self._memory.images))


def instance_aware(
    layer: _BatchNorm, values: Tensor, *, deviations: float, momentum: float
) -> Tensor:  # as values: (B, C, ...)
    """Normalise by running or, in training, batch statistics, corrected for each sample.

    With L positions per sample, the standard errors of its mean and variance are sqrt(var / L) and
    var sqrt(2 / (L - 1)). Where a sample's own statistics deviate by more than `deviations` of
    these, the excess is added. Inputs without positions are not corrected.
    """
    x = values.flatten(2) if values.ndim > 2 else values[..., None]  # (B, C, L)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, var = layer.running_mean, layer.running_var
    several = x.shape[0] * x.shape[2] > 1
    if mean is None or var is None or (layer.training and several):
        new_var, new_mean = torch.var_mean(x, dim=(0, 2), correction=int(several))
        if mean is not None and var is not None:
            mean.lerp_(new_mean.detach().to(mean), momentum)
            var.lerp_(new_var.detach().to(var), momentum)
        mean, var = new_mean, new_var
    mean, var = mean[:, None], var[:, None]  # (C, 1)
    positions = x.shape[2]
    if positions > 1:
        own_var, own_mean = torch.var_mean(x, dim=2, keepdim=True)  # (B, C, 1)
        error = (var + layer.eps) * math.sqrt(2 / (positions - 1))
        far = ((var + layer.eps) / positions).sqrt()
        mean = mean + soft_threshold(own_mean - mean, deviations * far)
        var = (var + soft_threshold(own_var - var, deviations * error)).relu()
    x = (x - mean) * (var + layer.eps).rsqrt()
    if layer.weight is not None and layer.bias is not None:
        x = x * layer.weight[:, None] + layer.bias[:, None]
    return x.reshape(values.shape).to(values.dtype)


def soft_threshold(values: Tensor, threshold: Tensor) -> Tensor:
    """Shrink values towards 0 by a threshold.

    >>> soft_threshold(torch.tensor([-3.0, 0.5, 2.0]), torch.tensor(1.0))
    tensor([-2., 0., 1.])
    """
    return (values - threshold).relu() - (-values - threshold).relu()


class BalancedReservoir:
    """PBRS: a bounded memory of images, balanced over predicted classes.

    Once it is full, a new image replaces a random one of the most frequent class. If its own class
    is the most frequent, it enters with the chance of reservoir sampling within the class.

    >>> memory = BalancedReservoir(2, seed=0)
    >>> for predicted in (0, 0, 1):
    ...     memory.add(torch.tensor([float(predicted)]), predicted)
    >>> [image.item() for image in memory.images]
    [0.0, 1.0]
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self._by_class: dict[int, list[Tensor]] = {}
        self._seen: dict[int, int] = {}
        self._random = random.Random(seed)

    @property
    def images(self) -> list[Tensor]:
        """All images, by class."""
        return [image for c in sorted(self._by_class) for image in self._by_class[c]]

    def add(self, image: Tensor, predicted: int) -> None:
        """Add a copy of an image, or leave it out."""
        self._seen[predicted] = self._seen.get(predicted, 0) + 1
        own = self._by_class.setdefault(predicted, [])
        counts = {c: len(images) for c, images in sorted(self._by_class.items())}
        if sum(counts.values()) >= self.capacity:
            largest = [c for c, size in counts.items() if size == max(counts.values())]
            if predicted not in largest:
                self._drop_one(self._by_class[self._random.choice(largest)])
            elif self._random.uniform(0, 1) <= len(own) / self._seen[predicted]:
                self._drop_one(own)
            else:
                return
        own.append(image.detach().clone())

    def _drop_one(self, images: list[Tensor]) -> None:
        images.pop(self._random.randrange(len(images)))
