from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster_bench.studies.score import Curve, gated_gain


@dataclass(frozen=True)
class Cell:
    """What a curve looks at of a score."""

    n: int
    batches: Any


def cell(min_tau: list[float], gains: list[int], n: int = 100) -> Cell:
    held = SimpleNamespace(
        min_tau=np.array(min_tau), right=np.array(gains) + 10, frozen=np.full(len(gains), 10)
    )
    return Cell(n, held)


def test_a_curve_steps_at_every_ratio():
    curve = Curve.of([cell([0.5, 2.0, np.inf], [4, -6, 50])])
    assert curve.at(0.4) == 0
    assert curve.at(0.5) == pytest.approx(0.04)  # the gate accepts at its threshold
    assert curve.at(1.99) == pytest.approx(0.04)
    assert curve.at(1e6) == pytest.approx(-0.02)  # what coverage refuses is never accepted
    assert curve.best == pytest.approx(0.04)
    assert curve.plateau() == (0.5, 2.0)


def test_a_plateau_goes_as_far_as_the_gain_stays_near():
    curve = Curve.of([cell([0.5, 1.0, 3.0, 9.0], [10, 1, -2, -40], n=1000)])
    assert curve.best == pytest.approx(0.011)
    assert curve.plateau() == (0.5, 9.0)
    assert curve.plateau(within=0.0015) == (0.5, 3.0)
    assert curve.plateau(within=0.0) == (1.0, 3.0)


def test_a_plateau_without_an_end():
    assert Curve.of([cell([1.0], [5])]).plateau() == (1.0, np.inf)
    assert Curve.of([cell([1.0], [-5])]).plateau() == (0.0, 1.0)
    assert Curve.of([cell([np.inf], [5])]).plateau() == (0.0, np.inf)


batches = st.lists(
    st.tuples(st.sampled_from([0.1, 0.5, 0.8, 2.0, np.inf]), st.integers(-9, 9)), min_size=1
)


@given(st.lists(batches, min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 0.5, 0.8, 7.0]))
def test_a_curve_is_the_mean_of_its_cells(cells, tau):
    made = [cell(*map(list, zip(*held, strict=True))) for held in cells]
    expected = [sum(gain for min_tau, gain in held if min_tau <= tau) / 100 for held in cells]
    assert Curve.of(made).at(tau) == pytest.approx(np.mean(expected), abs=1e-12)
    assert [gated_gain(one, tau) for one in made] == pytest.approx(expected)
