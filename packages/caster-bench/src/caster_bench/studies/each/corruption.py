"""Corruption tables by normalisation family (Table 1), under two conventions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from caster_bench.studies.each import corruption_tables as tables
from caster_bench.studies.each.corruption_figures import draw
from caster_bench.studies.each.corruption_tables import ALL, FAMILIES, FIFTEEN
from caster_bench.studies.naming import beside, places
from caster_bench.studies.results import Mean, Results, mean_of_means, names
from caster_bench.studies.score import Score
from caster_bench.studies.section import Picture, Section
from caster_bench.sweeps.names import REPORTED
from caster_bench.sweeps.spec import Spec

Conditions = tuple[tuple[str, int], ...]  # of a stream
TITLE = "Corruptions by normalisation family"
HOW = (
    "Top-1 accuracy. Within a backbone seeds are averaged, those of the stream and those it was "
    "trained with, then conditions; mean and sample standard deviation (n - 1) are across the "
    "backbones of a family. Intervals: conditions drawn anew within every backbone. "
    "Methods are compared only if they met the same cells of the family. "
    "An inert method has nothing to adapt in the family and is the frozen head exactly. Two "
    "conventions: the paper averages nineteen corruptions at five severities, most published "
    "tables fifteen at severity 5."
)


@dataclass(frozen=True)
class Entry:
    """A method on data, over the backbones of a family."""

    mean: Mean  # of accuracy; the interval is over the conditions of its backbones
    sd: float | None  # across backbones; None with one
    backbones: dict[str, float]  # mean of each
    inert: bool  # in every cell
    conditions: dict[str, dict[Conditions, float]]  # what each backbone met, and its accuracy there
    worst: dict[str, float]  # the most that any cell of each backbone loses to the frozen head
    whole: bool  # whether it met all cells that any method met there


@dataclass(frozen=True)
class Convention:
    """One way to average: entries by place, method and family."""

    name: str
    entries: dict[tuple[str, str, str], Entry]

    def places(self) -> list[str]:
        """Data, in order."""
        return list(dict.fromkeys(place for place, _, _ in self.entries))

    def comparable(self) -> Convention:
        """Without entries that stand for fewer cells than others beside them."""
        return replace(self, entries={key: e for key, e in self.entries.items() if e.whole})


@dataclass(frozen=True)
class Corruption:
    """Both conventions, where the sweep has cells for them."""

    conventions: tuple[Convention, ...]
    papers: dict[str, str | None]  # place: what the paper calls it


def measure(results: Results) -> Corruption | None:
    """None where the sweep has no corrupted cells in this study."""
    scores = [score for score in results.of("corruption") if score.spec.conditions]
    if not scores:
        return None
    where = places((score.spec for score in scores), results.sweep)
    called = names(score.spec for score in scores)
    labels = {spec: (place, called[spec]) for spec, place in where.items()}
    papers = {place: beside(spec, results.sweep) for spec, place in where.items()}
    return Corruption(conventions(scores, labels, results), papers)


def conventions(
    scores: Sequence[Score],
    labels: dict[Spec, tuple[str, str]],  # place and method
    results: Results,
) -> tuple[Convention, ...]:
    """All corrupted cells, and where there are some those that most published tables have."""
    found = [_convention(ALL, scores, labels, results)]
    reported = [score for score in scores if _is_reported(score.spec)]
    if reported:
        found.append(_convention(FIFTEEN, reported, labels, results))
    return tuple(found)


def _is_reported(spec: Spec) -> bool:
    return spec.schedule == "each" and spec.conditions[0] in {(name, 5) for name in REPORTED}


def _convention(
    name: str,
    scores: Sequence[Score],
    labels: dict[Spec, tuple[str, str]],  # place and method
    results: Results,
) -> Convention:
    groups, streams = defaultdict(list), defaultdict(set)
    for score in scores:
        family = results.sweep.backbones[score.spec.backbone].family
        place, method = labels[score.spec]
        groups[place, method, family].append(score)
        streams[place, family].add(score.spec.stream)
    return Convention(
        name,
        {
            (place, method, family): entry(held, results, len(streams[place, family]))
            for (place, method, family), held in groups.items()
        },
    )


def entry(scores: Sequence[Score], results: Results, streams: int) -> Entry:
    """Seeds within a condition, conditions within a backbone, then backbones."""
    seeds = defaultdict(list)
    conditions: dict[str, dict[Conditions, float]] = defaultdict(dict)
    worst: dict[str, float] = defaultdict(float)
    for score in scores:
        title = results.title(score.spec)
        seeds[title, score.spec.conditions].append(score.accuracy)
        worst[title] = max(worst[title], -score.gain)
    for (title, condition), accuracies in seeds.items():
        conditions[title][condition] = fmean(accuracies)
    backbones = {title: fmean(held.values()) for title, held in conditions.items()}
    values = list(backbones.values())
    found = mean_of_means([list(held.values()) for held in conditions.values()])
    return Entry(
        mean=replace(found, cells=len(scores)),
        sd=stdev(values) if len(values) > 1 else None,
        backbones=backbones,
        inert=all(score.inert for score in scores),
        conditions=dict(conditions),
        worst=dict(worst),
        whole=len(scores) == streams,
    )


def section(results: Results) -> Section | None:
    """The study's part of the report."""
    found = measure(results)
    if found is None:
        return None
    first = found.conventions[0]
    told = tuple(
        sentence
        for place in first.places()
        for family in FAMILIES
        if (sentence := _ranked(first, place, family)) is not None
    )
    drawn = first.comparable()
    picture = Picture(
        "corruption",
        f"Mean over {tables.averaged(drawn)}; bars: standard deviation across backbones. Methods "
        "that met all cells of their family.",
        "Accuracy by method, data and normalisation family. " + " ".join(told),
        1.2 + 0.3 * len({method for _, method, _ in drawn.entries}),
        lambda figure, ink: draw(figure, drawn, ink),
    )
    pictures = (picture,) if drawn.entries else ()
    return Section("corruption", TITLE, told, HOW, tables.all_of(found), pictures)


def _ranked(convention: Convention, place: str, family: str) -> str | None:
    """The best of the methods that met the same cells, in words."""
    held = {m: e for (p, m, f), e in convention.entries.items() if (p, f) == (place, family)}
    if not held:
        return None
    whole = {method: entry.mean.value for method, entry in held.items() if entry.whole}
    others = f" {note}" if (note := tables.unequal(held)) else ""
    if not whole:
        return f"On {place}, {FAMILIES[family]}: no method is highest, for none met all cells."
    best = max(whole, key=lambda method: whole[method])
    return f"On {place}, {FAMILIES[family]}: highest is {best}, {100 * whole[best]:.1f} %.{others}"
