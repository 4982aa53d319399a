"""Mixture transport as one ONNX graph: a batch and the stream's state in, an answer and the next
state out.

The graph follows `adapt.layer_transport`. Its passes through the network are the trips of a Loop,
whose body holds the twin (`models.onnx.twin`) with its weights: ONNX Runtime optimises a network
only where its weights are in the same graph. Copies of the network that a pass does not need get no
images. What the next pass is follows from what the last one showed, so the body is a state machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from spox import Tensor, argument, build

from caster.adapt import layer_passes, layer_transport
from caster.adapt.layer_passes import LayerSettings
from caster.core.channels import ChannelMoments
from caster.export import moment_graph
from caster.export.certificate_graph import (
    CERTIFICATE,
    CertificateGraph,
    ScheduleGraph,
    gating_ratio,
    initial_certificate,
    reason_code,
)
from caster.export.embedding import call, embed
from caster.export.full_map_graph import (
    FullSite,
    full_maps,
    full_sites,
    merged_covariances,
    with_shifts,
)
from caster.export.graph_arrays import (
    GraphArray,
    arange,
    choose,
    concat,
    constant,
    filled,
    is_finite,
    is_nan,
    length,
    log,
    maximum,
    minimum,
    repeat,
    running_sum,
    selected,
    softmax,
    stack,
    taken,
    under_construction,
    where,
)
from caster.export.label_graph import (
    LabelGraph,
    initial_labels,
    is_reference,
    merged_mixture,
)
from caster.export.moment_graph import ClassTable
from caster.export.monitor_graph import MonitorGraph, initial_monitor
from caster.export.plausibility_graph import FIRST_LAYERS, PlausibilityGraph
from caster.models.onnx.compiled import NEXT
from caster.models.onnx.resting import Pieces

if TYPE_CHECKING:
    from onnx import ModelProto

Floats = NDArray[Any]
PASSES = 6  # at most, beside pieces: three with aligned layers, two of checks and others, a rest
NETWORK = "network"  # name of the embedded twin
# Input values that a copy of a resting network takes at once, two images of 224 x 224: what they
# become inside the network fits the caches. A settled pass takes twice as many. No other pass can
# be cut: its maps are made of the whole batch.
AT_ONCE = 2 * 3 * 224 * 224
LARGEST = 2**62  # a number of rows that no batch has
AT_REST = 32  # images that all copies of a resting network take together, at least


class Phase(IntEnum):
    """What a pass through the twin is for."""

    REST = 0  # the resting copies, with constant maps
    CHECK = 1  # no copy: which samples could be images
    SETTLED = 2  # all sites, by the past
    SHALLOW = 3  # the first sites, by the batch: shows its classes, and whether the shift changed
    FRESH = 4  # the same without a past, which was of another shift
    CONFIRM = 5  # the same after a settled pass that suggested other classes
    WHOLE = 6  # all sites, by the batch, with the reference of its mixture; in doubt for the memory
    OTHERS = 7  # the frozen copy, of samples that no image could have produced
    DONE = 8


def pieces_of(shape: Sequence[int | None]) -> Pieces:
    """How a resting network cuts a batch of images of this shape."""
    if None in shape:
        return Pieces()  # where the size of images is open, batches are not cut
    rows = max(1, AT_ONCE // math.prod(size or 1 for size in shape))
    return Pieces(math.ceil(AT_REST / rows), rows)


@dataclass(frozen=True, eq=False)
class Source:
    """What a compiled stream knows of the source: S sites with D channels in all."""

    widths: tuple[int, ...]  # (S,)
    moments: Floats  # (2, D) float32
    eps: Floats  # (D,) float32
    parts: tuple[tuple[int, ClassTable | None], ...]  # channels of sites in a row, and classes
    prior: Floats  # (C,) float64
    features: int  # their number
    full: tuple[FullSite, ...] = ()  # sites with full maps

    @classmethod
    def of(
        cls,
        layers: Sequence[ChannelMoments],
        positions: Sequence[int | None],  # at a site, per sample; None: not known
        features: int,
    ) -> Source:
        """The moments of a state, in the order of the sites: full maps where covariances are."""
        widths = tuple(len(found.mean) for found in layers)
        tiny = float(np.finfo(np.float32).tiny)  # where every channel is dead
        eps = [max(layer_passes.EPS * float(np.mean(m.variance)), tiny) for m in layers]
        moments = [
            np.concatenate([getattr(m, name) for m in layers]) for name in ("mean", "variance")
        ]
        parts = []
        for has_classes, sites in groupby(layers, key=lambda m: m.classes is not None):
            group = list(sites)
            table = ClassTable.of(group, layer_passes.FEW) if has_classes else None
            parts.append((sum(len(m.mean) for m in group), table))
        return cls(
            widths,
            np.stack(moments).astype(np.float32),
            np.repeat(eps, widths).astype(np.float32),
            tuple(parts),
            layer_transport.first_labels(layers).chain.prior,
            features,
            full_sites(layers, positions),
        )

    def reference(self, mixture: GraphArray | None) -> GraphArray:  # (C,) -> (3, D)
        """Mean, variance and eps to align with, under a mixture where classes are known."""
        eps = constant(self.eps[None])
        if mixture is None:
            return concat([constant(self.moments), eps])
        found, start = [], 0
        for width, classes in self.parts:
            own = constant(self.moments[:, start : start + width])
            found.append(own if classes is None else classes.mixture(mixture))
            start += width
        return concat([concat(found, axis=1), eps])


# --- state ---------------------------------------------------------------------------------------


def initial_state(source: Source, window: int) -> dict[str, NDArray[Any]]:
    """The state of a stream that has seen nothing, by the names of its tensors."""
    D, C = source.moments.shape[1], len(source.prior)
    squares = np.zeros(sum(site.width**2 for site in source.full), np.float32)
    shallow = sum(_compared_widths(source))
    labels = initial_labels(source.prior)
    return {
        "batches": np.array(0),
        "past": np.zeros((2, D), np.float32),
        "past.count": np.array(0.0),
        **({"past.covariances": squares} if source.full else {}),
        "recent": np.zeros((2, shallow), np.float32),
        "recent.count": np.array(0.0),
        "mixture": source.prior,
        **{f"labels.{name}": value for name, value in labels.items()},
        **{f"frozen_labels.{name}": value for name, value in labels.items()},
        **initial_certificate(C, window),
        "schedule": np.zeros(4, np.int64),
        **{f"monitor.{name}": each for name, each in initial_monitor(source.features, C).items()},
        "rest": np.array(False),  # whether the last batch was answered in a rest, by these maps:
        "rest.maps": np.zeros((2, D), np.float32),
        "rest.matrices": squares,
    }


def _begun(
    state: Mapping[str, GraphArray],
    initial: Mapping[str, NDArray[Any]],
) -> dict[str, GraphArray]:
    """The state, with its initial values in place of zeros before the first batch."""
    is_first = state["batches"].equals(0)
    return {
        name: where(is_first, constant(initial[name]), each) if initial[name].any() else each
        for name, each in state.items()
    }


def _compared_widths(source: Source) -> list[int]:
    """Channels of the sites where the last samples are compared with the past."""
    return list(source.widths[: math.ceil(layer_passes.CHANGE_SITES * len(source.widths))])


def _parts(state: Mapping[str, GraphArray], name: str) -> dict[str, GraphArray]:
    """The tensors of a part of the state, by their names in it."""
    prefix = f"{name}."
    return {n.removeprefix(prefix): each for n, each in state.items() if n.startswith(prefix)}


def _certificate_of(state: Mapping[str, GraphArray], settings: LayerSettings) -> CertificateGraph:
    stats, rows, count = (state[name] for name in CERTIFICATE)
    return CertificateGraph(stats, rows, count, settings.window)


# --- one batch -----------------------------------------------------------------------------------


class Carry(NamedTuple):
    """What a pass leaves for the next one, and the last pass for the answer."""

    phase: GraphArray  # () int64, of the next pass
    rested: GraphArray  # (), whether the batch was answered in a rest
    kept: GraphArray  # (n,), samples that could be images
    fresh: GraphArray  # (), whether the past is forgotten: another shift, or the end of a doubt
    frozen: GraphArray  # (k, C) logits, once `has_frozen`
    has_frozen: GraphArray  # ()
    scored: GraphArray  # (k, C) logits with aligned layers: shallow ones, or those of `scores`
    scores: GraphArray  # (k, C), the same corrected by what the stream knows of its classes
    has_scores: GraphArray  # ()
    settled: GraphArray  # (), whether they come from the past alone
    failed: GraphArray  # (), whether aligned logits were not finite, or no sample an image
    others: GraphArray  # (m, C) frozen logits of implausible samples, once `has_others`
    has_others: GraphArray  # ()
    rows: GraphArray  # () int64, of a pass in pieces so far
    logits: GraphArray  # (rows, C), theirs
    features: GraphArray  # (rows, d)
    given: GraphArray  # (2, D), scales and shifts by the past: of full maps, until others are found
    matrices: GraphArray  # (sum of c^2,), of full maps
    moments: GraphArray  # (2, D), of the batch in the last aligned pass
    covariances: GraphArray  # (sum of c^2,), in the same pass
    mixture: GraphArray  # (C,), behind the merged moments
    labels: LabelGraph  # that have observed the batch

    @classmethod
    def of(cls, source: GraphArray, arrays: Sequence[GraphArray]) -> Self:
        """What `arrays` gives, with the source's prior."""
        own = len(cls._fields) - 1
        return cls._make([*arrays[:own], LabelGraph.of(source, arrays[own:])])

    def arrays(self) -> list[GraphArray]:
        """All of it."""
        return [*self[:-1], *self.labels.parts()]


def _measures(is_phase: Mapping[Phase, GraphArray]) -> GraphArray:  # ()
    """Whether a pass measures its sites."""
    return ~(is_phase[Phase.REST] | is_phase[Phase.CHECK] | is_phase[Phase.OTHERS])


class _Kept:
    """The samples of a batch that could be images, which measured passes are about."""

    def __init__(
        self, images: GraphArray, kept: GraphArray, state: Mapping[str, GraphArray]
    ) -> None:
        self._images, self._all, self.none = images, kept.all(), ~kept.any()
        # A batch is never empty: without a plausible sample, the first stands for them.
        self._rows = kept | (self.none & arange(length(images)).equals(0))
        self.n = self._rows.astype(np.int64).sum()
        self.samples = self.n.astype(np.float64)
        self._past_count = state["past.count"]

    def past(self, memory: int) -> GraphArray:  # ()
        """Samples of the past that still count."""
        return minimum(self._past_count, maximum(memory - self.samples, 0.0))

    def __getitem__(self, rows: slice) -> GraphArray:
        """Some of their images; all of a batch are not copied first."""
        (found,) = choose(
            self._all,
            lambda: [self._images[rows]],
            lambda: [selected(self._images, self._rows)[rows]],
        )
        return found


class _Step:
    """The graph of one batch."""

    def __init__(
        self,
        twin: ModelProto,
        source: Source,
        columns: Sequence[int],
        settings: LayerSettings,
        is_plausible: PlausibilityGraph,
        images: GraphArray,
        state: Mapping[str, GraphArray],
        idle_rows: int,
        pieces: Pieces,
    ) -> None:
        self._twin, self._source, self._columns = twin, source, columns
        self._settings, self._state, self._is_plausible = settings, state, is_plausible
        self._images, self._idle_rows, self._pieces = images, idle_rows, pieces
        self._squares = sum(site.width**2 for site in source.full)
        self._pi_s = constant(source.prior)
        self._labels = LabelGraph.of(self._pi_s, _parts(state, "labels").values())
        self._schedule = ScheduleGraph(state["schedule"], settings.every, settings.window)
        self._monitor = MonitorGraph(**_parts(state, "monitor"))
        self._in_doubt = self._labels.is_kind("doubted")
        self._shuffled = ~(self._labels.is_kind("runs") | self._in_doubt)
        self._rests = self._is_resting()
        # The next comparison is of another part of the stream.
        self._certificate = _certificate_of(state, settings).restart(self._rests)
        enough = state["past.count"] >= float(layer_transport.ENOUGH_PAST)
        same = is_reference(state["mixture"], self._pi_s)
        self._full = (self._rests | (enough & self._schedule.accepted)) & same
        self._known = self._rests & state["rest"]  # maps of the rest so far

    def _is_resting(self) -> GraphArray:  # ()
        """Whether the batch is answered with constant maps, as long as it looks like others."""
        memory = self._settings.memory
        if not memory:
            return constant(False)
        is_full = self._is_full(length(self._images).astype(np.float64))
        stands = self._schedule.accepted & self._schedule.skips
        return self._shuffled & self._monitor.is_ready & stands & is_full

    def _is_full(self, samples: GraphArray) -> GraphArray:  # () -> ()
        """Whether the memory is, with so many samples."""
        return self._state["past.count"] + samples >= float(self._settings.memory)

    def answer(self) -> dict[str, GraphArray]:
        """All outputs of the graph."""
        pieces = length(self._images) / max(1, self._pieces.rows) + 1  # of integers, at most
        passed = repeat(2 * pieces + PASSES, self._start().arrays(), self._pass)
        found = Carry.of(self._pi_s, passed)
        compares = found.has_scores & found.has_frozen
        certificate = self._certificate
        unmeasured = where(found.failed & ~found.rested, constant(math.inf), math.nan)
        names = [name for name in self._state if name.startswith("frozen_labels.")]
        ratio, *measured = choose(
            compares,
            lambda: self._compared(found),
            lambda: [
                unmeasured,
                *(self._state[name] for name in names),
                *certificate.parts,
            ],
        )
        names += CERTIFICATE
        following = dict(zip(names, measured, strict=True))
        fits = compares & (ratio <= self._settings.tau)
        accepted = fits | found.rested
        none = _Kept(self._images, found.kept, self._state).none
        reason = where(none, reason_code("implausible"), reason_code("numerical"))
        reason = where(compares, where(fits, reason_code("accepted"), reason_code("ratio")), reason)
        reason = where(found.rested, reason_code("rest"), reason)
        after = self._after(found, fits, following)
        (scores,) = choose(accepted, lambda: [found.scores], lambda: [found.frozen])
        (scores,) = choose(
            found.rested,
            lambda: [scores],
            lambda: [self._in_order(scores, found.others, found.kept)],
        )
        return {
            "probabilities": softmax(scores),
            "labels": scores.argmax(1),
            "accepted": accepted,
            "ratio": ratio.astype(np.float32),
            "reason": reason,
            **{f"{NEXT}{name}": after[name] for name in self._state},
        }

    def _compared(self, found: Carry) -> list[GraphArray]:
        """The ratio of a batch with both answers, then frozen labels and certificate after it."""
        answered = found.labels
        errors, norms, *certificate = choose(
            answered.is_kind("runs"),
            lambda: self._compared_in_runs(found),
            lambda: self._compared_shuffled(found, answered),
        )
        labels = LabelGraph.of(self._pi_s, _parts(self._state, "frozen_labels").values())

        def observed() -> list[GraphArray]:
            p = softmax(found.frozen.astype(np.float64))
            return labels.observe(p)[0].advance(p).parts()

        after = choose(is_finite(found.frozen), observed, labels.parts)
        frozen = LabelGraph.of(self._pi_s, after)
        ratio = gating_ratio(errors, norms, answered.is_kind("source"), frozen.is_kind("source"))
        return [ratio, *after, *certificate]

    def _compared_in_runs(self, found: Carry) -> list[GraphArray]:
        """Ratios of errors and, unused, of norms; then the certificate."""
        certificate, errors = self._certificate.update(found.scores, found.frozen)
        return [errors, constant(math.nan) + 0.0, *certificate.parts]

    def _compared_shuffled(self, found: Carry, labels: LabelGraph) -> list[GraphArray]:
        """Ratios of errors and norms at equal temperature; then the certificate."""
        certificate, errors, norms = self._certificate.update_shuffled(
            found.scored, found.frozen, labels.correction
        )
        return [errors, norms, *certificate.parts]

    def _after(
        self,
        found: Carry,
        fits: GraphArray,
        following: Mapping[str, GraphArray],  # what a comparison leaves
    ) -> dict[str, GraphArray]:
        """The state after a batch: that before it if it failed."""
        batch = _Kept(self._images, found.kept, self._state)
        compares = found.has_scores & found.has_frozen
        rested = self._schedule.skipped(length(self._images)).state
        unmeasured = where(found.rested, rested, self._schedule.state)
        schedule = where(compares, self._schedule.compared(batch.n, fits).state, unmeasured)
        kept = where(found.fresh, constant(0.0), batch.past(self._settings.memory))
        share = (batch.samples / (kept + batch.samples)).astype(np.float32)
        recent, recent_count = self._recent(found.moments, found.fresh, batch.samples)
        labels = (name for name in self._state if name.startswith("labels."))
        joined = {
            "past": moment_graph.merged(self._state["past"], found.moments, share),
            "past.count": kept + batch.samples,
            "recent": recent,
            "recent.count": recent_count,
            "mixture": found.mixture,
            **dict(zip(labels, found.labels.parts(), strict=True)),
        }
        if self._source.full:
            step = found.moments[0] - self._state["past"][0]
            joined["past.covariances"] = merged_covariances(
                self._source.full, self._state["past.covariances"], found.covariances, step, share
            )
        chosen = choose(
            found.has_scores,
            lambda: list(joined.values()),
            lambda: [self._state[name] for name in joined],
        )
        return {
            **dict(zip(joined, chosen, strict=True)),
            "batches": self._state["batches"] + 1,
            **following,
            "schedule": schedule,
            **{f"monitor.{name}": each for name, each in self._monitored(found).items()},
            "rest": found.rested,
            "rest.maps": where(found.rested, found.given, 0.0),
            "rest.matrices": where(found.rested, found.matrices, 0.0),
        }

    def _monitored(self, found: Carry) -> dict[str, GraphArray]:
        """The monitor after a batch."""
        before = self._monitor.begin(self._rests & ~found.rested)
        before = before.reset(found.has_scores & found.fresh)
        parts = before.parts()
        learns = found.has_scores & found.settled & self._shuffled
        outputs = found.features, found.scores

        def unlearnt() -> list[GraphArray]:
            return choose(
                found.rested,
                lambda: list(before.wait(*outputs).parts().values()),
                lambda: list(parts.values()),
            )

        after = choose(learns, lambda: list(before.learn(*outputs).parts().values()), unlearnt)
        return dict(zip(parts, after, strict=True))

    # --- passes ---

    def _start(self) -> Carry:
        """Before the first pass."""
        C, d, D = len(self._source.prior), self._source.features, self._source.moments.shape[1]
        none = minimum(length(self._images), 0)  # not a constant, which passes do not change
        nothing = filled(0.0, [none, C], np.float32)
        no = constant(False)
        given, matrices = choose(
            self._known,
            lambda: [self._state["rest.maps"], self._state["rest.matrices"]],
            self._maps_of_past,
        )
        return Carry(
            phase=where(self._rests, constant(int(Phase.REST)), int(Phase.CHECK)),
            rested=no,
            kept=filled(1.0, [length(self._images)], np.float32) > 0.0,
            fresh=no,
            frozen=nothing,
            has_frozen=no,
            scored=nothing,
            scores=nothing,
            has_scores=no,
            settled=no,
            failed=no,
            others=nothing,
            has_others=no,
            rows=constant(0),
            logits=nothing,
            features=filled(0.0, [none, d], np.float32),
            given=given,
            matrices=matrices,
            moments=constant(np.zeros((2, D), np.float32)),
            covariances=constant(np.zeros(self._squares, np.float32)),
            mixture=self._state["mixture"],
            labels=self._labels,
        )

    def _first_phase(self, batch: _Kept) -> GraphArray:  # ()
        """The past is all that a pass needs if it is long and trusted."""
        enough = maximum(2.0 * batch.samples, float(layer_transport.ENOUGH_PAST))
        settled = (batch.past(self._settings.memory) >= enough) & self._schedule.accepted
        full_runs = self._labels.is_kind("runs") & self._is_full(batch.samples)
        settled = settled & (self._shuffled | full_runs)
        return where(settled, constant(int(Phase.SETTLED)), int(Phase.SHALLOW))

    def _pass(self, *carried: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        """Run the twin once, and decide what comes next."""
        before = Carry.of(self._pi_s, carried)
        is_phase = {phase: before.phase.equals(int(phase)) for phase in Phase}
        batch = _Kept(self._images, before.kept, self._state)
        shown, is_piece = self._shown(before, is_phase, batch)
        found, phase = self._judged(before, shown, is_phase, batch, is_piece)
        phase = where(is_piece, before.phase, phase)
        return ~phase.equals(int(Phase.DONE)), found._replace(phase=phase).arrays()

    def _shown(
        self, before: Carry, is_phase: Mapping[Phase, GraphArray], batch: _Kept
    ) -> tuple[Carry, GraphArray]:
        """What a pass shows of the batch, and whether more pieces of it are to come."""
        checks, is_others, rests = (is_phase[p] for p in (Phase.CHECK, Phase.OTHERS, Phase.REST))
        (kept,) = choose(checks, lambda: [self._is_plausible(self._images)], lambda: [before.kept])
        measures = _measures(is_phase)
        shows_frozen = measures & ~before.has_frozen
        n = where(rests, length(self._images), batch.n)
        in_pieces = rests | is_phase[Phase.SETTLED]
        rows = where(in_pieces, minimum(before.rows + self._at_once(rests), n), 0)
        given, logits_frozen, *outputs = self._run(before, batch, is_phase, shows_frozen, rows)
        logits, features, moments, covariances = choose(
            in_pieces,
            lambda: self._joined(before, rests, rows, *outputs),
            lambda: outputs,
        )
        (frozen,) = choose(shows_frozen, lambda: [logits_frozen], lambda: [before.frozen])
        (others,) = choose(is_others, lambda: [logits_frozen], lambda: [before.others])
        is_piece = in_pieces & (rows < n)
        return before._replace(
            kept=kept,
            frozen=frozen,
            has_frozen=before.has_frozen | shows_frozen,
            others=others,
            has_others=before.has_others | is_others | (checks & kept.all()),
            rows=where(is_piece, rows, 0),
            logits=logits,
            features=features,
            given=where(in_pieces, given, before.given),
            moments=where(measures, moments, before.moments),
            covariances=where(measures, covariances, before.covariances),
        ), is_piece

    def _judged(
        self,
        before: Carry,
        shown: Carry,
        is_phase: Mapping[Phase, GraphArray],
        batch: _Kept,
        is_piece: GraphArray,
    ) -> tuple[Carry, GraphArray]:
        """The answer, if a pass has given one, and the phase that follows."""
        settled, whole, checks = (is_phase[p] for p in (Phase.SETTLED, Phase.WHOLE, Phase.CHECK))
        measured = _measures(is_phase) & ~is_piece
        finite = measured & is_finite(shown.logits)
        first = settled | is_phase[Phase.SHALLOW]
        changed = finite & first & self._has_changed(shown.moments, batch.samples)
        observes = finite & ~whole & ~changed
        labels, mixture = self._observed(observes, shown.logits, before, batch)
        turned = observes & ~labels.kind.equals(self._labels.kind)
        decided = turned & self._in_doubt & ~labels.is_kind("source")
        turned = turned & settled
        ends = finite & (whole | (settled & ~changed & ~turned))
        rested, scored, scores, last = self._answered(
            is_phase[Phase.REST] & ~is_piece,
            ends,
            observes & ~settled,
            shown.logits,
            shown.features,
            labels,
            before,
        )
        found = shown._replace(
            rested=rested,
            fresh=before.fresh | changed | decided,
            scored=scored,
            scores=scores,
            has_scores=before.has_scores | ends,
            settled=before.settled | (ends & settled),
            failed=before.failed | (measured & ~finite) | (checks & ~shown.kept.any()),
            mixture=mixture,
            labels=replace(labels, chain=replace(labels.chain, last=last)),
        )
        return found, self._next_phase(found, is_phase, changed, turned)

    def _at_once(self, rests: GraphArray) -> GraphArray:  # ()
        """Rows of a pass in pieces."""
        rows = self._pieces.rows
        if not rows:
            return constant(LARGEST)
        return where(rests, constant(self._pieces.copies * rows), 2 * rows)

    def _answered(
        self,
        rests: GraphArray,  # (), whether a rest has logits of all samples
        ends: GraphArray,  # (), whether a measured batch has its last ones
        is_first: GraphArray,  # (), whether these are of shallow layers, the answer if in doubt
        logits: GraphArray,
        features: GraphArray,
        labels: LabelGraph,
        before: Carry,
    ) -> list[GraphArray]:
        """Whether the batch rested; logits, scores and the last label's probabilities after it."""

        def rested() -> list[GraphArray]:
            scores = logits + self._labels.correction.astype(np.float32)
            usual = self._monitor.is_usual(features, scores)
            return [usual, logits, scores, labels.chain.last]

        def measured() -> list[GraphArray]:
            (kept,) = choose(
                is_first | (ends & ~labels.is_kind("doubted")),
                lambda: [logits],
                lambda: [before.scored],
            )
            return choose(
                ends,
                lambda: [before.rested, kept, *self._finished(kept, labels)],
                lambda: [before.rested, kept, before.scores, labels.chain.last],
            )

        return choose(rests, rested, measured)

    def _next_phase(
        self,
        found: Carry,
        is_phase: Mapping[Phase, GraphArray],
        changed: GraphArray,
        turned: GraphArray,
    ) -> GraphArray:  # ()
        """What follows a pass."""

        def number(phase: Phase) -> GraphArray:
            return constant(int(phase))

        batch = _Kept(self._images, found.kept, self._state)
        following = where(is_phase[Phase.CHECK], self._first_phase(batch), int(Phase.WHOLE))
        following = where(turned, number(Phase.CONFIRM), following)
        following = where(changed, number(Phase.FRESH), following)
        answered = found.has_scores | found.failed
        last = where(found.has_others, number(Phase.DONE), int(Phase.OTHERS))
        following = where(answered | is_phase[Phase.OTHERS], last, following)
        after_rest = where(found.rested, number(Phase.DONE), int(Phase.CHECK))
        return where(is_phase[Phase.REST], after_rest, following)

    def _maps_of_past(self) -> list[GraphArray]:  # (2, D), (sum of c^2,)
        """Scales, shifts and matrices of a settled pass with full maps.

        The passes carry them: spox would compute in every pass what only passes use, and roots
        take long.
        """
        target, by_past = self._to_reference(self._source.reference(None))
        shift, matrices = self._full_maps(self._full, target, by_past)
        return [stack([by_past[0], shift]), matrices]

    def _to_reference(self, reference: GraphArray) -> tuple[GraphArray, GraphArray]:  # (2, D) each
        """The past, shrunk towards what to align with, and its diagonal map."""
        count = self._state["past.count"]
        own = (count / (count + self._settings.prior)).astype(np.float32)
        target = moment_graph.blended(self._state["past"], reference[:2], own)
        return target, moment_graph.to_source(target, reference)

    def _joined(
        self,
        before: Carry,
        rests: GraphArray,
        rows: GraphArray,  # () int64, with this piece
        logits: GraphArray,  # (m, C)
        features: GraphArray,  # (m, d)
        moments: GraphArray,  # (2, D)
        covariances: GraphArray,  # (sum of c^2,)
    ) -> list[GraphArray]:  # (rows, C), (rows, d), (2, D), (sum of c^2,)
        """Outputs and moments of a pass with another piece of the batch; a rest has no moments."""
        joined = [
            concat([old[: before.rows], new])
            for old, new in ((before.logits, logits), (before.features, features))
        ]
        share = ((rows - before.rows).astype(np.float64) / rows.astype(np.float64)).astype(
            np.float32
        )

        def merged() -> list[GraphArray]:
            found = moment_graph.merged(before.moments, moments, share)
            if not self._source.full:
                return [found, covariances]
            step = moments[0] - before.moments[0]
            parts = self._source.full, before.covariances, covariances, step, share
            return [found, merged_covariances(*parts)]

        return [*joined, *choose(rests, lambda: [before.moments, before.covariances], merged)]

    def _run(
        self,
        before: Carry,
        batch: _Kept,
        is_phase: Mapping[Phase, GraphArray],
        shows_frozen: GraphArray,
        rows: GraphArray,  # () int64, of a pass in pieces after this one
    ) -> list[GraphArray]:  # (2, D), then (n or less, C) twice, (.., d), (2, D), (sum of c^2,)
        """Given maps, frozen logits, aligned logits and features, and moments.

        A copy that idles gets few rows or none.
        """
        settled, whole, rests = (is_phase[p] for p in (Phase.SETTLED, Phase.WHOLE, Phase.REST))
        by_past = settled | rests
        mixture = where(whole, before.mixture, self._state["mixture"])
        # Maps by the past are known after a piece, or a rest that has ended in this batch.
        known = self._known | self._full | (by_past & (before.rows > 0)) | (settled & self._rests)
        mixed = ((by_past & ~known) | whole) & ~is_reference(mixture, self._pi_s)
        (reference,) = choose(  # only here: the moments of classes are large
            mixed,
            lambda: [self._source.reference(mixture)],
            lambda: [self._source.reference(None)],
        )
        _, found = self._to_reference(reference)
        D, sites = self._source.moments.shape[1], len(self._source.widths)
        untouched = constant(np.stack([np.ones(D), np.zeros(D)]), np.float32)
        shallow = constant(np.arange(sites) < math.ceil(layer_transport.FIRST_PASS * sites))
        kept = where(before.fresh, constant(0.0), batch.past(self._settings.memory))
        behind = kept + batch.samples
        shares = stack([batch.samples / behind, behind / (behind + self._settings.prior)])
        given = where(by_past, where(known, before.given, found), untouched)
        outputs = call(
            NETWORK,
            self._twin,
            self._frozen_rows(batch, before.kept, shows_frozen, is_phase[Phase.OTHERS]),
            self._aligned_rows(batch, is_phase, before.rows, rows),
            given,
            (shallow | whole) & ~settled,  # caster.measured
            self._state["past"],
            reference,
            shares.astype(np.float32),
            settled & self._full,
            self._resting_matrices(rests, given, before.matrices),
            self._resting_rows(rests, before.rows, rows),
        )
        names = [output.name for output in self._twin.graph.output]
        named = dict(zip(names[2:], outputs[2:], strict=True))
        parts = ("logits", "features")
        logits, features = choose(
            rests,
            lambda: [named[f"caster.resting_{part}"] for part in parts],
            lambda: [named[f"caster.{part}"] for part in parts],
        )
        return [
            given,
            self._of_classes(outputs[1]),
            self._of_classes(logits),
            features.reshape(-1, self._source.features),
            named["caster.moments"],
            named["caster.covariances"],
        ]

    def _resting_matrices(
        self, rests: GraphArray, given: GraphArray, matrices: GraphArray
    ) -> GraphArray:  # (sum of c^2,)
        """The maps of full sites, diagonal in a rest without full maps."""
        if not self._source.full:
            return matrices

        def diagonal() -> list[GraphArray]:
            scales = (given[0][site.channels].reshape(-1, 1) for site in self._source.full)
            each = (
                s * constant(np.eye(f.width), np.float32)
                for s, f in zip(scales, self._source.full, strict=True)
            )
            return [concat([matrix.reshape(-1) for matrix in each])]

        (found,) = choose(rests & ~self._full, diagonal, lambda: [matrices])
        return found

    def _full_maps(
        self,
        full: GraphArray,
        target: GraphArray,  # (2, D), shrunk
        by_past: GraphArray,  # (2, D), the diagonal map
    ) -> list[GraphArray]:  # (D,), (sum of c^2,)
        """The shifts of all sites and the matrices of full ones, if `full`."""
        sites, zeros = self._source.full, constant(np.zeros(self._squares, np.float32))
        if not sites:
            return [by_past[1], zeros]
        count = self._state["past.count"]
        behind = count + self._settings.prior

        def found() -> list[GraphArray]:
            maps, shifts = full_maps(
                sites,
                self._state["past.covariances"],
                target[0],
                by_past[0],
                count / behind,
                behind,
            )
            joined = concat([A.reshape(-1) for A in maps]).astype(np.float32)
            return [with_shifts(by_past[1], sites, shifts), joined]

        return choose(full, found, lambda: [by_past[1], zeros])

    def _aligned_rows(
        self,
        batch: _Kept,
        is_phase: Mapping[Phase, GraphArray],
        start: GraphArray,
        stop: GraphArray,
    ) -> GraphArray:
        """The rows of the aligned copy: a piece of a settled pass, or all; few if it idles."""
        settled = is_phase[Phase.SETTLED]
        end = where(_measures(is_phase), batch.n, self._idle_rows)
        end = where(settled, stop, end)
        return batch[where(settled, start, 0) : end]

    def _resting_rows(self, rests: GraphArray, start: GraphArray, stop: GraphArray) -> GraphArray:
        """The rows of the resting copies: implausible ones are not singled out."""
        return self._images[where(rests, start, 0) : where(rests, stop, self._idle_rows)]

    def _frozen_rows(
        self, batch: _Kept, kept: GraphArray, wanted: GraphArray, others: GraphArray
    ) -> GraphArray:
        """The rows of the frozen copy: images or, in a pass of their own, the implausible ones."""
        (rows,) = choose(
            others,
            lambda: [selected(self._images, ~kept)],
            lambda: [batch[: where(wanted, batch.n, self._idle_rows)]],
        )
        return rows

    def _in_order(
        self, scores: GraphArray, others: GraphArray, kept: GraphArray
    ) -> GraphArray:  # (n, C)
        """Scores of all samples in the order they came, from those kept and the others.

        Implausible samples whose logits are not finite have no class: their scores are 0.
        """
        broken = is_nan((others - others).sum(1, keepdims=True))
        both = concat([scores, where(~broken, others, 0.0)])
        own = kept.astype(np.int64)
        at = where(kept, running_sum(own), length(scores) + running_sum(1 - own)) - 1
        return taken(both, at)

    def _of_classes(self, logits: GraphArray) -> GraphArray:  # (n, any) -> (n, C)
        """The logits of the state's classes."""
        return taken(logits, constant(np.array(self._columns)), axis=1)

    def _recent(
        self, moments: GraphArray, fresh: GraphArray, samples: GraphArray
    ) -> tuple[GraphArray, GraphArray]:
        """Moments of the last samples with the batch, at the sites where they are compared."""
        known = self._state["recent.count"]
        room = maximum(layer_passes.CHANGE_WINDOW - samples, 0.0)
        kept = where(fresh, constant(0.0), minimum(known, room))
        count = kept + samples
        share = (samples / count).astype(np.float32)
        shallow = moments[:, : sum(_compared_widths(self._source))]
        return moment_graph.merged(self._state["recent"], shallow, share), count

    def _has_changed(self, moments: GraphArray, samples: GraphArray) -> GraphArray:  # (2, D) -> ()
        """Whether the last samples are of another shift than the past."""
        widths = _compared_widths(self._source)
        recent, count = self._recent(moments, constant(False), samples)
        found = moment_graph.change(recent, self._state["past"][:, : sum(widths)], widths)
        return (count < self._state["past.count"]) & (found > layer_transport.CHANGED)

    def _observed(
        self, observes: GraphArray, logits: GraphArray, before: Carry, batch: _Kept
    ) -> tuple[LabelGraph, GraphArray]:
        """Labels that have seen a batch, and the mixture behind the moments with it."""
        kept = where(before.fresh, constant(0.0), batch.past(self._settings.memory))

        def observed() -> list[GraphArray]:
            p = softmax(logits.astype(np.float64))
            seen, mixture = self._labels.observe(p)
            known = seen.is_kind("runs") | seen.is_kind("prior")
            decided = self._in_doubt & known  # the past was taken for the source's mixture
            past = where(decided, constant(0.0), kept)
            merged = merged_mixture(self._state["mixture"], past, mixture, batch.samples)
            return [merged, *seen.parts()]

        mixture, *parts = choose(
            observes, observed, lambda: [before.mixture, *before.labels.parts()]
        )
        return LabelGraph.of(self._pi_s, parts), mixture

    def _finished(self, logits: GraphArray, labels: LabelGraph) -> list[GraphArray]:
        """The scores that answer a batch, and the last label's probabilities after it."""
        p = softmax(logits.astype(np.float64))

        def by_labels() -> list[GraphArray]:
            answers = maximum(labels.answers(p), layer_transport.MIN_PROBABILITY)
            return [log(answers).astype(np.float32)]

        unchanged = labels.is_kind("source") | labels.is_kind("doubted")
        (scores,) = choose(unchanged, lambda: [logits], by_labels)
        return [scores, labels.advance(p).chain.last]


def compile_layers(
    twin: ModelProto,
    source: Source,
    columns: Sequence[int],  # of the state's classes among the logits
    settings: LayerSettings,
    is_plausible: PlausibilityGraph,
    pieces: Pieces,  # of the twin's resting copies
    idle_rows: int = 1,  # of a copy in a pass that does not need it
) -> ModelProto:
    """The graph of one batch of a stream.

    Inputs: the images, under the model's own name, and the state, of which zeros start a stream.
    Outputs: `probabilities` (n, C), `labels` (n,) among the state's classes, `accepted`, `ratio`,
    `reason` as a position in `REASONS`, and the next state.
    """
    from onnx.helper import tensor_dtype_to_np_dtype

    images = twin.graph.input[0]
    kind = images.type.tensor_type
    shape = tuple(size.dim_value or None for size in kind.shape.dim)
    initial = initial_state(source, settings.window)
    with under_construction():
        inputs = {
            images.name: argument(Tensor(tensor_dtype_to_np_dtype(kind.elem_type), shape)),
            **{name: argument(Tensor(each.dtype, each.shape)) for name, each in initial.items()},
        }
        state = _begun({name: GraphArray(inputs[name]) for name in initial}, initial)
        batch = GraphArray(inputs[images.name])
        step = _Step(twin, source, columns, settings, is_plausible, batch, state, idle_rows, pieces)
        # A graph must state the shapes of its outputs, and spox loses them in branches.
        shapes: dict[str, tuple[int, ...]] = {
            **{"probabilities": (-1, len(source.prior)), "labels": (-1,)},
            **{f"{NEXT}{name}": each.shape for name, each in initial.items()},
        }
        found = {name: each.reshape(*shapes.get(name, ())) for name, each in step.answer().items()}
        model = build(inputs, {name: each.var for name, each in found.items()})
    embed(model, {NETWORK: twin, FIRST_LAYERS: is_plausible.first_layers})
    _name_open_sizes(model)
    return model


def _name_open_sizes(model: ModelProto) -> None:
    """Name the batch size `n`, the same in all inputs and outputs, and other open sizes."""
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                size.dim_param = f"size{axis}" if axis else "n"
