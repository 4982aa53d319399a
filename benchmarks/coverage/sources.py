"""The source classifiers: their data, training and features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import convnext12, resnet18
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Array = NDArray[Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def normalise(images: Tensor) -> Tensor:  # uint8 (N, H, W, 3) -> (N, 3, H, W), channels last
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def augment(padded: Tensor, index: Tensor, size: int = 32) -> Tensor:
    """Random crops and flips of images padded by 4."""
    at, n = torch.arange(size, device=padded.device), len(index)
    top, left = torch.randint(0, 9, (2, n, 1), device=padded.device)
    columns = torch.where(torch.rand(n, 1, device=padded.device) < 0.5, at, size - 1 - at) + left
    return padded[index[:, None, None], (top + at)[:, :, None], columns[:, None, :]]


def train(
    source: Source, images: Array, labels: Array, seed: int, batch: int = 512
) -> nn.Sequential:
    torch.manual_seed(seed)
    net = source.build(len(source.labels)).to(DEVICE, memory_format=torch.channels_last)
    padded = torch.from_numpy(np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))).to(DEVICE)
    targets = torch.from_numpy(labels).to(DEVICE)
    steps = source.epochs * (len(images) // batch)
    optimiser: torch.optim.Optimizer
    if source.build is resnet18:
        peak = 0.4
        optimiser = torch.optim.SGD(net.parameters(), peak, 0.9, weight_decay=5e-4, nesterov=True)
    else:
        peak = 2e-3
        optimiser = torch.optim.AdamW(net.parameters(), peak, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, steps, pct_start=0.2)
    for _ in range(source.epochs):
        shuffled = torch.randperm(len(images), device=DEVICE)
        for index in shuffled[: len(images) // batch * batch].split(batch):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                logits = net(normalise(augment(padded, index)))
            loss = cross_entropy(logits.float(), targets[index], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return net.eval()


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
