"""Layer transport: align activation statistics with the source's, gated by a certificate.

The statistics of deep layers depend on the classes in a batch, so a batch is aligned with the
source statistics of its own class mixture. That takes two passes. The first aligns only the shallow
layers and estimates the mixture; the second aligns all layers with it. If the estimate might
reflect a class bias of the shifted network instead of the stream, the answer is that of the first
pass.

One pass is enough once the stream has seen enough samples: statistics of past batches undo the
shift, whatever classes the new batch holds. A correlated stream needs a full memory for that.
Once the memory of a shuffled stream is full and its verdict is stable, the stream rests: its maps
are constant and folded into the weights, and nothing is measured or compared until its outputs
change or a comparison is due.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from caster.adapt.layer_certificate import ComparisonSchedule, LayerCertificate, gating_ratio
from caster.adapt.layer_passes import (
    WHOLE,
    AlignedNetwork,
    Answer,
    ImplausibleSamples,
    LayeredModel,
    LayerSettings,
    Pass,
    Range,
)
from caster.adapt.output_monitor import BLOCK, OutputMonitor
from caster.core.arrays import DeviceCopies, as_real_array, like, to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.core.discriminant import host_probabilities
from caster.core.linalg import Array
from caster.core.stream_labels import Kind, StreamLabels, as_reference, merged_mixture
from caster.core.threads import SingleThread
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import Outputs, is_torch

SHUFFLED = ("source", "prior")  # kinds of shuffled streams whose class mixture is known
UNSHUFFLED = ("runs", "doubted")  # kinds of streams that do not look shuffled
UNCHECKED = math.nan  # the ratio of a batch that was not compared
# The next three were chosen on the four spare corruptions with ResNet-18 on CIFAR-10.
FIRST_PASS = 0.5  # fraction of the sites that the first pass aligns
ENOUGH_PAST = 256  # past samples from which one pass per batch is enough
CHANGED = 0.05  # mean KL divergence, in nats, of recent samples from the past: a new shift
# The same, from which the shift has probably changed. Chosen below two changes between reported
# corruptions, 0.02 and 0.03, after which answers collapsed, and above what streams of spare ones
# show in batches of 8, up to 0.007.
SUSPECT = 0.01
# Smallest batch whose own statistics can show whether it is shuffled; never compared with others.
CONFIRMS = 32
MIN_PROBABILITY = 1e-30  # before its logarithm becomes a score


@dataclass(frozen=True, eq=False)
class LayerAnswer:
    """Answer to one batch: scores with aligned layers, scores of the frozen model, the verdict."""

    scores: Array  # (n, C), aligned or frozen, as the verdict decides
    verdict: Verdict
    adapted: Array | None  # (n, C), with aligned layers; None if they gave no answer
    frozen: Array | None  # (n, C); None if the comparison was skipped
    features: Array | None = None  # (n, d), with aligned layers
    mixture: NDArray[np.float64] | None = None  # (C,), of the batch, if not the source's
    implausible: int = 0  # samples rejected as implausible; they get frozen scores
    frozen_features: Array | None = None  # (n, d), if the frozen model ran on all samples


@dataclass(frozen=True, eq=False)
class _Classes:
    """What a stream knows of its classes, by predictions with aligned layers."""

    labels: StreamLabels
    mixture: NDArray[np.float64]  # (C,), of all samples in the target's moments

    @property
    def reference(self) -> NDArray[np.float64] | None:  # (C,)
        """Mixture to align the past with; None if it is the source's."""
        return as_reference(self.mixture, self.labels.chain.prior)

    def state(self) -> dict[str, NDArray[Any]]:
        """The memory as named arrays."""
        return {**self.labels.state("labels"), "mixture": self.mixture}

    def resumed(self, state: Mapping[str, NDArray[Any]]) -> Self:
        """Continue from a `state`; raise ValueError if it is invalid."""
        mixture = np.asarray(state["mixture"], float)
        fits = mixture.shape == self.mixture.shape and (mixture >= 0).all()
        if not fits or not math.isclose(mixture.sum(), 1.0, rel_tol=1e-6):
            raise ValueError("impossible mixture")
        return type(self)(self.labels.resumed(state, "labels"), mixture)


@dataclass(frozen=True, eq=False)
class _Proposal:
    """Answer to a batch with aligned layers, and the stream's memory once it is committed."""

    features: Array  # (n, d)
    logits: Array  # (n, C)
    scores: Array  # (n, C), logits corrected by the stream's class order or class prior
    classes: _Classes | None = None
    batch_mixture: NDArray[np.float64] | None = None  # (C,), of this batch, if not the source's
    settled: bool = False  # aligned with past statistics alone, in one pass
    fresh: bool = False  # the memory restarts with this batch


@dataclass(frozen=True, eq=False)
class _Rest:
    """A resting stream: its maps are constant and folded into the network."""

    mixture: NDArray[np.float64] | None  # (C,), if it is not the source's
    answer: Answer  # features, scores and, for a full block, the monitor's statistics


@dataclass(frozen=True, eq=False)
class _RestingBatch:
    """A batch launched with constant maps, and a check that its outputs look as usual."""

    rest: _Rest
    answer: LayerAnswer
    is_unchanged: Callable[[], bool]  # blocks until the outputs are known


@dataclass(eq=False)
class _BegunBatch:
    """A batch that was begun."""

    batch: Array
    frozen: Outputs | None  # of the frozen model, if already known
    resting: _RestingBatch | None  # None if the batch was not launched yet
    answer: Future[LayerAnswer] = field(default_factory=Future)


class LayerTransport:
    """One stream through a network whose layers are aligned with the source's moments.

    At every site, each channel is mapped to the mean and variance that the source has under the
    class mixture of the batch. The maps are closed-form; weights are shared with the frozen model
    and never trained. Scores account for the classes of the stream: neighbours vote if they tend to
    share their class, and a class prior other than the source's corrects the logits. The adapted
    answer is used if the certificate is at most `tau`, and the frozen model's otherwise.

    Samples with activations beyond those of any valid image are implausible: they get the frozen
    model's answer and enter no statistics (docs/threat-model.md). Without `mixture`, a single pass
    aligns every batch as if it had the class mixture of the source.

    >>> from torch import nn
    >>> from caster import wrap
    >>> from caster.adapt.layer_passes import PLAIN
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> [str(site) for site in LayerTransport(wrap(net), None, Columns(None), settings=PLAIN).sites]
    ['1:in']
    """

    def __init__(
        self,
        model: LayeredModel,
        layers: Mapping[Site, ChannelMoments] | None,  # of the source; None: those in BatchNorms
        columns: Columns,  # selects the logits of the state's classes
        input_range: Range | None = None,  # of images, if the preprocessing does not define it
        settings: LayerSettings | None = None,
    ) -> None:
        self.model = model
        self.settings = settings or LayerSettings()
        self.columns = columns
        value_range = (
            input_range if model.preprocessing is None else model.preprocessing.value_range
        )
        self._alignment = aligned_network(model, layers, self.settings, value_range)
        self._start: _Classes | None = None  # what a stream without samples knows
        if self.settings.mixture:
            labels = first_labels((layers or {}).values())
            self._start = _Classes(labels, labels.chain.prior)
        self._shallow = math.ceil(FIRST_PASS * len(self.sites))
        self._begin_stream()

    def _begin_stream(self) -> None:
        """Start with an empty memory."""
        self._certificate = LayerCertificate(self.settings.window)
        self._schedule = ComparisonSchedule(self.settings.every, self.settings.window)
        self._monitor = OutputMonitor()
        self._rest: _Rest | None = None
        self._begun: deque[_BegunBatch] = deque()
        self._guard = SingleThread()
        self._forget_classes()

    def _forget_classes(self) -> None:
        self._classes = self._start
        self._frozen_labels = None if self._start is None else self._start.labels

    # --- a batch, from its launch to its answer --------------------------------------------------

    def __call__(self, batch: Any, frozen: Outputs | None = None) -> LayerAnswer:
        """Answer a batch, gated by the certificate; pass the frozen outputs if known."""
        return self.begin(batch, frozen)()

    def begin(self, batch: Any, frozen: Outputs | None = None) -> Callable[[], LayerAnswer]:
        """Launch a batch; the returned function waits for its answer.

        Batches are answered in the order in which they were begun. While the stream rests, the next
        batch may be begun before an answer is awaited, so that a GPU need not wait for the host.
        """
        with self._guard:
            placed = self.model.placed(batch)
            self._answer_waiting()
            alone = all(other.resting is not None for other in self._begun)
            begun = _BegunBatch(placed, frozen, self._launch(placed) if alone else None)
            self._begun.append(begun)
            self._answer_waiting()

        def finish() -> LayerAnswer:
            with self._guard:
                while not begun.answer.done():
                    if not self._begun:
                        raise CasterError("the stream was reset before this batch was answered")
                    self._answer_first()
            return begun.answer.result()

        return finish

    def _answer_waiting(self) -> None:
        """Answer the first batches until one was launched in the current rest."""
        while self._begun:
            resting = self._begun[0].resting
            if resting is not None and resting.rest is self._rest:
                return
            self._answer_first()

    def _answer_first(self) -> None:
        """Answer the batch that was begun first."""
        begun = self._begun.popleft()
        try:
            begun.answer.set_result(self._answered(begun))
        except Exception as error:  # raised for the caller that waits for this batch
            begun.answer.set_exception(error)

    def _answered(self, begun: _BegunBatch) -> LayerAnswer:
        """Answer with constant maps if the outputs look as usual, else align and compare."""
        resting = begun.resting
        if resting is not None and resting.rest is not self._rest:  # that rest has ended
            resting = self._launch(begun.batch)
        if resting is not None:
            if resting.is_unchanged():
                self._schedule.skipped(len(begun.batch))
                return resting.answer
            self._monitor.begin()
        self._end_rest()
        work = partial(self._gated, changed=resting is not None)
        return self._answer_plausible(begun.batch, begun.frozen, work)

    # --- a resting stream: constant maps ---------------------------------------------------------

    def _launch(self, batch: Array) -> _RestingBatch | None:
        """Launch a batch with constant maps; None if the stream does not rest."""
        if not self._rests(len(batch)):
            return None
        if self._rest is None:
            self._rest = self._begin_rest(batch)
        if self._rest is None:
            return None
        features, scores, *numbers = self._alignment.folded(batch, self._rest.answer)
        verdict = Verdict(True, "rest", UNCHECKED)
        answer = LayerAnswer(scores, verdict, scores, None, features, self._rest.mixture)
        return _RestingBatch(self._rest, answer, self._monitor.judge(features, scores, *numbers))

    def _rests(self, samples: int) -> bool:
        """Whether the next samples get constant maps, provided their outputs look as usual."""
        launched = sum(len(begun.batch) for begun in self._begun)
        return self._schedule.left > launched and self._can_rest(samples)

    def _can_rest(self, samples: int) -> bool:
        """Whether the stream rests after these samples, unless a comparison is due."""
        classes = self._classes
        if classes is None or classes.labels.kind not in SHUFFLED or not self._monitor.is_ready:
            return False
        return self._schedule.accepted and self._alignment.target.is_full(samples)

    def _begin_rest(self, batch: Array) -> _Rest | None:
        """Fold the maps into the network; None if that fails with this batch."""
        assert self._classes is not None
        labels, wanted = self._classes.labels, self._classes.reference
        how = Pass(full=wanted is None, mixture=wanted, past_only=True, in_parts=True)
        if not self._alignment.fold(batch, how, self._schedule.left // len(batch)):
            return None
        self._certificate.restart()  # the next comparison covers a later part of the stream
        if labels.kind == "source":
            return _Rest(None, partial(self._answer_resting, None))
        correction = DeviceCopies(labels.correction)
        return _Rest(labels.prior, partial(self._answer_resting, correction))

    def _answer_resting(
        self,
        correction: DeviceCopies | None,  # (C,), added to logits
        features: Array,  # (n, d)
        logits: Array,
    ) -> tuple[Array, ...]:
        """Features and scores and, if the batch fills a block, the monitor's statistics."""
        scores = self.columns(logits)
        if correction is not None:
            scores = scores + array_namespace(scores).astype(correction(scores), scores.dtype)
        filled = len(scores) >= BLOCK
        return features, scores, *([self._monitor.numbers(features, scores)] if filled else [])

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest = None
            self._alignment.unfold()

    # --- any other batch: aligned, compared, judged ----------------------------------------------

    def _answer_plausible(
        self,
        batch: Array,
        frozen: Outputs | None,
        work: Callable[[Array, Outputs | None], LayerAnswer],
    ) -> LayerAnswer:
        """Answer plausible samples as a batch of their own, the others with the frozen model."""
        try:
            return work(batch, frozen)
        except _NotFiniteError:
            logits = self.columns((frozen or self.model(batch)).logits)
            _check_finite(logits)
            return LayerAnswer(logits, Verdict(False, "numerical", math.inf), None, logits)
        except ImplausibleSamples as found:
            kept = found.kept
        rows = to_numpy(kept)
        others = self.model(batch[~kept]) if frozen is None else _rows(frozen, ~rows)
        logits = self.columns(others.logits)
        if not _all_finite(batch[~kept]):  # NaN in the input is a mistake; large values, an attack
            _check_finite(logits)
        rejected = _zeroed(logits)
        if len(rejected) == len(batch):
            verdict = Verdict(False, "implausible", math.inf)
            return LayerAnswer(rejected, verdict, None, rejected, implausible=len(rejected))
        known = None if frozen is None else _rows(frozen, rows)
        answer = self._answer_plausible(batch[kept], known, work)
        filled = {
            name: None if (part := getattr(answer, name)) is None else _filled(kept, part, rejected)
            for name in ("scores", "adapted", "frozen")
        }
        implausible = len(rejected) + answer.implausible
        gone = {"features": None, "frozen_features": None}  # known for plausible samples only
        return replace(answer, **filled, **gone, implausible=implausible)  # type: ignore[arg-type]

    def _gated(self, batch: Array, frozen: Outputs | None, changed: bool) -> LayerAnswer:
        """Compare with the frozen model; without mixtures, skip this while the verdict is stable.

        A skipped batch must be about as confident as the batches of the last comparison. If outputs
        `changed` in a rest, the next rests are short, so that the memory can follow.
        """
        proposal = None
        rests = self._classes is not None  # such a stream skips comparisons in its rests instead
        if self._schedule.skips and not rests:
            if self._schedule.accepted:
                proposal = self._adapted(batch, trusted=True)
                answer = self._ungated(proposal)
            else:
                frozen = frozen or self.model(batch)
                logits = self.columns(frozen.logits)
                verdict = Verdict(False, "rest", UNCHECKED)
                answer = LayerAnswer(logits, verdict, None, logits, frozen_features=frozen.features)
            if not self._certificate.has_dropped(answer.scores, self._schedule.accepted):
                if proposal is not None:
                    self._commit(proposal)
                self._schedule.skipped(len(batch))
                return answer
        frozen = frozen or self.model(batch)
        proposal = proposal or self._adapted(batch, self._schedule.accepted)
        logits = self._frozen_logits(frozen, proposal)
        self._commit(proposal)  # only now: a batch that fails before leaves the stream unchanged
        answer = replace(self._compared(proposal, logits), frozen_features=frozen.features)
        if self._schedule.compared(len(batch), answer.verdict.accepted, changed) and not rests:
            self._certificate.settle()
            if not answer.verdict.accepted:
                self._alignment.reset()  # the next comparison covers a later part of the stream
                self._monitor.reset()
        return answer

    def _adapted(self, batch: Array, trusted: bool) -> _Proposal:
        """Align a batch: in two passes, or in one with the statistics of the past.

        One pass requires that aligned layers are `trusted`: the last verdict accepted them. If deep
        layers collapsed, their predictions would look like a run of one class. While the classes
        are in doubt, the shallow pass is the answer and the second pass only feeds the memory.
        """
        classes, n = self._classes, len(batch)
        if classes is None:
            features, logits = self._aligned(batch, WHOLE)
            return _Proposal(features, logits, logits)
        found, labels, settled, fresh = self._first_pass(batch, classes, trusted)
        kept, batch_mixture = 0.0 if fresh else self._kept(n), labels.mixture
        mixture = merged_mixture(classes.mixture, kept, batch_mixture, n)
        classes = replace(classes, labels=labels, mixture=mixture)
        if not settled:
            whole = self._aligned(batch, Pass(mixture=classes.reference, fresh=fresh))
            found = found if labels.kind == "doubted" else whole
        features, logits = found
        answers, labels = labels.answer(host_probabilities(logits))
        scores = logits
        if answers is not None:
            scores = like(np.log(answers.clip(min=MIN_PROBABILITY)), logits, logits.dtype)
        known = batch_mixture if labels.kind in ("runs", "prior") else None
        classes = replace(classes, labels=labels)
        return _Proposal(features, logits, scores, classes, known, settled, fresh)

    def _first_pass(
        self, batch: Array, classes: _Classes, trusted: bool
    ) -> tuple[tuple[Array, Array], StreamLabels, bool, bool]:
        """Find the classes of a batch, given those of the stream so far.

        Returns features and logits, the labels after the batch, whether the past was enough to
        align all layers, and whether the batch shows that the past is out of date.
        """
        labels, wanted = classes.labels, classes.reference
        settled = trusted and self._is_settled(labels, len(batch))
        # Streams that rest are compared rarely, so saving memory matters more than speed.
        rare = self._schedule.every > 1 and self._can_rest(len(batch))
        by_past = Pass(full=wanted is None, mixture=wanted, past_only=True, in_parts=rare)
        shallow = Pass(self._shallow)  # the mixture of the batch is not known yet
        alone = replace(shallow, fresh=True)
        found, seen = self._seen(batch, by_past if settled else shallow, labels)
        fresh = self._alignment.target.change() > CHANGED
        if fresh:
            settled = False
            found, seen = self._seen(batch, alone, labels)
        elif settled and seen.kind != labels.kind:
            settled = False  # shallow layers must confirm the new kind
            found, seen = self._seen(batch, shallow, labels)
        if not fresh and self._must_confirm(labels.kind, seen.kind, len(batch)):
            # If the batch alone does not confirm it, the past and its labels are out of date.
            assert self._start is not None
            by_itself = self._seen(batch, alone, self._start.labels)
            if by_itself[1].kind not in ("runs", seen.kind):
                fresh, (found, seen) = True, by_itself
        if labels.kind == "doubted" and seen.kind in ("runs", "prior"):
            fresh = True  # the past was aligned with the wrong mixture, the source's
        return found, seen, settled, fresh

    def _must_confirm(self, before: Kind, now: Kind, samples: int) -> bool:
        """Whether the batch alone, without the past, must confirm that it is not shuffled.

        Maps of another shift can make all samples look alike, and a run of one class, once
        believed, confirms itself. A batch of enough samples is always asked when a shuffled stream
        turns into runs. Smaller batches, and any batch where a doubt is involved, are asked only if
        the shift has probably changed.
        """
        if now not in UNSHUFFLED or before in (now, "runs"):
            return False
        target = self._alignment.target
        turns = before in SHUFFLED and now == "runs"
        can_tell = samples >= CONFIRMS and target.samples > 0
        return (turns and can_tell) or target.change() > SUSPECT

    def _seen(
        self, batch: Array, how: Pass, labels: StreamLabels
    ) -> tuple[tuple[Array, Array], StreamLabels]:
        """Features and logits of a pass, and the labels after observing its predictions."""
        found = self._aligned(batch, how)
        return found, labels.observe(host_probabilities(found[1]))

    def _kept(self, samples: int) -> float:
        """Number of past samples that fit into the memory beside a batch."""
        return min(self._alignment.target.samples, max(0.0, self.settings.memory - samples))

    def _is_settled(self, labels: StreamLabels, samples: int) -> bool:
        """Whether the statistics of the past, without the batch, are enough to align it."""
        if labels.kind == "doubted" or self._kept(samples) < max(ENOUGH_PAST, 2 * samples):
            return False
        # Shuffled samples can look like runs by chance, and a single pass would perpetuate that.
        return labels.kind != "runs" or self._alignment.target.is_full(samples)

    def _aligned(self, batch: Array, how: Pass) -> tuple[Array, Array]:
        """Features, and logits of the state's classes, with aligned layers."""
        outputs = self._alignment(batch, how)
        logits = self.columns(outputs.logits)
        if not _all_finite(logits):
            raise _NotFiniteError
        return outputs.features, logits

    def _frozen_logits(self, frozen: Outputs, proposal: _Proposal) -> Array:  # (n, C)
        if frozen.logits is None:
            raise CasterError(f"{self.model.name} gives no logits, and aligned layers need them")
        logits = self.columns(frozen.logits)
        if tuple(logits.shape) != tuple(proposal.scores.shape):
            raise CasterError(
                f"the frozen model's logits have the shape {tuple(logits.shape)}, and the batch "
                f"needs {tuple(proposal.scores.shape)}"
            )
        return logits

    def _commit(self, proposal: _Proposal) -> None:
        """Add a batch to the stream's memory."""
        if proposal.fresh:
            self._monitor.reset()
        self._alignment.commit()
        classes, self._classes = self._classes, proposal.classes
        if proposal.settled and classes is not None and classes.labels.kind in SHUFFLED:
            self._monitor.learn(proposal.features, proposal.scores)

    def _compared(self, proposal: _Proposal, frozen: Array) -> LayerAnswer:
        ratio = self._ratio(proposal, frozen)
        accepted = ratio <= self.settings.tau
        verdict = Verdict(accepted, "accepted" if accepted else "ratio", ratio)
        scores = proposal.scores if accepted else frozen
        return replace(self._ungated(proposal), scores=scores, verdict=verdict, frozen=frozen)

    def _ratio(self, proposal: _Proposal, frozen: Array) -> float:
        certificate, classes = self._certificate, proposal.classes
        frozen_is_source = self._observe_frozen(frozen)
        if classes is None or classes.labels.kind == "runs":
            return certificate.update(proposal.scores, frozen)
        labels = classes.labels
        errors, norms = certificate.update_shuffled(proposal.logits, frozen, labels.correction)
        return gating_ratio(errors, norms, labels.kind == "source", frozen_is_source)

    def _observe_frozen(self, logits: Array) -> bool:  # (n, C)
        """Add frozen predictions; whether they look shuffled, with the source's class mixture."""
        if self._frozen_labels is None:
            return False
        p = host_probabilities(logits)
        if np.isfinite(p).all():
            self._frozen_labels = self._frozen_labels.observe(p).advance(p)
        return self._frozen_labels.kind == "source"

    def _ungated(self, proposal: _Proposal) -> LayerAnswer:
        """The adapted answer, without a comparison."""
        return LayerAnswer(
            proposal.scores,
            Verdict(True, "rest", UNCHECKED),
            proposal.scores,
            None,
            proposal.features,
            proposal.batch_mixture,
        )

    def align(self, batch: Any) -> LayerAnswer:
        """Answer a batch with aligned layers, without a certificate."""

        def always(batch: Array, frozen: Outputs | None) -> LayerAnswer:
            proposal = self._adapted(batch, trusted=True)
            self._commit(proposal)
            return self._ungated(proposal)

        with self._guard:
            return self._answer_plausible(self.model.placed(batch), None, always)

    # --- the stream: start, reset, save and resume -----------------------------------------------

    def new_stream(self) -> Self:
        """Start another stream with an empty memory over the same model and source.

        Weights and source moments are shared; streams may run in different threads.
        """
        stream = copy.copy(self)
        stream._alignment = self._alignment.new_stream()
        stream._begin_stream()
        return stream

    def reset(self) -> None:
        """Forget every batch."""
        with self._guard:
            self._alignment.reset()
            self._certificate.reset()
            self._schedule.reset()
            self._monitor.reset()
            self._end_rest()
            self._begun.clear()
            self._forget_classes()

    def compare_every(self, windows: int) -> None:
        """From the next batch on, compare with the frozen model in one of so many windows."""
        checked = replace(self.settings, every=windows)
        self._schedule = ComparisonSchedule(checked.every, checked.window)

    def state(self) -> dict[str, NDArray[Any]]:
        """The stream's memory, as named arrays."""
        with self._guard:
            return {
                **self._alignment.target.state(),
                **self._certificate.state(),
                **self._class_state(),
                **self._monitor.state(),
                "schedule": self._schedule.state(),
            }

    def _class_state(self) -> dict[str, NDArray[Any]]:
        if self._classes is None or self._frozen_labels is None:
            return {}
        return {**self._classes.state(), **self._frozen_labels.state("frozen_labels")}

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue exactly where a stream was when its `state` was taken."""
        with self._guard:
            self._alignment.resume(state)
            self._certificate.resume(state)
            self._schedule.resume(state["schedule"])
            self._monitor.resume(state)
            self._end_rest()
            if self._start is not None:
                classes = self._start.resumed(state)
                if state["certificate.rows"].shape[2] not in (0, len(classes.mixture)):
                    raise ValueError("logits of other classes")
                self._frozen_labels = self._start.labels.resumed(state, "frozen_labels")
                self._classes = classes

    @property
    def sites(self) -> list[Site]:
        """The sites to align, shallow ones first."""
        return self._alignment.sites

    @property
    def aligned_sites(self) -> list[Site]:
        """The sites, without those that the first batch showed cannot be aligned."""
        return [site for site in self.sites if site not in self._alignment.unaligned]

    @property
    def full_maps(self) -> int:
        """Number of sites with full maps, where there are enough samples for them."""
        return self._alignment.full_maps

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""
        return self._alignment.source_bytes

    @property
    def stream_bytes(self) -> int:
        """Size of the stream's memory."""
        known = [*self._class_state().values(), *self._certificate.state().values()]
        return self._alignment.target.nbytes + sum(array.nbytes for array in known)


class _NotFiniteError(Exception):
    """Aligned logits are not finite: the batch gets frozen answers and is not remembered."""


def aligned_network(
    model: Any,
    layers: Mapping[Site, ChannelMoments] | None,
    settings: LayerSettings,
    value_range: Range | None,
) -> AlignedNetwork:
    """Build the network with aligned layers in the model's runtime, torch or ONNX."""
    if is_torch(model):
        from caster.adapt.alignment import Alignment

        return Alignment.of(model, layers, settings, value_range)
    from caster.adapt.onnx_alignment import OnnxAlignment

    return OnnxAlignment.of(model, layers, settings, value_range)


def first_labels(layers: Iterable[ChannelMoments]) -> StreamLabels:
    """Labels of a stream without samples, with the source's class counts as the prior."""
    for found in layers:
        if found.classes is not None:
            return StreamLabels.of_counts(found.classes.counts)
    raise CasterError(
        "the state has no class moments, which aligning with the class mixture of a batch needs: "
        "fit again, or set {argument} to False",
        argument="mixture",
    )


def _all_finite(values: Array) -> bool:
    xp = array_namespace(values)
    return bool(xp.all(xp.isfinite(values)))


def _check_finite(logits: Array) -> None:
    broken = ~np.isfinite(to_numpy(as_real_array(logits))).all(axis=1)
    if broken.any():
        row = int(broken.argmax())
        raise CasterError(
            f"the model's logits are not finite, first for sample {row} of {len(broken)}: drop or "
            "repair such images"
        )


def _rows(outputs: Outputs, rows: NDArray[np.bool_]) -> Outputs:
    logits = outputs.logits
    return Outputs(outputs.features[rows], None if logits is None else logits[rows])


def _zeroed(logits: Array) -> Array:
    """Frozen scores of implausible samples, zeroed where they are not finite."""
    xp = array_namespace(logits)
    finite = xp.all(xp.isfinite(logits), axis=1, keepdims=True)
    return xp.where(finite, logits, xp.zeros_like(logits))


def _filled(kept: Array, own: Array, others: Array) -> Array:  # (n,), (k, C), (n - k, C)
    """Merge the scores of kept samples and of the others into those of the whole batch."""
    xp = array_namespace(own)
    kept = like(kept, own)
    whole = xp.empty((kept.shape[0], own.shape[1]), dtype=own.dtype, device=device(own))
    whole[kept], whole[~kept] = own, like(others, own, own.dtype)
    return whole
