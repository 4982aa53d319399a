"""Throughput and memory of every method on an idle device (Sec. 4.8, Table 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from caster.report.figures import BLUE, VERMILLION, dress
from caster.report.intervals import RESAMPLES, SEED, between
from caster_bench.studies.naming import ALIGNING, GATED, data_labels, names
from caster_bench.studies.paper import number, paper_name_resnet50, printed
from caster_bench.studies.results import Results
from caster_bench.studies.score import Score
from caster_bench.studies.tables import Section, StudyFigure, Table, Value, points

FOG = "fog-3"  # the paper's condition
TITLE = "Cost"
HOW = (
    "One method at a time on an otherwise idle device, with its own forward passes. Images/s: "
    "median over full batches of size divided by seconds, without warm-up batches, synchronising "
    "the device after every batch. Memory: peak of what torch allocates on a GPU, or on a CPU of "
    "the whole process; it includes a copy of the weights that is used to check that nothing "
    "changed them. Retained: what the method keeps between batches in addition to the frozen "
    "model. Intervals are bootstrapped over batches, of both methods for a ratio."
)
MIB = 2**20


@dataclass(frozen=True, eq=False)
class Row:
    """A method on one backbone, data set and condition."""

    backbone: str
    data: str  # with the stream if there are several kinds
    paper: str | None  # the paper's name for the data, if it has a figure
    condition: str
    method: str
    rate: float  # images per second
    drawn: NDArray[np.float64] | None  # bootstrap draws; None for a single batch
    share: float | None  # of the frozen model's rate; None if that was not measured
    memory: float | None  # MiB
    retained: float  # bytes
    backward: bool

    @property
    def setting(self) -> str:
        """Backbone, data and condition."""
        return f"{self.backbone}, {self.data} {self.condition}"


def rates(score: Score) -> NDArray[np.float64]:
    """Images per second of every full batch: (batches,)."""
    group = score.batches
    full = group.size == group.size.max()
    return np.asarray(group.size[full] / group.seconds[full])


def rate(score: Score) -> float:
    """Median images per second."""
    return float(np.median(rates(score)))


def _drawn(scores: list[Score]) -> NDArray[np.float64] | None:
    group = [rates(score) for score in scores]
    if min(map(len, group)) < 2:
        return None
    rng = np.random.default_rng(SEED)
    again = [np.median(rng.choice(each, (RESAMPLES, len(each))), axis=1) for each in group]
    return np.asarray(np.median(again, axis=0))


def measure(results: Results) -> tuple[Row, ...]:
    """Measure the study; empty if no cell ran alone."""
    scores = [score for score in results.of("cost") if score.spec.alone]
    method_of = names(score.spec for score in scores)
    data_of = data_labels((score.spec for score in scores), results.sweep)
    groups = defaultdict(list)
    for score in scores:
        spec = score.spec
        paper = paper_name_resnet50(spec, results.sweep) if spec.condition == FOG else None
        key = results.title(spec), data_of[spec], paper, spec.condition, method_of[spec]
        groups[key].append(score)
    medians = {key: median(rate(score) for score in group) for key, group in groups.items()}
    return tuple(
        Row(
            *key,
            rate=medians[key],
            drawn=_drawn(group),
            share=_over(medians[key], medians.get((*key[:4], "frozen"))),
            memory=max((s.memory for s in group if s.memory is not None), default=None),
            retained=max(score.retained for score in group),
            backward=any(score.backward for score in group),
        )
        for key, group in groups.items()
    )


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    rows = measure(results)
    if not rows:
        return None
    sentences = tuple(
        f"On {row.setting}, {row.method} runs at {100 * row.share:.0f} % of the frozen model's "
        "rate."
        for row in rows
        if row.method.startswith((GATED, *ALIGNING)) and row.share is not None
    )
    plot = StudyFigure(
        "cost",
        "Images per second; methods with a backward pass in orange.",
        f"Throughput by method. {' '.join(sentences)}",
        1.0 + 0.3 * len(rows),
        lambda figure, ink: draw(figure, rows, ink),
    )
    return Section("cost", TITLE, sentences, HOW, (_table(rows), *_ratios(rows)), (plot,))


def draw(figure: Figure, rows: tuple[Row, ...], ink: str) -> None:
    """Draw one bar per method."""
    axes = figure.subplots()
    several = len({row.setting for row in rows}) > 1
    axes.barh(
        range(len(rows)),
        [row.rate for row in rows],
        color=[VERMILLION if row.backward else BLUE for row in rows],
    )
    labels = [f"{row.setting}: {row.method}" if several else row.method for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("images per second", color=ink)
    dress(axes, ink, "x")


def _table(rows: Sequence[Row]) -> Table:
    return Table.of(
        "cost",
        "Throughput and memory of one method at a time. Paper: "
        f"{printed('cost', 'where')}, ResNet-50 under fog of severity 3, on its device.",
        "backbone | data | method | images/s:,.0f | 95 %:,.0f | of frozen, %:.0f | "
        "memory, MiB:,.0f | retained, MiB:.3f | backward pass | paper's images/s:,.0f | "
        "paper's memory, MiB:,.0f",
        (
            (
                *(row.backbone, f"{row.data} {row.condition}", row.method, row.rate),
                None if row.drawn is None else between(row.drawn),
                *(points(row.share), row.memory, row.retained / MIB, row.backward),
                *(number("cost", str(row.paper), row.method, key) for key in ("rate", "memory")),
            )
            for row in rows
        ),
    )


def _ratios(rows: Sequence[Row]) -> tuple[Table, ...]:
    own = {row.setting: row for row in rows if row.method == GATED}
    pairs = [(own[row.setting], row) for row in rows if own.get(row.setting, row) is not row]
    table = Table.of(
        "cost-ratios",
        "Caster relative to other methods: its images per second divided by theirs, and its peak "
        "memory in percent of theirs.",
        "backbone | data | other method | rate:.2f | 95 %:.2f | paper's rate:.2f | memory, %:.1f | "
        "paper's memory, %:.1f",
        (_ratio(caster, other) for caster, other in pairs),
    )
    return (table,) if pairs else ()


def _ratio(caster: Row, other: Row) -> tuple[Value, ...]:
    drawn = (
        None if caster.drawn is None or other.drawn is None else between(caster.drawn / other.drawn)
    )
    memory = _over(caster.memory, other.memory)
    rate, peak = (
        _over(*(number("cost", str(row.paper), row.method, figure) for row in (caster, other)))
        for figure in ("rate", "memory")
    )
    return (
        *(caster.backbone, f"{caster.data} {caster.condition}", other.method),
        *(caster.rate / other.rate, drawn, rate, points(memory), points(peak)),
    )


def _over(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None else mine / theirs
