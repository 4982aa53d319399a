"""The tasks of a sweep, by the names executors call them."""

from __future__ import annotations

from caster.bench import admit as admitting
from caster.bench.admit import target_of
from caster.bench.cell import Done, run_group
from caster.bench.desk import desk_at, one_thread
from caster.bench.executors import Task
from caster.bench.pictures import under
from caster.bench.place import Place
from caster.data.streams import Condition
from caster.records.reader import read_admission
from caster.records.schema import Admission


def admit(place: Place, task: Task) -> tuple[Admission, float, float]:
    """Admit the backbone of a cell on its data, or not."""
    desk_at(place)
    spec = task.specs[0]
    return admitting.admit(place, spec.backbone, spec.data)


def group(place: Place, task: Task) -> Done:
    """Run cells of one stream."""
    return run_group(desk_at(place), task.specs)


def pictures(place: Place, task: Task) -> None:
    """Make the pictures of a stream before a worker asks for them; no model is loaded for it."""
    one_thread()
    spec = task.specs[0]
    admission = read_admission(place.source(spec.backbone, spec.data, ".json"))
    kept = target_of(place, admission)
    for pair in spec.conditions:
        under(place, kept, Condition(*pair), spec.seed)
