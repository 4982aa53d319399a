"""Fit on Ray at the scale of ImageNet: synthetic features, streamed and never stored.

    python benchmarks/ray_fit.py                  # 1,281,167 rows of 2,048 features, 1,000 classes
    python benchmarks/ray_fit.py --rows 80000     # fewer blocks, of the same size

Workers draw the features of a block, which stands for reading them. For 1, 2 and 4 workers: seconds
of drawing alone and of both passes, and the peak memory of a worker. Then what `docs/clusters.md`
calculates with: rows per second of a core in each pass, bytes per block and seconds to merge them.
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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.ray_blocks import block_rows
from caster.adapt.ray_jobs import _FirstPass, _SecondPass, fit_blocks
from caster.adapt.ray_pool import Pool, no_model
from caster.adapt.source_moments import Subspace
from caster.config import Settings
from measure import machine

ROWS, WIDTH, CLASSES = 1_281_167, 2_048, 1_000
CHUNK = 8_192


@dataclass(frozen=True)
class Drawn:
    """A block of Gaussian classes, drawn again from its seed in each pass."""

    seed: int
    rows: int
    width: int
    classes: int

    def __len__(self) -> int:
        return self.rows

    def chunks(self, model: Any, head: Any, found: Any) -> Iterator[tuple[NDArray[Any], ...]]:
        """Draw chunks of features and labels."""
        means = np.random.default_rng(0).standard_normal((self.classes, self.width), np.float32)
        rng = np.random.default_rng((1, self.seed))
        for start in range(0, self.rows, CHUNK):
            y = rng.integers(self.classes, size=min(CHUNK, self.rows - start))
            h = rng.standard_normal((len(y), self.width), np.float32)
            for part in range(0, len(y), 1024):  # in place, without a copy of the chunk
                h[part : part + 1024] += 0.3 * means[y[part : part + 1024]]
            yield h, y


def read(model: Any, block: Drawn, index: int) -> None:
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


def timed(pool: Pool[Any], blocks: list[Drawn]) -> tuple[float, dict[str, float]]:
    """Seconds of drawing alone, and of the stages of a fit."""
    list(pool.map(peak, list(range(4))))  # start all workers
    start = time.perf_counter()
    list(pool.map(read, blocks))
    reading = time.perf_counter() - start
    ends: dict[str, list[float]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        ends.setdefault(stage, []).append(time.perf_counter())

    classes = np.arange(blocks[0].classes)
    start = time.perf_counter()
    fit_blocks(pool, lambda: blocks, classes, Settings(), sketch=True, progress=progress)
    stages = {stage: times[-1] - times[0] for stage, times in ends.items()}
    return reading, {**stages, "whole fit": time.perf_counter() - start}


def sizes(block: Drawn) -> None:
    """Print what one block sends, and how long the driver takes to merge two."""
    classes = np.arange(block.classes)
    first = _FirstPass(classes)(None, block, 0)
    subspace = Subspace.of((first + first).scatter, classes, Settings())
    second = _SecondPass(classes, subspace, None, True, [np.zeros(len(classes), np.int64)])
    for name, sums in (("pass 1", first), ("pass 2", second(None, block, 0))):
        start = time.perf_counter()
        sums + sums
        seconds = time.perf_counter() - start
        moved = len(pickle.dumps(sums, protocol=5)) / 1e6
        print(f"{name}: a block sends {moved:.0f} MB, and takes {seconds:.2f} s to merge")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    import ray

    size = block_rows(ROWS)
    starts = range(0, given.rows, size)
    blocks = [
        Drawn(i, min(size, given.rows - start), given.width, given.classes)
        for i, start in enumerate(starts)
    ]
    ray.init(
        address="local",
        num_cpus=max(given.workers),
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=2_000_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    print(machine())
    load = os.getloadavg()[0]
    print(f"Ray {ray.__version__} on this machine; load average at the start {load:.1f}")
    shape = f"{given.rows:,} rows of {given.width:,} float32 features, {given.classes:,} classes"
    print(f"{shape}, {len(blocks)} blocks of at most {size:,} rows\n", flush=True)
    for workers in given.workers:
        with Pool[Any](no_model, workers) as pool:
            reading, stages = timed(pool, blocks)
            memory = max(used for *_, used in pool.map(peak, list(range(2 * workers))))
        detail = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())
        ratio = stages["whole fit"] / (2 * reading)
        print(f"{workers} workers: drawing {reading:.1f} s; {detail}")
        whole, shared = memory
        used = f"{whole:.2f} GB, {shared:.2f} GB of it pages of the object store"
        print(f"  {ratio:.2f} times drawing twice; peak memory of a worker {used}")
        first, second = list(stages.values())[:2]
        rates = [given.rows / seconds / workers for seconds in (reading, first, second)]
        names = ("drawing", "pass 1", "pass 2")
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in zip(names, rates, strict=True))
        print(f"  rows per second and worker: {shown}", flush=True)
    ray.shutdown()
    sizes(blocks[0])


if __name__ == "__main__":
    main()
