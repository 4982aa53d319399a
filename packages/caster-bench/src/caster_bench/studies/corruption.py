"""Corruption tables by normalisation family (Table 1), under two conventions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from matplotlib.figure import Figure

from caster.report.figures import BLUE, VERMILLION, dress, legend
from caster_bench.studies.naming import GATED, data_labels, names
from caster_bench.studies.paper import paper_name, printed
from caster_bench.studies.results import Mean, Results, mean_of_means, shown
from caster_bench.studies.score import Score
from caster_bench.studies.tables import (
    Section,
    StudyFigure,
    Table,
    Value,
    as_filename,
    cells,
    points,
)
from caster_bench.sweeps.spec import GROUPS, REPORTED, SEVERITIES, Spec

Conditions = tuple[tuple[str, int], ...]  # of a stream
TITLE = "Corruptions by normalisation family"
HOW = (
    "Top-1 accuracy. Within a backbone, stream and training seeds are averaged first, then "
    "conditions; mean and sample standard deviation (n - 1) are across the backbones of a family. "
    "Intervals are bootstrapped over the conditions of every backbone. Methods are compared only "
    "if they ran on the same cells of the family. An inert method has nothing to adapt in the "
    "family and equals the frozen head exactly. Two conventions: the paper averages nineteen "
    "corruptions at five severities, most published tables fifteen at severity 5."
)
FAMILIES = {"batch": "BN", "batch-plain": "BN, plain", "layer": "LN"}
ALL, FIFTEEN = "all", "fifteen"
PAPER = {((name, severity),) for name in GROUPS["all"] for severity in SEVERITIES}
PUBLISHED = {((name, 5),) for name in REPORTED}
FROZEN = "frozen"
STYLES = {"batch": ("BatchNorm", BLUE, "o"), "layer": ("LayerNorm", VERMILLION, "s")}


@dataclass(frozen=True)
class Entry:
    """A method on data, averaged over the backbones of a family."""

    mean: Mean  # accuracy; interval over the conditions of its backbones
    sd: float | None  # across backbones; None for a single one
    backbones: dict[str, float]  # mean accuracy of each
    inert: bool  # in every cell
    conditions: dict[str, dict[Conditions, float]]  # accuracy by backbone and condition
    worst: dict[str, float]  # largest loss of any cell to the frozen head, by backbone
    harm: float  # share of samples that only the frozen head gets right, averaged as accuracy is
    whole: bool  # whether it has all cells that any method has


@dataclass(frozen=True)
class Convention:
    """One way of averaging: entries by setting, method and family."""

    name: str
    entries: dict[tuple[str, str, str], Entry]

    def settings(self) -> list[str]:
        """Settings, in order."""
        return list(dict.fromkeys(setting for setting, _, _ in self.entries))

    def comparable(self) -> Convention:
        """Drop entries with fewer cells than others."""
        return replace(self, entries={key: e for key, e in self.entries.items() if e.whole})


@dataclass(frozen=True)
class Corruption:
    """Both conventions, if the sweep has cells for them."""

    conventions: tuple[Convention, ...]
    papers: dict[str, str | None]  # setting: the paper's name for it


def measure(results: Results) -> Corruption | None:
    """Measure the study; None if the sweep has no corrupted cells in it."""
    scores = [score for score in results.of("corruption") if score.spec.conditions]
    if not scores:
        return None
    data_of = data_labels((score.spec for score in scores), results.sweep)
    method_of = names(score.spec for score in scores)
    labels = {spec: (setting, method_of[spec]) for spec, setting in data_of.items()}
    papers = {setting: paper_name(spec, results.sweep) for spec, setting in data_of.items()}
    return Corruption(conventions(scores, labels, results), papers)


def conventions(
    scores: Sequence[Score],
    labels: dict[Spec, tuple[str, str]],  # setting and method
    results: Results,
) -> tuple[Convention, ...]:
    """Average all corrupted cells, and those that most published tables use, if there are any."""
    found = [_convention(ALL, scores, labels, results)]
    each = (score for score in scores if score.spec.schedule == "each")
    if reported := [score for score in each if score.spec.conditions in PUBLISHED]:
        found.append(_convention(FIFTEEN, reported, labels, results))
    return tuple(found)


def _convention(
    name: str,
    scores: Sequence[Score],
    labels: dict[Spec, tuple[str, str]],  # setting and method
    results: Results,
) -> Convention:
    groups, streams = defaultdict(list), defaultdict(set)
    for score in scores:
        family = results.sweep.backbones[score.spec.backbone].family
        setting, method = labels[score.spec]
        groups[setting, method, family].append(score)
        streams[setting, family].add(score.spec.stream)
    return Convention(
        name,
        {
            (setting, method, family): entry(group, results, len(streams[setting, family]))
            for (setting, method, family), group in groups.items()
        },
    )


def entry(scores: Sequence[Score], results: Results, streams: int) -> Entry:
    """Average seeds within a condition, conditions within a backbone, then backbones."""
    seeds, harms = defaultdict(list), defaultdict(list)
    conditions: dict[str, dict[Conditions, float]] = defaultdict(dict)
    harmed: dict[str, list[float]] = defaultdict(list)
    worst: dict[str, float] = defaultdict(float)
    for score in scores:
        title = results.title(score.spec)
        seeds[title, score.spec.conditions].append(score.accuracy)
        harms[title, score.spec.conditions].append(score.harm)
        worst[title] = max(worst[title], -score.gain)
    for (title, condition), accuracies in seeds.items():
        conditions[title][condition] = fmean(accuracies)
        harmed[title].append(fmean(harms[title, condition]))
    backbones = {title: fmean(group.values()) for title, group in conditions.items()}
    values = list(backbones.values())
    found = mean_of_means([list(group.values()) for group in conditions.values()])
    return Entry(
        mean=replace(found, cells=len(scores)),
        sd=stdev(values) if len(values) > 1 else None,
        backbones=backbones,
        inert=all(score.inert for score in scores),
        conditions=dict(conditions),
        worst=dict(worst),
        harm=fmean(map(fmean, harmed.values())),
        whole=len(scores) == streams,
    )


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    found = measure(results)
    if found is None:
        return None
    first = found.conventions[0]
    sentences = tuple(
        sentence
        for setting in first.settings()
        for family in FAMILIES
        if (sentence := _ranked(first, setting, family)) is not None
    )
    drawn = first.comparable()
    plot = StudyFigure(
        "corruption",
        f"Mean over {averaged(drawn)}; bars: standard deviation across backbones. Methods "
        "with all cells of their family.",
        "Accuracy by method, data and normalisation family. " + " ".join(sentences),
        1.2 + 0.3 * len({method for _, method, _ in drawn.entries}),
        lambda figure, ink: draw(figure, drawn, ink),
    )
    plots = (plot,) if drawn.entries else ()
    return Section("corruption", TITLE, sentences, HOW, all_tables(found), plots)


def _ranked(convention: Convention, setting: str, family: str) -> str | None:
    """Name the best of the methods with the same cells."""
    group = {m: e for (p, m, f), e in convention.entries.items() if (p, f) == (setting, family)}
    if not group:
        return None
    whole = {method: entry.mean.value for method, entry in group.items() if entry.whole}
    others = f" {note}" if (note := unequal(group)) else ""
    if not whole:
        return f"On {setting}, {FAMILIES[family]}: no method ran on all cells."
    best = max(whole, key=lambda method: whole[method])
    return (
        f"On {setting}, {FAMILIES[family]}: {best} is best with {100 * whole[best]:.1f} %.{others}"
    )


def all_tables(found: Corruption) -> tuple[Table, ...]:
    """Tables by convention and data, then differences, then single backbones."""
    tables = [
        _table(convention, setting, found.papers[setting])
        for convention in found.conventions
        for setting in convention.settings()
    ]
    first, *others = found.conventions
    apart = _difference_table(first, found.papers)
    nothing = dict.fromkeys(found.papers)  # the paper only has the first convention
    more = [_difference_table(convention, nothing) for convention in others]
    return (*tables, apart, *more, *(_detail(convention) for convention in found.conventions))


def _table(convention: Convention, setting: str, paper: str | None) -> Table:
    """Methods by family, with the paper's figures under its convention."""
    entries = {(m, f): e for (p, m, f), e in convention.entries.items() if p == setting}
    families = [family for family in FAMILIES if any(f == family for _, f in entries)]
    columns, rows = "method", []
    with_paper = convention.name == ALL
    for title in map(FAMILIES.__getitem__, families):
        columns += f" | {title}:.2f | {title} s.d.:.2f | {title} 95 %:.2f | {title} cells:d"
        columns += f" | {title} paper:.1f | {title} paper s.d.:.2f" if with_paper else ""
    for method in dict.fromkeys(method for method, _ in entries):
        row: list[Value] = [method]
        for family in families:
            row += _cells(entries.get((method, family)))
            if with_paper:
                row += printed("corruption", str(paper), family, method) or [None, None]
        rows.append(tuple(row))
    inert = [f"{method} on {FAMILIES[f]}" for (method, f), e in entries.items() if e.inert]
    note = f" Inert: {', '.join(inert)}." if inert else ""
    for family in families:
        few = unequal({method: e for (method, f), e in entries.items() if f == family})
        note += f" {FAMILIES[family]}: {few}" if few else ""
    source = f" Paper: {printed('corruption', 'where')}, nineteen corruptions at five severities."
    note += source if with_paper else ""
    counts = ", ".join(f"{FAMILIES[f]} {_backbones(entries, f)}" for f in families)
    return Table.of(
        f"corruption-{convention.name}-{as_filename(setting)}",
        f"{setting}: top-1 accuracy in percent over {averaged(convention, setting)}; s.d. across "
        f"backbones ({counts}).{note}",
        columns,
        rows,
    )


def averaged(convention: Convention, setting: str | None = None) -> str:
    """Say what is averaged over, for one setting or all."""
    entries = [e for (p, _, _), e in convention.entries.items() if setting in (None, p)]
    pairs = {  # single pairs, of which a continual stream has many
        frozenset((pair,) for conditions in group for pair in conditions)
        for entry in entries
        for group in entry.conditions.values()
    }
    alike = len(pairs) == 1
    shared = next(iter(pairs)) if alike else frozenset()
    if convention.name == FIFTEEN:
        if shared == PUBLISHED:
            return "the fifteen reported corruptions at severity 5, as in most published tables"
        some = str(len(shared)) if alike else "varying subsets"
        return f"{some} of the fifteen reported corruptions at severity 5"
    if shared == PAPER:
        return "all nineteen corruptions at five severities, as in the paper"
    if alike:
        return f"{len(shared)} of the paper's 95 pairs of corruption and severity"
    return "varying pairs of corruption and severity"


def unequal(entries: Mapping[str, Entry]) -> str:
    """Name the methods of a family with fewer cells than others; empty if none."""
    few = [f"{method} ({cells(e.mean.cells)})" for method, e in entries.items() if not e.whole]
    return f"Not compared because of fewer cells: {', '.join(few)}." if few else ""


def _cells(group: Entry | None) -> list[Value]:
    if group is None:
        return [None, None, None, None]
    value, interval = shown(group.mean)
    return [value, points(group.sd), interval, group.mean.cells]


def _backbones(entries: dict[tuple[str, str], Entry], family: str) -> str:
    titles = dict.fromkeys(t for (_, f), e in entries.items() if f == family for t in e.backbones)
    return "/".join(titles)


def _detail(convention: Convention) -> Table:
    rows: list[tuple[Value, ...]] = [
        (
            *(setting, FAMILIES[family], backbone, method, points(accuracy)),
            None if method == FROZEN else points(group.worst[backbone]),
            len(group.conditions[backbone]),
        )
        for (setting, method, family), group in convention.entries.items()
        for backbone, accuracy in group.backbones.items()
    ]
    return Table.of(
        f"corruption-{convention.name}-backbones",
        f"Single backbones, over {averaged(convention)}. Worst loss: largest loss of any stream of "
        "any seed to the frozen model, in points.",
        "data | family | backbone | method | top-1:.2f | worst loss:.2f | conditions:d",
        sorted(rows, key=lambda row: [str(value) for value in row[:3]]),
    )


def difference(one: Entry, other: Entry) -> Mean:
    """Difference of two methods on the same cells, by condition, averaged like the accuracies."""
    return mean_of_means(
        [
            [accuracy - other.conditions[title][condition] for condition, accuracy in group.items()]
            for title, group in one.conditions.items()
        ]
    )


def _pairs(methods: list[str]) -> Iterator[tuple[str, str]]:
    """Pair all methods with the frozen head, and caster with the others.

    >>> list(_pairs(["frozen", "tent", "caster"]))
    [('tent', 'frozen'), ('caster', 'frozen'), ('caster', 'tent')]
    """
    if FROZEN in methods:
        yield from ((method, FROZEN) for method in methods if method != FROZEN)
    if GATED in methods:
        yield from ((GATED, method) for method in methods if method not in (GATED, FROZEN))


def _difference_table(convention: Convention, papers: Mapping[str, str | None]) -> Table:
    """Differences of the methods with all cells of their family."""
    rows: list[tuple[Value, ...]] = []
    groups = dict.fromkeys((setting, family) for setting, _, family in convention.entries)
    for setting, family in groups:
        group = {
            method: entry
            for (data, method, own), entry in convention.entries.items()
            if (data, own) == (setting, family) and entry.whole
        }
        for one, other in _pairs(list(group)):
            found = difference(group[one], group[other])
            paper = _paper_difference(str(papers[setting]), family, one, other)
            rows.append((setting, FAMILIES[family], one, other, *shown(found), paper))
    return Table.of(
        f"corruption-{convention.name}-differences",
        "Top-1 accuracy of a method minus that of another on the same cells, in points; averaged "
        "and bootstrapped like the accuracies.",
        "data | family | method | less | difference:+.2f | 95 %:+.2f | paper:+.1f",
        rows,
    )


def _paper_difference(setting: str, family: str, one: str, other: str) -> float | None:
    """The paper's difference of means."""
    means = [printed("corruption", setting, family, method) for method in (one, other)]
    return None if None in means else round(means[0][0] - means[1][0], 1)  # printed to a tenth


def draw(figure: Figure, found: Convention, ink: str) -> None:
    """Draw one panel per setting, with one dot per method and family."""
    settings = found.settings()
    methods = list(dict.fromkeys(method for _, method, _ in found.entries))
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        for shift, (family, (label, colour, marker)) in enumerate(STYLES.items()):
            group = {m: e for (p, m, f), e in found.entries.items() if (p, f) == (setting, family)}
            if not group:
                continue
            axes.errorbar(
                [100 * entry.mean.value for entry in group.values()],
                [methods.index(method) + 0.2 * (shift - 0.5) for method in group],
                xerr=[100 * (entry.sd or 0.0) for entry in group.values()],
                fmt=marker,
                color=colour,
                ms=6,
                elinewidth=1,
                label=label,
            )
        axes.set_title(setting, color=ink, fontsize=10)
        axes.set_xlabel("top-1 accuracy, %", color=ink)
        dress(axes, ink, "x")
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    shown = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), **legend(ink), ncols=2)
