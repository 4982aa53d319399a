"""Settings chosen on the spare corruptions, with the same number of trials for every method."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass

from caster_bench.studies.naming import data_labels
from caster_bench.studies.results import Mean, Results, mean, shown
from caster_bench.studies.tables import Section, Table
from caster_bench.sweeps.spec import PRESET, Spec

TITLE = "Settings chosen on the spare corruptions"
HOW = (
    "Every method runs with a published setting (its default or a preset) and others on the same "
    "streams of the four spare corruptions. Tables of the fifteen others are unaffected; "
    "tables of all nineteen contain these four. The setting of the highest mean accuracy over "
    "these cells is chosen; of equal ones, a published one, then the first. Accuracy in percent, "
    "averaged over cells with equal weight; intervals are bootstrapped over cells."
)


@dataclass(frozen=True)
class Trial:
    """A method with one setting on a backbone and its data."""

    backbone: str
    data: str
    spec: Spec  # of one of its cells
    accuracy: Mean
    chosen: bool

    @property
    def published(self) -> bool:
        """Whether the setting is the default or a preset."""
        return not self.spec.settings or [name for name, _ in self.spec.settings] == [PRESET]


def measure(results: Results) -> list[Trial]:
    """Average every setting, and choose one for every backbone, data set and method."""
    scores = results.of("tuning")
    labels = data_labels((score.spec for score in scores), results.sweep)
    found: dict[tuple[str, str, str], dict[tuple[object, ...], list[float]]] = defaultdict(dict)
    specs: dict[tuple[object, ...], Spec] = {}
    for score in scores:
        spec = score.spec
        key = results.title(spec), labels[spec], spec.method
        found[key].setdefault(spec.settings, []).append(score.accuracy)
        specs[(*key, spec.settings)] = spec
    trials = []
    for key, by_settings in found.items():
        tried = [
            Trial(key[0], key[1], specs[(*key, settings)], mean(accuracies), chosen=False)
            for settings, accuracies in by_settings.items()
        ]
        best = max(tried, key=lambda trial: (trial.accuracy.value, trial.published))
        trials += [Trial(t.backbone, t.data, t.spec, t.accuracy, chosen=t is best) for t in tried]
    return trials


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    trials = measure(results)
    if not trials:
        return None
    budgets = Counter((t.backbone, t.data, t.spec.method) for t in trials)
    usual, _ = Counter(budgets.values()).most_common(1)[0]
    others = sorted({f"{key[2]} {count}" for key, count in budgets.items() if count != usual})
    exceptions = f", except for {', '.join(others)}" if others else ""
    moved = sum(t.chosen and not t.published for t in trials)
    sentences = (
        f"Every method has {usual} settings{exceptions}.",
        f"For {moved} of {len(budgets)} methods and backbones an unpublished setting is the best.",
    )
    table = Table.of(
        "tuning",
        "Accuracy in percent on the spare corruptions.",
        "backbone | data | method | cells:d | accuracy:.2f | accuracy, 95 %:.2f | published | "
        "chosen | entry of a sweep",
        (
            (
                *(t.backbone, t.data, t.spec.method, t.accuracy.cells, *shown(t.accuracy)),
                *(t.published, t.chosen, entry(t.spec)),
            )
            for t in trials
        ),
    )
    return Section("tuning", TITLE, sentences, HOW, (table,), ())


def entry(spec: Spec) -> str:
    """A method and its settings as an entry of a sweep's `methods`.

    >>> entry(Spec("r", "d", "sar", (("lr", 0.01),))), entry(Spec("r", "d", "sar"))
    ('{ method = "sar", lr = 0.01 }', '"sar"')
    """
    if not spec.settings:
        return json.dumps(spec.method)
    pairs = (("method", spec.method), *spec.settings)
    return f"{{ {', '.join(f'{name} = {json.dumps(value)}' for name, value in pairs)} }}"
