"""NOTE against plain loops: its layer, its memory, and its step by central differences."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods.note import BalancedReservoir, instance_aware
from caster_bench.methods.registry import create
from tests.support.gradients import learnt, slope, softmax
from tests.support.problem import model, stream


def shrunk(value, by):
    return math.copysign(max(abs(value) - by, 0.0), value)


def by_loop(x, mean, var, eps, k, *, unbiased=True, both=True):
    """Normalise (B, C, L) sample by sample and channel by channel, without scale and shift."""
    out, n = np.zeros_like(x), x.shape[2]
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            mu, sigma2 = mean[c], var[c]
            if n > 1:
                own_mean, own_var = x[b, c].mean(), x[b, c].var(ddof=int(unbiased))
                mu += shrunk(own_mean - mean[c], k * math.sqrt((var[c] + eps) / n))
                if both:
                    error = k * (var[c] + eps) * math.sqrt(2 / (n - 1))
                    sigma2 = max(var[c] + shrunk(own_var - var[c], error), 0.0)
            out[b, c] = (x[b, c] - mu) / math.sqrt(sigma2 + eps)
    return out


def layer_of(channels=3, seed=0):
    layer = nn.BatchNorm2d(channels, affine=False).double().eval()
    rng = np.random.default_rng(seed)
    layer.running_mean.copy_(torch.tensor(rng.normal(size=channels)))
    layer.running_var.copy_(torch.tensor(rng.gamma(2.0, size=channels)))
    return layer


def values_of(shape, seed=1):
    rng = np.random.default_rng(seed)
    spread = rng.gamma(1.0, 2.0, size=(*shape[:2], *(1 for _ in shape[2:])))
    return rng.normal(size=shape) * spread + 2 * rng.normal(size=spread.shape)


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.0, 6.0), st.integers(0, 99))
def test_layer_matches_the_loop(batch, side, k, seed):
    layer, x = layer_of(seed=seed), values_of((batch, 3, side, side), seed)
    found = instance_aware(layer, torch.tensor(x), deviations=k, momentum=0.01)
    mean, var = (part.numpy() for part in (layer.running_mean, layer.running_var))
    expected = by_loop(x.reshape(batch, 3, -1), mean, var, layer.eps, k)
    np.testing.assert_allclose(found.numpy().reshape(expected.shape), expected, rtol=1e-9)


@pytest.mark.parametrize("mutation", [{"unbiased": False}, {"both": False}])
def test_other_layers_would_be_noticed(mutation):
    layer, x = layer_of(), values_of((4, 3, 3, 3))
    found = instance_aware(layer, torch.tensor(x), deviations=1.0, momentum=0.01)
    mean, var = layer.running_mean.numpy(), layer.running_var.numpy()
    mutant = by_loop(x.reshape(4, 3, -1), mean, var, layer.eps, 1.0, **mutation)
    assert np.abs(found.numpy().reshape(mutant.shape) - mutant).max() > 1e-3


def test_no_deviation_is_instance_norm_and_many_are_batchnorm():
    layer, x = layer_of(), torch.tensor(values_of((4, 3, 5, 5)))
    alone = instance_aware(layer, x, deviations=0.0, momentum=0.01)
    var, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
    torch.testing.assert_close(alone, (x - mean) / (var + layer.eps).sqrt())
    frozen = instance_aware(layer, x, deviations=1e9, momentum=0.01)
    torch.testing.assert_close(frozen, layer(x))


def test_training_uses_and_tracks_the_batch():
    layer, x = layer_of(), values_of((4, 3, 3, 3))
    before = layer.running_mean.clone(), layer.running_var.clone()
    layer.training = True
    found = instance_aware(layer, torch.tensor(x), deviations=2.0, momentum=0.1)
    rows = x.transpose(1, 0, 2, 3).reshape(3, -1)
    mean, var = rows.mean(axis=1), rows.var(axis=1, ddof=1)
    expected = by_loop(x.reshape(4, 3, -1), mean, var, layer.eps, 2.0)
    np.testing.assert_allclose(found.numpy().reshape(expected.shape), expected, rtol=1e-9)
    after = layer.running_mean, layer.running_var
    for now, old, new in zip(after, before, (mean, var), strict=True):
        np.testing.assert_allclose(now.numpy(), 0.9 * old.numpy() + 0.1 * new)


def reservoir_by_lists(capacity, predictions, seed):
    """As the authors' code, with lists of sample numbers."""
    draws, data, seen = random.Random(seed), {c: [] for c in range(4)}, dict.fromkeys(range(4), 0)
    for number, c in enumerate(predictions):
        seen[c] += 1
        if sum(map(len, data.values())) >= capacity:
            most = max(map(len, data.values()))
            largest = [k for k, kept in data.items() if len(kept) == most]
            if c not in largest:
                chosen = draws.choice(largest)
                data[chosen].pop(draws.randrange(len(data[chosen])))
            elif draws.uniform(0, 1) <= len(data[c]) / seen[c]:
                data[c].pop(draws.randrange(len(data[c])))
            else:
                continue
        data[c].append(number)
    return [number for c in range(4) for number in data[c]]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9), st.integers(0, 9))
def test_memory_matches_the_authors_lists(predictions, capacity, seed):
    memory = BalancedReservoir(capacity, seed)
    for number, predicted in enumerate(predictions):
        memory.add(torch.tensor(number), predicted)
    kept = [int(image) for image in memory.images]
    assert kept == reservoir_by_lists(capacity, predictions, seed)
    assert len(kept) == min(capacity, len(predictions))


def test_memory_is_balanced_over_predictions():
    memory = BalancedReservoir(20, seed=0)
    for number in range(400):
        memory.add(torch.tensor(number), 0 if number < 350 else number % 4)
    kept = [int(image) for image in memory.images]
    counts = np.bincount([0 if number < 350 else number % 4 for number in kept])
    assert counts.tolist() == [5, 5, 5, 5]


class Small:
    """A BatchNorm over 4 positions of one channel, its mean, and a linear head."""

    def __init__(self):
        self.net = nn.Sequential(
            nn.BatchNorm1d(1), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(1, 3)
        ).double()
        with torch.no_grad():
            self.net[0].weight.fill_(1.3)
            self.net[0].bias.fill_(0.2)
            self.net[0].running_mean.fill_(0.3)
            self.net[0].running_var.fill_(0.8)
            self.net[4].weight.copy_(torch.tensor([[3.0], [-1.0], [-2.0]]))
            self.net[4].bias.copy_(torch.tensor([0.1, 0.3, -0.2]))

    def probabilities(self, x, at, mean, var, k):
        h = by_loop(x, [mean], [var], self.net[0].eps, k) * at[0] + at[1]
        pooled = np.tanh(h).mean(axis=2)
        return softmax(pooled * np.array([3.0, -1.0, -2.0]) + np.array([0.1, 0.3, -0.2]))


def test_steps_match_numpy():
    """Adam's first step is the sign of the gradient, so the second one is compared too."""
    small, lr, k = Small(), 0.01, 1.0
    settings = {"lr": lr, "memory": 6, "momentum": 0.1, "deviations": k}
    method = create("note", wrap(small.net), **settings)
    at, mean, var = np.array([1.3, 0.2]), 0.3, 0.8
    first = second = np.zeros(2)
    memory = BalancedReservoir(6, seed=0)
    for step in (1, 2):
        x = values_of((6, 1, 4), seed=step)
        found = method.predict(x).logits.numpy()
        p = small.probabilities(x, at, mean, var, k)
        np.testing.assert_allclose(softmax(found), p, rtol=1e-5)  # before the step
        for image, predicted in zip(x, p.argmax(axis=1), strict=True):
            memory.add(torch.tensor(image), int(predicted))
        kept = torch.stack(memory.images).numpy()
        own = kept.mean(), kept.var(ddof=1)

        def loss(to, kept=kept, own=own):
            p = small.probabilities(kept, to, *own, k)
            return -(p * np.log(p + 1e-6)).mean()

        gradient = slope(loss, at)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        at = at - lr * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        mean, var = 0.9 * mean + 0.1 * own[0], 0.9 * var + 0.1 * own[1]
        np.testing.assert_allclose(learnt(method), at, rtol=1e-5)
        norm = method.network.module[0]
        np.testing.assert_allclose([norm.running_mean[0], norm.running_var[0]], [mean, var])
        assert not norm.training


def test_learns_every_64_samples_and_answers_before():
    method = create("note", model())
    start = learnt(method)
    first, second = stream(2)
    assert torch.equal(method.forward(first), method.predict(first).logits)
    assert np.array_equal(learnt(method), start)
    method.predict(second)
    assert not np.array_equal(learnt(method), start)
    assert method.retained().features == 64 * 3 * 8 * 8 * 4


def test_a_rejected_batch_leaves_no_trace():
    method, (good, bad) = create("note", model(), memory=8), stream(2)
    method.predict(good)
    before = learnt(method), len(method._memory.images)
    bad[0] = np.nan
    with pytest.raises(CasterError, match="note got logits that are not finite"):
        method.predict(bad)
    assert np.array_equal(before[0], learnt(method))
    assert before[1] == len(method._memory.images)
