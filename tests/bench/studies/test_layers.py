"""The study of layer transport beside arithmetic of its own, on rows read without caster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import mean

import pytest

from caster_bench.records.store import read
from caster_bench.studies import layers, layers_streams
from caster_bench.studies import report as reporting
from caster_bench.studies.check_gates import MEASURED, Rows, stream_faults
from caster_bench.studies.naming import LAYERS, LAYERS_ALWAYS, MIXTURE, MIXTURE_ALWAYS
from caster_bench.studies.results import load
from caster_bench.sweeps import Spec
from tests.bench.studies.conftest import Raw, raw_records
from tests.support.altered_records import FAULTS, altered
from tests.support.consistent_records import Layered, sweep_of

pytestmark = pytest.mark.usefixtures("listed_figures")

EACH = '{method = "layer-transport", every = 1}'
OPEN = '{method = "layer-transport", gated = false, every = 1}'
TEXT = f"""
name = "layers"
title = "Layers"

[backbones]
r18 = {{family = "batch", checkpoint = "r18"}}
vit = {{family = "layer", checkpoint = "vit"}}

[data.cifar10]
source = "cifar10:train"
target = "cifar10:test"
threshold = 0.5

[[grid]]
study = "layers"
corruptions = ["fog", "snow", "saturate"]
severities = [1, 5]
batch_sizes = [16]
methods = ["frozen", "tent", "sar", "layer-transport", "layer-transport-ungated"]

[[grid]]
study = "layers"
corruptions = ["clean", "fog", "snow"]
severities = [5]
batch_sizes = [8, 16]
orders = ["shuffled", "by-class"]
methods = ["frozen", "layer-transport", "layer-transport-ungated", {EACH}, {OPEN}]

[[grid]]
study = "layers"
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
schedule = "continual"
methods = ["layer-transport", "layer-transport-ungated", {EACH}, {OPEN}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    sweep = sweep_of(folder, TEXT)
    return sweep, Layered(sweep).make(folder / "run")


@pytest.fixture(scope="module")
def results(run):
    found, problems = load(*run)
    assert problems == []
    return found


@pytest.fixture(scope="module")
def streams(run) -> list[dict[str, Raw]]:
    """Every stream: its records by the label of their method."""
    found = defaultdict(dict)
    for record in raw_records(run[1]):
        found[record.stream][Spec.of(record.spec).label] = record
    return list(found.values())


ASKED = "layer-transport (every 1, gated False)"
TRIED = "layer-transport (every 1)"


def is_spare(record: Raw) -> bool:
    return any(name == "saturate" for name, _ in record.spec["conditions"])


def test_accuracy_and_the_lead_over_those_that_learn(results, streams):
    found = layers.measure_accuracy(results)
    compared = [met for met in streams if "tent" in met]
    assert len(compared) == 12
    wanted = {"all": lambda r: True, "fifteen": lambda r: r.condition in ("fog-5", "snow-5")}
    leads = {(lead.convention, lead.setting): lead for lead in found.leads}
    for convention in found.conventions:
        for backbone, family in (("r18", "batch"), ("vit", "layer")):
            held = [
                met
                for met in compared
                if met["tent"].backbone == backbone and wanted[convention.name](met["tent"])
            ]
            for method in ("frozen", "tent", "sar", LAYERS, LAYERS_ALWAYS):
                entry = convention.entries[f"{backbone} on CIFAR-10-C*", method, family]
                assert entry.mean.value == pytest.approx(mean(m[method].accuracy for m in held))
                assert entry.mean.cells == len(held)
            means = {m: mean(met[m].accuracy for met in held) for m in ("tent", "sar")}
            best = max(means, key=means.get)
            lead = leads[convention.name, f"{backbone} on CIFAR-10-C*"]
            assert (lead.best, lead.score) == (best, pytest.approx(means[best]))
            for own, method in ((lead.gated, LAYERS), (lead.always, LAYERS_ALWAYS)):
                differences = [m[method].accuracy - m[best].accuracy for m in held]
                assert own.value == pytest.approx(mean(differences))
                assert min(differences) <= own.interval.low <= own.interval.high


PRESETS = (
    TEXT.partition("[[grid]]")[0]
    + f"""
[[grid]]
study = "layers"
backbones = ["r18"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
methods = ["frozen", "tent", {{method = "tent", lr = 0.1}}, "{LAYERS}", "{LAYERS_ALWAYS}"]

[[grid]]
study = "layers"
backbones = ["vit"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
methods = [
    "frozen",
    {{method = "tent", preset = "layer-norm"}},
    "sar",
    "{LAYERS_ALWAYS}",
    "{MIXTURE}",
]
"""
)


def test_the_lead_where_a_method_has_several_settings_on_another_backbone(tmp_path):
    """Its settings are named on both; and an ungated form alone has no lead."""
    sweep = sweep_of(tmp_path, PRESETS)
    found, problems = load(sweep, Layered(sweep).make(tmp_path / "run"))
    assert problems == []
    accuracies = defaultdict(list)
    for record in raw_records(tmp_path / "run"):
        accuracies[record.backbone, Spec.of(record.spec).label].append(record.accuracy)
    leads = layers.measure_accuracy(found).leads
    for lead, backbone, method, learning in zip(
        leads,
        ("r18", "vit"),
        (LAYERS, MIXTURE),
        (("tent", "tent (lr 0.1)"), ("tent (preset layer-norm)", "sar")),
        strict=True,
    ):
        means = {label: mean(accuracies[backbone, label]) for label in learning}
        best = max(means, key=means.get)
        assert (lead.setting, lead.method) == (f"{backbone} on CIFAR-10-C*", method)
        assert (lead.best, lead.score) == (best, pytest.approx(means[best]))
        own = mean(accuracies[backbone, method])
        assert lead.gated.value == pytest.approx(own - means[best])
        assert (lead.always is None) == (method == MIXTURE)  # its ungated form did not run


def test_streams_by_order_and_batch_size(results, streams):
    found = layers_streams.measure_streams(results, LAYERS)
    pairs = [(m[LAYERS_ALWAYS], m[LAYERS]) for m in streams if LAYERS in m]
    rows = {(r.policies.backbone, r.policies.setting, r.size): r for r in found.rows}
    assert {kind for _, kind, _ in rows} == {
        *("shuffled", "by-class", "clean, shuffled", "clean, by-class", "spare, shuffled"),
        "shuffled, continual",
    }
    held = [
        (a, g)
        for a, g in pairs
        if g.backbone == "vit" and g.condition in ("fog-1", "fog-5", "snow-1", "snow-5")
        if (g.spec["order"], g.spec["batch_size"], g.spec["schedule"]) == ("shuffled", 16, "each")
    ]
    row = rows["vit on CIFAR-10", "shuffled", 16]
    assert row.policies.gated.cells == len(held) == 4
    assert row.policies.gated.value == pytest.approx(mean(g.accuracy for _, g in held))
    assert row.policies.always.value == pytest.approx(mean(a.accuracy for a, _ in held))
    accepted = [float(g.batches["accepted"].mean()) for _, g in held]
    assert row.policies.accept == pytest.approx(mean(accepted))
    assert row.worst == pytest.approx(min(g.gain for _, g in held))
    whole = sum(a.gain for a, _ in held)
    assert row.kept == (pytest.approx(sum(g.gain for _, g in held) / whole) if whole > 0 else None)
    assert rows["vit on CIFAR-10", "by-class", 16].kept is None
    together = {each.setting: each for each in found.wholes}
    assert list(together) == ["r18 on CIFAR-10", "vit on CIFAR-10", "all"]
    counted = [(a, g) for a, g in pairs if not is_spare(g)]
    assert together["all"].streams == len(counted) == len(pairs) - 4
    assert together["all"].gated.value == pytest.approx(mean(g.gain for _, g in counted))
    assert together["all"].worst == pytest.approx(min(g.gain for _, g in counted))
    assert together["all"].worst_always == pytest.approx(min(a.gain for a, _ in counted))


def gated_cell(sweep, maker) -> Spec:
    """One beside an open one, that accepts some batches and refuses others."""
    compared = {s.stream for s in sweep.cells if "gated" in s.given}
    return next(
        s
        for s in sweep.cells
        if s.label == TRIED
        and s.stream in compared
        and 0 < maker.columns(s)[1]["accepted"].sum() < len(maker.columns(s)[1]["size"])
    )


@pytest.mark.parametrize(("change", "kinds"), FAULTS)
def test_a_gate_that_does_not_follow_from_its_update_is_a_problem(run, tmp_path, change, kinds):
    sweep, out = run
    maker = Layered(sweep)
    spec = gated_cell(sweep, maker)
    copy = altered(out, tmp_path, maker, spec, change)
    found, problems = load(sweep, copy)
    assert found is None
    assert {problem.kind for problem in problems} == kinds
    assert {problem.where for problem in problems} == {spec.full}


@pytest.mark.parametrize(
    ("setting", "value", "compared"),
    [("tau", 2.0, True), ("every", 4, True), ("window", 64, False), ("prior", 0.0, False)],
)
def test_ratios_are_compared_between_the_same_updates_alone(run, setting, value, compared):
    _, out = run
    kept = (read(folder) for folder in (out / "cells").iterdir())
    by_label = {record.spec.label: record for record in kept if record.spec.schedule == "continual"}
    opened, asked = by_label[ASKED], by_label[TRIED]
    changed = asked.cell.identity["settings"] | {setting: value}
    cell = replace(asked.cell, identity=asked.cell.identity | {"settings": changed})
    batches = replace(asked.batches, ratio=asked.batches.ratio / 2)
    rows = [
        Rows(opened.spec, opened.cell, opened.samples, opened.batches),
        Rows(asked.spec, cell, asked.samples, batches),
    ]
    assert (MEASURED in {kind for _, kind in stream_faults(rows)}) is compared


def test_the_report_has_it_all(results, tmp_path):
    section = layers.section(results)
    assert [table.name for table in section.tables] == [
        *("layers-accuracy", "layers-lead", "layers-streams", "layers-kept"),
    ]
    (made,) = reporting.write_report(results, tmp_path / "report")
    assert made.name == "layers"
    for table in section.tables:
        for ending in ("md", "tex", "csv"):
            assert (tmp_path / "report" / "tables" / f"{table.name}.{ending}").stat().st_size
    figures = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    for name in ("layers-accuracy", "layers-streams"):
        assert {f"{name}.pdf", f"{name}.svg", f"{name}.png"} <= figures


@pytest.mark.parametrize("kept", [0, 1])
def test_a_sweep_with_a_part_has_that_part(tmp_path, kept):
    """Comparison alone, and streams alone."""
    head, *grids = TEXT.split("[[grid]]")
    sweep = sweep_of(tmp_path, f"{head}[[grid]]{grids[kept]}")
    found, problems = load(sweep, Layered(sweep).make(tmp_path / "run"))
    assert problems == []
    names = [table.name for table in layers.section(found).tables]
    accuracy, streams = ["layers-accuracy", "layers-lead"], ["layers-streams", "layers-kept"]
    assert names == {0: [*accuracy, *streams], 1: streams}[kept]


MIXTURES = (
    TEXT.partition("[[grid]]")[0]
    + f"""
[[grid]]
study = ["layers", "corruption"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
orders = ["shuffled", "runs", "turning"]
methods = ["frozen", "tent", "{LAYERS}", "{LAYERS_ALWAYS}", "{MIXTURE}", "{MIXTURE_ALWAYS}"]

[[grid]]
study = ["layers", "corruption"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
schedule = "continual"
rounds = 2
methods = ["frozen", "{MIXTURE}", "{MIXTURE_ALWAYS}"]

[[grid]]
study = "layers" # not of every stream of its kind
corruptions = ["fog"]
severities = [5]
batch_sizes = [16]
orders = ["runs"]
methods = ["sar"]
"""
)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    sweep = sweep_of(folder, MIXTURES)
    found, problems = load(sweep, Layered(sweep).make(folder / "run"))
    assert problems == []
    return found, [*raw_records(folder / "run")]


def test_all_methods_beside_mixture_transport(mixtures):
    results, records = mixtures
    rows = {(r.setting, r.kind, r.method): r for r in layers_streams.measure_methods(results)}
    six = ("frozen", "tent", LAYERS, LAYERS_ALWAYS, MIXTURE, MIXTURE_ALWAYS)
    assert {key[1:] for key in rows} == {
        *((kind, method) for kind in ("shuffled", "runs", "turning") for method in six),
        *(("shuffled, recurring", method) for method in ("frozen", MIXTURE, MIXTURE_ALWAYS)),
    }
    for (setting, kind, method), row in rows.items():
        held = [
            record
            for record in records
            if f"{record.backbone} on CIFAR-10" == setting
            and layers_streams.kind_of(Spec.of(record.spec)) == kind
            and not record.spec["settings"]
        ]
        own = [record for record in held if record.spec["method"] == method]
        assert row.accuracy.cells == len(own) == (1 if kind.endswith("recurring") else 2)
        assert row.accuracy.value == pytest.approx(mean(r.accuracy for r in own))
        assert row.gain.value == pytest.approx(mean(r.gain for r in own))
        assert row.worst == pytest.approx(min(r.gain for r in own))
        accepted = [float(r.batches["accepted"].mean()) for r in own]
        assert row.accept == pytest.approx(mean(accepted))
        always = {LAYERS: LAYERS_ALWAYS, MIXTURE: MIXTURE_ALWAYS}.get(method)
        whole = sum(r.gain for r in held if r.spec["method"] == always)
        share = sum(r.gain for r in own) / whole if whole > 0 else None
        assert row.kept == (None if share is None else pytest.approx(share))
    assert any(row.kept is not None for row in rows.values())


def test_each_method_has_its_own_tables(mixtures):
    results, _ = mixtures
    found = layers_streams.measure_streams(results, MIXTURE)
    assert {row.policies.setting for row in found.rows} == {
        *("shuffled", "runs", "turning", "shuffled, recurring"),
    }
    section = layers.section(results)
    assert [table.name for table in section.tables] == [
        *("layers-accuracy", "layers-lead", "mixture-lead", "layers-methods"),
        *("layers-streams", "layers-kept", "mixture-streams", "mixture-kept"),
    ]
    assert any("mixture transport is" in sentence for sentence in section.found)
    leads = layers.measure_accuracy(results).leads
    assert {lead.method for lead in leads} == {LAYERS, MIXTURE}


def test_the_report_has_the_corruptions_by_stream(mixtures, tmp_path):
    """Reset at every corruption or going on, over the same fifteen at severity 5."""
    results, _ = mixtures
    reporting.write_report(results, tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text()
    for kind in ("runs", "shuffled", "shuffled, recurring"):
        assert f"CIFAR-10-C\\*, {kind}, batches of 16" in page
