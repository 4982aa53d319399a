"""The state covers exactly what a method holds; the size covers every byte."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import math
import random
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from importlib import import_module

import cma
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import wrap
from caster.core.arrays import DeviceCopies
from caster_bench.methods.checks.object_state import (
    TRANSIENT,
    content,
    difference,
    measure,
    method_state,
    reachable_bytes,
    same,
    state_of,
)
from tests.support.method_examples import PIXELS, Centred, Learning, layers


class Thing:
    def __init__(self, **held):
        vars(self).update(held)


@dataclass
class Record:
    step: int = 3
    bank: list = field(default_factory=lambda: [np.arange(3.0)])


class Slots:
    __slots__ = "a", "b"

    def __init__(self):
        self.a, self.b = 1, np.zeros(2)


def closing(over):
    return lambda: over


def adam():
    layer = nn.Linear(2, 2)
    layer.weight.data.fill_(0.5), layer.bias.data.fill_(0.5)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def strategy():
    return cma.CMAEvolutionStrategy(4 * [0.0], 1.0, {"seed": np.nan, "popsize": 4, "verbose": -9})


# An object, and a change of its state.
CHANGES = {
    "number": (lambda: Thing(a=1.0), lambda x: setattr(x, "a", np.nextafter(1.0, 2.0))),
    "sign of zero": (lambda: Thing(a=0.0), lambda x: setattr(x, "a", -0.0)),
    "kind of number": (lambda: Thing(a=1), lambda x: setattr(x, "a", True)),
    "text": (lambda: Thing(a="b"), lambda x: setattr(x, "a", "c")),
    "array": (lambda: Thing(a=np.zeros(3)), lambda x: x.a.__setitem__(1, 1e-300)),
    "dtype": (lambda: Thing(a=np.zeros(2)), lambda x: setattr(x, "a", np.zeros(2, np.int64))),
    "shape": (lambda: Thing(a=np.zeros(4)), lambda x: setattr(x, "a", np.zeros((2, 2)))),
    "objects": (lambda: np.array([[1.0], "b"], dtype=object), lambda x: x[0].append(2)),
    "tensor": (lambda: Thing(a=torch.zeros(3)), lambda x: x.a.add_(1e-30)),
    "bfloat16": (lambda: torch.zeros(3, dtype=torch.bfloat16), lambda x: x.add_(1e-30)),
    "requires_grad": (lambda: torch.zeros(3), lambda x: x.requires_grad_()),
    "gradient": (lambda: nn.Parameter(torch.ones(1)), lambda x: (2 * x).backward()),
    "list": (lambda: [1, [2]], lambda x: x[1].append(3)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "key that is no text": (lambda: {(1, "a"): 2}, lambda x: x.update({(1, "a"): 3})),
    "set": (lambda: {"a", "b"}, lambda x: x.add("c")),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda x: x.append(1)),
    "ordered dict": (lambda: OrderedDict(a=1), lambda x: x.update(a=2)),
    "default dict": (lambda: defaultdict(list), lambda x: x["a"].append(2)),
    "dataclass": (Record, lambda x: x.bank[0].fill(0.0)),
    "slots": (Slots, lambda x: x.b.fill(1.0)),
    "module": (layers, lambda x: x[0].weight.data.mul_(1.5)),
    "buffer": (lambda: nn.BatchNorm1d(2), lambda x: x.running_mean.add_(1)),
    "mode": (lambda: nn.BatchNorm1d(2), lambda x: x.eval()),
    "hook": (layers, lambda x: x[0].register_forward_hook(print)),
    "optimizer's moments": (adam, lambda x: x.state[x.param_groups[0]["params"][0]].clear()),
    "optimizer's rate": (adam, lambda x: x.param_groups[0].update(lr=0.2)),
    "optimizer's parameter": (adam, lambda x: x.param_groups[0]["params"][1].data.add_(1)),
    "closure": (lambda: closing(np.zeros(2)), lambda x: x().fill(1.0)),
    "partial": (lambda: functools.partial(max, [1]), lambda x: x.args[0].append(2)),
    "bound method": (lambda: [1].append, lambda x: x(2)),
    "Python's generator": (lambda: random.Random(0), lambda x: x.random()),
    "NumPy's generator": (lambda: np.random.default_rng(0), lambda x: x.normal()),
    "NumPy's old generator": (lambda: np.random.RandomState(0), lambda x: x.normal()),
    "NumPy's bits": (lambda: np.random.PCG64(0), lambda x: x.random_raw()),
    "torch's generator": (torch.Generator, lambda x: torch.rand(1, generator=x)),
    "evolution": (strategy, lambda x: x.tell(*evaluated(x))),
}


def evaluated(search):
    points = search.ask()
    return points, [float(point @ point) for point in points]


@pytest.mark.parametrize("name", CHANGES)
def test_state_differs_only_after_a_change(name):
    make, change = CHANGES[name]
    first, second = make(), make()
    before = state_of(first)
    assert state_of(second) == before  # other objects, other addresses
    assert state_of(first) == before
    change(first)
    assert difference(before, state_of(first)) is not None
    assert state_of(second) == before


def cycle():
    first, second = Thing(), Thing(a=[1.0])
    first.other, second.other, second.a = second, first, [first]
    return first


def with_a_cache(*batches):
    beside = DeviceCopies(np.arange(3))
    for batch in batches:
        beside(batch)
    return beside


class Cached:
    @functools.cached_property
    def made(self):
        return np.zeros(3)

    def __init__(self, looked_at):
        self.a = self.made.tolist() if looked_at else [0.0, 0.0, 0.0]


# Two objects with the same state.
SAME = {
    "a cycle": (cycle, cycle),
    "shared or not": (lambda: Thing(a=np.ones(2), b=np.ones(2)), lambda: twice(np.ones(2))),
    "a cache": (with_a_cache, lambda: with_a_cache(np.zeros(1), torch.zeros(1))),
    "a cached property": (lambda: Cached(False), lambda: Cached(True)),
    "handles": (lambda: layers()[0].register_forward_hook(print), lambda: handle_later()),
    "hooks": (lambda: hooked(1), lambda: hooked(3)),
    "a lock": (threading.Lock, threading.Lock),
    "strides": (lambda: np.arange(6.0).reshape(2, 3).T, lambda: np.arange(6.0).reshape(2, 3).T + 0),
    "a set": (lambda: {"a", "b", (1,)}, lambda: {(1,), "b", "a"}),
}


def twice(array):
    return Thing(a=array, b=array)


def handle_later():
    layers()[0].register_forward_hook(print)
    return layers()[0].register_forward_hook(print)


def hooked(times):
    for _ in range(times):
        layer = nn.Linear(1, 1)
        layer.register_forward_pre_hook(print)
    nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
    return layer


@pytest.mark.parametrize("name", SAME)
def test_irrelevant_differences_are_ignored(name):
    first, second = SAME[name]
    held = Thing(a=first()), Thing(a=second())
    assert difference(state_of(held[0]), state_of(held[1])) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | arrays.arrays(np.float32, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(lambda a: Thing(a=a), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_copy_has_the_same_state(value):
    assert state_of(copy.deepcopy(value)) == state_of(value)


@given(VALUES, st.floats(allow_nan=False))
def test_any_changed_number_is_found(value, number):
    held = Thing(a=value, b=[number])
    before = state_of(held)
    held.b[0] = math.nextafter(number, math.inf) if number < math.inf else 0.0
    assert difference(before, state_of(held)) == ".b[0]"


@pytest.mark.parametrize("name", TRANSIENT)
def test_transient_classes_exist(name):
    home, _, kind = name.rpartition(".")
    assert isinstance(getattr(import_module(home), kind), type)


def test_global_generators_and_loggers_are_not_state():
    held = Thing(a=np.random.normal, b=random.random, c=logging.getLogger("caster"))
    before = state_of(held)
    kept = np.random.get_state()
    try:
        np.random.normal()
        assert state_of(held) == before
    finally:
        np.random.set_state(kept)


def test_frozen_model_is_left_out_everywhere():
    model = wrap(layers())
    method = Learning(model)
    method.also, method.closing = [model.module], closing(model.module[0].weight)
    before, size = method_state(method), reachable_bytes(method)
    model.module[0].weight.data.add_(1.0)
    assert method_state(method) == before
    method.view = model.module[2].weight.detach()
    assert reachable_bytes(method) == size
    method.view = model.module[2].weight.detach().clone()
    assert reachable_bytes(method) == size + 60


def test_bits_are_compared():
    assert same(np.array([np.nan]), np.array([np.nan]))
    assert not same(np.array([0.0]), np.array([-0.0]))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert content(torch.zeros((), dtype=torch.bfloat16)) != content(torch.zeros(()))


HELD = {
    "list": (lambda: [np.zeros(4)], 32),
    "view of a larger array": (lambda: np.zeros((8, 4))[0], 256),
    "view of a larger tensor": (lambda: torch.zeros(8, 4)[0], 128),
    "the same twice": (lambda: twice(np.zeros(4)), 32),
    "two views of one": (lambda: np.zeros((2, 4))[:].reshape(-1)[:3], 64),
    "one torch and NumPy share": (lambda: shared(torch.zeros(4)), 16),
    "key of a dict": (lambda: {torch.zeros(4): 1}, 16),
    "closure": (lambda: closing(np.zeros(4)), 32),
    "default": (lambda: lambda a=np.zeros(4): a, 32),  # noqa: B008
    "partial": (lambda: functools.partial(max, np.zeros(4)), 32),
    "slots": (Slots, 16),
    "hook": (lambda: layer_with(closing(np.zeros(4))), 32),
    "module": (lambda: nn.Linear(2, 3), 36),
    "optimizer": (adam, 24 + 2 * 24 + 8 + 24),  # parameters, moments, steps, gradients
    "generator at work": (lambda: started(np.zeros(4)), 32),
    "cache": (lambda: with_a_cache(torch.zeros(1)), 24),
    "objects": (lambda: np.array([np.zeros(4), None], dtype=object), 16 + 32),
}


def shared(tensor):
    return [tensor, tensor.numpy()]


def layer_with(hook):
    layer = nn.Identity()
    layer.register_forward_hook(hook)
    return layer


def started(array):
    def work():
        yield len(array)
        yield array

    running = work()
    next(running)
    return running


@pytest.mark.parametrize("name", HELD)
def test_every_byte_is_counted(name):
    make, size = HELD[name]
    method = Centred(PIXELS)
    before = reachable_bytes(method)
    method.held = make()
    assert reachable_bytes(method) == before + size


def test_autograd_graph_keeps_its_inputs_alive():
    method = Centred(PIXELS)
    before = measure(method)
    weight = nn.Parameter(torch.ones(10))
    method.held = (weight * torch.ones(10)).exp().sum()
    gc.collect()
    after = measure(method)
    assert after.bytes - before.bytes == 4 + 40 + 40 + 40  # itself, weight, ones and exp's result
    assert after.items > before.items
    method.held = method.held.detach()
    assert measure(method).bytes - before.bytes == 4


def test_caches_can_be_left_out():
    method = Centred(PIXELS)
    before = reachable_bytes(method, caches=False)
    method.held = with_a_cache(np.zeros(1), torch.zeros(1))
    assert reachable_bytes(method, caches=False) == before + 24
    assert reachable_bytes(method) >= before + 24
