"""The discriminative subspace: scatter matrices, the basis U, and its rank (Eqs. 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from array_api_compat import array_namespace

from caster.core.linalg import Array, cholesky, identity_like, squares, whiten
from caster.core.moments import ClassScatter

FLATNESS = 1e-4  # least within-class variance of a feature, relative to its total


def retained_rank(k_max: int, n_classes: int, width: int) -> int:
    """Directions in the state, k0 = min(k_max, C - 1) (Eq. 1), and at most d.

    >>> retained_rank(128, n_classes=10, width=512)
    9
    """
    return min(k_max, n_classes - 1, width)


def active_rank(k0: int, batch_size: int) -> int:
    """Directions that a batch supports, k = min(k0, B - 1) (Eq. 2).

    >>> active_rank(9, batch_size=64), active_rank(9, batch_size=4)
    (9, 3)
    """
    return min(k0, batch_size - 1)


@dataclass(frozen=True, eq=False)
class WithinScatter:
    """S_w = D R D: scales D of the features, and R, their correlations shrunk towards I.

    Shrinking correlations preserves every variance, so the units of a feature do not matter.
    """

    scale: Array  # (d,), the diagonal of D
    factor: Array  # (d, d), the Cholesky factor of R
    shrinkage: float  # rho: R has 1 - rho of every empirical correlation

    @classmethod
    def of(cls, scatter: ClassScatter) -> Self:
        """Divide the scatter by N, and shrink it as far as its number of samples demands.

        A feature that separates classes but hardly varies within them would outweigh all others;
        its variance counts as at least `FLATNESS` of its total. A constant feature has scale 1.
        """
        xp = array_namespace(scatter.within)
        F = between_factor(scatter)
        within = xp.linalg.diagonal(scatter.within) / scatter.total
        total = within + xp.sum(F * F, axis=0)
        rounding = 64 * xp.finfo(F.dtype).eps * xp.max(xp.abs(scatter.means), axis=0)
        varies = total > rounding**2
        scale = xp.sqrt(xp.where(varies, xp.maximum(within, FLATNESS * total), 1.0))
        found = scatter.within / scatter.total / scale[:, None] / scale
        off_diagonal = found - xp.linalg.diagonal(found) * identity_like(found)
        rho = oas_shrinkage(
            off_diagonal + identity_like(found), scatter.total - scatter.means.shape[0]
        )
        return cls(scale, cholesky((1 - rho) * off_diagonal + identity_like(found)), rho)

    def whiten(self, rows: Array) -> Array:  # (n, d) -> (n, d)
        """Map rows x to S_w^-1/2 x, up to a rotation: distances become Mahalanobis distances."""
        xp = array_namespace(rows)
        return whiten(rows / xp.astype(self.scale, rows.dtype), xp.astype(self.factor, rows.dtype))

    def unwhiten_directions(self, rows: Array) -> Array:  # (k, d) -> (k, d)
        """Map directions among whitened rows to directions to project features on."""
        xp = array_namespace(rows)
        # L^-T v: reversing both axes turns L' into the lower-triangular factor `whiten` takes.
        solved = whiten(xp.flip(rows, axis=1), xp.flip(self.factor.T))
        return xp.flip(solved, axis=1) / self.scale


def oas_shrinkage(correlation: Array, n: float) -> float:  # (d, d), degrees of freedom
    """Oracle-approximating shrinkage of a correlation matrix towards I (Chen et al. 2010, Eq. 23).

    It needs only the matrix, not fourth moments, so sums from many machines suffice. On small
    sources it was 0 to 1.4 points behind Ledoit and Wolf's (docs/small-sources.md).

    >>> import numpy as np
    >>> round(oas_shrinkage(np.array([[1.0, 0.5], [0.5, 1.0]]), 99), 3)
    0.13
    """
    xp = array_namespace(correlation)
    d = correlation.shape[0]
    mean_square = float(xp.sum(correlation * correlation)) / d**2
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

    U = S_w^-1 M' B, with the class means in the rows of M: B holds the weight of each class mean
    in each direction, and allows removing a sample from both M and S_w (`held_out`).
    """

    U: Array  # (d, k)
    B: Array  # (C, k)

    @classmethod
    def of(cls, scatter: ClassScatter, S_w: WithinScatter, k0: int) -> Self:
        """Find at most k0 directions, without those that have no between-class scatter.

        They are S_w^-1/2 times the right singular vectors of F S_w^-1/2: a thin SVD of C x d
        instead of a d x d eigenproblem. Signs make the largest entry of each direction positive.
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


def held_out(
    z: Array,  # (n, k), source samples projected on U
    residuals: Array,  # (n, d), the same samples minus their class means, whitened by S_w
    y: Array,  # (n,), class indices
    scatter: ClassScatter,
    S_w: WithinScatter,
    basis: Basis,
) -> Array:  # (n, k)
    """Project every sample on the basis fitted to the other samples.

    U is fitted to the source: projected on it, the source's classes are tighter and further apart
    than those of new samples, without bound as d approaches N. Removing sample i from its class
    mean and from S_w is a rank-one change of U = S_w^-1 M' B, so U'h_i changes in closed form. With
    x the residual of sample i, n its class's count, q = x' S_w^-1 x, t = x' S_w^-1 (h_i - m) and
    g = (1 - rho) n / ((n - 1) N), Sherman and Morrison's formula gives

        z_i + t / (1 - g q) (g U'x - B_c / (n - 1)).

    Scales, rho and B are those of all samples.
    """
    xp = array_namespace(z)
    F = between_factor(scatter)
    weights = xp.sqrt(scatter.counts / scatter.total)
    offsets = xp.astype(S_w.whiten(F / weights[:, None]), residuals.dtype)  # (C, d), of mu_c - m
    q = squares(residuals)
    t = q + xp.sum(residuals * xp.take(offsets, y, axis=0), axis=1)
    counts = xp.take(scatter.counts, y, axis=0)
    g = (1 - S_w.shrinkage) * counts / ((counts - 1) * scatter.total)
    q, t = xp.astype(q, z.dtype), xp.astype(t, z.dtype)
    step = t / xp.clip(1 - g * q, min=xp.finfo(residuals.dtype).eps)
    own_means = xp.take(scatter.means @ basis.U, y, axis=0)
    own_shares = xp.take(basis.B, y, axis=0) / (counts - 1)[:, None]
    return z + step[:, None] * (g[:, None] * (z - own_means) - own_shares)
