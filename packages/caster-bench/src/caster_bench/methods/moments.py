"""Mean and covariance of rows that come and go, and the alignment of one to another."""

from __future__ import annotations

from torch import Tensor

from caster.adapt.protocol import nbytes
from caster.core.linalg import symmetric_roots


class Moments:
    """Sums over rows in float64, from which the moments follow; divided by n, not n - 1.

    >>> import torch
    >>> moments = Moments()
    >>> moments.add(torch.tensor([[1.0], [3.0]]))
    >>> moments.mean, moments.covariance
    (tensor([2.], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum: Tensor | None = None  # (d,)
        self._products: Tensor | None = None  # (d, d)

    def add(self, rows: Tensor, sign: int = 1) -> None:  # (n, d)
        """Take rows in; with sign -1 rows leave."""
        wide = rows.double()
        total, products = sign * wide.sum(0), sign * (wide.T @ wide)
        self.count += sign * len(rows)
        self._sum = total if self._sum is None else self._sum.to(wide) + total
        self._products = products if self._products is None else self._products.to(wide) + products

    @property
    def mean(self) -> Tensor:  # (d,)
        """Of the rows."""
        assert self._sum is not None
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:  # (d, d)
        """Of the rows."""
        assert self._products is not None
        mean = self.mean
        return self._products / self.count - mean[:, None] * mean

    def nbytes(self) -> int:
        """Bytes of the sums."""
        return nbytes(self._sum, self._products)


def scale_of(covariance: Tensor, ridge: float) -> Tensor:  # (d, d) -> ()
    """A ridge in units of the mean variance."""
    return ridge * covariance.diagonal().mean()


def whitened(
    centred: Tensor,  # (B, d), of mean zero
    lam: Tensor | float,
) -> Tensor:  # (B, d)
    """Rows X as X (C / lam + I)^(-1/2), with C their covariance X'X / B.

    Fewer rows than columns need no d x d matrix: it is (XX' / B / lam + I)^(-1/2) X, too.

    >>> import torch
    >>> whitened(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), lam=1.0)[0]
    tensor([0.7071, 0.0000])
    """
    count, width = centred.shape
    if count < width:
        _, inverse = symmetric_roots(centred @ centred.T / (count * lam), 1.0)
        whitened: Tensor = inverse @ centred
    else:
        _, inverse = symmetric_roots(centred.T @ centred / (count * lam), 1.0)
        whitened = centred @ inverse
    return whitened
