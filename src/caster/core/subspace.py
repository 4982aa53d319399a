"""The discriminative subspace: scatter matrices, the basis U, and how many directions are used."""

from __future__ import annotations

from array_api_compat import array_namespace

from caster.core.linalg import Array, cholesky, identity_like, whiten
from caster.core.moments import ClassScatter


def retained_rank(k_max: int, n_classes: int, width: int) -> int:
    """Directions kept in the state, k0 = min(k_max, C - 1) (Eq. 1), and never more than exist.

    >>> retained_rank(128, n_classes=10, width=512)
    9
    """
    return min(k_max, n_classes - 1, width)


def active_rank(k0: int, batch_size: int) -> int:
    """Directions a batch can support, k = min(k0, B - 1) (Eq. 2).

    >>> active_rank(9, batch_size=64), active_rank(9, batch_size=4)
    (9, 3)
    """
    return min(k0, batch_size - 1)


def scatter_ridge(scatter: ClassScatter, ridge: float) -> float:
    """What is added to the diagonal of S_w: ``ridge * tr(S_w) / d``, in squared feature units."""
    xp = array_namespace(scatter.within)
    return ridge * float(xp.linalg.trace(scatter.within)) / (scatter.total * scatter.width)


def within_scatter(scatter: ClassScatter, rho: float) -> Array:  # -> (d, d)
    """S_w = (1/N) sum_c sum_i (h - mu_c)(h - mu_c)', plus rho on its diagonal."""
    return scatter.within / scatter.total + rho * identity_like(scatter.within)


def between_factor(scatter: ClassScatter) -> Array:  # -> (C, d)
    """F with S_b = F'F: the rows sqrt(n_c / N) (mu_c - m). Its rank is at most C - 1."""
    xp = array_namespace(scatter.means)
    weights = scatter.counts / scatter.total
    grand_mean = weights @ scatter.means
    return (scatter.means - grand_mean) * xp.sqrt(weights)[:, None]


def discriminative_basis(S_w: Array, F: Array, k0: int) -> Array:  # (d, d), (C, d) -> (d, <= k0)
    """Leading generalised eigenvectors U of (F'F, S_w), scaled so that U' S_w U = I.

    With S_w = L L', they are L^-T times the right singular vectors of F L^-T: a thin SVD of
    C x d instead of a d x d eigenproblem. Directions without between-class scatter are left
    out, so fewer than k0 may come back. Signs are fixed: the largest entry of each is positive.
    """
    xp = array_namespace(S_w, F)
    L = cholesky(S_w)
    _, strength, right = xp.linalg.svd(whiten(F, L), full_matrices=False)
    floor = xp.finfo(strength.dtype).eps * max(F.shape) * xp.max(strength)
    k = min(k0, int(xp.count_nonzero(strength > floor)))
    # L^-T v: reversing both axes turns L' into the lower-triangular factor `whiten` takes.
    U = xp.flip(whiten(xp.flip(right[:k, :], axis=1), xp.flip(L.T)), axis=1).T
    at = xp.argmax(xp.abs(U), axis=0, keepdims=True)
    return U * xp.sign(xp.take_along_axis(U, at, axis=0))
