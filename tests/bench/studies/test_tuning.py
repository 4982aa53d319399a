"""The choice of settings against arithmetic on the records' rows, and the committed sweep."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from caster import CasterError
from caster_bench.engine.cell_settings import check_settings
from caster_bench.studies import tuning
from caster_bench.studies.results import load
from caster_bench.sweeps import Spec, read
from caster_bench.sweeps.spec import SPARE
from tests.bench.studies.conftest import raw_records
from tests.support.consistent_records import Consistent, sweep_of

TEXT = """
name = "tuned"
backbones.r18 = {family = "batch", checkpoint = "r18.safetensors"}
data.cifar10 = {source = "cifar10:train", target = "cifar10:test"}

[[grid]]
study = "tuning"
corruptions = "spare"
severities = [3, 5]
batch_sizes = [16]
methods = ["tent", {method = "tent", lr = 0.1}, {method = "tent", lr = 0.2}, "sar",
           {method = "sar", lr = 0.3}]
"""


@dataclass(frozen=True)
class Ranked(Consistent):
    """Answers whose accuracy is that of the setting."""

    best: str = "tent (lr 0.2)"

    def skill(self, spec: Spec) -> float:
        return 0.9 if spec.label == self.best else 0.6


@pytest.fixture
def results(tmp_path):
    sweep = sweep_of(tmp_path, TEXT)
    out = Ranked(sweep).make(tmp_path / "run")
    found, problems = load(sweep, out, tmp_path)
    assert problems == []
    return found, raw_records(out)


def test_the_best_mean_is_chosen_for_every_method(results):
    found, raw = results
    means = defaultdict(list)
    for record in raw:
        label = Spec.of(record.spec).label
        means[record.method, label].append(record.accuracy)
    averages = {key: sum(values) / len(values) for key, values in means.items()}
    best = {
        method: max((v, label) for (m, label), v in averages.items() if m == method)[1]
        for method in ("tent", "sar")
    }
    trials = tuning.measure(found)
    assert {t.spec.method: t.spec.label for t in trials if t.chosen} == best
    assert best["tent"] == "tent (lr 0.2)"
    for trial in trials:
        expected = averages[trial.spec.method, trial.spec.label]
        assert trial.accuracy.value == pytest.approx(expected)
        assert trial.accuracy.cells == 8
        assert trial.published == ("lr" not in trial.spec.label)


def test_the_section_names_the_entry_to_use_and_unequal_budgets(results):
    section = tuning.section(results[0])
    rows = [dict(zip((c.title for c in section.tables[0].columns), row, strict=True))
            for row in section.tables[0].rows]  # fmt: skip
    chosen = {row["method"]: row["entry of a sweep"] for row in rows if row["chosen"]}
    assert chosen["tent"] == '{ method = "tent", lr = 0.2 }'
    assert "except for sar 2" in section.found[0] or "except for tent 3" in section.found[0]


def test_reported_corruptions_are_rejected(tmp_path):
    with pytest.raises(CasterError, match="settings are chosen on the spare corruptions only"):
        sweep_of(tmp_path, TEXT.replace('"spare"', '["fog"]'))


def test_the_committed_sweep_gives_every_method_the_same_budget():
    sweep = read(Path(__file__).parents[3] / "reproduction" / "sweeps" / "tuning.toml")
    check_settings(sweep)
    budgets: Counter[tuple[str, str]] = Counter()
    for spec in sweep.cells:
        ((corruption, severity),) = spec.conditions
        assert corruption in SPARE
        assert (severity, spec.batch_size) == (5, 200)
        budgets[spec.backbone, spec.method] += 1
    assert set(budgets.values()) == {5 * len(SPARE)}
    first = {}
    for spec in sweep.cells:
        first.setdefault((spec.backbone, spec.method), spec)
    for spec in first.values():  # a published setting comes first
        assert [name for name, _ in spec.settings] in ([], ["preset"])
