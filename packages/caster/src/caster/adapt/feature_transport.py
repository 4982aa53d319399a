"""Transport of last-layer features as in the paper, on any array namespace and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from array_api_compat import device
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.adaptation import Adaptation
from caster.core.arrays import DeviceCopies, as_real_array, like, to_numpy
from caster.core.discriminant import RidgedScores, ridged_scores, source_scores
from caster.core.linalg import Array, on_gpu
from caster.core.namespaces import array_namespace, is_numpy_array
from caster.core.order import safeguarded
from caster.core.proposal import Proposal, propose
from caster.core.subspace import active_rank
from caster.core.threads import threads_for
from caster.core.transport import is_diagonal
from caster.core.types import AffineMap, SourceMoments
from caster.core.verdict import Reason, decide, reject
from caster.errors import CasterError
from caster.io.labels import Labels

NUMBERS = "biuf"  # dtype kinds of labels that any device can hold
PLACED = 8  # cached copies of the moments: one per device, dtype and rank in use


@dataclass(frozen=True, eq=False)
class PendingAdaptation:
    """A transported batch before its verdict; on a GPU, without waiting for any result."""

    # Its evidence also holds whether the logits are free of NaN, `assigned` and `chosen`, so that
    # one transfer brings everything to the host.
    proposal: Proposal
    fallback: Array  # (B, C), the frozen head's logits, or Source-GDA's scores
    chosen: Array  # (B,), class indices of the fallback

    def arrays(self) -> list[Array]:
        """All arrays, in a fixed order."""
        made, found = self.proposal, self.proposal.map
        proposed = [made.evidence, made.scores, made.assigned, found.A, found.b, found.inverse]
        return [*proposed, self.fallback, self.chosen]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """Rebuild an attempt from its arrays."""
        evidence, scores, assigned, A, b, inverse, fallback, chosen = arrays
        found = AffineMap(A, b, inverse, is_diagonal(scores.shape[0], A.shape[0]))
        return cls(Proposal(scores, assigned, found, evidence), fallback, chosen)


class FeatureTransport:
    """Apply stored source moments to batches of features."""

    def __init__(self, moments: SourceMoments, classes: Labels, supported: bool) -> None:
        self.moments = moments
        self.classes = classes
        self.supported = supported  # whether transport passed the source check
        self._plain = classes.dtype == np.int64 and np.array_equal(classes, range(len(classes)))
        # torch cannot index by every unsigned type
        self._classes = DeviceCopies(
            classes.astype(np.int64) if classes.dtype.kind == "u" else classes
        )
        self._placed: dict[Any, SourceMoments] = {}
        self._priors = moments.priors  # on the host

    @property
    def width(self) -> int:
        """Number of features d."""
        return int(self.moments.U.shape[0])

    def adapt(self, batch: Any, head_logits: Any, settings: Settings) -> Adaptation:
        """Transport the source to a batch, and judge the result."""
        batch = self.checked(batch)
        with threads_for(len(self.classes)), np.errstate(all="ignore"):
            if batch.shape[0] == 1:
                fallback, head_has_no_nan = self._fallback(batch, head_logits, settings)
                _check_finite(batch, bool(head_has_no_nan))
                return self._untransported(batch, fallback, "batch_too_small")
            attempt = self.attempt(batch, head_logits, settings)
            return self.conclude(batch, attempt, to_numpy(attempt.proposal.evidence), settings)

    def checked(self, batch: Any) -> Array:  # (B, d)
        """Convert a batch to real numbers, and check its shape."""
        batch = as_real_array(batch)
        if batch.ndim != 2 or batch.shape[0] == 0 or batch.shape[1] != self.width:
            raise CasterError(f"a batch must be (samples, {self.width}), not {tuple(batch.shape)}")
        return batch

    def checked_logits(self, head_logits: Any, batch: Array) -> Array:  # (B, C)
        """Move the head's logits to the batch's device as real numbers, and check their shape."""
        logits = like(as_real_array(head_logits), batch)
        expected = (batch.shape[0], len(self.classes))
        if tuple(logits.shape) != expected:
            raise CasterError(f"head_logits must be {expected}, not {tuple(logits.shape)}")
        return logits

    def attempt(self, batch: Array, head_logits: Any, settings: Settings) -> PendingAdaptation:
        """Transport a batch of two rows or more, and compute the evidence for the verdict.

        This neither waits for a GPU nor raises for bad values: NaN in the batch or a failed
        factorization makes the ratio NaN, and `conclude` finds the reason.
        """
        z = self.in_active_directions(batch)
        fallback, head_has_no_nan = self._fallback(batch, head_logits, settings)
        return self._attempted(z, fallback, head_has_no_nan, settings)

    def attempt_projected(
        self,
        z: Array,  # (B, k), `in_active_directions`
        head_logits: Array,  # (B, C)
        settings: Settings,
    ) -> PendingAdaptation:
        """Like `attempt`, for projected features."""
        xp = array_namespace(z)
        head_has_no_nan = xp.logical_not(xp.any(xp.isnan(head_logits)))
        with threads_for(len(self.classes)), np.errstate(all="ignore"):
            return self._attempted(z, head_logits, head_has_no_nan, settings)

    def in_active_directions(self, batch: Array) -> Array:  # (B, d) -> (B, k)
        """Project a batch on the directions that its size supports."""
        return batch @ self.active(batch).U

    def _attempted(
        self, z: Array, fallback: Array, head_has_no_nan: Array, settings: Settings
    ) -> PendingAdaptation:  # (B, k), (B, C), ()
        active = self.placed(z, z.shape[1])
        proposal = propose(z, active, settings, score=_score_of(z))
        xp = array_namespace(z)
        chosen = xp.argmax(fallback, axis=1)
        rest = xp.reshape(head_has_no_nan, (1,)), proposal.assigned, chosen
        numbers = [xp.astype(part, proposal.evidence.dtype) for part in rest]
        evidence = xp.concat([proposal.evidence, *numbers])
        return PendingAdaptation(replace(proposal, evidence=evidence), fallback, chosen)

    def conclude(
        self,
        batch: Array,  # (B, d)
        attempt: PendingAdaptation,
        evidence: NDArray[Any],  # the attempt's, on the host
        settings: Settings,
    ) -> Adaptation:
        """Decide on an attempt, and convert the result to labels."""
        *measured, head_has_no_nan = evidence[:4].tolist()
        indices = evidence[4:].astype(np.int64).reshape(2, -1)
        verdict = decide(measured, len(self.classes), settings)
        if verdict.reason == "numerical" or not head_has_no_nan:
            _check_finite(batch, bool(head_has_no_nan))
            return self._untransported(batch, attempt.fallback, "numerical")
        if settings.safeguards:
            verdict = safeguarded(verdict, self.supported, indices[1], self._priors)
        proposal = attempt.proposal
        # Labels that are not numbers are looked up on the host.
        on_host = self.classes.dtype.kind not in NUMBERS
        assigned, chosen = indices if on_host else (proposal.assigned, attempt.chosen)
        proposed, adapted = self.labels(assigned), proposal.scores
        if verdict.accepted:
            labels, scores = proposed, adapted
        else:
            labels, scores = self.labels(chosen), attempt.fallback
        return Adaptation(
            labels,
            scores,
            proposed,
            adapted,
            attempt.fallback,
            verdict,
            proposal.map,
            features=batch,
            indices=indices,
        )

    def source_scores(self, batch: Any, settings: Settings) -> Array:  # (B, d) -> (B, C)
        """Source-GDA in all retained directions; log priors for rows that overflow."""
        batch = self.checked(batch)
        _check_finite(batch)
        with threads_for(len(self.classes)), np.errstate(all="ignore"):
            return self._source_scores(batch, settings)

    def projected(self, batch: Any) -> tuple[Array, SourceMoments]:
        """Project a batch on the directions that its size supports; also return their moments."""
        batch = self.checked(batch)
        _check_finite(batch)
        active = self.active(batch)
        with np.errstate(all="ignore"):
            return batch @ active.U, active

    def active(self, batch: Array) -> SourceMoments:
        """Moments in the directions that the batch supports, on its device."""
        return self.placed(batch, active_rank(self.moments.rank, batch.shape[0]))

    def placed(self, batch: Array, k: int) -> SourceMoments:
        """Moments in k directions, in the batch's namespace, dtype and device.

        >>> moments = SourceMoments(np.eye(3)[:, :2], np.eye(2), np.stack([np.eye(2)] * 2),
        ...                         np.array([5, 5]))
        >>> transport = FeatureTransport(moments, np.array([0, 1]), True)
        >>> transport.placed(np.ones((4, 3), dtype=np.float32), k=1).means.dtype
        dtype('float32')
        """
        key = (array_namespace(batch), device(batch), batch.dtype, k)
        moments = self._placed.get(key)
        if moments is None:
            # Restrict first, so that unused directions take no memory on the device.
            active = self.moments if k == self.moments.rank else self.moments.restrict(k)
            moments = SourceMoments(
                like(active.U, batch, batch.dtype),
                like(active.means, batch, batch.dtype),
                like(np.ascontiguousarray(active.covariances), batch, batch.dtype),
                like(active.counts, batch),
            )
            for oldest in list(self._placed)[: 1 - PLACED]:  # a copy: other threads add too
                self._placed.pop(oldest, None)
            self._placed[key] = moments
        return moments

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the copies on devices."""
        return {**vars(self), "_placed": {}}

    def labels(self, indices: Array) -> Array:  # (B,) -> (B,)
        """Look up the labels of class indices; labels that are not numbers are NumPy arrays."""
        if is_numpy_array(indices):
            return self.classes[indices]
        if self._plain and on_gpu(indices):
            return indices  # indices are the labels: save the kernel of a look-up
        if self.classes.dtype.kind not in NUMBERS:
            return self.classes[to_numpy(indices)]
        return array_namespace(indices).take(self._classes(indices), indices, axis=0)

    def _fallback(
        self, batch: Array, head_logits: Any, settings: Settings
    ) -> tuple[Array, Array]:  # (B, C), ()
        """Scores for a rejected batch, and whether the head's logits are free of NaN."""
        xp = array_namespace(batch)
        if head_logits is None:
            sound = xp.ones((), dtype=xp.bool, device=device(batch))
            return self._source_scores(batch, settings), sound
        logits = self.checked_logits(head_logits, batch)
        return logits, xp.logical_not(xp.any(xp.isnan(logits)))

    def _source_scores(self, batch: Array, settings: Settings) -> Array:  # (B, d) -> (B, C)
        source = self.placed(batch, self.moments.rank)
        scores = source_scores(batch @ source.U, source, settings.beta)
        xp = array_namespace(scores)
        computed = xp.isfinite(xp.max(scores, axis=1, keepdims=True))  # NaN if any class is NaN
        return xp.where(computed, scores, xp.log(source.priors))

    def _untransported(self, batch: Array, fallback: Array, reason: Reason) -> Adaptation:
        """Answer a batch without a map by the fallback."""
        labels = self.labels(array_namespace(fallback).argmax(fallback, axis=1))
        verdict = reject(reason)
        return Adaptation(labels, fallback, labels, None, fallback, verdict, features=batch)


def _score_of(z: Array) -> RidgedScores:
    if not on_gpu(z):
        return ridged_scores
    from caster.models import class_scores

    return class_scores.ridged_scores


def _check_finite(batch: Array, head_has_no_nan: bool = True) -> None:
    """Raise for NaN or infinity in features, and for NaN in logits."""
    xp = array_namespace(batch)
    if not bool(xp.all(xp.isfinite(batch))):
        rows = to_numpy(~xp.all(xp.isfinite(batch), axis=1)).nonzero()[0]
        where = f"first in row {rows[0]} of the batch"
        raise CasterError(f"the batch holds NaN or infinity, {where}: drop or repair such rows")
    if not head_has_no_nan:
        raise CasterError("head_logits hold NaN: the frozen model's answer is undefined")
