"""RoTTA: robust BatchNorm, and a student taught on recent, certain samples of all classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from caster_bench.methods.augmented_views import Augmentation, AugmentingMethod
from caster_bench.methods.gradient_method import cross_entropy
from caster_bench.methods.network import Network, gradients, override_batchnorm, training
from caster_bench.methods.protocol import Retained, count, nbytes, number

REVISION = 1
FLOOR = 1e-6  # added to probabilities before their logarithm, as in the authors' code


@dataclass(eq=False, repr=False, kw_only=True)
class RoTTA(AugmentingMethod):
    """Answer with a teacher, the moving average of a student that learns from a small memory.

    Yuan, Xie and Li, "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023. The memory
    holds `memory` images, equally many of each predicted class, and prefers recent and certain ones
    (see `CategoryBalancedMemory`). After every `memory` images, the student takes one step on the
    cross-entropy between its predictions on the augmented memory and the teacher's on the memory
    itself, weighted by age; the teacher becomes (1 - `nu`) teacher + `nu` student. Only in these
    passes do running statistics of BatchNorm move, by `momentum`, before they normalise. Scales
    and shifts of BatchNorm are learnt.

    Needs BatchNorm, gradients, an augmentation (and so the values of black and white, see
    `ImageRange`) and a second network; keeps `memory` images. Defaults are the authors' for CIFAR.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    >>> list(RoTTA(wrap(net), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "rotta"
    nu: float = number(0.001, high=1)
    memory: int = count(64)
    momentum: float = number(0.05, high=1)

    def configure(self, module: nn.Module) -> None:
        """Make every BatchNorm robust."""
        self._layers = override_batchnorm(module, partial(robust, momentum=self.momentum))

    def reset(self) -> None:
        """Start over with new copies of the network and an empty memory."""
        super().reset()
        self._memory: CategoryBalancedMemory | None = None  # until the number of classes is known
        self._since = 0  # images since the last step
        self._generator = torch.Generator().manual_seed(self.seed)
        if not self.inert:
            student = self._layers
            with gradients():
                self.teacher = Network(self.model, self.columns)
                self.configure(self.teacher.module)
            self._layers = [*student, *self._layers]

    def place(self, images: Any) -> Tensor:
        """Move a batch of images to the model's device."""
        return self._range.image_batch(images)

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:  # (B, C)
        """The teacher's logits."""
        return self.teacher(batch)

    def step(
        self,
        batch: Tensor,
        logits: Tensor,  # (B, C), the teacher's
    ) -> None:
        """Add images to the memory; after every `memory` images, teach the student."""
        if self._memory is None:
            self._memory = CategoryBalancedMemory(self.memory, logits.shape[1])
        p = logits.softmax(dim=1)
        uncertainties = -(p * (p + FLOOR).log()).sum(dim=1)
        answers = zip(batch, logits.argmax(dim=1).tolist(), uncertainties.tolist(), strict=True)
        for image, predicted, uncertainty in answers:
            self._memory.add(image, predicted, uncertainty)
            self._since += 1
            if self._since == self.memory:
                self._since = 0
                self._teach(self._memory)

    def _teach(self, memory: CategoryBalancedMemory) -> None:
        images = torch.stack([item.image for item in memory.items])
        ages = torch.tensor([memory.age(item) for item in memory.items], device=images.device)
        scale = self._range.of(images)
        augment = Augmentation.draw(self._generator, *images.shape[2:])
        with training(self._layers):
            with torch.no_grad():
                target = self.teacher(images)
            student = self.network(scale.values(augment(scale.pixels(images)), images))
        self.descend((cross_entropy(student, target) * torch.sigmoid(-ages)).mean())
        with torch.no_grad():
            teacher = self.eligible(self.teacher.module)
            for name, parameter in self.parameters.items():
                teacher[name].lerp_(parameter, self.nu)

    def retained(self) -> Retained:
        """Bytes of student, teacher, optimizer and memory."""
        if self.inert:
            return Retained()
        items = [] if self._memory is None else self._memory.items
        images = Retained(features=nbytes(*(item.image for item in items)))
        return super().retained() + self.teacher.retained() + images


def robust(layer: _BatchNorm, values: Tensor, *, momentum: float) -> Tensor:
    """Normalise by running statistics; in training, first move them towards the batch's.

    Gradients flow through the batch's share.
    """
    mean, var = layer.running_mean, layer.running_var
    if layer.training and mean is not None and var is not None:
        dims = [dim for dim in range(values.ndim) if dim != 1]
        batch_var, batch_mean = torch.var_mean(values.to(mean.dtype), dim=dims, correction=0)
        mean = (1 - momentum) * mean + momentum * batch_mean
        var = (1 - momentum) * var + momentum * batch_var
        layer.running_mean, layer.running_var = mean.detach(), var.detach()
        shape = [1, -1, *(1 for _ in dims[1:])]
        x = (values - mean.view(shape)) * (var.view(shape) + layer.eps).rsqrt()
        if layer.weight is not None and layer.bias is not None:
            x = x * layer.weight.view(shape) + layer.bias.view(shape)
        return x.to(values.dtype)
    without = mean is None or var is None
    return batch_norm(values, mean, var, layer.weight, layer.bias, without, 0.0, layer.eps)


@dataclass(frozen=True, eq=False)
class Item:
    """An image in the memory."""

    image: Tensor
    predicted: int
    uncertainty: float  # entropy, nats
    arrival: int  # number of images before it


class CategoryBalancedMemory:
    """A bounded memory of images, with equal room for every class.

    The score of an image is sigmoid(age / capacity) + uncertainty / ln C. A new image replaces the
    one of highest score in its class, if that class is full, or in the most frequent classes, if
    the memory is full. It is not added if no score is higher than its own.

    >>> memory = CategoryBalancedMemory(capacity=2, classes=2)
    >>> for value, uncertainty in ((1.0, 0.5), (2.0, 0.1), (3.0, 0.6)):
    ...     memory.add(torch.tensor(value), 0, uncertainty)
    >>> [item.image.item() for item in memory.items]
    [2.0]
    """

    def __init__(self, capacity: int, classes: int) -> None:
        self.capacity = capacity
        self.classes = classes
        self.items: list[Item] = []  # by class, and in order of arrival within it
        self._seen = 0

    def add(self, image: Tensor, predicted: int, uncertainty: float) -> None:
        """Add a copy of an image, or leave it out."""
        new = Item(image, predicted, uncertainty, self._seen)
        if self._make_room(new):
            after = [i for i, item in enumerate(self.items) if item.predicted > predicted]
            place = after[0] if after else len(self.items)
            self.items.insert(place, replace(new, image=image.detach().clone()))
        self._seen += 1

    def age(self, item: Item) -> float:
        """Images seen since an image arrived, itself included, divided by the capacity."""
        return (self._seen - item.arrival) / self.capacity

    def _make_room(self, new: Item) -> bool:
        """Whether a new image can be added, after removing another if need be."""
        counts: dict[int, int] = {}
        for item in self.items:
            counts[item.predicted] = counts.get(item.predicted, 0) + 1
        if counts.get(new.predicted, 0) >= self.capacity / self.classes:
            candidates = {new.predicted}
        elif len(self.items) < self.capacity:
            return True
        else:
            largest = max(counts.values())
            candidates = {c for c, size in counts.items() if size == largest}
        scores = [
            (self._score(item), i)
            for i, item in enumerate(self.items)
            if item.predicted in candidates
        ]
        if not scores:
            return True
        score, place = max(scores)  # the last of equal ones
        if score > self._score(new):
            self.items.pop(place)
            return True
        return False

    def _score(self, item: Item) -> float:
        timeliness = 1 / (1 + math.exp(-self.age(item)))
        return timeliness + item.uncertainty / math.log(self.classes)
