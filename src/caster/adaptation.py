"""One batch adapted: checked, projected, transported, judged, and answered in labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray

from caster.arrays import Beside, as_real_array, like, to_numpy
from caster.config import Settings
from caster.core.discriminant import ridged_scores
from caster.core.gate import refuse
from caster.core.linalg import Array, identity_like, on_gpu
from caster.core.proposal import Proposal
from caster.core.subspace import active_rank
from caster.core.transport import is_diagonal
from caster.core.types import AffineMap, SourceMoments, Verdict
from caster.errors import CasterError
from caster.labels import Labels
from caster.placement import Placement
from caster.threads import threads_for
from caster.trial import judge, transport


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


@dataclass(frozen=True, eq=False)
class Attempt:
    """A batch transported and measured, of which nothing need have reached the host yet."""

    proposal: Proposal  # on a GPU its evidence ends with whether features and logits are sound
    head: Array | None  # (B,), class indices the frozen head chooses

    def arrays(self) -> list[Array]:
        """Everything in it, in a row."""
        made, found = self.proposal, self.proposal.map
        head = [] if self.head is None else [self.head]
        return [made.evidence, made.scores, made.assigned, found.A, found.b, found.inverse, *head]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """The attempt whose arrays these are."""
        evidence, scores, assigned, A, b, inverse, *head = arrays
        found = AffineMap(A, b, inverse, is_diagonal(scores.shape[0], A.shape[0]))
        return cls(Proposal(scores, assigned, found, evidence), head[0] if head else None)


class Transporter:
    """Stored moments at work on batches of any namespace and device."""

    def __init__(self, moments: SourceMoments, classes: Labels) -> None:
        self.classes = classes
        self._plain = classes.dtype == np.int64 and np.array_equal(classes, range(len(classes)))
        # torch cannot index all unsigned kinds
        self._classes = Beside(classes.astype(np.int64) if classes.dtype.kind == "u" else classes)
        self.rank = moments.rank
        self.width = int(moments.U.shape[0])
        self.placement = Placement(moments)

    def adapt(self, batch: Any, head_logits: Any, settings: Settings) -> Adaptation:
        """Transport the source to a batch, and answer it."""
        batch = self.checked(batch)
        with threads_for(len(self.classes)):
            if batch.shape[0] == 1:
                return self._unsupported(batch, head_logits, settings)
            attempt = self.attempt(batch, head_logits, settings)
            return self.conclude(batch, attempt, to_numpy(attempt.proposal.evidence), settings)

    def attempt(self, batch: Array, head_logits: Any, settings: Settings) -> Attempt:
        """Transport a batch of two rows or more, and measure what the verdict rests on.

        On a GPU nothing in here waits for the device: unsound numbers are noted in the evidence,
        where `conclude` finds them.
        """
        active = self.active(batch)
        z, sound = self._project(batch, active)
        head, sound_head = self._head_choice(head_logits, z)
        proposal = transport(z, active, settings)
        if on_gpu(z):
            xp = array_namespace(z)
            flags = xp.astype(xp.stack([sound, sound_head]), z.dtype)
            proposal = replace(proposal, evidence=xp.concat([proposal.evidence, flags]))
        return Attempt(proposal, head)

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
        *measured, sound, sound_head = (*evidence.tolist(), 1.0, 1.0)[:5]
        _insist(bool(sound), bool(sound_head), batch)
        proposal = attempt.proposal
        verdict = judge(measured, len(self.classes), settings)
        proposed = predictions = self._labels(proposal.assigned)
        if not verdict.accepted:
            predictions = self._fallback(batch, attempt.head, settings)
        return Adaptation(predictions, proposed, proposal.scores, verdict, proposal.map)

    def source_scores(self, batch: Any, settings: Settings) -> Array:  # (B, d) -> (B, C)
        """Source-GDA in all retained directions."""
        batch = self.checked(batch)
        with threads_for(len(self.classes)):
            scores, sound = self._source_scores(batch, settings)
        _insist(bool(sound), True, batch)
        return scores

    def checked(self, batch: Any) -> Array:  # (B, d)
        """A batch as real numbers of the right shape."""
        batch = as_real_array(batch)
        if batch.ndim != 2 or batch.shape[0] == 0 or batch.shape[1] != self.width:
            raise CasterError(f"a batch must be (samples, {self.width}), not {tuple(batch.shape)}")
        return batch

    def _project(self, batch: Array, moments: SourceMoments) -> tuple[Array, Array]:
        """z = U'h, and whether it can be calculated with; elsewhere than on a GPU it must be."""
        # What is not finite is found out below, and told in one line. Whether NumPy warns of it as
        # well is up to the processor's own matrix product.
        with np.errstate(all="ignore"):
            z = batch @ moments.U
        xp = array_namespace(z)
        sound = xp.all(xp.abs(z) < _largest(z))  # NaN is not below it either
        if not on_gpu(z):
            _insist(bool(sound), True, batch)
        return z, sound

    def _head_choice(self, head_logits: Any, z: Array) -> tuple[Array | None, Array]:
        """Index of every row's largest logit, and whether none is NaN."""
        xp = array_namespace(z)
        if head_logits is None:
            return None, xp.ones((), dtype=xp.bool, device=device(z))
        logits = like(as_real_array(head_logits), z)
        expected = (z.shape[0], len(self.classes))
        if tuple(logits.shape) != expected:
            raise CasterError(f"head_logits must be {expected}, not {tuple(logits.shape)}")
        sound = xp.logical_not(xp.any(xp.isnan(logits)))
        if not on_gpu(z):
            _insist(True, bool(sound), z)
        return xp.argmax(logits, axis=1), sound

    def projected(self, batch: Any) -> tuple[Array, SourceMoments]:
        """Features in the directions a batch can support, and the moments in those."""
        batch = self.checked(batch)
        active = self.active(batch)
        z, sound = self._project(batch, active)
        _insist(bool(sound), True, batch)
        return z, active

    def _source_scores(self, batch: Array, settings: Settings) -> tuple[Array, Array]:
        """Source-GDA's scores (B, C), and whether they could be calculated."""
        source = self.placement.beside(batch, self.rank)
        z, sound = self._project(batch, source)
        return ridged_scores(z, source, settings.beta * identity_like(source.pooled)), sound

    def _fallback(self, batch: Array, head: Array | None, settings: Settings) -> Array:  # -> (B,)
        if head is None:
            scores, _ = self._source_scores(batch, settings)  # the batch is known to be sound
            head = array_namespace(batch).argmax(scores, axis=1)
        return self._labels(head)

    def _unsupported(self, batch: Array, head_logits: Any, settings: Settings) -> Adaptation:
        """The answer for a batch of one, in which no direction is active."""
        z, sound = self._project(batch, self.placement.beside(batch, self.rank))
        head, sound_head = self._head_choice(head_logits, z)
        _insist(bool(sound), bool(sound_head), batch)
        xp = array_namespace(z)
        none = self.placement.beside(z, 0)
        labels = self._fallback(batch, head, settings)
        scores = xp.broadcast_to(xp.log(none.priors), (1, none.n_classes))
        no_map = AffineMap(A=z[:0, :0], b=z[0, :0], inverse=z[:0, :0], diagonal=True)
        return Adaptation(labels, labels, scores, refuse("batch_too_small"), no_map)

    def _labels(self, indices: Array) -> Array:  # (B,) -> (B,)
        if is_numpy_array(indices):
            return self.classes[indices]
        if self._plain and on_gpu(indices):
            return indices  # they are the labels already, and a look-up is one more launch
        if self.classes.dtype.kind not in "iufb":
            return self.classes[to_numpy(indices)]
        return array_namespace(indices).take(self._classes(indices), indices, axis=0)


def _largest(z: Array) -> float:
    """What z must stay below, since it is squared and the squares added up."""
    return float(array_namespace(z).finfo(z.dtype).max ** 0.4)


def _insist(sound: bool, sound_head: bool, batch: Array) -> None:
    """Refuse a batch that cannot be calculated with, and say why."""
    if not sound:
        xp = array_namespace(batch)
        if not bool(xp.all(xp.isfinite(batch))):
            raise CasterError("the batch holds NaN or infinity: drop or repair such rows")
        raise CasterError(f"the batch is too large for {batch.dtype}: rescale it like the source")
    if not sound_head:
        raise CasterError("head_logits hold NaN: the frozen model's answer is undefined")
