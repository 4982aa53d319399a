"""Answers and states of streams that must be equal to the bit."""

from __future__ import annotations

import numpy as np

from caster.core.arrays import to_numpy

PARTS = ("labels", "scores", "proposed", "adapted", "frozen", "mixture")


def same_answer(one, other, parts=PARTS) -> None:
    assert repr(one.verdict) == repr(other.verdict)  # a NaN is not equal to itself
    assert one.implausible == other.implausible
    for name in parts:
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs), err_msg=name)


def same_state(one, other) -> None:
    assert one.keys() == other.keys()
    for name, expected in other.items():
        np.testing.assert_array_equal(one[name], expected, err_msg=name)


def beside(method, images, before):
    """Scores with aligned layers, accepted or not, and the prediction, if frozen ones are known."""
    answer = method.transport(images, before)
    aligned = answer.scores if answer.adapted is None else answer.adapted
    return aligned, method._predicted(answer)
