"""Other readings of the certificate, from packed records: how to pool batches, and which τ.

    python benchmarks/real/certificates.py [RECORDS]

No run is needed, because the ratios of all batches are recorded. First the lowest certificate of a
cell that loses more than ten points under transport, by how its batches' ratios are pooled. Then,
on the cells of the specificity study, the share of batches accepted at several thresholds, the gain
behind the gate, and the rank correlation of that share with the ungated gains of transport and of
Tent.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caster_bench.records.store import Pack
from caster_bench.studies.certificate import LOSS
from caster_bench.studies.naming import ALWAYS
from caster_bench.studies.results import load, spearman
from caster_bench.studies.score import Curve, Score
from caster_bench.sweeps import read

ROOT = Path(__file__).parents[2]
READINGS: dict[str, Callable[[NDArray[np.float64]], np.floating]] = {
    "median": np.median,
    "mean": np.mean,
    "90 % quantile": lambda ratio: np.quantile(ratio, 0.9),
    "highest": np.max,
    "lowest": np.min,
}
TAUS = (0.4, 0.6, 0.8, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)


def show_losing(scores: Sequence[Score]) -> None:
    """Print the lowest certificate of a cell that loses, by backbone and reading."""
    held = defaultdict(list)
    for score in scores:
        held[score.spec.backbone].append(score)
    print(f"{'':24} {'losing':>8}" + "".join(f"{name:>15}" for name in READINGS))
    for backbone, own in held.items():
        lost = [score.batches.ratio for score in own if score.gain < -LOSS]
        if lost:
            lowest = (min(float(of(ratio)) for ratio in lost) for of in READINGS.values())
            columns = "".join(f"{value:15.2f}" for value in lowest)
            print(f"{backbone:24} {f'{len(lost)}/{len(own)}':>8}{columns}")


def shares(scores: Sequence[Score], tau: float) -> list[float]:
    """The share of accepted batches of every cell."""
    return [float((score.batches.min_tau <= tau).mean()) for score in scores]


def show_thresholds(transport: Sequence[Score], tent: Sequence[Score]) -> None:
    """Print acceptance and its correlations, by threshold."""
    curve, gains = Curve.of(transport), [[s.gain for s in held] for held in (transport, tent)]
    print(f"\n{'τ':>5} {'accepted, %':>12} {'gain':>7} {'with transport':>15} {'with Tent':>10}")
    for tau in TAUS:
        accepted = shares(transport, tau)
        own, other = (f"{spearman(accepted, gain):+.2f}" for gain in gains)
        share = 100 * float(np.mean(accepted))
        print(f"{tau:5} {share:12.1f} {100 * curve.at(tau):+7.2f} {own:>15} {other:>10}")
    found = (spearman(shares(transport, tau), gains[0]) for tau in curve.steps)
    highest = max(each for each in found if each is not None)
    print(f"the highest correlation with transport's gain at any threshold: {highest:+.2f}")


def main(records: Path) -> None:
    sweep = read(ROOT / "reproduction" / "sweeps" / "reproduction.toml")
    results, problems = load(sweep, Pack(records))
    if results is None:
        sys.exit("\n".join(map(str, problems[:5])))
    usual = [s for s in results.of("certificate") if s.spec.method == ALWAYS]
    show_losing([s for s in usual if s.spec.batch_size == 64 and s.spec.order == "shuffled"])
    held = defaultdict(dict)
    for score in results.of("specificity"):
        held[score.spec.method][score.spec.stream] = score
    show_thresholds(list(held[ALWAYS].values()), [held["tent"][stream] for stream in held[ALWAYS]])


if __name__ == "__main__":
    main(
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else ROOT / "reproduction" / "records" / "reproduction"
    )
