"""Source moments where a batch lives: its namespace, device, dtype and number of directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace, device

from caster.arrays import like
from caster.core.linalg import Array
from caster.core.types import SourceMoments

KEPT = 8  # places, and ranks within them: every batch size up to k0 has a rank of its own


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
        self._whole: dict[Any, SourceMoments] = {}
        self._restricted: dict[Any, SourceMoments] = {}

    def beside(self, batch: Array, k: int) -> SourceMoments:
        """The stored moments, restricted to k, in the batch's namespace, dtype and device."""
        place = (array_namespace(batch), device(batch), batch.dtype)
        if k == self.stored.rank:
            return _kept(self._whole, place, lambda: self._placed(batch))
        whole = self.beside(batch, self.stored.rank)
        return _kept(self._restricted, (*place, k), lambda: whole.restrict(k))

    def _placed(self, batch: Array) -> SourceMoments:
        return replace(
            self.stored,
            U=like(self.stored.U, batch, batch.dtype),
            means=like(self.stored.means, batch, batch.dtype),
            covariances=like(self.stored.covariances, batch, batch.dtype),
            counts=like(self.stored.counts, batch),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickles carry the stored moments alone."""
        return {"stored": self.stored, "_whole": {}, "_restricted": {}}


def _kept(
    held: dict[Any, SourceMoments], key: Any, make: Callable[[], SourceMoments]
) -> SourceMoments:
    """The moments under a key, made on first use; the oldest make room."""
    moments = held.get(key)
    if moments is None:
        moments = make()
        if len(held) >= KEPT:
            held.pop(next(iter(held)), None)
        held[key] = moments
    return moments
