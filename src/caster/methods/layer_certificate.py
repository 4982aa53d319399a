"""The certificate of layer transport: class centroids after the update, beside those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caster.adapter import Adapter
from caster.core.centroids import ClassShares
from caster.core.linalg import Array
from caster.methods.protocol import nbytes


class LayerCertificate:
    """Whether an update brings the classes no farther from where the source has them.

    Its ratio is the residual of class centroids to the source's class means after the update, over
    the same residual of the frozen model. Each rests on the last `window` samples that were shown:
    the newest batch, and what it lacks of those before it.
    """

    def __init__(self, adapter: Adapter, window: int) -> None:
        self.adapter = adapter
        self.window = window
        self._after: ClassShares | None = None
        self._before: ClassShares | None = None

    def show_after(self, features: Tensor, logits: Tensor) -> None:
        """Take in a batch behind the update."""
        self._after = self._joined(self._after, features, logits)

    def show_before(self, features: Tensor, logits: Tensor) -> None:
        """Take in a batch as the frozen model answers it."""
        self._before = self._joined(self._before, features, logits)

    @property
    def samples(self) -> float:
        """How many samples the ratio rests on."""
        return min(0.0 if seen is None else seen.count for seen in (self._after, self._before))

    @property
    def full(self) -> bool:
        """Whether the frozen model was seen on as many samples as there is a window for."""
        return self._before is not None and self._before.count >= self.window

    def ratio(self) -> float:
        """After over before; both must have been shown."""
        assert self._after is not None
        assert self._before is not None
        with torch.inference_mode():
            moved, unmoved = (self._residual(seen) for seen in (self._after, self._before))
            return float(moved / unmoved)

    def reset(self) -> None:
        """Nothing seen."""
        self._after = self._before = None

    def nbytes(self) -> int:
        """Bytes of what was seen."""
        held = [seen for seen in (self._after, self._before) if seen is not None]
        return sum(nbytes(seen.mass, seen.sums) for seen in held)

    def _residual(self, seen: ClassShares) -> Array:
        moments = self._moments(seen.sums)
        return seen.residual(moments.means, moments.metric)

    def _joined(self, past: ClassShares | None, features: Tensor, logits: Tensor) -> ClassShares:
        with torch.inference_mode():
            new = ClassShares.of(features @ self._moments(features).U, logits)
            missing = self.window - new.count
            return new if past is None or missing <= 0 else past.at_most(missing) + new

    def _moments(self, beside: Array) -> Any:
        transporter = self.adapter.clf.transporter
        return transporter.placement.beside(beside, transporter.rank)
