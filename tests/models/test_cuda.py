"""How work on a GPU is launched, on a stand-in for CUDA that executes work when it is awaited."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from caster.models import cuda
from caster.models.cuda import GraphRunner, is_launch_bound


class Stream:
    """A CUDA stream that logs what it has to do, and that knows its unfinished events."""

    def __init__(self, name):
        self.name, self.log, self.device = name, [], torch.device("cuda", 0)

    def wait_event(self, event):
        self.log.append(("wait", event.stream.name))

    def wait_stream(self, stream):
        self.log.append(("wait", stream.name))

    def synchronize(self):
        self.log.append("synchronize")

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class Event:
    stream, is_done = None, False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.is_done


@pytest.fixture
def streams(monkeypatch):
    """The caller's stream and the runner's; tensors are allocated on the current one."""
    made = {"caller": Stream("caller"), "own": Stream("own")}
    current = [made["caller"]]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made["own"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda, "RECORD_AT", 10)  # nothing is recorded here
    empty, copies = cuda.Packed.empty, cuda.Packed.copies

    def logged_empty(packed):
        current[0].log.append("allocate")
        return empty(packed)

    def logged_copies(packed, memory=None):
        found = copies(packed, memory)
        current[0].log.append("copy")
        return found

    monkeypatch.setattr(cuda.Packed, "empty", logged_empty)
    monkeypatch.setattr(cuda.Packed, "copies", logged_copies)
    return made


def doubled(tensor):
    return [2 * tensor], ()


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_belong_to_the_stream_of_the_caller(streams, overlap):
    """Else the next allocation there could reuse their memory while the caller reads them."""
    runner = GraphRunner(torch.device("cuda", 0), multiplies=False)
    (output,), _ = runner.run(lambda: [torch.ones(3)], doubled, "settings", overlap)
    assert output.tolist() == [2.0, 2.0, 2.0]
    caller = streams["caller"].log
    own = [done for done in streams["own"].log if done != ("wait", "own")]  # nothing to wait for
    assert torch.cuda.current_stream() is streams["caller"]
    if overlap:  # the caller never waits, and its pending work comes before the copy
        assert caller == ["allocate"]
        assert own == [("wait", "caller"), ("wait", "caller"), "copy"]
    else:
        assert caller == [("wait", "own"), "allocate", "copy"]
        assert own == [("wait", "caller")]


def test_memory_stays_referenced_until_the_work_is_done(streams):
    """Inputs and outputs of a batch may be dropped while the GPU still works on it."""
    runner = GraphRunner(torch.device("cuda", 0), multiplies=False)
    for i in range(3):
        runner.run(lambda: [torch.ones(3)], doubled, "settings", overlap=True)
        assert len(runner._in_flight) == i + 1
    inputs_and_outputs = [len(held) for _, held in runner._in_flight]
    assert inputs_and_outputs == [2, 2, 2]
    events = [event for event, _ in runner._in_flight]
    events[0].is_done = events[2].is_done = True
    runner.run(lambda: [torch.ones(3)], doubled, "settings", overlap=True)
    assert [event for event, _ in runner._in_flight][:2] == events[1:]  # in order


def test_a_runner_that_is_dropped_waits_for_its_work(streams):
    """Else the caller could reuse memory that its stream still writes to."""
    runner = GraphRunner(torch.device("cuda", 0), multiplies=False)
    runner.run(lambda: [torch.ones(3)], doubled, "settings", overlap=True)
    assert "synchronize" not in streams["own"].log
    del runner
    gc.collect()
    assert "synchronize" in streams["own"].log


def test_the_caller_waits_for_work_that_fails(streams):
    """What was launched before the error still uses its memory."""

    def failing(tensor):
        raise ValueError("no kernel")

    runner = GraphRunner(torch.device("cuda", 0), multiplies=False)
    with pytest.raises(ValueError, match="no kernel"):
        runner.run(lambda: [torch.ones(3)], failing, "settings", overlap=True)
    assert streams["caller"].log == [("wait", "own")]
    assert torch.cuda.current_stream() is streams["caller"]


@pytest.mark.parametrize(
    ("host", "gpu", "bound"), [(4.1, 5.3, False), (1.6, 1.7, True), (4.0, 0.5, True)]
)
def test_work_is_launch_bound_if_the_gpu_waits_for_the_host(monkeypatch, host, gpu, bound):
    """Milliseconds; one timing of each is three times as long."""
    clock, delays = [0.0], iter([(3.0, 1.0), (1.0, 1.0), (1.0, 3.0)])  # of host and GPU

    class Timed:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return gpu * delay[1]

    def work():
        delay[:] = next(delays)
        clock[0] += host / 1000 * delay[0]

    delay = [1.0, 1.0]
    monkeypatch.setattr(torch.cuda, "Event", Timed)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Idle())
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: clock[0])
    assert is_launch_bound(work, torch.device("cuda", 0)) is bound


class Idle:
    def synchronize(self):
        pass
