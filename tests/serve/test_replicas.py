"""Streams over replicas: one is lost under load, and comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

import caster
from caster.serve.batcher import InferRequest, WorkerLostError
from caster.serve.replicas import ReplicatedService, owner
from caster.serve.service import ServeOptions
from caster.serve.streams import StreamStore
from caster.serve.tensors import Failure, RequestError
from caster.serve.worker import Answered, Status, Worker
from tests.support import served
from tests.support.command_line import cli
from tests.support.served import SIZE, batches, in_process, rest_infer, same

EVERY = 3  # batches between snapshots
NAMES = st.lists(st.text(min_size=1), min_size=2, max_size=8, unique=True)


@given(st.lists(st.text(), min_size=1), NAMES)
def test_only_the_streams_of_a_lost_replica_move(streams, replicas):
    lost, *others = replicas
    for stream in streams:
        before, after = owner(stream, replicas), owner(stream, others)
        assert after in others
        assert before == lost or after == before
        assert owner(stream, reversed(replicas)) == before


def test_streams_are_spread_evenly():
    homes = [owner(f"camera {i}", "0123") for i in range(4000)]
    assert all(900 < homes.count(name) < 1100 for name in "0123")


class Local:
    """A worker of this process that can be lost, as a replica; it notes whom it has answered."""

    def __init__(self, files, folder, may_start) -> None:
        self.files, self.folder, self.may_start = files, folder, may_start
        self.is_lost, self.ends_after, self.streams = False, None, []

    def start(self):
        self.may_start.wait(20)
        model = caster.wrap(str(self.files.folder / "model.onnx"))
        store = StreamStore(
            adapter := caster.Adapter(model, self.files.adapter.state),
            self.folder,
            in_memory=9,
            total=9,
            snapshot_every=EVERY,
            idle_seconds=99.0,
        )
        self.worker = Worker(adapter, store)

    def answer(self, requests):
        if not self.is_lost:
            answered = self.worker.answer(requests)
            self.streams.append(requests[0].stream)
            if len(self.streams) != self.ends_after:
                return answered
            self.is_lost = True  # after its work, before anyone knows: the worst moment
        return Answered([WorkerLostError()] * len(requests), None, Status())

    def maintain(self):
        if self.is_lost:
            raise WorkerLostError
        return self.worker.maintain()

    def release(self, name, replicas):
        return self.worker.release(lambda stream: owner(stream, replicas) == name)

    def verify(self):
        return None

    def close(self):
        self.worker.close()

    def kill(self):
        self.is_lost = True


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return served.write(tmp_path_factory.mktemp("replicas"))


def streams_of(name, number, replicas=("0", "1")):
    """Ids of streams that belong to a replica."""
    every = (f"camera {i}" for i in count())
    return list(islice((each for each in every if owner(each, replicas) == name), number))


def where(error):
    """The batch that a server expects next, by its error."""
    return int(re.search(r"at position (\d+)", str(error))[1]) // SIZE


async def client(service, stream, images, outs, at, stop):
    """Send batches one by one, and go back to where the server says it is; count those again."""
    again = 0
    while at < stop:
        request = InferRequest({"x": images[at]}, stream, position=at * SIZE)
        try:
            answer = await service.infer(request)
        except RequestError as error:
            if error.failure is not Failure.CONFLICT:
                raise
            back = where(error)
            again, at = again + at - back, back
            continue
        same(answer.outputs, outs[at])
        at += 1
    return again


def replicated(files, folder, may_start, verify_seconds):
    """A service with local replicas, and the replicas that it launched so far."""
    launched = []

    def launch():
        launched.append(Local(files, folder, may_start))
        return launched[-1]

    options = ServeOptions("m", folder, queue=9, verify_seconds=verify_seconds)
    return ReplicatedService(files.adapter, options, launch), launched


@pytest.mark.slow
def test_a_lost_replica_costs_what_its_snapshots_lack(files, tmp_path):
    lost, kept = streams_of("0", 2), streams_of("1", 2)
    images = {stream: batches(9, seed) for seed, stream in enumerate(lost + kept)}
    outs = {stream: in_process(files, images[stream]) for stream in images}
    may_start = threading.Event()
    may_start.set()
    service, launched = replicated(files, tmp_path, may_start, verify_seconds=99.0)

    async def run():
        async def send(start, stop):
            them = (client(service, s, images[s], outs[s], start, stop) for s in images)
            return dict(zip(images, await asyncio.gather(*them), strict=True))

        await service.start(2)
        may_start.clear()
        launched[0].ends_after = 2 * 5  # answers: its streams have three in a snapshot
        again = await send(0, 7)  # one after another snapshot
        assert {again[stream] for stream in kept} == {0}
        assert sorted(again[stream] for stream in lost) == [1, 2]  # one answer was never sent
        may_start.set()  # the third replica takes the place of the first, and its streams
        while len(service._lanes) < 2:
            await asyncio.sleep(0.01)
        assert set((await send(7, 9)).values()) == {0}
        await service.close()

    asyncio.run(run())
    assert set(launched[0].streams) == set(launched[2].streams) == set(lost)
    assert set(launched[1].streams) == set(lost + kept)


@pytest.mark.slow
@pytest.mark.parametrize("lost_by", ["maintain", "verify"])
def test_maintenance_outlives_replicas_that_are_lost_in_it(files, tmp_path, lost_by):
    """Both replicas are lost during one round, the second while the first is being asked."""
    may_start = threading.Event()
    may_start.set()
    service, launched = replicated(files, tmp_path, may_start, verify_seconds=0.01)

    async def run():
        await service.start(2)
        loop, verified = asyncio.get_running_loop(), threading.Event()

        def lose_both():
            for name, lane in list(service._lanes.items()):
                loop.call_soon_threadsafe(service._lose, name, lane)
            time.sleep(0.1)  # until both are gone
            raise WorkerLostError

        setattr(launched[0], lost_by, lose_both)
        task = asyncio.create_task(service.maintain())
        while len(launched) < 4 or len(service._lanes) < 2:
            await asyncio.sleep(0.01)
        launched[2].verify = lambda: verified.set()
        while not verified.is_set():  # maintenance goes on
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await service.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_replicas_need_a_cluster(files):
    result = cli("serve", *files.arguments, "--replicas", "2")
    assert result.stderr == "caster: --replicas requires --ray\n"


def processes(variable):
    """Replicas that have inherited a variable of this process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_replica = (folder / "cmdline").read_bytes().startswith(b"ray::_Process")
            if is_replica and f"{variable}=".encode() in (folder / "environ").read_bytes():
                yield int(folder.name)


@pytest.mark.whole
def test_a_replica_on_ray_is_killed_under_load(files, tmp_path, monkeypatch):
    variable = f"CASTER_TEST_{os.getpid()}"
    monkeypatch.setenv(variable, "1")
    streams = streams_of("0", 2) + streams_of("1", 2)
    images = {stream: batches(12, seed) for seed, stream in enumerate(streams)}
    outs = {stream: in_process(files, images[stream]) for stream in images}
    repeated, half_way = dict.fromkeys(streams, 0), threading.Barrier(5)

    def client(server, stream, at, stop):
        while at < stop:
            if at == 5 and not repeated[stream]:
                half_way.wait()
            parameters = {"stream": stream, "position": at * SIZE}
            try:
                answer = rest_infer(server, {"x": images[stream][at]}, parameters=parameters)
            except InferenceServerException as error:
                back = where(error)
                repeated[stream] += at - back
                at = back
                continue
            same(answer, outs[stream][at])
            at += 1

    def send(server, start, stop):
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(client, server, each, start, stop) for each in streams]
            if start == 0:
                half_way.wait()
                os.kill(next(processes(variable)), signal.SIGKILL)
            for each in sent:
                each.result()

    folder = tmp_path / "streams"
    ray = "--ray", "local", "--replicas", 2, "--snapshot-every", EVERY
    with served.serving(files, *ray, folder=folder) as server:
        send(server, 0, 10)
        assert sorted(map(bool, repeated.values())) == [False, False, True, True]
        assert len({owner(stream, "01") for stream in streams if repeated[stream]}) == 1
        deadline = time.monotonic() + 60
        while server.metric("caster_workers") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        before = dict(repeated)
        send(server, 10, 11)
        status, errors = server.stop()
    assert (status, repeated) == (0, before), errors
    with served.serving(files, folder=folder) as server:  # on one machine, with the same streams
        send(server, 11, 12)
    assert repeated == before
