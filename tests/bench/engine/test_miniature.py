"""The miniature sweep's records: complete, sound, and equal to those without the engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from caster import state as states
from caster_bench import methods
from caster_bench.data import open_data
from caster_bench.data.corruptions import corrupt
from caster_bench.engine.cell import PeakMemory
from caster_bench.engine.train import checkpoint
from caster_bench.records.digest import content, key_of
from caster_bench.records.store import cells_of, read, scan
from caster_bench.studies.verify import verify
from caster_bench.sweeps import STUDIES, Spec
from tests.support.command_line import cli
from tests.support.miniature import SWEEP, caster

pytestmark = pytest.mark.slow  # runs the miniature


@pytest.fixture(scope="module")
def records(miniature):
    _, out = miniature
    found = [read(folder) for folder in scan(out).cells]
    return {record.spec: record for record in found}


def one(records, **wanted):
    chosen = [s for s in records if all(getattr(s, k) == v for k, v in wanted.items())]
    assert len(chosen) == 1, chosen
    return records[chosen[0]]


NOISE = {"backbone": "resnet", "data": "digits", "conditions": (("gaussian_noise", 5),)}


def test_every_cell_of_every_study_has_a_sound_record(miniature, records):
    sweep, out = miniature
    assert set(records) == set(sweep.cells)
    assert {study for studies in sweep.cells.values() for study in studies} == set(STUDIES)
    assert verify(sweep, out, out.parent) == []
    assert {folder.name for folder in scan(out).cells} == {
        key_of(record.cell.identity) for record in records.values()
    }


def test_a_second_run_has_nothing_to_do(miniature, checkpoints):
    sweep, out = miniature
    lines = (out / "runs.jsonl").read_text().splitlines()
    where = [str(SWEEP), "--out", str(out), "--root", str(checkpoints)]
    planned = cli("bench", "plan", *where).output
    assert f"{len(sweep.cells)} cells: {len(sweep.cells)} done, 0 rejected, 0 missing" in planned
    again = cli("bench", "run", *where, "--device", "cpu").output
    assert f"{len(sweep.cells)} cells done and 0 rejected" in again
    assert (out / "runs.jsonl").read_text().splitlines() == lines
    log = json.loads(lines[-1])
    assert log["passes"] <= log["busy"] <= log["workers"] * log["seconds"]
    assert log["engine"] == pytest.approx(1 - log["passes"] / log["busy"])
    assert "was models and methods" in (out / "output.txt").read_text()
    assert not (out / "images").exists()


def images_of(record):
    """The images of a cell, made without the engine."""
    data = open_data("digits:test")
    n = record.cell.identity["target"]["n"]
    # The same subset; the labels and the frozen model's predictions below confirm it.
    from caster_bench.data.streams import generator

    rows = np.sort(generator(0, "pictures", len(data)).permutation(len(data))[:n])
    images = np.stack([data.read(int(row)) for row in rows])
    labels = np.asarray(data.labels)[rows]
    for corruption, severity in record.spec.conditions:
        images = corrupt(images, corruption, severity, record.spec.seed)
    order = np.argsort(record.samples.batch, kind="stable")
    return images, labels, order


def model_of(checkpoints, record):
    return checkpoint.model_of(checkpoints / "checkpoints" / f"{record.spec.backbone}.safetensors")


def batches_of(model, images, record):
    """Batches by the record's rows; within a batch in order of index."""
    for batch in record.batches.batch:
        rows = record.samples.index[record.samples.batch == batch]
        yield rows, torch.from_numpy(model.preprocessing.batch(images[rows]))


def test_frozen_predictions_are_those_of_the_plain_module(checkpoints, records):
    record = one(records, **NOISE, method="frozen")
    images, labels, _ = images_of(record)
    np.testing.assert_array_equal(labels[record.samples.index], record.samples.label)
    model = model_of(checkpoints, record)
    with torch.inference_mode():
        logits = model.module(torch.from_numpy(model.preprocessing.batch(images)))
    own = logits.argmax(1).numpy()[record.samples.index]
    np.testing.assert_array_equal(own, record.samples.frozen)
    np.testing.assert_array_equal(own, record.samples.prediction)


@pytest.mark.parametrize("name", ["caster", "caster-ungated", "tent"])
def test_predictions_are_those_of_the_method_without_the_engine(
    miniature, checkpoints, records, name
):
    _, out = miniature
    record = one(records, **NOISE, method=name)
    images, _, _ = images_of(record)
    model = model_of(checkpoints, record)
    state = states.load(out / "sources" / "resnet--digits.caster")
    method = methods.create(name, model, state)
    for batch, (rows, given) in enumerate(batches_of(model, images, record)):
        prediction = method.predict(given)
        found = record.samples.prediction[record.samples.batch == batch]
        differ = np.asarray(prediction.logits.argmax(1)) != found
        assert differ.mean() < 0.05, rows  # the batch's order is another, and so are its sums
        assert bool(record.batches.accepted[batch]) == prediction.accepted
        if name == "tent":
            assert np.isnan(record.batches.ratio[batch])
            assert record.batches.confident[batch] == -1
            continue
        assert record.batches.ratio[batch] == pytest.approx(prediction.ratio, rel=1e-3)
        assert record.batches.confident[batch] == prediction.verdict.confident
        assert record.batches.confident_classes[batch] == prediction.verdict.classes


def test_the_ungated_transport_records_what_any_gate_needs(records):
    gated, ungated = (one(records, **NOISE, method=m) for m in ("caster", "caster-ungated"))
    np.testing.assert_array_equal(gated.batches.ratio, ungated.batches.ratio)
    np.testing.assert_array_equal(gated.batches.confident, ungated.batches.confident)
    rejected = ~gated.batches.accepted[gated.samples.batch]
    kept = gated.samples.frozen
    expected = np.where(rejected, kept, ungated.samples.prediction)
    np.testing.assert_array_equal(gated.samples.prediction, expected)
    behind = one(records, **NOISE, method="tent+certificate")
    np.testing.assert_array_equal(behind.batches.confident, gated.batches.confident)


LAYERS = "layer-transport"


def test_layer_transport_without_a_gate_records_what_its_gate_would_decide(records):
    """Gated afterwards, it equals the gated method that tries every batch."""
    each = (("every", 1),)
    gated = {s.stream: r for s, r in records.items() if (s.method, s.settings) == (LAYERS, each)}
    opens = [r for s, r in records.items() if s.method == LAYERS and "gated" in s.given]
    assert {record.spec.order for record in opens} == {"shuffled", "by-class", "dirichlet"}
    verdicts = []
    for record in opens:
        other = gated[record.spec.stream]
        settings = other.cell.method["settings"]
        assert (settings["tau"], settings["every"]) == (1.0, 1)
        assert record.batches.accepted.all()
        np.testing.assert_array_equal(record.batches.ratio, other.batches.ratio)
        taken = record.batches.ratio <= settings["tau"]
        np.testing.assert_array_equal(taken, other.batches.accepted)
        rows = taken[record.samples.batch]
        answers = np.where(rows, record.samples.prediction, record.samples.frozen)
        np.testing.assert_array_equal(answers, other.samples.prediction)
        verdicts.extend(other.batches.reason)
    assert {*verdicts} == {"accepted", "ratio"}


def test_layer_transport_without_a_gate_is_the_ungated_method(records):
    shuffled = {"backbone": "resnet", "order": "shuffled", "conditions": (("contrast", 5),)}
    others = ({"backbone": "convnext", "order": order} for order in ("by-class", "dirichlet"))
    for kind in (shuffled, *others):
        wanted = {**kind, "data": "digits", "batch_size": 64 if kind is shuffled else 16}
        record = one(records, **wanted, method=LAYERS, settings=(("every", 1), ("gated", False)))
        other = one(records, **wanted, method=f"{LAYERS}-ungated", settings=())
        np.testing.assert_array_equal(record.samples.prediction, other.samples.prediction)
        assert (record.samples.prediction != record.samples.frozen).any()


def test_mixture_transport_meets_runs_and_returning_corruptions(records):
    own = {s: r for s, r in records.items() if s.method.startswith("mixture-transport")}
    assert {(s.order, s.schedule_name) for s in own} == {
        *(("shuffled", "each"), ("runs", "each"), ("shuffled", "recurring")),
    }
    for spec, record in own.items():
        assert not record.cell.method["inert"]
        assert len(record.samples.index) == 128 * len(spec.conditions)
        if spec.method.endswith("ungated"):
            assert (record.samples.prediction != record.samples.frozen).any()


@pytest.mark.parametrize(
    ("order", "size", "settings", "rests"),
    [("by-class", 16, {}, False), ("shuffled", 64, {"window": 64}, True)],
)
def test_predictions_of_layer_transport_are_those_without_the_engine(
    miniature, checkpoints, records, order, size, settings, rests
):
    _, out = miniature
    record = one(
        records,
        **{"backbone": "convnext", "data": "digits", "conditions": (("contrast", 5),)},
        **{"method": LAYERS, "order": order, "batch_size": size},
        settings=tuple(settings.items()),
    )
    assert ("rest" in record.batches.reason) == rests
    images, _, _ = images_of(record)
    model = model_of(checkpoints, record)
    state = out / "sources" / "convnext--digits.caster"
    method = methods.create(LAYERS, model, state, **settings)
    for batch, (_, given) in enumerate(batches_of(model, images, record)):
        prediction = method.predict(given)
        found = record.samples.prediction[record.samples.batch == batch]
        assert (
            np.asarray(prediction.logits.argmax(1)) != found
        ).mean() < 0.1  # sums in another order
        ratio = np.nan if prediction.reason == "rest" else prediction.ratio
        assert record.batches.ratio[batch] == pytest.approx(ratio, rel=1e-3, nan_ok=True)
        assert record.batches.reason[batch] == prediction.reason
        assert bool(record.batches.accepted[batch]) == prediction.accepted


def test_a_model_without_a_head_makes_no_predictions(records):
    record = one(records, backbone="resnet", data="features", method="knn")
    assert set(record.samples.frozen) == {-1}
    assert record.cell.admission["accuracy"] is None
    assert record.cell.method["retained"]["features"] > 400 * 64 * 4 - 1


def test_settings_inertness_and_times_are_recorded(records):
    tent = one(
        records, backbone="convnext", data="digits", method="tent", conditions=NOISE["conditions"]
    )
    assert tent.cell.method["inert"]
    assert not tent.batches.accepted.any()
    np.testing.assert_array_equal(tent.samples.prediction, tent.samples.frozen)
    referee = one(records, **NOISE, method="tent+referee")
    assert referee.cell.method["settings"]["gate"] == {"agreement": 0.8}
    assert referee.cell.method["gradients"]
    alone = one(records, backbone="resnet", data="digits", alone=True, method="tent")
    assert (alone.cell.memory["peak"] is None) == (PeakMemory("cpu").mib() is None)
    assert np.all(alone.batches.seconds > 0)
    frozen = one(records, **NOISE, method="frozen")
    shared = one(records, **NOISE, method="source-gda")
    assert frozen.cell.frozen["before"] == shared.cell.frozen["after"]


@pytest.mark.whole
def test_ray_makes_the_same_records(miniature, checkpoints, records, tmp_path):
    caster(
        *("run", SWEEP, "--out", tmp_path / "ray", "--root", checkpoints, "--only", "coverage"),
        *("--workers", 2, "--executor", "ray", "--device", "cpu"),
    )
    found = {folder.name: read(folder) for folder in scan(tmp_path / "ray").cells}
    assert {record.spec for record in found.values()} == set(miniature[0].of("coverage"))
    for record in found.values():
        mine = records[record.spec]
        assert content(mine.cell, mine.samples, mine.batches) == content(
            record.cell, record.samples, record.batches
        )


def test_keys_depend_on_everything_that_determines_a_cell(miniature, records):
    _, out = miniature
    spec, record = next(iter(records.items()))
    identity = record.cell.identity
    assert Spec.of(identity["spec"]) == spec
    for part in ("constants", "checkpoint", "moments", "source", "target", "classes"):
        changed = identity | {part: None}
        assert not (cells_of(out) / key_of(changed)).exists()
