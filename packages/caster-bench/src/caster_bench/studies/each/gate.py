"""Three policies: never, always, and where the certificate accepts (Sec. 4.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from caster.report.figures import BLUE, VERMILLION, dress, legend
from caster_bench.studies.agree import transport_of
from caster_bench.studies.method_names import GATED
from caster_bench.studies.naming import beside_resnet50, places
from caster_bench.studies.paper import number, printed
from caster_bench.studies.results import Mean, Results, mean, names
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import INTERVAL, Column, Table, Value, around, cells, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What the gate buys"
HOW = (
    "The same cells under three policies: never transport (the frozen head), always, and where "
    "the certificate accepts the batch. Accuracy in percent, averaged over cells; pooled, every "
    "cell counts the same. Intervals from cells drawn anew."
)


@dataclass(frozen=True)
class Policies:
    """Mean accuracies of a gate over the cells of one backbone and data, or of all."""

    method: str  # the gated one, with its settings where there are others
    backbone: str
    place: str
    paper: str | None  # what the paper calls the data, where it has a figure of them
    never: Mean
    always: Mean
    gated: Mean
    over_never: Mean
    over_always: Mean
    always_over_never: Mean
    accept: float


@dataclass(frozen=True)
class Gate:
    """By gate, backbone and data, and every gate pooled."""

    rows: tuple[Policies, ...]
    pooled: tuple[Policies, ...]


def measure(results: Results) -> Gate | None:
    """None where no stream met both the gated and the ungated transport."""
    scores = {score.spec: score for score in results.of("gate")}
    pairs = {
        spec: (scores[transport_of(spec)], gated)
        for spec, gated in scores.items()
        if spec.method == GATED and transport_of(spec) in scores
    }
    if not pairs:
        return None
    where, called = places(pairs, results.sweep), names(pairs)
    groups, gates = defaultdict(list), defaultdict(list)
    for spec, pair in pairs.items():
        paper = beside_resnet50(spec, results.sweep)
        groups[called[spec], results.title(spec), where[spec], paper].append(pair)
        gates[called[spec]].append(pair)
    return Gate(
        rows=tuple(policies(*key, held) for key, held in groups.items()),
        pooled=tuple(policies(name, "all", "pooled", None, held) for name, held in gates.items()),
    )


def policies(
    method: str,
    backbone: str,
    place: str,
    paper: str | None,
    pairs: Sequence[tuple[Score, Score]],
) -> Policies:
    """The three over pairs of an ungated and a gated cell."""
    always = np.array([ungated.accuracy for ungated, _ in pairs])
    gated = np.array([score.accuracy for _, score in pairs])
    gains = np.array([score.gain for _, score in pairs])
    never = gated - gains
    return Policies(
        *(method, backbone, place, paper),
        never=mean(never),
        always=mean(always),
        gated=mean(gated),
        over_never=mean(gains),
        over_always=mean(gated - always),
        always_over_never=mean(always - never),
        accept=float(np.mean([score.accept for _, score in pairs])),
    )


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    found = measure(results)
    if found is None:
        return None
    told = tuple(
        f"Pooled over {cells(pooled.gated.cells)}, never transporting scores "
        f"{100 * pooled.never.value:.2f}, always {100 * pooled.always.value:.2f}, {pooled.method} "
        f"{100 * pooled.gated.value:.2f}."
        for pooled in found.pooled
    )
    picture = Picture(
        "gate",
        "Mean accuracy by policy, with 95 % intervals from cells drawn anew.",
        f"Accuracy of the three policies by data. {' '.join(told)}",
        0.85 + 0.55 * len((*found.rows, *found.pooled)),
        lambda figure, ink: draw(figure, found, ink),
    )
    return Section("gate", TITLE, told, HOW, (_table(found),), (picture,))


def _table(found: Gate) -> Table:
    columns = (
        *(Column("gate"), Column("backbone"), Column("data"), Column("cells", "d")),
        *(Column("never", ".2f"), Column("always", ".2f"), Column("gated", ".2f")),
        Column(f"gated, {INTERVAL}", ".2f"),
        *(Column("over never", "+.2f"), Column(f"over never, {INTERVAL}", "+.2f")),
        *(Column("over always", "+.2f"), Column(f"over always, {INTERVAL}", "+.2f")),
        *(Column("paper, over always", "+.2f"), Column("accept, %", ".1f")),
        *(Column("always over never", "+.2f"), Column(f"always over never, {INTERVAL}", "+.2f")),
    )
    paper = {policy: number("gate", "pooled", policy) for policy in ("never", "always", "gated")}
    never, always, gated = (value or 0.0 for value in paper.values())
    told: tuple[Value, ...] = (
        *(GATED, "ResNet-50", "pooled, the paper's", None, never, always, gated, None),
        *(gated - never, None, gated - always, None, None, None, always - never, None),
    )
    return Table(
        "gate",
        "Top-1 accuracy in percent under three policies, and what the gate gains over the other "
        "two, and always transporting over never, in points. "
        f"Paper: {printed('gate', 'where')}, ResNet-50.",
        columns,
        (*(_row(row) for row in (*found.rows, *found.pooled)), told),
    )


def _row(row: Policies) -> tuple[Value, ...]:
    paper = number("gate", "over_always", str(row.paper)) if row.method == GATED else None
    return (
        *(row.method, row.backbone, row.place, row.gated.cells, points(row.never.value)),
        *(points(row.always.value), points(row.gated.value), around(row.gated.interval)),
        *(points(row.over_never.value), around(row.over_never.interval)),
        *(points(row.over_always.value), around(row.over_always.interval)),
        *(paper, points(row.accept)),
        *(points(row.always_over_never.value), around(row.always_over_never.interval)),
    )


def draw(figure: Figure, found: Gate, ink: str) -> None:
    """A row of three dots for every backbone and data."""
    axes = figure.subplots()
    rows = [*found.rows, *found.pooled]
    looks = (("never", ink, "|"), ("always", VERMILLION, "s"), ("gated", BLUE, "o"))
    for shift, (policy, colour, marker) in enumerate(looks):
        means: list[Mean] = [getattr(row, policy) for row in rows]
        values = [100 * mean.value for mean in means]
        ends = [around(mean.interval) for mean in means]
        axes.errorbar(
            values,
            [place + 0.22 * (shift - 1) for place in range(len(rows))],
            xerr=[
                [v - e.low if e else 0.0 for v, e in zip(values, ends, strict=True)],
                [e.high - v if e else 0.0 for v, e in zip(values, ends, strict=True)],
            ],
            fmt=marker,
            color=colour,
            ms=7,
            elinewidth=1,
            label=policy,
        )
    titles = [f"{row.backbone}, {row.place}" for row in rows]
    if len(found.pooled) > 1:
        titles = [f"{title}: {row.method}" for title, row in zip(titles, rows, strict=True)]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xlabel("top-1 accuracy, %", color=ink)
    dress(axes, ink, "x")
    figure.legend(**legend(ink), ncols=3)
