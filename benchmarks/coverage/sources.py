"""The source classifiers: their data, training and features."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import training
from networks import convnext12, resnet18
from training import ADAMW, DEVICE, SGD, normalise

Array = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A classifier to train. Those of a whole data set make the choice, the others check it."""

    name: str
    data: str
    build: Callable[[int], nn.Sequential]
    epochs: int
    labels: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it knows all classes of its data set."""
        return len(self.labels) in (10, 100)


SOURCES = (  # the slowest stream first: the others train meanwhile
    Source("ResNet-18, CIFAR-100", "cifar100", resnet18, 20, tuple(range(100))),
    Source("ResNet-18, CIFAR-10", "cifar10", resnet18, 20, tuple(range(10))),
    Source("ConvNeXt-12, CIFAR-10", "cifar10", convnext12, 60, tuple(range(10))),
    Source("ResNet-18, 20 of CIFAR-100", "cifar100", resnet18, 60, tuple(range(20))),
    Source("ResNet-18, 5 of CIFAR-10", "cifar10", resnet18, 30, tuple(range(5))),
    Source("ResNet-18, cat and dog", "cifar10", resnet18, 60, (3, 5)),
)


def train(source: Source, images: Array, labels: Array, seed: int) -> nn.Sequential:
    recipe = SGD if source.build is resnet18 else ADAMW

    def build() -> nn.Sequential:
        return source.build(len(source.labels))

    return training.train(build, images, labels, recipe, source.epochs, seed)


@torch.inference_mode()
def extract(net: nn.Sequential, images: Array) -> tuple[Array, Array]:  # -> (N, d), (N, C)
    """Input and output of the classifier layer, in float32."""
    features = torch.cat(
        [net[0](normalise(part.to(DEVICE))) for part in torch.from_numpy(images).split(1000)]
    )
    return features.cpu().numpy(), net[1](features).cpu().numpy()


def read(data: Path, source: Source) -> tuple[Array, Array, Array, Array]:
    """Training images and labels, test images and labels, of the classes the source knows."""
    with np.load(data / f"{source.data}.npz", allow_pickle=False) as arrays:

        def load(part: str) -> tuple[Array, Array]:
            labels = arrays[f"{part}_labels"]
            known = np.flatnonzero(np.isin(labels, source.labels))
            images = arrays[f"{part}_images"][known]
            return images, np.searchsorted(source.labels, labels[known])

        return *load("train"), *load("test")
