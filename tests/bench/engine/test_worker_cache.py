"""What a worker reuses between groups of cells, guarded weights, prefetched images."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info
from torch import nn

import caster
from caster.errors import CasterError
from caster.models.torch import digest_of
from caster_bench.engine import executors
from caster_bench.engine import worker_cache as workers
from caster_bench.engine.cell import run_group
from caster_bench.engine.executors import Task, perform
from caster_bench.engine.plan import groups_of
from caster_bench.engine.run import run
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.worker_cache import WeightGuard
from caster_bench.methods.gates import Gated
from caster_bench.methods.protocol import inert_prediction
from caster_bench.methods.registry import create
from caster_bench.records.store import read, scan
from tests.support.inline import LAYERNORM, SMALL, Inline, run_inline, sweep_of

CONTRAST, FOG = (("contrast", 3),), (("fog", 3),)


def admitted(folder, checkpoints, text):
    """The cache of a run whose only backbone is admitted, and the groups to run."""
    sweep = sweep_of(folder, text)
    context = RunContext.of(sweep, folder / "out", checkpoints)
    groups = list(groups_of(list(sweep.cells)))
    perform(context, Task("admit", groups[0][:1]))
    return workers.worker_cache(context), groups


class Vandal:
    """A method that changes the frozen model."""

    def __init__(self, method, model):
        self.method, self.model = method, model

    def __getattr__(self, name):
        return getattr(self.method, name)

    def predict(self, images):
        with torch.no_grad():
            next(self.model.module.parameters()).add_(1e-3)
        return self.method.predict(images)


def test_a_method_that_changes_the_frozen_model_has_no_record(tmp_path, checkpoints, monkeypatch):
    text = SMALL.replace('"frozen", "caster", "tent"', '"frozen", "tent", "caster"')
    cache, (clean, contrast) = admitted(tmp_path, checkpoints, text)

    def make(name, model, source, **settings):
        method = create(name, model, source, **settings)
        return Vandal(method, model) if name == "tent" else method

    monkeypatch.setattr(workers, "create", make)
    done = run_group(cache, clean)
    assert [spec.method for spec, _ in done.failures] == ["tent", "caster"]
    assert all("was changed while it was in use" in why for _, why in done.failures)
    monkeypatch.undo()
    assert run_group(cache, contrast).failures == []
    digests = {
        read(folder).cell.frozen[when]
        for folder in scan(tmp_path / "out").cells
        for when in ("before", "after")
    }
    assert len(digests) == 1


INERT = LAYERNORM.replace('"frozen", "caster", "tent"', '"frozen", "tent", "eata"')


def counted(cache, spec):
    """Sizes of the batches that the module of a cell's backbone gets from now on."""
    module = cache.backbone(spec, cache.admission(spec)).model.module
    sizes = []
    module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    return sizes


def test_inert_methods_share_the_frozen_pass_after_their_first_batch(tmp_path, checkpoints):
    cache, (clean, _) = admitted(tmp_path, checkpoints, INERT)
    sizes = counted(cache, clean[0])
    assert run_group(cache, clean).failures == []
    assert sizes == [32, 32, 32, *[32] * 2]  # the frozen pass, then Tent and EATA
    for record in map(read, scan(tmp_path / "out").cells):
        assert record.cell.method["inert"] == (record.spec.method != "frozen")
        expected = "inert" if record.cell.method["inert"] else "frozen"
        assert set(record.batches.reason) == {expected}
        assert not record.batches.accepted.any()
        np.testing.assert_array_equal(record.samples.prediction, record.samples.frozen)


class Claiming:
    """Says that it is inert, and changes the answer."""

    name, inert = "claiming", True

    def __init__(self, frozen, changes):
        self.frozen, self.changes = frozen, changes

    def predict(self, images):
        answer = inert_prediction(self.frozen, images)
        return replace(answer, **{name: change(answer) for name, change in self.changes.items()})

    def reset(self):
        pass

    def retained(self):
        return self.frozen.retained()


class ClaimingByMistake(Claiming):
    def inert(self):  # without @property
        return True


def make_claim(monkeypatch, kind, **changes):
    """Use such a method for Tent, with the gate that it has."""

    def make(name, model, source, **settings):
        method = create(name, model, source, **settings)
        if not name.startswith("tent"):
            return method
        claiming = kind(method.frozen, changes)
        return Gated(claiming, method.gate) if isinstance(method, Gated) else claiming

    monkeypatch.setattr(workers, "create", make)


@pytest.mark.parametrize("name", ["tent", "tent+certificate", "tent+referee"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logits": lambda answer: answer.logits.nextafter(torch.tensor(9.0))}, "logits differ"),
        ({"accepted": lambda answer: True}, "accepted is True"),
        ({"reason": lambda answer: "ungated"}, "reason is 'ungated'"),
    ],
)
def test_a_method_that_is_not_inert_as_it_says_has_no_record(
    tmp_path, checkpoints, monkeypatch, changes, why, name
):
    cache, (clean, _) = admitted(tmp_path, checkpoints, INERT.replace('"tent"', f'"{name}"'))
    make_claim(monkeypatch, Claiming, **changes)
    ((spec, message),) = run_group(cache, clean).failures
    assert spec.method == name
    assert "claiming says that it is inert, but does not answer as the frozen model" in message
    assert why in message
    done = {read(folder).spec.method for folder in scan(tmp_path / "out").cells}
    assert done == {"frozen", "eata"}


@pytest.mark.parametrize("claims", ["truly", "falsely"])
def test_an_inert_method_behind_a_gate_is_checked_in_timed_cells_too(
    tmp_path, checkpoints, monkeypatch, claims
):
    """Its gate answers for it, so only the check ever asks it."""
    text = INERT.replace('"tent", "eata"', '"tent+certificate"') + "alone = true\n"
    cache, groups = admitted(tmp_path, checkpoints, text)
    changes = {} if claims == "truly" else {"logits": lambda answer: answer.logits + 1}
    make_claim(monkeypatch, Claiming, **changes)
    failed = [spec.method for group in groups for spec, _ in run_group(cache, group).failures]
    assert failed == ([] if claims == "truly" else ["tent+certificate"] * 2)


def test_an_inert_that_is_no_property_is_no_claim(tmp_path, checkpoints, monkeypatch):
    """The method answers every batch itself."""
    cache, (clean, _) = admitted(tmp_path, checkpoints, INERT)
    make_claim(monkeypatch, ClaimingByMistake, reason=lambda answer: "ungated")
    sizes = counted(cache, clean[0])
    assert run_group(cache, clean).failures == []
    assert sizes == [32] * (3 + 3 + 1)
    by_name = {record.spec.method: record for record in map(read, scan(tmp_path / "out").cells)}
    assert not by_name["tent"].cell.method["inert"]
    assert set(by_name["tent"].batches.reason) == {"ungated"}


def test_methods_that_read_the_source_are_reused_while_groups_need_them(tmp_path, checkpoints):
    text = SMALL.replace('"frozen", "caster", "tent"', '"tent", "knn"')
    text += SMALL[SMALL.index("[[grid]]") :].replace('"clean", "contrast"', '"fog"')
    cache, groups = admitted(tmp_path, checkpoints, text)
    clean, contrast, fog = groups
    first = run_group(cache, clean)
    ((name, _),) = cache._methods
    assert name == "knn"
    backbone = cache.backbone(clean[0], cache.admission(clean[0]))
    reads, reused = backbone.source_batches.reads, cache.method(clean[1], backbone)
    run_group(cache, contrast)
    assert backbone.source_batches.reads == reads
    assert cache.method(contrast[1], backbone) is reused
    assert cache.method(contrast[0], backbone) is not cache.method(contrast[0], backbone)
    run_group(cache, fog)
    assert cache._methods == {}
    assert 0 < first.passes < first.seconds


def test_on_a_gpu_methods_on_features_are_reused(tmp_path, checkpoints):
    cache, (clean, _) = admitted(tmp_path, checkpoints, SMALL)
    backbone = cache.backbone(clean[0], cache.admission(clean[0]))
    by_name = {spec.method: spec for spec in clean}

    def reused(name):
        return cache.method(by_name[name], backbone) is cache.method(by_name[name], backbone)

    assert not any(map(reused, by_name))  # no CUDA graphs on a CPU
    cache.context = replace(cache.context, device="cuda")
    assert {name for name in by_name if reused(name)} == {"frozen", "caster"}


def test_creating_a_method_counts_as_a_pass_only_if_it_reads_the_source(
    tmp_path, checkpoints, monkeypatch
):
    text = SMALL.replace('"frozen", "caster", "tent"', '"tent"')
    cache, (clean, contrast) = admitted(tmp_path, checkpoints, text)

    def slow(name, model, source, **settings):
        clock[0] += 1000.0
        if reading:
            next(iter(source.batches))
        return create(name, model, source, **settings)

    clock, reading = [0.0], False
    monkeypatch.setattr(workers, "create", slow)
    monkeypatch.setattr("caster_bench.engine.cell.perf_counter", lambda: clock[0])
    assert run_group(cache, clean).passes < 1000
    reading = True
    assert run_group(cache, contrast).passes >= 1000


def test_admissions_are_reported_before_the_first_cell(tmp_path, checkpoints):
    seen = []
    run_inline(sweep_of(tmp_path), tmp_path / "out", checkpoints, watch=seen.append)
    assert (seen[0].done, seen[0].total, seen[0].current) == (0, 6, ("admitting resnet on digits",))
    assert seen[0].left is None


def test_images_are_kept_until_every_study_is_complete(tmp_path, checkpoints):
    text = SMALL + SMALL[SMALL.index("[[grid]]") :].replace('"corruption"', '"gate"').replace(
        '"frozen", "caster", "tent"', '"frozen", "caster-ungated"'
    )
    sweep, out = sweep_of(tmp_path, text), tmp_path / "out"
    summary, _ = run_inline(sweep, out, checkpoints, only=["corruption"])
    assert summary.cells == 6
    assert any((out / "images").iterdir())
    summary, _ = run_inline(sweep, out, checkpoints)
    assert summary.cells == 8
    assert not (out / "images").exists()


class Helped(Inline):
    helpers = 1


def test_helpers_make_images_ahead_but_not_of_timed_cells(tmp_path, checkpoints):
    text = SMALL.replace('"clean", "contrast"', '"contrast", "fog"')
    text = text.replace('"frozen", "caster", "tent"', '"frozen"')
    sweep = sweep_of(tmp_path, text + text[text.index("[[grid]]") :] + "alone = true\n")
    context = RunContext.of(sweep, tmp_path / "out", checkpoints)
    executor = Helped(context)
    assert run(sweep, context, lambda: executor, lambda status: None).failures == []
    done = [(task.kind, task.specs[0].conditions) for task in executor.performed]
    assert done[1:3] == [("images", CONTRAST), ("group", FOG)]
    timed = [task.kind for task in executor.performed if task.specs[0].alone]
    assert timed == ["group"] * 2


def test_helpers_use_one_thread(tmp_path, checkpoints, monkeypatch):
    cache, (_, contrast) = admitted(tmp_path, checkpoints, SMALL)
    if workers._limits is not None:
        workers._limits.restore_original_limits()
    monkeypatch.setattr(workers, "_limits", None)
    seen = []
    monkeypatch.setattr(executors, "corrupted", lambda *_: seen.extend(threadpool_info()))
    perform(cache.context, Task("images", contrast))
    assert {pool["num_threads"] for pool in seen} == {1}


@pytest.fixture(autouse=True)
def no_cache_of_another_test():
    workers._cache = None


@pytest.mark.parametrize(("device", "within"), [("cpu", "highest"), ("cuda:0", "high")])
def test_tf32_is_for_passes_on_a_gpu(tmp_path, checkpoints, device, within):
    context = replace(
        RunContext.of(sweep_of(tmp_path, SMALL), tmp_path, checkpoints), device=device
    )
    with pytest.raises(RuntimeError), workers.tf32_matmul(context):
        assert torch.get_float32_matmul_precision() == within
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == "highest"


def guarded():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    net[1].running_mean[0] = torch.nan  # NaN equals NaN here
    net.to(memory_format=torch.channels_last)
    model = caster.wrap(net)
    return net, model, WeightGuard(model)


def test_a_guard_accepts_a_model_that_is_only_used():
    net, model, guard = guarded()
    before = digest_of(net)
    model(torch.zeros(2, 3, 8, 8))
    copy.deepcopy(net).train()(torch.ones(2, 3, 8, 8))
    guard.verify()
    assert guard.unchanged()
    assert guard.sha256 == before == digest_of(net)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].weight.data[0, 0, 0].add_(1e-6),
        lambda net: net[1].running_var.mul_(1.001),
        lambda net: net[1].num_batches_tracked.add_(1),
        lambda net: net[1].running_mean[1].neg_(),  # 0 to -0
        lambda net: setattr(net[1], "eps", 1e-3),
        lambda net: net[3].register_buffer("extra", torch.zeros(1)),
        lambda net: net.double(),
        lambda net: setattr(net[3], "extra", torch.nn.Parameter(torch.zeros(1))),
    ],
)
def test_a_guard_notices_every_change_that_the_digest_does(change):
    net, model, guard = guarded()
    change(net)
    assert digest_of(net) != guard.sha256
    assert not guard.unchanged()
    with pytest.raises(CasterError, match="was changed while it was in use"):
        model.verify()  # calls the guard


def test_a_model_without_a_module_verifies_itself():
    model = caster.wrap(lambda batch: (batch, batch), version="1")
    guard = WeightGuard(model)
    guard.verify()
    assert guard.unchanged()
    assert guard.sha256 == model.sha256
