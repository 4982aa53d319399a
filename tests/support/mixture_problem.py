"""Images whose classes show in deep layers only, as in large networks, and streams of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import caster
from tests.support.problem import ChannelNorm

N_CLASSES, SIZE = 6, 8
NORMS = {"batch": nn.BatchNorm2d, "layer": ChannelNorm}


def make_images(labels, seed: int, shift: float = 0.0):
    """(n, 3, 8, 8) float32: the pixels of one image, in an order of its own for every class.

    So channel moments of layers that work pixel by pixel are the same for all classes. `shift`
    changes colours, contrast and noise.
    """
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(3, SIZE * SIZE))
    patterns = np.stack([pixels[:, rng.permutation(SIZE * SIZE)] for _ in range(N_CLASSES)])
    rng = np.random.default_rng(seed)
    images = patterns[labels].reshape(-1, 3, SIZE, SIZE)
    images = images * rng.uniform(0.7, 1.3, size=(len(labels), 1, 1, 1))
    images = images + rng.normal(size=images.shape) * (0.7 + 1.5 * abs(shift))
    scale, offset = 1 - 0.4 * shift * np.array([1.0, -0.5, 0.5]), shift * np.array([2.0, -1.5, 1.0])
    return (images * scale[:, None, None] + offset[:, None, None]).astype(np.float32)


def shuffled(n: int, seed: int, weights=None):
    """Labels of a shuffled stream."""
    p = np.ones(N_CLASSES) if weights is None else np.asarray(weights)
    return np.random.default_rng(seed).choice(N_CLASSES, size=n, p=p / p.sum())


def changing(before: float, after: float, sort: bool = False):
    """Eight batches of 64 under one shift and four, perhaps sorted, under another; their labels."""
    labels = shuffled(12 * 64, seed=5)
    if sort:
        labels[512:] = np.sort(labels[512:])
    parts = make_images(labels[:512], 9, before), make_images(labels[512:], 10, after)
    return np.split(np.concatenate(parts), 12), np.split(labels, 12)


@cache
def model(kind: str = "batch"):
    """Three layers that work pixel by pixel, three that see patterns, and a head."""
    norm = NORMS[kind]
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for before, after in ((3, 8), (8, 8), (8, 8)):
            layers += [nn.Conv2d(before, after, 1), norm(after), nn.ReLU()]
        for before, stride in ((8, 2), (16, 2), (16, 1)):
            layers += [nn.Conv2d(before, 16, 3, stride, 1), norm(16), nn.ReLU()]
        torch.manual_seed(0)
        net = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, N_CLASSES)
        )
        for part in net.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight)
        labels = shuffled(2000, seed=1)
        images, targets = torch.from_numpy(make_images(labels, seed=1)), torch.from_numpy(labels)
        optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(3):
            for index in torch.randperm(len(images)).split(50):
                optimiser.zero_grad()
                cross_entropy(net(images[index]), targets[index]).backward()
                optimiser.step()
    optimiser.zero_grad()
    return caster.wrap(net)


def source_batches(n: int = 600, seed: int = 2):
    labels = shuffled(n, seed)
    images = make_images(labels, seed)
    return [(images[i : i + 50], labels[i : i + 50]) for i in range(0, n, 50)]


@cache
def adapter(kind: str = "batch") -> caster.Adapter:
    return caster.fit(model(kind), source_batches())


def compared(fitted: caster.Adapter) -> caster.Adapter:
    """The same adapter, which compares every batch with the frozen model."""
    return caster.Adapter(fitted.model, fitted.state, every=1)


@dataclass(frozen=True)
class Result:
    """Accuracies of a stream, the answers, and the labels."""

    outs: list
    labels: np.ndarray
    size: int
    frozen_labels: list  # of the model itself: a batch that was not compared has no frozen scores

    def _right(self, answers, batches) -> float:
        truth = np.split(self.labels, range(self.size, len(self.labels), self.size))
        right = [np.asarray(found) == y for found, y in zip(answers, truth, strict=True)]
        return float(np.concatenate(right[batches]).mean())

    def accuracy(self, batches=slice(None)) -> float:
        return self._right([out.labels for out in self.outs], batches)

    def always(self, batches=slice(None)) -> float:
        return self._right([out.proposed for out in self.outs], batches)

    def frozen(self, batches=slice(None)) -> float:
        return self._right(self.frozen_labels, batches)

    @property
    def accepted(self) -> float:
        return float(np.mean([out.verdict.accepted for out in self.outs]))

    @property
    def knows(self) -> list[bool]:
        """Batches whose mixture is not the source's."""
        return [out.mixture is not None for out in self.outs]


def run(images, labels, size: int = 64, stream=None) -> Result:
    """Answer a stream in batches."""
    stream = stream or adapter().new_stream()
    batches = [images[i : i + size] for i in range(0, len(labels), size)]
    frozen = [stream.adapter.model(batch).logits.argmax(1) for batch in batches]
    return Result([stream(batch) for batch in batches], labels, size, frozen)
