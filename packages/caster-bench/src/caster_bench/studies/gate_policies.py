"""Three policies: never transport, always, or where the certificate accepts (Sec. 4.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from caster.report.figures import BLUE, VERMILLION, dress, legend
from caster_bench.studies.naming import GATED, data_labels, names
from caster_bench.studies.paper import number, paper_name_resnet50, printed
from caster_bench.studies.results import Mean, Results, mean, shown, with_errors
from caster_bench.studies.score import Score, transport_of
from caster_bench.studies.tables import Section, StudyFigure, Table, Value, cells, points

TITLE = "What the gate buys"
HOW = (
    "The same cells under three policies: never transport (the frozen head), always, and only if "
    "the certificate accepts the batch. Accuracy in percent, averaged over cells with equal "
    "weight. Intervals are bootstrapped over cells."
)


@dataclass(frozen=True)
class Policies:
    """Mean accuracies over the cells of one backbone and data set, or of all."""

    method: str  # the gated one, with its settings if there are several
    backbone: str
    setting: str
    paper: str | None  # the paper's name for the data, if it has a figure
    never: Mean
    always: Mean
    gated: Mean
    over_never: Mean
    over_always: Mean
    always_over_never: Mean
    accept: float


@dataclass(frozen=True)
class Gate:
    """Policies by gate, backbone and data, and every gate pooled."""

    rows: tuple[Policies, ...]
    pooled: tuple[Policies, ...]


def measure(results: Results) -> Gate | None:
    """Measure the study; None if no stream has both gated and ungated transport."""
    scores = {score.spec: score for score in results.of("gate")}
    pairs = {
        spec: (scores[transport_of(spec)], gated)
        for spec, gated in scores.items()
        if spec.method == GATED and transport_of(spec) in scores
    }
    if not pairs:
        return None
    data_of, method_of = data_labels(pairs, results.sweep), names(pairs)
    groups, gates = defaultdict(list), defaultdict(list)
    for spec, pair in pairs.items():
        paper = paper_name_resnet50(spec, results.sweep)
        groups[method_of[spec], results.title(spec), data_of[spec], paper].append(pair)
        gates[method_of[spec]].append(pair)
    return Gate(
        rows=tuple(policies(*key, group) for key, group in groups.items()),
        pooled=tuple(policies(name, "all", "pooled", None, group) for name, group in gates.items()),
    )


def policies(
    method: str,
    backbone: str,
    setting: str,
    paper: str | None,
    pairs: Sequence[tuple[Score, Score]],
) -> Policies:
    """Average the three policies over pairs of an ungated and a gated cell."""
    always = np.array([ungated.accuracy for ungated, _ in pairs])
    gated = np.array([score.accuracy for _, score in pairs])
    gains = np.array([score.gain for _, score in pairs])
    never = gated - gains
    return Policies(
        *(method, backbone, setting, paper),
        never=mean(never),
        always=mean(always),
        gated=mean(gated),
        over_never=mean(gains),
        over_always=mean(gated - always),
        always_over_never=mean(always - never),
        accept=float(np.mean([score.accept for _, score in pairs])),
    )


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    found = measure(results)
    if found is None:
        return None
    sentences = tuple(
        f"Pooled over {cells(pooled.gated.cells)}, accuracy is {100 * pooled.never.value:.2f} % "
        f"without transport, {100 * pooled.always.value:.2f} % always transporting, and "
        f"{100 * pooled.gated.value:.2f} % with {pooled.method}."
        for pooled in found.pooled
    )
    plot = StudyFigure(
        "gate",
        "Mean accuracy by policy, with bootstrapped 95 % intervals.",
        f"Accuracy of the three policies by data. {' '.join(sentences)}",
        0.85 + 0.55 * len((*found.rows, *found.pooled)),
        lambda figure, ink: draw(figure, found, ink),
    )
    return Section("gate", TITLE, sentences, HOW, (_table(found),), (plot,))


def _table(found: Gate) -> Table:
    paper = {policy: number("gate", "pooled", policy) for policy in ("never", "always", "gated")}
    never, always, gated = (value or 0.0 for value in paper.values())
    printed_row: tuple[Value, ...] = (
        *(GATED, "ResNet-50", "pooled, the paper's", None, never, always, gated, None),
        *(gated - never, None, gated - always, None, None, None, always - never, None),
    )
    return Table.of(
        "gate",
        "Top-1 accuracy in percent under three policies; gains of the gate over the other two, "
        f"and of always transporting over never, in points. Paper: {printed('gate', 'where')}, "
        "ResNet-50.",
        "gate | backbone | data | cells:d | never:.2f | always:.2f | gated:.2f | gated, 95 %:.2f | "
        "over never:+.2f | over never, 95 %:+.2f | over always:+.2f | over always, 95 %:+.2f | "
        "paper, over always:+.2f | accept, %:.1f | always over never:+.2f | "
        "always over never, 95 %:+.2f",
        (*(_row(row) for row in (*found.rows, *found.pooled)), printed_row),
    )


def _row(row: Policies) -> tuple[Value, ...]:
    paper = number("gate", "over_always", str(row.paper)) if row.method == GATED else None
    return (
        *(row.method, row.backbone, row.setting, row.gated.cells, points(row.never.value)),
        *(points(row.always.value), *shown(row.gated), *shown(row.over_never)),
        *(*shown(row.over_always), paper, points(row.accept), *shown(row.always_over_never)),
    )


def draw(figure: Figure, found: Gate, ink: str) -> None:
    """Draw a row of three dots for every backbone and data set."""
    axes = figure.subplots()
    rows = [*found.rows, *found.pooled]
    styles = (("never", ink, "|"), ("always", VERMILLION, "s"), ("gated", BLUE, "o"))
    for shift, (policy, colour, marker) in enumerate(styles):
        values, errors = with_errors([getattr(row, policy) for row in rows])
        axes.errorbar(
            values,
            [row + 0.22 * (shift - 1) for row in range(len(rows))],
            xerr=errors,
            fmt=marker,
            color=colour,
            ms=7,
            elinewidth=1,
            label=policy,
        )
    titles = [f"{row.backbone}, {row.setting}" for row in rows]
    if len(found.pooled) > 1:
        titles = [f"{title}: {row.method}" for title, row in zip(titles, rows, strict=True)]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xlabel("top-1 accuracy, %", color=ink)
    dress(axes, ink, "x")
    figure.legend(**legend(ink), ncols=3)
