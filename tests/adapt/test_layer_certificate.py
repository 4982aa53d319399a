"""When layer transport is compared, and for how long its verdict stands without."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from caster.adapt.layer_certificate import NORM, ComparisonSchedule, LayerCertificate


def followed(schedule, verdicts, size=1):
    """Whether each batch of a stream was compared, and the verdict it was answered by."""
    compared, answered = [], []
    for verdict in verdicts:
        compared.append(not schedule.skips)
        if schedule.skips:
            schedule.skipped(size)
        else:
            schedule.compared(size, verdict)
        answered.append(schedule.accepted)
    return compared, answered


def runs(compared):
    """How many batches in a row were compared, then rested, and so on."""
    return [len(list(part)) for _, part in groupby(compared)]


def test_rests_double_until_they_are_as_long_as_they_may_be():
    compared, _ = followed(ComparisonSchedule(every=8, window=4), [True] * 200)
    # 4 compared; as many rested. 12 stood with the next 4; 28 with those after 12 more.
    assert runs(compared)[:8] == [4, 4, 4, 12, 4, 28, 4, 28]


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("every", [2, 8, 32])
def test_a_long_stream_of_one_kind_is_compared_one_window_in_every(every, verdict):
    compared, answered = followed(ComparisonSchedule(every, 64), [verdict] * 20_000, size=16)
    assert set(answered) == {verdict}
    assert sum(compared) / 20_000 == pytest.approx(1 / every, abs=0.005)
    assert max(runs(compared)[1::2]) == (every - 1) * 4


@pytest.mark.parametrize("size", [1, 16, 64, 300])
@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("change", [3, 40, 400])
def test_one_that_changes_unnoticed_is_answered_wrongly_no_longer_than_rightly(
    size, verdict, change
):
    stream = [verdict] * change + [not verdict] * (change + 8000 // size + 50)
    _, answered = followed(ComparisonSchedule(every=32, window=128), stream, size)
    wrong = sum(found is not true for found, true in zip(answered, stream, strict=True))
    assert answered[:change] == [verdict] * change
    assert wrong * size <= min(change * size, 31 * 128) + size
    assert answered[change + wrong :] == [not verdict] * (len(stream) - change - wrong)


def test_every_batch_is_compared_where_every_is_one():
    for verdicts in ([True] * 500, [False] * 500, [True, False] * 250):
        compared, answered = followed(ComparisonSchedule(every=1, window=128), verdicts, size=64)
        assert all(compared)
        assert answered == verdicts


def test_verdicts_that_change_within_a_window_never_rest():
    compared, answered = followed(
        ComparisonSchedule(every=32, window=128), [True, True, False] * 60, size=50
    )
    assert all(compared)
    assert answered == [True, True, False] * 60


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=80),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_by_counting_from_the_whole_past(batches, every, window):
    """Of any sizes and verdicts, and where any resting batch may be compared after all."""
    schedule = ComparisonSchedule(every, window)
    past = []  # of every batch: its size, the verdict it was answered by, whether it was compared
    for size, verdict, wakes in batches:
        assert schedule.skips is is_at_rest(past, every, window)
        rests = schedule.skips and not wakes
        if rests:
            schedule.skipped(size)
        else:
            schedule.compared(size, verdict)
        past.append((size, schedule.accepted if rests else verdict, not rests))
        assert schedule.accepted is past[-1][1]


def is_at_rest(past, every, window):
    """By its definition, from all that came before."""
    stood = []
    for batch in reversed(past):
        if batch[1] is not past[-1][1]:
            break
        stood.insert(0, batch)
    total = compared = rest = 0
    for size, _, held in stood:
        total += size
        if not held:
            rest -= size
            continue
        rest, compared = 0, compared + size  # one that is compared ends any rest
        if compared >= window:
            rest, compared = min(total, (every - 1) * window), 0
    return rest > 0


def test_a_rest_that_was_broken_off_is_begun_anew_after_a_window():
    schedule = ComparisonSchedule(every=32, window=64)
    assert schedule.compared(64, True)
    assert not schedule.compared(32, True)
    assert schedule.compared(32, True)  # 128 samples have stood
    for resting in (True, True, True, False):
        schedule.skipped(32)
        assert schedule.skips is resting


def test_reset_is_the_beginning():
    schedule = ComparisonSchedule(every=32, window=128)
    assert schedule.compared(600, True)
    schedule.reset()
    assert not schedule.accepted
    assert not schedule.skips
    assert not schedule.compared(64, True)


# --- nuclear norms -------------------------------------------------------------------------------


def some_logits(n, seed, classes=5):
    return np.random.default_rng(seed).normal(size=(n, classes), scale=2.0).astype(np.float32)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_norms_are_those_of_the_last_samples(sizes, window):
    """At least `window` of them, where so many came, and the newest batch whole."""
    certificate = LayerCertificate(window)
    after, before = (some_logits(sum(sizes), seed) for seed in range(2))
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        found = certificate.update_norms(after[end - size : end], before[end - size : end])
        rows = slice(max(0, end - max(window, size)), end)
        norms = [
            np.linalg.norm(softmax(scores[rows].astype(float), axis=1), "nuc")
            for scores in (after, before)
        ]
        assert found == pytest.approx(NORM * norms[1] / norms[0], rel=1e-4)


def test_sure_and_diverse_answers_are_accepted_and_collapsed_ones_rejected():
    unsure = some_logits(64, 0) / 4
    sure, collapsed = 4 * unsure, np.tile([9.0, 0, 0, 0, 0], (64, 1)).astype(np.float32)
    assert LayerCertificate(64).update_norms(sure, unsure) < 1
    assert LayerCertificate(64).update_norms(collapsed, sure) > 1
    assert LayerCertificate(64).update_norms(sure, sure) == pytest.approx(NORM)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.1, 10.0))
def test_tempered_logits_are_as_spread_as_the_frozen_ones(sizes, scale):
    """Whatever their scale, and over the window alone."""
    one, other = LayerCertificate(1000), LayerCertificate(1000)
    after, before = (some_logits(sum(sizes), seed) for seed in range(2))
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        batch = slice(end - size, end)
        factor = one.temper(after[batch], before[batch])
        scaled = scale * after[batch].astype(float) + 3.0
        assert other.temper(scaled, before[batch]) == pytest.approx(factor / scale)
        spreads = [x[:end].astype(float).std(axis=1).mean() for x in (after, before)]
        assert factor == pytest.approx(spreads[1] / spreads[0])
    newest = LayerCertificate(1).temper(after[batch], before[batch])
    for length in (1, size):
        certificate = LayerCertificate(length)
        certificate.temper(100 * after, before)
        assert certificate.temper(after[batch], before[batch]) == pytest.approx(newest)


def test_flat_logits_and_what_is_no_number_are_not_tempered():
    certificate, logits = LayerCertificate(64), some_logits(8, 0)
    assert certificate.temper(np.ones((8, 5)), logits) == 1
    certificate.restart()
    assert certificate.temper(logits, np.full((8, 5), np.nan)) == 1
    assert certificate.temper(logits, 2 * logits) == pytest.approx(2)


def test_information_destroyed_by_an_alignment_is_rejected_however_sure_the_answers_are():
    rng = np.random.default_rng(0)
    frozen = 4 * np.eye(5)[rng.integers(5, size=256)] + rng.normal(size=(256, 5))
    for scale in (1.0, 10.0, 1000.0):
        noise = scale * rng.normal(size=(256, 5))
        certificate = LayerCertificate(256)
        factor = certificate.temper(noise, frozen)
        assert certificate.update_norms(noise * factor, frozen) > 1.05
    assert LayerCertificate(256).update_norms(noise, frozen) < 1  # as sure as it is, it would pass


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, None])
def test_norms_of_any_kind_of_array(kind):
    after, before = (some_logits(20, seed) for seed in range(2))
    given = [x if kind is None else torch.from_numpy(x).to(kind) for x in (after, before)]
    expected = LayerCertificate(8).update_norms(after, before)
    assert LayerCertificate(8).update_norms(*given) == pytest.approx(expected, rel=0.01)


def test_norms_of_what_is_no_number_are_forgotten():
    certificate, (after, before) = LayerCertificate(64), (some_logits(8, seed) for seed in range(2))
    certificate.update_norms(after, before)
    broken = before.copy()
    broken[3, 2] = np.nan
    assert math.isnan(certificate.update_norms(after, broken))
    alone = LayerCertificate(64).update_norms(after, before)
    assert certificate.update_norms(after, before) == alone


def test_norms_begin_again_after_a_rest():
    certificate = LayerCertificate(64)
    certificate.update_norms(some_logits(8, 0), some_logits(8, 1))
    certificate.settle()
    assert sum(part.nbytes for part in certificate.state().values()) == 15 * 8
    after, before = some_logits(8, 2), some_logits(8, 3)
    alone = LayerCertificate(64).update_norms(after, before)
    assert certificate.update_norms(after, before) == alone


def test_a_certificate_resumes_exactly():
    one, other = LayerCertificate(24), LayerCertificate(24)
    for seed in range(4):
        batch = some_logits(10, seed), some_logits(10, seed + 9)
        other.resume(one.state())
        assert one.update(*batch) == other.update(*batch)
        assert one.update_norms(*batch) == other.update_norms(*batch)
