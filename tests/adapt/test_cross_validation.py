"""What a fit says of its own source, and what follows for batches."""

from __future__ import annotations

import numpy as np
import pytest

import caster
from caster import Caster
from caster.adapt.cross_validation import check_source
from caster.config import Settings
from caster.core import certificate
from caster.core.linalg import cholesky
from caster.state.source_check import SourceCheck
from tests.conftest import problem
from tests.support import reference


def gaussians(n, d=512, n_classes=7, seed=0, spread=0.16):
    """Unshifted classes with more features than samples a class, and their Bayes classifier."""
    centres = spread * np.random.default_rng(99).standard_normal((n_classes, d))
    rng = np.random.default_rng(seed)
    y = rng.integers(n_classes, size=n)
    h = rng.standard_normal((n, d)) + centres[y]
    return h, y, h @ centres.T - 0.5 * (centres**2).sum(axis=1)


@pytest.mark.parametrize("with_logits", [True, False])
def test_few_samples_a_feature_do_no_harm(with_logits):
    """The paper's fit changed half of the answers here, all batches accepted."""
    h, y, logits = gaussians(600)
    clf = Caster().fit(h, y, logits if with_logits else None)
    assert not clf.source_check_.supported
    target, truth, answers = gaussians(640, seed=1)
    frozen = answers.argmax(axis=1)
    for start in range(0, 640, 64):
        rows = slice(start, start + 64)
        out = clf.adapt(target[rows], answers[rows])
        assert out.verdict.reason == "source_check"
        assert np.array_equal(out.labels, frozen[rows])
    assert np.mean(frozen == truth) > 0.9


@pytest.mark.slow
def test_the_margin_is_that_of_samples_the_basis_has_not_seen():
    h, y, _ = gaussians(600)
    clf = Caster().fit(h, y)
    new, new_y, _ = gaussians(7000, seed=1)

    def margin(h, y):
        means, covariances, *_ = reference.moments(h @ clf.moments_.U, y, 7)
        within = cholesky(np.average(covariances, axis=0, weights=np.bincount(y)))
        return float(certificate.margin(means, within))

    assert margin(h, y) > 1.3 * margin(new, new_y)
    assert clf.moments_.margin == pytest.approx(margin(new, new_y), rel=0.25)


@pytest.mark.slow
def test_enough_samples_turn_it_on():
    h, y, logits = gaussians(6000, spread=0.3)
    check = Caster().fit(h, y, logits).source_check_
    assert check.supported
    assert check.loss < 0.01
    assert check.head == pytest.approx(np.mean(logits.argmax(axis=1) == y), abs=0.02)


def test_accuracies_are_those_of_new_samples():
    h, y, _ = gaussians(700, d=100)
    clf = Caster().fit(h, y)
    new, truth, _ = gaussians(7000, d=100, seed=1)
    accuracy = np.mean(clf.source_scores(new).argmax(axis=1) == truth)
    assert clf.source_check_.source_gda == pytest.approx(accuracy, abs=0.06)


def test_a_head_that_is_far_better_turns_it_off():
    h, y = problem(spread=0.5)
    check = Caster().fit(h, y, np.eye(5)[y]).source_check_
    assert (check.head, check.supported) == (1.0, False)
    assert "off by default" in check.sentences()[0]
    assert "held-out images" in check.sentences()[1]


def test_a_few_samples_prove_nothing():
    """Both are always right, on twenty samples."""
    y = np.arange(20) % 2
    h = np.random.default_rng(0).standard_normal((20, 3)) + 50 * y[:, None]
    check = Caster().fit(h, y, np.eye(2)[y]).source_check_
    assert (check.head, check.source_gda) == (1.0, 1.0)
    assert check.loss == pytest.approx(1 / 20)
    assert not check.supported


@pytest.mark.parametrize("fewest", [2, 3, 9])
def test_classes_of_few_samples(fewest):
    y = np.repeat([0, 1, 2], [fewest, 30, 40])
    z = np.random.default_rng(0).standard_normal((len(y), 2)) + 5 * np.eye(3, 2)[y]
    check = check_source(z, y, y, 3, 10.0, Settings())
    assert check.samples == len(y)
    assert check.head == 1.0
    assert np.isfinite(check.source_gda)


def test_the_check_survives_the_file(tmp_path):
    clf = Caster().fit(*gaussians(600))
    clf.save(tmp_path / "s.caster")
    loaded = caster.load(tmp_path / "s.caster")
    assert loaded.source_check_ == clf.source_check_
    target, _, answers = gaussians(64, seed=1)
    assert loaded.adapt(target, answers).verdict.reason == "source_check"
    loaded.set_params(safeguards=False)
    assert loaded.adapt(target, answers).verdict.reason != "source_check"


@pytest.mark.parametrize("shares", [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
def test_batches_of_few_classes_keep_the_frozen_answer(shares):
    h, y = problem(n=2000)
    logits = 5.0 * np.eye(5)[y]
    clf = Caster().fit(h, y, logits)
    assert clf.source_check_.supported
    wanted = np.random.default_rng(0).choice(5, size=64, p=shares)
    rows = [np.flatnonzero(y == c)[i] for i, c in enumerate(wanted)]
    out = clf.adapt(h[rows], logits[rows])
    assert out.verdict.reason == "class_order"
    assert np.array_equal(out.labels, y[rows])


def test_a_sorted_batch_keeps_the_frozen_answer_and_a_shuffled_one_does_not():
    h, y = problem(n=2000)
    logits = 5.0 * np.eye(5)[y]
    clf = Caster().fit(h, y, logits)
    rows = np.random.default_rng(0).permutation(len(y))[:64]
    in_order = rows[np.argsort(y[rows], kind="stable")]
    assert clf.adapt(h[rows], logits[rows]).verdict.accepted
    assert clf.adapt(h[in_order], logits[in_order]).verdict.reason == "class_order"
    without_logits = Caster().fit(h, y)
    assert without_logits.adapt(h[in_order]).verdict.reason == "class_order"


def test_sentences_without_a_head():
    check = SourceCheck(10, None, 1.0, 1.0, 1.0, 1.0, None, per_feature=0.5)
    assert not check.supported
    assert "0.5 source samples per feature" in check.sentences()[0]


def test_logits_that_are_no_numbers_are_rejected():
    h, y = problem()
    logits = np.eye(5)[y]
    logits[7, 2] = np.nan
    with pytest.raises(caster.CasterError, match="head_logits hold NaN"):
        Caster().fit(h, y, logits)
