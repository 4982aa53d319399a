"""How many classes the batches of a stream hold, beside what they would at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from caster_bench.data.streams.orders import Indices


@dataclass(frozen=True, eq=False)
class Diversity:
    """The classes of every batch, and what they would be at random."""

    sizes: Indices  # (T,)
    classes: Indices  # (T,) how many
    dominant: NDArray[np.float64]  # (T,) share of the most frequent one
    unlike: NDArray[np.float64]  # (T,) share of pairs of different classes, 0 without a pair
    expected: NDArray[np.float64]  # (T,) how many classes a random batch of this size holds
    expected_unlike: float

    @property
    def relative(self) -> float:
        """Classes beyond the first, as a share of those at random: about 1 shuffled, 0 by class.

        It is 1 where no batch could hold a second class. Large batches count for more.
        """
        held, at_random = (
            float(np.average(classes, weights=self.sizes)) - 1
            for classes in (self.classes, self.expected)
        )
        return held / at_random if at_random > 1e-9 else 1.0

    @property
    def relative_unlike(self) -> float:
        """How often two images of a batch differ in class, as a share of what it is at random."""
        weights = np.where(self.sizes > 1, self.sizes, 0)  # one image is no pair
        if not weights.any() or self.expected_unlike == 0:
            return 1.0
        return float(np.average(self.unlike, weights=weights)) / self.expected_unlike

    @property
    def is_low(self) -> bool:
        """Whether one of the two shares is at most a half.

        The one tells streams of many classes: a batch of ImageNet in runs of five misses most of
        them, and few pairs. The other tells those of few, where a batch often holds all of them.
        """
        return min(self.relative, self.relative_unlike) <= 0.5


def diversity_of(
    codes: Indices,  # (n,) classes in the order of the stream
    sizes: Indices,  # (T,) of the batches, which add up to n
    counts: Indices,  # (C,) images of every class that a batch is taken from
) -> Diversity:
    """What batches hold.

    >>> found = diversity_of(np.array([0, 0, 0, 1]), np.array([2, 2]), np.array([3, 1]))
    >>> found.classes, found.dominant, found.expected
    (array([1, 2]), array([1. , 0.5]), array([1.5, 1.5]))
    """
    batch = np.repeat(np.arange(len(sizes)), sizes)
    keys, times = np.unique(batch * len(counts) + codes, return_counts=True)
    owner = keys // len(counts)
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    return Diversity(
        sizes=sizes,
        classes=np.bincount(owner, minlength=len(sizes)),
        dominant=np.maximum.reduceat(times, first) / sizes,
        unlike=_unlike(sizes, np.add.reduceat(times**2, first)),
        expected=_expected(sizes, counts),
        expected_unlike=float(_unlike(counts.sum(), np.sum(counts**2))),
    )


def _unlike(n: Any, squares: Any) -> NDArray[np.float64]:
    """Share of unlike pairs among n, from the sum of the squared class sizes."""
    return np.asarray((n**2 - squares) / np.maximum(n * (n - 1), 1))


def _expected(sizes: Indices, counts: Indices) -> NDArray[np.float64]:  # (T,), (C,) -> (T,)
    """Mean number of classes in a random batch, no image of which is drawn twice."""
    distinct, which = np.unique(sizes, return_inverse=True)
    return np.array([np.sum(1 - _absent(int(size), counts)) for size in distinct])[which]


def _absent(size: int, counts: Indices) -> NDArray[np.float64]:  # (C,)
    """Chance of a class not to be met: (n - n_c choose size) / (n choose size)."""
    n = int(counts.sum())
    others = n - counts
    enough = np.maximum(others, size)  # any number that keeps the logarithms finite
    log = gammaln(enough + 1) - gammaln(enough - size + 1) - gammaln(n + 1) + gammaln(n - size + 1)
    return np.where(others >= size, np.exp(log), 0.0)
