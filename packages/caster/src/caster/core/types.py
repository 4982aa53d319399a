"""Data types of the equations: source moments and an affine map."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from caster.core.certificate import margin
from caster.core.linalg import Array, cholesky, identity_like, symmetric_roots, whiteners
from caster.core.namespaces import array_namespace


@dataclass(frozen=True, eq=False)
class SourceMoments:
    """Moments of the source: four stored arrays, and others derived from them on first use.

    >>> import numpy as np
    >>> moments = SourceMoments(
    ...     U=np.eye(3)[:, :2], means=np.array([[0.0, 0.0], [3.0, 4.0]]),
    ...     covariances=np.stack([np.eye(2), np.eye(2)]), counts=np.array([30, 10]))
    >>> moments.priors, moments.mean, moments.margin
    (array([0.75, 0.25]), array([0.75, 1.  ]), 5.0)
    >>> moments.restrict(1).margin
    3.0
    """

    U: Array  # (d, k), the discriminative basis
    means: Array  # (C, k)
    covariances: Array  # (C, k, k)
    counts: Array  # (C,), integers

    def __repr__(self) -> str:
        d, samples = self.U.shape[0], int(sum(self.counts.tolist()))
        return f"SourceMoments({samples} samples, {self.n_classes} classes, {d} -> {self.rank})"

    @property
    def rank(self) -> int:
        """Number of directions k."""
        return int(self.means.shape[1])

    @property
    def n_classes(self) -> int:
        """Number of classes C."""
        return int(self.means.shape[0])

    def restrict(self, k: int) -> SourceMoments:
        """Restrict the moments to the first k directions."""
        return SourceMoments(
            self.U[:, :k], self.means[:, :k], self.covariances[:, :k, :k], self.counts
        )

    @cached_property
    def priors(self) -> Array:  # (C,)
        """Class priors n_c / N."""
        xp = array_namespace(self.means)
        counts = xp.astype(self.counts, self.means.dtype)
        return counts / xp.sum(counts)

    @cached_property
    def mean(self) -> Array:  # (k,)
        """Global source mean m_s."""
        return self.priors @ self.means

    @cached_property
    def within(self) -> Array:  # (k, k)
        """Sigma_s, the prior-weighted mean of the class covariances: the certificate's metric."""
        xp = array_namespace(self.means)
        flat = xp.reshape(self.covariances, (self.n_classes, self.rank**2))
        return xp.reshape(self.priors @ flat, (self.rank, self.rank))

    @cached_property
    def covariance(self) -> Array:  # (k, k)
        """Global source covariance C_s, by the law of total covariance."""
        spread = self.means - self.mean
        return self.within + (spread * self.priors[:, None]).T @ spread

    def roots(self, lam: float) -> tuple[Array, Array]:  # (k, k), (k, k)
        """(C_s + lam I)^1/2 and its inverse, cached for the last lambda."""
        roots = self._roots.get(lam)
        if roots is None:  # several threads may compute it at the same time; each returns its own
            roots = symmetric_roots(self.covariance, lam)
            self._roots.clear()
            self._roots[lam] = roots
        return roots

    @cached_property
    def _roots(self) -> dict[float, tuple[Array, Array]]:
        return {}

    def whiteners(self, beta: float) -> tuple[Array, Array]:  # (C, k, k), (C,)
        """`linalg.whiteners` of Sigma_c + beta I, and g_c at the mean; cached for the last beta."""
        found = self._whiteners.get(beta)
        if found is None:  # as in `roots`
            xp = array_namespace(self.covariances)
            ridge = self.slack + beta * identity_like(self.covariances)
            W = whiteners(cholesky(self.covariances + ridge, overwrite=True))
            log_root = xp.sum(xp.log(xp.linalg.diagonal(W)), axis=-1)  # half the log det
            found = W, xp.log(self.priors) + log_root
            self._whiteners.clear()
            self._whiteners[beta] = found
        return found

    @cached_property
    def _whiteners(self) -> dict[float, tuple[Array, Array]]:
        return {}

    @cached_property
    def slack(self) -> Array:  # (k, k)
        """Largest rounding error of an eigenvalue of a class covariance, times I."""
        xp = array_namespace(self.covariances)
        traces = xp.sum(xp.linalg.diagonal(self.covariances), axis=-1)
        eps = xp.finfo(self.covariances.dtype).eps
        return 4 * eps * xp.max(traces) * identity_like(self.covariances)

    @cached_property
    def metric(self) -> Array:  # (k, k)
        """Cholesky factor of `within`, the metric of the certificate."""
        return cholesky(self.within)

    @cached_property
    def margin(self) -> float:
        """Smallest distance gamma_s between two class means, in the metric of `within`."""
        return float(margin(self.means, self.metric))


@dataclass(frozen=True, eq=False)
class AffineMap:
    """z -> A z + b from source to target coordinates.

    >>> import numpy as np
    >>> fitted = AffineMap(2.0 * np.eye(1), np.array([4.0]), 0.5 * np.eye(1), diagonal=True)
    >>> np.array([[1.0]]) @ fitted.A.T + fitted.b  # rows are samples
    array([[6.]])
    """

    A: Array  # (k, k)
    b: Array  # (k,)
    inverse: Array  # (k, k), of A, from the same roots: exact up to rounding
    diagonal: bool  # whether A is a diagonal matrix

    def __repr__(self) -> str:
        return f"AffineMap(k={self.b.shape[0]}, diagonal={self.diagonal})"
