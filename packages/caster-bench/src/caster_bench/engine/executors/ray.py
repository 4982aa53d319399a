"""A Ray cluster, or Ray on this machine: the same tasks, in Ray's processes.

Every node must see the run's folder, the checkpoints and the data at the same paths.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

from caster.errors import CasterError
from caster_bench.engine.executors import DIED, Finished, Task, failed, perform
from caster_bench.engine.executors.devices import on_cluster
from caster_bench.engine.run_context import RunContext

HERE = "local"  # Ray's word for a cluster of its own, whatever else runs on this machine
SECONDS_TO_REACH = 5.0


class Worker:
    """A process of the cluster that keeps its model, on its GPU, from one task to the next."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def perform(self, task: Task) -> Any:
        """Do a task."""
        return perform(self.context, task)


class OnRay:
    """Workers and helpers of a cluster.

    Each takes a core, a worker also a share of a GPU where models run on one. If a worker dies,
    its task has failed and another takes its place.
    """

    def __init__(
        self, context: RunContext, address: str | None, workers: int | None, each_gpu: int
    ) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise CasterError("--executor ray needs Ray: pip install 'caster-tta[ray]'") from None
        self._ray = ray
        self._begin(address, workers)
        try:
            known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            nodes = [node["Resources"] for node in known if node["Alive"]]
            gpus = sum(node.get("GPU", 0) for node in nodes)
            context = replace(context, device=on_cluster(context.device, gpus))
            self._share_out(nodes, workers, each_gpu if context.on_gpu else None)
        except BaseException:
            self.close()
            raise
        self._place = ray.put(context)
        self._worker = ray.remote(num_cpus=1, num_gpus=self._share)(Worker)
        self._help = ray.remote(num_cpus=1, max_retries=0)(perform)
        self._idle: list[Any] = []  # workers
        self._at: dict[Any, tuple[Task, Any]] = {}  # by what is waited for: who is at what

    def submit(self, task: Task) -> None:
        """Begin a task, in a worker that waits or in a new one."""
        if task.kind == "images":  # which need nothing that could be kept
            self._at[self._help.remote(self._place, task)] = (task, None)
            return
        worker: Any = self._idle.pop() if self._idle else self._worker.remote(self._place)
        self._at[worker.perform.remote(task)] = (task, worker)

    def wait(self, seconds: float) -> list[Finished]:
        """What has ended, after a while at most."""
        if not self._at:
            return []
        ready, _ = self._ray.wait(list(self._at), num_returns=1, timeout=seconds)
        return [self._ended(handle) for handle in ready]

    def close(self) -> None:
        """End everything, also what is under way."""
        self._ray.shutdown()  # processes of a driver that has gone are ended by the cluster

    def _begin(self, address: str | None, workers: int | None) -> None:
        if address is not None:
            _reach(address)
        try:
            self._ray.init(
                address=address or HERE,
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=None if address else workers,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            line = str(error).splitlines()[0]
            raise CasterError(f"no Ray cluster at {address or 'this machine'}: {line}") from None

    def _share_out(
        self, nodes: list[dict[str, float]], workers: int | None, each_gpu: int | None
    ) -> None:
        """How many workers there is room for, node by node, and helpers on the other cores."""
        cores = [int(node.get("CPU", 0)) for node in nodes]
        rooms, self._share = cores, 0.0
        if each_gpu is not None:
            gpus = [int(node.get("GPU", 0)) for node in nodes]
            rooms = [min(own, each_gpu * n) for own, n in zip(cores, gpus, strict=True)]
            self._share = int(1e4 / each_gpu) / 1e4  # Ray rounds there, and six must fit
        room = sum(rooms)
        if room == 0:
            raise CasterError("the Ray cluster has no core for a worker")
        self.workers = min(room, workers or room)
        self.helpers = sum(cores) - self.workers

    def _ended(self, handle: Any) -> Finished:
        task, worker = self._at.pop(handle)
        try:
            finished = Finished(task, self._ray.get(handle))
        except self._ray.exceptions.RayTaskError as error:  # what the task itself raised
            finished = failed(task, error.cause)
        except self._ray.exceptions.RayError:
            return Finished(task, error=DIED)
        if worker is not None:
            self._idle.append(worker)
        return finished


def _reach(address: str) -> None:
    """Refuse an address that nobody answers at: Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        raise CasterError(f"--address is HOST:PORT of a Ray cluster, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_REACH).close()
    except (OSError, OverflowError) as error:
        raise CasterError(f"no Ray cluster at {address}: {error}") from None
