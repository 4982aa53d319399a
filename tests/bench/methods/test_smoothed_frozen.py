"""Frozen answers smoothed along the stream, against a sum over all label sequences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from caster import CasterError, wrap
from caster.core.label_chain import EPSILON, RHO
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.gradients import softmax

C = 3
CENTRES = 2.0 * np.eye(C)


def images(labels, seed=0, noise=1.5):
    return CENTRES[labels] + noise * np.random.default_rng(seed).normal(size=(len(labels), C))


def model():
    return wrap(lambda batch: (batch, batch), version="example-1")


def method(counts=(40, 40, 40)):
    labels = np.repeat(np.arange(C), counts)
    return create("smoothed-frozen", model(), Source.fit(model(), [(images(labels, 9), labels)]))


def by_enumeration(p, past, rho, e, prior):
    """Posterior of every label: a sum over all sequences, with `past` as the last label's law."""
    likelihood = ((1 - e) * p + e * prior) / prior
    posterior = np.zeros_like(p)
    for sequence in product(range(C), repeat=len(p)):
        weight = 1.0
        for t, y in enumerate(sequence):
            stay = past[y] if t == 0 else float(sequence[t - 1] == y)
            weight *= (rho * stay + (1 - rho) * prior[y]) * likelihood[t, y]
        for t, y in enumerate(sequence):
            posterior[t, y] += weight
    return posterior / posterior.sum(axis=1, keepdims=True)


def test_answers_in_runs_are_posteriors_of_the_chain():
    smoothed, prior = method(), np.full(C, 1 / C)
    for k in range(12):  # runs of 20
        smoothed.predict(images(np.full(20, k % C), seed=k))
    batch = images(np.array([0, 0, 0, 1, 1]), seed=99)
    before = smoothed._labels
    found = softmax(smoothed.predict(batch).logits)
    p = softmax(batch)
    chain = before.chain.observe(p)
    expected = np.zeros_like(p)
    for g, weight in enumerate(chain.weights):
        expected += weight * by_enumeration(p, before.chain.last[g], RHO[g], EPSILON[g], prior)
    np.testing.assert_allclose(
        found, expected, atol=1e-3
    )  # pairs of negligible weight are left out
    assert np.abs(found - p).max() > 0.2


def test_runs_become_more_accurate_and_shuffled_streams_keep_the_frozen_answers():
    labels = np.arange(1920) // 20 % C
    shuffled = np.random.default_rng(3).permutation(labels)
    right = {}
    for name, order in (("runs", labels), ("shuffled", shuffled)):
        smoothed, batches = method(), np.split(images(order), 30)
        found = [smoothed.predict(batch).logits for batch in batches]
        changed = [not np.array_equal(f, b) for f, b in zip(found, batches, strict=True)]
        right[name] = np.mean(np.concatenate(found).argmax(1) == order)
        assert any(changed) == (name == "runs")
    frozen = np.mean(images(labels).argmax(1) == labels)
    assert right["runs"] > frozen + 0.1
    assert right["shuffled"] == pytest.approx(frozen, abs=0.02)


def test_a_long_tail_is_corrected_by_its_prior():
    labels = np.random.default_rng(5).choice(C, size=1280, p=[0.9, 0.08, 0.02])
    smoothed, batches = method(), np.split(images(labels), 20)
    found = np.concatenate([smoothed.predict(batch).logits for batch in batches]).argmax(1)
    frozen = np.concatenate(batches).argmax(1)
    assert np.mean(found == labels) > np.mean(frozen == labels) + 0.05


def test_the_prior_is_that_of_the_source():
    assert method((60, 40, 20))._labels.prior == pytest.approx([1 / 2, 1 / 3, 1 / 6])


def test_bad_input_gives_one_line():
    with pytest.raises(CasterError, match="smoothed-frozen needs a state"):
        create("smoothed-frozen", model())
    with pytest.raises(CasterError, match="smoothed-frozen got logits that are not finite"):
        method().predict(np.full((4, C), np.nan))
