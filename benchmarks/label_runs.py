"""Runs in a stream, before any doubt: what makes them evident, and how soon.

    python benchmarks/label_runs.py

Simulated classifiers of ten classes with random errors. A preference predicts one class for a share
of the samples, whatever they are. A single class recognised with 50 % accuracy gives the same
predictions as a preference of half of a shuffled stream, and both are then doubted. Confidence
is uniform between 40 % and 100 %, or between 90 % and 100 %. Takes two minutes on one core.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caster.core.label_chain import LabelChain
from measure import machine

C, STREAMS, SAMPLES = 10, 10, 1024
PREFERENCES = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
LOWEST = (0.4, 0.9)
ACCURACIES = (0.4, 0.5, 0.6, 0.7, 0.9)
BATCHES = (1, 4, 16, 64)
Labels = NDArray[np.int64]


def classifier(
    rng: np.random.Generator, y: Labels, accuracy: float, lowest: float, preferred: float = 0.0
) -> NDArray[np.float64]:  # (n, C)
    """Probabilities of a classifier; the confidence does not know of its errors."""
    n = len(y)
    predicted = np.where(rng.random(n) < accuracy, y, (y + rng.integers(1, C, n)) % C)
    predicted[rng.random(n) < preferred] = 0
    top = rng.uniform(lowest, 1, (n, 1))
    return np.where(np.eye(C)[predicted] > 0, top, (1 - top) / (C - 1))


def verdicts(p: NDArray[np.float64], B: int) -> NDArray[np.bool_]:
    """Whether the stream is taken for correlated, batch by batch."""
    chain, found = LabelChain.start(np.full(C, 1 / C)), []
    for batch in np.split(p, range(B, len(p), B)):
        chain = chain.observe(batch)
        found.append(chain.is_evident)
        chain = chain.advance(batch)
    return np.array(found)


def until(found: list[NDArray[np.bool_]], B: int) -> str:
    """Median number of samples until it is true."""
    waits = [(f.argmax() + 1) * B if f.any() else np.inf for f in found]
    median = np.quantile(waits, 0.5, method="higher")
    return f"{median:.0f}" if np.isfinite(median) else f"over {len(found[0]) * B}"


def preferences(rng: np.random.Generator) -> None:
    print("\nShuffled, 70 % accuracy before the preference, B = 64: batches taken for correlated")
    print("  preference   predicted as class 0   confidence >= 40 %   >= 90 %")
    for preferred in PREFERENCES:
        shares, wrong = [], []
        for lowest in LOWEST:
            streams = [
                classifier(rng, rng.integers(0, C, SAMPLES), 0.7, lowest, preferred)
                for _ in range(STREAMS)
            ]
            shares += [np.mean(p.argmax(axis=1) == 0) for p in streams]
            wrong.append(np.mean([verdicts(p, 64) for p in streams]))
        row = f"  {preferred:10.0%}   {np.mean(shares):22.0%}   {wrong[0]:18.0%}   {wrong[1]:7.0%}"
        print(row)


def delays(rng: np.random.Generator) -> None:
    """Sorted from the start on; then shuffled, sorted from 512 on, shuffled again from 1,024 on."""
    print("\nSamples until noticed (median), confidence >= 40 % / >= 90 %")
    print("  accuracy    B          sorted at once    turns to sorted    turns to shuffled")
    for accuracy in ACCURACIES:
        for B in BATCHES:
            cells: list[list[str]] = [[], [], []]
            for lowest in LOWEST:
                first, second, third = [], [], []
                for _ in range(STREAMS):
                    blocks = np.repeat(rng.permutation(C), 52)[:512]
                    first.append(verdicts(classifier(rng, blocks, accuracy, lowest), B))
                    shuffled = rng.integers(0, C, (2, 768))
                    y = np.concatenate([shuffled[0, :512], blocks, shuffled[1]])
                    found = verdicts(classifier(rng, y, accuracy, lowest), B)
                    second.append(found[512 // B : 1024 // B])
                    third.append(~found[1024 // B :])
                for cell, waits in zip(cells, (first, second, third), strict=True):
                    cell.append(until(waits, B))
            print(f"  {accuracy:8.0%} {B:4}" + "".join(f"{' / '.join(c):>20}" for c in cells))


def main() -> None:
    print(machine())
    rng = np.random.default_rng(0)
    preferences(rng)
    delays(rng)


if __name__ == "__main__":
    main()
