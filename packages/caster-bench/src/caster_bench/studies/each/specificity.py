"""One mechanism's certificate before another's update (Sec. 4.7, Table 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caster.report.intervals import Interval, of_statistic
from caster_bench.studies.agree import transport_of
from caster_bench.studies.each import specificity_tables as tables
from caster_bench.studies.each.specificity_figures import draw, rows
from caster_bench.studies.method_names import GATED
from caster_bench.studies.naming import beside_resnet50, places
from caster_bench.studies.ranks import correlation_interval, spearman
from caster_bench.studies.results import Mean, Results, Streams, by_stream, matched, mean
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import as_file, cells
from caster_bench.sweeps.spec import GATE, Spec

TITLE = "One mechanism's certificate before another's update"
HOW = (
    "Cells that every policy met, averaged. Δ: gain over the frozen head on the same samples. "
    "Accept: share of batches that the policy did not leave to the frozen head. Harm: share of "
    "samples that the frozen head has right and the policy wrong. Kept: gain of the gated policy "
    "as a share of the gain of the same mechanism without its gate; it can exceed 100 % where the "
    "gate refuses what would harm. Rank correlations over cells, average ranks: the share of "
    "batches a gate accepts in a cell against what its mechanism gains there without it. Intervals "
    "from cells drawn anew."
)


@dataclass(frozen=True)
class Policy:
    """A method, gated or not, over the matched cells."""

    name: str
    accuracy: Mean
    gain: Mean
    accept: Mean
    harm: Mean
    kept: float | None  # None: it has no gate to do with, or nothing to keep
    kept_interval: Interval | None


@dataclass(frozen=True)
class Relation:
    """A gate's acceptance and its mechanism's ungated gain, a pair a cell."""

    gated: str  # as tables call them
    mechanism: str
    own: bool  # whether the certificate is before its own mechanism
    accept: tuple[float, ...]
    gain: tuple[float, ...]
    correlation: float | None
    correlation_interval: Interval | None
    kept: float | None  # None: the mechanism has no gain to keep
    kept_interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """What one policy has more than another, cell by cell."""

    one: str
    other: str
    accuracy: Mean
    harm: Mean


@dataclass(frozen=True)
class Specificity:
    """All policies on one data set."""

    place: str
    paper: str | None  # what the paper calls the data
    policies: tuple[Policy, ...]
    relations: tuple[Relation, ...]
    differences: tuple[Difference, ...]
    cells: int


def ungated(spec: Spec) -> Spec | None:
    """The cell of the mechanism that a gated policy admits; None of one without a gate.

    >>> spec = Spec("r", "d", "tent+referee", (("gate", (("agreement", 0.9),)), ("lr", 0.1)))
    >>> ungated(spec).label, ungated(ungated(spec))
    ('tent (lr 0.1)', None)
    """
    if spec.method == GATED:
        return transport_of(spec)
    mechanism, gate, _ = spec.method.partition("+")
    settings = tuple((name, value) for name, value in spec.settings if name != GATE)
    return replace(spec, method=mechanism, settings=settings) if gate else None


def measure(results: Results) -> tuple[Specificity, ...]:
    """Empty where the sweep has no such cells."""
    streams = by_stream(results.of("specificity"))
    where = places(streams, results.sweep)
    groups: dict[str, Streams] = defaultdict(dict)
    papers: dict[str, set[str | None]] = defaultdict(set)
    for stream, met in streams.items():
        groups[where[stream]][stream] = met
        papers[where[stream]].add(beside_resnet50(stream, results.sweep))
    found = (
        _compare(place, papers[place].pop() if len(papers[place]) == 1 else None, held)
        for place, held in groups.items()
    )
    return tuple(each for each in found if each is not None)


def _compare(place: str, paper: str | None, streams: Streams) -> Specificity | None:
    methods = list(dict.fromkeys(name for met in streams.values() for name in met))
    held = list(matched(streams, methods).values())
    if not held:
        return None
    found = (_relation(name, held) for name in methods)
    relations = {relation.gated: relation for relation in found if relation is not None}
    admitted = {relation.mechanism for relation in relations.values()}
    policies = []
    for name in methods:
        gain = mean([met[name].gain for met in held])
        relation = relations.get(name)
        kept = None if relation is None else relation.kept
        if name in admitted and gain.value > 0:
            kept = 1.0  # by itself it keeps all
        policies.append(
            Policy(
                name,
                accuracy=mean([met[name].accuracy for met in held]),
                gain=gain,
                accept=mean([met[name].accept for met in held]),
                harm=mean([met[name].harm for met in held]),
                kept=kept,
                kept_interval=None if relation is None else relation.kept_interval,
            )
        )
    pairs = [(name, relation.mechanism) for name, relation in relations.items()]
    pairs += _alike(held[0])
    # a mechanism may go by two names, where its settings differ by stream: then it is no policy
    differences = tuple(_difference(*pair, held) for pair in pairs if pair[1] in methods)
    return Specificity(
        place, paper, tuple(policies), tuple(relations.values()), differences, len(held)
    )


def _alike(met: Mapping[str, Score]) -> list[tuple[str, str]]:
    """Policies that learn, each beside the first one that has the same gate, or none as well."""
    first: dict[tuple[str, object], str] = {}
    beside = []
    for name, score in met.items():
        if score.gradients:
            spec = score.spec
            gate = spec.method.partition("+")[2], dict(spec.settings).get(GATE)
            beside.append((name, first.setdefault(gate, name)))
    return [(one, other) for one, other in beside if one != other]


def _difference(one: str, other: str, held: Sequence[Mapping[str, Score]]) -> Difference:
    return Difference(
        one,
        other,
        accuracy=mean([met[one].accuracy - met[other].accuracy for met in held]),
        harm=mean([met[one].harm - met[other].harm for met in held]),
    )


def _relation(name: str, held: list[dict[str, Score]]) -> Relation | None:
    """Of a policy and its mechanism; None without a gate, or where the mechanism was not run."""
    pairs = []
    for met in held:
        wanted = ungated(met[name].spec)
        pairs += [(met[name], own, other) for other, own in met.items() if own.spec == wanted]
    if len(pairs) < len(held):
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
        kept_interval=None if np.isnan(kept) else of_statistic(gains, _kept),
    )


def _kept(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gated policy's gain as a share of its mechanism's: (draws, cells, 2) -> (draws,).

    NaN where the mechanism has none.
    """
    gated, whole = np.moveaxis(gains.mean(axis=1), -1, 0)
    return np.where(whole > 0, gated / np.where(whole > 0, whole, 1.0), np.nan)


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    found = measure(results)
    if not found:
        return None
    told = tuple(
        f"On {each.place}, {cells(each.cells)}: acceptance of {relation.gated} against the gain "
        f"of {relation.mechanism}: rank correlation {relation.correlation:+.2f}."
        for each in found
        for relation in each.relations
        if relation.correlation is not None
    )
    pictures = tuple(
        Picture(
            f"specificity-{as_file(each.place)}" if len(found) > 1 else "specificity",
            f"{each.place}: a point a cell; share of batches a gate accepts against what its "
            "mechanism gains there without it. In the titles: rank correlations.",
            f"Acceptance against ungated gain. {' '.join(told)}",
            0.2 + 3.2 * rows(each),
            lambda figure, ink, each=each: draw(figure, each, ink),  # type: ignore[misc]
        )
        for each in found
        if each.relations
    )
    return Section("specificity", TITLE, told, HOW, tables.all_of(found), pictures)
