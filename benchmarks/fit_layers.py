"""What a fit with layers costs against one plain pass of the model, by images per class.

    python benchmarks/fit_layers.py MODEL SOURCE.npz --preprocessing P.toml

MODEL is anything that `caster --model` takes; SOURCE.npz holds `images` (uint8) and `labels`. Every
size draws so many images of each class, shuffled, and fits them in batches of 64 that are prepared
beforehand. Ratios are of processor time, which other work on the machine disturbs less than the
time of day; a pass and a fit run in turns, twice.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import caster
from measure import complete_torchvision, machine
from small_source_layers import WRAP, batches, drawn, read, wrapped


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("source")
    for name in WRAP:
        parser.add_argument(f"--{name}")
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 1000, 5000], help="per class")
    given = parser.parse_args()
    print(machine())
    model = wrapped(given)
    images, labels = read(given.source)
    for size in given.sizes:
        rows = drawn(labels, size)
        loaded = batches(model, images, rows)
        source = list(zip(loaded, np.array_split(labels[rows], len(loaded)), strict=True))

        def plain(loaded=loaded) -> None:
            for batch in loaded:
                model(batch)

        fit = partial(caster.fit, model, source)
        times = [(seconds(plain), seconds(fit)) for _ in range(2)]
        ratio = min(took for _, took in times) / min(took for took, _ in times)
        print(
            f"{size:,} per class, {len(rows):,} images: plain {times[0][0]:.1f} s, fit "
            f"{times[0][1]:.1f} s, {ratio:.2f} plain passes",
            flush=True,
        )


if __name__ == "__main__":
    complete_torchvision()
    main()
