"""What a process keeps between groups of cells, and what a run tells and deletes around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from threadpoolctl import threadpool_info

from caster_bench.engine import tasks
from caster_bench.engine import worker_cache as desks
from caster_bench.engine.cell import run_group
from caster_bench.engine.executors import Task
from caster_bench.engine.plan import groups_of
from caster_bench.engine.run import run
from caster_bench.engine.run_context import RunContext
from caster_bench.methods.registry import create
from caster_bench.records import read, scan
from tests.support.inline import SMALL, Inline, run_inline, sweep_of

CONTRAST, FOG = (("contrast", 3),), (("fog", 3),)


def admitted(folder, checkpoints, text):
    """A cache at a place whose only backbone is admitted, and the groups to be run there."""
    sweep = sweep_of(folder, text)
    context = RunContext.of(sweep, folder / "out", checkpoints)
    groups = list(groups_of(list(sweep.cells)))
    tasks.admit(context, Task("admit", groups[0][:1]))
    return desks.desk_at(context), groups


class Vandal:
    """A method that turns a knob of the frozen model."""

    def __init__(self, method, model):
        self.method, self.model = method, model

    def __getattr__(self, name):
        return getattr(self.method, name)

    def predict(self, images):
        with torch.no_grad():
            next(self.model.module.parameters()).add_(1e-3)
        return self.method.predict(images)


def test_who_changes_the_frozen_model_has_no_record_and_the_next_group_a_new_one(
    tmp_path, checkpoints, monkeypatch
):
    text = SMALL.replace('"frozen", "caster", "tent"', '"frozen", "tent", "caster"')
    cache, (clean, contrast) = admitted(tmp_path, checkpoints, text)

    def make(name, model, source, **settings):
        method = create(name, model, source, **settings)
        return Vandal(method, model) if name == "tent" else method

    monkeypatch.setattr(desks, "create", make)
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


def test_methods_that_read_the_source_are_kept_for_the_groups_that_use_them(tmp_path, checkpoints):
    text = SMALL.replace('"frozen", "caster", "tent"', '"tent", "knn"')
    text += SMALL[SMALL.index("[[grid]]") :].replace('"clean", "contrast"', '"fog"')
    cache, groups = admitted(tmp_path, checkpoints, text)
    clean, contrast, fog = groups
    first = run_group(cache, clean)
    ((name, _),) = cache._methods
    assert name == "knn"
    subject = cache.subject(clean[0], cache.admission(clean[0]))
    reads, kept = subject.labelled.reads, cache.method(clean[1], subject)
    run_group(cache, contrast)
    assert subject.labelled.reads == reads
    assert cache.method(contrast[1], subject) is kept
    assert cache.method(contrast[0], subject) is not cache.method(contrast[0], subject)
    run_group(cache, fog)
    assert cache._methods == {}
    assert 0 < first.passes < first.seconds


def test_on_a_gpu_what_answers_features_is_kept_with_its_recording(tmp_path, checkpoints):
    cache, (clean, _) = admitted(tmp_path, checkpoints, SMALL)
    subject = cache.subject(clean[0], cache.admission(clean[0]))
    by_name = {spec.method: spec for spec in clean}

    def kept(name):
        return cache.method(by_name[name], subject) is cache.method(by_name[name], subject)

    assert not any(map(kept, by_name))  # nothing is recorded on a CPU
    cache.context = replace(cache.context, device="cuda")
    assert {name for name in by_name if kept(name)} == {"frozen", "caster"}


def test_only_methods_that_read_the_source_are_passes_when_they_are_made(
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
    monkeypatch.setattr(desks, "create", slow)
    monkeypatch.setattr("caster_bench.engine.cell.perf_counter", lambda: clock[0])
    assert run_group(cache, clean).passes < 1000
    reading = True
    assert run_group(cache, contrast).passes >= 1000


def test_what_is_done_before_the_first_cell_is_told(tmp_path, checkpoints):
    seen = []
    run_inline(sweep_of(tmp_path), tmp_path / "out", checkpoints, watch=seen.append)
    assert (seen[0].done, seen[0].total, seen[0].current) == (0, 6, ("admitting resnet on digits",))
    assert seen[0].left is None


def test_images_are_kept_while_cells_of_another_study_are_missing(tmp_path, checkpoints):
    text = SMALL + SMALL[SMALL.index("[[grid]]") :].replace('"corruption"', '"gate"').replace(
        '"frozen", "caster", "tent"', '"frozen", "caster-ungated"'
    )
    sweep, out = sweep_of(tmp_path, text), tmp_path / "out"
    summary, _ = run_inline(sweep, out, checkpoints, only="corruption")
    assert summary.cells == 6
    assert any((out / "images").iterdir())
    summary, _ = run_inline(sweep, out, checkpoints)
    assert summary.cells == 8
    assert not (out / "images").exists()


class Helped(Inline):
    helpers = 1


def test_helpers_make_the_first_images_too(tmp_path, checkpoints):
    text = SMALL.replace('"clean", "contrast"', '"contrast", "fog"')
    sweep = sweep_of(tmp_path, text + text[text.index("[[grid]]") :] + "alone = true\n")
    context = RunContext.of(sweep, tmp_path / "out", checkpoints)
    executor = Helped(context)
    assert run(sweep, context, lambda: executor, lambda standing: None).failures == []
    done = [(task.kind, task.specs[0].conditions) for task in executor.performed]
    assert done[1:3] == [("images", CONTRAST), ("group", FOG)]
    timed = [task.kind for task in executor.performed if task.specs[0].alone]
    assert timed == ["group"] * 6


def test_helpers_keep_to_one_thread(tmp_path, checkpoints, monkeypatch):
    cache, (_, contrast) = admitted(tmp_path, checkpoints, SMALL)
    if desks._limits is not None:
        desks._limits.restore_original_limits()
    monkeypatch.setattr(desks, "_limits", None)
    seen = []
    monkeypatch.setattr(tasks, "under", lambda *_: seen.extend(threadpool_info()))
    tasks.images(cache.context, Task("images", contrast))
    assert {pool["num_threads"] for pool in seen} == {1}


@pytest.fixture(autouse=True)
def no_desk_of_another_test():
    desks._desk = None


@pytest.mark.parametrize(("device", "within"), [("cpu", "highest"), ("cuda:0", "high")])
def test_only_passes_on_a_gpu_are_quick(tmp_path, checkpoints, device, within):
    context = replace(
        RunContext.of(sweep_of(tmp_path, SMALL), tmp_path, checkpoints), device=device
    )
    with pytest.raises(RuntimeError), desks.quick_passes(context):
        assert torch.get_float32_matmul_precision() == within
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == "highest"
