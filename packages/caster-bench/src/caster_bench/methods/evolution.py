"""CMA-ES, the evolution strategy that FOA searches prompts with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cma
import numpy as np
from numpy.typing import NDArray

from caster.adapt.protocol import nbytes

Point = NDArray[np.float64]


class Search:
    """CMA-ES of the library cma, with a full covariance as in FOA's reference code.

    cma draws from NumPy's global generator, whatever generator it is given. So its own state is
    put in place for every call, and the caller's put back.

    >>> search = Search(3, population=6, seed=1)
    >>> points = search.ask()
    >>> search.tell(points, [float(point @ point) for point in points])
    >>> len(points)
    6
    """

    def __init__(self, size: int, population: int, seed: int) -> None:
        self._random: Any = np.random.RandomState(seed).get_state()
        # seed nan: it seeds nothing. verbose -9: it prints nothing and writes no files.
        options = {"popsize": population, "seed": math.nan, "verbose": -9}
        with self._own_random_state():
            self._strategy = cma.CMAEvolutionStrategy(size * [0.0], 1.0, options)

    def ask(self) -> list[Point]:
        """New points to try."""
        with self._own_random_state():
            return list(self._strategy.ask())

    def tell(self, points: list[Point], values: list[float]) -> None:
        """What they are worth: the less, the better. Others than were asked for may be among."""
        with self._own_random_state():
            self._strategy.tell(points, values, copy=True)

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        callers = np.random.get_state()
        np.random.set_state(self._random)
        try:
            yield
        finally:
            self._random = np.random.get_state()
            np.random.set_state(callers)

    def nbytes(self) -> int:
        """Bytes of its arrays: two matrices of all parameters, for the most part."""
        held = (*vars(self._strategy).values(), *vars(self._strategy.sm).values())
        arrays = {id(array): array for array in held if isinstance(array, np.ndarray)}
        return nbytes(*arrays.values())
