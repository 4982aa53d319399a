"""The certificate of layer transport: class centroids after the update, and a steady stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from caster.adapter import Adapter
from caster.core.centroids import ClassShares, residual_ratio
from caster.core.linalg import Array, whiten
from caster.core.steadiness import Steadiness, freedom
from caster.methods.protocol import nbytes


class LayerCertificate:
    """Whether an update brings the classes no farther from where the source has them.

    Its ratio is the residual of class centroids to the source's class means after the update, over
    the same residual of the frozen model. Each rests on the last `window` samples that were shown:
    the newest batch, and what it lacks of those before it. Where the frozen model's features change
    from half a window to the next by more than chance allows, the ratio is at least how many times
    more: what the update carries away is then the stream's mixture of classes.
    """

    def __init__(self, adapter: Adapter, window: int, device: torch.device) -> None:
        self.adapter = adapter
        self.window = window
        self.device = device  # of what is kept; features and logits may be anywhere
        self.reset()

    def reset(self) -> None:
        """Nothing seen."""
        self._source: _Source | None = None
        self._after: ClassShares | None = None
        self._before: ClassShares | None = None
        self._steady = Steadiness(max(2, self.window // 2))

    def show_after(self, features: Array, logits: Array) -> None:
        """Take in a batch behind the update."""
        with torch.inference_mode():
            self._after = self._joined(self._after, self._measured(features), logits)

    def show_before(self, features: Array, logits: Array) -> None:
        """Take in a batch as the frozen model answers it."""
        with torch.inference_mode():
            z = self._measured(features)
            self._before = self._joined(self._before, z, logits)
            self._steady = self._steady.shown(z)

    @property
    def full(self) -> bool:
        """Whether both were shown as many samples as there is a window for, in two blocks."""
        shown = (self._after, self._before)
        whole = all(seen is not None and seen.count >= self.window for seen in shown)
        return whole and bool(self._steady.pairs)

    def ratio(self) -> float:
        """The larger of both ratios; infinite where there is one block of samples only.

        NaN where either is no number: `max` alone would overlook one of them.
        """
        assert self._after is not None
        assert self._before is not None
        assert self._source is not None
        if not self._steady.pairs:
            return math.inf
        with torch.inference_mode():
            found = [self._after.residual(), self._before.residual(), *self._steady.sums()]
            after, before, steps, chance = torch.stack(found).tolist()
        moved = residual_ratio(after, before)
        limit = self._steady.limit(self._source.freedom)
        changed = math.inf if chance <= 0 else steps / chance / limit
        return math.nan if math.isnan(moved + changed) else max(moved, changed)

    def nbytes(self) -> int:
        """Bytes of what was seen."""
        held = [seen for seen in (self._after, self._before) if seen is not None]
        blocks = [seen for seen in (self._steady.open, self._steady.last) if seen is not None]
        return sum(nbytes(seen.mass, seen.steps, seen.own) for seen in held) + sum(
            nbytes(seen.total) for seen in blocks
        )

    def _joined(self, past: ClassShares | None, z: Tensor, logits: Array) -> ClassShares:
        assert self._source is not None
        new = ClassShares.of(z, self._wide(logits), self._source.means)
        missing = self.window - new.count
        return new if past is None or missing <= 0 else past.at_most(missing) + new

    def _measured(self, features: Array) -> Tensor:  # (n, d) -> (n, k)
        """Coordinates in which the source's within-class covariance is I, about its mean."""
        wide, transporter = self._wide(features), self.adapter.clf.transporter
        moments = transporter.placement.beside(wide, transporter.rank)
        if self._source is None or self._source.moments is not moments:
            self._source = _Source(moments)
        z: Tensor = whiten(wide @ moments.U - moments.mean, moments.metric)
        return z

    def _wide(self, values: Array) -> Tensor:
        placed = torch.as_tensor(values, device=self.device)
        return placed if placed.dtype == torch.float64 else placed.float()  # halves are rough


class _Source:
    """What is measured with, of the source's moments beside the batch."""

    def __init__(self, moments: Any) -> None:
        self.moments = moments
        self.means: Tensor = whiten(moments.means - moments.mean, moments.metric)  # (C, k)
        halfway = whiten(moments.covariance, moments.metric)
        self.freedom = freedom(whiten(halfway.T, moments.metric))
