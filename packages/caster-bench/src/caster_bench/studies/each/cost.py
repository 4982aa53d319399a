"""What every method costs on an idle device (Sec. 4.8, Table 3)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caster.report.figures import BLUE, VERMILLION, dress
from caster.report.intervals import RESAMPLES, SEED
from caster_bench.studies.each import cost_tables as tables
from caster_bench.studies.method_names import GATED, LAYERS
from caster_bench.studies.naming import beside_resnet50, places
from caster_bench.studies.results import Results, names
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOG = "fog-3"  # what the paper measures under
TITLE = "Cost"
HOW = (
    "One method at a time on an otherwise idle device, every forward pass its own. Images/s: "
    "median over full batches of size over seconds; the batches it warmed up with are not among "
    "them. The device is waited for after every batch. Memory: peak on the device, none on a CPU; "
    "with a copy of the weights, by which it is told whether anything changed them. Retained: what "
    "the method keeps between batches, beside the frozen model. Intervals from batches drawn anew, "
    "of both for a ratio."
)


@dataclass(frozen=True, eq=False)
class Row:
    """A method on one backbone, data and condition."""

    backbone: str
    where: str  # the data, with the stream where there are several kinds
    paper: str | None  # what the paper calls the data, where it has a figure of them
    condition: str
    method: str
    rate: float  # images a second
    drawn: NDArray[np.float64] | None  # the same of batches drawn anew; None of a single batch
    share: float | None  # of the frozen model's; None where that was not measured
    memory: float | None  # MiB
    retained: float  # bytes
    backward: bool

    @property
    def place(self) -> str:
        """What it was measured on."""
        return f"{self.backbone}, {self.where} {self.condition}"


def rates(score: Score) -> NDArray[np.float64]:
    """Images a second in every full batch: (batches,)."""
    held = score.batches
    full = held.size == held.size.max()
    return np.asarray(held.size[full] / held.seconds[full])


def rate(score: Score) -> float:
    """Images a second, as `HOW` says."""
    return float(np.median(rates(score)))


def _drawn(scores: list[Score]) -> NDArray[np.float64] | None:
    held = [rates(score) for score in scores]
    if min(map(len, held)) < 2:
        return None
    rng = np.random.default_rng(SEED)
    again = [np.median(rng.choice(each, (RESAMPLES, len(each))), axis=1) for each in held]
    return np.asarray(np.median(again, axis=0))


def measure(results: Results) -> tuple[Row, ...]:
    """Empty where no cell ran alone."""
    scores = [score for score in results.of("cost") if score.spec.alone]
    called = names(score.spec for score in scores)
    where = places((score.spec for score in scores), results.sweep)
    groups = defaultdict(list)
    for score in scores:
        spec = score.spec
        paper = beside_resnet50(spec, results.sweep) if spec.condition == FOG else None
        key = results.title(spec), where[spec], paper, spec.condition, called[spec]
        groups[key].append(score)
    medians = {key: median(rate(score) for score in held) for key, held in groups.items()}
    return tuple(
        Row(
            *key,
            rate=medians[key],
            drawn=_drawn(held),
            share=_share(medians[key], medians.get((*key[:4], "frozen"))),
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
    return Section("cost", TITLE, told, HOW, tables.all_of(rows), (picture,))


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
