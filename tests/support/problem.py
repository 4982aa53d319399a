"""A small problem every method can be tried on: four kinds of images, three networks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.functional import cross_entropy

from caster import wrap
from caster.models.activation_statistics import ActivationStatistics
from caster_bench.methods.source import Source

N_CLASSES, SIZE = 4, 8


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of NCHW."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GroupOfTwo(nn.GroupNorm):
    def __init__(self, width):
        super().__init__(2, width)


def _convolutional(norm) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, 1, 1), norm(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, 2, 1), norm(16), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Conv2d(16, 16, 3, 2, 1), norm(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, N_CLASSES))


BUILDERS = {
    "batch": lambda: _convolutional(nn.BatchNorm2d),
    "layer": lambda: _convolutional(ChannelNorm),
    "group": lambda: _convolutional(GroupOfTwo),
    "vit": lambda: VisionTransformer(
        img_size=SIZE, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=N_CLASSES
    ),
}


def make_images(n: int, seed: int, shift: float = 0.0):
    """Noisy images of four patterns, (n, 3, 8, 8) float32, and their classes.

    `shift` makes them darker, flatter and noisier, as corruptions do.
    """
    patterns = np.random.default_rng(0).normal(size=(N_CLASSES, 3, SIZE, SIZE))
    rng = np.random.default_rng(seed)
    labels = rng.integers(N_CLASSES, size=n)
    images = patterns[labels] * rng.uniform(0.7, 1.3, size=(n, 1, 1, 1))
    images = images + rng.normal(size=images.shape) * (1.2 + 2 * shift)
    return ((1 - 0.3 * shift) * images - 2 * shift).astype(np.float32), labels


@cache
def model(kind: str = "batch"):
    """A network that knows the patterns; its module's class is torch's, its weights our own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = BUILDERS[kind]()
        images, labels = (torch.from_numpy(part) for part in make_images(2000, seed=1))
        optimiser = torch.optim.AdamW(net.parameters(), 5e-3)
        for _ in range(3):
            for index in torch.randperm(len(images)).split(50):
                optimiser.zero_grad()
                cross_entropy(net(images[index]), labels[index]).backward()
                optimiser.step()
    optimiser.zero_grad()
    return wrap(net)


@cache
def source(kind: str = "batch") -> Source:
    """What a method may know: the state and 8 labelled batches of 50."""
    images, labels = make_images(400, seed=2)
    batches = [(images[i : i + 50], labels[i : i + 50]) for i in range(0, 400, 50)]
    return Source.fit(model(kind), batches)


@cache
def layered(kind: str = "batch") -> Source:
    """The same with layers in the state; otherwise every method measures them again."""
    return Source.fit(model(kind), source(kind).batches, layers=True)


def stream(n_batches: int = 8, size: int = 32, shift: float = 0.5, seed: int = 3):
    """Target batches, without labels."""
    images, _ = make_images(n_batches * size, seed, shift)
    return list(images.reshape(n_batches, size, 3, SIZE, SIZE))


def accuracy(method, shift: float = 0.5, n: int = 640, size: int = 32, seed: int = 3) -> float:
    """Share of a shifted stream a method gets right."""
    images, labels = make_images(n, seed, shift)
    answers = [method.predict(images[i : i + size]).logits for i in range(0, n, size)]
    found = np.concatenate([np.asarray(a).argmax(axis=1) for a in answers])
    return float((found == labels).mean())


def site_moments(frozen, batches):
    """Moments at a model's sites over batches of source images, without classes."""
    statistics = ActivationStatistics(frozen)
    for batch in batches:  # a class that is frequent would not be measured to its end
        statistics(batch, np.arange(len(batch)))
    return {site: replace(found, classes=None) for site, found in statistics.moments().items()}
