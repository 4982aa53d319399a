"""ROID against NumPy: weights, losses, prior, and steps by central differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from caster import CasterError, wrap
from caster_bench.methods.augmented_views import Augmentation, warp
from caster_bench.methods.registry import create
from caster_bench.methods.roid import likelihood_ratio, sample_weights, with_prior
from tests.support.gradients import TanhNetwork, learnt, slope, softmax
from tests.support.problem import model

LOGITS = hnp.arrays(np.float64, (6, 4), elements=st.floats(-9, 9))


def weighted(p, mean, temperature):
    """Rows that are kept and their weights, sample by sample."""
    diversity, certainty = [], []
    for row in p:
        cosine = row @ mean / np.sqrt((row @ row) * (mean @ mean))
        diversity.append(1 - cosine)
        certainty.append(sum(q * np.log(q) for q in row if q > 0))
    diversity, certainty = (
        [(v - min(values)) / ((max(values) - min(values)) or 1.0) for v in values]
        for values in (diversity, certainty)
    )
    kept = [i for i in range(len(p)) if diversity[i] >= np.mean(diversity)]
    return kept, [np.exp(diversity[i] * certainty[i] / temperature) for i in kept]


@given(LOGITS, st.floats(0.1, 3.0))
def test_weights_match_the_loop(logits, temperature):
    mean = np.array([0.4, 0.3, 0.2, 0.1])
    rows, weights = sample_weights(torch.tensor(logits), torch.tensor(mean), temperature)
    p = softmax(logits)
    expected_rows, expected = weighted(p, mean, temperature)
    spread = np.ptp([row @ mean / np.linalg.norm(row) for row in p])
    if spread < 1e-6:  # rounding decides
        return
    assert rows.tolist() == expected_rows
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-4)


@given(LOGITS)
def test_likelihood_ratio_matches_the_loop(logits):
    found = likelihood_ratio(torch.tensor(logits)).numpy()
    for row, value in zip(softmax(logits), found, strict=True):
        p = [min(q, 0.99) for q in row]
        expected = -sum(q * np.log(q / (1 - q) + 1e-5) for q in p)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_prior_of_a_batch():
    logits = np.array([[2.0, 0.0, -1.0], [1.0, 0.5, 0.0]])
    prior = softmax(logits).mean(axis=0)
    smooth = (1 / 2) / prior.max()  # a batch of 2, of 3 classes
    expected = logits * (prior + smooth) / (1 + 3 * smooth)
    np.testing.assert_allclose(with_prior(torch.tensor(logits)).numpy(), expected)
    many = np.repeat(logits, 5, axis=0)
    smooth = (1 / 3) / prior.max()
    expected = many * (prior + smooth) / (1 + 3 * smooth)
    np.testing.assert_allclose(with_prior(torch.tensor(many)).numpy(), expected)


def test_augmentation_continues_the_image_as_its_mirror_image():
    image = torch.arange(64.0).reshape(1, 1, 8, 8) / 64
    shifted = Augmentation(shift=(2, 1), reflect=True)(image)
    columns = [2, 1, 0, 1, 2, 3, 4, 5]
    rows = [1, 0, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(shifted, image[:, :, rows][:, :, :, columns])
    drawn = Augmentation(angle=10.0, scale=1.1, reflect=True)
    inner = warp(image, 10.0, 1.1, (0, 0))[:, :, 3:5, 3:5]  # no edge reaches the centre
    torch.testing.assert_close(drawn(image)[:, :, 3:5, 3:5], inner)


def log_softmax(logits):
    return np.log(softmax(logits))


@pytest.mark.parametrize("mutant", [None, "no averaging", "temperature", "no consistency"])
def test_steps_match_numpy(monkeypatch, mutant):
    small, lr, temperature = TanhNetwork(), 0.05, 1 / 3
    darker = Augmentation(brightness=0.7)
    monkeypatch.setattr(Augmentation, "draw", lambda *_: darker)
    # Pixels from 0 to 1 are values from -4 to 4, so that 0.7 times a pixel is 0.7 v - 1.2.
    settings = {"lr": lr, "optimizer": "sgd", "mean": 0.5, "std": 0.125}
    settings |= {"momentum": 1.0} if mutant == "no averaging" else {}
    settings |= {"temperature": 1.0} if mutant == "temperature" else {}
    if mutant == "no consistency":
        monkeypatch.setattr("caster_bench.methods.roid.cross_entropy", lambda a, b: 0 * a[:, 0])
    method = create("roid", wrap(small.net), **settings)
    at, velocity, mean, same = small.start, np.zeros(2), np.full(3, 1 / 3), True
    for step in (1, 2, 3):
        x = np.clip(np.random.default_rng(step).normal(size=(12, 1, 2, 2)), -3.9, 3.9)
        found = method.predict(x).logits.numpy()
        y = small.logits(x, at)
        prior = softmax(y).mean(axis=0)
        smooth = max(1 / 12, 1 / 3) / prior.max()
        same &= np.allclose(found, y * (prior + smooth) / (1 + 3 * smooth), rtol=1e-4, atol=1e-5)
        kept, weights = weighted(softmax(y), mean, temperature)
        assert 0 < len(kept) < 12
        mean = 0.9 * mean + 0.1 * prior

        def loss(to, x=x, kept=kept, weights=weights):
            own, other = small.logits(x, to)[kept], small.logits(0.7 * x[kept] - 1.2, to)
            p = np.minimum(softmax(own), 0.99)
            ratio = -(p * np.log(p / (1 - p) + 1e-5)).sum(axis=1)
            both = softmax(own) * log_softmax(other) + softmax(other) * log_softmax(own)
            return np.sum(weights * (ratio - both.sum(axis=1) / 2)) / len(x)

        velocity = 0.9 * velocity + slope(loss, at)
        at = 0.99 * (at - lr * velocity) + 0.01 * small.start
        same &= np.allclose(learnt(method), at, rtol=1e-5)
    assert same == (mutant is None)


def test_errors_and_preset():
    with pytest.raises(CasterError, match="roid augments images of floats"):
        create("roid", model()).predict(np.zeros((4, 3, 8, 8), np.int64))
    with pytest.raises(CasterError, match="temperature of roid must be a number above 0"):
        create("roid", model(), temperature=0.0)
    method = create("roid", model(), preset="imagenet")
    assert (method.lr, type(method._optimizer).__name__) == (2.5e-4, "SGD")
