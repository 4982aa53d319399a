"""Samples of large parameter grids. `pytest --whole` (`make test-all`) runs every case."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

whole = False  # set by conftest from the option


def sampled(cases: Iterable[Case], n: int) -> list[Case]:
    """`n` of the cases in their order, the same ones in every run; all of them with --whole."""
    cases = list(cases)
    if whole or len(cases) <= n:
        return cases
    return [cases[i] for i in sorted(random.Random(0).sample(range(len(cases)), n))]
