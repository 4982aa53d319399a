"""Every contradiction between the columns of gates is found: one mutant for each check."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caster_bench.records.store import Record, read, write
from caster_bench.studies.check_gates import (
    ANSWERED,
    COUNT,
    MEASURED,
    NO_THRESHOLD,
    NOT_ITS_REASON,
    THRESHOLD,
    UNKNOWN,
    VERDICT,
    gate_faults,
)
from caster_bench.studies.check_rows import check_stream
from caster_bench.sweeps import Sweep
from tests.support.consistent_records import Layered, sweep_of
from tests.support.forge import Run, column

TEXT = """
name = "gates"
backbones.r18 = {family = "batch", checkpoint = "r18"}
data.digits = {source = "digits:train", target = "digits:test", threshold = 0.5}

[[grid]]
study = ["corruption", "layers"]
corruptions = ["fog"]
severities = [1]
batch_sizes = [20]
methods = [
    "frozen", "source-gda", "tent", "tent+certificate",
    {method = "tent+referee", gate = {agreement = 0.4}},
    "caster", {method = "caster", tau = 3.0}, "caster-ungated",
    {method = "caster-mixed-metric", tau = 8.0},
    "layer-transport", {method = "layer-transport", tau = 0.9, every = 1},
    {method = "layer-transport", gated = false}, "layer-transport-ungated",
]
"""
EACH, OPEN = "layer-transport (every 1, tau 0.9)", "layer-transport (gated False)"
MIXED, REFEREE = "caster-mixed-metric (tau 8.0)", "tent+referee (agreement 0.4)"
Change = Callable[[Record], Record]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Sweep, Path]:
    folder = tmp_path_factory.mktemp("made")
    sweep = sweep_of(folder, TEXT)
    return sweep, Layered(sweep, n=300, classes=4).make(folder / "out")


@pytest.fixture
def run(made, tmp_path) -> Run:
    sweep, out = made
    return Run(sweep, Path(shutil.copytree(out, tmp_path / "out")))


def folder_of(run: Run, label: str) -> Path:
    (found,) = (folder for spec, folder in run.folders.items() if spec.label == label)
    return found


def at(place: str, /, **values: Any) -> Change:
    """Change columns of the first batch with a reason."""

    def change(record: Record) -> Record:
        row = int(np.flatnonzero(record.batches.reason == place)[0])
        for name, value in values.items():
            record = column("batches", name, row, value)(record)
        return record

    return change


def everywhere(reason: str, name: str, change: Callable[[Any], Any]) -> Change:
    """Change a column of all batches with a reason."""
    return lambda record: column("batches", name, record.batches.reason == reason, change)(record)


def other_answers(reason: str, count: int = 1) -> Change:
    """Change predictions of the first batches with a reason."""

    def change(record: Record) -> Record:
        batch = np.flatnonzero(record.batches.reason == reason)[0]
        rows = np.flatnonzero(record.samples.batch == batch)[:count]
        return column("samples", "prediction", rows, lambda own: (own + 1) % 4)(record)

    return change


def test_the_records_are_good_and_have_every_kind_of_batch(run):
    assert run.kinds() == set()
    reasons = {spec.label: set(read(f).batches.reason) for spec, f in run.folders.items()}
    for label in ("caster", "tent+certificate"):
        assert {"accepted", "ratio", "min_samples", "min_classes"} <= reasons[label]
    assert reasons[REFEREE] == {"accepted", "disagreement"}
    assert reasons["layer-transport"] == {"accepted", "ratio", "rest"}
    assert reasons[EACH] == {"accepted", "ratio"}


@pytest.mark.parametrize(
    ("label", "change", "kind"),
    [
        ("caster", at("ratio", accepted=True), VERDICT),
        ("caster", at("accepted", accepted=False), VERDICT),
        ("caster-ungated", at("ungated", accepted=False), VERDICT),
        ("tent", at("ungated", reason="because"), UNKNOWN),
        ("caster", at("ratio", reason="Ratio"), UNKNOWN),
        # ratio and threshold
        ("caster", at("accepted", ratio=5.0), THRESHOLD),
        ("caster", at("ratio", ratio=0.5), THRESHOLD),
        ("caster", at("accepted", ratio=np.nan), THRESHOLD),
        ("caster", at("accepted", ratio=-0.5), THRESHOLD),
        ("caster (tau 3.0)", at("accepted", ratio=5.0), THRESHOLD),
        ("caster (tau 3.0)", at("ratio", ratio=2.0), THRESHOLD),
        (MIXED, at("ratio", ratio=0.5), THRESHOLD),
        ("tent+certificate", at("accepted", ratio=5.0), THRESHOLD),
        ("tent+certificate", at("accepted", reason="ratio", accepted=False), THRESHOLD),
        (REFEREE, at("accepted", ratio=0.9), THRESHOLD),
        (REFEREE, at("disagreement", ratio=0.1), THRESHOLD),
        (REFEREE, at("accepted", ratio=0.333), THRESHOLD),  # no share of 20 samples
        ("layer-transport", at("accepted", ratio=5.0), THRESHOLD),
        ("layer-transport", at("ratio", ratio=0.5), THRESHOLD),
        (EACH, at("accepted", ratio=0.95), THRESHOLD),
        # batches that rest
        ("layer-transport", at("rest", accepted=lambda own: not own), THRESHOLD),
        ("layer-transport", at("rest", ratio=0.5), THRESHOLD),
        ("layer-transport", column("batches", "reason", 0, "rest"), THRESHOLD),
        (EACH, at("accepted", reason="rest", ratio=np.nan), THRESHOLD),
        # counts
        ("caster", at("accepted", confident=21), COUNT),
        ("caster", at("accepted", confident_classes=5), COUNT),
        ("caster", at("accepted", confident_classes=0), COUNT),
        ("caster", at("accepted", confident=2, confident_classes=3), COUNT),
        ("caster", at("accepted", confident=-1, confident_classes=-1), COUNT),
        ("caster-ungated", at("ungated", confident=-1, confident_classes=-1), COUNT),
        ("tent+certificate", at("accepted", confident=21), COUNT),
        (REFEREE, at("accepted", confident=10, confident_classes=4), COUNT),
        (OPEN, at("ungated", confident=10, confident_classes=4), COUNT),
        # counts and reason
        ("caster", at("accepted", confident=7), THRESHOLD),
        ("caster", at("accepted", confident_classes=3), THRESHOLD),
        ("caster", at("min_samples", confident=12, confident_classes=4), THRESHOLD),
        ("caster", at("min_classes", confident_classes=4), THRESHOLD),
        ("caster", at("min_samples", reason="min_classes"), THRESHOLD),
        ("caster", at("ratio", reason="no_confident_class"), THRESHOLD),
        ("caster", at("ratio", reason="batch_too_small"), THRESHOLD),
        ("caster", at("ratio", reason="batch_too_small", ratio=np.inf), THRESHOLD),
        # reasons of other methods
        ("caster", at("ratio", reason="disagreement"), NOT_ITS_REASON),
        ("caster", at("accepted", reason="ungated"), NOT_ITS_REASON),
        ("caster-ungated", at("ungated", reason="accepted"), NOT_ITS_REASON),
        ("tent+certificate", at("accepted", reason="ungated"), NOT_ITS_REASON),
        ("tent", at("ungated", reason="inert", accepted=False), NOT_ITS_REASON),
        ("tent", at("ungated", reason="ratio", accepted=False), THRESHOLD),  # it has no ratio
        ("frozen", at("frozen", reason="inert"), NOT_ITS_REASON),
        (OPEN, at("ungated", reason="accepted"), NOT_ITS_REASON),
        ("layer-transport", at("ratio", reason="min_samples"), NOT_ITS_REASON),
        # beside the other cells of the stream
        ("caster", everywhere("accepted", "ratio", lambda own: own / 2), MEASURED),
        ("caster", at("min_samples", ratio=0.123), MEASURED),
        ("caster (tau 3.0)", everywhere("accepted", "ratio", lambda own: own / 2), MEASURED),
        ("caster-ungated", everywhere("ungated", "ratio", lambda own: own / 2), MEASURED),
        ("caster-ungated", at("ungated", confident=lambda own: own - 1), MEASURED),
        (MIXED, at("min_samples", confident=lambda own: own - 1), MEASURED),
        ("tent+certificate", everywhere("accepted", "ratio", lambda own: own / 2), MEASURED),
        ("tent+certificate", at("accepted", confident=20), MEASURED),
        (REFEREE, everywhere("disagreement", "ratio", lambda own: 1.0), MEASURED),
        (EACH, everywhere("accepted", "ratio", lambda own: own / 2), MEASURED),
        ("layer-transport", at("accepted", ratio=lambda own: own / 2), MEASURED),
        ("caster", other_answers("accepted"), ANSWERED),
        (MIXED, other_answers("accepted"), ANSWERED),
        (EACH, other_answers("accepted"), ANSWERED),
        (REFEREE, other_answers("accepted", count=20), ANSWERED),
    ],
)
def test_a_mutant(made, tmp_path, label, change, kind):
    """In its stream, changed and signed again."""
    sweep, out = made
    cells = []
    for spec, folder in Run(sweep, out).folders.items():
        record = read(folder)
        if spec.label == label:
            record = change(record)
            folder = write(tmp_path, record.cell, record.samples, record.batches)
        cells.append((spec, folder))
    found = check_stream(cells, sweep.constants)
    assert kind in {problem.kind for problem in found.problems}


def resettled(run: Run, method: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Other resolved settings in all cells of a method, everywhere they are stated."""
    for spec, folder in list(run.folders.items()):
        if spec.method == method:
            cell = read(folder).cell
            settings = change(cell.identity["settings"])
            run.forge(
                folder,
                lambda record, cell=cell, settings=settings: replace(
                    record,
                    cell=replace(
                        cell,
                        identity=cell.identity | {"settings": settings},
                        method=cell.method | {"settings": settings},
                    ),
                ),
            )


OTHER = "method settings differ from the sweep's"


@pytest.mark.parametrize(
    ("method", "settings", "kind"),
    [
        ("caster", {"tau": 5.0}, OTHER),
        ("caster-ungated", {"min_samples": 1}, OTHER),  # which the sweep leaves to the constants
        ("tent+certificate", {"gate": {"tau": 5.0}}, OTHER),
        ("tent+referee", {"gate": {"agreement": 0.1}}, OTHER),
        ("tent+referee", {"gate": {}}, NO_THRESHOLD),
        ("layer-transport", {"tau": 5.0}, OTHER),
        ("layer-transport", {"tau": None}, NO_THRESHOLD),
    ],
)
def test_thresholds_other_than_the_sweeps(run, method, settings, kind):
    resettled(run, method, lambda own: own | settings)
    assert kind in run.kinds()


def test_a_default_that_differs_between_cells(run):
    plain = folder_of(run, "layer-transport")
    run.folders = {spec: f for spec, f in run.folders.items() if f == plain}
    resettled(run, "layer-transport", lambda own: own | {"tau": 1.1})
    assert "the default of a setting differs between cells" in run.kinds()


@pytest.mark.parametrize("reason", ["accepted", "min_samples"])
def test_a_batch_that_could_not_be_tried_is_good(run, reason):
    """Of whatever reason: not measured, rejected, and the same in every cell of the transport."""
    untried = {"reason": "batch_too_small", "accepted": False, "ratio": np.inf}
    untried |= {"confident": 0, "confident_classes": 0}
    record = at(reason, **untried)(read(folder_of(run, "caster")))
    sizes = np.where(record.batches.reason == "batch_too_small", 1, record.batches.size)
    batches = replace(record.batches, size=sizes.astype(np.int32))
    assert list(gate_faults(record.cell, batches, record.spec, run.sweep.constants)) == []
