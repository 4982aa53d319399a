"""When layer transport rests, and for how long."""

from __future__ import annotations

from itertools import pairwise

import pytest

from caster.methods.turns import PATIENCE, Turns


def outcome(turns, batches, size, good):
    """What became of a stream that is good from a batch on: tried batches, accepted ones."""
    tried, accepted = [], []
    for batch in range(batches):
        if turns.rests(size):
            continue
        tried.append(batch)
        if batch >= good:
            turns.accepted()
            accepted.append(batch)
        else:
            turns.refused(size, judged=True)
    return tried, accepted


@pytest.mark.parametrize("size", [1, 16, 64, 300])
@pytest.mark.parametrize("good", [3, 40, 400])
def test_a_rest_is_no_longer_than_what_was_refused(size, good):
    turns = Turns(every=32, window=128)
    _, accepted = outcome(turns, good + 8000 // size + 50, size, good)
    waited = (accepted[0] - good) * size
    assert waited <= min(good * size, 31 * 128) + size
    assert accepted == list(range(accepted[0], accepted[-1] + 1))


def test_a_stream_that_is_refused_for_ever_is_hardly_tried():
    tried, _ = outcome(Turns(every=32, window=128), 20000, 64, good=20000)
    assert tried[:8] == list(range(8))  # four windows
    assert PATIENCE * 128 == 8 * 64
    assert len(tried) < 0.03 * 20000


def test_tried_every_time_it_never_rests():
    tried, _ = outcome(Turns(every=1, window=128), 500, 64, good=500)
    assert len(tried) == 500


def test_without_a_verdict_it_does_not_rest():
    turns = Turns(every=32, window=128)
    assert not any(turns.refused(64, judged=False) for _ in range(50))


def test_one_that_is_accepted_begins_anew():
    turns = Turns(every=32, window=128)
    for _ in range(3):
        assert not any(turns.refused(64, judged=True) for _ in range(7))
        turns.accepted()
    assert [turns.refused(64, judged=True) for _ in range(8)] == [False] * 7 + [True]


@pytest.mark.parametrize("every", [2, 8])
def test_every_bounds_a_rest(every):
    """Else it is as long as all that was refused, and grows."""
    window = 4
    tried, _ = outcome(Turns(every, window), 4000, 1, good=4000)
    rests = [b - a - 1 for a, b in pairwise(tried) if b - a > 1]
    assert max(rests) == rests[-1] == (every - 1) * window
    assert rests == sorted(rests)


def test_reset_is_the_beginning():
    turns = Turns(every=32, window=128)
    assert turns.refused(600, judged=True)
    turns.reset()
    assert not turns.rests(64)
    assert not turns.refused(64, judged=True)
