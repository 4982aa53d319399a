"""Choose the gate's coverage constants, `min_samples` and `min_classes`, on spare corruptions.

    python benchmarks/coverage.py SOURCE.npz TARGET.npz ... [--save BATCHES.npz]

Each file holds `features`, `logits` and integer `labels`, as `caster fit` and `caster evaluate`
read them; the targets are clean images (the first) and images under the four spare corruptions,
which `caster corrupt --corruption spare` makes. The fifteen reported corruptions take no part. The
source with all its classes makes the choice; the same source with five and with two of its classes
checks it. docs/coverage.md explains the rules and the result.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores

import numpy as np
from numpy.typing import NDArray

from caster import Caster
from caster.config import Settings
from measure import machine

Array = NDArray[Any]

BATCH_SIZES = (8, 16, 32, 64, 200)
ORDERS = ("iid", "correlated", "ordered")
SEEDS = 5  # arrangements of every stream
SUBSETS = (None, (0, 1, 2, 3, 4), (3, 5))  # classes of the source: all, five, two
COLUMNS = (
    *("subset", "target", "order", "batch"),
    *("size", "ratio", "confident", "classes", "frozen", "gda", "ungated"),
)
MIN_SAMPLES = (1, 2, 4, 8, 12, 16, 24, 32, 48)
MIN_CLASSES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
FREE = 0.1  # points of gain that a requirement may cost any i.i.d. stream
TIE = 0.05  # points of gain that count as equal
LIMIT = 1.0  # points that a cell may lose to the frozen model, by the first rule


@dataclass(frozen=True)
class Features:
    """What a frozen network gives for a set of images."""

    features: Array  # (N, d)
    logits: Array  # (N, C)
    labels: Array  # (N,)

    @classmethod
    def read(cls, path: Path) -> Features:
        """Read a feature file."""
        with np.load(path, allow_pickle=False) as arrays:
            features, logits = (arrays[k].astype(np.float32) for k in ("features", "logits"))
            return cls(features, logits, arrays["labels"].astype(np.int64))

    def of(self, classes: tuple[int, ...] | None) -> Features:
        """Only the samples and logits of some classes."""
        if classes is None:
            return self
        rows = np.isin(self.labels, classes)
        labels = np.searchsorted(classes, self.labels[rows])
        return Features(self.features[rows], self.logits[np.ix_(rows, classes)], labels)


# Measurement: one row per batch of every subset, target, order and batch size.


def measure(paths: list[Path]) -> Array:  # -> (rows, COLUMNS)
    """Stream every target past every subset of the source."""
    jobs = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for s in range(len(SUBSETS)):
            for t in range(1, len(paths)):
                for o in range(len(ORDERS)):
                    jobs.append(((s, t - 1, o), pool.submit(stream, paths[0], paths[t], s, o)))
        tables = [(key, job.result()) for key, job in jobs]
    return np.concatenate(
        [np.column_stack([np.tile(key, (len(table), 1)), table]) for key, table in tables]
    )


def stream(source_path: Path, path: Path, subset: int, order: int) -> Array:
    """One target in one order, in batches of every size: rows of COLUMNS from "batch" on."""
    source, target = (Features.read(p).of(SUBSETS[subset]) for p in (source_path, path))
    # The grid varies the certificate's coverage alone, so the safeguards stay out of it.
    clf = Caster(safeguards=False).fit(source.features, source.labels)
    features, logits, labels = target.features, target.logits, target.labels
    frozen = logits.argmax(axis=1) == labels
    scores = [clf.source_scores(part) for part in np.array_split(features, 20)]
    gda = clf.classes_[np.concatenate(scores).argmax(axis=1)] == labels
    rows = []
    for batch_size, seed in ((b, seed) for b in BATCH_SIZES for seed in range(SEEDS)):
        rng = np.random.default_rng((seed, batch_size))
        arranged = arrange(labels, ORDERS[order], batch_size, rng)
        for start in range(0, len(labels), batch_size):
            at = arranged[start : start + batch_size]
            out = clf.adapt(features[at], logits[at])
            verdict = out.verdict
            evidence = np.array([verdict.ratio, verdict.confident, verdict.classes])
            gate = accepts(evidence, len(clf.classes_), clf.min_samples, clf.min_classes)
            assert gate == verdict.accepted, "the grid's gate differs from the library's"
            correct = frozen[at].sum(), gda[at].sum(), (out.proposed == labels[at]).sum()
            rows.append((batch_size, len(at), *evidence, *correct))
    return np.array(rows, dtype=np.float64)


def arrange(labels: Array, order: str, batch_size: int, rng: np.random.Generator) -> Array:
    """A permutation of the samples: shuffled, in short runs of one class, or sorted by class."""
    shuffled = rng.permutation(len(labels))
    if order == "iid":
        return shuffled
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if order == "ordered":
        return by_class
    step = round(0.4 * batch_size)  # a batch then spans 3 or 4 runs
    members = (by_class[labels[by_class] == c] for c in np.unique(labels))
    runs = [rows[i : i + step] for rows in members for i in range(0, len(rows), step)]
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))])


def accepts(evidence: Array, n_classes: Any, min_samples: int, min_classes: int) -> Array:
    """`caster.core.verdict.decide` for columns of (ratio, confident, classes)."""
    ratio, confident, classes = evidence
    covered = (confident >= max(min_samples, 1)) & (classes >= np.minimum(min_classes, n_classes))
    return covered & (ratio <= Settings.tau)


# The choice: every pair of the grid on the batches measured, and the rules that pick one.


@dataclass(frozen=True)
class Row:
    """One pair of the grid: points of accuracy over the frozen model, shares of batches."""

    min_samples: int
    min_classes: int
    gain: dict[str, float]  # by order: mean over batch sizes, corrupted images
    accepted: float  # share of i.i.d. batches, likewise
    clean: float  # gain on clean i.i.d. images
    worst: float  # smallest gain of a cell: corrupted or clean, order, batch size
    cost: float  # largest gain that coverage costs an i.i.d. stream: target, batch size

    def __str__(self) -> str:
        gains = " | ".join(f"{self.gain[order]:+.2f}" for order in ORDERS)
        rest = f"{self.cost:.2f} | {self.accepted:.0%} | {self.worst:+.2f} | {self.clean:+.2f}"
        return f"| {self.min_samples} | {self.min_classes} | {gains} | {rest} |"


class Batches:
    """The measured batches, summed over cells: subset, corrupted or clean, order, batch size."""

    def __init__(self, table: Array, n_classes: int) -> None:  # (rows, COLUMNS)
        self.columns = dict(zip(COLUMNS, table.T, strict=True))
        self.subset, self.target = (self.columns[k].astype(int) for k in ("subset", "target"))
        self.n_classes = np.array([len(subset or range(n_classes)) for subset in SUBSETS])
        size = np.searchsorted(BATCH_SIZES, self.columns["batch"])
        at = (self.subset, 1 * (self.target == 0), self.columns["order"].astype(int), size)
        self.shape = (len(SUBSETS), 2, len(ORDERS), len(BATCH_SIZES))
        self.cell = np.ravel_multi_index(at, self.shape)
        self.streams = (len(SUBSETS), self.target.max() + 1, len(BATCH_SIZES))
        self.stream = np.ravel_multi_index((self.subset, self.target, size), self.streams)
        self.iid = self.columns["order"] == 0
        self.evidence = np.stack([self.columns[k] for k in ("ratio", "confident", "classes")])
        self.steps = self.columns["ungated"] - self.columns["frozen"]

    def accepted(self, min_samples: int, min_classes: int) -> Array:  # -> (rows,)
        """The gate's verdict on every batch."""
        n_classes = self.n_classes[self.subset]
        return accepts(self.evidence, n_classes, min_samples, min_classes)

    def sum(self, weights: Array) -> Array:  # (rows,) -> (subsets, 2, orders, sizes)
        """A quantity summed over every cell's batches."""
        return np.bincount(self.cell, weights, int(np.prod(self.shape))).reshape(self.shape)

    def gains(self, accepted: Array) -> Array:  # (rows,) -> (subsets, targets, sizes)
        """Points gained on every i.i.d. stream."""
        weights = (self.columns["size"] * self.iid, self.steps * accepted * self.iid)
        size, steps = (np.bincount(self.stream, w, np.prod(self.streams)) for w in weights)
        return (100 * steps / size).reshape(self.streams)

    def evaluate(self, subset: int, left_out: int | None = None) -> list[Row]:
        """Every pair of the grid on one subset, optionally without one target."""
        kept = self.target != left_out
        samples, batches = self.sum(kept * self.columns["size"]), self.sum(kept)
        free = self.gains(kept * self.accepted(1, 1))
        rows = []
        for pair in ((s, c) for s in MIN_SAMPLES for c in MIN_CLASSES):
            accepted = kept * self.accepted(*pair)
            points = (100 * self.sum(self.steps * accepted) / samples)[subset]
            gain = points[0].mean(axis=-1).tolist()
            rows.append(
                Row(
                    *pair,
                    gain=dict(zip(ORDERS, gain, strict=True)),
                    accepted=float((self.sum(accepted) / batches)[subset, 0, 0].mean()),
                    clean=float(points[1, 0].mean()),
                    worst=float(points.min()),
                    cost=float((free - self.gains(accepted))[subset].max()),
                )
            )
        return rows

    def policies(self, accepted: Array) -> list[str]:
        """Accuracies on corrupted i.i.d. batches of 64: frozen, Source-GDA, ungated, gated."""
        size, batches = self.sum(self.columns["size"]), self.sum(np.ones(len(self.steps)))
        accuracy = [100 * self.sum(self.columns[k]) / size for k in ("frozen", "gda", "ungated")]
        accuracy.append(accuracy[0] + 100 * self.sum(self.steps * accepted) / size)
        share = self.sum(accepted) / batches
        lines = []
        for s, n_classes in enumerate(self.n_classes):
            at = (s, 0, 0, BATCH_SIZES.index(64))
            here = self.cell == np.ravel_multi_index(at, self.shape)
            cells = " | ".join(f"{values[at]:.2f}" for values in accuracy)
            ratio = np.median(self.columns["ratio"][here])
            lines.append(f"| {n_classes} classes | {cells} | {share[at]:.0%} | {ratio:.2f} |")
        return lines


def choose(rows: list[Row], free: float = FREE) -> Row:
    """The smallest loss in other orders among pairs that cost no i.i.d. stream over `free` points.

    Pairs within 0.01 points are equal; among these the smallest constants win.
    """
    affordable = [row for row in rows if row.cost <= free]
    losses = [round(-row.gain["correlated"] - row.gain["ordered"], 2) for row in affordable]
    ranked = zip(losses, affordable, strict=True)
    return min(ranked, key=lambda it: (it[0], it[1].min_classes, it[1].min_samples))[1]


def choose_safest(rows: list[Row]) -> Row:
    """The first rule, overruled: docs/coverage.md explains why.

    The largest i.i.d. gain among pairs whose worst cell loses at most LIMIT points, or, if no pair
    is that safe, among those within TIE of the smallest worst loss.
    """
    floor = min(-LIMIT, max(row.worst for row in rows) - TIE)
    safe = [row for row in rows if row.worst >= floor]
    best = max(row.gain["iid"] for row in safe)
    equal = [row for row in safe if row.gain["iid"] >= best - TIE]
    return min(equal, key=lambda row: (round(-row.worst, 2), row.min_classes, row.min_samples))


def settle(grids: list[list[Row]], min_classes: int) -> int:
    """The largest `min_samples` within TIE of the best mean i.i.d. gain, given `min_classes`.

    For sources with few classes. Elsewhere `min_samples` hardly matters: there are at least as many
    confident samples as classes.
    """
    rows = [row for grid in grids for row in grid if row.min_classes == min_classes]
    gains = {
        n: np.mean([row.gain["iid"] for row in rows if row.min_samples == n]) for n in MIN_SAMPLES
    }
    return max(n for n, gain in gains.items() if gain >= max(gains.values()) - TIE)


def report(batches: Batches, targets: list[str]) -> None:
    """Print the choice, what it depends on, and the tables of docs/coverage.md."""
    grid = batches.evaluate(0)
    min_classes = choose(grid).min_classes
    few = [s for s, n in enumerate(batches.n_classes) if n < Settings.min_classes]
    min_samples = settle([batches.evaluate(s) for s in few], min_classes)

    header = "| min_samples | min_classes | i.i.d. | correlated | ordered | cost | accepted |"
    print(header, "worst cell | clean |")
    print(*grid, sep="\n")
    picks = {"chosen": choose(grid), "first rule": choose_safest(grid)}
    for t, name in enumerate(targets[1:], 1):
        picks[f"without {name}"] = choose(batches.evaluate(0, t))
    for free in (0.03, 0.05, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6):
        picks[f"limit {free}"] = choose(grid, free)
    for name, row in picks.items():
        print(name, row)
    for s in few:
        print(f"{batches.n_classes[s]} classes, all of which must occur")
        print(*(r for r in batches.evaluate(s) if r.min_classes == MIN_CLASSES[-1]), sep="\n")
    accepted = batches.accepted(Settings.min_samples, Settings.min_classes)
    print(f"the library's constants: {Settings.min_samples}, {Settings.min_classes}")
    print("| | frozen | Source-GDA | ungated | gated | accepted | median ratio |")
    print(*batches.policies(accepted), sep="\n")
    print(f"chosen: min_samples {min_samples}, min_classes {min_classes}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose min_samples and min_classes.")
    parser.add_argument("source", type=Path)
    parser.add_argument("targets", type=Path, nargs="+", help="the first one has clean images")
    parser.add_argument("--save", type=Path, help="keep the measured batches, or reuse them")
    options = parser.parse_args()
    print(machine())
    if options.save is None or not options.save.exists():
        began = time.perf_counter()
        table = measure([options.source, *options.targets])
        print(f"{len(table)} batches in {time.perf_counter() - began:.0f} s")
        if options.save is not None:
            np.savez_compressed(options.save, allow_pickle=False, table=table)
    else:
        table = np.load(options.save, allow_pickle=False)["table"]
    n_classes = Features.read(options.source).logits.shape[1]
    report(Batches(table, n_classes), [path.stem for path in options.targets])


if __name__ == "__main__":
    main()
