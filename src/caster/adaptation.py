"""One batch adapted: checked, projected, transported, judged, and answered in labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from caster.arrays import as_real_array, like, to_numpy
from caster.config import Settings
from caster.core.discriminant import ridged_scores
from caster.core.gate import refuse
from caster.core.linalg import Array, identity_like
from caster.core.subspace import active_rank
from caster.core.types import AffineMap, SourceMoments, Verdict
from caster.errors import CasterError
from caster.labels import Labels
from caster.placement import Placement
from caster.threads import threads_for
from caster.trial import try_transport


@dataclass(frozen=True, eq=False)
class Adaptation:
    """One adapted batch.

    >>> from caster import Caster
    >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], ["low", "low", "high", "high"])
    >>> out = clf.adapt([[0.5]])
    >>> out.predictions.tolist(), out.verdict.reason
    (['low'], 'batch_too_small')
    """

    predictions: Array  # (B,), labels: the proposed ones if accepted, else the fallback's
    proposed: Array  # (B,), the transported classifier's labels, whatever the verdict
    transported: Array  # (B, C), its scores g_c
    verdict: Verdict
    map: AffineMap


class Transporter:
    """Stored moments at work on batches of any namespace and device."""

    def __init__(self, moments: SourceMoments, classes: Labels) -> None:
        self.classes = classes
        self.rank = moments.rank
        self.width = int(moments.U.shape[0])
        self.placement = Placement(moments)

    def adapt(self, batch: Any, head_logits: Any, settings: Settings) -> Adaptation:
        """Transport the source to a batch, and answer it."""
        with threads_for(len(self.classes)):
            z = self.project(batch)
            head = None if head_logits is None else self._head_choice(head_logits, z)
            k = active_rank(self.rank, z.shape[0])
            if k == 0:
                return self._unsupported(z, head, settings)
            active = self.placement.beside(z, k)
            proposal, verdict = try_transport(z[:, :k], active, settings)
            proposed = predictions = self._labels(proposal.assigned)
            if not verdict.accepted:
                predictions = self._fallback(z, head, settings)
        return Adaptation(predictions, proposed, proposal.scores, verdict, proposal.map)

    def source_scores(self, batch: Any, settings: Settings) -> Array:  # (B, d) -> (B, C)
        """Source-GDA in all retained directions."""
        with threads_for(len(self.classes)):
            return self._source_scores(self.project(batch), settings)

    def project(self, batch: Any) -> Array:  # (B, d) -> (B, k0)
        """z = U'h in all retained directions, of a batch that is checked on the way."""
        batch = as_real_array(batch)
        if batch.ndim != 2 or batch.shape[0] == 0 or batch.shape[1] != self.width:
            raise CasterError(f"a batch must be (samples, {self.width}), not {tuple(batch.shape)}")
        z = batch @ self.placement.beside(batch, self.rank).U
        xp = array_namespace(z)
        largest = xp.finfo(z.dtype).max ** 0.4  # z is squared, and the squares added up
        if not bool(xp.all(xp.abs(z) < largest)):  # NaN is not below it either
            if not bool(xp.all(xp.isfinite(batch))):
                raise CasterError("the batch holds NaN or infinity: drop or repair such rows")
            raise CasterError(f"the batch is too large for {z.dtype}: rescale it like the source")
        return z

    def _head_choice(self, head_logits: Any, z: Array) -> Array:  # (B, C) -> (B,)
        logits = like(as_real_array(head_logits), z)
        xp = array_namespace(logits)
        expected = (z.shape[0], len(self.classes))
        if tuple(logits.shape) != expected:
            raise CasterError(f"head_logits must be {expected}, not {tuple(logits.shape)}")
        if bool(xp.any(xp.isnan(logits))):
            raise CasterError("head_logits hold NaN: the frozen model's answer is undefined")
        return xp.argmax(logits, axis=1)

    def _source_scores(self, z: Array, settings: Settings) -> Array:  # (B, k0) -> (B, C)
        source = self.placement.beside(z, self.rank)
        return ridged_scores(z, source, settings.beta * identity_like(source.pooled))

    def _fallback(self, z: Array, head: Array | None, settings: Settings) -> Array:  # -> (B,)
        if head is None:
            head = array_namespace(z).argmax(self._source_scores(z, settings), axis=1)
        return self._labels(head)

    def _unsupported(self, z: Array, head: Array | None, settings: Settings) -> Adaptation:
        """The answer for a batch of one, in which no direction is active."""
        xp = array_namespace(z)
        none = self.placement.beside(z, 0)
        labels = self._fallback(z, head, settings)
        scores = xp.broadcast_to(xp.log(none.priors), (1, none.n_classes))
        no_map = AffineMap(A=z[:0, :0], b=z[0, :0], inverse=z[:0, :0], diagonal=True)
        return Adaptation(labels, labels, scores, refuse("batch_too_small"), no_map)

    def _labels(self, indices: Array) -> Array:  # (B,) -> (B,)
        if is_numpy_array(indices):
            return self.classes[indices]
        if self.classes.dtype.kind not in "iufb":
            return self.classes[to_numpy(indices)]
        # torch cannot index all unsigned kinds
        classes = self.classes.astype(np.int64) if self.classes.dtype.kind == "u" else self.classes
        return array_namespace(indices).take(like(classes, indices), indices, axis=0)
