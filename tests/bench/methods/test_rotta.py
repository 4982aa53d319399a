"""RoTTA against plain loops: its layer, its memory, and a step by central differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods import rotta
from caster_bench.methods.augmented_views import Augmentation
from caster_bench.methods.registry import create
from caster_bench.methods.rotta import CategoryBalancedMemory, robust
from tests.support.gradients import TanhNetwork, learnt, slope, softmax
from tests.support.problem import model, stream


def memory_by_lists(capacity, classes, arrivals):
    """As the authors' code: [number, uncertainty, age] of every class; ages grow with each call."""
    data = [[] for _ in range(classes)]

    def score(age, uncertainty):
        return 1 / (1 + math.exp(-age / capacity)) + uncertainty / math.log(classes)

    def removed(among, new):
        worst = None
        for c in among:
            for place, (_, uncertainty, age) in enumerate(data[c]):
                found = score(age, uncertainty)
                if worst is None or found >= worst[0]:
                    worst = found, c, place
        if worst is None:
            return True
        if worst[0] > new:
            data[worst[1]].pop(worst[2])
            return True
        return False

    for number, (c, uncertainty) in enumerate(arrivals):
        new = score(0, uncertainty)
        if len(data[c]) < capacity / classes:
            most = max(map(len, data))
            full = sum(map(len, data)) >= capacity
            among = [k for k in range(classes) if len(data[k]) == most]
            enters = removed(among, new) if full else True
        else:
            enters = removed([c], new)
        if enters:
            data[c].append([number, uncertainty, 0])
        for item in (item for kept in data for item in kept):
            item[2] += 1
    return [(item[0], item[2] / capacity) for kept in data for item in kept]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.2, 0.7, 1.3])), max_size=50),
    st.integers(1, 12),
)
def test_memory_matches_the_authors_lists(arrivals, capacity):
    memory = CategoryBalancedMemory(capacity, 4)
    for number, (predicted, uncertainty) in enumerate(arrivals):
        memory.add(torch.tensor(number), predicted, uncertainty)
    kept = [(int(item.image), memory.age(item)) for item in memory.items]
    assert kept == memory_by_lists(capacity, 4, arrivals)


def layer_of(dims):
    layer = (nn.BatchNorm2d if dims else nn.BatchNorm1d)(2).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for part in (*layer.parameters(), layer.running_mean, layer.running_var):
            part.copy_(torch.tensor(rng.gamma(2.0, size=2)))
    return layer


@pytest.mark.parametrize("shape", [(5, 2), (5, 2, 3, 3)])
def test_layer_matches_numpy(shape):
    layer, x = layer_of(shape[2:]), np.random.default_rng(1).normal(size=shape) * 2 + 1
    mean, var = layer.running_mean.numpy().copy(), layer.running_var.numpy().copy()
    axes = (0, *range(2, len(shape)))
    wide = (slice(None), *(None for _ in shape[2:]))
    weight, bias = (part.detach().numpy()[wide] for part in (layer.weight, layer.bias))
    for training in (False, True):
        layer.training = training
        if training:
            mean = 0.7 * mean + 0.3 * x.mean(axis=axes)
            var = 0.7 * var + 0.3 * x.var(axis=axes)
        expected = (x - mean[wide]) / np.sqrt(var[wide] + layer.eps) * weight + bias
        found = robust(layer, torch.tensor(x), momentum=0.3).detach()
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
        np.testing.assert_allclose(layer.running_mean.numpy(), mean)
        np.testing.assert_allclose(layer.running_var.numpy(), var)


def test_the_batchs_share_of_the_statistics_has_a_gradient():
    layer, x = layer_of(True), torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    layer.training = True
    start = layer.running_mean.clone(), layer.running_var.clone()

    def run(values):
        layer.running_mean, layer.running_var = (part.clone() for part in start)
        return robust(layer, values, momentum=0.3)

    assert torch.autograd.gradcheck(run, (x,))


class Small(TanhNetwork):
    """With the statistics of a source."""

    def __init__(self):
        super().__init__()
        self.net[0].running_mean.fill_(0.3)
        self.net[0].running_var.fill_(0.8)

    def probabilities(self, x, at, mean, var):
        return softmax(self.logits(x, at, mean, var))


@pytest.mark.parametrize("mutant", [None, "unweighted", "teacher follows fully", "no statistics"])
def test_steps_match_numpy(monkeypatch, mutant):
    small, lr, nu, a = Small(), 0.05, 0.25, 0.3
    darker = Augmentation(brightness=0.8)
    monkeypatch.setattr(Augmentation, "draw", lambda *_: darker)
    # Pixels from 0 to 1 are values from -4 to 4, so that 0.8 times a pixel is 0.8 v - 0.8.
    settings = {"lr": lr, "nu": nu, "momentum": a, "memory": 6, "mean": 0.5, "std": 0.125}
    if mutant == "unweighted":
        monkeypatch.setattr(CategoryBalancedMemory, "age", lambda memory, item: 0.0)
    if mutant == "teacher follows fully":
        settings["nu"] = 1.0
    if mutant == "no statistics":
        settings["momentum"] = 0.0
    method = create("rotta", wrap(small.net), **settings)
    student = teacher = np.array([1.3, 0.2])
    moments = {"student": (0.3, 0.8), "teacher": (0.3, 0.8)}
    first = second = np.zeros(2)
    arrivals, images, same = [], [], True
    for step in (1, 2):
        x = np.clip(np.random.default_rng(step).normal(size=(6, 1, 2, 2)) * 1.5 + 0.5, -3.9, 3.9)
        found = softmax(method.predict(x).logits.numpy())
        p = small.probabilities(x, teacher, *moments["teacher"])
        same &= np.allclose(found, p, rtol=1e-5)
        uncertain = -(p * np.log(p + 1e-6)).sum(axis=1)
        arrivals += zip(p.argmax(axis=1).tolist(), uncertain.tolist(), strict=True)
        images += list(x)
        kept = memory_by_lists(6, 3, arrivals)
        memory = np.stack([images[number] for number, _ in kept])
        weights = np.array([math.exp(-age) / (1 + math.exp(-age)) for _, age in kept])
        augmented = 0.8 * memory - 0.8
        for who, seen in (("student", augmented), ("teacher", memory)):
            mean, var = moments[who]
            moments[who] = (1 - a) * mean + a * seen.mean(), (1 - a) * var + a * seen.var()
        target = small.probabilities(memory, teacher, *moments["teacher"])

        def loss(at, augmented=augmented, target=target, weights=weights):
            p = small.probabilities(augmented, at, *moments["student"])
            return (-(target * np.log(p)).sum(axis=1) * weights).mean()

        gradient = slope(loss, student)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        scaled = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        student = student - lr * scaled
        teacher = (1 - nu) * teacher + nu * student
        same &= np.allclose(learnt(method), student, rtol=1e-5)
    assert same == (mutant is None)


def test_learns_every_64_samples_and_answers_with_the_teacher():
    method = create("rotta", model())
    start = learnt(method)
    first, second, third = stream(3)
    frozen = method.frozen.predict(first).logits
    torch.testing.assert_close(method.forward(first), frozen)  # running statistics are the source's
    assert torch.equal(method.forward(first), method.predict(first).logits)
    method.predict(second)
    assert not np.array_equal(learnt(method), start)
    teacher = torch.cat([p.flatten() for p in method.eligible(method.teacher.module).values()])
    moved = learnt(method) - start
    np.testing.assert_allclose(teacher.double().numpy() - start, 0.001 * moved, atol=1e-7)
    assert not torch.equal(method.predict(third).logits, method.frozen.predict(third).logits)
    items = method._memory.items
    assert len(items) <= 64
    assert method.retained().features == len(items) * 3 * 8 * 8 * 4


def test_errors():
    with pytest.raises(CasterError, match="rotta augments images of floats"):
        create("rotta", model()).predict(np.zeros((4, 3, 8, 8), np.int64))
    with pytest.raises(CasterError, match="nu of rotta must be a number from 0 to 1"):
        create("rotta", model(), nu=2.0)
    assert rotta.REVISION == 1
