"""Fit on Ray at the scale of ImageNet: synthetic features, streamed and never stored.

    python benchmarks/ray_fit.py                          # 1,281,167 rows, then 1, 2 and 4 workers
    python benchmarks/ray_fit.py --rows 40038 --blocks 2  # two blocks of each

Workers draw features, which stands for reading them, and draw them again in the second pass. Prints
the seconds of each stage and the peak memory of a worker, for all rows and then for the first few
blocks with 1, 2 and 4 workers; what `docs/clusters.md` calculates with; and how long the whole fit
takes compared with drawing and running ResNet-50, whose time per image is measured on one core.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.ray_blocks import block_rows
from caster.adapt.ray_jobs import first_pass, fit_blocks, second_pass
from caster.adapt.ray_pool import Pool, no_model
from caster.adapt.source_moments import Subspace
from caster.config import Settings
from measure import machine

ROWS, WIDTH, CLASSES = 1_281_167, 2_048, 1_000
CHUNK = 8_192
OBJECT_STORE = 1_000_000_000  # bytes
IMAGES, FORWARDS = 16, 6  # per forward pass of the model, and timed passes


@dataclass(frozen=True)
class Drawn:
    """A block of Gaussian classes, drawn again from its seed in each pass."""

    seed: int
    rows: int
    width: int
    classes: int  # of the source
    own: int = 0  # classes in this block, if not all

    def __len__(self) -> int:
        return self.rows

    def chunks(self, model: Any, head: Any, found: Any) -> Iterator[tuple[NDArray[Any], ...]]:
        """Draw chunks of features and labels."""
        means = np.random.default_rng(0).standard_normal((self.classes, self.width), np.float32)
        rng = np.random.default_rng((1, self.seed))
        for start in range(0, self.rows, CHUNK):
            y = rng.integers(self.own or self.classes, size=min(CHUNK, self.rows - start))
            h = rng.standard_normal((len(y), self.width), np.float32)
            for part in range(0, len(y), 1024):  # in place, without a copy of the chunk
                h[part : part + 1024] += 0.3 * means[y[part : part + 1024]]
            yield h, y


def draw(model: Any, block: Drawn, index: int) -> None:
    for _ in block.chunks(None, None, None):
        pass


def peak(model: Any, block: int, index: int) -> tuple[float, float]:
    """Peak gigabytes of this worker, and how many of them are Ray's shared object store.

    What a worker sends passes through that store, whose pages count for every process that has
    touched them.
    """
    import caster.adapt.ray_jobs  # noqa: F401 - loaded before anything is timed

    time.sleep(1.0)  # so that every worker takes one
    status = Path("/proc/self/status").read_text().splitlines()
    shared = next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return whole * 1024 / 1e9, shared * 1024 / 1e9


@dataclass(frozen=True)
class Run:
    """Seconds of a fit with some workers, and the memory of the largest one."""

    rows: int
    workers: int
    drawing: float
    first: float
    second: float
    whole: float
    memory: float  # GB
    shared: float  # GB of it that are pages of the object store

    @classmethod
    def of(cls, blocks: list[Drawn], workers: int) -> Run:
        """Draw all blocks once, then fit them."""
        with Pool[Any](no_model, workers) as pool:
            list(pool.map(peak, list(range(2 * workers))))  # start all workers
            start = time.perf_counter()
            list(pool.map(draw, blocks))
            drawing = time.perf_counter() - start
            times: dict[str, list[float]] = {}

            def progress(stage: str, done: int, total: int) -> None:
                times.setdefault(stage, []).append(time.perf_counter())

            classes = np.arange(blocks[0].classes)
            start = time.perf_counter()
            fit_blocks(pool, lambda: blocks, classes, Settings(), sketch=True, progress=progress)
            whole = time.perf_counter() - start
            memory = max(used for *_, used in pool.map(peak, list(range(2 * workers))))
        first, second = (taken[-1] - taken[0] for taken in times.values())
        return cls(sum(map(len, blocks)), workers, drawing, first, second, whole, *memory)

    def row(self, alone: float | None) -> str:
        """A row of the table; `alone` are the seconds of both passes with one worker."""
        passes = self.first + self.second
        speed = "" if alone is None else f"{alone / passes:.2f}"
        seconds = (self.drawing, self.first, self.second, self.whole - passes, self.whole)
        shown = " | ".join(f"{each:.1f} s" for each in seconds)
        memory = f"{self.memory:.2f} GB | {self.shared:.2f} GB"
        return f"| {self.rows:,} | {self.workers} | {shown} | {speed} | {memory} |"


def print_constants(block: Drawn) -> None:
    """What one block sends, and how long the driver takes to merge two and between the passes."""
    classes = np.arange(block.classes)
    first = first_pass(classes, None, block, 0)
    start = time.perf_counter()
    subspace = Subspace.of((first + first).scatter, classes, Settings())
    basis = time.perf_counter() - start
    before = [np.zeros(len(classes), np.int64)]
    second = partial(second_pass, classes, subspace, None, True, before)
    few = Drawn(0, block.rows, block.width, block.classes, max(2, block.classes // 60))
    sums = {
        "first pass": first,
        "second pass, random order": second(None, block, 0),
        "second pass, class by class": second(None, few, 0),
    }
    for name, one in sums.items():
        start = time.perf_counter()
        one + one
        seconds = time.perf_counter() - start
        moved = len(pickle.dumps(one, protocol=5)) / 1e6
        print(f"{name}: a block sends {moved:.1f} MB, merged in {seconds:.3f} s")
    print(f"basis: {basis:.2f} s")


def model_seconds(model: Any, block: int, index: int) -> float:
    """Seconds per image of ResNet-50 at 224 x 224 pixels on one core."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
        layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs))

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            reduce, middle = convolution(inputs, width, 1), convolution(width, width, 3, stride)
            expand, relu = convolution(width, 4 * width, 1), nn.ReLU()
            self.body = nn.Sequential(reduce, relu, middle, relu, expand)
            same = stride == 1 and inputs == 4 * width
            self.skip = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.skip(x))

    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    images = torch.randn(IMAGES, 3, 224, 224)
    with torch.inference_mode():
        net.eval()(images)
        start = time.perf_counter()
        for _ in range(FORWARDS):
            net(images)
        return (time.perf_counter() - start) / (FORWARDS * IMAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=8, help="to compare numbers of workers")
    given = parser.parse_args()
    import ray

    size, most = block_rows(ROWS), max(given.workers)
    blocks = [
        Drawn(i, min(size, given.rows - start), given.width, given.classes)
        for i, start in enumerate(range(0, given.rows, size))
    ]
    ray.init(
        address="local",
        num_cpus=most,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    print(machine())
    load = os.getloadavg()[0]
    print(f"Ray {ray.__version__} on this machine; load average at the start {load:.1f}")
    print(f"{given.width:,} float32 features, {given.classes:,} classes in random order, "
          f"blocks of {size:,} rows, object store {OBJECT_STORE / 1e9:.1f} GB\n")  # fmt: skip
    print("| rows | workers | drawing | pass 1 | pass 2 | driver alone | whole fit | speed-up "
          "| peak memory of a worker | of it, object store |")  # fmt: skip
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    large = Run.of(blocks, most)
    print(large.row(None), flush=True)
    alone = None
    for workers in sorted(given.workers):
        run = Run.of(blocks[: given.blocks], workers)
        alone = run if alone is None else alone
        print(run.row(alone.first + alone.second), flush=True)
    with Pool[Any](no_model, 1) as pool:
        ((_, _, per_image),) = pool.map(model_seconds, [0])
    ray.shutdown()
    assert alone is not None
    print(f"\nrows per second, {alone.workers} worker:", ", ".join(
        f"{name} {alone.rows / seconds:,.0f}"
        for name, seconds in (
            ("drawing", alone.drawing), ("pass 1", alone.first), ("pass 2", alone.second)
        )
    ))  # fmt: skip
    print_constants(blocks[0])
    model = per_image * large.rows / most
    least, extra = 2 * large.drawing + model, large.whole - 2 * large.drawing
    print(f"ResNet-50: {1000 * per_image:.1f} ms per image on one core")
    print(f"whole fit and model: {(least + extra) / least:.3f} times drawing twice and model")
    bound = (extra / 0.3 - 2 * large.drawing) * most / large.rows
    print(f"1.3 times with a model of {1000 * bound:.2f} ms per image on one core")


if __name__ == "__main__":
    main()
