"""Shifts that follow each other without a reset: do answers collapse where a new stream's do not?

    caster bench train mini-resnet --data cifar10 --epochs 12 --device cpu
    python benchmarks/continual.py CHECKPOINT cifar10:train cifar10:test

Every stream goes through clean images and the four spare corruptions at severities 3, 4 and 5, in a
random order and without a reset, with shuffled images of each. The same batches are also answered
with a reset before every shift. A shift has collapsed if one answer makes up half of the images of
any block of 400. `--reported` takes the fifteen reported corruptions at severity 5 instead, in the
order of most published tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import caster
from caster.core.arrays import to_numpy
from caster.errors import CasterError
from caster_bench.data.corruptions import REPORTED, SPARE, corrupt
from caster_bench.engine.train.checkpoint import model_of
from caster_bench.engine.train.images import read
from measure import complete_torchvision, machine

FIT = 10_000  # images of the source
BLOCK = 400  # images in which an answer is counted
Answers = NDArray[np.int64]
Shift = tuple[str, int]


def answers(
    adapter: caster.Adapter, images: Sequence[NDArray[np.uint8]], size: int, reset: bool
) -> Iterator[Answers]:
    """Answers to the images of one shift after the other."""
    stream = adapter.new_stream()
    for shifted in images:
        stream = adapter.new_stream() if reset else stream
        parts = (shifted[i : i + size] for i in range(0, len(shifted), size))
        outs = [stream(adapter.model.preprocessing.batch(list(part))) for part in parts]
        yield np.concatenate([to_numpy(out.labels) for out in outs])


def has_collapsed(found: Answers) -> bool:
    blocks = (found[i : i + BLOCK] for i in range(0, len(found) - BLOCK + 1, BLOCK))
    return any(np.bincount(block).max() >= BLOCK / 2 for block in blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--limit", type=int, default=4000, help="images of the target [4000]")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 200], help="of a batch")
    parser.add_argument("--orders", type=int, default=3, help="random orders of the shifts [3]")
    parser.add_argument("--reported", action="store_true", help="the fifteen reported corruptions")
    given = parser.parse_args()
    complete_torchvision()
    torch.set_num_threads(1)
    print(machine())
    model = model_of(given.checkpoint, device="cpu")
    source, target = (read(name, given.data_root) for name in (given.source, given.target))
    rows = np.random.default_rng(0).permutation(len(source.labels))[:FIT]
    fitted = (
        (model.preprocessing.batch(list(source.pixels[part])), source.labels[part])
        for part in np.array_split(rows, FIT // 100)
    )
    adapter = caster.fit(model, fitted)
    pixels, labels = target.pixels[: given.limit], target.labels[: given.limit]
    shifts = [(name, severity) for name in SPARE for severity in (3, 4, 5)]
    shifts = [(name, 5) for name in REPORTED] if given.reported else [("clean", 0), *shifts]
    shown = {s: pixels if s[0] == "clean" else corrupt(pixels, s[0], s[1], seed=0) for s in shifts}
    for size in given.sizes:
        totals: dict[str, list[float]] = {"reset": [], "continual": []}
        collapses: dict[str, list[str]] = {"reset": [], "continual": []}
        for seed in range(given.orders):
            rng = np.random.default_rng(seed)
            turns = [rng.permutation(len(labels)) for _ in shifts]
            order = shifts if given.reported else [shifts[i] for i in rng.permutation(len(shifts))]
            images = [shown[shift][rows] for shift, rows in zip(order, turns, strict=True)]
            for name, found in totals.items():
                all_answers = answers(adapter, images, size, name == "reset")
                for shift, rows, own in zip(order, turns, all_answers, strict=True):
                    found.append(100 * float((own == labels[rows]).mean()))
                    if has_collapsed(own):
                        collapses[name].append(f"{shift[0]} {shift[1]} ({found[-1]:.1f})")
        for name, found in totals.items():
            gone = ", ".join(collapses[name]) or "none"
            print(f"B = {size:3}, {name:9}: {np.mean(found):.2f} %; collapsed: {gone}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except CasterError as error:
        sys.exit(str(error))
