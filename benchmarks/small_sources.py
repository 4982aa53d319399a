"""Accuracy lost and gained with few source samples, on shuffled and sorted streams.

    python benchmarks/small_sources.py                          # Gaussian classes, 512 features
    python benchmarks/small_sources.py SOURCE.npz TARGET.npz... # features, labels and logits

Draws sources of 5 to 500 samples per class from SOURCE and streams every TARGET in batches of 64,
shuffled and sorted by class. Columns: accuracy of the frozen head, and the change in points with
caster's defaults, the paper's gate alone (`--no-safeguards`), and transport of every batch. `on`
says whether the source check left transport on. The last lines are the worst cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster import Caster
from measure import machine

SIZES = (5, 10, 20, 50, 100, 200, 500)
BATCH = 64
Sample = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # features, labels, logits


def gaussians(n: int, seed: int, d: int = 512, n_classes: int = 7) -> Sample:
    """Unshifted classes, and logits of a classifier that knows their means."""
    centres = 0.16 * np.random.default_rng(99).standard_normal((n_classes, d))
    rng = np.random.default_rng(seed)
    y = rng.integers(n_classes, size=n)
    h = rng.standard_normal((n, d)) + centres[y]
    return h, y, h @ centres.T - 0.5 * (centres**2).sum(axis=1)


def read(path: str) -> Sample:
    with np.load(path) as file:
        features, labels, logits = (file[name] for name in ("features", "labels", "logits"))
    return features.astype(np.float32), labels, logits.astype(np.float32)


def subset(sample: Sample, each: int) -> Sample | None:
    """A fixed number of samples per class; None if a class has fewer."""
    rng = np.random.default_rng(each)
    order = rng.permutation(len(sample[1]))
    rows = [order[sample[1][order] == c][:each] for c in np.unique(sample[1])]
    if min(map(len, rows)) < each:
        return None
    chosen = rng.permutation(np.concatenate(rows))
    return sample[0][chosen], sample[1][chosen], sample[2][chosen]


def gains(clf: Caster, target: Sample, ordered: bool) -> tuple[float, NDArray[np.float64]]:
    """Accuracy of the head, and points gained by the default, by the paper's gate, and ungated."""
    h, y, logits = target
    rows = np.random.default_rng(0).permutation(len(y))
    rows = rows[np.argsort(y[rows], kind="stable")] if ordered else rows
    frozen = (logits.argmax(axis=1) == y).mean()
    right = np.zeros(3)
    for batch in np.array_split(rows, max(1, len(rows) // BATCH)):
        default = clf.set_params(safeguards=True).adapt(h[batch], logits[batch])
        paper = clf.set_params(safeguards=False).adapt(h[batch], logits[batch])
        for i, answers in enumerate((default.labels, paper.labels, paper.proposed)):
            right[i] += np.sum(answers == y[batch])
    return 100 * frozen, 100 * (right / len(y) - frozen)


def main(paths: list[str]) -> None:
    print(machine())
    source = read(paths[0]) if paths else gaussians(20_000, 0)
    targets = {Path(path).stem: read(path) for path in paths[1:]}
    targets = targets or {"unshifted": gaussians(6_400, 1)}
    n, d = source[0].shape
    print(f"{n:,} source samples, {d:,} features, {len(np.unique(source[1]))} classes\n")
    heading = ("a class", "N/d", "on", "target", "stream", "frozen", "default", "paper", "ungated")
    widths = (8, 7, 4, 22, 9, 8, 8, 8, 8)
    print("".join(f"{name:>{width}}" for name, width in zip(heading, widths, strict=True)))
    found = []
    for each in SIZES:
        some = subset(source, each)
        if some is None:
            continue
        clf = Caster().fit(*some)
        on = clf.source_check_.supported
        for name, target in targets.items():
            for stream in ("shuffled", "sorted"):
                frozen, won = gains(clf, target, stream == "sorted")
                found.append(won)
                cells = (each, f"{len(some[1]) / d:.2f}", "yes" if on else "no", name, stream)
                cells += (f"{frozen:.1f}", *(f"{points:+.1f}" for points in won))
                line = "".join(f"{c:>{width}}" for c, width in zip(cells, widths, strict=True))
                print(line, flush=True)
    worst, mean = np.min(found, axis=0), np.mean(found, axis=0)
    for name, values in (("worst", worst), ("mean", mean)):
        print(f"{name:>58}" + "".join(f"{points:>+8.1f}" for points in values))


if __name__ == "__main__":
    main(sys.argv[1:])
