"""The certificate in a graph, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from caster.adapt.layer_certificate import (
    ERROR_TOLERANCE,
    ComparisonSchedule,
    LayerCertificate,
    gating_ratio,
)
from caster.core import confidence
from caster.export import certificate_graph
from caster.export.certificate_graph import CertificateGraph, ScheduleGraph
from caster.export.graph_arrays import choose, constant
from tests.support.graphs import compiled, evaluate

C, WINDOW = 7, 16


def scores(n, seed=0, scale=3.0, n_classes=C):
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(n, n_classes))).astype(np.float32)


def probabilities(n, n_classes, scale):
    powers = np.exp(scores(n, scale=scale, n_classes=n_classes).astype(float))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize(("n", "n_classes"), [(1, 5), (40, 10), (30, 200), (3, 3)])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 100.0])
def test_the_nuclear_norm_is_that_of_singular_values(n, n_classes, scale):
    p = probabilities(n, n_classes, scale)
    found = evaluate(lambda rows: certificate_graph.nuclear_norm(rows, n_classes), p)
    np.testing.assert_allclose(found, np.linalg.svd(p, compute_uv=False).sum(), rtol=1e-6)


def test_the_expected_error_of_a_sure_model_says_nothing():
    sure, unsure = np.array([4.0, 4.0, 4.0]), np.array([4.0, 2.0, 1.0])
    ratio = certificate_graph.expected_error_ratio
    assert evaluate(ratio, unsure, sure) == math.inf
    assert evaluate(ratio, sure, unsure) == 0
    assert math.isnan(evaluate(ratio, sure, unsure * math.nan))


@pytest.mark.parametrize(
    ("errors", "norms", "is_source", "frozen_is_source", "expected"),
    [
        (1.3, 0.9, True, True, 0.9),  # shuffled: the norms alone
        (0.7, 0.9, True, False, 0.9),  # frozen answers in runs: both must be small
        (1.3, 0.9, True, False, 1.3 / ERROR_TOLERANCE),
        (math.inf, 0.9, True, False, math.inf),
        (1.3, 0.9, False, True, 1.3),  # in runs: the errors alone
        (0.7, 0.9, False, False, 0.7),
    ],
)
def test_both_ratios_must_agree_if_only_aligned_answers_look_shuffled(
    errors, norms, is_source, frozen_is_source, expected
):
    given = errors, norms, is_source, frozen_is_source
    assert gating_ratio(*given) == expected
    assert evaluate(certificate_graph.gating_ratio, *map(np.array, given)) == expected


@pytest.mark.parametrize("total", [19.0, 14.0, math.nan])
def test_confidence_falls_as_in_core(total):
    now, then = (25.0, total, 0.0), (100.0, 80.0, 68.0)
    expected = confidence.has_fallen(
        *(confidence.ConfidenceStats(*each) for each in (now, then)), 3.0
    )
    found = evaluate(lambda *both: certificate_graph.has_fallen(*both, 3.0), now, then)
    assert found == expected


@pytest.mark.parametrize("size", [1, 6, 16, 20])
def test_windows_are_those_of_the_certificate(size):
    """Also of a stream that turns from shuffled to runs and back."""

    def step(logits, frozen, correction, in_runs, stats, rows, count, restarts):
        known = CertificateGraph(stats, rows, count, WINDOW)

        def of_runs():
            after, errors = known.update(logits, frozen)
            return [errors, constant(0.0) + 0.0, *after.parts]

        def shuffled():
            after, errors, norms = known.update_shuffled(logits, frozen, correction)
            return [errors, norms, *after.parts]

        errors, norms, *parts = choose(in_runs, of_runs, shuffled)
        after = CertificateGraph(*parts, WINDOW).restart(restarts)
        return [errors, norms, *after.parts]

    state = list(certificate_graph.initial_certificate(C, WINDOW).values())
    batch, no = scores(size), np.array(False)
    correction = np.linspace(-1, 1, C)
    run = compiled(step, batch, batch, correction, no, *state, no, also_open=[1])
    expected = LayerCertificate(WINDOW)
    for i in range(14):
        logits, frozen = scores(size, 2 * i, scale=4.0), scores(size, 2 * i + 1)
        if i == 4:
            frozen[0, 0] = math.nan
        in_runs, restarts = i in (8, 9), i == 7
        errors, norms, *state = run(logits, frozen, correction, in_runs, *state, restarts)
        if in_runs:
            wanted = expected.update(logits, frozen), 0.0
        else:
            wanted = expected.update_shuffled(logits, frozen, correction)
        np.testing.assert_allclose(errors, wanted[0], rtol=1e-9)
        np.testing.assert_allclose(norms, wanted[1], rtol=1e-6)
        assert math.isnan(errors) == (i == 4)
        if restarts:
            expected.restart()
        theirs = expected.state()
        stats, rows, count = state
        np.testing.assert_allclose(stats, theirs["certificate"][0], rtol=1e-12)
        kept = theirs["certificate.rows"][:, -WINDOW:]
        assert count == kept.shape[1]
        np.testing.assert_allclose(rows[:, WINDOW - count :], kept, atol=1e-6)


def test_the_schedule_is_that_of_python():
    def step(accepted, changed, samples, state, skips):
        schedule = ScheduleGraph(state, every=4, window=WINDOW)
        from caster.export.graph_arrays import where

        compared = schedule.compared(samples, accepted[0], changed[0])
        after = where(skips, schedule.skipped(samples).state, compared.state)
        return [after, schedule.skips, schedule.accepted]

    rng = np.random.default_rng(0)
    expected, state = ComparisonSchedule(4, WINDOW), np.zeros(4, np.int64)
    flag = np.array([True])
    run = compiled(step, flag, flag, np.array(3), state, np.array(True))
    skipped = 0
    for i in range(120):
        accepted, samples = (
            bool(rng.random() < (0.9 if i % 40 < 30 else 0.2)),
            int(rng.integers(1, 9)),
        )
        changed = bool(rng.random() < 0.1)
        may_skip = expected.skips
        skips = may_skip and not changed
        if skips:
            expected.skipped(samples)
        else:
            expected.compared(samples, accepted, changed)
        state, found, _ = run(np.array([accepted]), np.array([changed]), samples, state, skips)
        assert found == may_skip
        np.testing.assert_array_equal(state, expected.state())
        skipped += skips
    assert 20 < skipped < 100
