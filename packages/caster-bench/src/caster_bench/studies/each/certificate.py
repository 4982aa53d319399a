"""Certificate against realised gain, and gain against the threshold (Sec. 4.3, Fig. 3)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from caster.report.intervals import Interval
from caster_bench.studies.agree import transport_of
from caster_bench.studies.each import certificate_figures as figures
from caster_bench.studies.each import certificate_tables as tables
from caster_bench.studies.method_names import ALWAYS, GATED
from caster_bench.studies.naming import places
from caster_bench.studies.ranks import correlation_interval, spearman
from caster_bench.studies.results import Mean, Results, label, mean, names
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import as_file, cells
from caster_bench.studies.thresholds import WITHIN, Curve, gated_gain
from caster_bench.sweeps.spec import Spec

MIXED = "caster-mixed-metric"
OTHERS = ", other streams"
LOSS = 0.10  # of accuracy: a cell that loses more is degenerate
TITLE = "What the certificate detects"
HOW = (
    "A point a cell that always transports. Its certificate is the median ratio of its batches, a "
    "batch without a confident sample counted as infinite; its gain is its accuracy less the "
    "frozen head's on the same samples. The non-degenerate regime are the cells below the lowest "
    "certificate of any that loses more than 10 points: chosen by certificate, not by gain, which "
    "would bend the correlation. Spearman's rank correlation, average ranks. The gate at a "
    "threshold is recomputed batch by batch: transported where coverage suffices and the ratio "
    "is at most the threshold, frozen elsewhere; the recorded gated cells are checked to agree "
    "with it exactly. The gain by threshold is exact: it steps at every batch's ratio. Means are "
    "over cells, intervals from cells drawn anew. A transport that met streams with several "
    "settings is reported once for each, and streams of another order or batch size than most are "
    "pooled apart."
)


@dataclass(frozen=True)
class Point:
    """A cell: its certificate, and what transport gained on it, always and where accepted."""

    place: str
    certificate: float  # infinite where most batches have no confident sample
    gain: float
    gated: float


@dataclass(frozen=True)
class Bands:
    """What a certificate tells apart, over some cells."""

    cells: int
    losing: int  # cells that lose more than `LOSS`
    lowest_losing: float | None  # certificate of any cell that loses more than `LOSS`
    highest_losing: float | None  # finite one of any such cell
    highest_harmless: float | None  # finite certificate of any cell that loses nothing
    harmless_without: int  # harmless cells whose certificate is infinite
    regime: int  # cells below the lowest losing one: the non-degenerate regime
    correlation: float | None  # of certificate and gain, by ranks, inside that regime
    ungated: Mean
    gated: Mean
    over_always: Mean  # gated less ungated, cell by cell


@dataclass(frozen=True, eq=False)
class Certificate:
    """All cells of a transport, the gain by threshold, and the same for the wrong metric."""

    method: str  # with its settings, where there are others
    points: tuple[Point, ...]
    pooled: Bands
    correlation_interval: Interval | None  # of the pooled one
    by_place: dict[str, Bands]
    best: dict[str, float]  # by place: the mean gain at its own best threshold
    mixed: dict[str, Bands]  # where it was run, by its name
    tau: float  # of the transport's own constants
    taus: tuple[float, ...]  # of the recorded gated cells
    curve: Curve
    plateau: tuple[float, float]


def measure(results: Results) -> tuple[Certificate, ...]:
    """One for every transport that met a stream beside another; empty where none was run."""
    scores = {score.spec: score for score in results.of("certificate")}
    always = [spec for spec in scores if spec.method == ALWAYS]
    where, called, usual = places(always, results.sweep), names(always), _usual(always)
    groups = defaultdict(list)
    for spec in always:
        aside = "" if _kind(spec) == usual else OTHERS
        groups[f"{called[spec]}{aside}", scores[spec].tau].append(scores[spec])
    methods = [method for method, _ in groups]
    return tuple(
        _of_transport(
            method if methods.count(method) == 1 else f"{method}, τ {tau:g}", held, scores, where
        )
        for (method, tau), held in groups.items()
    )


def _kind(spec: Spec) -> tuple[object, ...]:
    """How a stream orders its pictures, and how many it gives at a time."""
    return spec.order, spec.order_settings, spec.batch_size


def _usual(specs: Sequence[Spec]) -> tuple[object, ...] | None:
    """The kind that most streams are of; of several as frequent the first."""
    kinds = Counter(_kind(spec) for spec in specs)
    return max(kinds, key=lambda kind: kinds[kind], default=None)


def _of_transport(
    name: str, always: Sequence[Score], scores: Mapping[Spec, Score], where: Mapping[Spec, str]
) -> Certificate:
    """Of cells with one threshold."""
    transports = {score.spec: score for score in always}
    gates = [s for spec, s in scores.items() if transport_of(spec) in transports]
    wrong = defaultdict(list)
    for other in (gate for gate in gates if gate.spec.method == MIXED):
        gain = transports[transport_of(other.spec)].gain
        wrong[label(other.spec)].append(Point("", other.certificate, gain, other.gain))
    found = of_cells(name, always, where, always[0].tau)
    return replace(
        found,
        mixed={method: bands(held) for method, held in wrong.items()},
        taus=tuple(sorted({gate.tau for gate in gates if gate.spec.method == GATED})),
    )


def of_cells(
    name: str, always: Sequence[Score], where: Mapping[Spec, str], tau: float
) -> Certificate:
    """What certificates say of updates that were always taken, and what a gate at `tau` makes."""
    marks = tuple(Point(where[s.spec], s.certificate, s.gain, gated_gain(s, tau)) for s in always)
    curve, pooled = Curve.of(always), bands(marks)
    regime = in_regime(marks, pooled.lowest_losing)
    held = defaultdict(list)
    for score in always:
        held[where[score.spec]].append(score)
    return Certificate(
        method=name,
        points=marks,
        pooled=pooled,
        correlation_interval=correlation_interval(
            [mark.certificate for mark in regime], [mark.gain for mark in regime]
        ),
        by_place={place: bands([mark for mark in marks if mark.place == place]) for place in held},
        best={place: Curve.of(scores).best for place, scores in held.items()},
        mixed={},
        tau=tau,
        taus=(),
        curve=curve,
        plateau=curve.plateau(),
    )


def bands(points: Sequence[Point]) -> Bands:
    """What certificates say of the gain of these cells."""
    losing = [point.certificate for point in points if point.gain < -LOSS]
    lowest = min(losing, default=None)
    harmless = [point.certificate for point in points if point.gain >= 0]
    finite = list(filter(math.isfinite, harmless))
    regime = in_regime(points, lowest)
    return Bands(
        cells=len(points),
        losing=len(losing),
        lowest_losing=lowest,
        highest_losing=max(filter(math.isfinite, losing), default=None),
        highest_harmless=max(finite, default=None),
        harmless_without=len(harmless) - len(finite),
        regime=len(regime),
        correlation=spearman([p.certificate for p in regime], [p.gain for p in regime]),
        ungated=mean([point.gain for point in points]),
        gated=mean([point.gated for point in points]),
        over_always=mean([point.gated - point.gain for point in points]),
    )


def in_regime(points: Sequence[Point], lowest_losing: float | None) -> list[Point]:
    """The cells below the lowest certificate of any that loses much."""
    end = math.inf if lowest_losing is None else lowest_losing
    return [point for point in points if point.certificate < end]


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    every = measure(results)
    if not every:
        return None
    several = len(every) > 1
    told = tuple(
        f"{found.method}: {sentence}" if several else sentence
        for found in every
        for sentence in in_words(found)
    )
    endings = [f"-{as_file(found.method)}" if several else "" for found in every]
    both = list(zip(every, endings, strict=True))
    made = tuple(table for found, ending in both for table in tables.all_of(found, ending))
    drawn = tuple(picture for found, ending in both for picture in pictures(found, "", ending))
    return Section("certificate", TITLE, told, HOW, made, drawn)


def pictures(found: Certificate, beginning: str, ending: str) -> tuple[Picture, ...]:
    """Certificate against gain, and gain against the threshold; their names begin and end so."""
    first, second = in_words(found)
    of = f"{found.method}. " if ending else ""
    return (
        Picture(
            f"{beginning}certificate{ending}",
            f"{of}A point a cell. The dashed line is the shipped threshold, the dotted one the "
            "lowest certificate of a cell that loses more than 10 points.",
            f"Gain of transport against the certificate. {first}",
            4.4 + figures.above(found),
            lambda figure, ink: figures.against_gain(figure, found, ink),
        ),
        Picture(
            f"{beginning}threshold{ending}",
            f"{of}Mean gain of the gate over the frozen head by its threshold. Shaded: within 0.3 "
            "points of the best.",
            f"Gain by threshold. {second}",
            3.4,
            lambda figure, ink: figures.by_threshold(figure, found, ink),
        ),
    )


def in_words(found: Certificate) -> tuple[str, str]:
    """What the certificate tells apart, and what its gate gives."""
    pooled, (low, high) = found.pooled, found.plateau
    if pooled.lowest_losing is None:
        losing = "none loses more than 10 points"
    else:
        least = f"at least {pooled.lowest_losing:.3g}"
        least = least if math.isfinite(pooled.lowest_losing) else "that is infinite"
        losing = f"every one that loses more than 10 points has a certificate {least}"
    plateau = f"from {low:.3g} " + (
        "on, with no upper end," if math.isinf(high) else f"to {high:.3g}"
    )
    harmless = (
        "no harmless one has a finite certificate"
        if pooled.highest_harmless is None
        else f"the highest finite certificate of a harmless one is {pooled.highest_harmless:.3g}"
    )
    return (
        f"Of {cells(pooled.cells)}, {losing}; {harmless}.",
        f"Always transporting gains {100 * pooled.ungated.value:+.2f} points on average, the gate "
        f"at {found.tau:g} {100 * pooled.gated.value:+.2f}, the best threshold "
        f"{100 * found.curve.best:+.2f}; thresholds {plateau} are within "
        f"{100 * WITHIN:g} points of it.",
    )
