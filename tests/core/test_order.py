"""Whether the classes of a batch come in runs, against a loop over pairs of samples."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.order import order_evidence


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=40),
    st.lists(st.integers(1, 9), min_size=7, max_size=7),
)
def test_evidence_is_that_of_pairs_of_samples(assigned, counts):
    priors = np.array(counts) / sum(counts)
    n = len(assigned)
    alike = np.mean([a == b for a, b in permutations(assigned, 2)])
    neighbours = np.mean([a == b for a, b in pairwise(assigned)])
    error = math.sqrt(max(alike * (1 - alike), np.finfo(float).eps) / (n - 1))
    expected = float(np.sum(priors**2))
    found = order_evidence(np.array(assigned), priors)
    # Neighbours of one class only: the difference of two ones is rounded, the error tiny.
    assert found[0] == pytest.approx((neighbours - alike) / error, rel=1e-9, abs=1e-6)
    assert found[1] == pytest.approx((alike - expected) / (1 - expected), rel=1e-9, abs=1e-12)
