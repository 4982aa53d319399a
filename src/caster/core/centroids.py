"""How far a batch's classes lie from the source's, by every sample's own share in each class.

The certificate of layer transport. The paper's takes the confident samples of every pseudo-class;
here each sample counts in every class by its probability, so that networks whose confidence is
low throughout, and batches of few samples, are measured too. The sums merge and can be discounted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from array_api_compat import array_namespace

from caster.core.linalg import Array, mahalanobis


@dataclass(frozen=True, eq=False)
class ClassShares:
    """Every class's share of some samples, and the sum of their features by it.

    >>> import numpy as np
    >>> found = ClassShares.of(np.array([[1.0], [5.0]]), np.array([[0.0, -99.0], [-99.0, 0.0]]))
    >>> found.count, found.mass, found.sums.tolist()
    (2.0, array([1., 1.]), [[1.0], [5.0]])
    """

    count: float  # samples
    mass: Array  # (C,), adds up to the count
    sums: Array  # (C, k)

    @classmethod
    def of(
        cls,
        z: Array,  # (n, k)
        scores: Array,  # (n, C), logits or log densities
    ) -> Self:
        """Of samples whose class probabilities are softmax(scores)."""
        xp = array_namespace(z, scores)
        raised = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
        shares = raised / xp.sum(raised, axis=1, keepdims=True)
        return cls(float(z.shape[0]), xp.sum(shares, axis=0), shares.T @ z)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.mass + other.mass, self.sums + other.sums)

    def at_most(self, samples: float) -> Self:
        """The same shares, weighed as no more than so many samples.

        >>> import numpy as np
        >>> ClassShares(8.0, np.array([6.0, 2.0]), np.zeros((2, 1))).at_most(4).mass
        array([3., 1.])
        """
        kept = min(1.0, samples / self.count)
        return type(self)(kept * self.count, kept * self.mass, kept * self.sums)

    def residual(
        self,
        means: Array,  # (C, k), of the source
        metric: Array,  # (k, k), Cholesky factor of the pooled within-class covariance
    ) -> Array:  # ()
        """Root mean square distance of class centroids to the source's means, weighed by mass.

        >>> import numpy as np
        >>> found = ClassShares(4.0, np.array([3.0, 1.0]), np.array([[9.0], [7.0]]))
        >>> float(found.residual(np.array([[1.0], [1.0]]), np.eye(1)))  # (3 * 4 + 36) / 4 = 12
        3.4641...
        """
        xp = array_namespace(self.sums)
        mass = self.mass[:, None]
        tiny = xp.finfo(self.mass.dtype).smallest_normal
        centroids = self.sums / xp.maximum(mass, xp.full_like(mass, tiny))
        # A class without mass has no centroid, and no weight either.
        away = xp.where(mass > tiny, centroids - means, xp.zeros_like(centroids))
        squared = mahalanobis(away, metric) ** 2
        return xp.sqrt(xp.sum(self.mass * squared) / xp.sum(self.mass))
