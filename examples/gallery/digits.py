"""Digits, a small convolutional network trained on half of them, and corruptions for the rest.

The examples share this module. The digits come with scikit-learn, and the network trains in a few
seconds on one core.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]

INK, BLUE, VERMILLION, GREEN, PURPLE = "#4a5461", "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Okabe and Ito's colours, safe for colour-blind readers, and a grey for the frozen network."""


def load() -> tuple[Floats, Labels, Floats, Labels]:
    """Load source images and labels, target images and labels; pixels from 0 (paper) to 1 (ink)."""
    bunch = load_digits()
    images = (bunch.images / 16).astype(np.float32)[:, None]  # (n, 1, 8, 8)
    source, target, source_labels, target_labels = train_test_split(
        images, bunch.target, test_size=896, random_state=0, stratify=bunch.target
    )
    return source, source_labels, target, target_labels


def train(images: Floats, labels: Labels, epochs: int = 15) -> nn.Module:
    """Train four convolutions with BatchNorm on slightly noisy images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # layers this small gain nothing from a second thread
    layers: list[nn.Module] = []
    for inner, outer, stride in ((1, 16, 1), (16, 32, 1), (32, 32, 2), (32, 64, 1)):
        convolution = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        layers += [nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU())]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs * -(-len(x) // 50))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(50):
            noise = 0.15 * torch.rand(len(rows), 1, 1, 1) * torch.randn(x[rows].shape)
            loss = nn.functional.cross_entropy(net(x[rows] + noise), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval().requires_grad_(False)


def fog(images: Floats, density: float, seed: int = 0) -> Floats:
    """Blend each image with its own smooth, bright fog."""
    patches = np.random.default_rng(seed).uniform(0.4, 1.0, (len(images), 1, 3, 3))
    smooth = nn.functional.interpolate(
        torch.from_numpy(patches.astype(np.float32)), size=8, mode="bilinear", align_corners=True
    )
    return (1 - density) * images + density * smooth.numpy()


def noise(images: Floats, deviation: float, seed: int = 0) -> Floats:
    """Add Gaussian sensor noise."""
    drawn = np.random.default_rng(seed).normal(0.0, deviation, images.shape)
    return (images + drawn).clip(0, 1).astype(np.float32)


def batches(images: Floats, labels: Labels, size: int = 64) -> Iterator[tuple[Floats, Labels]]:
    """Split images and labels into batches, in order."""
    for start in range(0, len(images), size):
        yield images[start : start + size], labels[start : start + size]
