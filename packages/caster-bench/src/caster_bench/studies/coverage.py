"""Batches that hold few of many classes (Sec. 4.6)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure

from caster.report.figures import BLUE, VERMILLION, dress
from caster_bench.studies.naming import GATED, data_labels, names
from caster_bench.studies.paper import number, paper_name, printed
from caster_bench.studies.results import Mean, Results, mean, shown, with_errors
from caster_bench.studies.score import Score
from caster_bench.studies.tables import Section, StudyFigure, Table, points
from caster_bench.sweeps.spec import Spec

TITLE = "Low coverage"
HOW = (
    "Gain over the frozen head on the same samples, averaged over cells, for batches that hold few "
    "of many classes. Accept: share of batches the method answered itself. Harm: share of samples "
    "that the frozen head gets right and the method wrong. Intervals are bootstrapped over cells."
)


@dataclass(frozen=True)
class Row:
    """A method on a backbone and data set."""

    setting: str
    paper: str | None  # the paper's name for the data
    method: str
    gain: Mean
    harm: float
    accept: float
    gated: bool  # whether it is gated transport, with any settings
    whole: bool  # whether it has all cells that any method has


def measure(results: Results) -> tuple[Row, ...]:
    """Measure the study; empty if the sweep has no such cells."""
    scores = results.of("coverage")
    data_of = _settings(results, scores)
    method_of = names(score.spec for score in scores)
    groups, streams = defaultdict(list), defaultdict(set)
    for score in scores:
        paper = paper_name(score.spec, results.sweep)
        groups[data_of[score.spec], paper, method_of[score.spec]].append(score)
        streams[data_of[score.spec]].add(score.spec.stream)
    return tuple(
        Row(
            *key,
            gain=mean([score.gain for score in group]),
            harm=fmean(score.harm for score in group),
            accept=fmean(score.accept for score in group),
            gated=group[0].spec.method == GATED,
            whole=len(group) == len(streams[key[0]]),
        )
        for key, group in groups.items()
        if key[-1] != "frozen"  # no gain over itself
    )


def _settings(results: Results, scores: list[Score]) -> dict[Spec, str]:
    """Label rows by backbone and data."""
    data_of = data_labels((score.spec for score in scores), results.sweep)
    return {spec: f"{results.title(spec)}, {at}" for spec, at in data_of.items()}


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    rows = measure(results)
    if not rows:
        return None
    sentences = tuple(
        f"On {row.setting}, {row.method} accepts {100 * row.accept:.1f} % of batches and gains "
        f"{100 * row.gain.value:+.2f} points."
        for row in rows
        if row.gated
    )
    drawn = tuple(row for row in rows if row.whole)
    plot = StudyFigure(
        "coverage",
        "Mean gain over the frozen head, with bootstrapped 95 % intervals. Methods with all cells "
        "of the data.",
        f"Gain by method. {' '.join(sentences)}",
        1.0 + 0.32 * len(drawn),
        lambda figure, ink: draw(figure, drawn, ink),
    )
    plots = (plot,) if drawn else ()
    return Section("coverage", TITLE, sentences, HOW, (_table(rows),), plots)


def _table(rows: tuple[Row, ...]) -> Table:
    source = printed("coverage", "where")
    caption = f"Gain over the frozen head in points. Paper: {source}, ImageNet-C."
    few = [f"{row.method} on {row.setting}" for row in rows if not row.whole]
    caption += f" Not compared because of fewer cells: {', '.join(few)}." if few else ""
    return Table.of(
        "coverage",
        caption,
        "data | method | cells:d | gain:+.2f | 95 %:+.2f | paper:+.1f | accept, %:.1f | "
        "paper's accept, %:.1f | harm, %:.2f",
        (
            (
                *(row.setting, row.method, row.gain.cells, *shown(row.gain)),
                *(number("coverage", str(row.paper), row.method), points(row.accept)),
                number("coverage", "accept", str(row.paper)) if row.gated else None,
                points(row.harm),
            )
            for row in rows
        ),
    )


def draw(figure: Figure, rows: tuple[Row, ...], ink: str) -> None:
    """Draw one bar per method and setting."""
    axes = figure.subplots()
    several = len({row.setting for row in rows}) > 1
    gains, errors = with_errors([row.gain for row in rows])
    colours = [BLUE if gain >= 0 else VERMILLION for gain in gains]
    axes.barh(range(len(rows)), gains, color=colours, xerr=errors, ecolor=ink)
    labels = [f"{row.setting}: {row.method}" if several else row.method for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(0, color=ink, lw=0.8)
    axes.set_xlabel("gain over the frozen head, points", color=ink)
    dress(axes, ink, "x")
