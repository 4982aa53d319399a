"""Train the CIFAR classifiers: random crops and flips, one-cycle schedule, bf16 on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Array = NDArray[Any]
Net = TypeVar("Net", bound=nn.Module)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Recipe:
    """Training settings that differ between networks."""

    sgd: bool  # with Nesterov momentum; else AdamW
    peak: float  # learning rate, after a fifth of the steps
    weight_decay: float
    cutout: int = 0  # side of the square that is masked in every image

    def optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the optimiser of a network."""
        if self.sgd:
            return torch.optim.SGD(
                net.parameters(), self.peak, 0.9, weight_decay=self.weight_decay, nesterov=True
            )
        return torch.optim.AdamW(net.parameters(), self.peak, weight_decay=self.weight_decay)


SGD = Recipe(sgd=True, peak=0.4, weight_decay=5e-4)
ADAMW = Recipe(sgd=False, peak=2e-3, weight_decay=0.05)
ADAMW_VIT = Recipe(sgd=False, peak=1e-3, weight_decay=0.05, cutout=8)


def normalise(images: Tensor) -> Tensor:  # uint8 (N, H, W, 3) -> (N, 3, H, W), channels last
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def augment(padded: Tensor, index: Tensor, size: int = 32) -> Tensor:
    """Take random crops and flips of images padded by 4."""
    at, n = torch.arange(size, device=padded.device), len(index)
    top, left = torch.randint(0, 9, (2, n, 1), device=padded.device)
    columns = torch.where(torch.rand(n, 1, device=padded.device) < 0.5, at, size - 1 - at) + left
    return padded[index[:, None, None], (top + at)[:, :, None], columns[:, None, :]]


def cut_out(batch: Tensor, side: int) -> Tensor:  # (N, 3, H, W) -> the same
    """Mask a random grey square, clipped at the border."""
    n, _, *size = batch.shape
    inside = []
    for pixels in size:
        at = torch.arange(pixels, device=batch.device)
        first = torch.randint(1 - side, pixels, (n, 1), device=batch.device)
        inside.append((at >= first) & (at < first + side))
    rows, columns = inside
    return batch.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def train(
    build: Callable[[], Net],
    images: Array,  # uint8 (N, 32, 32, 3)
    labels: Array,
    recipe: Recipe,
    epochs: int,
    seed: int,
    batch: int = 512,
) -> Net:
    """Train a network from scratch; return it in eval mode."""
    torch.manual_seed(seed)
    net = build().to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    padded = torch.from_numpy(np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))).to(DEVICE)
    targets = torch.from_numpy(labels).to(DEVICE)
    steps = epochs * (len(images) // batch)
    optimiser = recipe.optimiser(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.peak, steps, pct_start=0.2)
    for _ in range(epochs):
        shuffled = torch.randperm(len(images), device=DEVICE)
        for index in shuffled[: len(images) // batch * batch].split(batch):
            pixels = normalise(augment(padded, index))
            if recipe.cutout:
                pixels = cut_out(pixels, recipe.cutout)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                logits = net(pixels)
            loss = cross_entropy(logits.float(), targets[index], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return net.eval()
