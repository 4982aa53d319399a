"""Labels that are sorted by class, and labels that are not."""

from __future__ import annotations

import numpy as np
import pytest

from caster.io.labels import is_by_class

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "labels",
    [
        np.repeat(np.arange(5), 2),
        np.repeat(np.arange(5), [1, 1, 7, 1, 1]),
        np.repeat(["b", "a"], 10),
        np.tile(np.repeat(np.arange(37), 50), 2),  # through the classes twice: pets:trainval
        np.zeros(4),
        np.array([3, 3]),
    ],
)
def test_sorted_by_class(labels):
    assert is_by_class(labels)


@pytest.mark.parametrize(
    "labels",
    [
        None,
        np.array([1]),
        np.arange(10),  # one image per class
        np.tile(np.arange(10), 4),
        RNG.permutation(np.repeat(np.arange(10), 100)),
        RNG.permutation(np.repeat([0, 1], [900, 100])),
        RNG.permutation(np.repeat(np.arange(1000), 2)),
    ],
)
def test_mixed(labels):
    assert not is_by_class(labels)
