"""Certificate against realised gain, and gain against the threshold (Sec. 4.3, Fig. 3)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from caster.report.figures import BLUE, GREEN, PURPLE, VERMILLION, dress, legend
from caster.report.intervals import Interval
from caster_bench.studies.naming import ALWAYS, GATED, MIXED, data_labels, label, names
from caster_bench.studies.paper import printed
from caster_bench.studies.results import Mean, Results, correlation_interval, mean, shown, spearman
from caster_bench.studies.score import PLATEAU, Curve, Score, gated_gain, transport_of
from caster_bench.studies.tables import (
    NONE,
    Section,
    StudyFigure,
    Table,
    Value,
    as_filename,
    cells,
    points,
)
from caster_bench.sweeps.spec import Spec

OTHERS = ", other streams"
EVERY, WITHIN, SINGLE = "all backbones", "one backbone, mean", "one backbone"  # correlated cells
LOSS = 0.10  # a cell that loses more accuracy is degenerate
TITLE = "What the certificate detects"
HOW = (
    "One point per cell that always transports. Its certificate is the median ratio of its "
    "batches, counting a batch without confident samples as infinite; its gain is its accuracy "
    "minus the frozen head's on the same samples. The non-degenerate regime consists of the cells "
    "below the lowest certificate of any cell that loses more than 10 points; selecting by "
    "certificate rather than by gain does not bias the correlation. Spearman's rank correlation "
    "with average ranks. The gate at a threshold is recomputed batch by batch: transported if "
    "coverage suffices and the ratio is at most the threshold, frozen otherwise; recorded gated "
    "cells are checked to agree exactly. The gain by threshold is exact, with a step at every "
    "batch's ratio. Means are over cells; intervals are bootstrapped over cells. A transport run "
    "with several settings is reported once for each, and streams with an unusual order or batch "
    "size are pooled separately."
)
TAUS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 3.9, 5.0, 10.0)
ENDLESS = "no upper end"
STYLES = [(c, m) for m in "o^sDvP" for c in (BLUE, VERMILLION, GREEN, PURPLE)]
WIDTH = 8.6  # inches, of a figure
ROW, MARK, LETTER = 0.2, 0.45, 0.075  # inches, of its legend
COLUMNS = 64  # per doubling, for curves with more steps than can be seen
LINEAR = 2  # gain in points up to which the axis is linear


@dataclass(frozen=True)
class Point:
    """A cell: its certificate, and the gain of transport, ungated and gated."""

    setting: str
    certificate: float  # infinite if most batches have no confident sample
    gain: float
    gated: float


@dataclass(frozen=True)
class Bands:
    """How a certificate separates harmful from harmless cells."""

    cells: int
    losing: int  # cells that lose more than `LOSS`
    lowest_losing: float | None  # lowest certificate of these
    highest_losing: float | None  # highest finite one
    highest_harmless: float | None  # highest finite certificate of a cell without loss
    harmless_without: int  # harmless cells with an infinite certificate
    regime: int  # cells in the non-degenerate regime: below `lowest_losing`
    correlation: float | None  # rank correlation of certificate and gain in that regime
    ungated: Mean
    gated: Mean
    over_always: Mean  # gated minus ungated, cell by cell


@dataclass(frozen=True)
class Rank:
    """Rank correlation of certificate and gain over some cells."""

    cells: int
    value: float | None  # None for fewer than three cells
    interval: Interval | None


@dataclass(frozen=True, eq=False)
class Certificate:
    """All cells of a transport, its gain by threshold, and the same for the mixed metric."""

    method: str  # with its settings if there are several
    points: tuple[Point, ...]
    pooled: Bands
    correlation_interval: Interval | None  # of the pooled correlation
    by_setting: dict[str, Bands]
    best: dict[str, float]  # by setting: mean gain at its own best threshold
    mixed: dict[str, Bands]  # by method name
    ranks: dict[str, Rank]  # over all cells, within backbones on average, and within each
    tau: float  # the transport's own threshold
    taus: tuple[float, ...]  # thresholds of the recorded gated cells
    curve: Curve
    plateau: tuple[float, float]


def measure(results: Results) -> tuple[Certificate, ...]:
    """Measure every transport with its settings; empty if none was run."""
    scores = {score.spec: score for score in results.of("certificate")}
    always = [spec for spec in scores if spec.method == ALWAYS]
    data_of, method_of = data_labels(always, results.sweep), names(always)
    kinds = Counter(_kind(spec) for spec in always)
    usual = max(kinds, key=lambda kind: kinds[kind], default=None)  # the first if tied
    groups = defaultdict(list)
    for spec in always:
        aside = "" if _kind(spec) == usual else OTHERS
        groups[f"{method_of[spec]}{aside}", scores[spec].tau].append(scores[spec])
    methods = [method for method, _ in groups]
    return tuple(
        _of_transport(
            method if methods.count(method) == 1 else f"{method}, τ {tau:g}",
            group,
            scores,
            data_of,
            {score.spec: results.title(score.spec) for score in group},
        )
        for (method, tau), group in groups.items()
    )


def _kind(spec: Spec) -> tuple[object, ...]:
    """Order and batch size of a stream."""
    return spec.order, spec.order_settings, spec.batch_size


def _of_transport(
    name: str,
    always: Sequence[Score],
    scores: Mapping[Spec, Score],
    data_of: Mapping[Spec, str],
    backbone_of: Mapping[Spec, str],
) -> Certificate:
    """Measure cells with one threshold."""
    transports = {score.spec: score for score in always}
    gates = [s for spec, s in scores.items() if transport_of(spec) in transports]
    wrong = defaultdict(list)
    for other in (gate for gate in gates if gate.spec.method == MIXED):
        gain = transports[transport_of(other.spec)].gain
        wrong[label(other.spec)].append(Point("", other.certificate, gain, other.gain))
    tau = always[0].tau
    marks = tuple(Point(data_of[s.spec], s.certificate, s.gain, gated_gain(s, tau)) for s in always)
    curve, pooled = Curve.of(always), bands(marks)
    regime = in_regime(marks, pooled.lowest_losing)
    group = defaultdict(list)
    for score in always:
        group[data_of[score.spec]].append(score)
    return Certificate(
        method=name,
        points=marks,
        pooled=pooled,
        correlation_interval=correlation_interval(
            [mark.certificate for mark in regime], [mark.gain for mark in regime]
        ),
        by_setting={
            setting: bands([mark for mark in marks if mark.setting == setting]) for setting in group
        },
        best={setting: Curve.of(scores).best for setting, scores in group.items()},
        mixed={method: bands(group) for method, group in wrong.items()},
        ranks=ranks(always, backbone_of),
        tau=tau,
        taus=tuple(sorted({gate.tau for gate in gates if gate.spec.method == GATED})),
        curve=curve,
        plateau=curve.plateau(),
    )


def ranks(always: Sequence[Score], backbone_of: Mapping[Spec, str]) -> dict[str, Rank]:
    """Correlate certificate and gain over all cells and within backbones.

    The two can differ in sign: a backbone with higher certificates than another may gain less.
    """
    groups = defaultdict(list)
    for score in always:
        groups[backbone_of[score.spec]].append(score)
    single = {backbone: _rank(group) for backbone, group in sorted(groups.items())}
    values = [rank.value for rank in single.values() if rank.value is not None]
    within = Rank(len(always), None, None)
    if values:
        within = Rank(len(always), mean(values).value, mean(values).interval)
    return {EVERY: _rank(always), WITHIN: within, **single}


def _rank(scores: Sequence[Score]) -> Rank:
    both = [s.certificate for s in scores], [s.gain for s in scores]
    return Rank(len(scores), spearman(*both), correlation_interval(*both))


def bands(points: Sequence[Point]) -> Bands:
    """Summarise certificates and gains of some cells."""
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
    """Cells below the lowest certificate of any degenerate cell."""
    end = math.inf if lowest_losing is None else lowest_losing
    return [point for point in points if point.certificate < end]


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    every = measure(results)
    if not every:
        return None
    several = len(every) > 1
    sentences = tuple(
        f"{found.method}: {sentence}" if several else sentence
        for found in every
        for sentence in sentences_of(found)
    )
    endings = [f"-{as_filename(found.method)}" if several else "" for found in every]
    both = list(zip(every, endings, strict=True))
    made = tuple(table for found, ending in both for table in all_tables(found, ending))
    drawn = tuple(plot for found, ending in both for plot in figures(found, ending))
    return Section("certificate", TITLE, sentences, HOW, made, drawn)


def figures(found: Certificate, ending: str) -> tuple[StudyFigure, ...]:
    """Figures of gain against certificate and against threshold, with a suffix of their names."""
    first, second = sentences_of(found)
    of = f"{found.method}. " if ending else ""
    return (
        StudyFigure(
            f"certificate{ending}",
            f"{of}One point per cell. The dashed line is the default threshold, the dotted line "
            "the lowest certificate of a cell that loses more than 10 points.",
            f"Gain of transport against the certificate. {first}",
            4.4 + ROW * (math.ceil(len(found.by_setting) / _columns(found)) - 1),
            lambda figure, ink: draw_gain(figure, found, ink),
        ),
        StudyFigure(
            f"threshold{ending}",
            f"{of}Mean gain of the gate over the frozen head by threshold. Shaded: within 0.3 "
            "points of the best.",
            f"Gain by threshold. {second}",
            3.4,
            lambda figure, ink: draw_threshold(figure, found, ink),
        ),
    )


def sentences_of(found: Certificate) -> tuple[str, str]:
    """Summarise what the certificate separates and what its gate gains."""
    pooled, (low, high) = found.pooled, found.plateau
    if pooled.lowest_losing is None:
        losing = "none loses more than 10 points"
    else:
        finite = math.isfinite(pooled.lowest_losing)
        least = f"of at least {pooled.lowest_losing:.3g}" if finite else "that is infinite"
        losing = f"every cell that loses more than 10 points has a certificate {least}"
    plateau = f"from {low:.3g} " + ("upwards" if math.isinf(high) else f"to {high:.3g}")
    harmless = (
        "no harmless cell has a finite certificate"
        if pooled.highest_harmless is None
        else f"the highest finite certificate of a harmless cell is {pooled.highest_harmless:.3g}"
    )
    return (
        f"Of {cells(pooled.cells)}, {losing}; {harmless}.",
        f"Always transporting gains {100 * pooled.ungated.value:+.2f} points on average, the gate "
        f"at {found.tau:g} {100 * pooled.gated.value:+.2f}, the best threshold "
        f"{100 * found.curve.best:+.2f}; thresholds {plateau} are within "
        f"{100 * PLATEAU:g} points of it.",
    )


def all_tables(found: Certificate, ending: str) -> tuple[Table, ...]:
    """All tables of the study; `ending` distinguishes transports with other settings."""
    tables = (
        _summary_table(found),
        data_table(found),
        _rank_table(found),
        _thresholds(found),
    )
    of = f"{found.method}. " if ending else ""
    return tuple(
        replace(table, name=f"{table.name}{ending}", caption=f"{of}{table.caption}")
        for table in tables
    )


def _summary_table(found: Certificate) -> Table:
    """Our figures with intervals, those of the mixed metric, and the paper's."""
    paper = printed("certificate")
    ours = _summary_rows(found.pooled)
    wrong = [_summary_rows(bands) for bands in found.mixed.values()]
    correlation = found.pooled.correlation, found.correlation_interval
    ours["rank correlation with gain there"] = correlation
    rows: list[tuple[Value, ...]] = [
        (title, value, ends, *(sentences[title][0] for sentences in wrong))
        for title, (value, ends) in ours.items()
    ]
    low, high = found.plateau
    endless = math.isinf(high)
    width = "from zero" if low == 0 else high / low
    plateau: dict[str, Value] = {
        "mean gain, best threshold": points(found.curve.best),
        "plateau from": low,
        "plateau to": ENDLESS if endless else high,
        "plateau, highest over lowest": ENDLESS if endless else width,
    }
    rows += [(title, value, None, *([None] * len(wrong))) for title, value in plateau.items()]
    low, high = paper["plateau"]
    theirs = *(paper.get(key) for key in _KEYS), paper["best"], low, high, high / low
    rows = [(*row, value) for row, value in zip(rows, theirs, strict=True)]
    titles = list(found.mixed) if len(found.mixed) > 1 else ["mixed metric"] * len(found.mixed)
    mixed = (
        " Mixed metric: the same for a Euclidean residual over a Mahalanobis margin, on the cells "
        "that have it."
        if titles
        else ""
    )
    others = "".join(f" | {title}:.4g" for title in (*titles, "paper"))
    return Table.of(
        "certificate-summary",
        f"What the certificate separates, with the gate at {found.tau:g}; gains in points."
        f"{mixed} Plateau: within 0.3 points of the best threshold. Paper: {paper['where']}.",
        f"figure | ours:.4g | 95 %:+.2f{others}",
        rows,
    )


_KEYS = (  # of the paper's figures
    *("cells", "losing", "lowest_losing", "highest_losing", "highest_harmless"),
    *("harmless_without", "ungated", "gated", "regime", "correlation"),
)


def _summary_rows(bands: Bands) -> dict[str, tuple[Value, Value]]:
    """Figures of some cells with their intervals, in the order of `_KEYS`."""
    return {
        "cells": (bands.cells, None),
        "cells losing more than 10 points": (bands.losing, None),
        "lowest certificate of a cell losing more than 10 points": (bands.lowest_losing, None),
        "highest finite certificate of such a cell": (bands.highest_losing, None),
        "highest finite certificate of a harmless cell": (bands.highest_harmless, None),
        "harmless cells with an infinite one": (bands.harmless_without, None),
        "mean gain, always": shown(bands.ungated),
        "mean gain, gated": shown(bands.gated),
        "cells in the non-degenerate regime": (bands.regime, None),
        "rank correlation with gain there": (bands.correlation, None),
    }


def data_table(found: Certificate) -> Table:
    """The summary by data."""
    return Table.of(
        "certificate-data",
        f"The same by data; gains in points, with the gate at {found.tau:g} and at the threshold "
        "that is best in hindsight.",
        "data | cells:d | always:+.2f | always, 95 %:+.2f | gated:+.2f | gated, 95 %:+.2f | "
        "over always:+.2f | over always, 95 %:+.2f | best:+.2f | losing:d | lowest losing:.3g | "
        "highest harmless:.3g | regime:d | rank correlation:+.2f",
        (
            (
                *(setting, b.cells, *shown(b.ungated), *shown(b.gated), *shown(b.over_always)),
                *(points(found.best[setting]), b.losing, b.lowest_losing, b.highest_harmless),
                *(b.regime, b.correlation),
            )
            for setting, b in found.by_setting.items()
        ),
    )


def _rank_table(found: Certificate) -> Table:
    return Table.of(
        "certificate-ranks",
        "Rank correlation of certificate and gain of always transporting, over all cells and those "
        "of one backbone; the interval of the mean is over backbones.",
        "cells of | kind | cells:d | rank correlation:+.2f | 95 %:+.2f",
        (
            (which, NONE if which in (EVERY, WITHIN) else SINGLE, r.cells, r.value, r.interval)
            for which, r in found.ranks.items()
        ),
    )


def _thresholds(found: Certificate) -> Table:
    taus = sorted({*TAUS, found.tau, *found.taus})
    always = ("always", points(found.pooled.ungated.value))
    return Table.of(
        "certificate-thresholds",
        "Mean gain over the frozen head in points, by threshold; all rows but the last require "
        "coverage.",
        "τ:g | gain:+.2f",
        (*((tau, points(found.curve.at(tau))) for tau in taus), always),
    )


def draw_gain(figure: Figure, found: Certificate, ink: str) -> None:
    """Draw the gain of transport against the certificate, one point per cell."""
    axes = figure.subplots()
    finite = [p.certificate for p in found.points if math.isfinite(p.certificate)]
    nowhere = 2 * max([*finite, found.tau])
    least = min([x for x in finite if x > 0] + [found.tau]) / 2  # zeros are drawn here
    for setting, (colour, marker) in zip(
        found.by_setting, STYLES * (1 + len(found.by_setting) // len(STYLES)), strict=False
    ):
        group = [point for point in found.points if point.setting == setting]
        axes.scatter(
            [min(max(point.certificate, least), nowhere) for point in group],
            [100 * point.gain for point in group],
            s=22,
            c=colour,
            marker=marker,
            alpha=0.6,
            linewidths=0,
            label=f"{setting} ({len(group):,})",
        )
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR)
    bottom, top = axes.get_ylim()
    ticks = [t for t in (-50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50) if bottom <= t <= top]
    axes.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    _plain_logs(axes)
    axes.axhline(0, color=ink, lw=0.8)
    axes.axvline(found.tau, color=ink, lw=1.2, ls="--")
    if found.pooled.lowest_losing is not None and math.isfinite(found.pooled.lowest_losing):
        axes.axvline(found.pooled.lowest_losing, color=VERMILLION, lw=1.2, ls=":")
    words = "certificate of the cell, log scale"
    if len(finite) < len(found.points):
        words += f" (cells without one at {nowhere:.3g})"
    axes.set_xlabel(words, color=ink)
    axes.set_ylabel("gain of transport, points", color=ink)
    dress(axes, ink)
    figure.legend(**legend(ink), ncols=_columns(found))


def _columns(found: Certificate) -> int:
    """Number of legend columns that fit the figure."""
    longest = max(map(len, found.by_setting))
    room = int(WIDTH / (MARK + LETTER * (longest + len(" (1,000)"))))
    return max(1, min(4, len(found.by_setting), room))


def _plain_logs(axes: Axes) -> None:
    """Set round ticks on a logarithmic axis."""
    low, high = axes.get_xlim()
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices that preserve the look of a curve: ends and extremes of narrow columns of x.

    A column is 1/64 of a doubling, found without a logarithm, whose last bits depend on the
    processor.

    >>> thinned(np.array([1.0, 1.001, 1.002, 1.003, 1.004, 2.0]), np.array([0.0, 5, 1, 2, 1, 1]))
    array([0, 1, 4, 5])
    """
    mantissa, exponent = np.frexp(x)
    column = exponent * COLUMNS + (2 * COLUMNS * (mantissa - 0.5)).astype(int)
    kept = set()
    for i in np.split(np.arange(len(x)), np.flatnonzero(np.diff(column)) + 1):
        kept |= {i[0], i[y[i].argmin()], i[y[i].argmax()], i[-1]}
    return np.array(sorted(kept))


def draw_threshold(figure: Figure, found: Certificate, ink: str) -> None:
    """Draw the mean gain of the gate by threshold, with a step at every batch."""
    axes = figure.subplots()
    steps, gains = found.curve.steps, 100 * found.curve.gains
    low, high = 0.5 * found.tau, 2 * found.tau
    if len(steps) > 1:
        low, high = min(low, 0.8 * steps[1]), max(high, 1.25 * steps[-1])
    low = max(low, high / 1e5)
    x = np.concatenate([[low], steps[steps > low], [high]])
    y = np.concatenate([[100 * found.curve.at(low)], gains[steps > low], gains[-1:]])
    kept = thinned(x, y)
    first, last = found.plateau
    axes.axvspan(max(first, low), min(last, high), color=GREEN, alpha=0.15, lw=0)
    axes.step(x[kept], y[kept], where="post", color=BLUE, lw=2, label="gated")
    always = 100 * found.pooled.ungated.value
    axes.axhline(always, color=VERMILLION, lw=1.4, ls="--", label="always")
    axes.axhline(0, color=ink, lw=1, label="never")
    axes.axvline(found.tau, color=ink, lw=1.2, ls="--")
    top = axes.get_xaxis_transform()
    axes.text(found.tau, 1.01, f"τ = {found.tau:g}", color=ink, ha="center", transform=top)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.minorticks_off()
    _plain_logs(axes)
    axes.set_xlabel("threshold, log scale", color=ink)
    axes.set_ylabel("mean gain, points", color=ink)
    dress(axes, ink)
    figure.legend(**legend(ink), ncols=3)
