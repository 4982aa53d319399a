"""When layer transport is compared, and for how long its verdict stands without."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.adapt.layer_certificate import ComparisonSchedule


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
