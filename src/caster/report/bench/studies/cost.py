"""What every method costs on an idle device (Sec. 4.8, Table 3)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from caster.report.bench.paper import number, printed
from caster.report.bench.results import Results, names, places
from caster.report.bench.score import GATED, LAYERS, Score
from caster.report.bench.section import Picture, Section
from caster.report.bench.tables import Column, Table, Value, points
from caster.report.figures import BLUE, VERMILLION, dress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
TITLE = "Cost"
HOW = (
    "One method at a time on an otherwise idle device, every forward pass its own. Images/s: "
    "median over full batches of size over seconds; the batches it warmed up with are not among "
    "them. Memory: peak on the device, none on a CPU. Retained: what the method keeps between "
    "batches, beside the frozen model."
)


@dataclass(frozen=True)
class Row:
    """A method on one backbone, data and condition."""

    backbone: str
    where: str  # the data, with the stream where there are several kinds
    data: str
    condition: str
    method: str
    rate: float  # images a second
    share: float | None  # of the frozen model's; None where that was not measured
    memory: float | None  # MiB
    retained: float  # bytes
    backward: bool

    @property
    def place(self) -> str:
        """What it was measured on."""
        return f"{self.backbone}, {self.where} {self.condition}"


def rate(score: Score) -> float:
    """Images a second, as `HOW` says."""
    held = score.batches
    full = held.size == held.size.max()
    return float(np.median(held.size[full] / held.seconds[full]))


def measure(results: Results) -> tuple[Row, ...]:
    """Empty where no cell ran alone."""
    scores = [score for score in results.of("cost") if score.spec.alone]
    called = names(score.spec for score in scores)
    where = places(score.spec for score in scores)
    groups = defaultdict(list)
    for score in scores:
        spec = score.spec
        key = results.title(spec), where[spec], spec.data, spec.condition, called[spec]
        groups[key].append(score)
    rates = {key: median(rate(score) for score in held) for key, held in groups.items()}
    return tuple(
        Row(
            *key,
            rate=rates[key],
            share=_share(rates[key], rates.get((*key[:4], "frozen"))),
            memory=_most([score.memory for score in held]),
            retained=max(score.retained for score in held),
            backward=any(score.backward for score in held),
        )
        for key, held in groups.items()
    )


def _share(mine: float, frozen: float | None) -> float | None:
    return None if frozen is None else mine / frozen


def _most(peaks: list[float | None]) -> float | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    rows = measure(results)
    if not rows:
        return None
    told = tuple(
        f"On {row.place}, {row.method} runs at {100 * row.share:.0f} % of the frozen model's rate."
        for row in rows
        if row.method.startswith((GATED, LAYERS)) and row.share is not None
    )
    picture = Picture(
        "cost",
        "Images a second; methods with a backward pass in orange.",
        f"Throughput by method. {' '.join(told)}",
        1.0 + 0.3 * len(rows),
        lambda figure, ink: draw(figure, rows, ink),
    )
    return Section("cost", TITLE, told, HOW, (_table(rows),), (picture,))


def _table(rows: tuple[Row, ...]) -> Table:
    columns = (
        *(Column("backbone"), Column("data"), Column("method"), Column("images/s", ",.0f")),
        *(Column("of frozen, %", ".0f"), Column("memory, MiB", ",.0f")),
        *(Column("retained, MiB", ".3f"), Column("backward pass")),
        *(Column("paper's images/s", ",.0f"), Column("paper's memory, MiB", ",.0f")),
    )
    values: list[tuple[Value, ...]] = [
        (
            *(row.backbone, f"{row.where} {row.condition}", row.method, row.rate),
            *(points(row.share), row.memory, row.retained / MIB, row.backward),
            *(number("cost", row.data, row.method, figure) for figure in ("rate", "memory")),
        )
        for row in rows
    ]
    return Table(
        "cost",
        "Throughput and memory of one method at a time. Paper: "
        f"{printed('cost', 'where')}, ResNet-50 under fog of severity 3, on its device.",
        columns,
        tuple(values),
    )


def draw(figure: Figure, rows: tuple[Row, ...], ink: str) -> None:
    """A bar a method."""
    axes = figure.subplots()
    several = len({row.place for row in rows}) > 1
    axes.barh(
        range(len(rows)),
        [row.rate for row in rows],
        color=[VERMILLION if row.backward else BLUE for row in rows],
    )
    labels = [f"{row.place}: {row.method}" if several else row.method for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("images a second", color=ink)
    dress(axes, ink, "x")
