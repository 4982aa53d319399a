"""Layer transport: activation statistics aligned with the source's, behind a certificate.

Deep layers carry the classes of a batch, so the source's statistics to align with are those of the
batch's own mixture of classes. A first pass, with shallow layers aligned, shows the mixture; a
second one aligns all layers with it. While it is in doubt whether the classes are the stream's or a
preference of the shifted network, the first pass is the answer. A stream with a past needs one pass
only, a correlated one with a full memory: the maps of the past undo the shift, whichever classes
come. Once a shuffled stream's memory is full and its verdict stable, it rests: its maps stand
still, folded into the weights, and nothing is measured or compared until its outputs change or a
comparison is due.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from caster.core.discriminant import probabilities
from caster.core.linalg import Array
from caster.core.stream_labels import StreamLabels, as_reference, merged_mixture
from caster.core.threads import SingleThread
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import Outputs

SHUFFLED = ("source", "prior")  # kinds of shuffled streams with a known class mixture
UNCHECKED = math.nan  # the ratio where no comparison was made
# The next three were chosen on the four spare corruptions with ResNet-18 on CIFAR-10.
FIRST_PASS = 0.5  # share of the sites that are aligned in it
ENOUGH_PAST = 256  # samples from which on a stream's past is all that a pass needs
CHANGED = 0.05  # nats by which recent samples differ from the past if the shift is another one
# Share of an even class below which no class prior goes: a network's own prior is hardly ever as
# uneven as a small source, and probabilities over a small prior would let a rare class win.
EVEN = 0.5
RARE = 1e-30  # smallest probability whose logarithm is a score


@dataclass(frozen=True, eq=False)
class LayerAnswer:
    """One batch: scores with aligned layers, scores of the frozen model, and the verdict."""

    scores: Array  # (n, C), those that the verdict chooses
    verdict: Verdict
    adapted: Array | None  # (n, C), with aligned layers; None if there is no such answer
    frozen: Array | None  # (n, C); None if the comparison was skipped
    features: Array | None = None  # (n, d), behind aligned layers
    mixture: NDArray[np.float64] | None = None  # (C,), of the batch, if not the source's
    implausible: int = 0  # samples that no image could have produced, answered as frozen
    frozen_features: Array | None = None  # (n, d), the frozen model's, if it ran on all samples


@dataclass(frozen=True, eq=False)
class _Proposal:
    """A batch with aligned layers, and what the stream knows after it."""

    features: Array  # (n, d)
    logits: Array  # (n, C)
    scores: Array  # (n, C), the logits corrected by what the stream knows of its classes
    labels: StreamLabels | None = None
    mixture: NDArray[np.float64] | None = None  # (C,), behind the target's moments
    own: NDArray[np.float64] | None = None  # (C,), of this batch, if not the source's
    settled: bool = False  # aligned by the past alone
    fresh: bool = False  # the past is forgotten


@dataclass(frozen=True, eq=False)
class _Rest:
    """A rest: its maps are folded into the network."""

    mixture: NDArray[np.float64] | None  # (C,), if it is not the source's
    answer: Answer  # features, scores, and the monitor's numbers of a block


@dataclass(frozen=True, eq=False)
class _RestingBatch:
    """A batch that was launched in a rest, and whether it looks like those before."""

    rest: _Rest
    answer: LayerAnswer
    is_usual: Callable[[], bool]  # waits


@dataclass(eq=False)
class _BegunBatch:
    """A batch without an answer so far."""

    batch: Array
    frozen: Outputs | None  # the model's output, if known
    resting: _RestingBatch | None  # None: it waits for its turn
    answer: LayerAnswer | None = None
    error: Exception | None = None


class LayerTransport:
    """One stream through a network whose layers are aligned with the source's moments.

    Every site's channels get the mean and variance that the source has under the batch's mixture of
    classes, in closed form; weights are shared with the frozen model and nothing is learnt. Scores
    take the stream's classes into account: neighbours, where they share their class, or another
    class prior. The answer is used while the certificate is at most `tau`, and the frozen model's
    otherwise.

    Samples that no image could have produced are answered by the frozen model and enter no
    statistics: see docs/threat-model.md. Without `mixture`, one pass aligns a batch as if it held
    the source's mixture.

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
        layers: Mapping[Site, ChannelMoments] | None,  # of the source; None: BatchNorms' own
        columns: Columns,  # which logits are the classes
        input_range: Range | None = None,  # of images, where the preprocessing does not state it
        settings: LayerSettings | None = None,
    ) -> None:
        self.model = model
        self.settings = settings or LayerSettings()
        self.columns = columns
        ends = input_range if model.preprocessing is None else model.preprocessing.value_range
        self._alignment = aligned_network(model, layers, self.settings, ends)
        self._start = first_labels((layers or {}).values()) if self.settings.mixture else None
        self._forget_labels()
        self._shallow = math.ceil(FIRST_PASS * len(self.sites))
        self._certificate = LayerCertificate(self.settings.window)
        self._schedule = ComparisonSchedule(self.settings.every, self.settings.window)
        self._monitor = OutputMonitor()
        self._rest: _Rest | None = None
        self._begun: deque[_BegunBatch] = deque()  # without an answer so far
        self._guard = SingleThread()

    @property
    def sites(self) -> list[Site]:
        """The sites to align, shallow ones first."""
        return self._alignment.sites

    @property
    def aligned_sites(self) -> list[Site]:
        """The sites, without those that the first batch showed cannot be aligned."""
        return [site for site in self.sites if site not in self._alignment.left_alone]

    @property
    def full_maps(self) -> int:
        """Number of sites with full maps, where the samples support them."""
        return self._alignment.full_maps

    def __call__(self, batch: Any, frozen: Outputs | None = None) -> LayerAnswer:
        """Answer a batch behind the certificate; `frozen` is the model's output, if known."""
        return self.begin(batch, frozen)()

    def begin(self, batch: Any, frozen: Outputs | None = None) -> Callable[[], LayerAnswer]:
        """Launch a batch; the function returned waits for its answer.

        Batches are answered in the order in which they were begun. In a rest, the next one may be
        begun before an answer is awaited, so that a GPU need not wait for the host.
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
                while begun.answer is None and begun.error is None:
                    if not self._begun:
                        raise CasterError("the stream was reset before this batch was answered")
                    self._answer_first()
            if begun.error is not None:
                raise begun.error
            assert begun.answer is not None
            return begun.answer

        return finish

    def _answer_waiting(self) -> None:
        """Answer batches that were not launched in this rest: others cannot be before them."""
        while self._begun:
            resting = self._begun[0].resting
            if resting is not None and resting.rest is self._rest:
                return
            self._answer_first()

    def _answer_first(self) -> None:
        """Answer the batch that was begun first."""
        begun = self._begun.popleft()
        try:
            resting = begun.resting
            if resting is not None and resting.rest is not self._rest:  # that rest has ended
                resting = self._launch(begun.batch)
            if resting is not None:
                if resting.is_usual():
                    self._schedule.skipped(len(begun.batch))
                    begun.answer = resting.answer
                    return
                self._monitor.begin()
            self._end_rest()
            begun.answer = self._answer_plausible(begun.batch, begun.frozen, self._gated)
        except Exception as error:  # for who waits for this batch
            begun.error = error

    def align(self, batch: Any) -> LayerAnswer:
        """Answer a batch with aligned layers, without a certificate."""
        with self._guard:
            return self._answer_plausible(self.model.placed(batch), None, self._always)

    def new_stream(self) -> Self:
        """Another stream over the same model and source, as if no batch had been seen.

        Weights and source moments are shared; streams may run in different threads.
        """
        stream = copy.copy(self)
        stream._alignment = self._alignment.new_stream()
        stream._certificate = LayerCertificate(self.settings.window)
        stream._schedule = ComparisonSchedule(self.settings.every, self.settings.window)
        stream._monitor = OutputMonitor()
        stream._rest, stream._begun = None, deque()
        stream._guard = SingleThread()
        stream._forget_labels()
        return stream

    def _forget_labels(self) -> None:
        self._labels = self._frozen_labels = self._start
        self._mixture = None if self._start is None else self._start.chain.prior

    def reset(self) -> None:
        """Forget the stream."""
        with self._guard:
            self._alignment.reset()
            self._certificate.reset()
            self._schedule.reset()
            self._monitor.reset()
            self._end_rest()
            self._begun.clear()
            self._forget_labels()

    def compare_every(self, windows: int) -> None:
        """Compare with the frozen model in one of so many windows, from the next batch on."""
        checked = replace(self.settings, every=windows)
        self._schedule = ComparisonSchedule(checked.every, checked.window)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything the stream remembers, as named arrays."""
        with self._guard:
            return {
                **self._alignment.target.state(),
                **self._certificate.state(),
                **self._label_state(),
                **self._monitor.state(),
                "schedule": self._schedule.state(),
            }

    def _label_state(self) -> dict[str, NDArray[Any]]:
        if self._labels is None or self._frozen_labels is None:
            return {}
        known = {**self._labels.state("labels"), **self._frozen_labels.state("frozen_labels")}
        return {**known, "mixture": np.asarray(self._mixture)}

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue exactly where a stream was when its `state` was taken."""
        with self._guard:
            self._alignment.resume(state)
            self._certificate.resume(state)
            self._schedule.resume(state["schedule"])
            self._monitor.resume(state)
            self._end_rest()
            if self._start is not None:
                labels = self._start.resumed(state, "labels")
                frozen = self._start.resumed(state, "frozen_labels")
                mixture = np.asarray(state["mixture"], float)
                fits = mixture.shape == labels.chain.prior.shape and (mixture >= 0).all()
                if not fits or not math.isclose(mixture.sum(), 1.0, rel_tol=1e-6):
                    raise ValueError("impossible mixture")
                if state["certificate.rows"].shape[2] not in (0, len(mixture)):
                    raise ValueError("probabilities of other classes")
                self._labels, self._frozen_labels, self._mixture = labels, frozen, mixture

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""
        return self._alignment.source_bytes

    @property
    def stream_bytes(self) -> int:
        """Size of what the stream remembers of its target."""
        known = [*self._label_state().values(), *self._certificate.state().values()]
        return self._alignment.target.nbytes + sum(array.nbytes for array in known)

    def _launch(self, batch: Array) -> _RestingBatch | None:
        """Launch a batch with constant maps if the stream rests."""
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
        """Whether the next samples are answered with constant maps, as long as they look alike."""
        launched = sum(len(begun.batch) for begun in self._begun)
        return self._schedule.left > launched and self._can_rest(samples)

    def _can_rest(self, samples: int) -> bool:
        """Whether a stream that meets these samples rests, unless a comparison is due."""
        labels = self._labels
        if labels is None or labels.kind not in SHUFFLED or not self._monitor.is_ready:
            return False
        return self._schedule.accepted and self._alignment.target.is_full(samples)

    def _begin_rest(self, batch: Array) -> _Rest | None:
        """Fold the maps into the network; None if this batch cannot begin a rest."""
        labels, mixture = self._labels, self._mixture
        assert labels is not None
        assert mixture is not None
        wanted = as_reference(mixture, labels.chain.prior)
        how = Pass(full=wanted is None, mixture=wanted, past_only=True, in_parts=True)
        if not self._alignment.fold(batch, how, self._schedule.left // len(batch)):
            return None
        self._certificate.restart()  # the next comparison is of another part of the stream
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
        """Features and scores and, if the batch fills a block, the monitor's numbers."""
        scores = self.columns(logits)
        if correction is not None:
            scores = scores + array_namespace(scores).astype(correction(scores), scores.dtype)
        filled = len(scores) >= BLOCK
        return features, scores, *([self._monitor.numbers(features, scores)] if filled else [])

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest = None
            self._alignment.unfold()

    def _gated(self, batch: Array, before: Outputs | None) -> LayerAnswer:
        """Answer by the stable verdict if the batch is as sure as before, else compare."""
        after = None
        rests = self._labels is not None  # without classes, any stable verdict stands
        if self._schedule.skips and not rests:
            if self._schedule.accepted:
                after = self._adapted(batch, trusted=True)
                answer = self._ungated(after)
            else:
                before = before or self.model(batch)
                logits = self.columns(before.logits)
                answer = LayerAnswer(
                    logits,
                    Verdict(False, "rest", UNCHECKED),
                    None,
                    logits,
                    frozen_features=before.features,
                )
            if not self._certificate.has_dropped(answer.scores, self._schedule.accepted):
                if after is not None:
                    self._accept(after)
                self._schedule.skipped(len(batch))
                return answer
        before = before or self.model(batch)
        after = after or self._adapted(batch, self._schedule.accepted)
        frozen = self._frozen_scores(before, after)
        self._accept(after)  # both passes succeeded: until here the batch left no trace
        answer = replace(self._compared(after, frozen), frozen_features=before.features)
        if self._schedule.compared(len(batch), answer.verdict.accepted) and not rests:
            self._certificate.settle()
            if not answer.verdict.accepted:
                self._alignment.reset()  # the next comparison is of another part of the stream
                self._monitor.reset()
        return answer

    def _always(self, batch: Array, before: Outputs | None) -> LayerAnswer:
        after = self._adapted(batch, trusted=True)
        self._accept(after)
        return self._ungated(after)

    def _accept(self, after: _Proposal) -> None:
        """Add a batch to what the stream remembers."""
        if after.fresh:
            self._monitor.reset()
        self._alignment.accept()
        if after.settled and self._labels is not None and self._labels.kind in SHUFFLED:
            self._monitor.learn(after.features, after.scores)
        self._labels, self._mixture = after.labels, after.mixture

    def _ungated(self, after: _Proposal) -> LayerAnswer:
        verdict = Verdict(True, "rest", UNCHECKED)
        return LayerAnswer(after.scores, verdict, after.scores, None, after.features, after.own)

    def _frozen_scores(self, before: Outputs, after: _Proposal) -> Array:  # (n, C)
        if before.logits is None:
            raise CasterError(f"{self.model.name} gives no logits, and aligned layers need them")
        frozen = self.columns(before.logits)
        if tuple(frozen.shape) != tuple(after.scores.shape):
            raise CasterError(
                f"the frozen model's logits have the shape {tuple(frozen.shape)}, and the batch "
                f"needs {tuple(after.scores.shape)}"
            )
        return frozen

    def _compared(self, after: _Proposal, frozen: Array) -> LayerAnswer:
        ratio = self._ratio(after, frozen)
        accepted = ratio <= self.settings.tau
        verdict = Verdict(accepted, "accepted" if accepted else "ratio", ratio)
        scores = after.scores if accepted else frozen
        return LayerAnswer(scores, verdict, after.scores, frozen, after.features, after.own)

    def _ratio(self, after: _Proposal, frozen: Array) -> float:
        certificate, labels = self._certificate, after.labels
        frozen_is_source = labels is not None and self._frozen_is_source(frozen)
        if labels is None or labels.kind == "runs":
            return certificate.update(after.scores, frozen)
        errors, norms = certificate.update_shuffled(after.logits, frozen, labels.correction)
        return gating_ratio(errors, norms, labels.kind == "source", frozen_is_source)

    def _frozen_is_source(self, logits: Array) -> bool:  # (n, C)
        """Whether the frozen model's answers are shuffled and in the mixture of the source."""
        p = _probabilities(logits)
        assert self._frozen_labels is not None
        if np.isfinite(p).all():
            self._frozen_labels = self._frozen_labels.observe(p).advance(p)
        return self._frozen_labels.kind == "source"

    def _adapted(self, batch: Array, trusted: bool) -> _Proposal:
        """Answer a batch with aligned layers: once shallow and once whole, or from the past.

        One pass is enough while aligned layers are `trusted`, which a rejection ends: where deep
        ones collapse, the stream would look like a run of one class. In doubt the shallow pass
        answers, and the whole one is for the memory.
        """
        labels, mixture = self._labels, self._mixture
        if labels is None or mixture is None:
            features, logits = self._aligned(batch, WHOLE)
            return _Proposal(features, logits, logits)
        source, alignment = labels.chain.prior, self._alignment
        kept = min(alignment.target.samples, max(0.0, self.settings.memory - len(batch)))
        settled = trusted and kept >= max(ENOUGH_PAST, 2 * len(batch))
        if labels.kind == "runs":  # a few runs by chance look alike, and would go on so
            settled = settled and alignment.target.is_full(len(batch))
        settled = settled and labels.kind != "doubted"
        wanted = as_reference(mixture, source)
        # Between rests, comparisons are rare: they had better be small than fast.
        rare = self._schedule.every > 1 and self._can_rest(len(batch))
        how = Pass(full=wanted is None, mixture=wanted, past_only=True, in_parts=rare)
        shallow = Pass(self._shallow)  # the mixture is not known yet
        first = self._aligned(batch, how if settled else shallow)
        fresh = alignment.target.change() > CHANGED
        if fresh:
            kept, settled = 0.0, False
            first = self._aligned(batch, replace(shallow, fresh=True))
        p = _probabilities(first[1])
        seen = labels.observe(p)
        if settled and labels.kind != seen.kind:
            settled = False  # shallow layers must agree
            first = self._aligned(batch, shallow)
            p = _probabilities(first[1])
            seen = labels.observe(p)
        if labels.kind == "doubted" and seen.kind in ("runs", "prior"):
            kept, fresh = 0.0, True  # the past was taken for the source's mixture
        labels = seen
        own = labels.mixture(p)
        mixture = merged_mixture(mixture, kept, own, len(p))
        last = first
        if not settled:
            last = self._aligned(batch, Pass(mixture=as_reference(mixture, source), fresh=fresh))
        if labels.kind == "doubted":
            last = first
        p = _probabilities(last[1])
        answers, labels = labels.answers(p), labels.advance(p)
        features, logits = last
        scores = logits
        if answers is not None:
            scores = like(np.log(answers.clip(min=RARE)), logits, logits.dtype)
        known = own if labels.kind in ("runs", "prior") else None
        return _Proposal(features, logits, scores, labels, mixture, known, settled, fresh)

    def _aligned(self, batch: Array, how: Pass) -> tuple[Array, Array]:
        """Features, and logits of the classes, with aligned layers."""
        outputs = self._alignment(batch, how)
        logits = self.columns(outputs.logits)
        if not _all_finite(logits):
            raise _NotFiniteError
        return outputs.features, logits

    def _answer_plausible(
        self,
        batch: Array,
        before: Outputs | None,
        work: Callable[[Array, Outputs | None], LayerAnswer],
    ) -> LayerAnswer:
        """Answer plausible samples as if they came alone, and others as the frozen model does."""
        try:
            return work(batch, before)
        except _NotFiniteError:
            frozen = self.columns((before or self.model(batch)).logits)
            _check_finite(frozen)
            return LayerAnswer(frozen, Verdict(False, "numerical", math.inf), None, frozen)
        except ImplausibleSamples as found:
            kept = found.kept
        rows = to_numpy(kept)
        others = self.model(batch[~kept]) if before is None else _rows(before, ~rows)
        logits = self.columns(others.logits)
        if not _all_finite(batch[~kept]):  # bad input; large numbers are an attack
            _check_finite(logits)
        rest = _zeroed(logits)
        if len(rest) == len(batch):
            verdict = Verdict(False, "implausible", math.inf)
            return LayerAnswer(rest, verdict, None, rest, implausible=len(rest))
        known = None if before is None else _rows(before, rows)
        answer = self._answer_plausible(batch[kept], known, work)
        filled = {
            name: None if part is None else _filled(kept, part, rest)
            for name in ("scores", "adapted", "frozen")
            for part in (getattr(answer, name),)
        }
        implausible = len(rest) + answer.implausible
        gone = {"features": None, "frozen_features": None}  # of the plausible samples alone
        return replace(answer, **filled, **gone, implausible=implausible)  # type: ignore[arg-type]


class _NotFiniteError(Exception):
    """Aligned logits are not finite: the batch is answered as frozen and leaves no trace."""


def aligned_network(
    model: Any,
    layers: Mapping[Site, ChannelMoments] | None,
    settings: LayerSettings,
    ends: Range | None,
) -> AlignedNetwork:
    """The network with aligned layers, by the model's runtime."""
    if hasattr(model, "twin"):
        from caster.adapt.alignment import Alignment

        return Alignment.of(model, layers, settings, ends)
    from caster.adapt.onnx_alignment import OnnxAlignment

    return OnnxAlignment.of(model, layers, settings, ends)


def first_labels(layers: Iterable[ChannelMoments]) -> StreamLabels:
    """The labels of a stream that has seen nothing, by the source's class counts."""
    for found in layers:
        if found.classes is not None:
            pi = found.classes.counts / found.classes.total
            pi = pi.clip(min=EVEN / len(pi))
            return StreamLabels.start(pi / pi.sum())
    raise CasterError(
        "the state has no moments of classes, which aligning with a batch's mixture needs: fit "
        "again, or set {argument} to False",
        argument="mixture",
    )


def _probabilities(logits: Array) -> NDArray[np.float64]:  # (n, C)
    return np.asarray(probabilities(to_numpy(as_real_array(logits)).astype(np.float64)))


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
    """The frozen scores of samples that no image produced: no class where they are not finite."""
    xp = array_namespace(logits)
    finite = xp.all(xp.isfinite(logits), axis=1, keepdims=True)
    return xp.where(finite, logits, xp.zeros_like(logits))


def _filled(kept: Array, own: Array, others: Array) -> Array:  # (n,), (k, C), (n - k, C)
    """The scores of a batch, from those of the samples that were kept and of the others."""
    xp = array_namespace(own)
    kept = like(kept, own)
    whole = xp.empty((kept.shape[0], own.shape[1]), dtype=own.dtype, device=device(own))
    whole[kept], whole[~kept] = own, like(others, own, own.dtype)
    return whole
