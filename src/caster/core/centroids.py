"""How far a batch's classes lie from the source's, by every sample's own share in each class.

The certificate of layer transport. The paper's takes the confident samples of every pseudo-class;
here each sample counts in every class by its probability, so that networks whose confidence is
low throughout, and batches of few samples, are measured too. And here a sample is never held
against itself: a class that one sample has alone would show that sample's own spread and nothing
of where the class has gone, which is all there is to see among a thousand classes otherwise. The
sums merge and can be discounted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from array_api_compat import array_namespace

from caster.core.linalg import Array


@dataclass(frozen=True, eq=False)
class ClassShares:
    """Every class's share of some samples, and by it the sum of their steps off its source mean.

    >>> import numpy as np
    >>> z, certain = np.array([[1.0], [5.0]]), np.array([[0.0, -99.0], [-99.0, 0.0]])
    >>> found = ClassShares.of(z, certain, means=np.array([[0.0], [2.0]]))
    >>> found.count, found.mass, found.steps.tolist(), found.own.tolist()
    (2.0, array([1., 1.]), [[1.0], [3.0]], [1.0, 9.0])
    """

    count: float  # samples
    mass: Array  # (C,), Q_c: the sum of shares; adds up to the count
    steps: Array  # (C, k), the sum of share times step
    own: Array  # (C,), the sum of squared share times squared step

    @classmethod
    def of(
        cls,
        z: Array,  # (n, k), in coordinates in which lengths are measured
        scores: Array,  # (n, C), logits or log densities
        means: Array,  # (C, k), of the source
    ) -> Self:
        """Of samples whose class probabilities are softmax(scores)."""
        xp = array_namespace(z, scores)
        raised = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
        shares = raised / xp.sum(raised, axis=1, keepdims=True)
        mass = xp.sum(shares, axis=0)
        lengths = xp.sum(z**2, axis=1)[:, None] - 2 * (z @ means.T) + xp.sum(means**2, axis=1)
        own = xp.sum(shares**2 * lengths, axis=0)
        return cls(float(z.shape[0]), mass, shares.T @ z - mass[:, None] * means, own)

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count,
            self.mass + other.mass,
            self.steps + other.steps,
            self.own + other.own,
        )

    def at_most(self, samples: float) -> Self:
        """The same shares, weighed as no more than so many samples.

        >>> import numpy as np
        >>> held = ClassShares(8.0, np.array([6.0, 2.0]), np.zeros((2, 1)), np.array([4.0, 8.0]))
        >>> held.at_most(4).mass, held.at_most(4).own
        (array([3., 1.]), array([1., 2.]))
        """
        kept = min(1.0, samples / self.count)
        count = min(self.count, float(samples))  # to the last bit, whatever the product rounds to
        return type(self)(count, kept * self.mass, kept * self.steps, kept**2 * self.own)

    def residual(self) -> Array:  # ()
        """Mean square distance of class centroids to the source's means, without samples' spread.

        Sum over classes of 1 / (n Q_c) times the sum over pairs i != j of share times share times
        the inner product of both steps. Were a class's samples independent draws about its
        centroid, the mean of this is the square of the centroid's step, whatever their spread; so
        it can be below zero. The sum over all pairs, less each sample with itself.

        >>> import numpy as np
        >>> found = ClassShares(4.0, np.array([3.0, 1.0]), np.array([[6.0], [6.0]]), np.zeros(2))
        >>> float(found.residual())  # (36 / 3 + 36 / 1) / 4
        12.0
        """
        xp = array_namespace(self.steps)
        tiny = xp.finfo(self.mass.dtype).smallest_normal
        # A class without mass has no centroid, and no weight either.
        occupied = xp.where(self.mass > tiny, self.mass, xp.ones_like(self.mass))
        pairs = (xp.sum(self.steps**2, axis=1) - self.own) / occupied
        kept = xp.where(self.mass > tiny, pairs, xp.zeros_like(pairs))
        return xp.sum(kept) / self.count


def residual_ratio(after: float, before: float) -> float:
    """Root of a residual after an update over one before it, in lengths.

    Infinite where that before shows nothing that could become less; NaN where one is no number.

    >>> residual_ratio(9.0, 4.0), residual_ratio(-1.0, 4.0), residual_ratio(1.0, -0.1)
    (1.5, 0.0, inf)
    """
    if not (math.isfinite(after) and math.isfinite(before)):
        return math.nan
    return math.sqrt(max(after, 0.0) / before) if before > 0 else math.inf
