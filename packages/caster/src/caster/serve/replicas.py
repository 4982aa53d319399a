"""One server in front of several processes of a Ray cluster, its replicas; each stream has one.

All replicas share the folder of the streams, and no stream is in the memory of two of them at once.
When a replica is lost, the others continue its streams from their snapshots until it is replaced;
other streams stay where they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from caster.adapt.adapter import Adapter
from caster.errors import CasterError
from caster.models.protocol import error_line
from caster.serve.batcher import InferAnswer, InferRequest, WorkerLostError
from caster.serve.service import AnyWorker, Lane, ServeOptions, Service
from caster.serve.tensors import Failure, RequestError
from caster.serve.worker import Answered, Status, Worker

DRAINED_SECONDS = 0.002  # between checks whether requests are in flight
RETRY_SECONDS = (1.0, 60.0)  # first and longest delay between attempts to start a replica

logger = logging.getLogger(__name__)


def owner(stream: str, replicas: Iterable[str]) -> str:
    """Choose the replica of a stream by rendezvous hashing: only streams of a lost one move.

    >>> owner("camera 7", ["0", "1", "2"]), owner("camera 7", ["0", "1"])
    ('1', '1')
    """
    return max(replicas, key=lambda name: hashlib.sha256(f"{name} {stream}".encode()).digest())


class Replica(AnyWorker, Protocol):
    """A worker in another process; its methods block, and raise `WorkerLostError` if it dies."""

    def start(self) -> None:
        """Load the model."""
        ...

    def release(self, name: str, replicas: Sequence[str]) -> bool:
        """Unload the streams of replicas other than `name`; False if that failed."""
        ...

    def kill(self) -> None:
        """Kill the process, if it is still running."""
        ...


class ReplicatedService(Service):
    """A model with its streams spread over replicas."""

    def __init__(
        self, adapter: Adapter, options: ServeOptions, launch: Callable[[], Replica]
    ) -> None:
        super().__init__(adapter, options)
        self._launch = launch
        self._replicas: dict[str, Replica] = {}  # the workers of the lanes
        self._under_way = 0  # requests that replicas may be working on
        self._settled = asyncio.Event()  # cleared while streams move to another replica
        self._settled.set()
        self._moving = asyncio.Lock()
        self._replacing: set[asyncio.Task[None]] = set()

    async def start(self, count: int) -> None:
        """Start the replicas; if one cannot load the model, raise its error."""
        replicas = {str(number): self._launch() for number in range(count)}
        await asyncio.gather(*(asyncio.to_thread(each.start) for each in replicas.values()))
        for name, replica in replicas.items():
            self._admit(name, replica)

    def _admit(self, name: str, replica: Replica) -> None:
        self._replicas[name] = replica
        self.add(replica, name)

    async def _submit(self, request: InferRequest) -> InferAnswer:
        """Send a request to the replica of its stream, or to the next one if that is lost."""
        while True:
            await self._settled.wait()
            if not self._lanes:
                raise RequestError(str(self.broken), Failure.UNAVAILABLE)
            if request.stream is None:
                name = min(self._lanes, key=lambda each: self._lanes[each].batcher.waiting)
            else:
                name = owner(request.stream, self._lanes)
            lane = self._lanes[name]
            self._under_way += 1
            try:
                return await lane.batcher.submit(request)
            except WorkerLostError:
                self._lose(name, lane)
            finally:
                self._under_way -= 1

    async def _maintain_lane(self, name: str, lane: Lane, verify: bool) -> None:
        try:
            await super()._maintain_lane(name, lane, verify)
        except WorkerLostError:
            self._lose(name, lane)

    def _lose(self, name: str, lane: Lane) -> None:
        """Hand the streams of a lost replica over to the others, and replace it."""
        if self._lanes.get(name) is not lane:
            return  # another request noticed first
        del self._lanes[name]
        lane.batcher.abandon(WorkerLostError())
        self._replicas.pop(name).kill()  # it may only be unreachable, and must not write any more
        logger.warning("replica %s is lost: others continue its streams from snapshots", name)
        task = asyncio.create_task(self._replace(name))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, name: str) -> None:
        seconds, longest = RETRY_SECONDS
        while True:
            replica = self._launch()
            try:
                await asyncio.to_thread(replica.start)
                break
            except BaseException as error:  # also when the server shuts down
                replica.kill()
                if not isinstance(error, Exception):
                    raise
                logger.warning("replica %s did not start: %s", name, error_line(error))
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, longest)
        async with self._moving:
            while not await self._hand_over(name):
                await asyncio.sleep(RETRY_SECONDS[0])
            self._admit(name, replica)
            self._settled.set()
        logger.warning("replica %s is back, with its streams", name)

    async def _hand_over(self, name: str) -> bool:
        """Have the others unload the streams of a replica that is back; False if that failed.

        On success, requests wait until it is admitted, so that no stream is in two processes.
        """
        self._settled.clear()
        while self._under_way:
            await asyncio.sleep(DRAINED_SECONDS)
        names = [*self._lanes, name]
        released = True
        for other, lane in list(self._lanes.items()):
            if self._lanes.get(other) is not lane:
                continue  # lost in the meantime
            release = partial(self._replicas[other].release, other, names)
            try:
                released &= await lane.batcher.call(release)
            except WorkerLostError:
                self._lose(other, lane)
        if not released:  # the disk is full: the streams stay where they are for now
            self._settled.set()
        return released

    async def close(self) -> None:
        """Have every stream stored, and stop the replicas."""
        for task in self._replacing:
            task.cancel()
        results = await asyncio.gather(
            *(lane.close() for lane in self._all()), return_exceptions=True
        )
        for replica in self._replicas.values():
            replica.kill()
        for error in results:
            if isinstance(error, BaseException):
                logger.warning(
                    "the streams of a replica are stored up to their last snapshots: %s", error
                )


class _Process:
    """Actor that runs in a process of the cluster."""

    def __init__(self, make: Callable[[], Worker], folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)  # paths may be relative to the working directory of the driver
        self._make = make

    def start(self) -> None:
        """Load the model; not in the constructor, because Ray hides its errors."""
        self._worker = self._make()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)

    def release(self, name: str, replicas: Sequence[str]) -> bool:
        """Unload the streams of other replicas."""
        return self._worker.release(lambda stream: owner(stream, replicas) == name)


def check_room(count: int, gpus: bool) -> None:
    """Raise if the connected cluster cannot hold so many replicas: Ray would wait forever."""
    import ray

    kind = "GPU" if gpus else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))  # type: ignore[no-untyped-call]
    if there < count:
        raise CasterError(
            f"{count} replicas need a {kind} each, and the Ray cluster has {there}: add nodes or "
            "lower {argument}",
            argument="replicas",
        )


class RayReplica:
    """A worker in an actor of the connected Ray cluster."""

    def __init__(self, make: Callable[[], Worker], gpus: bool) -> None:
        import ray

        actor = ray.remote(num_cpus=1, num_gpus=int(gpus), scheduling_strategy="SPREAD")(_Process)
        self.actor: Any = actor.remote(make, os.getcwd())

    def start(self) -> None:
        """Load the model."""
        self._get(self.actor.start.remote())

    def answer(self, requests: Sequence[InferRequest]) -> Answered:
        """Answer requests of one stream, or one without a stream."""
        try:
            found: Answered = self._get(self.actor.call.remote("answer", requests))
        except WorkerLostError as lost:
            return Answered([lost] * len(requests), None, Status())
        return found

    def maintain(self) -> Status:
        """Move idle streams to disk."""
        status: Status = self._get(self.actor.call.remote("maintain"))
        return status

    def verify(self) -> str | None:
        """Say why the model must no longer be used."""
        changed: str | None = self._get(self.actor.call.remote("verify"))
        return changed

    def release(self, name: str, replicas: Sequence[str]) -> bool:
        """Unload the streams of other replicas."""
        return bool(self._get(self.actor.release.remote(name, replicas)))

    def close(self) -> None:
        """Store every stream."""
        self._get(self.actor.call.remote("close"))

    def kill(self) -> None:
        """Kill the process."""
        import ray

        ray.kill(self.actor)

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:  # raised by the method itself
            raise error.cause from error
        except ray.exceptions.RayError:
            raise WorkerLostError from None
