"""Shrinkage of S_w: accuracy of ungated transport on small sources, by intensity.

    python benchmarks/shrinkage.py SOURCE.npz TARGET.npz...   # features, labels and logits

Rows: fixed intensities, OAS (used by `caster fit`), Ledoit-Wolf, and the fixed intensity with the
best cross-validated accuracy of Source-GDA on the source; all on correlations.
Columns: the mean accuracy over the targets in shuffled batches of 64, for sources of 10 and 50
samples per class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf_shrinkage

from caster import Caster
from caster.core.subspace import oas_shrinkage
from measure import machine
from small_sources import BATCH, Sample, read, subset

SIZES = (10, 50)
INTENSITIES = (0.001, 0.1, 0.5, 0.9, 0.99)
FOLDS = 3
Intensity = Callable[[NDArray[Any], float], float]


def fixed(rho: float) -> Intensity:
    return lambda correlation, n: rho


def ledoit_wolf(sample: Sample) -> float:
    """Ledoit-Wolf intensity for standardized residuals from class means."""
    h, y, _ = sample
    residuals = h - np.stack([h[y == c].mean(axis=0) for c in range(y.max() + 1)])[y]
    scale = residuals.std(axis=0)
    standard = residuals[:, scale > 0] / scale[scale > 0]
    return float(ledoit_wolf_shrinkage(standard, assume_centered=True))


def cross_validated(sample: Sample) -> float:
    """The intensity at which Source-GDA classifies held-out source samples best."""
    h, y, _ = sample
    fold = np.random.default_rng(0).permutation(len(y)) % FOLDS
    right = dict.fromkeys(INTENSITIES, 0)
    for rho in INTENSITIES:
        for f in range(FOLDS):
            with patch("caster.core.subspace.oas_shrinkage", fixed(rho)):
                clf = Caster(safeguards=False).fit(h[fold != f], y[fold != f])
            scores = clf.source_scores(h[fold == f])
            right[rho] += int(np.sum(clf.classes_[scores.argmax(axis=1)] == y[fold == f]))
    return max(right, key=lambda rho: right[rho])


def accuracy(sample: Sample, targets: list[Sample], intensity: Intensity) -> float:
    with patch("caster.core.subspace.oas_shrinkage", intensity):
        clf = Caster(safeguards=False).fit(*sample[:2])
    shares = []
    for h, y, _ in targets:
        order = np.random.default_rng(0).permutation(len(y))
        batches = np.array_split(order, max(1, len(order) // BATCH))
        right = sum(np.sum(clf.adapt(h[rows]).proposed == y[rows]) for rows in batches)
        shares.append(right / len(y))
    return 100 * float(np.mean(shares))


def main(source: str, *paths: str) -> None:
    print(machine())
    whole, targets = read(source), [read(path) for path in paths]
    samples = [found for each in SIZES if (found := subset(whole, each)) is not None]
    print(f"\n{'':16}" + "".join(f"{f'{each} per class':>14}" for each in SIZES[: len(samples)]))
    rows = {str(rho): [fixed(rho)] * len(samples) for rho in INTENSITIES}
    rows["OAS"] = [oas_shrinkage] * len(samples)
    rows["Ledoit-Wolf"] = [fixed(ledoit_wolf(some)) for some in samples]
    rows["cross-validated"] = [fixed(cross_validated(some)) for some in samples]
    for name, intensities in rows.items():
        found = [accuracy(s, targets, i) for s, i in zip(samples, intensities, strict=True)]
        print(f"{name:16}" + "".join(f"{value:>14.1f}" for value in found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
