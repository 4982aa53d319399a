"""A pool of Ray workers, each with its own copy of the model, that processes blocks of data."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

from caster.errors import CasterError
from caster.models.protocol import FrozenModel

log = logging.getLogger("caster")

HERE = "local"  # Ray's name for a new cluster on this machine
SECONDS_TO_REACH = 5.0
ATTEMPTS = 3  # workers that may die on one block
PATIENCE = 60.0  # seconds without any worker before a warning

Make = Callable[[], FrozenModel | None]
B = TypeVar("B")  # a block
R = TypeVar("R")  # the result of a step


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster at HOST:PORT, or start a "local" one; reuse an existing connection."""
    try:
        import ray
    except ModuleNotFoundError:
        raise CasterError("this needs Ray: pip install 'caster-tta[ray]'") from None
    if ray.is_initialized():
        yield
        return
    if address != HERE:
        check_address(address)
    try:
        ray.init(
            address=address,
            include_dashboard=False if address == HERE else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise CasterError(
            f"no Ray cluster at {address}: {line}; are Ray, Python, RAY_AUTH_MODE and its token "
            "the same there and here?"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str, argument: str = "ray") -> None:
    """Raise if nothing listens at the address: Ray would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        raise CasterError(
            f"{{argument}} is HOST:PORT of a Ray cluster, not {address!r}", argument=argument
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_REACH).close()
    except (OSError, OverflowError) as error:
        raise CasterError(f"no Ray cluster at {address}: {error}") from None


def has_gpus() -> bool:
    """Whether the connected cluster has GPUs."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))  # type: ignore[no-untyped-call]


def on_gpu(make: Callable[[], FrozenModel]) -> FrozenModel:
    """Build a torch model and move it to the GPU of this process."""
    from caster.models.torch import TorchModel, moved

    model = make()
    assert isinstance(model, TorchModel)
    moved(model.module, "cuda")
    return model


def no_model() -> None:
    """Load no model: for workers that only read features."""


class _Worker:
    """A process of the cluster that has loaded the model."""

    _model: FrozenModel | None

    def __init__(self, make: Make, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)  # paths may be relative to the driver's folder
        self._make, self._model = make, None
        self._step: tuple[Any, Any] = (None, None)

    def node(self) -> str:
        """Load the model and return the node id; Ray would hide errors of the constructor."""
        import ray

        self._model = self._make()
        return str(ray.get_runtime_context().get_node_id())

    def run(self, step: list[Any], block: Any, index: int) -> Any:
        """Apply a step, given as a reference in a list, to a block; keep the step in memory."""
        import ray

        if self._step[0] != step[0]:
            self._step = (None, None)  # before the next one is loaded
            self._step = (step[0], ray.get(step[0]))
        return self._step[1](self._model, block, index)


class Pool(Generic[B]):
    """Workers of the connected cluster, each with its own copy of the model.

    A worker reserves a core, unless `reading` leaves the cores to Ray Data, and with `gpus` a GPU,
    shared if there are more workers than GPUs. A worker that dies is replaced as soon as the
    cluster has room for another.
    """

    def __init__(
        self, make: Make, workers: int | None = None, gpus: bool = False, reading: bool = False
    ) -> None:
        import ray

        total = ray.cluster_resources()  # type: ignore[no-untyped-call]
        most = int(total.get("GPU" if gpus else "CPU", 0))
        if most == 0:
            raise CasterError(f"the Ray cluster has no {'GPU' if gpus else 'core'} for a worker")
        count = workers or most
        count = count if gpus else min(count, most)
        share = 1 / -(-count // most) if gpus else 0  # fraction of a GPU per worker
        self._actor: Any = ray.remote(num_cpus=0 if reading else 1, num_gpus=share)(_Worker)
        self._arguments = ray.put(make), os.getcwd()
        self._starting: dict[Any, Any] = {}  # reference to a node: worker
        self._nodes: dict[Any, str] = {}  # node of each worker that is ready
        self._idle: list[Any] = []
        self._homes: dict[int, str] = {}  # node that processed a block, and may have cached it
        self._failed = 0  # consecutive workers that did not start
        for _ in range(count):
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        for worker in (*self._nodes, *self._starting.values()):
            ray.kill(worker)

    def map(
        self, step: Callable[[Any, B, int], R], blocks: Iterable[B]
    ) -> Iterator[tuple[int, B, R]]:
        """Apply a step to every block, and yield (index, block, result) in order of completion."""
        import ray

        reference, coming = [ray.put(step)], enumerate(blocks)
        waiting: deque[tuple[int, B]] = deque()
        if isinstance(blocks, Sequence):  # known in advance, so nodes can get their blocks again
            waiting.extend(coming)
        running: dict[Any, tuple[Any, int, B]] = {}
        lost: Counter[int] = Counter()
        finished: list[tuple[int, B, R]] = []
        more = True
        while True:
            for worker in list(self._idle):
                chosen = self._choose(waiting, self._nodes[worker]) or next(coming, None)
                if chosen is None:
                    more = False
                    continue
                self._idle.remove(worker)
                index, block = chosen
                running[worker.run.remote(reference, block, index)] = (worker, index, block)
            yield from finished  # now that every worker is busy
            finished.clear()
            if not (more or waiting or running):
                return  # without waiting for workers that are still starting
            ready, _ = ray.wait([*running, *self._starting], num_returns=1, timeout=PATIENCE)
            if not ready and not running:
                log.warning("the Ray cluster has no room for a worker: still waiting")
            for done in ready:
                if done in self._starting:
                    self._welcome(done)
                    continue
                worker, index, block = running.pop(done)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:  # raised by the step itself
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    lost[index] += 1
                    if lost[index] == ATTEMPTS:
                        line = " ".join(str(error).split())[:200]
                        raise CasterError(f"{block} ended {ATTEMPTS} workers: {line}") from None
                    log.warning("a worker died: %s is processed again", block)
                    waiting.appendleft((index, block))
                    self._nodes.pop(worker)
                    self._start()
                    continue
                self._homes[index] = self._nodes[worker]
                self._idle.append(worker)
                finished.append((index, block, result))

    def _start(self) -> None:
        worker = self._actor.remote(*self._arguments)
        self._starting[worker.node.remote()] = worker

    def _welcome(self, reference: Any) -> None:
        import ray

        worker = self._starting.pop(reference)
        try:
            self._nodes[worker] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            self._failed += 1
            if self._failed == ATTEMPTS:
                line = " ".join(str(error).split())[:200]
                raise CasterError(f"{ATTEMPTS} workers died as they started: {line}") from None
            self._start()
            return
        self._failed = 0
        self._idle.append(worker)

    def _choose(self, waiting: deque[tuple[int, B]], node: str) -> tuple[int, B] | None:
        """Choose the first block that no other living node may have cached."""
        alive = set(self._nodes.values())
        for position, (index, _) in enumerate(waiting):
            home = self._homes.get(index)
            if home in (None, node) or home not in alive:
                chosen = waiting[position]
                del waiting[position]
                return chosen
        return None
