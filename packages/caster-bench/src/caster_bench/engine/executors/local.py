"""Processes of this machine: one task each at a time, and a new one for any that is killed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from caster_bench.data.orphans import end_with_parent
from caster_bench.engine.executors import DIED, Finished, Task, failed, perform
from caster_bench.engine.run_context import RunContext

SECONDS_TO_END = 5.0


@dataclass
class _Worker:
    """A process, and what it is at."""

    place: RunContext
    process: BaseProcess
    connection: Connection
    task: Task | None = None


class Local:
    """Workers on one device or on several in turn, and helpers that make images beside them.

    A worker is started when there is work for it. It keeps its model from one task to the next;
    if it dies, its task has failed and another takes its place.
    """

    def __init__(self, place: RunContext, devices: list[str], workers: int, helpers: int) -> None:
        self.workers, self.helpers = workers, helpers
        places = [replace(place, device=devices[i % len(devices)]) for i in range(workers)]
        self._idle_places = {"workers": places, "helpers": [place] * helpers}
        self._at: dict[str, list[_Worker]] = {"workers": [], "helpers": []}

    def submit(self, task: Task) -> None:
        """Begin a task, in the process that has waited longest or in a new one."""
        team = "helpers" if task.kind == "images" else "workers"
        idle = [worker for worker in self._at[team] if worker.task is None]
        worker = idle[0] if idle else _started(self._idle_places[team].pop(0))
        if not idle:
            self._at[team].append(worker)
        worker.task = task
        with suppress(OSError):  # it died while it was idle; `wait` finds that out
            worker.connection.send(task)

    def wait(self, seconds: float) -> list[Finished]:
        """What has ended, after a while at most."""
        busy = [worker for worker in self._all() if worker.task is not None]
        watched: list[Any] = [worker.connection for worker in busy]
        watched += [worker.process.sentinel for worker in busy]
        wait(watched, seconds)
        return [ended for worker in busy if (ended := self._ended(worker)) is not None]

    def close(self) -> None:
        """End every process, busy or not."""
        for worker in self._all():
            worker.process.kill()
            worker.process.join(SECONDS_TO_END)
            worker.connection.close()
        self._at = {"workers": [], "helpers": []}

    def _all(self) -> Iterator[_Worker]:
        for team in self._at.values():
            yield from team

    def _ended(self, worker: _Worker) -> Finished | None:
        task = worker.task
        assert task is not None
        try:
            if worker.connection.poll():
                ended: Finished = worker.connection.recv()
                worker.task = None
                return ended
        except (EOFError, OSError):  # it died; also in the middle of its answer
            pass
        else:
            if worker.process.is_alive():
                return None
        self._bury(worker)
        return Finished(task, error=DIED)

    def _bury(self, worker: _Worker) -> None:
        worker.process.join(SECONDS_TO_END)
        worker.connection.close()
        for team, at in self._at.items():
            if worker in at:
                at.remove(worker)
                self._idle_places[team].append(worker.place)


def _started(place: RunContext) -> _Worker:
    context = get_context("spawn")  # a forked process cannot use a GPU
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, place), daemon=True)
    process.start()
    theirs.close()
    return _Worker(place, process, ours)


def _serve(connection: Connection, place: RunContext) -> None:
    """Do one task after another, until whoever gives them is gone."""
    end_with_parent()  # also in the middle of a cell: the next run must be alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who waits
    logging.getLogger("caster").setLevel(logging.ERROR)  # the records say what is inert
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            ended = Finished(task, perform(place, task))
        except Exception as error:  # of this task: the next may do better
            ended = failed(task, error)
        with suppress(OSError):  # nobody is there to be told
            connection.send(ended)
