"""Fit on Ray at the scale of ImageNet: synthetic features, streamed and never stored.

    python benchmarks/ray_fit.py                          # 1,281,167 rows, then 1, 2 and 4 workers
    python benchmarks/ray_fit.py --rows 40038 --blocks 2  # two blocks of each

Workers draw features, which stands for reading them, and draw them again in the second pass. Prints
the seconds of each stage and the peak memory of a worker: for all rows with one worker per core;
for the first few blocks with 1, 2 and 4 workers; and for these blocks with a model that runs on an
image per row in the first pass. Prints how long that fit takes compared with drawing and running
the model alone, and what `docs/clusters.md` calculates with.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
OBJECT_STORE = 250_000_000  # bytes per worker
RESNET14, RESNET50 = (1, 1, 1, 1), (3, 4, 6, 3)  # bottlenecks of each stage
PIXELS, IMAGES = 32, 64  # side of an image for ResNet-14, and images of a forward pass


@dataclass(frozen=True)
class Drawn:
    """A block of Gaussian classes, drawn again from its seed in each pass."""

    seed: int
    rows: int
    width: int
    classes: int  # of the source
    own: int = 0  # classes in this block, if not all
    images: bool = False  # whether to run the model on an image per row

    def __len__(self) -> int:
        return self.rows

    def chunks(self, model: Any, head: Any, found: Any) -> Iterator[tuple[NDArray[Any], ...]]:
        """Draw chunks of features and labels; what the model makes of its images is dropped."""
        means = np.random.default_rng(0).standard_normal((self.classes, self.width), np.float32)
        rng = np.random.default_rng((1, self.seed))
        for start in range(0, self.rows, CHUNK):
            y = rng.integers(self.own or self.classes, size=min(CHUNK, self.rows - start))
            h = rng.standard_normal((len(y), self.width), np.float32)
            for part in range(0, len(y), 1024):  # in place, without a copy of the chunk
                h[part : part + 1024] += 0.3 * means[y[part : part + 1024]]
            if self.images:
                for part in range(0, len(y), IMAGES):
                    model(PIXELS, min(IMAGES, len(y) - part))
            yield h, y


class ResNet:
    """A ResNet of bottlenecks with 2,048 features, on one core, on images of noise."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        import torch
        from torch import nn

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

        torch.set_num_threads(1)
        layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, depth, stride in zip((64, 128, 256, 512), depths, (1, 2, 2, 2), strict=True):
            for i in range(depth):
                layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
                inputs = 4 * width
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)
        self._net = nn.Sequential(*layers, *head).eval()

    def __call__(self, pixels: int, images: int) -> Any:
        """Run one forward pass."""
        import torch

        with torch.inference_mode():
            return self._net(torch.rand(images, 3, pixels, pixels))


def model_seconds(model: Any, block: int, index: int) -> float:
    """Seconds per image of ResNet-50 at 224 x 224 pixels on one core."""
    net, images, forwards = ResNet(RESNET50), 16, 4
    net(224, images)
    start = time.perf_counter()
    for _ in range(forwards):
        net(224, images)
    return (time.perf_counter() - start) / (images * forwards)


def draw(model: Any, block: Drawn, index: int) -> None:
    for _ in block.chunks(model, None, None):
        pass


def peak(model: Any, block: int, index: int) -> tuple[float, float]:
    """Peak gigabytes of this process, and how many of them are Ray's shared object store.

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
    images: bool
    reading: float  # drawing all rows once and running the model on them, without any sums
    first: float
    second: float
    whole: float
    memory: float  # GB
    shared: float  # GB of it that are pages of the object store

    @classmethod
    def of(cls, blocks: list[Drawn], workers: int, images: bool = False) -> Run:
        """Read the blocks, then fit them; the model runs in the first pass, as with a cache."""
        with Pool[Any](partial(ResNet, RESNET14) if images else no_model, workers) as pool:
            list(pool.map(peak, list(range(2 * workers))))  # start all workers
            passes = iter([[replace(block, images=images) for block in blocks], blocks])

            def read() -> float:
                start = time.perf_counter()
                list(pool.map(draw, [replace(block, images=images) for block in blocks]))
                return time.perf_counter() - start

            reading = read()
            times: dict[str, list[float]] = {}

            def progress(stage: str, done: int, total: int) -> None:
                times.setdefault(stage, []).append(time.perf_counter())

            classes = np.arange(blocks[0].classes)
            start = time.perf_counter()
            fit_blocks(
                pool, lambda: next(passes), classes, Settings(), sketch=True, progress=progress
            )
            whole = time.perf_counter() - start
            reading = (reading + read()) / 2  # before and after: a machine's speed drifts
            memory = max(used for *_, used in pool.map(peak, list(range(2 * workers))))
        first, second = (taken[-1] - taken[0] for taken in times.values())
        rows = sum(map(len, blocks))
        return cls(rows, workers, images, reading, first, second, whole, *memory)

    def row(self, alone: Run | None = None) -> str:
        """A row of the table; `alone` is the run with one worker."""
        passes = self.first + self.second
        speed = "" if alone is None else f"{(alone.first + alone.second) / passes:.2f}"
        seconds = (self.reading, self.first, self.second, self.whole - passes, self.whole)
        shown = " | ".join(f"{each:.1f} s" for each in seconds)
        memory = f"{self.memory:.2f} GB | {self.shared:.2f} GB"
        model = "ResNet-14" if self.images else ""
        return f"| {self.rows:,} | {self.workers} | {model} | {shown} | {speed} | {memory} |"


def print_constants(block: Drawn) -> None:
    """What one block sends, and how long the driver takes to merge two and between the passes."""
    classes = np.arange(block.classes)
    first = first_pass(classes, None, block, 0)
    start = time.perf_counter()
    subspace = Subspace.of((first + first).scatter, classes, Settings())
    basis = time.perf_counter() - start
    before = [np.zeros(len(classes), np.int64)]
    centroids = subspace.scatter.means @ subspace.basis.U
    second = partial(second_pass, classes, subspace, centroids, None, True, before)
    few = Drawn(0, block.rows, block.width, block.classes, max(2, block.classes // 60))
    sums = {
        "first pass": first,
        "second pass, random order": second(None, block, 0),
        "second pass, class by class": second(None, few, 0),
    }
    for name, one in sums.items():
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            one + one
            seconds.append(time.perf_counter() - start)
        moved = len(pickle.dumps(one, protocol=5)) / 1e6
        print(f"{name}: a block sends {moved:.1f} MB, merged in {np.median(seconds):.3f} s")
    print(f"basis: {basis:.2f} s")


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--most", type=int, default=cores, help="workers for all rows")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="to compare")
    parser.add_argument("--blocks", type=int, default=8, help="to compare numbers of workers")
    parser.add_argument("--no-model", action="store_true", help="skip the fit with a model")
    given = parser.parse_args()
    import ray

    size, most = block_rows(ROWS), max(given.most, *given.workers)
    store = OBJECT_STORE * max(4, most)
    blocks = [
        Drawn(i, min(size, given.rows - start), given.width, given.classes)
        for i, start in enumerate(range(0, given.rows, size))
    ]
    ray.init(
        address="local",
        num_cpus=most,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=store,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    print(machine())
    load = os.getloadavg()[0]
    print(f"Ray {ray.__version__} on this machine; load average at the start {load:.1f}")
    print(f"{given.width:,} float32 features, {given.classes:,} classes in random order, "
          f"blocks of {size:,} rows, object store {store / 1e9:.1f} GB")  # fmt: skip
    with Pool[Any](no_model, 1) as pool:
        ((_, _, per_image),) = pool.map(model_seconds, [0])
    print(f"ResNet-50 at 224 x 224 pixels: {1000 * per_image:.1f} ms per image on one core")
    print_constants(blocks[0])
    print("\n| rows | workers | model | reading and model alone | pass 1 | pass 2 "
          "| basis and check | whole fit | speed-up | peak memory of a worker "
          "| of it, object store |")  # fmt: skip
    print("|--:|--:|--|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    plain = Run.of(blocks, given.most)
    print(plain.row(), flush=True)
    alone = None
    for workers in sorted(given.workers):
        run = Run.of(blocks[: given.blocks], workers)
        alone = run if alone is None else alone
        print(run.row(alone), flush=True)
    assert alone is not None
    with_model = None if given.no_model else Run.of(blocks[: given.blocks], given.most, images=True)
    if with_model is not None:
        print(with_model.row(), flush=True)
    ray.shutdown()
    driver, _ = peak(None, 0, 0)
    print(f"\npeak memory of the driver: {driver:.2f} GB, Ray's object store included")
    print(f"rows per second, {alone.workers} worker:", ", ".join(
        f"{name} {alone.rows / seconds:,.0f}"
        for name, seconds in (
            ("drawing", alone.reading), ("pass 1", alone.first), ("pass 2", alone.second)
        )
    ))  # fmt: skip
    if with_model is not None:
        model = with_model.reading / with_model.rows - plain.reading / plain.rows
        print(f"ResNet-14 at {PIXELS} x {PIXELS} pixels: {1000 * model * given.most:.2f} ms per "
              f"image on one core; the fit takes {with_model.whole / with_model.reading:.3f} times "
              "as long as reading and the model alone")  # fmt: skip
    extra = plain.whole - plain.reading
    resnet50 = plain.reading + per_image * plain.rows / given.most
    slow = 1000 * (extra / 0.3 - plain.reading) * given.most / plain.rows
    print(f"calculated from the fit of {plain.rows:,} rows: {1 + extra / resnet50:.3f} times with "
          f"ResNet-50, 1.3 times with a model of {slow:.2f} ms per image on one core")  # fmt: skip


if __name__ == "__main__":
    main()
