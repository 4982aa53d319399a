"""Source moments where a batch lives: its namespace, device, dtype and number of directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace, device

from caster.core.arrays import like
from caster.core.linalg import Array
from caster.core.types import SourceMoments

KEPT = 8  # every place and rank is one, and every batch size up to k0 has a rank of its own


class Placement:
    """Hands out moments beside a batch, and keeps the few last used ones.

    >>> import numpy as np
    >>> stored = SourceMoments(np.eye(3)[:, :2], np.eye(2), np.stack([np.eye(2)] * 2),
    ...                        np.array([5, 5]))
    >>> Placement(stored).beside(np.ones((4, 3), dtype=np.float32), k=1).means.dtype
    dtype('float32')
    """

    def __init__(self, stored: SourceMoments) -> None:
        self.stored = stored
        self._held: dict[Any, SourceMoments] = {}

    def beside(self, batch: Array, k: int) -> SourceMoments:
        """The stored moments, restricted to k, in the batch's namespace, dtype and device."""
        key = (array_namespace(batch), device(batch), batch.dtype, k)
        moments = self._held.get(key)
        if moments is None:
            moments = self._placed(batch, k)
            for oldest in list(self._held)[: 1 - KEPT]:  # a copy: other threads add too
                self._held.pop(oldest, None)
            self._held[key] = moments
        return moments

    def _placed(self, batch: Array, k: int) -> SourceMoments:
        # Restricted first: what a batch cannot use takes no memory on its device.
        active = self.stored if k == self.stored.rank else self.stored.restrict(k)
        return replace(
            active,
            U=like(active.U, batch, batch.dtype),
            means=like(active.means, batch, batch.dtype),
            covariances=like(active.covariances, batch, batch.dtype),
            counts=like(active.counts, batch),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickles carry the stored moments alone."""
        return {"stored": self.stored, "_held": {}}
