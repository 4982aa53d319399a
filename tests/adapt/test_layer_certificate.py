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
    """Of any sizes and verdicts, and where outputs may change in any rest."""
    schedule = ComparisonSchedule(every, window)
    past = []  # of every batch: size, verdict it was answered by, whether compared, and by a change
    for size, verdict, wakes in batches:
        assert schedule.skips is is_at_rest(past, every, window)
        changed = schedule.skips and wakes
        rests = schedule.skips and not wakes
        if rests:
            schedule.skipped(size)
        else:
            schedule.compared(size, verdict, changed)
        past.append((size, schedule.accepted if rests else verdict, not rests, changed))
        assert schedule.accepted is past[-1][1]


def is_at_rest(past, every, window):
    """By its definition, from all that came before."""
    stood = []
    for batch in reversed(past):
        if batch[1] is not past[-1][1]:
            break
        stood.insert(0, batch)
        if batch[3]:
            break
    total = compared = rest = 0
    for size, _, held, _ in stood:
        total += size
        if not held:
            rest -= size
            continue
        rest, compared = 0, compared + size  # one that is compared ends any rest
        if compared >= window:
            rest, compared = min(total, (every - 1) * window), 0
    return rest > 0


def test_a_rest_that_was_broken_off_is_begun_again_after_a_window():
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


def norms_of(certificate, after, before):
    return certificate.update_shuffled(after, before, np.zeros(after.shape[1]))[1]


def tempered(after, before):
    """The same logits at the frozen ones' geometric mean of spreads, by a loop."""
    logs = [[math.log(np.std(row)) for row in x.astype(float)] for x in (after, before)]
    return after.astype(float) * math.exp(np.mean(logs[1]) - np.mean(logs[0]))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50), st.floats(0.1, 10.0)
)
def test_shuffled_batches_are_compared_over_the_last_samples_at_one_temperature(
    sizes, window, scale
):
    """At least `window` of them, where so many came, and the newest batch whole."""
    certificate, scaled = LayerCertificate(window), LayerCertificate(window)
    after, before = (some_logits(sum(sizes), seed) for seed in range(2))
    correction = np.linspace(-1.0, 1.0, after.shape[1])
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        batch = slice(end - size, end)
        found = certificate.update_shuffled(after[batch], before[batch], correction)
        rows = slice(max(0, end - max(window, size)), end)
        ours, theirs = tempered(after[rows], before[rows]), before[rows].astype(float)
        p, q = softmax(ours + correction, axis=1), softmax(theirs, axis=1)
        errors = (1 - p.max(axis=1)).mean() / (1 - q.max(axis=1)).mean()
        norms = np.linalg.norm(q, "nuc") / np.linalg.norm(softmax(ours, axis=1), "nuc")
        assert found == pytest.approx((errors, NORM * norms), rel=1e-4)
        again = scaled.update_shuffled(scale * after[batch] + 3, before[batch], correction)
        assert again == pytest.approx(found, rel=1e-3)


def test_confident_and_diverse_answers_are_accepted_and_collapsed_ones_rejected():
    noise = some_logits(64, 0)
    clear = noise + 8 * np.eye(5, dtype=np.float32)[np.arange(64) % 5]
    collapsed = noise + np.array([9.0, 0, 0, 0, 0], np.float32)
    assert norms_of(LayerCertificate(64), clear, noise) < 1
    assert norms_of(LayerCertificate(64), collapsed, clear) > 1
    assert norms_of(LayerCertificate(64), clear, clear) == pytest.approx(NORM)


@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
def test_lost_information_is_rejected_however_large_the_logits_are(scale):
    """Also right after batches that were helped."""
    rng = np.random.default_rng(0)
    certificate = LayerCertificate(256)
    for i in range(8):
        frozen = 4 * np.eye(5)[rng.integers(5, size=64)] + rng.normal(size=(64, 5))
        helped = i < 4
        noise = scale * rng.normal(size=(64, 5))
        norms = norms_of(certificate, frozen if helped else noise, frozen)
        assert (norms <= 1) == helped


@pytest.mark.parametrize(("factors", "bound"), [((30.0, 1.0), 1.0), ((1.0, 1000.0), 1.05)])
def test_one_sample_does_not_decide(factors, bound):
    rng = np.random.default_rng(0)
    frozen = 4 * np.eye(5)[rng.integers(5, size=256)] + rng.normal(size=(256, 5))
    aligned = frozen.copy() if bound == 1 else rng.normal(size=(256, 5))
    aligned[0] *= factors[0]
    frozen[0] *= factors[1]
    found = norms_of(LayerCertificate(256), aligned, frozen)
    assert found <= 1 if bound == 1 else found > bound


def test_flat_logits_are_compared():
    certificate, logits = LayerCertificate(64), some_logits(8, 0)
    assert norms_of(certificate, np.ones((8, 5)), logits) > 1
    assert norms_of(LayerCertificate(64), logits, np.ones((8, 5))) > 0


def test_the_window_is_emptied_when_the_stream_turns():
    """A window never holds samples of both kinds of streams."""
    certificate = LayerCertificate(64)
    norms_of(certificate, some_logits(40, 0), some_logits(40, 1))
    after, before = some_logits(8, 2), some_logits(8, 3)
    assert certificate.update(after, before) == LayerCertificate(64).update(after, before)
    alone = norms_of(LayerCertificate(64), after, before)
    assert norms_of(certificate, after, before) == alone
    assert certificate.update(after, before) == LayerCertificate(64).update(after, before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, None])
def test_norms_of_any_kind_of_array(kind):
    after, before = (some_logits(20, seed) for seed in range(2))
    given = [x if kind is None else torch.from_numpy(x).to(kind) for x in (after, before)]
    expected = norms_of(LayerCertificate(8), after, before)
    assert norms_of(LayerCertificate(8), *given) == pytest.approx(expected, rel=0.01)


def test_what_is_no_number_is_forgotten():
    certificate, (after, before) = LayerCertificate(64), (some_logits(8, seed) for seed in range(2))
    norms_of(certificate, after, before)
    broken = before.copy()
    broken[3, 2] = np.nan
    assert all(map(math.isnan, certificate.update_shuffled(after, broken, np.zeros(5))))
    alone = norms_of(LayerCertificate(64), after, before)
    assert norms_of(certificate, after, before) == alone


def test_norms_begin_again_after_a_rest():
    certificate = LayerCertificate(64)
    norms_of(certificate, some_logits(8, 0), some_logits(8, 1))
    certificate.settle()
    assert sum(part.nbytes for part in certificate.state().values()) == 12 * 8
    after, before = some_logits(8, 2), some_logits(8, 3)
    alone = norms_of(LayerCertificate(64), after, before)
    assert norms_of(certificate, after, before) == alone


def test_a_certificate_resumes_exactly():
    one, other = LayerCertificate(24), LayerCertificate(24)
    for seed in range(4):
        batch = some_logits(10, seed), some_logits(10, seed + 9)
        other.resume(one.state())
        assert norms_of(one, *batch) == norms_of(other, *batch)
    for seed in range(4):
        batch = some_logits(10, seed), some_logits(10, seed + 9)
        other.resume(one.state())
        assert one.update(*batch) == other.update(*batch)
