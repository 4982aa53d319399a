"""How far SAR moves a network at several learning rates, beside batch statistics alone.

    caster bench train mini-resnet --data cifar10 --epochs 5 --device cpu
    python benchmarks/sar_rate.py checkpoints/mini-resnet-cifar10-0.safetensors cifar10:test

Prints accuracy, the share of answers that differ from BatchNorm with batch statistics, the steps
taken, the recoveries, and the distance of the learnt parameters from the source's, relative to
their length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from caster_bench.data.corruptions import corrupt
from caster_bench.engine.train.checkpoint import model_of
from caster_bench.engine.train.images import read
from caster_bench.methods import create
from caster_bench.methods.sar import SAR
from measure import complete_torchvision, machine

RATES = (2.5e-4, 1e-3, 1e-2, 1e-1)
FIRST, ALL, BATCH = 1024, 4096, 64


class Counted(SAR):
    """SAR that counts its steps and recoveries."""

    steps = recoveries = 0

    def _recover(self, loss: float, least: float) -> None:
        super()._recover(loss, least)
        self.steps += 1
        self.recoveries += self._mean_loss is None


def answers(method, images: np.ndarray) -> np.ndarray:
    parts = [method.predict(images[i : i + BATCH]).logits for i in range(0, len(images), BATCH)]
    return np.concatenate([np.asarray(part).argmax(axis=1) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data")
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    complete_torchvision()
    torch.set_num_threads(1)
    model, data = model_of(given.checkpoint, device="cpu"), read(given.data, given.data_root)
    rows = np.random.default_rng(0).permutation(len(data.labels))[:ALL]
    labels = data.labels[rows]
    print(f"{given.checkpoint.name} on {given.data}, severity 5; {machine()}")
    for corruption in ("speckle_noise", "saturate"):
        pixels = corrupt(data.pixels[rows], corruption, severity=5, seed=0)
        images = normalised(pixels, model.preprocessing)
        plain = answers(create("bn-adapt", model), images)
        print(f"{corruption}: batch statistics {100 * (plain == labels).mean():.1f} %")
        for rate in RATES:
            method = create("sar", model, lr=rate)
            method.__class__ = Counted
            found = answers(method, images)
            moved = {k: p.detach() - method.origin[k] for k, p in method.parameters.items()}
            share = length(moved.values()) / length(method.origin.values())
            print(
                f"  lr {rate:g}: accuracy {100 * (found == labels).mean():.1f} %; answers that "
                f"differ, first {FIRST:,}: {100 * (found != plain)[:FIRST].mean():.2f} %, all: "
                f"{100 * (found != plain).mean():.2f} %; {method.steps} of {ALL // BATCH} steps, "
                f"{method.recoveries} recoveries, moved {100 * share:.2f} %"
            )


def length(tensors) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def normalised(pixels: np.ndarray, preprocessing) -> np.ndarray:
    mean, std = (np.asarray(part, np.float32) for part in (preprocessing.mean, preprocessing.std))
    return ((pixels / np.float32(255) - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)


if __name__ == "__main__":
    main()
