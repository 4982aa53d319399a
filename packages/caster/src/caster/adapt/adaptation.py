"""One batch adapted: checked, projected, transported, judged, and answered in labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray

from caster.adapt.placement import Placement
from caster.config import Settings
from caster.core.arrays import Beside, as_real_array, like, to_numpy
from caster.core.discriminant import probabilities, ridged_scores
from caster.core.gate import refuse
from caster.core.linalg import Array, identity_like, on_gpu
from caster.core.order import is_ordered, order_evidence
from caster.core.proposal import Proposal
from caster.core.subspace import active_rank
from caster.core.threads import threads_for
from caster.core.transport import is_diagonal
from caster.core.trial import judge, transport
from caster.core.types import AffineMap, Reason, SourceMoments, Verdict
from caster.errors import CasterError
from caster.io.labels import Labels


@dataclass(frozen=True, eq=False)
class Adaptation:
    """One adapted batch.

    >>> from caster import Caster
    >>> clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], ["low", "low", "high", "high"])
    >>> out = clf.adapt([[0.5]])
    >>> out.predictions.tolist(), out.verdict.reason
    (['low'], 'batch_too_small')
    >>> out
    Adaptation(1 sample, 2 classes, batch_too_small, ratio=inf)
    """

    predictions: Array  # (B,), labels: the proposed ones if accepted, else the fallback's
    proposed: Array  # (B,), the transported classifier's labels, whatever the verdict
    transported: Array  # (B, C), its scores g_c
    scores: Array  # (B, C), those of the predictions: g_c, head logits or Source-GDA's scores
    verdict: Verdict
    map: AffineMap

    @property
    def probabilities(self) -> Array:  # (B, C)
        """Softmax of the scores, columns in the order of the classes."""
        return probabilities(self.scores)

    def __repr__(self) -> str:
        B, C = self.scores.shape
        verdict = f"{self.verdict.reason}, ratio={self.verdict.ratio:.3g}"
        return f"Adaptation({B} sample{'' if B == 1 else 's'}, {C} classes, {verdict})"


@dataclass(frozen=True, eq=False)
class Attempt:
    """A batch transported and measured, of which nothing need have reached the host yet."""

    proposal: Proposal  # its evidence goes on with `order_evidence`, and whether logits are sound
    fallback: Array  # (B, C), the frozen head's logits, or Source-GDA's scores
    chosen: Array  # (B,), class indices by those

    def arrays(self) -> list[Array]:
        """Everything in it, in a row."""
        made, found = self.proposal, self.proposal.map
        proposed = [made.evidence, made.scores, made.assigned, found.A, found.b, found.inverse]
        return [*proposed, self.fallback, self.chosen]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """The attempt whose arrays these are."""
        evidence, scores, assigned, A, b, inverse, fallback, chosen = arrays
        found = AffineMap(A, b, inverse, is_diagonal(scores.shape[0], A.shape[0]))
        return cls(Proposal(scores, assigned, found, evidence), fallback, chosen)


class Transporter:
    """Stored moments at work on batches of any namespace and device."""

    def __init__(self, moments: SourceMoments, classes: Labels, supported: bool) -> None:
        self.classes = classes
        self.supported = supported  # by the source itself
        self._plain = classes.dtype == np.int64 and np.array_equal(classes, range(len(classes)))
        # torch cannot index all unsigned kinds
        self._classes = Beside(classes.astype(np.int64) if classes.dtype.kind == "u" else classes)
        self.rank = moments.rank
        self.width = int(moments.U.shape[0])
        self.placement = Placement(moments)

    def adapt(self, batch: Any, head_logits: Any, settings: Settings) -> Adaptation:
        """Transport the source to a batch, and answer it."""
        batch = self.checked(batch)
        with threads_for(len(self.classes)), np.errstate(all="ignore"):
            if batch.shape[0] == 1:
                fallback, sound_head = self._fallback(batch, head_logits, settings)
                _check_finite(batch, bool(sound_head))
                return self._untransported(batch, fallback, "batch_too_small")
            attempt = self.attempt(batch, head_logits, settings)
            return self.conclude(batch, attempt, to_numpy(attempt.proposal.evidence), settings)

    def attempt(self, batch: Array, head_logits: Any, settings: Settings) -> Attempt:
        """Transport a batch of two rows or more, and measure what the verdict rests on.

        Nothing in here waits for a GPU or raises for the sake of a number: NaN in the batch, and
        what cannot be computed, make the ratio NaN, and `conclude` finds out why.
        """
        active = self.active(batch)
        z = batch @ active.U
        fallback, sound_head = self._fallback(batch, head_logits, settings)
        proposal = transport(z, active, settings)
        xp = array_namespace(z)
        chosen = xp.argmax(fallback, axis=1)
        order = order_evidence(chosen, active.priors)
        flag = xp.astype(sound_head, proposal.evidence.dtype)
        evidence = xp.concat([proposal.evidence, order, xp.reshape(flag, (1,))])
        return Attempt(replace(proposal, evidence=evidence), fallback, chosen)

    def active(self, batch: Array) -> SourceMoments:
        """The moments beside a batch, in the directions it can support."""
        return self.placement.beside(batch, active_rank(self.rank, batch.shape[0]))

    def conclude(
        self,
        batch: Array,  # (B, d)
        attempt: Attempt,
        evidence: NDArray[Any],  # the attempt's, on the host
        settings: Settings,
    ) -> Adaptation:
        """Judge an attempt, and answer its batch in labels."""
        *measured, neighbours, excess, sound_head = evidence.tolist()
        verdict = judge(measured, len(self.classes), settings)
        if verdict.reason == "numerical" or not sound_head:
            _check_finite(batch, bool(sound_head))
            return self._untransported(batch, attempt.fallback, "numerical")
        if settings.safeguards and not self.supported:
            verdict = replace(verdict, accepted=False, reason="source_check")
        elif settings.safeguards and is_ordered(neighbours, excess):
            verdict = replace(verdict, accepted=False, reason="class_order")
        proposal = attempt.proposal
        proposed, transported = self._labels(proposal.assigned), proposal.scores
        if verdict.accepted:
            predictions, scores = proposed, transported
        else:
            predictions, scores = self._labels(attempt.chosen), attempt.fallback
        return Adaptation(predictions, proposed, transported, scores, verdict, proposal.map)

    def source_scores(self, batch: Any, settings: Settings) -> Array:  # (B, d) -> (B, C)
        """Source-GDA in all retained directions; log priors for rows it cannot be computed for."""
        batch = self.checked(batch)
        _check_finite(batch)
        with threads_for(len(self.classes)), np.errstate(all="ignore"):
            return self._source_scores(batch, settings)

    def checked(self, batch: Any) -> Array:  # (B, d)
        """A batch as real numbers of the right shape."""
        batch = as_real_array(batch)
        if batch.ndim != 2 or batch.shape[0] == 0 or batch.shape[1] != self.width:
            raise CasterError(f"a batch must be (samples, {self.width}), not {tuple(batch.shape)}")
        return batch

    def _fallback(
        self, batch: Array, head_logits: Any, settings: Settings
    ) -> tuple[Array, Array]:  # (B, C), ()
        """Scores that answer a rejected batch, and whether no logit of the head is NaN."""
        xp = array_namespace(batch)
        if head_logits is None:
            sound = xp.ones((), dtype=xp.bool, device=device(batch))
            return self._source_scores(batch, settings), sound
        logits = like(as_real_array(head_logits), batch)
        expected = (batch.shape[0], len(self.classes))
        if tuple(logits.shape) != expected:
            raise CasterError(f"head_logits must be {expected}, not {tuple(logits.shape)}")
        return logits, xp.logical_not(xp.any(xp.isnan(logits)))

    def projected(self, batch: Any) -> tuple[Array, SourceMoments]:
        """Features in the directions a batch can support, and the moments in those."""
        batch = self.checked(batch)
        _check_finite(batch)
        active = self.active(batch)
        with np.errstate(all="ignore"):
            return batch @ active.U, active

    def _source_scores(self, batch: Array, settings: Settings) -> Array:  # (B, d) -> (B, C)
        source = self.placement.beside(batch, self.rank)
        ridge = settings.beta * identity_like(source.within)
        scores = ridged_scores(batch @ source.U, source, ridge)
        xp = array_namespace(scores)
        computed = xp.isfinite(xp.max(scores, axis=1, keepdims=True))  # NaN if any class's is
        return xp.where(computed, scores, xp.log(source.priors))

    def _untransported(self, batch: Array, fallback: Array, reason: Reason) -> Adaptation:
        """The answer for a batch without a map: the fallback, with log priors for scores."""
        xp = array_namespace(batch)
        none = self.placement.beside(batch, 0)
        labels = self._labels(xp.argmax(fallback, axis=1))
        scores = xp.broadcast_to(xp.log(none.priors), (batch.shape[0], none.n_classes))
        no_map = AffineMap(A=batch[:0, :0], b=batch[0, :0], inverse=batch[:0, :0], diagonal=True)
        return Adaptation(labels, labels, scores, fallback, refuse(reason), no_map)

    def _labels(self, indices: Array) -> Array:  # (B,) -> (B,)
        if is_numpy_array(indices):
            return self.classes[indices]
        if self._plain and on_gpu(indices):
            return indices  # they are the labels already, and a look-up is one more launch
        if self.classes.dtype.kind not in "iufb":
            return self.classes[to_numpy(indices)]
        return array_namespace(indices).take(self._classes(indices), indices, axis=0)


def _check_finite(batch: Array, sound_head: bool = True) -> None:
    """Reject features that hold NaN or infinity, and logits that hold NaN."""
    xp = array_namespace(batch)
    if not bool(xp.all(xp.isfinite(batch))):
        raise CasterError("the batch holds NaN or infinity: drop or repair such rows")
    if not sound_head:
        raise CasterError("head_logits hold NaN: the frozen model's answer is undefined")
