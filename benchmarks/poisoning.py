"""How an attacker who shares a stream of layer transport affects the others' answers.

    python benchmarks/poisoning.py

A victim sends batches of 8 images with known labels, clean or shifted, alternating with an
attacker's batches of 8. They share one stream, or each has its own from `new_stream()`; "no range"
is a shared stream whose state has no input range. The images are scikit-learn's digits at twice
their size, on which the script trains two small networks. Attacks are in units of pixels, which lie
between 0 and 1. Takes two minutes on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import caster
from caster import wrap
from caster.models.torch import TorchModel
from caster.state import State
from caster_bench.methods.layer_transport import LayerTransport
from caster_bench.methods.source import Source
from measure import machine

BATCH, BATCHES = 8, 64
Images = NDArray[np.float32]  # (n, 3, 16, 16), pixels from 0 to 1
Attack = Callable[[np.random.Generator, Images], Images]


def noise(rng: np.random.Generator, images: Images, scale: float) -> Images:
    return (0.5 + scale * rng.normal(size=images.shape)).astype(np.float32)


def spikes(rng: np.random.Generator, images: Images) -> Images:
    """Images with one pixel far out of range."""
    found = images.copy()
    found[:, :, 8, 8] = 1000.0
    return found


OUT_OF_RANGE: dict[str, Attack] = {
    "constant 3": lambda rng, images: np.full_like(images, 3.0),
    "constant -20": lambda rng, images: np.full_like(images, -20.0),
    "constant 1e6": lambda rng, images: np.full_like(images, 1e6),
    "noise of sd 3": lambda rng, images: noise(rng, images, 3.0),
    "noise of sd 30": lambda rng, images: noise(rng, images, 30.0),
    "images times 4": lambda rng, images: 4 * images,
    "images times -20": lambda rng, images: -20 * images,
    "one pixel of 1000": spikes,
}
IN_RANGE: dict[str, Attack] = {
    "black": lambda rng, images: np.zeros_like(images),
    "white": lambda rng, images: np.ones_like(images),
    "saturated noise": lambda rng, images: (rng.random(images.shape) < 0.5).astype(np.float32),
    "negatives": lambda rng, images: 1 - images,
}


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of NCHW."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every position."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for given, width, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        layers += [nn.Conv2d(given, width, 3, stride, 1), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def digits() -> tuple[Images, NDArray[np.int64]]:
    data = load_digits()
    small = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    large = functional.interpolate(small, (16, 16), mode="bilinear")
    order = np.random.default_rng(0).permutation(len(large))
    return large.expand(-1, 3, -1, -1).numpy()[order], data.target[order]


def normalised(images: Images) -> Images:
    return ((images - 0.3) / 0.35).astype(np.float32)


def shifted(images: Images) -> Images:
    """Flatter, brighter and noisier images, still in range."""
    rng = np.random.default_rng(1)
    moved = 0.7 * images + 0.15 + 0.1 * rng.normal(size=images.shape)
    return np.clip(moved, 0, 1).astype(np.float32)


def trained(
    norm: Callable[[int], nn.Module], images: Images, labels: NDArray[np.int64]
) -> TorchModel:
    torch.manual_seed(0)
    net = network(norm)
    given, codes = torch.from_numpy(normalised(images)), torch.from_numpy(labels)
    optimiser = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.05)
    for _ in range(12):
        for rows in torch.randperm(len(given)).split(64):
            optimiser.zero_grad()
            functional.cross_entropy(net(given[rows]), codes[rows]).backward()
            optimiser.step()
    found = wrap(net)
    assert isinstance(found, TorchModel)
    return found


def method(model: TorchModel, state: State) -> LayerTransport:
    return LayerTransport(model, Source(state=state))


def batches(
    images: Images, labels: NDArray[np.int64]
) -> Iterator[tuple[Images, NDArray[np.int64]]]:
    rows = np.arange(BATCH * BATCHES) % len(images)
    for some in rows.reshape(BATCHES, BATCH):
        yield images[some], labels[some]


def accuracy(
    victims: LayerTransport,
    others: LayerTransport,
    images: Images,
    labels: NDArray[np.int64],
    attack: Attack | None,
) -> tuple[float, float]:
    """The victim's accuracy, and the share of its batches that are adapted."""
    rng = np.random.default_rng(2)
    right = accepted = 0
    for batch, truth in batches(images, labels):
        if attack is not None:
            others.predict(normalised(attack(rng, batch)))
        answer = victims.predict(normalised(batch))
        right += int((answer.logits.argmax(1).numpy() == truth).sum())
        accepted += answer.accepted
    return 100 * right / (BATCH * BATCHES), 100 * accepted / BATCHES


def main() -> None:
    """Print a table for every network and victim stream."""
    print(machine())
    images, labels = digits()
    fit, test = slice(0, 1000), slice(1000, None)
    for name, norm in (("BatchNorm", nn.BatchNorm2d), ("LayerNorm", ChannelNorm)):
        model = trained(norm, images[fit], labels[fit])
        source = [(normalised(images[fit]), labels[fit])]
        state = caster.fit(model, source, layers=True).state
        for stream, victims in (("clean", images[test]), ("shifted", shifted(images[test]))):
            frozen = model(normalised(victims)).logits.argmax(1).numpy() == labels[test]
            one = method(model, state)
            alone, share = accuracy(one, one, victims, labels[test], None)
            print(f"\n{name}, {stream}: frozen {100 * frozen.mean():.1f}, alone {alone:.1f}")
            print(f"{'':20} {'shared':>8} {'own streams':>12} {'no range':>9}   adapted")
            for attack, make in (OUT_OF_RANGE | IN_RANGE).items():
                cells = []
                for known in (state, state, replace(state, input_range=None)):
                    one = method(model, known)
                    other = one.new_stream() if len(cells) == 1 else one
                    cells.append(accuracy(one, other, victims, labels[test], make))
                (shared, share), (own, _), (broad, _) = cells
                print(f"{attack:20} {shared:8.1f} {own:12.1f} {broad:9.1f} {share:10.0f} %")


if __name__ == "__main__":
    main()
