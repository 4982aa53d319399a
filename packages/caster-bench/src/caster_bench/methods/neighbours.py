"""The nearest rows of a bank, exactly: a fast search that knows when it may have erred."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**25  # numbers a temporary may hold
SMALL = 2**22  # where it is read and written again and again
SPARE = 16  # candidates beyond those asked for
OBSERVED = 8  # times smaller than the bound must be the errors seen, or the bound is not trusted


class Neighbours:
    """Rows by Euclidean distance, as float64 tells it; of equal ones the first.

    A matrix product finds candidates, which rounding may have put in the wrong order or left
    out: |a - b|² = |a|² - 2 ab + |b|² cancels where a and b are close. So the distances of a few
    more candidates than asked for are taken anew from differences in float64, and all others are
    shown to lie farther, by a bound on the rounding. Where they are not, the search goes on in
    float64, and last without the product.

    >>> bank = torch.tensor([[0.0], [3.0], [1.0], [1.0]])
    >>> Neighbours(bank)(torch.tensor([[2.0]]), 2)
    tensor([[1, 2]])
    """

    def __init__(self, bank: Tensor) -> None:  # (N, d)
        self.bank = bank
        squares = [part.double().square().sum(1) for part in _pieces(bank, bank.shape[1], SMALL)]
        self.halves = torch.cat(squares) / 2
        self._longest = (2 * self.halves.max()).sqrt()

    def __call__(self, queries: Tensor, k: int) -> Tensor:  # (B, d) -> (B, k)
        """Indices of the k nearest rows of every query, nearest first."""
        found, sure = self._by_product(queries, k, self.bank.dtype)
        if not bool(sure.all()):
            left = (~sure).nonzero()[:, 0]
            found[left], sure = self._by_product(queries[left], k, torch.float64)
            for query in left[~sure].tolist():
                found[query] = self._by_difference(queries[query], k)
        return found

    def _by_product(self, queries: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The k nearest, (B, k), and of which queries that is sure, (B,)."""
        count = min(k + SPARE, len(self.bank))
        scores, candidates = self._candidates(queries.to(dtype), count)
        wide = queries.double()
        exact = self._distances(wide, candidates)
        distances, order = exact.sort(dim=1, stable=True)
        lengths = wide.square().sum(1, keepdim=True)
        # A sum of d + 1 products in any order is off by (d + 1) eps/2 times their sizes at most.
        sizes = self._longest * (lengths.sqrt() + self._longest / 2)  # (B, 1)
        bound = (queries.shape[1] + 2) * torch.finfo(dtype).eps * sizes
        errors = (scores.double() - (exact - lengths) / 2).abs().amax(1, keepdim=True)
        others = scores.double().amax(1, keepdim=True) - bound  # which score no lower than that
        nearer = (distances[:, k - 1 : k] - lengths) / 2 < others
        sure = nearer & (errors * OBSERVED <= bound)  # or products are rounded by other rules
        complete = count == len(self.bank)
        return candidates.gather(1, order[:, :k]), sure[:, 0] | complete

    def _candidates(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The lowest (|b|² - 2 ab) / 2, unordered, and their rows in order: (B, count) both."""
        scores = queries.new_empty((len(queries), 0))
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        start = 0
        for bank in _pieces(self.bank, max(queries.shape), CHUNK):
            halves = self.halves[start : start + len(bank)].to(queries.dtype)
            part = torch.addmm(halves, queries, bank.to(queries.dtype).T, alpha=-1)
            best, index = part.topk(min(count, len(bank)), largest=False, sorted=False)
            scores, rows = torch.cat([scores, best], 1), torch.cat([rows, index + start], 1)
            start += len(bank)
            if scores.shape[1] > count:
                scores, index = scores.topk(count, largest=False, sorted=False)
                rows = rows.gather(1, index)
        rows, order = rows.sort(dim=1)
        return scores.gather(1, order), rows

    def _distances(self, wide: Tensor, rows: Tensor) -> Tensor:  # (B, d), (B, n) -> (B, n)
        """Squared distances of queries to some rows each, from differences in float64."""
        numbers = wide.shape[1] * rows.shape[1]
        both = zip(_pieces(wide, numbers, SMALL), _pieces(rows, numbers, SMALL), strict=True)
        return torch.cat(
            [self.bank[index].double().sub_(part[:, None]).square_().sum(2) for part, index in both]
        )

    def _by_difference(self, query: Tensor, k: int) -> Tensor:  # (d,) -> (k,)
        """Every distance in full."""
        wide = query.double()
        parts = _pieces(self.bank, len(query), SMALL)
        distances = torch.cat([(part.double() - wide).square().sum(1) for part in parts])
        return distances.sort(stable=True).indices[:k]


def _pieces(rows: Tensor, numbers: int, most: int) -> list[Tensor]:
    """Rows in pieces, where each row makes so many numbers, and each piece at most so many."""
    step = max(1, most // numbers)
    return [rows[start : start + step] for start in range(0, len(rows), step)]
