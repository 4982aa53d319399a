"""Streams of layer transport: one client's and one thread's each, over one frozen model."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster import Adapter, CasterError, wrap
from caster.core.threads import SingleThread
from caster.models.torch import TorchModel
from caster_bench.methods.checks.object_state import method_state
from caster_bench.methods.registry import create
from tests.support.problem import model, source, stream
from tests.support.sampling import first_fast, sampled

NAMES = ("layer-transport", "layer-transport-ungated", "mixture-transport")
THREADS = 4


def another(method):
    """The method with a stream of its own, over the same model and source."""
    found = copy.copy(method)
    found.transport = method.transport.new_stream()
    return found


class Slow(nn.Module):
    """A layer in which a pass gives way to other threads."""

    def forward(self, x):
        time.sleep(0.002)
        return x


def slow_model(kind="batch"):
    """The network with such a layer behind the first ones."""
    layers = list(model(kind).module)
    return wrap(nn.Sequential(*layers[:1], Slow(), *layers[1:2], Slow(), *layers[2:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_in_use_rejects_another_thread(name):
    frozen = slow_model()
    method = create(name, frozen, caster.fit(frozen, source().batches, layers=True).state)
    start = threading.Barrier(THREADS)

    def work(batch):
        start.wait()
        try:
            return method.predict(batch).reason
        except CasterError as error:
            return str(error)

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(work, stream(THREADS)))
    rejected = [answer for answer in answers if "new_stream()" in answer]
    assert 1 <= len(rejected) < THREADS
    assert all(answer in ("accepted", "ratio", "ungated", *rejected) for answer in answers)
    method.reset()
    assert method.predict(stream(1)[0]).logits.shape == (32, 4)  # nobody is inside any more


@pytest.mark.parametrize(
    ("kind", "name"), first_fast(sampled(product(["batch", "layer"], NAMES), 3))
)
def test_streams_in_threads_answer_as_one_after_the_other(name, kind):
    frozen = slow_model(kind)
    known = caster.fit(frozen, source(kind).batches, layers=True).state
    clients = [stream(6, size=8, shift=0.4 * i, seed=i) for i in range(THREADS)]
    expected = []
    for batches in clients:
        method = create(name, frozen, known)
        expected.append([method.predict(batch).logits for batch in batches])
    first = create(name, frozen, known)
    start = threading.Barrier(THREADS)

    def work(batches):
        start.wait()
        own = another(first)  # while others run
        return [own.predict(batch).logits for batch in batches]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, clients))
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    assert not any(hooks for part in frozen.module.modules() for hooks in part._forward_hooks)
    assert not any(hooks for part in frozen.module.modules() for hooks in part._forward_pre_hooks)


@pytest.mark.parametrize(("kind", "name"), first_fast(sampled(product(["batch", "vit"], NAMES), 3)))
def test_a_new_stream_is_as_constructed_and_shares_weights_and_source(name, kind):
    known = caster.fit(model(kind), source(kind).batches)
    options = {"maps": "full"} if kind == "vit" else {}
    method = create(name, model(kind), known.state, **options)
    before = method_state(method)
    for batch in stream(4, size=8):
        method.predict(batch)
    other = another(method)
    assert method_state(other) == before
    assert [*other.transport._alignment._twin.module.parameters()] == [
        *model(kind).module.parameters()
    ]
    moments = [
        [spot.source.mean.data_ptr() for spot in one.transport._alignment._sites]
        for one in (method, other)
    ]
    assert moments[0] == moments[1]
    past = method_state(method)
    other.predict(stream(1)[0])
    assert method_state(method) == past


def test_copies_of_a_stream_start_unlocked():
    one = SingleThread()
    with one:
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            with other:
                pass
        with pytest.raises(CasterError, match="two threads"), one:
            pass


@pytest.mark.parametrize("head", [None, "14"])
def test_threads_share_a_frozen_model(head):
    frozen = TorchModel(slow_model().module, head=head)
    batches = stream(2 * THREADS)
    expected = [model()(batch) for batch in batches]
    start = threading.Barrier(THREADS)

    def work(batch):
        start.wait()
        return frozen(batch)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, batches))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.logits, other.logits)


@pytest.mark.slow
def test_threads_share_an_adapter():
    """Batches of many sizes, whose moments a cache of a few holds."""
    state = caster.fit(model(), source().batches).state
    batches = [batch[: 2 + i % 13] for i, batch in enumerate(stream(48))]
    alone = Adapter(model(), state)
    expected = [alone(batch) for batch in batches]
    shared = Adapter(model(), state)
    start = threading.Barrier(THREADS)

    def work(first):
        start.wait()
        return [shared(batch) for batch in batches[first::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for first, answers in enumerate(found):
        for one, other in zip(answers, expected[first::THREADS], strict=True):
            np.testing.assert_array_equal(one.labels, other.labels)
            assert one.verdict == other.verdict


def test_a_copy_made_during_a_pass_has_no_hook_of_it():
    """Which would go on collecting features of the thread that the pass is of."""
    frozen = wrap(copy.deepcopy(model().module))
    frozen(stream(1)[0])
    twins = []
    frozen.module[0].register_forward_hook(lambda *given: twins.append(frozen.twin()))
    frozen(stream(1)[0])
    (twin,) = twins
    assert not any(part._forward_pre_hooks for part in twin.module.modules())
    assert len(twin.module[0]._forward_hooks) == 1  # the user's
