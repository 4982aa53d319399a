"""The label chain against enumeration and transition matrices, its laws, and simulated streams."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from caster.core import label_chain
from caster.core.class_prior import apply_prior
from caster.core.label_chain import (
    EPSILON,
    HISTORY,
    LOG_PRIOR,
    MAX_EVIDENCE,
    MAX_FREQUENCY,
    RHO,
    SOURCE_WEIGHT,
    WINDOW,
    LabelChain,
)
from tests.conftest import close
from tests.support.label_streams import classifier, follow, verdicts

seeds = st.integers(0, 2**31 - 1)
G = len(RHO)


def some_chain(rng, n_classes, count=100.0):
    """A chain in the middle of a stream, all of whose pairs count."""
    return LabelChain(
        rng.dirichlet(np.full(n_classes, 5.0)),
        rng.dirichlet(np.ones(n_classes), G),
        rng.uniform(-1, 1, G) - LOG_PRIOR,
        count * rng.dirichlet(np.ones(n_classes)),
        count,
        count / 2 * rng.dirichlet(np.ones(n_classes), 2),
        0.4 * count,
        count * np.array([0.3, 0.2]),
    )


def posterior(chain, p):
    """Smoothed probabilities; the chain beside them is the advanced one."""
    found, after = chain.smooth(p)
    np.testing.assert_array_equal(after.last, chain.advance(p).last)
    return found


def likelihood(p, prior, e):
    return ((1 - e) * p + e * prior) / prior


def enumerated(p, prior, last, rho, e, g):
    """Posteriors (n, C) and the likelihood of all samples: a sum over all label sequences."""
    (n, n_classes), L = p.shape, likelihood(p, prior, e)
    found = np.zeros((n, n_classes))
    for before, *labels in product(range(n_classes), repeat=n + 1):
        joint, previous = last[before], before
        for t, y in enumerate(labels):
            joint *= (rho * (y == previous) + (1 - rho) * g[y]) * L[t, y]
            previous = y
        found[np.arange(n), labels] += joint
    return found / found[0].sum(), found[0].sum()


def by_matrices(p, prior, last, rho, e, g):
    """The same by transition matrices and logarithms, for longer batches."""
    with np.errstate(divide="ignore"):
        T = np.log(rho * np.eye(len(g)) + (1 - rho) * g[None, :])  # from, to
        L, now = np.log(likelihood(p, prior, e)), np.log(last)
    forward, backward = [], [np.zeros(len(g))]
    for t in range(len(p)):
        now = np.logaddexp.reduce(now[:, None] + T, axis=0) + L[t]
        forward.append(now)
    for t in range(len(p) - 1, 0, -1):
        backward.append(np.logaddexp.reduce(T + L[t] + backward[-1], axis=1))
    joint = np.array(forward) + np.array(backward[::-1])
    log_likelihoods = np.logaddexp.reduce(forward, axis=1)  # of the first t samples
    return np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)), log_likelihoods


def counted(p, prior, f):
    """Sums of the labels' probabilities under the frequencies f, label by label."""
    totals = [0.0] * len(f)
    for row in p:
        joint = [row[c] / prior[c] * f[c] for c in range(len(f))]
        for c, value in enumerate(joint):
            totals[c] += value / sum(joint)
    return np.array(totals)


def shrunk(totals, count, prior):
    """Frequencies with enough samples of the source to leave each class at most `MAX_FREQUENCY`."""
    agreed = float(SOURCE_WEIGHT)
    for total, pi in zip(totals, prior, strict=True):
        if pi < MAX_FREQUENCY:  # (total + agreed pi) / (count + agreed) = MAX_FREQUENCY
            agreed = max(agreed, (total - MAX_FREQUENCY * count) / (MAX_FREQUENCY - pi))
    both = [total + agreed * pi for total, pi in zip(totals, prior, strict=True)]
    return np.array(both) / (count + agreed)


def each_pair(reference, chain, p, g):
    return [
        reference(p, chain.prior, last, rho, e, g)
        for last, rho, e in zip(chain.last, RHO, EPSILON, strict=True)
    ]


# References


def test_posteriors_are_sums_over_all_label_sequences():
    rng = np.random.default_rng(0)
    chain, p = some_chain(rng, 3), rng.dirichlet(np.ones(3), 5)
    each = np.array([found for found, _ in each_pair(enumerated, chain, p, chain.prior)])
    close(posterior(chain, p), np.tensordot(chain.weights, each, 1), 1e-12)
    close(chain.advance(p).last, each[:, -1], 1e-12)
    sticky = chain.weights[1:] / (1 - chain.weights[0])
    close(chain.in_runs(p), np.tensordot(sticky, each[1:], 1), 1e-12)


def test_evidence_is_the_faded_log_ratio_of_enumerated_likelihoods():
    rng = np.random.default_rng(1)
    chain, p = some_chain(rng, 3), rng.dirichlet(np.ones(3), 5)
    chain = replace(chain, evidence=rng.uniform(-5, 5, G))
    seen = chain.observe(p)
    f = shrunk(chain.totals, chain.count, chain.prior)
    totals = chain.totals + counted(p, chain.prior, f)
    f, expected = shrunk(totals, chain.count + 5, chain.prior), chain.evidence
    before = np.ones(G)
    for t in range(1, 6):
        now = np.array([Z for _, Z in each_pair(enumerated, chain, p[:t], f)])
        independent = [likelihood(p[t - 1], chain.prior, e) @ f for e in EPSILON]
        expected = (1 - 1 / WINDOW) * expected + np.log(now / before / independent)
        before = now
    close(seen.evidence, expected, 1e-12)
    close(seen.totals, totals, 1e-15)
    close(seen.frequencies, f, 1e-14)
    assert seen.count == chain.count + 5
    assert seen.last is chain.last  # only `advance` moves on


@settings(max_examples=15)
@given(seeds, st.integers(2, 7), st.integers(1, 30))
def test_longer_batches_agree_with_transition_matrices(seed, n_classes, n):
    rng = np.random.default_rng(seed)
    chain, p = some_chain(rng, n_classes), rng.dirichlet(np.full(n_classes, 0.3), n) + 1e-12
    p /= p.sum(axis=1, keepdims=True)
    each = np.array([found for found, _ in each_pair(by_matrices, chain, p, chain.prior)])
    close(posterior(chain, p), np.tensordot(chain.weights, each, 1), 1e-9)
    close(chain.advance(p).last, each[:, -1], 1e-9)
    seen = replace(chain, evidence=np.zeros(G)).observe(p)
    logs = np.array([Z for _, Z in each_pair(by_matrices, chain, p, seen.frequencies)])
    L = np.array([likelihood(p, chain.prior, e) for e in EPSILON])
    gains = np.diff(logs, axis=1, prepend=0.0) - np.log(L @ seen.frequencies)
    fading = (1 - 1 / WINDOW) ** np.arange(n - 1, -1, -1)
    close(seen.evidence, np.clip(gains @ fading, -MAX_EVIDENCE, MAX_EVIDENCE), 1e-9)


def test_weights_are_bayes_rule():
    chain = LabelChain.start(np.full(3, 1 / 3))
    close(chain.weights, np.exp(LOG_PRIOR), 1e-15)
    chain = replace(chain, evidence=np.linspace(-MAX_EVIDENCE, MAX_EVIDENCE, G))
    joint = np.exp(LOG_PRIOR + chain.evidence)
    close(chain.weights, joint / joint.sum(), 1e-12)


def test_pairs_of_negligible_weight_are_left_out():
    rng = np.random.default_rng(2)
    chain, p = some_chain(rng, 4), rng.dirichlet(np.ones(4), 6)
    chain = replace(chain, evidence=rng.uniform(-20, 8, G))
    kept = chain.weights > label_chain.NEGLIGIBLE
    assert 2 < kept.sum() < G - 2
    each = np.array([found for found, _ in each_pair(by_matrices, chain, p, chain.prior)])
    exact = np.tensordot(chain.weights, each, 1)
    assert 0 < np.abs(posterior(chain, p) - exact).max() < G * label_chain.NEGLIGIBLE
    last = chain.advance(p).last
    close(last[kept], each[kept, -1], 1e-12)
    assert (last[1:][~kept[1:]] == chain.prior).all()


def test_agreement_is_the_faded_sum_of_products_with_labels_in_runs():
    rng = np.random.default_rng(4)
    chain, p = some_chain(rng, 3), rng.dirichlet(np.ones(3), 5)
    chain = replace(chain, evidence=9.0 * (np.arange(G) > 0))
    seen = chain.observe(p)
    assert seen.is_evident
    labels, expected = seen.in_runs(p), list(chain.agreement)
    for row, label in zip(p, labels, strict=True):
        for i, other in enumerate((label, row)):
            product = sum(row[c] * other[c] for c in range(3))
            expected[i] = (1 - 1 / WINDOW) * expected[i] + product
    close(seen.agreement, np.array(expected), 1e-12)
    shuffled = replace(chain, evidence=-chain.evidence).observe(p)
    assert not shuffled.is_evident
    close(shuffled.agreement, (1 - 1 / WINDOW) ** 5 * chain.agreement, 1e-12)


# Laws


@given(seeds, st.integers(2, 8), st.integers(1, 20))
def test_shuffled_streams_get_their_probabilities_back(seed, n_classes, n):
    rng = np.random.default_rng(seed)
    against_runs = np.array([0.0, *[-10 * MAX_EVIDENCE] * (G - 1)])
    chain = replace(some_chain(rng, n_classes), evidence=against_runs)
    p = rng.dirichlet(np.ones(n_classes), n)
    assert not chain.is_correlated
    close(posterior(chain, p), p, 1e-12)


@given(seeds, st.permutations(range(5)))
def test_permuting_the_classes_permutes_everything(seed, order):
    rng = np.random.default_rng(seed)
    chain = some_chain(rng, 5)
    permuted = replace(
        chain,
        prior=chain.prior[order],
        last=chain.last[:, order],
        totals=chain.totals[order],
        sums=chain.sums[:, order],
    )
    p = rng.dirichlet(np.full(5, 0.5), 12)
    close(posterior(permuted, p[:, order]), posterior(chain, p)[:, order], 1e-12)
    close(permuted.in_runs(p[:, order]), chain.in_runs(p)[:, order], 1e-12)
    one, other = chain.observe(p).advance(p), permuted.observe(p[:, order]).advance(p[:, order])
    close(other.evidence, one.evidence, 1e-11)
    close(other.last, one.last[:, order], 1e-12)
    close(other.frequencies, one.frequencies[order], 1e-12)
    close(other.surplus, one.surplus, 1e-11)
    close(other.agreement, one.agreement, 1e-11)


@given(seeds, st.integers(1, 15))
def test_a_first_batch_reversed_has_the_reversed_posterior(seed, n):
    """The chain is reversible, and starts in its stationary distribution."""
    rng = np.random.default_rng(seed)
    chain, p = LabelChain.start(rng.dirichlet(np.full(4, 5.0))), rng.dirichlet(np.ones(4), n)
    chain = replace(chain, evidence=-LOG_PRIOR)
    close(posterior(chain, p[::-1]), posterior(chain, p)[::-1], 1e-12)


@given(seeds, st.integers(1, 11))
def test_the_past_of_a_split_batch_is_that_of_the_whole(seed, cut):
    rng = np.random.default_rng(seed)
    chain, p = some_chain(rng, 4), rng.dirichlet(np.ones(4), 12)
    split, whole = chain.advance(p[:cut]).advance(p[cut:]), chain.advance(p)
    close(split.last, whole.last, 1e-12)
    # The later part sees the same past and future either way
    close(posterior(chain.advance(p[:cut]), p[cut:]), posterior(chain, p)[cut:], 1e-12)


@given(seeds, st.integers(1, 11))
def test_a_split_batch_counts_its_later_part_under_the_frequencies_of_the_earlier(seed, cut):
    """Only sure labels have the same frequencies either way; the order within a part is free."""
    rng = np.random.default_rng(seed)
    chain, p = some_chain(rng, 4), rng.dirichlet(np.ones(4), 12)
    first = chain.observe(p[:cut])
    two, whole = first.observe(p[cut:]), chain.observe(p)
    close(two.totals, first.totals + counted(p[cut:], chain.prior, first.frequencies), 1e-12)
    close(whole.totals, first.totals + counted(p[cut:], chain.prior, chain.frequencies), 1e-12)
    assert two.count == whole.count
    close(chain.observe(p[rng.permutation(12)]).totals, whole.totals, 1e-12)
    sure = np.eye(4)[rng.integers(0, 4, 12)]
    two, whole = chain.observe(sure[:cut]).observe(sure[cut:]), chain.observe(sure)
    close(two.frequencies, whole.frequencies, 1e-12)


@given(seeds, st.integers(0, 3000))
def test_the_evidence_of_a_split_batch_is_that_of_the_whole_at_equal_frequencies(seed, more):
    """Frequencies include the batch: both halves must be a fixed point of EM."""
    rng = np.random.default_rng(seed)
    labels, count = rng.dirichlet(np.ones(4), 6), 300.0 + more
    chain = replace(some_chain(rng, 4), totals=count * labels.mean(axis=0), count=count)
    # These labels' probabilities under the frequencies have the frequencies as their mean
    labels = (count * labels + SOURCE_WEIGHT * chain.prior) / (count + SOURCE_WEIGHT)
    half = apply_prior(labels, chain.prior, chain.frequencies)
    other = half[rng.permutation(6)]
    first = chain.observe(half)
    f = first.frequencies
    close(f, chain.frequencies, 1e-12)
    # Evidence draws new labels from the frequencies, and so must the past of the second half
    last = np.array([found[-1] for found, _ in each_pair(by_matrices, chain, half, f)])
    split = replace(first, last=last).observe(other)
    close(split.evidence, chain.observe(np.concatenate([half, other])).evidence, 1e-10)


@given(seeds, st.integers(1, 12))
def test_the_last_sample_has_no_future(seed, n):
    rng = np.random.default_rng(seed)
    chain, p = some_chain(rng, 4), rng.dirichlet(np.ones(4), n)
    one_by_one = chain
    for sample in p[:-1]:
        one_by_one = one_by_one.advance(sample[None])
    close(posterior(chain, p)[-1], chain.weights @ chain.advance(p).last, 1e-12)
    close(posterior(one_by_one, p[-1:])[0], posterior(chain, p)[-1], 1e-12)


EXTREMES = {
    "one-hot": np.eye(4)[[0, 1, 1, 2, 0, 3, 3, 3]],
    "uniform": np.full((8, 4), 0.25),
    "subnormal": np.array([[1.0, 5e-324, 0, 5e-324], [5e-324, 0, 1.0, 0]] * 4),
    "float32": np.eye(4, dtype=np.float32)[[0, 1] * 4] * np.float32(1 - 3e-7) + np.float32(1e-7),
}


@pytest.mark.parametrize("prior", [np.full(4, 0.25), np.array([1 - 3e-9, 1e-9, 1e-9, 1e-9])])
@pytest.mark.parametrize("p", EXTREMES.values(), ids=list(EXTREMES))
def test_extreme_probabilities_stay_finite(p, prior):
    chain = LabelChain.start(prior)
    for _ in range(40):
        chain = chain.observe(p)
        for found in (posterior(chain, p), chain.in_runs(p), chain.frequencies[None]):
            assert np.isfinite(found).all()
            assert (found >= 0).all()
            close(found.sum(axis=1), np.ones(len(found)), np.finfo(p.dtype).eps * 8)
        chain = chain.advance(p)
    assert np.isfinite(chain.evidence).all()
    assert np.abs(chain.evidence).max() <= MAX_EVIDENCE
    close(chain.last.sum(axis=1), np.ones(G), 1e-12)


def test_frequencies_start_at_the_source_and_forget():
    rng = np.random.default_rng(3)
    prior = np.array([0.7, 0.2, 0.1])
    chain = LabelChain.start(prior)
    assert (chain.frequencies == prior).all()
    for n in (1, 64, 192):  # the source counts as 64 samples
        counts = 64 * prior + n * np.eye(3)[1]
        close(chain.observe(np.eye(3)[np.full(n, 1)]).frequencies, counts / counts.sum(), 1e-12)
    for label in (1, 2):
        for _ in range(HISTORY // 512 * 4):
            chain = chain.observe(np.eye(3)[np.full(512, label)])
    assert chain.count == HISTORY
    assert np.abs(chain.frequencies - [0.7 / 4.5, 0.2 / 4.5, MAX_FREQUENCY]).max() < 0.01
    p = rng.dirichlet(np.ones(3), 2 * HISTORY)
    huge = chain.observe(p)
    close(huge.totals, counted(p, prior, chain.frequencies), 1e-12)  # all of it from this batch
    assert huge.count == 2 * HISTORY


@given(seeds, st.integers(2, 6), st.floats(0, 1e4))
def test_the_largest_frequency_is_capped_by_more_of_the_source(seed, n_classes, count):
    rng = np.random.default_rng(seed)
    for spread in (0.1, 1.0):  # of the prior and of what was seen: nearly one class, or several
        chain = replace(
            LabelChain.start(rng.dirichlet(np.full(n_classes, spread)) * 0.999 + 0.001 / n_classes),
            totals=count * rng.dirichlet(np.full(n_classes, spread)),
            count=count,
        )
        f = chain.frequencies
        close(f, shrunk(chain.totals, count, chain.prior), 1e-12)
        close(f.sum(), 1.0, 1e-12)
        assert f.max() <= MAX_FREQUENCY + 1e-12 or chain.prior.max() >= MAX_FREQUENCY


@pytest.mark.slow
def test_frequencies_become_those_of_em():
    """Each batch is a step of EM; the source counts as `SOURCE_WEIGHT` of `HISTORY` samples."""
    rng = np.random.default_rng(4)
    prior, n = np.array([0.4, 0.3, 0.2, 0.1]), 512
    labels = rng.choice(4, n, p=[0.1, 0.2, 0.2, 0.5])
    p = classifier(rng, labels, 0.8, n_classes=4, lowest=0.7)
    chain, f = LabelChain.start(prior), prior
    for _ in range(150):
        chain = chain.observe(p)
        f = (counted(p, prior, f) / n * HISTORY + SOURCE_WEIGHT * prior) / (HISTORY + SOURCE_WEIGHT)
    assert np.abs(chain.frequencies - f).max() < 1e-4
    assert np.abs(f - p.mean(axis=0)).max() > 0.2


@pytest.mark.slow
def test_memory_stays_small_with_many_classes():
    """All pairs, a thousand classes and batches of 512: G n C numbers are 45 MB."""
    rng = np.random.default_rng(5)
    chain, p = some_chain(rng, 1000), rng.dirichlet(np.ones(1000), 512)
    for work in (chain.observe, chain.in_runs, chain.smooth, chain.advance):
        tracemalloc.start()
        try:
            work(p)
            assert tracemalloc.get_traced_memory()[1] < 200e6
        finally:
            tracemalloc.stop()


# Simulated streams of ten classes


def shuffled(rng, n):
    return rng.integers(0, 10, n)


def samples_until(found, batch_size=1):
    assert found.any()
    return (int(found.argmax()) + 1) * batch_size


@pytest.mark.parametrize("accuracy", [0.5, 0.7, 0.9])
def test_shuffled_streams_are_not_correlated(accuracy):
    rng = np.random.default_rng(10)
    for _ in range(4):
        assert not verdicts(classifier(rng, shuffled(rng, 2000), accuracy), 64).any()


def test_shuffled_single_samples_are_hardly_ever_correlated():
    rng = np.random.default_rng(11)
    alarms = [
        verdicts(classifier(rng, shuffled(rng, 500), accuracy), 1)
        for accuracy in (0.5, 0.7, 0.9)
        for _ in range(2)
    ]
    assert np.mean(alarms) < 0.005


@pytest.mark.parametrize("lowest", [0.4, 0.9])
def test_a_constant_preference_is_not_a_run(lowest):
    rng = np.random.default_rng(12)
    for _ in range(4):
        p = classifier(rng, shuffled(rng, 2000), 0.7, preferred=0.2, lowest=lowest)
        assert 0.24 < np.mean(p.argmax(axis=1) == 0) < 0.32  # of ten classes
        assert not verdicts(p, 64).any()


def test_the_long_tail_of_an_unsure_classifier_is_hardly_ever_a_run():
    """Frequencies of soft probabilities are too flat: by them, 14 % of these batches are runs."""
    rng = np.random.default_rng(20)
    tail = 100 ** -np.linspace(0, 1, 10)
    alarms = [
        verdicts(classifier(rng, rng.choice(10, 2048, p=tail / tail.sum()), 0.7, lowest=0.2), 64)
        for _ in range(6)
    ]
    assert np.mean(alarms) < 0.04


@pytest.mark.parametrize("accuracy", [0.6, 0.9])
def test_sorted_streams_are_correlated_from_the_first_batch_on(accuracy):
    rng = np.random.default_rng(13)
    labels = np.repeat(np.arange(10), 100)
    for _ in range(3):
        found = [chain for chain, _ in follow(classifier(rng, labels, accuracy), 64)]
        assert all(chain.is_evident for chain in found)
        assert all(chain.is_correlated for chain in found[1:])  # in doubt before another class
        one_by_one = verdicts(classifier(rng, labels[:200], 0.9), 1)
        assert samples_until(one_by_one) <= 48
        assert one_by_one[48:].mean() > 0.97


def test_a_single_class_stays_correlated():
    p = classifier(np.random.default_rng(14), np.full(5000, 3), 0.9)
    assert verdicts(p, 64).mean() > 0.95


def test_runs_that_the_answers_contradict_are_doubted():
    """A network that leans towards class 0, and still tells the samples apart."""
    rng = np.random.default_rng(15)
    p = classifier(rng, shuffled(rng, 1024), 0.95, lowest=0.8)
    p = apply_prior(p, np.array([0.9, *[0.1 / 9] * 9]), np.full(10, 0.1))
    found = [chain for chain, _ in follow(p, 64)]
    assert all(chain.is_evident for chain in found[:4])
    assert not any(chain.is_correlated for chain in found)
    assert all(chain.is_doubted for chain in found[:4])


@given(seeds, st.integers(1, 40))
def test_the_surplus_is_the_information_beyond_the_labels_entropy(seed, n):
    """By loops over samples and classes, of two batches with evident runs."""
    rng = np.random.default_rng(seed)
    evidence = np.array([0.0, *[MAX_EVIDENCE] * 10])
    chain = replace(LabelChain.start(np.full(3, 1 / 3)), evidence=evidence)
    sums, noise, total = np.zeros((2, 3)), 0.0, 0.0
    for size in (n, 5):
        p = rng.dirichlet(np.full(3, 0.5), size)
        chain = chain.observe(p)
        assert chain.is_evident
        weights = chain.weights[1:] / chain.weights[1:].sum()
        each = np.array([found for found, _ in each_pair(by_matrices, chain, p, chain.prior)])
        for t in range(size):
            keep = 1 - 1 / WINDOW
            labels = np.tensordot(weights, each[1:, t], 1)
            sums = keep * sums + np.stack([p[t], labels])
            noise, total = keep * noise + scipy_entropy(p[t]), keep * total + 1
    expected = scipy_entropy(sums[0]) - noise / total - scipy_entropy(sums[1])
    close(chain.surplus, expected / np.log(3), 1e-2)  # negligible pairs are left out


@pytest.mark.parametrize("accuracy", [0.6, 0.9])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_a_change_of_order_is_noticed(accuracy, batch_size):
    rng = np.random.default_rng(15)
    labels = shuffled(rng, 2560)
    labels[640:1280] = np.repeat(rng.permutation(10), 64)
    found = verdicts(classifier(rng, labels, accuracy), batch_size)
    before, between, after = np.split(found, [640 // batch_size, 1280 // batch_size])
    assert not before.any()
    assert samples_until(between, batch_size) <= 128
    assert between[128 // batch_size :].all()
    assert samples_until(~after, batch_size) <= 896
    assert not after[896 // batch_size :].any()


@pytest.mark.parametrize("batch_size", [8, 64])
def test_runs_correct_the_errors_of_the_classifier(batch_size):
    rng = np.random.default_rng(16)
    labels = np.repeat(rng.integers(0, 10, 50), 40)
    p = classifier(rng, labels, 0.6)
    found = np.concatenate([posterior(chain, batch) for chain, batch in follow(p, batch_size)])
    assert np.mean(p.argmax(axis=1) == labels) < 0.63
    assert np.mean(found.argmax(axis=1) == labels) > 0.9


def test_the_mixture_of_a_correlated_batch_is_found():
    rng = np.random.default_rng(17)
    labels = np.repeat([4, 7, 4], [64, 48, 16])
    p = classifier(rng, labels, 0.6)
    *_, (chain, batch) = follow(p, 64)
    true = np.bincount(labels[64:], minlength=10) / 64
    assert np.abs(chain.mixture - true).sum() < 0.3 < np.abs(batch.mean(0) - true).sum()
