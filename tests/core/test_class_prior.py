"""The prior of shuffled samples against direct maximisation, its laws, and when it is believed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import rel_entr, softmax

from caster.core import class_prior
from caster.core.class_prior import (
    apply_prior,
    entropy,
    estimated_prior,
    log_likelihood_ratio,
    mutual_information,
    select_prior,
)
from tests.conftest import close
from tests.support.label_streams import classifier

seeds = st.integers(0, 2**31 - 1)


def case(seed, n_classes=4, n=60):
    rng = np.random.default_rng(seed)
    pi_s = rng.dirichlet(np.full(n_classes, 5.0))
    return rng.dirichlet(np.full(n_classes, 0.4), n), pi_s


def objective(pi, p, pi_s, alpha):
    """Log likelihood of the samples, and of `alpha` samples that have the source's mixture."""
    return np.log(p @ (pi / pi_s)).sum() + alpha * pi_s @ np.log(pi)


def maximised(p, pi_s, alpha):
    """On the simplex, by logits and their gradient."""

    def loss(z):
        pi = softmax(z)
        slope = (p / pi_s / (p @ (pi / pi_s))[:, None]).sum(axis=0) + alpha * pi_s / pi
        return -objective(pi, p, pi_s, alpha), -pi * (slope - pi @ slope)

    return softmax(minimize(loss, np.log(pi_s), jac=True, method="L-BFGS-B", tol=1e-15).x)


# EM


@pytest.mark.parametrize("alpha", [0.5, 4.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_em_finds_the_maximum_of_the_penalised_likelihood(seed, alpha, monkeypatch):
    p, pi_s = case(seed)
    best = maximised(p, pi_s, alpha)
    start, top = objective(pi_s, p, pi_s, alpha), objective(best, p, pi_s, alpha)
    in_few_rounds = objective(estimated_prior(p, pi_s, alpha), p, pi_s, alpha)
    assert top - in_few_rounds < 0.01 * (top - start)
    monkeypatch.setattr(class_prior, "ROUNDS", 2000)
    monkeypatch.setattr(class_prior, "CONVERGED", 0.0)
    close(estimated_prior(p, pi_s, alpha), best, 1e-5)


def test_one_round_is_the_equation(monkeypatch):
    p, pi_s = case(0)
    monkeypatch.setattr(class_prior, "ROUNDS", 1)
    expected = [(sum(row[c] for row in p) + 3 * pi_s[c]) / (60 + 3) for c in range(4)]
    close(estimated_prior(p, pi_s, 3.0), expected, 1e-12)


@given(seeds, st.floats(0.1, 1e3))
def test_every_round_raises_the_objective(seed, alpha):
    p, pi_s = case(seed)
    with pytest.MonkeyPatch.context() as patch:
        values = []
        for rounds in range(8):
            patch.setattr(class_prior, "ROUNDS", rounds)
            values.append(objective(estimated_prior(p, pi_s, alpha), p, pi_s, alpha))
    assert np.all(np.diff(values) >= -1e-10)


@given(seeds)
def test_an_infinite_weight_is_inert(seed):
    p, pi_s = case(seed)
    assert estimated_prior(p, pi_s, math.inf) is pi_s
    assert np.abs(estimated_prior(p, pi_s, 1e12) - pi_s).max() < 1e-9


def test_certain_samples_are_counted():
    labels = np.array([0, 0, 0, 1, 1, 2])
    found = estimated_prior(np.eye(3)[labels], np.full(3, 1 / 3), alpha=3.0)
    close(found, np.array([4, 3, 2]) / 9, 1e-12)


@given(seeds, st.permutations(range(4)))
def test_permuting_the_classes_permutes_the_prior(seed, order):
    p, pi_s = case(seed, n=80)
    pi = estimated_prior(p, pi_s, 2.0)
    close(estimated_prior(p[:, order], pi_s[order], 2.0), pi[order], 1e-12)
    close(
        apply_prior(p[:, order], pi[order], pi_s[order]), apply_prior(p, pi, pi_s)[:, order], 1e-12
    )
    close(
        log_likelihood_ratio(p[:, order], pi[order], pi_s[order]),
        log_likelihood_ratio(p, pi, pi_s),
        1e-12,
    )
    one, other = select_prior(p, pi_s), select_prior(p[:, order], pi_s[order])
    assert (one is None) == (other is None)
    if one is not None:
        close(other, one[order], 1e-12)


@given(seeds)
def test_the_estimate_is_a_distribution_without_zeros(seed):
    p, pi_s = case(seed)
    for samples in (p, np.eye(4)[p.argmax(axis=1)], p.astype(np.float32)):
        pi = estimated_prior(samples, pi_s, 4.0)
        assert (pi > 0).all()
        close(pi.sum(), 1.0, 1e-12)


# Correction


@given(seeds)
def test_corrections_compose_and_can_be_undone(seed):
    p, pi_s = case(seed)
    pi, other = np.random.default_rng(seed).dirichlet(np.full(4, 5.0), 2)
    close(apply_prior(p, pi_s, pi_s), p, 1e-15)
    close(apply_prior(apply_prior(p, pi, pi_s), pi_s, pi), p, 1e-12)
    close(apply_prior(apply_prior(p, pi, pi_s), other, pi), apply_prior(p, other, pi_s), 1e-12)


def test_a_correction_is_bayes_rule():
    """Gaussian classes: the posterior of one prior corrected is the posterior of the other."""
    x = np.linspace(-3, 3, 9)[:, None]
    densities = np.exp(-((x - np.array([-1.0, 0, 2])) ** 2) / 2)
    pi_s, pi = np.array([0.2, 0.5, 0.3]), np.array([0.7, 0.1, 0.2])
    under = [prior * densities / (prior * densities).sum(1, keepdims=True) for prior in (pi_s, pi)]
    close(apply_prior(under[0], pi, pi_s), under[1], 1e-14)
    marginals = [(prior * densities).sum(axis=1) for prior in (pi_s, pi)]
    close(
        log_likelihood_ratio(under[0], pi, pi_s),
        np.log(marginals[1] / marginals[0]).mean(),
        1e-14,
    )


@given(seeds)
def test_the_source_explains_nothing(seed):
    p, pi_s = case(seed)
    close(log_likelihood_ratio(p, pi_s, pi_s), 0.0, 1e-14)


# Belief


def long_tail(n_classes, ratio=100.0):
    weights = ratio ** -np.linspace(0, 1, n_classes)
    return weights / weights.sum()


@pytest.mark.parametrize("n_classes", [2, 10, 100])
@pytest.mark.parametrize("n", [16, 64, 128, 1000])
def test_balanced_samples_keep_the_source(n_classes, n):
    pi_s = np.full(n_classes, 1 / n_classes)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        p = classifier(rng, rng.integers(0, n_classes, n), 0.7, n_classes)
        assert select_prior(p, pi_s) is pi_s


def test_a_preference_keeps_the_source():
    pi_s = np.full(10, 0.1)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        p = classifier(rng, rng.integers(0, 10, 512), 0.7, preferred=0.1)
        assert select_prior(p, pi_s) is pi_s


def test_too_few_samples_keep_the_source_and_few_are_in_doubt():
    pi_s, one_class = np.full(3, 1 / 3), np.eye(3)[np.zeros(256, int)]
    assert select_prior(one_class[:63], pi_s) is pi_s
    assert select_prior(one_class[:64], pi_s) is None
    assert select_prior(one_class[:255], pi_s) is None
    assert select_prior(one_class, pi_s)[0] > 0.9


def test_a_strong_preference_is_doubted():
    """The answers carry more information than the entropy of the prior that it suggests."""
    pi_s, rng = np.full(10, 0.1), np.random.default_rng(0)
    # The network leans towards class 0 in every sample, and still tells the samples apart
    leaning = classifier(rng, rng.integers(0, 10, 512), 1.0, lowest=0.6)
    leaning = apply_prior(leaning, np.array([0.9, *[0.1 / 9] * 9]), pi_s)
    pi = estimated_prior(leaning, pi_s, 10)
    assert log_likelihood_ratio(leaning, pi, pi_s) > 0.2 * math.log(10)
    assert mutual_information(leaning) > entropy(pi)
    assert select_prior(leaning, pi_s) is None


@given(seeds)
def test_information_is_that_of_the_joint_distribution(seed):
    p, _ = case(seed)
    joint = p / len(p)
    expected = rel_entr(joint, joint.sum(axis=0) * joint.sum(axis=1, keepdims=True)).sum()
    close(mutual_information(p), expected, 1e-12)
    assert 0 <= mutual_information(p) <= entropy(p.mean(axis=0)) + 1e-12


@pytest.mark.parametrize(("n", "share"), [(256, 0.9), (1000, 1.0)])
def test_a_long_tail_is_believed(n, share):
    tail, pi_s, believed = long_tail(10), np.full(10, 0.1), []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        p = classifier(rng, rng.choice(10, n, p=tail), 0.95)
        pi = select_prior(p, pi_s)
        believed.append(pi is not None and pi is not pi_s)
        if believed[-1]:
            close(pi, estimated_prior(p, pi_s, 10), 0)
            assert np.abs(pi - tail).sum() < 0.75 * np.abs(pi_s - tail).sum()
    assert np.mean(believed) >= share


def test_a_believed_tail_corrects_errors():
    rng = np.random.default_rng(0)
    tail, pi_s = long_tail(10), np.full(10, 0.1)
    labels = rng.choice(10, 2000, p=tail)
    features = 2.5 * np.eye(10)[labels] + rng.standard_normal((2000, 10))
    p = softmax(2.5 * features, axis=1)  # the posterior under a uniform prior
    pi = select_prior(p, pi_s)
    assert np.abs(pi - tail).sum() < 0.15
    accuracy, better = (np.mean(q.argmax(1) == labels) for q in (p, apply_prior(p, pi, pi_s)))
    assert better > accuracy + 0.05


@pytest.mark.parametrize(
    ("n_classes", "counts", "expected"),
    [
        (2, [760, 240], "believed"),  # explains 0.2 log C
        (2, [680, 320], "doubted"),  # 0.096 log C
        (2, [620, 380], "source"),  # 0.04 log C
        (100, [10] * 40, "believed"),  # 0.2 log C
        (100, [10] * 75, "source"),  # 0.06 log C, in nats more than all of the above for C = 2
    ],
)
def test_belief_is_measured_against_the_log_of_the_classes(n_classes, counts, expected):
    pi_s = np.full(n_classes, 1 / n_classes)
    labels = np.repeat(np.arange(len(counts)), counts)  # both halves alike
    pi = select_prior(np.eye(n_classes)[np.tile(labels, 4)], pi_s)
    assert expected == ("doubted" if pi is None else "source" if pi is pi_s else "believed")


def test_halves_are_explained_by_each_other():
    """A prior that does not carry over from one half to the other is not believed."""
    pi_s = np.full(10, 0.1)
    alternating = np.eye(10)[np.arange(256) % 2] * 0.9 + 0.01
    assert log_likelihood_ratio(alternating, estimated_prior(alternating, pi_s, 10), pi_s) > 1
    assert select_prior(alternating, pi_s) is pi_s
    in_pairs = alternating[np.repeat(np.arange(128), 2)]
    assert select_prior(in_pairs, pi_s)[:2].sum() > 0.8
