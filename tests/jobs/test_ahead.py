"""Rows in pieces of any size, answered in batches by another thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster import CasterError
from caster.frozen.protocol import Outputs
from caster.jobs.ahead import WAITING, Ahead


@given(
    st.integers(0, 9),  # the first row that is heard of
    st.lists(st.integers(1, 7), max_size=8),  # rows in each piece
    st.integers(1, 6),
    st.booleans(),
)
def test_every_whole_batch_is_answered_and_no_other(first, pieces, batch_size, with_logits):
    features = np.arange(first + sum(pieces))[:, None]
    logits = -features if with_logits else None
    with Ahead(lambda outputs: outputs, batch_size) as ahead:
        row = first
        for count in pieces:
            part = slice(row, row + count)
            ahead.hear(row, Outputs(features[part], None if logits is None else logits[part]))
            row += count
        for start in range(0, len(features) + batch_size, batch_size):
            found, stop = ahead.take(start), start + batch_size
            if first <= start and stop <= len(features):
                assert np.array_equal(found.features, features[start:stop])
                assert (found.logits is None) == (logits is None)
                if logits is not None:
                    assert np.array_equal(found.logits, logits[start:stop])
            else:
                assert found is None


def test_it_works_in_another_thread_and_few_batches_wait():
    gate, running = threading.Event(), []

    def answer(outputs):
        running.append(threading.current_thread())
        gate.wait(10)
        return len(outputs.features)

    with Ahead(answer, 1) as ahead:
        for row in range(WAITING):
            ahead.hear(row, Outputs(np.zeros((1, 1)), None))  # does not wait for an answer
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        ahead.hear(WAITING, Outputs(np.zeros((1, 1)), None))  # waits for the first one
        assert gate.is_set()
        assert ahead.take(0) == 1
    assert threading.current_thread() not in running
    opener.join()


def test_an_error_reaches_who_asks():
    def answer(outputs):
        raise CasterError("no answer")

    with Ahead(answer, 2) as ahead:
        ahead.hear(0, Outputs(np.zeros((2, 1)), None))
        with pytest.raises(CasterError, match="no answer"):
            ahead.take(0)
