"""LAME against a plain loop over samples, and properties of its fixed point."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caster import CasterError, wrap
from caster_bench.methods.lame import assign, knn_affinity, rbf_affinity
from caster_bench.methods.registry import create
from tests.support.gradients import softmax
from tests.support.problem import N_CLASSES, model, source, stream


def problem(n, d, classes, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, d)) * 3
    labels = rng.integers(classes, size=n)
    features = centres[labels] + rng.normal(size=(n, d))
    logits = np.eye(classes)[labels] * 0.6 + rng.normal(size=(n, classes))
    return features, logits


def affinity_by_loop(features, kind, k, *, self_is_near=True, unit=True):
    x = [f / np.linalg.norm(f) if unit else f for f in features]
    n = len(x)
    d = [[math.dist(a, b) for b in x] for a in x]
    w = np.zeros((n, n))
    if kind == "knn":
        for i in range(n):
            others = sorted((j for j in range(n) if j != i), key=lambda j: (d[i][j], j))
            for j in others[:k]:
                w[i, j] = 1.0
        return w
    first = 0 if self_is_near else 1
    width = sum(sorted(row)[first + min(k, n) - 1] for row in d) / n
    for i in range(n):
        for j in range(n):
            w[i, j] = math.exp(-(d[i][j] ** 2) / (2 * width**2)) if i != j or self_is_near else 0
    return w


def fixed_point(logits, w, steps=100, floor=1e-10):
    """z_i proportional to p_i exp(sum_j w_ij z_j), all samples from the same previous z."""
    p = softmax(np.asarray(logits, float)) + floor
    z = p / p.sum(axis=1, keepdims=True)
    for _ in range(steps):
        new = np.zeros_like(z)
        for i in range(len(z)):
            pull = sum(w[i, j] * z[j] for j in range(len(z)))
            row = p[i] * np.exp(pull - pull.max())
            new[i] = row / row.sum()
        z = new
    return z


def answered(features, logits, **settings):
    frozen = wrap(lambda batch: (batch, logits), version="example-1")
    return softmax(create("lame", frozen, **settings).predict(features).logits)


@pytest.mark.parametrize("kind", ["rbf", "knn"])
def test_answers_match_the_loop(kind):
    features, logits = problem(24, 6, 4)
    z = fixed_point(logits, affinity_by_loop(features, kind, 5))
    found = answered(features, logits, affinity=kind)
    np.testing.assert_allclose(found, z, atol=2e-4)
    assert (softmax(logits).argmax(1) != z.argmax(1)).sum() > 2  # it changes answers


@pytest.mark.parametrize(
    "mutant",
    [
        lambda f, y: fixed_point(y, affinity_by_loop(f, "rbf", 5), steps=1),
        lambda f, y: fixed_point(y, affinity_by_loop(f, "rbf", 4)),
        lambda f, y: fixed_point(y, affinity_by_loop(f, "rbf", 5, self_is_near=False)),
        lambda f, y: fixed_point(y, affinity_by_loop(f, "rbf", 5, unit=False)),
        lambda f, y: fixed_point(y, affinity_by_loop(f, "knn", 5)),
    ],
)
def test_other_equations_would_be_noticed(mutant):
    features, logits = problem(24, 6, 4)
    assert np.abs(answered(features, logits) - mutant(features, logits)).max() > 0.01


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 50))
def test_affinities_match_the_loop(n, k, seed):
    features, _ = problem(n, 3, 2, seed)
    unit = torch.tensor(features / np.linalg.norm(features, axis=1, keepdims=True))
    for kind, measure in (("rbf", rbf_affinity), ("knn", knn_affinity)):
        if kind == "rbf" and (n == 1 or k == 1):
            continue  # the nearest is the sample itself: the loop divides by 0
        expected = affinity_by_loop(features, kind, k)
        np.testing.assert_allclose(measure(unit, k).numpy(), expected, atol=1e-9)


def test_width_zero_leaves_each_sample_to_itself():
    distinct = torch.eye(3, dtype=torch.float64)
    assert torch.equal(rbf_affinity(distinct, k=1), distinct)
    same = torch.ones(3, 2, dtype=torch.float64)
    assert torch.equal(rbf_affinity(same, k=5), torch.ones(3, 3, dtype=torch.float64))


@given(st.integers(0, 200))
def test_the_answer_is_a_fixed_point(seed):
    features, logits = problem(16, 4, 3, seed)
    unit = torch.tensor(features / np.linalg.norm(features, axis=1, keepdims=True))
    w, unary = rbf_affinity(unit, 5), torch.tensor(np.log(softmax(logits)))
    z = assign(unary, w).exp()
    again = (unary + w @ z).softmax(dim=1)
    assert float((again - z).abs().max()) < 2e-3


def test_a_single_sample_keeps_its_probabilities():
    (batch,) = stream(1, size=1)
    method = create("lame", model(), source(), affinity="knn")
    found = method.predict(batch).logits.softmax(dim=1)
    torch.testing.assert_close(found, method.frozen.predict(batch).logits.softmax(dim=1))


def test_columns_of_the_state_and_errors():
    method = create("lame", model(), source())
    assert method.predict(stream(1)[0]).logits.shape == (32, N_CLASSES)
    with pytest.raises(CasterError, match="affinity of lame must be rbf or knn, not 'linear'"):
        create("lame", model(), affinity="linear")
    with pytest.raises(CasterError, match="k of lame must be 1 or more"):
        create("lame", model(), k=0)
    bad = wrap(lambda batch: (batch, batch * np.nan), version="example-1")
    with pytest.raises(CasterError, match="lame got logits that are not finite"):
        create("lame", bad).predict(np.ones((2, 3)))
