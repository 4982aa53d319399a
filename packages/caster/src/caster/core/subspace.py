"""The discriminative subspace: scatter matrices, the basis U, and its rank (Eqs. 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from array_api_compat import array_namespace

from caster.core.linalg import (
    Array,
    cholesky,
    identity_like,
    squares,
    triangular_squares,
    whiten,
    whiteners,
)
from caster.core.moments import ClassScatter, row_blocks

FLATNESS = 1e-4  # smallest within-class variance of a feature, relative to its total variance


def retained_rank(k_max: int, n_classes: int, width: int) -> int:
    """Number of directions in the state, k0 = min(k_max, C - 1) (Eq. 1), and at most d.

    >>> retained_rank(128, n_classes=10, width=512)
    9
    """
    return min(k_max, n_classes - 1, width)


def active_rank(k0: int, batch_size: int) -> int:
    """Number of directions that a batch supports, k = min(k0, B - 1) (Eq. 2).

    >>> active_rank(9, batch_size=64), active_rank(9, batch_size=4)
    (9, 3)
    """
    return min(k0, batch_size - 1)


@dataclass(frozen=True, eq=False)
class WithinScatter:
    """S_w = D R D, with the scales D of the features and their correlations R, shrunk towards I.

    Shrinking correlations preserves every variance, so the units of the features do not matter.
    """

    factor: Array  # (d, d), the Cholesky factor of S_w: D times that of R
    shrinkage: float  # rho: R has 1 - rho of every empirical correlation

    @classmethod
    def of(cls, scatter: ClassScatter) -> Self:
        """Divide the scatter by N, and shrink it as the number of samples requires.

        A feature that separates classes but hardly varies within them would outweigh all others, so
        within-class variances are at least `FLATNESS` of the total. A constant feature has scale 1.
        """
        xp = array_namespace(scatter.within)
        F = between_factor(scatter)
        within = xp.linalg.diagonal(scatter.within) / scatter.total
        total = within + xp.sum(F * F, axis=0)
        rounding = 64 * xp.finfo(F.dtype).eps * xp.max(xp.abs(scatter.means), axis=0)
        varies = total > rounding**2
        scale = xp.sqrt(xp.where(varies, xp.maximum(within, FLATNESS * total), 1.0))
        identity = identity_like(scatter.within)
        found = scatter.within / (scatter.total * scale[:, None])  # updated in place from here on
        found /= scale
        found *= 1 - identity
        found += identity
        rho = oas_shrinkage(found, scatter.total - scatter.means.shape[0])
        found *= 1 - rho
        found += rho * identity
        factor = cholesky(found, overwrite=True)
        factor *= scale[:, None]
        return cls(factor, rho)

    def whiten(self, rows: Array) -> Array:  # (n, d) -> (n, d)
        """Map rows x to S_w^-1/2 x, up to a rotation: distances become Mahalanobis distances."""
        return whiten(rows, self.factor)

    def unwhiten_directions(self, rows: Array) -> Array:  # (k, d) -> (k, d)
        """Map directions in whitened space to directions on which features are projected."""
        xp = array_namespace(rows)
        # L^-T v: reversing both axes turns L' into a lower-triangular factor, as `whiten` expects.
        return xp.flip(whiten(xp.flip(rows, axis=1), xp.flip(self.factor.T)), axis=1)


def oas_shrinkage(correlation: Array, n: float) -> float:  # (d, d), degrees of freedom
    """Oracle-approximating shrinkage of a correlation matrix towards I (Chen et al. 2010, Eq. 23).

    It needs only the matrix, not fourth moments, so sums from many machines suffice. On small
    sources it was 0 to 1.4 points behind Ledoit-Wolf shrinkage (docs/small-sources.md).

    >>> import numpy as np
    >>> round(oas_shrinkage(np.array([[1.0, 0.5], [0.5, 1.0]]), 99), 3)
    0.13
    """
    xp = array_namespace(correlation)
    d = correlation.shape[0]
    mean_square = float(xp.sum(squares(correlation))) / d**2
    spare = (n + 1) * (mean_square - 1 / d)
    return min(1.0, (mean_square + 1) / spare) if spare > 0 else 1.0


def between_factor(scatter: ClassScatter) -> Array:  # -> (C, d)
    """F with S_b = F'F: the rows sqrt(n_c / N) (mu_c - m). Its rank is at most C - 1."""
    xp = array_namespace(scatter.means)
    weights = scatter.counts / scatter.total
    return (scatter.means - weights @ scatter.means) * xp.sqrt(weights)[:, None]


@dataclass(frozen=True, eq=False)
class Basis:
    """The leading generalised eigenvectors U of (S_b, S_w), scaled so that U' S_w U = I.

    U = S_w^-1 M' B, where the rows of M are the class means. B holds the weight of each class mean
    in each direction; with it, a sample can be removed from both M and S_w (`HeldOutBasis`).
    """

    U: Array  # (d, k)
    B: Array  # (C, k)

    @classmethod
    def of(cls, scatter: ClassScatter, S_w: WithinScatter, k0: int) -> Self:
        """Find at most k0 directions, all with between-class scatter.

        They are S_w^-1/2 times the right singular vectors of F S_w^-1/2: a thin SVD of C x d
        instead of a d x d eigenproblem. The largest entry of each direction is positive.
        """
        F = between_factor(scatter)
        xp = array_namespace(F)
        left, strength, right = xp.linalg.svd(S_w.whiten(F), full_matrices=False)
        floor = xp.finfo(strength.dtype).eps * max(F.shape) * xp.max(strength)
        k = min(k0, int(xp.count_nonzero(strength > floor)))
        U = S_w.unwhiten_directions(right[:k, :]).T
        weights = xp.sqrt(scatter.counts / scatter.total)[:, None]
        at = xp.argmax(xp.abs(U), axis=0, keepdims=True)
        sign = xp.sign(xp.take_along_axis(U, at, axis=0))
        return cls(U * sign, weights * left[:, :k] / strength[:k] * sign)


@dataclass(frozen=True, eq=False)
class HeldOutBasis:
    """For every source sample, the basis fitted to the other samples.

    U is fitted to the source, so the projected classes of the source are tighter and further apart
    than those of new samples, without bound as d approaches N. Removing sample i from its class
    mean and from S_w is a rank-one change of U = S_w^-1 M' B, so U'h_i changes in closed form. With
    x the residual of sample i, n the count of its class, q = x' S_w^-1 x, t = x' S_w^-1 (h_i - m)
    and g = (1 - rho) n / ((n - 1) N), the Sherman-Morrison formula gives

        z_i + t / (1 - g q) (g U'x - B_c / (n - 1)).

    Scales, rho and B are computed from all samples.
    """

    U: Array  # (d, k), in the features' dtype like the next three
    means: Array  # (C, d)
    whitener: Array  # (d, d), of S_w
    offsets: Array  # (C, d), S_w^-1 (mu_c - m)
    centroids: Array  # (C, k), U'mu_c, float64 like the next two
    g: Array  # (C,)
    shares: Array  # (C, k), B_c / (n - 1)

    @classmethod
    def of(cls, scatter: ClassScatter, S_w: WithinScatter, basis: Basis, dtype: Any) -> Self:
        """Compute everything that samples share, for features of one dtype."""
        xp = array_namespace(scatter.means)
        m = scatter.counts @ scatter.means / scatter.total
        others = scatter.counts - 1
        return cls(
            U=xp.astype(basis.U, dtype),
            means=xp.astype(scatter.means, dtype),
            whitener=xp.astype(whiteners(S_w.factor), dtype),
            offsets=xp.astype(S_w.unwhiten_directions(S_w.whiten(scatter.means - m)), dtype),
            centroids=scatter.means @ basis.U,
            g=(1 - S_w.shrinkage) * scatter.counts / (others * scatter.total),
            shares=basis.B / others[:, None],
        )

    def project(
        self,
        h: Array,  # (n, d), source samples
        y: Array,  # (n,), class indices
    ) -> Array:  # (n, k)
        """Project every sample on the basis fitted to the others, in float64."""
        blocks = [self._project(h[rows, :], y[rows]) for rows in row_blocks(h)]
        return array_namespace(h).concat(blocks)

    def _project(self, h: Array, y: Array) -> Array:  # (n, d), (n,) -> (n, k)
        xp = array_namespace(h)
        z = xp.astype(h @ self.U, xp.float64)
        x = xp.take(self.means, y, axis=0)
        x -= h  # minus the residuals, in place
        q = triangular_squares(x, self.whitener)
        x *= xp.take(self.offsets, y, axis=0)
        t = q - xp.sum(x, axis=1)
        g, q, t = xp.take(self.g, y, axis=0), *(xp.astype(each, z.dtype) for each in (q, t))
        step = t / xp.clip(1 - g * q, min=xp.finfo(h.dtype).eps)
        own = xp.take(self.centroids, y, axis=0)
        return z + step[:, None] * (g[:, None] * (z - own) - xp.take(self.shares, y, axis=0))
