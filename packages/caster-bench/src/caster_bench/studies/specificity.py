"""One mechanism's certificate gating another's update (Sec. 4.7, Table 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from caster.report.figures import BLUE, VERMILLION, dress
from caster.report.intervals import Interval
from caster_bench.studies.naming import GATED, data_labels
from caster_bench.studies.paper import number, paper_name_resnet50, printed
from caster_bench.studies.results import (
    Mean,
    Results,
    Streams,
    by_stream,
    correlation_interval,
    interval_of,
    matched,
    mean,
    shown,
    spearman,
)
from caster_bench.studies.score import Score, transport_of
from caster_bench.studies.tables import (
    Section,
    StudyFigure,
    Table,
    as_filename,
    cells,
    percent,
    points,
)
from caster_bench.sweeps.spec import GATE, Spec, inner_and_gate

TITLE = "One mechanism's certificate gating another's update"
HOW = (
    "Averages over the cells that every policy has. Δ: gain over the frozen head on the same "
    "samples. Accept: share of batches that the policy did not leave to the frozen head. Harm: "
    "share of samples that the frozen head gets right and the policy wrong. Kept: gain of the "
    "gated policy as a share of the ungated gain of the same mechanism; it can exceed 100 % if "
    "the gate rejects harmful updates. Rank correlations over cells, with average ranks: share of "
    "batches a gate accepts in a cell against the ungated gain of its mechanism. Intervals are "
    "bootstrapped over cells."
)
ABREAST = 3  # panels per row, so that titles do not overlap


@dataclass(frozen=True)
class Policy:
    """A method, gated or not, averaged over the matched cells."""

    name: str
    accuracy: Mean
    gain: Mean
    accept: Mean
    harm: Mean
    kept: float | None  # None: no gate involved, or no gain to keep
    kept_interval: Interval | None


@dataclass(frozen=True)
class Relation:
    """A gate's acceptance and its mechanism's ungated gain, one pair per cell."""

    gated: str  # as in tables
    mechanism: str
    own: bool  # whether the certificate gates its own mechanism
    accept: tuple[float, ...]
    gain: tuple[float, ...]
    correlation: float | None
    correlation_interval: Interval | None
    kept: float | None  # None: the mechanism has no gain
    kept_interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """Difference of two policies, cell by cell."""

    one: str
    other: str
    accuracy: Mean
    harm: Mean


@dataclass(frozen=True)
class Specificity:
    """All policies on one data set."""

    setting: str
    paper: str | None  # the paper's name for the data
    policies: tuple[Policy, ...]
    relations: tuple[Relation, ...]
    differences: tuple[Difference, ...]
    cells: int


def ungated(spec: Spec) -> Spec | None:
    """The ungated cell of a gated policy's mechanism; None without a gate.

    >>> spec = Spec("r", "d", "tent+referee", (("gate", (("agreement", 0.9),)), ("lr", 0.1)))
    >>> ungated(spec).label, ungated(ungated(spec))
    ('tent (lr 0.1)', None)
    """
    if spec.method == GATED:
        return transport_of(spec)
    mechanism, gate = inner_and_gate(spec.method)
    settings = tuple((name, value) for name, value in spec.settings if name != GATE)
    return replace(spec, method=mechanism, settings=settings) if gate else None


def measure(results: Results) -> tuple[Specificity, ...]:
    """Measure the study; empty if the sweep has no such cells."""
    streams = by_stream(results.of("specificity"))
    data_of = data_labels(streams, results.sweep)
    groups: dict[str, Streams] = defaultdict(dict)
    papers: dict[str, set[str | None]] = defaultdict(set)
    for stream, by_method in streams.items():
        groups[data_of[stream]][stream] = by_method
        papers[data_of[stream]].add(paper_name_resnet50(stream, results.sweep))
    found = (
        _compare(setting, papers[setting].pop() if len(papers[setting]) == 1 else None, group)
        for setting, group in groups.items()
    )
    return tuple(each for each in found if each is not None)


def _compare(setting: str, paper: str | None, streams: Streams) -> Specificity | None:
    methods = list(dict.fromkeys(name for by_method in streams.values() for name in by_method))
    group = list(matched(streams, methods).values())
    if not group:
        return None
    found = (_relation(name, group) for name in methods)
    relations = {relation.gated: relation for relation in found if relation is not None}
    admitted = {relation.mechanism for relation in relations.values()}
    policies = []
    for name in methods:
        gain = mean([by_method[name].gain for by_method in group])
        relation = relations.get(name)
        kept = None if relation is None else relation.kept
        if name in admitted and gain.value > 0:
            kept = 1.0  # without a gate it keeps everything
        policies.append(
            Policy(
                name,
                accuracy=mean([by_method[name].accuracy for by_method in group]),
                gain=gain,
                accept=mean([by_method[name].accept for by_method in group]),
                harm=mean([by_method[name].harm for by_method in group]),
                kept=kept,
                kept_interval=None if relation is None else relation.kept_interval,
            )
        )
    pairs = [(name, relation.mechanism) for name, relation in relations.items()]
    pairs += _alike(group[0])
    # a mechanism whose settings differ by stream has two names, and is not a policy
    differences = tuple(_difference(*pair, group) for pair in pairs if pair[1] in methods)
    return Specificity(
        setting, paper, tuple(policies), tuple(relations.values()), differences, len(group)
    )


def _alike(by_method: Mapping[str, Score]) -> list[tuple[str, str]]:
    """Pair every gradient-based policy with the first one that has the same gate, or none."""
    first: dict[tuple[str, object], str] = {}
    pairs = []
    for name, score in by_method.items():
        if score.gradients:
            spec = score.spec
            gate = inner_and_gate(spec.method)[1], dict(spec.settings).get(GATE)
            pairs.append((name, first.setdefault(gate, name)))
    return [(one, other) for one, other in pairs if one != other]


def _difference(one: str, other: str, group: Sequence[Mapping[str, Score]]) -> Difference:
    return Difference(
        one,
        other,
        accuracy=mean([by_method[one].accuracy - by_method[other].accuracy for by_method in group]),
        harm=mean([by_method[one].harm - by_method[other].harm for by_method in group]),
    )


def _relation(name: str, group: list[dict[str, Score]]) -> Relation | None:
    """Relate a policy to its mechanism; None without a gate or if the mechanism was not run."""
    pairs = []
    for by_method in group:
        wanted = ungated(by_method[name].spec)
        pairs += [
            (by_method[name], own, other) for other, own in by_method.items() if own.spec == wanted
        ]
    if len(pairs) < len(group):
        return None
    accept = tuple(gated.accept for gated, _, _ in pairs)
    gain = tuple(mechanism.gain for _, mechanism, _ in pairs)
    gains = np.array([[gated.gain, mechanism.gain] for gated, mechanism, _ in pairs])
    kept = float(_kept(gains[None])[0])
    return Relation(
        gated=name,
        mechanism=" / ".join(dict.fromkeys(other for _, _, other in pairs)),
        own=pairs[0][0].spec.method == GATED,
        accept=accept,
        gain=gain,
        correlation=spearman(accept, gain),
        correlation_interval=correlation_interval(accept, gain),
        kept=None if np.isnan(kept) else kept,
        kept_interval=None if np.isnan(kept) else interval_of(gains, _kept),
    )


def _kept(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gain of the gated policy as a share of its mechanism's: (draws, cells, 2) -> (draws,).

    NaN if the mechanism has none.
    """
    gated, whole = np.moveaxis(gains.mean(axis=1), -1, 0)
    return np.where(whole > 0, gated / np.where(whole > 0, whole, 1.0), np.nan)


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    found = measure(results)
    if not found:
        return None
    sentences = tuple(
        f"On {each.setting} ({cells(each.cells)}), the acceptance of {relation.gated} has a rank "
        f"correlation of {relation.correlation:+.2f} with the gain of {relation.mechanism}."
        for each in found
        for relation in each.relations
        if relation.correlation is not None
    )
    plots = tuple(
        StudyFigure(
            f"specificity-{as_filename(each.setting)}" if len(found) > 1 else "specificity",
            f"{each.setting}: one point per cell; share of batches a gate accepts against the "
            "ungated gain of its mechanism. Titles give rank correlations.",
            f"Acceptance against ungated gain. {' '.join(sentences)}",
            0.2 + 3.2 * _panel_rows(each),
            lambda figure, ink, each=each: draw(figure, each, ink),  # type: ignore[misc]
        )
        for each in found
        if each.relations
    )
    return Section("specificity", TITLE, sentences, HOW, all_tables(found), plots)


def all_tables(found: tuple[Specificity, ...]) -> tuple[Table, ...]:
    """Policies of all data, then their differences and the rank correlations."""
    return (*(_table(each) for each in found), _differences(found), _correlations(found))


def _table(found: Specificity) -> Table:
    return Table.of(
        f"specificity-{as_filename(found.setting)}",
        f"{found.setting}: policies over {cells(found.cells)} that all of them have. Paper: "
        f"{printed('specificity', 'where')}, ResNet-50.",
        "policy | top-1:.2f | 95 %:.2f | Δ:+.2f | Δ 95 %:+.2f | accept, %:.1f | accept 95 %:.1f | "
        "harm, %:.2f | harm 95 %:.2f | kept, %:.1f | kept 95 %:.1f | paper's top-1:.2f | "
        "paper's Δ:+.2f | paper's accept:.1f | paper's harm:.2f | paper's kept:.1f",
        (
            (
                *(policy.name, *shown(policy.accuracy), *shown(policy.gain)),
                *(*shown(policy.accept), *shown(policy.harm)),
                *(points(policy.kept), percent(policy.kept_interval)),
                *(
                    number("specificity", str(found.paper), policy.name, figure)
                    for figure in ("top1", "gain", "accept", "harm", "kept")
                ),
            )
            for policy in found.policies
        ),
    )


def _differences(found: tuple[Specificity, ...]) -> Table:
    return Table.of(
        "specificity-differences",
        "Difference of two policies on the same cells, in points: a gated policy minus its "
        "ungated mechanism, and a gradient-based policy minus the first one with the same gate, "
        "or with none.",
        "data | policy | less | cells:d | top-1:+.2f | 95 %:+.2f | harm:+.2f | harm 95 %:+.2f",
        (
            (
                *(each.setting, pair.one, pair.other, each.cells),
                *(*shown(pair.accuracy), *shown(pair.harm)),
            )
            for each in found
            for pair in each.differences
        ),
    )


def _correlations(found: tuple[Specificity, ...]) -> Table:
    return Table.of(
        "specificity-correlations",
        "Rank correlation over cells between the share of accepted batches and the ungated gain of "
        "the mechanism; average ranks.",
        "data | gated policy | gain of | cells:d | rank correlation:+.2f | 95 %:+.2f | paper:+.2f",
        (
            (
                *(each.setting, own.gated, own.mechanism, each.cells, own.correlation),
                own.correlation_interval,
                number("specificity", "correlation", own.gated) if each.paper else None,
            )
            for each in found
            for own in each.relations
        ),
    )


def _panel_rows(found: Specificity) -> int:
    """Number of rows of panels."""
    return -(-len(found.relations) // ABREAST)


def draw(figure: Figure, found: Specificity, ink: str) -> None:
    """Draw one panel per gated policy."""
    across = min(ABREAST, len(found.relations))
    grid = figure.subplots(_panel_rows(found), across, sharey=True, squeeze=False)
    panels = grid.ravel()
    for axes in panels[len(found.relations) :]:
        axes.remove()
    for axes, relation in zip(panels, found.relations, strict=False):
        axes.scatter(
            [100 * gain for gain in relation.gain],
            [100 * accept for accept in relation.accept],
            s=22,
            alpha=0.7,
            linewidths=0,
            c=BLUE if relation.own else VERMILLION,
        )
        rho = relation.correlation
        title = relation.gated if rho is None else f"{relation.gated}:\n{rho:+.2f}"
        axes.set_title(title, color=ink, fontsize=10)
        axes.set_xlabel(f"gain of {relation.mechanism},\npoints", color=ink)
        axes.set_ylim(-4, 104)
        dress(axes, ink)
    for axes in grid[:, 0]:
        axes.set_ylabel("batches accepted, %", color=ink)
