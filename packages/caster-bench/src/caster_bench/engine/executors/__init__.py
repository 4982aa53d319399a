"""Tasks of a sweep, and the executors that run them: local processes or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from caster.errors import DiskFullError, is_disk_full
from caster_bench.data.streams import Condition
from caster_bench.engine.admit import admit
from caster_bench.engine.cell import one_line, run_group
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import admitted_target, corrupted
from caster_bench.engine.worker_cache import limit_threads, worker_cache
from caster_bench.records.store import read_admission
from caster_bench.sweeps import Spec

Kind = Literal["admit", "group", "images"]
DIED = "its process was killed, or ran out of memory"
WORKERS_PER_GPU = 6  # one small network alone leaves a GPU waiting for kernel launches


@dataclass(frozen=True)
class Task:
    """Work for one process."""

    kind: Kind
    specs: tuple[Spec, ...]  # its cells; for an admission, one cell of the backbone on the data


@dataclass(frozen=True)
class Finished:
    """A task that has ended, with its result or a one-line error."""

    task: Task
    result: Any = None
    error: str | None = None
    disk_full: bool = False  # no other task could write its result either


class Executor(Protocol):
    """Runs tasks in parallel; it is never given more than it has processes for."""

    workers: int  # processes for groups and admissions
    helpers: int  # further processes, which make images

    def submit(self, task: Task) -> None:
        """Start a task."""
        ...

    def wait(self, seconds: float) -> list[Finished]:
        """Wait for at most `seconds`, and return the tasks that have ended."""
        ...

    def close(self) -> None:
        """Stop all processes, busy or not."""
        ...


def perform(context: RunContext, task: Task) -> Any:
    """Do a task in this process."""
    try:
        if task.kind == "admit":
            worker_cache(context)
            return admit(context, task.specs[0].backbone, task.specs[0].data)
        if task.kind == "group":
            return run_group(worker_cache(context), task.specs)
        return make_images(context, task.specs[0])
    except Exception as error:
        if is_disk_full(error):  # errno is lost between processes
            raise DiskFullError(one_line(error)) from None
        raise


def make_images(context: RunContext, spec: Spec) -> None:
    """Make the corrupted images of a stream before a worker needs them, without a model."""
    limit_threads()
    admission = read_admission(context.admission_path(spec.backbone, spec.data))
    target = admitted_target(context, admission)
    for pair in spec.conditions:
        corrupted(context, target, Condition(*pair), spec.seed)


def failed(task: Task, error: BaseException) -> Finished:
    """Return a task that ended in an error."""
    return Finished(task, error=one_line(error), disk_full=isinstance(error, DiskFullError))
