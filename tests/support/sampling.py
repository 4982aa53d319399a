"""Samples of large parameter grids. `pytest --whole` (`make test-all`) runs every case."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

whole = False  # set by conftest from the option


def sampled(cases: Iterable[Case], n: int) -> list[Case]:
    """`n` of the cases in their order, the same ones in every run; all of them with --whole."""
    cases = list(cases)
    if whole or len(cases) <= n:
        return cases
    return [cases[i] for i in sorted(random.Random(0).sample(range(len(cases)), n))]


def first_fast(cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, all but the first marked slow: `make check` runs one of them."""
    first, *others = cases
    return [first, *(_slow(case) for case in others)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
