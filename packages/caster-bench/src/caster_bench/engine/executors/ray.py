"""Ray executor: the same tasks in the processes of a cluster, or of Ray on this machine.

Every node must see the run's folder, the checkpoints and the data at the same paths.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from caster.adapt.ray_pool import HERE, check_address
from caster.errors import CasterError
from caster_bench.engine.executors import DIED, WORKERS_PER_GPU, Finished, Task, failed, perform
from caster_bench.engine.run_context import CPU, CUDA, RunContext

AUTO = "auto"  # GPUs if the cluster has any, known only once it is reached


def cluster_device(device: str, gpus: float) -> str:
    """Return the device of every process of a cluster; Ray shows each process only its own GPU.

    >>> cluster_device("auto", gpus=2), cluster_device("cpu", gpus=2)
    ('cuda:0', 'cpu')
    """
    if device not in (AUTO, CPU, CUDA):
        raise CasterError(
            f"Ray itself chooses a GPU: set {{argument}} to cuda or cpu, not {device}",
            argument="device",
        )
    if device == CUDA and not gpus:
        raise CasterError(
            "the Ray cluster has no GPU: add one, or set {argument} to cpu", argument="device"
        )
    return CPU if device == CPU or not gpus else f"{CUDA}:0"


class Worker:
    """A process of the cluster that keeps its model between tasks."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def perform(self, task: Task) -> Any:
        """Do a task."""
        return perform(self.context, task)


class RayExecutor:
    """Workers and helpers of a cluster.

    Each takes a core; a worker also takes a share of a GPU if models run on one. If a worker dies,
    its task has failed and the next task starts a new worker.
    """

    def __init__(self, context: RunContext, address: str | None, workers: int | None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise CasterError("--executor ray needs Ray: pip install 'caster-bench[ray]'") from None
        self._ray = ray
        self._connect(address, workers)
        try:
            known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            nodes = [node["Resources"] for node in known if node["Alive"]]
            gpus = sum(node.get("GPU", 0) for node in nodes)
            context = replace(context, device=cluster_device(context.device, gpus))
            self._allocate(nodes, workers, context.on_gpu)
        except BaseException:
            self.close()
            raise
        self._context = ray.put(context)
        self._worker = ray.remote(num_cpus=1, num_gpus=self._gpu_share)(Worker)
        self._helper = ray.remote(num_cpus=1, max_retries=0)(perform)
        self._idle: list[Any] = []  # workers
        self._running: dict[Any, tuple[Task, Any]] = {}  # Ray's handle: task, worker

    def submit(self, task: Task) -> None:
        """Start a task in an idle worker, or in a new one."""
        if task.kind == "images":  # nothing to keep between tasks
            self._running[self._helper.remote(self._context, task)] = (task, None)
            return
        worker: Any = self._idle.pop() if self._idle else self._worker.remote(self._context)
        self._running[worker.perform.remote(task)] = (task, worker)

    def wait(self, seconds: float) -> list[Finished]:
        """Wait for at most `seconds`, and return the tasks that have ended."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [self._finished(handle) for handle in ready]

    def close(self) -> None:
        """Stop all processes, busy or not."""
        self._ray.shutdown()  # the cluster ends the processes of a driver that has gone

    def _connect(self, address: str | None, workers: int | None) -> None:
        if address is not None:
            check_address(address, argument="address")
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

    def _allocate(self, nodes: list[dict[str, float]], workers: int | None, on_gpu: bool) -> None:
        """Count the workers that fit on each node, and the helpers on the remaining cores."""
        cores = [int(node.get("CPU", 0)) for node in nodes]
        fitting, self._gpu_share = cores, 0.0
        if on_gpu:
            gpus = [int(node.get("GPU", 0)) for node in nodes]
            fitting = [min(c, WORKERS_PER_GPU * g) for c, g in zip(cores, gpus, strict=True)]
            self._gpu_share = int(1e4 / WORKERS_PER_GPU) / 1e4  # Ray keeps 4 digits; six must fit
        most = sum(fitting)
        if most == 0:
            raise CasterError("the Ray cluster has no core for a worker")
        self.workers = min(most, workers or most)
        self.helpers = sum(cores) - self.workers

    def _finished(self, handle: Any) -> Finished:
        task, worker = self._running.pop(handle)
        try:
            finished = Finished(task, self._ray.get(handle))
        except self._ray.exceptions.RayTaskError as error:  # raised by the task itself
            finished = failed(task, error.cause)
        except self._ray.exceptions.RayError:
            return Finished(task, error=DIED)
        if worker is not None:
            self._idle.append(worker)
        return finished
