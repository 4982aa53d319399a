"""Local executor: processes of this machine, one task each, restarted when killed."""

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

from caster.core.threads import available_cores
from caster.errors import CasterError
from caster_bench.data.worker_processes import end_with_parent
from caster_bench.engine.executors import DIED, WORKERS_PER_GPU, Finished, Task, failed, perform
from caster_bench.engine.run_context import CPU, CUDA, RunContext

SECONDS_TO_END = 5.0


def select_devices(device: str | None) -> list[str]:
    """Resolve a device name: "cuda" is every GPU; None is every GPU, or the CPU without one."""
    if device == CPU:
        return [CPU]
    try:
        import torch
    except ModuleNotFoundError:
        raise CasterError("the benchmark needs torch: pip install 'caster-bench[sweeps]'") from None

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None and count == 0:
        return [CPU]
    every = [f"{CUDA}:{i}" for i in range(count)]
    if device in (None, CUDA) and count:
        return every
    if device not in every:
        found = ", ".join(every) or "no GPU"
        raise CasterError(f"there is no device {device!r}: there is cpu, and {found}")
    return [device]


def allocate_cores(devices: list[str], workers: int | None) -> tuple[int, int]:
    """Return how many workers to start, and how many helpers on the remaining cores.

    >>> allocate_cores(["cuda:0"], workers=1_000_000)[1]
    0
    """
    cores = available_cores()
    if workers is None:
        most = cores if devices == [CPU] else WORKERS_PER_GPU * len(devices)
        workers = max(1, min(most, cores))
    return workers, max(0, cores - workers)


@dataclass
class _Worker:
    context: RunContext
    process: BaseProcess
    connection: Connection
    task: Task | None = None


class LocalExecutor:
    """Workers spread over the devices, and helpers that make images.

    A process is started when there is work for it, and keeps its model between tasks. If it dies,
    its task has failed and the next task starts a new process.
    """

    def __init__(self, context: RunContext, devices: list[str], workers: int, helpers: int) -> None:
        self.workers, self.helpers = workers, helpers
        contexts = [replace(context, device=devices[i % len(devices)]) for i in range(workers)]
        self._unused = {"workers": contexts, "helpers": [context] * helpers}
        self._processes: dict[str, list[_Worker]] = {"workers": [], "helpers": []}

    def submit(self, task: Task) -> None:
        """Start a task in an idle process, or in a new one."""
        team = "helpers" if task.kind == "images" else "workers"
        idle = [worker for worker in self._processes[team] if worker.task is None]
        worker = idle[0] if idle else _start(self._unused[team].pop(0))
        if not idle:
            self._processes[team].append(worker)
        worker.task = task
        with suppress(OSError):  # it died while idle; `wait` notices
            worker.connection.send(task)

    def wait(self, seconds: float) -> list[Finished]:
        """Wait for at most `seconds`, and return the tasks that have ended."""
        busy = [worker for worker in self._all() if worker.task is not None]
        watched: list[Any] = [worker.connection for worker in busy]
        watched += [worker.process.sentinel for worker in busy]
        wait(watched, seconds)
        return [ended for worker in busy if (ended := self._finished(worker)) is not None]

    def close(self) -> None:
        """Stop all processes, busy or not."""
        for worker in self._all():
            worker.process.kill()
            worker.process.join(SECONDS_TO_END)
            worker.connection.close()
        self._processes = {"workers": [], "helpers": []}

    def _all(self) -> Iterator[_Worker]:
        for team in self._processes.values():
            yield from team

    def _finished(self, worker: _Worker) -> Finished | None:
        task = worker.task
        assert task is not None
        try:
            if worker.connection.poll():
                finished: Finished = worker.connection.recv()
                worker.task = None
                return finished
        except (EOFError, OSError):  # it died, perhaps while sending its result
            pass
        else:
            if worker.process.is_alive():
                return None
        self._discard(worker)
        return Finished(task, error=DIED)

    def _discard(self, worker: _Worker) -> None:
        worker.process.join(SECONDS_TO_END)
        worker.connection.close()
        for team, processes in self._processes.items():
            if worker in processes:
                processes.remove(worker)
                self._unused[team].append(worker.context)


def _start(context: RunContext) -> _Worker:
    spawning = get_context("spawn")  # a forked process cannot use a GPU
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(theirs, context), daemon=True)
    process.start()
    theirs.close()
    return _Worker(context, process, ours)


def _serve(connection: Connection, context: RunContext) -> None:
    """Perform one task after another until the parent is gone."""
    end_with_parent()  # even within a cell: the next run must be alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.getLogger("caster").setLevel(logging.ERROR)  # records say which methods are inert
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            finished = Finished(task, perform(context, task))
        except Exception as error:  # the next task may succeed
            finished = failed(task, error)
        with suppress(OSError):  # the parent has gone
            connection.send(finished)
