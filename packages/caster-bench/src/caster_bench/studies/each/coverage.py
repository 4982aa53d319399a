"""Batches that hold few of many classes (Sec. 4.6)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from caster.report.figures import BLUE, VERMILLION, dress
from caster_bench.studies.method_names import GATED
from caster_bench.studies.naming import beside, places
from caster_bench.studies.paper import number, printed
from caster_bench.studies.results import Mean, Results, mean, names
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, around, points
from caster_bench.sweeps.spec import Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Low coverage"
HOW = (
    "Gain over the frozen head on the same samples, averaged over cells, where a batch holds few "
    "of many classes. Accept: share of batches the method answered itself. Harm: share of samples "
    "that the frozen head has right and the method wrong. Intervals from cells drawn anew."
)


@dataclass(frozen=True)
class Row:
    """A method on data."""

    place: str
    paper: str | None  # what the paper calls the data
    method: str
    gain: Mean
    harm: float
    accept: float
    gated: bool  # whether it is the gated transport, whatever its settings
    whole: bool  # whether it met all cells that any method met there


def measure(results: Results) -> tuple[Row, ...]:
    """Empty where the sweep has no such cells."""
    scores = results.of("coverage")
    where = _places(results, scores)
    called = names(score.spec for score in scores)
    groups, streams = defaultdict(list), defaultdict(set)
    for score in scores:
        paper = beside(score.spec, results.sweep)
        groups[where[score.spec], paper, called[score.spec]].append(score)
        streams[where[score.spec]].add(score.spec.stream)
    return tuple(
        Row(
            *key,
            gain=mean([score.gain for score in held]),
            harm=fmean(score.harm for score in held),
            accept=fmean(score.accept for score in held),
            gated=held[0].spec.method == GATED,
            whole=len(held) == len(streams[key[0]]),
        )
        for key, held in groups.items()
        if key[-1] != "frozen"  # gains nothing over itself
    )


def _places(results: Results, scores: list[Score]) -> dict[Spec, str]:
    """What rows are called, whatever else the study has."""
    where = places((score.spec for score in scores), results.sweep)
    return {spec: f"{results.title(spec)}, {at}" for spec, at in where.items()}


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    rows = measure(results)
    if not rows:
        return None
    told = tuple(
        f"On {row.place} the certificate of {row.method} accepts {100 * row.accept:.1f} % of "
        f"batches, and it gains {100 * row.gain.value:+.2f} points."
        for row in rows
        if row.gated
    )
    drawn = tuple(row for row in rows if row.whole)
    picture = Picture(
        "coverage",
        "Mean gain over the frozen head, with 95 % intervals from cells drawn anew. Methods "
        "that met all cells of the data.",
        f"Gain by method. {' '.join(told)}",
        1.0 + 0.32 * len(drawn),
        lambda figure, ink: draw(figure, drawn, ink),
    )
    pictures = (picture,) if drawn else ()
    return Section("coverage", TITLE, told, HOW, (_table(rows),), pictures)


def _table(rows: tuple[Row, ...]) -> Table:
    columns = (
        *(Column("data"), Column("method"), Column("cells", "d"), Column("gain", "+.2f")),
        *(Column(INTERVAL, "+.2f"), Column("paper", "+.1f"), Column("accept, %", ".1f")),
        *(Column("paper's accept, %", ".1f"), Column("harm, %", ".2f")),
    )
    values: list[tuple[Value, ...]] = [
        (
            *(row.place, row.method, row.gain.cells, points(row.gain.value)),
            *(around(row.gain.interval), number("coverage", str(row.paper), row.method)),
            points(row.accept),
            number("coverage", "accept", str(row.paper)) if row.gated else None,
            points(row.harm),
        )
        for row in rows
    ]
    where = printed("coverage", "where")
    caption = f"Gain over the frozen head in points. Paper: {where}, ImageNet-C."
    few = [f"{row.method} on {row.place}" for row in rows if not row.whole]
    caption += f" Not compared, for they met fewer cells: {', '.join(few)}." if few else ""
    return Table("coverage", caption, columns, tuple(values))


def draw(figure: Figure, rows: tuple[Row, ...], ink: str) -> None:
    """A bar a method and data."""
    axes = figure.subplots()
    several = len({row.place for row in rows}) > 1
    gains = [100 * row.gain.value for row in rows]
    ends = [around(row.gain.interval) for row in rows]
    axes.barh(
        range(len(rows)),
        gains,
        color=[BLUE if gain >= 0 else VERMILLION for gain in gains],
        xerr=[
            [g - e.low if e else 0.0 for g, e in zip(gains, ends, strict=True)],
            [e.high - g if e else 0.0 for g, e in zip(gains, ends, strict=True)],
        ],
        ecolor=ink,
    )
    labels = [f"{row.place}: {row.method}" if several else row.method for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(0, color=ink, lw=0.8)
    axes.set_xlabel("gain over the frozen head, points", color=ink)
    dress(axes, ink, "x")
