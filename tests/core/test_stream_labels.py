"""What a stream's labels are taken for: runs, a prior, or neither; and mixtures that merge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.label_chain import SOURCE_WEIGHT
from caster.core.stream_labels import (
    PRIOR_WINDOW,
    SAME,
    StreamLabels,
    as_reference,
    merged_mixture,
)

C = 5
UNIFORM = np.full(C, 1 / C)
TAIL = np.array([0.6, 0.2, 0.1, 0.07, 0.03])


def probabilities(labels, seed=0, sure=2.0):
    """Exact posteriors of Gaussian classes under equal priors, for samples with these labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(labels), C)) + sure * np.eye(C)[labels]
    raw = np.exp(sure * x)
    return raw / raw.sum(axis=1, keepdims=True)


def drawn(n, seed, prior=UNIFORM):
    return np.random.default_rng(seed).choice(C, size=n, p=prior)


def after(p, prior=UNIFORM, size=32):
    labels = StreamLabels.start(prior)
    for i in range(0, len(p), size):
        labels = labels.observe(p[i : i + size]).advance(p[i : i + size])
    return labels


@pytest.mark.parametrize("prior", [UNIFORM, TAIL])
def test_shuffled_samples_of_the_source_are_answered_unchanged(prior):
    p = probabilities(drawn(256, 1, prior)) * prior
    labels = after(p / p.sum(axis=1, keepdims=True), prior)
    assert labels.kind == "source"
    assert labels.answer(p)[0] is None
    assert labels.mixture is labels.chain.prior


def test_runs_are_answered_by_the_chain():
    y = np.sort(drawn(256, 1))
    p = probabilities(y)
    labels = StreamLabels.start(UNIFORM).observe(p)
    assert labels.kind == "runs"
    np.testing.assert_array_equal(labels.answer(p)[0], labels.chain.smooth(p)[0])
    np.testing.assert_array_equal(labels.mixture, labels.chain.in_runs(p).mean(axis=0))
    right = (labels.answer(p)[0].argmax(axis=1) == y).mean()
    assert right > (p.argmax(axis=1) == y).mean() + 0.05
    assert np.abs(labels.mixture - np.bincount(y, minlength=C) / 256).sum() < 0.1


def test_a_long_tail_is_answered_under_its_prior():
    y = drawn(512, 1, TAIL)
    p = probabilities(y, sure=2.5)
    labels = after(p)
    assert labels.kind == "prior"
    assert np.abs(labels.prior - TAIL).sum() < 0.1
    expected = p * labels.prior / UNIFORM  # Bayes' rule
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(labels.answer(p)[0], expected, rtol=1e-12)
    assert (labels.answer(p)[0].argmax(axis=1) == y).mean() > (p.argmax(axis=1) == y).mean()
    assert labels.mixture is labels.prior  # of a stream, not of a batch


MANY = 400


def sticky(n, accuracy, seed=1):
    """Runs of eight samples of a class among many, by a network that is 60 % sure of its answer."""
    rng = np.random.default_rng(seed)
    y = np.repeat(rng.permutation(MANY), 8)[:n]
    said = np.where(rng.random(n) < accuracy, y, rng.integers(0, MANY, n))
    return 0.6 * np.eye(MANY)[said] + 0.4 / MANY


def test_with_many_classes_runs_must_be_confirmed_until_each_had_its_sample():
    """By answers that are right as often as they claim; a confused network's runs are in doubt."""
    start = StreamLabels.start(np.full(MANY, 1 / MANY))
    p = sticky(MANY, accuracy=0.75)
    assert start.observe(p[:64]).kind == "runs"
    assert start.observe(np.eye(MANY)[np.repeat([3, 1, 4, 2], 16)]).kind == "runs"  # sure
    labels, kinds = start, {}
    p = sticky(MANY, accuracy=0.4)
    for i in range(0, MANY, 80):
        labels = labels.observe(p[i : i + 80]).advance(p[i : i + 80])
        kinds[labels.chain.count] = labels.kind
        assert labels.chain.is_evident
    assert {count for count, kind in kinds.items() if kind == "doubted"} == {
        count for count in kinds if count + SOURCE_WEIGHT < MANY
    }
    assert kinds[MANY] == "runs"


def test_few_classes_need_no_confirmation():
    labels = StreamLabels.start(UNIFORM).observe(probabilities(np.sort(drawn(64, 1))))
    assert labels.kind == "runs"
    contradicted = replace(labels.chain, agreement=np.array([0.0, 1.0]))
    assert replace(labels, chain=contradicted).kind == "runs"


@pytest.mark.parametrize(("n", "kind"), [(MANY - 8, "doubted"), (MANY, "prior")])
def test_a_prior_of_many_classes_is_believed_once_each_could_have_had_its_sample(n, kind):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 4, n)  # a hundredth of the classes
    labels = after(0.9 * np.eye(MANY)[y] + 0.1 / MANY, np.full(MANY, 1 / MANY), size=8)
    assert labels.kind == kind


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 9))
def test_it_remembers_the_last_samples_and_no_more(sizes, seed):
    p = probabilities(drawn(sum(sizes), seed), seed)
    labels = StreamLabels.start(UNIFORM)
    for part in np.split(p, np.cumsum(sizes)[:-1]):
        labels = labels.observe(part)
    np.testing.assert_array_equal(labels.recent, p[-PRIOR_WINDOW:])


def test_another_prior_is_forgotten_with_its_samples():
    tail = probabilities(drawn(512, 1, TAIL), sure=2.5)
    back = probabilities(drawn(PRIOR_WINDOW, 2))
    assert after(tail).kind == "prior"
    assert after(np.concatenate([tail, back])).kind == "source"


def test_observing_changes_nothing_of_what_was_known():
    p = probabilities(drawn(64, 1))
    labels = after(p)
    before = {name: array.copy() for name, array in labels.state("labels").items()}
    labels.observe(p).advance(p)
    for name, array in labels.state("labels").items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("y", [drawn(192, 1), np.sort(drawn(192, 1)), drawn(192, 1, TAIL)])
def test_it_resumes_exactly(y):
    p = probabilities(y)
    labels = after(p[:128])
    again = StreamLabels.start(UNIFORM).resumed(labels.state("labels"), "labels")
    one, other = (own.observe(p[128:]) for own in (labels, again))
    assert one.kind == other.kind
    np.testing.assert_array_equal(one.mixture, other.mixture)
    if one.kind in ("runs", "prior"):
        np.testing.assert_array_equal(one.answer(p[128:])[0], other.answer(p[128:])[0])
    for name, array in one.state("labels").items():
        np.testing.assert_array_equal(array, other.state("labels")[name])


def test_an_impossible_state_is_rejected():
    known = after(probabilities(drawn(64, 1))).state("labels")
    start = StreamLabels.start(UNIFORM)
    for name, array in known.items():
        bad = [np.full_like(array, np.nan), np.full_like(array, np.inf)]
        bad += [] if array.ndim == 0 else [array[..., :-1], array[None]]
        if name not in ("labels.last", "labels.evidence", "labels.recent"):
            bad.append(array - 1e6)
        for value in bad:
            with pytest.raises(ValueError, match="impossible labels"):
                start.resumed({**known, name: value}, "labels")
        with pytest.raises(KeyError):
            start.resumed(
                {other: value for other, value in known.items() if other != name}, "labels"
            )
    with pytest.raises(ValueError, match="impossible labels"):
        StreamLabels.start(np.full(C + 1, 1 / (C + 1))).resumed(known, "labels")


batches = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=6)


@given(batches)
def test_merged_mixtures_are_those_of_all_samples(parts):
    mixture, kept = UNIFORM, 0.0
    for part in parts:
        own = np.bincount(part, minlength=C) / len(part)
        mixture = merged_mixture(mixture, kept, own, len(part))
        kept += len(part)
    expected = np.bincount(np.concatenate(parts), minlength=C) / kept
    np.testing.assert_allclose(mixture, expected, atol=1e-12)


def test_the_sources_mixture_is_no_reference():
    step = np.array([1.0, -1.0, 0.0, 0.0, 0.0])  # a total variation of 1
    assert as_reference(UNIFORM, UNIFORM) is None
    assert as_reference(UNIFORM + 0.99 * SAME * step, UNIFORM) is None
    other = UNIFORM + 1.01 * SAME * step
    assert as_reference(other, UNIFORM) is other


def test_the_prior_belongs_to_its_samples():
    """It is kept once computed, but never handed on to other samples."""
    labels = after(probabilities(drawn(512, 1, TAIL), sure=2.5))
    assert labels.prior is labels.prior
    assert labels.prior is not labels.chain.prior
    assert replace(labels, recent=labels.recent[:0]).kind == "source"
