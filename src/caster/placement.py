"""Source moments where a batch lives: its namespace, device, dtype and number of directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace, device

from caster.arrays import like
from caster.core.linalg import Array
from caster.core.types import SourceMoments

KEPT = 8  # placements kept; each new batch size below k0 + 1 adds one


class Placement:
    """Hands out moments beside a batch, and keeps the few last used ones.

    >>> import numpy as np
    >>> stored = SourceMoments(np.eye(3)[:, :2], np.eye(2), np.stack([np.eye(2)] * 2),
    ...                        np.array([5, 5]), 0.0)
    >>> Placement(stored).beside(np.ones((4, 3), dtype=np.float32), k=1).means.dtype
    dtype('float32')
    """

    def __init__(self, stored: SourceMoments) -> None:
        self.stored = stored
        self._placed: dict[Any, SourceMoments] = {}

    def beside(self, batch: Array, k: int) -> SourceMoments:
        """The stored moments, restricted to k, in the batch's namespace, dtype and device."""
        key = (array_namespace(batch), device(batch), batch.dtype, k)
        if key not in self._placed:
            if len(self._placed) == KEPT:
                del self._placed[next(iter(self._placed))]
            self._placed[key] = self._place(batch, k)
        return self._placed[key]

    def _place(self, batch: Array, k: int) -> SourceMoments:
        if k < self.stored.rank:
            return self.beside(batch, self.stored.rank).restrict(k)
        return replace(
            self.stored,
            U=like(self.stored.U, batch, batch.dtype),
            means=like(self.stored.means, batch, batch.dtype),
            covariances=like(self.stored.covariances, batch, batch.dtype),
            counts=like(self.stored.counts, batch),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickles carry the stored moments alone."""
        return {"stored": self.stored, "_placed": {}}
