"""Layer statistics: fitted with a backbone's state, once, and part of its digest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from caster import state as states
from caster.core.channels import MEASURED
from caster.io.files import file_digest
from caster_bench.engine import worker_cache as workers
from caster_bench.engine.admit import current_admission, moments_digest
from caster_bench.engine.cell import run_group
from caster_bench.engine.executors import Task, perform
from caster_bench.engine.plan import groups_of
from caster_bench.engine.run_context import RunContext
from caster_bench.records.store import read, scan, write_admission
from tests.support.inline import SMALL, sweep_of

CONVNEXT = SMALL.replace("resnet", "convnext").replace('"batch"', '"layer"')
METHODS = '"frozen", "caster", "tent"'
LAYERED = CONVNEXT.replace(METHODS, '"frozen", "layer-transport", "layer-transport-ungated"')


def admitted(folder, checkpoints, text):
    """A sweep, its context, and the admission and state of its only backbone."""
    folder.mkdir()
    sweep = sweep_of(folder, text)
    context = RunContext.of(sweep, folder / "out", checkpoints)
    first = next(iter(sweep.cells))
    admission, _, _ = perform(context, Task("admit", (first,)))
    state = states.load(context.state_path(first.backbone, first.data))
    return sweep, context, admission, state


def test_layers_are_fitted_only_where_a_method_needs_them(tmp_path, checkpoints):
    _, _, plain, without = admitted(tmp_path / "plain", checkpoints, CONVNEXT)
    _, context, admission, state = admitted(tmp_path / "layered", checkpoints, LAYERED)
    assert without.layers is None
    assert context.layers == {("convnext", "digits")}
    assert "stages.0.blocks.0:out" in map(str, state.layers)
    assert {found.count for found in state.layers.values()} == {300.0}
    # Everything else comes from the same pass.
    assert moments_digest(replace(state, layers=None)) == moments_digest(without) == plain.moments
    assert "layers" not in plain.seen
    assert admission.seen == plain.seen | {"layers": MEASURED}


def test_layers_are_part_of_the_digest(tmp_path, checkpoints):
    sweep, context, admission, state = admitted(tmp_path / "run", checkpoints, LAYERED)
    assert admission.moments == moments_digest(state)
    site, found = next(iter(state.layers.items()))
    changed = {**state.layers, site: replace(found, mean=np.nextafter(found.mean, np.float32(9)))}
    other = replace(state, layers=changed)
    assert moments_digest(other) != admission.moments
    path = context.state_path("convnext", "digits")
    states.save(other, path)
    write_admission(context.out, replace(admission, files={path.name: file_digest(path)}))
    group = next(groups_of(list(sweep.cells)))
    done = run_group(workers.worker_cache(context), group)
    assert [spec for spec, _ in done.failures] == list(group)
    assert {why for _, why in done.failures} == {
        "convnext--digits has changed since it was admitted: run the sweep again"
    }


def test_workers_do_not_measure_the_source_again(tmp_path, checkpoints):
    sweep, context, admission, _ = admitted(tmp_path / "run", checkpoints, LAYERED)
    cache, group = workers.worker_cache(context), next(groups_of(list(sweep.cells)))
    assert run_group(cache, group).failures == []
    assert cache.backbone(group[0], admission).source_batches.reads == 0
    identities = [read(folder).cell.identity for folder in scan(context.out).cells]
    assert [identity["moments"] for identity in identities] == [admission.moments] * 3


def test_a_sweep_that_newly_needs_layers_is_admitted_again(tmp_path, checkpoints):
    _, context, admission, _ = admitted(tmp_path / "run", checkpoints, CONVNEXT)
    assert current_admission(context, "convnext", "digits", {}) == admission
    wanting = RunContext.of(sweep_of(tmp_path, LAYERED), context.out, checkpoints)
    assert current_admission(wanting, "convnext", "digits", {}) is None


@pytest.fixture(autouse=True)
def no_cache_of_another_test():
    workers._cache = None
