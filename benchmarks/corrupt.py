"""Cost of each corruption on CIFAR-10's test set: processor seconds in one process.

    CASTER_DATA=DATA python benchmarks/corrupt.py

Corrupts a subset of the images at all five severities, and scales the time to all of them.
"""

from __future__ import annotations

import time

import numpy as np

from caster.core.threads import one_blas_thread
from caster.io.images import open_images
from caster_bench.data.corruptions import CORRUPTIONS, corrupt
from measure import machine

PART = 2_000  # images
SEVERITIES = range(1, 6)


def cost(images: np.ndarray, name: str) -> float:
    corrupt(images[:1], name, 1)  # imports, and frost's textures
    start = time.process_time()
    with one_blas_thread():
        for severity in SEVERITIES:
            corrupt(images, name, severity)
    return time.process_time() - start


def main() -> None:
    image_set = open_images("cifar10:test")
    images = np.stack([image_set.read(i) for i in range(PART)])
    seconds = {name: cost(images, name) * len(image_set) / PART for name in CORRUPTIONS}
    total = sum(seconds.values())
    print(f"{machine()}\nprocessor seconds for {len(image_set):,} images at five severities")
    for name, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"  {name:20}{taken:7.1f}  {taken / total:6.1%}")
    print(f"  {'all':20}{total:7.1f}")


if __name__ == "__main__":
    main()
