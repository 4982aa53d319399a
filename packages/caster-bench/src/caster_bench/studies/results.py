"""Verified results of a sweep, and how studies group and average them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from caster.report.intervals import (
    DRAWS_AT_ONCE,
    RESAMPLES,
    SEED,
    Interval,
    between,
    bootstrap,
)
from caster_bench.records.schema import REJECTED
from caster_bench.records.store import Pack, Record, Records
from caster_bench.studies.check_cells import Problem
from caster_bench.studies.naming import names
from caster_bench.studies.provenance import Provenance
from caster_bench.studies.score import Score
from caster_bench.studies.score import score as score_of
from caster_bench.studies.tables import Value, percent, points
from caster_bench.studies.verify import Examined, Progress, examine
from caster_bench.sweeps import STUDIES, Spec, Sweep, part_of, without

Streams = dict[Spec, dict[str, Score]]  # stream: scores by method
Values = Sequence[float] | NDArray[np.float64]
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # (draws, cells, m) -> (draws,)
MIN_PAIRS = 3  # pairs needed for a correlation


@dataclass(frozen=True)
class Results:
    """Verified results: every cell of the sweep, with a score or the reason it was rejected."""

    sweep: Sweep  # may be a part of `whole`
    whole: Sweep  # the complete sweep
    scores: dict[Spec, Score]
    rejected: dict[Spec, str]
    provenance: dict[Spec, Provenance]  # of the cells

    def of(self, study: str) -> list[Score]:
        """Return the scores of one study, in the sweep's order."""
        return [self.scores[spec] for spec in self.sweep.of(study) if spec in self.scores]

    @property
    def part(self) -> str:
        """A sentence saying which part of the sweep this is; empty if it is all of it."""
        whole, cells = self.whole, self.sweep.cells
        if cells == whole.cells:
            return ""
        studies = [study for study in STUDIES if self.sweep.of(study)]
        backbones = list(dict.fromkeys(spec.backbone for spec in cells))
        named = f"{'study' if len(studies) == 1 else 'studies'} {', '.join(studies)}"
        if part_of(whole, backbones=backbones).cells == cells:
            named = f"all of {', '.join(backbones)}"
        elif part_of(whole, studies).cells != cells:
            named += f" of {', '.join(backbones)}"
        return f"Of the sweep's {len(whole.cells):,} cells: {named}."

    def title(self, spec: Spec) -> str:
        """Title of the backbone, shared by seeds."""
        return self.sweep.backbones[spec.backbone].title

    def rejections(self, study: str) -> list[str]:
        """List the backbones that were rejected in a study, and why."""
        return list(
            dict.fromkeys(
                f"{spec.backbone} on {spec.data} was rejected: {self.rejected[spec]}"
                for spec in self.sweep.of(study)
                if spec in self.rejected
            )
        )


def by_stream(scores: Sequence[Score]) -> Streams:
    """Group scores by stream, then by method."""
    called = names(score.spec for score in scores)
    found: Streams = defaultdict(dict)
    for score in scores:
        found[score.spec.stream][called[score.spec]] = score
    return dict(found)


def matched(streams: Streams, methods: Iterable[str]) -> Streams:
    """Keep the streams that all these methods ran on, so that only methods differ."""
    wanted = set(methods)
    return {
        stream: by_method for stream, by_method in streams.items() if wanted <= by_method.keys()
    }


@dataclass(frozen=True)
class Mean:
    """A mean over cells, with its interval."""

    value: float
    interval: Interval | None  # None for a single cell
    cells: int


def shown(mean: Mean | None) -> tuple[Value, Value]:
    """Two values of a table's row: the mean in percent, and its interval."""
    return (None, None) if mean is None else (points(mean.value), percent(mean.interval))


def with_errors(means: Sequence[Mean]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Means in percent, and the lengths of their error bars below and above."""
    values, ends = [100 * mean.value for mean in means], [percent(mean.interval) for mean in means]
    both = list(zip(values, ends, strict=True))
    return values, (
        [v - e.low if e else 0.0 for v, e in both],
        [e.high - v if e else 0.0 for v, e in both],
    )


def mean(values: Sequence[float] | NDArray[np.float64]) -> Mean:
    """Mean with equal weight per cell.

    >>> mean([0.5, 0.7])
    Mean(value=0.6, interval=Interval(low=0.5, high=0.7), cells=2)
    """
    column = np.asarray(values, dtype=float)[:, None]
    return Mean(float(column.mean()), bootstrap(column, np.ones(len(column)))[0], len(column))


def mean_of_means(groups: Sequence[Sequence[float]]) -> Mean:
    """Mean of group means.

    Values are resampled within each group to match this mean. There is no interval if a group has a
    single value, which would count as certain.

    >>> mean_of_means([[0.5, 0.5, 0.5, 0.5], [0.9, 0.9]])
    Mean(value=0.7, interval=Interval(low=0.7, high=0.7), cells=6)
    """
    held = [np.asarray(group, dtype=float) for group in groups]
    value = float(np.mean([group.mean() for group in held]))
    count = sum(map(len, held))
    if min(map(len, held)) < 2:
        return Mean(value, None, count)
    rng = np.random.default_rng(SEED)
    drawn = np.mean([rng.choice(group, (RESAMPLES, len(group))).mean(axis=1) for group in held], 0)
    return Mean(value, between(drawn), count)


def interval_of(
    rows: NDArray[np.float64],  # (cells, m)
    statistic: Statistic,
) -> Interval | None:
    """Interval of a statistic of all cells, resampling whole cells.

    Draws for which it is NaN are dropped. None for a single cell, or if no draw is left.

    >>> interval_of(np.array([[1.0], [2.0], [9.0]]), lambda drawn: np.median(drawn, axis=(1, 2)))
    Interval(low=1.0, high=9.0)
    """
    n = len(rows)
    if n == 1:
        return None
    rng = np.random.default_rng(SEED)
    step = max(1, DRAWS_AT_ONCE // n)
    counts = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    found = [statistic(rows[rng.integers(n, size=(count, n))]) for count in counts]
    drawn = np.concatenate(found)
    defined = drawn[~np.isnan(drawn)]
    return between(defined) if len(defined) else None


def load(
    sweep: Sweep,
    out: Records,
    root: Path | None = None,
    progress: Progress | None = None,
    needed: Collection[Spec] | None = None,  # None means all
) -> tuple[Results | None, list[Problem]]:
    """Return the results of a run or pack, or everything missing or wrong in its records.

    Recorded cells that are not `needed` are verified and included too; `restrict` drops them.
    """
    examined = examine(sweep, out, root, summarise, progress, needed)
    if examined.problems:
        return None, examined.problems
    return _results(sweep, examined), []


@dataclass(frozen=True)
class Recorded:
    """What is recorded of a sweep: the backbones whose cells of a study are all there."""

    sweep: Sweep
    cells: dict[str, int]  # study: number of recorded cells
    pending: dict[str, tuple[str, ...]]  # study: backbones not fully recorded
    results: Results | None  # of the others; None if nothing is recorded


def load_recorded(
    sweep: Sweep, pack: Pack, root: Path | None = None, progress: Progress | None = None
) -> tuple[Recorded, list[Problem]]:
    """Return what is fully recorded, or everything wrong in the records; pending ones are verified.

    A pack that does not exist holds nothing, and all of the sweep is pending.
    """
    studies = [study for study in STUDIES if sweep.of(study)]
    everyone = {study: _backbones(sweep.of(study)) for study in studies}
    nothing = Recorded(sweep, dict.fromkeys(studies, 0), everyone, None)
    if not pack.folder.exists():
        return nothing, []
    results, problems = load(sweep, pack, root, progress, needed=())
    if results is None:
        return nothing, problems
    pending = {
        study: _backbones([spec for spec in sweep.of(study) if spec not in results.sweep.cells])
        for study in studies
    }
    whole = restrict(results, without(sweep, pending))
    counts = {study: len(results.sweep.of(study)) for study in studies}
    return Recorded(sweep, counts, pending, whole if whole.sweep.cells else None), []


def _backbones(specs: Iterable[Spec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(spec.backbone for spec in specs))


def restrict(results: Results, part: Sweep) -> Results:
    """Restrict results to a part of the sweep; all of its cells must be included."""
    cells = part.cells
    return replace(
        results,
        sweep=part,
        scores={spec: score for spec, score in results.scores.items() if spec in cells},
        rejected={spec: why for spec, why in results.rejected.items() if spec in cells},
        provenance={spec: own for spec, own in results.provenance.items() if spec in cells},
    )


def summarise(record: Record) -> tuple[Score, Provenance]:
    """Reduce a record to what a report needs."""
    return score_of(record), Provenance.of(record.cell)


def _results(sweep: Sweep, examined: Examined) -> Results:
    """Collect every cell with a verified record, in the sweep's order."""
    found = examined.found
    cells = {spec: studies for spec, studies in sweep.cells.items() if spec in found}
    rejected = {
        spec: str(found[spec][0].reason) for spec in cells if found[spec][0].status == REJECTED
    }
    done = {spec: examined.read[spec] for spec in cells if spec not in rejected}
    provenance = {spec: own for spec, (_, own) in done.items()}
    provenance |= {spec: Provenance.of(found[spec][0]) for spec in rejected}
    return Results(
        sweep=replace(sweep, cells=cells),
        whole=sweep,
        scores={spec: own for spec, (own, _) in done.items()},
        rejected=rejected,
        provenance=provenance,
    )


def spearman(first: Values, second: Values) -> float | None:
    """Spearman's rank correlation; None if all values are equal or there are fewer than three.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 50])
    0.948...
    """
    found = float(_correlations(np.column_stack([first, second])[None])[0])
    return None if np.isnan(found) else found


def correlation_interval(first: Values, second: Values) -> Interval | None:
    """Bootstrap interval of the rank correlation; None if there is no correlation."""
    if spearman(first, second) is None:
        return None
    return interval_of(np.column_stack([first, second]), _correlations)


def _correlations(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlations of many draws, NaN if undefined: (draws, pairs, 2) -> (draws,).

    scipy.stats.spearmanr takes one draw at a time, and its last bits depend on the processor.
    """
    n = pairs.shape[1]
    if n < MIN_PAIRS:
        return np.full(len(pairs), np.nan)
    # twice the distance from the middle rank: integers, so the sums are exact
    off = np.rint(2 * rankdata(pairs, axis=1) - n - 1).astype(np.int64)
    both, first, second = (
        (off[..., a] * off[..., b]).sum(axis=1) for a, b in ((0, 1), (0, 0), (1, 1))
    )
    spread = first.astype(float) * second
    return np.where(spread > 0, both / np.sqrt(np.where(spread > 0, spread, 1.0)), np.nan)
