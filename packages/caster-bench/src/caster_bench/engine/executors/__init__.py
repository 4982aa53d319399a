"""Who runs the tasks of a sweep: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from caster.errors import DiskFullError, is_disk_full
from caster_bench.engine.run_context import RunContext
from caster_bench.sweeps import Spec

Kind = Literal["admit", "group", "images"]
DIED = "its process was killed, or ran out of memory"


@dataclass(frozen=True)
class Task:
    """Work for one process: the executors do not look into it."""

    kind: Kind
    specs: tuple[Spec, ...]  # cells it is for; of an admission, one of the backbone on the data


@dataclass(frozen=True)
class Finished:
    """A task that has ended, with its result or one line on what went wrong."""

    task: Task
    result: Any = None
    error: str | None = None
    disk_full: bool = False  # then no other task could write its result either


class Executor(Protocol):
    """Runs tasks side by side; it is never given more than it has room for."""

    workers: int  # groups and admissions at a time
    helpers: int  # makers of images beside them

    def submit(self, task: Task) -> None:
        """Begin a task."""
        ...

    def wait(self, seconds: float) -> list[Finished]:
        """What has ended, after a while at most."""
        ...

    def close(self) -> None:
        """End everything, also what is under way."""
        ...


def perform(context: RunContext, task: Task) -> Any:
    """What every executor runs in its processes."""
    from caster_bench.engine import tasks
    from caster_bench.engine.cell import one_line

    todo: Callable[[RunContext, Task], Any] = getattr(tasks, task.kind)
    try:
        return todo(context, task)
    except Exception as error:
        if is_disk_full(error):  # which an error does not tell in another process
            raise DiskFullError(one_line(error)) from None
        raise


def failed(task: Task, error: BaseException) -> Finished:
    """A task that ended in an error."""
    from caster_bench.engine.cell import one_line

    return Finished(task, error=one_line(error), disk_full=isinstance(error, DiskFullError))
