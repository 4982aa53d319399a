"""The certificate of layer transport: whether a stream's mixture of classes is the source's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from caster.adapter import Adapter
from caster.core.linalg import Array, whiten
from caster.core.mixture import MeanStep, class_spread
from caster.methods.protocol import nbytes


class LayerCertificate:
    """How far the features behind the update are from the source's mixture of classes.

    Its ratio is the squared step of their mean off the source's, over that which a class alone
    makes: 1 where a stream is of one class, (1/k - 1/C) / (1 - 1/C) where it is of k classes of C
    evenly, and 0 where it is as the source is. It rests on the last `window` samples that were
    shown: the newest batch, and what that lacks of those before it.
    """

    def __init__(self, adapter: Adapter, window: int, device: torch.device) -> None:
        self.adapter = adapter
        self.window = window
        self.device = device  # of what is kept; features may be anywhere
        self.reset()

    def reset(self) -> None:
        """Nothing seen."""
        self._source: _Source | None = None
        self._seen: MeanStep | None = None

    def show(self, features: Array) -> None:  # (n, d)
        """Take in a batch behind the update."""
        with torch.inference_mode():
            new = MeanStep.of(self._measured(features))
        missing = self.window - new.count
        past = self._seen
        self._seen = new if past is None or missing <= 0 else past.at_most(missing) + new

    @property
    def full(self) -> bool:
        """Whether it was shown as many samples as there is a window for."""
        return self._seen is not None and self._seen.count >= self.window

    def ratio(self) -> float:
        """The step over a class's own, squared, and no less than 0; infinite for a sample alone."""
        assert self._seen is not None
        assert self._source is not None
        if self._seen.count < 2 or self._source.spread <= 0:
            return math.inf
        found = float(self._seen.squared()) / self._source.spread
        return found if math.isnan(found) else max(0.0, found)

    def nbytes(self) -> int:
        """Bytes of what was seen."""
        return 0 if self._seen is None else nbytes(self._seen.total, self._seen.own)

    def _measured(self, features: Array) -> Tensor:  # (n, d) -> (n, k)
        """Coordinates in which the source's within-class covariance is I, about its mean."""
        placed = torch.as_tensor(features, device=self.device)
        wide = placed if placed.dtype == torch.float64 else placed.float()  # halves are rough
        transporter = self.adapter.clf.transporter
        moments = transporter.placement.beside(wide, transporter.rank)
        if self._source is None or self._source.moments is not moments:
            self._source = _Source(moments)
        z: Tensor = whiten(wide @ moments.U - moments.mean, moments.metric)
        return z


class _Source:
    """What is measured with, of the source's moments beside the batch."""

    def __init__(self, moments: Any) -> None:
        self.moments = moments
        means: Tensor = whiten(moments.means - moments.mean, moments.metric)  # (C, k)
        self.spread = class_spread(means, moments.priors)
