"""How far a stream's mixture of classes is from the source's, told by the mean of its features.

The certificate of layer transport. Where shallow layers are aligned and deep ones are not, a shift
of the pictures is mostly gone from the features, and what is left of their mean's step off the
source's mean is the mixture's: the sum over classes of (share - prior) times the class's mean. One
class alone steps as far as that class lies from the mean of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from array_api_compat import array_namespace

from caster.core.linalg import Array


@dataclass(frozen=True, eq=False)
class MeanStep:
    """Weighed sums of samples, from which the squared step of their mean off the origin is told.

    >>> import numpy as np
    >>> found = MeanStep.of(np.array([[1.0, 0.0], [3.0, 0.0]]))
    >>> found.count, found.total.tolist(), float(found.own), float(found.squared())
    (2.0, [4.0, 0.0], 10.0, 3.0)
    """

    count: float  # the sum of weights
    weights: float  # the sum of squared weights
    total: Array  # (k,), the sum of weight times sample
    own: Array  # (), the sum of squared weight times squared length

    @classmethod
    def of(cls, z: Array) -> Self:  # (n, k), about the point that steps are measured from
        """Of samples that weigh 1 each."""
        xp = array_namespace(z)
        n = float(z.shape[0])
        return cls(n, n, xp.sum(z, axis=0), xp.sum(z**2))

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.count + other.count,
            self.weights + other.weights,
            self.total + other.total,
            self.own + other.own,
        )

    def at_most(self, samples: float) -> Self:
        """The same samples, weighed as no more than so many.

        >>> import numpy as np
        >>> held = MeanStep(8.0, 8.0, np.array([8.0]), np.array(16.0)).at_most(4)
        >>> held.count, held.weights, held.total.tolist(), float(held.own)
        (4.0, 2.0, [4.0], 4.0)
        """
        kept = min(1.0, samples / self.count)
        count = min(self.count, float(samples))  # to the last bit, whatever the product rounds to
        return type(self)(count, kept**2 * self.weights, kept * self.total, kept**2 * self.own)

    def squared(self) -> Array:  # ()
        """The squared step of the mean: the mean inner product of two different samples.

        A sample is never held against itself, so the samples' own spread is no part of it, and of
        samples about the origin it is as often below zero as above. At least two are needed.
        """
        xp = array_namespace(self.total)
        return (xp.sum(self.total**2) - self.own) / (self.count**2 - self.weights)


def class_spread(means: Array, priors: Array) -> float:  # (C, k), (C,)
    """Mean square distance of the classes' means from the origin: one class's step on average.

    >>> import numpy as np
    >>> class_spread(np.array([[1.0], [-3.0]]), np.array([0.75, 0.25]))
    3.0
    """
    xp = array_namespace(means, priors)
    return float(xp.sum(priors * xp.sum(means**2, axis=1)))
