"""The tasks of a sweep, by the names executors call them."""

from __future__ import annotations

from caster_bench.data.streams import Condition
from caster_bench.engine import admit as admitting
from caster_bench.engine.admit import target_of
from caster_bench.engine.cell import Done, run_group
from caster_bench.engine.executors import Task
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import under
from caster_bench.engine.worker_cache import desk_at, one_thread
from caster_bench.records.reader import read_admission
from caster_bench.records.schema import Admission


def admit(context: RunContext, task: Task) -> tuple[Admission, float, float]:
    """Admit the backbone of a cell on its data, or not."""
    desk_at(context)
    spec = task.specs[0]
    return admitting.admit(context, spec.backbone, spec.data)


def group(context: RunContext, task: Task) -> Done:
    """Run cells of one stream."""
    return run_group(desk_at(context), task.specs)


def images(context: RunContext, task: Task) -> None:
    """Make the images of a stream before a worker asks for them; no model is loaded for it."""
    one_thread()
    spec = task.specs[0]
    admission = read_admission(context.source(spec.backbone, spec.data, ".json"))
    kept = target_of(context, admission)
    for pair in spec.conditions:
        under(context, kept, Condition(*pair), spec.seed)
