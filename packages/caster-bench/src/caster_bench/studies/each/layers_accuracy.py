"""Layer transport beside other methods, every backbone and data by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from caster_bench.studies.each.corruption import Convention, conventions
from caster_bench.studies.method_names import LAYERS, LAYERS_ALWAYS
from caster_bench.studies.naming import places
from caster_bench.studies.results import Mean, Results, Streams, by_stream, matched, mean, names
from caster_bench.studies.score import Score
from caster_bench.sweeps.spec import Spec

OWN = (LAYERS, LAYERS_ALWAYS)


@dataclass(frozen=True)
class Lead:
    """How far both are ahead of the best method that learns, on streams that all of them met."""

    convention: str
    place: str
    best: str | None  # None: none was run
    score: float | None  # its accuracy
    gated: Mean | None  # layer transport's accuracy less that; None where it was not run
    always: Mean | None


@dataclass(frozen=True)
class Accuracy:
    """Entries by backbone on data, and the lead in each."""

    conventions: tuple[Convention, ...]
    leads: tuple[Lead, ...]


def measure(results: Results) -> Accuracy | None:
    """Of corrupted streams that another method met too; None where there is none."""
    scores = [score for score in results.of("layers") if _is_compared(score.spec)]
    shared = {s.spec.stream for s in scores if s.spec.method not in (*OWN, "frozen")}
    scores = [score for score in scores if score.spec.stream in shared]
    if not scores:
        return None
    where = places((score.spec for score in scores), results.sweep)
    called = names(score.spec for score in scores)
    labels = {
        spec: (f"{results.title(spec)} on {place}", called[spec]) for spec, place in where.items()
    }
    found = conventions(scores, labels, results)
    return Accuracy(found, tuple(_leads(found, scores, labels)))


def _is_compared(spec: Spec) -> bool:
    """Whether it is corrupted, and of layer transport as it is registered."""
    return bool(spec.conditions) and not (spec.method in OWN and spec.settings)


def _leads(
    found: Sequence[Convention], scores: Sequence[Score], labels: dict[Spec, tuple[str, str]]
) -> list[Lead]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[labels[score.spec][0]].append(score)
    leads = []
    for convention in found:
        entries = convention.comparable().entries
        for place in convention.places():
            whole = [method for own, method, _ in entries if own == place]
            conditions = {
                c
                for (own, _, _), entry in entries.items()
                if own == place
                for held in entry.conditions.values()
                for c in held
            }
            held = [s for s in groups[place] if s.spec.conditions in conditions]
            leads.append(_lead(convention.name, place, matched(by_stream(held), whole), whole))
    return leads


def _lead(convention: str, place: str, streams: Streams, methods: Sequence[str]) -> Lead:
    """Over streams that all of these methods met."""
    held = list(streams.values())
    learning = [m for m in methods if any(met[m].gradients for met in held)]
    means = {method: fmean(met[method].accuracy for met in held) for method in learning}
    if not means:
        return Lead(convention, place, None, None, None, None)
    best = max(means, key=lambda method: means[method])
    over = {
        method: mean([met[method].accuracy - met[best].accuracy for met in held])
        for method in OWN
        if method in methods
    }
    return Lead(convention, place, best, means[best], over.get(LAYERS), over.get(LAYERS_ALWAYS))
