"""Layer and mixture transport against other methods, on every stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from caster_bench.studies import corruption, gate_policies
from caster_bench.studies.corruption import Convention, Entry, averaged, conventions
from caster_bench.studies.layers_streams import (
    PREFIXES,
    OnStreams,
    called,
    is_other,
    measure_methods,
    measure_streams,
    method_table,
    stream_tables,
)
from caster_bench.studies.naming import ALIGNING, data_labels, names
from caster_bench.studies.results import Mean, Results, Streams, matched, mean, shown
from caster_bench.studies.score import Score
from caster_bench.studies.tables import Section, StudyFigure, Table, Value, cells, points
from caster_bench.sweeps.spec import Spec

TITLE = "Aligned layers"
HOW = (
    "Accuracy: corrupted streams that another method ran on too; seeds are averaged first, then "
    "conditions, and methods are compared only on the same cells. Streams: layer and mixture "
    "transport with their default settings against the same update always applied. Accepted: share "
    "of batches. Streams of only spare corruptions, on which constants are chosen, have separate "
    "rows and count nowhere else. Kept: sum of the gated gains divided by the sum of the ungated "
    "gains, on shuffled corrupted streams of one condition. Intervals are bootstrapped over cells."
)
MAX_PANELS = 6  # settings in a figure of the page's width


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    parts = list(_parts(results))
    if not parts:
        return None
    return Section(
        "layers",
        TITLE,
        tuple(sentence for sentences, _, _ in parts for sentence in sentences),
        HOW,
        tuple(table for _, made, _ in parts for table in made),
        tuple(plot for _, _, drawn in parts for plot in drawn),
    )


Part = tuple[tuple[str, ...], tuple[Table, ...], tuple[StudyFigure, ...]]


def _parts(results: Results) -> Iterator[Part]:
    """Sentences, tables and figures of every part the sweep has cells for."""
    compared = measure_accuracy(results)
    if compared is not None:
        yield _of_accuracy(compared)
    methods = measure_methods(results)
    if methods:
        yield (), (method_table(methods),), ()
    for method in PREFIXES:
        on_streams = measure_streams(results, method)
        if on_streams is not None:
            yield _of_streams(on_streams)


def _about(method: str, sentences: tuple[str, ...]) -> tuple[str, ...]:
    """Sentences that name their method."""
    return tuple(f"{called(method).capitalize()}: {sentence}" for sentence in sentences)


def _of_accuracy(found: Accuracy) -> Part:
    """Tables and, for few settings, what they say in sentences and a figure."""
    drawn = found.conventions[0].comparable()
    if len(drawn.settings()) > MAX_PANELS:
        return (), _accuracy_tables(found), ()
    sentences = tuple(
        f"{lead.setting}, {lead.convention}: {called(lead.method)} is "
        f"{100 * lead.gated.value:+.2f} points from the best gradient-based method, {lead.best}."
        for lead in found.leads
        if lead.gated is not None
    )
    plot = StudyFigure(
        "layers-accuracy",
        "Mean over corrupted cells, by backbone and data set.",
        "Accuracy by method. " + " ".join(sentences),
        1.2 + 0.3 * len({method for _, method, _ in drawn.entries}),
        lambda figure, ink: corruption.draw(figure, drawn, ink),
    )
    return sentences, _accuracy_tables(found), (plot,) if drawn.entries else ()


def _of_streams(found: OnStreams) -> Part:
    sentences = tuple(
        f"{whole.setting}, {cells(whole.streams)}: the certificate "
        + ("" if whole.kept is None else f"keeps {100 * whole.kept:.0f} % of the gain on shuffled ")
        + ("" if whole.kept is None else "streams, and ")
        + f"loses at most {max(0.0, -100 * whole.worst):.2f} points on any."
        for whole in found.wholes
    )
    rows = [*found.kinds.rows, *found.kinds.pooled]
    plot = StudyFigure(
        f"{PREFIXES[found.method]}-streams",
        "Mean accuracy by kind of stream over all backbones and data sets, with bootstrapped 95 % "
        "intervals.",
        f"Accuracy of the frozen model, {called(found.method)} and gated {called(found.method)} by "
        f"kind of stream. {' '.join(sentences)}",
        0.85 + 0.35 * len(rows),
        lambda figure, ink: gate_policies.draw(figure, found.kinds, ink),
    )
    return _about(found.method, sentences), stream_tables(found), (plot,)


def _accuracy_tables(found: Accuracy) -> tuple[Table, ...]:
    """Every method on every backbone and data set, and the lead over gradient-based methods."""
    columns = "backbone | method"
    for name in (convention.name for convention in found.conventions):
        columns += f" | {name}:.2f | {name}, 95 %:.2f | {name}, cells:d"
    first = found.conventions[0].entries
    inert = [
        f"{method} on {setting}" for (setting, method, _), entry in first.items() if entry.inert
    ]
    rows = [
        (
            *(setting, method),
            *(
                value
                for convention in found.conventions
                for value in _entry(convention.entries.get((setting, method, family)))
            ),
        )
        for setting, method, family in sorted(first, key=lambda key: key[0])
    ]
    means = "; ".join(
        f"{convention.name}: {averaged(convention)}" for convention in found.conventions
    )
    return (
        Table.of(
            "layers-accuracy",
            f"Top-1 accuracy in percent. {means}."
            + (f" Inert, so identical to the frozen model: {', '.join(inert)}." if inert else ""),
            columns,
            rows,
        ),
        *(
            _lead_table(method, leads)
            for method in PREFIXES
            if (leads := [lead for lead in found.leads if lead.method == method])
        ),
    )


def _lead_table(method: str, leads: Sequence[Lead]) -> Table:
    return Table.of(
        f"{PREFIXES[method]}-lead",
        f"Accuracy of {called(method)} minus that of the best gradient-based method, in points, "
        "over streams that all methods have.",
        "backbone | mean | best that learns | its top-1:.2f | gated less it:+.2f | "
        "gated, 95 %:+.2f | ungated less it:+.2f | ungated, 95 %:+.2f | cells:d",
        (
            (
                *(lead.setting, lead.convention, lead.best or "none", points(lead.score)),
                *(*shown(lead.gated), *shown(lead.always)),
                None if lead.gated is None else lead.gated.cells,
            )
            for lead in leads
        ),
    )


def _entry(entry: Entry | None) -> tuple[Value, ...]:
    if entry is None:
        return (None, None, None)
    return *shown(entry.mean), entry.mean.cells


@dataclass(frozen=True)
class Lead:
    """Lead over the best gradient-based method, on streams that all methods have."""

    method: str  # that leads
    convention: str
    setting: str
    best: str | None  # None: none was run
    score: float | None  # its accuracy
    gated: Mean | None  # the method minus `score`; None if nothing that learns ran
    always: Mean | None  # likewise without its gate; None also if not run


@dataclass(frozen=True)
class Accuracy:
    """Entries by backbone and data set, and the lead in each."""

    conventions: tuple[Convention, ...]
    leads: tuple[Lead, ...]


def measure_accuracy(results: Results) -> Accuracy | None:
    """Compare methods on corrupted streams that another method ran on too; None without any."""
    scores = [
        score
        for score in results.of("layers")
        if score.spec.conditions and not is_other(score.spec)
    ]
    ours = (*ALIGNING, *ALIGNING.values(), "frozen")
    shared = {s.spec.stream for s in scores if s.spec.method not in ours}
    scores = [score for score in scores if score.spec.stream in shared]
    if not scores:
        return None
    data_of = data_labels((score.spec for score in scores), results.sweep)
    method_of = names(score.spec for score in scores)
    labels = {
        spec: (f"{results.title(spec)} on {setting}", method_of[spec])
        for spec, setting in data_of.items()
    }
    found = conventions(scores, labels, results)
    once: dict[Lead, Lead] = {}  # drop leads that are equal under both conventions
    for lead in _leads(found, scores, labels):
        once.setdefault(replace(lead, convention=""), lead)
    return Accuracy(found, tuple(once.values()))


def _leads(
    found: Sequence[Convention], scores: Sequence[Score], labels: dict[Spec, tuple[str, str]]
) -> list[Lead]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[labels[score.spec][0]].append(score)
    leads = []
    for convention in found:
        entries = convention.comparable().entries
        for setting in convention.settings():
            whole = [method for own, method, _ in entries if own == setting]
            conditions = {
                c
                for (own, _, _), entry in entries.items()
                if own == setting
                for group in entry.conditions.values()
                for c in group
            }
            streams: Streams = defaultdict(dict)
            for score in groups[setting]:
                if score.spec.conditions in conditions:
                    streams[score.spec.stream][labels[score.spec][1]] = score
            shared = matched(streams, whole)
            leads += [
                _lead(method, convention.name, setting, shared, whole)
                for method in ALIGNING
                if method in whole
            ]
    return leads


def _lead(
    method: str, convention: str, setting: str, streams: Streams, methods: Sequence[str]
) -> Lead:
    """Compute the lead over streams that all of these methods have."""
    group = list(streams.values())
    learning = [m for m in methods if any(by_method[m].gradients for by_method in group)]
    means = {name: fmean(by_method[name].accuracy for by_method in group) for name in learning}
    if not means:
        return Lead(method, convention, setting, None, None, None, None)
    best = max(means, key=lambda name: means[name])
    gated, always = (
        mean([by_method[own].accuracy - by_method[best].accuracy for by_method in group])
        if own in methods
        else None
        for own in (method, ALIGNING[method])
    )
    return Lead(method, convention, setting, best, means[best], gated, always)
