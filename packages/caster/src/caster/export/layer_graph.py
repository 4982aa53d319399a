"""Compile mixture transport into one ONNX graph.

The graph takes a batch and the state of a stream, and returns an answer and the next state. It
follows `adapt.layer_transport`. Each pass through the network is one iteration of a Loop. The body
of the Loop is a state machine: the result of a pass decides the phase of the next one. The body
contains the twin (`models.onnx.twin`) together with its weights, because ONNX Runtime optimises a
network only if its weights are in the same (sub)graph. Copies of the network that a pass does not
need get no images.
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
from caster.export import graph_arrays as xp
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
from caster.export.graph_arrays import GraphArray
from caster.export.label_graph import LabelGraph, initial_labels, is_reference, merged_mixture
from caster.export.moment_graph import ClassTable
from caster.export.monitor_graph import MonitorGraph, initial_monitor
from caster.export.plausibility_graph import FIRST_LAYERS, PlausibilityGraph
from caster.models.onnx.compiled import NEXT
from caster.models.onnx.resting import Pieces

if TYPE_CHECKING:
    from onnx import ModelProto

Floats = NDArray[Any]
PASSES = 6  # per batch, besides pieces: at rest, to check samples, and four aligned ones
NETWORK = "network"  # name of the embedded twin
# Input values that a copy of a resting network takes at once, two images of 224 x 224, so that
# activations fit in the caches. A settled pass takes twice as many. No other pass can be split,
# because its maps depend on the whole batch.
AT_ONCE = 2 * 3 * 224 * 224
LARGEST = 2**62  # exceeds the number of rows of any batch
AT_REST = 32  # images that all copies of a resting network take together, at least


class Phase(IntEnum):
    """The purpose of a pass through the twin."""

    REST = 0  # run the resting copies, with constant maps
    CHECK = 1  # run the frozen copy on samples that no image could have produced
    SETTLED = 2  # align all sites with maps from the past
    SHALLOW = 3  # align the first sites by the batch, to find its classes and changes of shift
    FRESH = 4  # the same without the past, which belongs to another shift
    CONFIRM = 5  # the same after a settled pass that suggested other classes
    ALONE = 6  # the same without the past, which may be why samples look alike
    WHOLE = 7  # align all sites by the batch and its mixture; in doubt, only to update the memory
    DONE = 8


def pieces_of(shape: Sequence[int | None]) -> Pieces:
    """Choose how a resting network splits a batch of images of this shape."""
    if None in shape:
        return Pieces()  # batches of images with a dynamic size are not split
    rows = max(1, AT_ONCE // math.prod(size or 1 for size in shape))
    return Pieces(math.ceil(AT_REST / rows), rows)


@dataclass(frozen=True, eq=False)
class Source:
    """Source moments of a compiled stream: S sites with D channels in all."""

    widths: tuple[int, ...]  # (S,), number of channels per site
    moments: Floats  # (2, D) float32
    eps: Floats  # (D,) float32
    parts: tuple[tuple[int, ClassTable | None], ...]  # channels of adjacent sites, and classes
    prior: Floats  # (C,) float64
    features: int  # number of features
    full: tuple[FullSite, ...] = ()  # sites with full maps

    @classmethod
    def of(
        cls,
        layers: Sequence[ChannelMoments],
        positions: Sequence[int | None],  # per sample at each site; None if unknown
        features: int,
    ) -> Source:
        """Convert the moments of a state; sites with a covariance get full maps."""
        widths = tuple(len(found.mean) for found in layers)
        tiny = float(np.finfo(np.float32).tiny)  # if every channel is constant
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
        """Mean, variance and eps to align with, under a class mixture at sites with classes."""
        eps = xp.constant(self.eps[None])
        if mixture is None:
            return xp.concat([xp.constant(self.moments), eps])
        found, start = [], 0
        for width, classes in self.parts:
            own = xp.constant(self.moments[:, start : start + width])
            found.append(own if classes is None else classes.mixture(mixture))
            start += width
        return xp.concat([xp.concat(found, axis=1), eps])


# --- state ---------------------------------------------------------------------------------------


def initial_state(source: Source, window: int) -> dict[str, NDArray[Any]]:
    """The state of a new stream, by tensor name."""
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
        "rest": np.array(False),  # whether the last batch was answered at rest, with these maps
        "rest.maps": np.zeros((2, D), np.float32),
        "rest.matrices": squares,
    }


def _initialised(
    state: Mapping[str, GraphArray], initial: Mapping[str, NDArray[Any]]
) -> dict[str, GraphArray]:
    """Replace the zeros before the first batch by the initial values."""
    is_first = state["batches"].equals(0)
    return {
        name: xp.where(is_first, initial[name], each) if initial[name].any() else each
        for name, each in state.items()
    }


def _compared_widths(source: Source) -> list[int]:
    """Widths of the sites where recent samples are compared with the past."""
    return list(source.widths[: math.ceil(layer_passes.CHANGE_SITES * len(source.widths))])


def _parts(state: Mapping[str, GraphArray], name: str) -> dict[str, GraphArray]:
    """Select the state tensors with a prefix, which is stripped."""
    prefix = f"{name}."
    return {n.removeprefix(prefix): each for n, each in state.items() if n.startswith(prefix)}


# --- one batch -----------------------------------------------------------------------------------


class Carry(NamedTuple):
    """Loop variables: carried from pass to pass, and finally turned into the answer."""

    phase: GraphArray  # () int64, of the next pass
    rested: GraphArray  # (), whether the batch was answered at rest
    kept: GraphArray  # (n,), which samples could be images
    fresh: GraphArray  # (), whether to discard the past: another shift, or a doubt was settled
    frozen: GraphArray  # (k, C) frozen logits, once `has_frozen`
    has_frozen: GraphArray  # ()
    scored: GraphArray  # (k, C) aligned logits: of shallow layers, or those behind `scores`
    scores: GraphArray  # (k, C), aligned logits corrected for the classes of the stream
    has_scores: GraphArray  # ()
    settled: GraphArray  # (), whether the scores come from maps of the past alone
    failed: GraphArray  # (), whether aligned logits were not finite, or no sample was plausible
    others: GraphArray  # (m, C) frozen logits of implausible samples
    rows: GraphArray  # () int64, rows done so far by a pass in pieces
    logits: GraphArray  # (rows, C), of those rows
    features: GraphArray  # (rows, d), of those rows
    given: GraphArray  # (2, D), scales and shifts from the past
    matrices: GraphArray  # (sum of c^2,), of full maps
    moments: GraphArray  # (2, D), of the batch in the last aligned pass
    covariances: GraphArray  # (sum of c^2,), of the batch in the same pass
    mixture: GraphArray  # (C,), behind the merged moments
    labels: LabelGraph  # after observing the batch

    @classmethod
    def of(cls, source: GraphArray, arrays: Sequence[GraphArray]) -> Self:
        """Restore the loop variables from `arrays()`, with the source's prior."""
        own = len(cls._fields) - 1
        return cls._make([*arrays[:own], LabelGraph.of(source, arrays[own:])])

    def arrays(self) -> list[GraphArray]:
        """Flatten the loop variables."""
        return [*self[:-1], *self.labels.parts()]


def _measures(is_phase: Mapping[Phase, GraphArray]) -> GraphArray:  # ()
    """Whether a pass measures its sites."""
    return ~(is_phase[Phase.REST] | is_phase[Phase.CHECK])


class _Kept:
    """The plausible samples of a batch, the only ones that are aligned and measured."""

    def __init__(
        self, images: GraphArray, kept: GraphArray, state: Mapping[str, GraphArray]
    ) -> None:
        self._images, self.all, self.none = images, kept.all(), ~kept.any()
        # Passes need at least one row: if no sample is plausible, use the first.
        self._rows = kept | (self.none & xp.arange(xp.length(images)).equals(0))
        self.n = self._rows.astype(np.int64).sum()
        self.samples = self.n.astype(np.float64)
        self._past_count = state["past.count"]

    def past(self, memory: int) -> GraphArray:  # ()
        """Weight of the past, in samples, once the batch is added."""
        return xp.minimum(self._past_count, xp.maximum(memory - self.samples, 0.0))

    def __getitem__(self, rows: slice) -> GraphArray:
        """Slice the plausible images, without a copy if all are plausible."""
        return xp.choose_one(
            self.all,
            lambda: self._images[rows],
            lambda: xp.selected(self._images, self._rows)[rows],
        )


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
        self._pi_s = xp.constant(source.prior)
        self._labels = LabelGraph.of(self._pi_s, _parts(state, "labels").values())
        self._schedule = ScheduleGraph(state["schedule"], settings.every, settings.window)
        self._monitor = MonitorGraph(**_parts(state, "monitor"))
        self._in_doubt = self._labels.is_kind("doubted")
        self._in_runs = self._labels.is_kind("runs")
        self._shuffled = ~(self._in_runs | self._in_doubt)
        self._may_rest = self._is_resting()
        stats, rows, count = (state[name] for name in CERTIFICATE)
        certificate = CertificateGraph(stats, rows, count, settings.window)
        # After a rest, the next comparison sees another part of the stream.
        self._certificate = certificate.restart(self._may_rest)
        enough = state["past.count"] >= float(layer_transport.ENOUGH_PAST)
        same = is_reference(state["mixture"], self._pi_s)
        self._uses_full_maps = (self._may_rest | (enough & self._schedule.accepted)) & same
        self._has_rest_maps = self._may_rest & state["rest"]  # from an earlier batch of this rest

    def _is_resting(self) -> GraphArray:  # ()
        """Whether the stream is at rest, so that constant maps answer a batch that looks usual."""
        memory = self._settings.memory
        if not memory:
            return xp.constant(False)
        is_full = self._is_full(xp.length(self._images).astype(np.float64))
        stands = self._schedule.accepted & self._schedule.skips
        return self._shuffled & self._monitor.is_ready & stands & is_full

    def _is_full(self, samples: GraphArray) -> GraphArray:  # () -> ()
        """Whether the memory is full after this many more samples."""
        return self._state["past.count"] + samples >= float(self._settings.memory)

    def answer(self) -> dict[str, GraphArray]:
        """Compute all outputs of the graph."""
        pieces = xp.length(self._images) / max(1, self._pieces.rows) + 1  # integers: an upper bound
        passed = xp.repeat(2 * pieces + PASSES, self._start().arrays(), self._pass)
        found = Carry.of(self._pi_s, passed)
        compares = found.has_scores & found.has_frozen
        certificate = self._certificate
        unmeasured = xp.where(found.failed & ~found.rested, xp.constant(math.inf), math.nan)
        names = [name for name in self._state if name.startswith("frozen_labels.")]
        ratio, *measured = xp.choose(
            compares,
            lambda: self._comparison(found),
            lambda: [unmeasured, *(self._state[name] for name in names), *certificate.parts],
        )
        names += CERTIFICATE
        following = dict(zip(names, measured, strict=True))
        fits = compares & (ratio <= self._settings.tau)
        accepted = fits | found.rested
        none = _Kept(self._images, found.kept, self._state).none
        reason = xp.where(none, reason_code("implausible"), reason_code("numerical"))
        reason = xp.where(
            compares, xp.where(fits, reason_code("accepted"), reason_code("ratio")), reason
        )
        reason = xp.where(found.rested, reason_code("rest"), reason)
        after = self._next_state(found, fits, following)
        scores = xp.choose_one(accepted, lambda: found.scores, lambda: found.frozen)
        scores = xp.choose_one(
            found.rested,
            lambda: scores,
            lambda: self._in_order(scores, found.others, found.kept),
        )
        return {
            "probabilities": xp.softmax(scores),
            "labels": scores.argmax(1),
            "accepted": accepted,
            "ratio": ratio.astype(np.float32),
            "reason": reason,
            **{f"{NEXT}{name}": after[name] for name in self._state},
        }

    def _comparison(self, found: Carry) -> list[GraphArray]:
        """Compare aligned and frozen answers; return ratio, frozen labels and certificate."""
        answered = found.labels

        def in_runs() -> list[GraphArray]:
            certificate, errors = self._certificate.update(found.scores, found.frozen)
            return [errors, xp.constant(math.nan) + 0.0, *certificate.parts]  # norms are unused

        def shuffled() -> list[GraphArray]:
            certificate, errors, norms = self._certificate.update_shuffled(
                found.scored, found.frozen, answered.correction
            )
            return [errors, norms, *certificate.parts]

        errors, norms, *certificate = xp.choose(answered.is_kind("runs"), in_runs, shuffled)
        labels = LabelGraph.of(self._pi_s, _parts(self._state, "frozen_labels").values())

        def observed() -> list[GraphArray]:
            p = xp.softmax(found.frozen.astype(np.float64))
            return labels.observe(p)[0].advance(p).parts()

        after = xp.choose(xp.is_finite(found.frozen), observed, labels.parts)
        frozen = LabelGraph.of(self._pi_s, after)
        ratio = gating_ratio(errors, norms, answered.is_kind("source"), frozen.is_kind("source"))
        return [ratio, *after, *certificate]

    def _next_state(
        self,
        found: Carry,
        fits: GraphArray,
        following: Mapping[str, GraphArray],  # frozen labels and certificate after the comparison
    ) -> dict[str, GraphArray]:
        """The state after a batch; a failed batch does not change what the stream has learnt."""
        batch = _Kept(self._images, found.kept, self._state)
        compares = found.has_scores & found.has_frozen
        rested = self._schedule.skipped(xp.length(self._images)).state
        unmeasured = xp.where(found.rested, rested, self._schedule.state)
        compared = self._schedule.compared(batch.n, fits, self._may_rest & ~found.rested)
        schedule = xp.where(compares, compared.state, unmeasured)
        kept = xp.where(found.fresh, 0.0, batch.past(self._settings.memory))
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
        chosen = xp.choose(
            found.has_scores,
            lambda: list(joined.values()),
            lambda: [self._state[name] for name in joined],
        )
        return {
            **dict(zip(joined, chosen, strict=True)),
            "batches": self._state["batches"] + 1,
            **following,
            "schedule": schedule,
            **{f"monitor.{name}": each for name, each in self._next_monitor(found).items()},
            "rest": found.rested,
            "rest.maps": xp.where(found.rested, found.given, 0.0),
            "rest.matrices": xp.where(found.rested, found.matrices, 0.0),
        }

    def _next_monitor(self, found: Carry) -> dict[str, GraphArray]:
        """The output monitor after a batch."""
        before = self._monitor.begin(self._may_rest & ~found.rested)
        before = before.reset(found.has_scores & found.fresh)
        parts = before.parts()
        learns = found.has_scores & found.settled & self._shuffled
        outputs = found.features, found.scores

        def unlearnt() -> list[GraphArray]:
            return xp.choose(
                found.rested,
                lambda: list(before.wait(*outputs).parts().values()),
                lambda: list(parts.values()),
            )

        after = xp.choose(learns, lambda: list(before.learn(*outputs).parts().values()), unlearnt)
        return dict(zip(parts, after, strict=True))

    # --- passes ---

    def _start(self) -> Carry:
        """Loop variables before the first pass."""
        C, d, D = len(self._source.prior), self._source.features, self._source.moments.shape[1]
        none = xp.minimum(xp.length(self._images), 0)  # a constant would fix the size in all passes
        nothing = xp.filled(0.0, [none, C], np.float32)
        no = xp.constant(False)
        given, matrices = xp.choose(
            self._has_rest_maps,
            lambda: [self._state["rest.maps"], self._state["rest.matrices"]],
            self._maps_of_past,
        )
        return Carry(
            phase=xp.where(self._may_rest, xp.constant(Phase.REST), Phase.CHECK),
            rested=no,
            kept=xp.filled(1.0, [xp.length(self._images)], np.float32) > 0.0,
            fresh=no,
            frozen=nothing,
            has_frozen=no,
            scored=nothing,
            scores=nothing,
            has_scores=no,
            settled=no,
            failed=no,
            others=nothing,
            rows=xp.constant(0),
            logits=nothing,
            features=xp.filled(0.0, [none, d], np.float32),
            given=given,
            matrices=matrices,
            moments=xp.constant(np.zeros((2, D), np.float32)),
            covariances=xp.constant(np.zeros(self._squares, np.float32)),
            mixture=self._state["mixture"],
            labels=self._labels,
        )

    def _first_phase(self, batch: _Kept) -> GraphArray:  # ()
        """Start with a settled pass if the past is long and trusted, else with a shallow one."""
        enough = xp.maximum(2.0 * batch.samples, float(layer_transport.ENOUGH_PAST))
        settled = (batch.past(self._settings.memory) >= enough) & self._schedule.accepted
        full_runs = self._in_runs & self._is_full(batch.samples)
        settled = settled & (self._shuffled | full_runs)
        return xp.where(settled, xp.constant(Phase.SETTLED), Phase.SHALLOW)

    def _pass(self, *carried: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        """Run the twin once and decide the next phase."""
        before = Carry.of(self._pi_s, carried)
        is_phase = {phase: before.phase.equals(phase) for phase in Phase}
        kept = xp.choose_one(
            is_phase[Phase.CHECK], lambda: self._is_plausible(self._images), lambda: before.kept
        )
        before, batch = before._replace(kept=kept), _Kept(self._images, kept, self._state)
        current, has_more = self._forward(before, is_phase, batch)
        found, phase = self._conclude(before, current, is_phase, batch, has_more)
        phase = xp.where(has_more, before.phase, phase)
        return ~phase.equals(Phase.DONE), found._replace(phase=phase).arrays()

    def _forward(
        self, before: Carry, is_phase: Mapping[Phase, GraphArray], batch: _Kept
    ) -> tuple[Carry, GraphArray]:
        """Run the twin and collect its outputs; also return whether more pieces follow."""
        rests, measures = is_phase[Phase.REST], _measures(is_phase)
        has_others = is_phase[Phase.CHECK] & ~batch.all
        shows_frozen = measures & ~before.has_frozen
        n = xp.where(rests, xp.length(self._images), batch.n)
        in_pieces = rests | is_phase[Phase.SETTLED]
        rows = xp.where(in_pieces, xp.minimum(before.rows + self._at_once(rests), n), 0)
        given, logits_frozen, *outputs = self._call_twin(
            before, batch, is_phase, shows_frozen, has_others, rows
        )
        logits, features, moments, covariances = xp.choose(
            in_pieces, lambda: self._appended(before, rests, rows, *outputs), lambda: outputs
        )
        frozen = xp.choose_one(shows_frozen, lambda: logits_frozen, lambda: before.frozen)
        others = xp.choose_one(has_others, lambda: logits_frozen, lambda: before.others)
        has_more = in_pieces & (rows < n)
        return before._replace(
            frozen=frozen,
            has_frozen=before.has_frozen | shows_frozen,
            others=others,
            rows=xp.where(has_more, rows, 0),
            logits=logits,
            features=features,
            given=xp.where(in_pieces, given, before.given),
            moments=xp.where(measures, moments, before.moments),
            covariances=xp.where(measures, covariances, before.covariances),
        ), has_more

    def _conclude(
        self,
        before: Carry,
        current: Carry,
        is_phase: Mapping[Phase, GraphArray],
        batch: _Kept,
        has_more: GraphArray,
    ) -> tuple[Carry, GraphArray]:
        """Derive the answer, if this pass completes one, and the next phase."""
        settled, whole, checks = (is_phase[p] for p in (Phase.SETTLED, Phase.WHOLE, Phase.CHECK))
        fresh, alone = (is_phase[p] for p in (Phase.FRESH, Phase.ALONE))
        measured = _measures(is_phase) & ~has_more
        finite = measured & xp.is_finite(current.logits)
        first = settled | is_phase[Phase.SHALLOW]
        change = self._change(current.moments, batch.samples)
        changed = finite & first & (change > layer_transport.CHANGED)
        observes = finite & ~whole & ~changed
        labels, mixture = self._updated_labels(observes, current.logits, before, batch, alone)
        # If the batch looks the same without the past, what was seen with it stands.
        same = labels.kind.equals(before.labels.kind)
        confirmed = observes & alone & (labels.is_kind("runs") | same)
        outdated = observes & alone & ~confirmed
        mixture, *parts = xp.choose(
            confirmed,
            lambda: [before.mixture, *before.labels.parts()],
            lambda: [mixture, *labels.parts()],
        )
        labels = LabelGraph.of(self._pi_s, parts)
        turned = observes & ~labels.kind.equals(self._labels.kind)
        decided = turned & self._in_doubt & ~labels.is_kind("source")
        can_tell = batch.samples >= float(layer_transport.CONFIRMS)
        can_tell = can_tell & (self._state["past.count"] > 0.0)
        unshuffled = labels.is_kind("runs") | (labels.is_kind("doubted") & ~self._in_runs)
        suspect = change > layer_transport.SUSPECT
        turns = self._shuffled & labels.is_kind("runs")
        asked = turned & unshuffled & ((turns & can_tell) | suspect)
        asked = asked & ~(settled | fresh | alone)
        turned = turned & settled
        ends = finite & (whole | (settled & ~changed & ~turned))
        rested, scored, scores, last = self._answered(
            is_phase[Phase.REST] & ~has_more,
            ends,
            observes & ~settled & ~confirmed,
            current.logits,
            current.features,
            labels,
            before,
        )
        found = current._replace(
            rested=rested,
            fresh=before.fresh | changed | decided | outdated,
            scored=scored,
            scores=scores,
            has_scores=before.has_scores | ends,
            settled=before.settled | (ends & settled),
            failed=before.failed | (measured & ~finite) | (checks & batch.none),
            mixture=mixture,
            labels=replace(labels, chain=replace(labels.chain, last=last)),
        )
        return found, self._next_phase(found, is_phase, batch, changed, turned, asked)

    def _at_once(self, rests: GraphArray) -> GraphArray:  # ()
        """Rows per pass of a phase in pieces."""
        rows = self._pieces.rows
        if not rows:
            return xp.constant(LARGEST)
        return xp.where(rests, xp.constant(self._pieces.copies * rows), 2 * rows)

    def _answered(
        self,
        rests: GraphArray,  # (), whether the resting copies have processed all samples
        ends: GraphArray,  # (), whether these are the final logits of a measured batch
        is_first: GraphArray,  # (), whether these are from shallow layers, the answer if in doubt
        logits: GraphArray,
        features: GraphArray,
        labels: LabelGraph,
        before: Carry,
    ) -> list[GraphArray]:
        """Whether the batch was answered at rest; logits, scores, posterior of the last label."""

        def rested() -> list[GraphArray]:
            scores = logits + self._labels.correction.astype(np.float32)
            usual = self._monitor.is_usual(features, scores)
            return [usual, logits, scores, labels.chain.last]

        def measured() -> list[GraphArray]:
            answers = is_first | (ends & ~labels.is_kind("doubted"))
            kept = xp.choose_one(answers, lambda: logits, lambda: before.scored)
            return xp.choose(
                ends,
                lambda: [before.rested, kept, *self._final_scores(kept, labels)],
                lambda: [before.rested, kept, before.scores, labels.chain.last],
            )

        return xp.choose(rests, rested, measured)

    def _next_phase(
        self,
        found: Carry,
        is_phase: Mapping[Phase, GraphArray],
        batch: _Kept,
        changed: GraphArray,
        turned: GraphArray,
        asked: GraphArray,  # (), whether the batch alone must confirm that it is not shuffled
    ) -> GraphArray:  # ()
        """The phase after this pass."""
        following = xp.where(is_phase[Phase.CHECK], self._first_phase(batch), Phase.WHOLE)
        following = xp.where(turned, Phase.CONFIRM, following)
        following = xp.where(asked, Phase.ALONE, following)
        following = xp.where(changed, Phase.FRESH, following)
        answered = found.has_scores | found.failed
        following = xp.where(answered, Phase.DONE, following)
        after_rest = xp.where(found.rested, xp.constant(Phase.DONE), Phase.CHECK)
        return xp.where(is_phase[Phase.REST], after_rest, following)

    def _maps_of_past(self) -> list[GraphArray]:  # (2, D), (sum of c^2,)
        """Scales, shifts and matrices from the past, for a settled pass with full maps.

        They are loop variables because spox moves values that only the passes use into the body of
        the Loop, and matrix roots are too slow to compute in every pass.
        """
        target, by_past = self._to_reference(self._source.reference(None))
        shift, matrices = self._full_maps(self._uses_full_maps, target, by_past)
        return [xp.stack([by_past[0], shift]), matrices]

    def _to_reference(self, reference: GraphArray) -> tuple[GraphArray, GraphArray]:  # (2, D) each
        """Shrink the past towards a reference; return it and its diagonal map."""
        count = self._state["past.count"]
        own = (count / (count + self._settings.prior)).astype(np.float32)
        target = moment_graph.blended(self._state["past"], reference[:2], own)
        return target, moment_graph.to_source(target, reference)

    def _appended(
        self,
        before: Carry,
        rests: GraphArray,
        rows: GraphArray,  # () int64, including this piece
        logits: GraphArray,  # (m, C)
        features: GraphArray,  # (m, d)
        moments: GraphArray,  # (2, D)
        covariances: GraphArray,  # (sum of c^2,)
    ) -> list[GraphArray]:  # (rows, C), (rows, d), (2, D), (sum of c^2,)
        """Append the outputs of a piece and merge its moments, which a rest does not have."""
        joined = [
            xp.concat([old[: before.rows], new])
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

        return [*joined, *xp.choose(rests, lambda: [before.moments, before.covariances], merged)]

    def _call_twin(
        self,
        before: Carry,
        batch: _Kept,
        is_phase: Mapping[Phase, GraphArray],
        shows_frozen: GraphArray,
        has_others: GraphArray,
        rows: GraphArray,  # () int64, rows done after this piece
    ) -> list[GraphArray]:  # (2, D), then (n or less, C) twice, (.., d), (2, D), (sum of c^2,)
        """Call the twin; return given maps, frozen and aligned logits, features and moments.

        Idle copies get one row or none.
        """
        settled, whole, rests = (is_phase[p] for p in (Phase.SETTLED, Phase.WHOLE, Phase.REST))
        by_past = settled | rests
        mixture = xp.where(whole, before.mixture, self._state["mixture"])
        # Maps from the past are known after the first piece, or if a rest ended in this batch.
        known = self._has_rest_maps | self._uses_full_maps
        known = known | (by_past & (before.rows > 0)) | (settled & self._may_rest)
        mixed = ((by_past & ~known) | whole) & ~is_reference(mixture, self._pi_s)
        reference = xp.choose_one(  # in a branch, because the class moments are large
            mixed, lambda: self._source.reference(mixture), lambda: self._source.reference(None)
        )
        _, found = self._to_reference(reference)
        D, sites = self._source.moments.shape[1], len(self._source.widths)
        untouched = xp.constant(np.stack([np.ones(D), np.zeros(D)]), np.float32)
        shallow = xp.constant(np.arange(sites) < math.ceil(layer_transport.FIRST_PASS * sites))
        without_past = before.fresh | is_phase[Phase.ALONE]
        kept = xp.where(without_past, 0.0, batch.past(self._settings.memory))
        behind = kept + batch.samples
        shares = xp.stack([batch.samples / behind, behind / (behind + self._settings.prior)])
        given = xp.where(by_past, xp.where(known, before.given, found), untouched)
        outputs = call(
            NETWORK,
            self._twin,
            self._frozen_rows(batch, before.kept, shows_frozen, has_others),
            self._aligned_rows(batch, is_phase, before.rows, rows),
            given,
            (shallow | whole) & ~settled,  # caster.measured
            self._state["past"],
            reference,
            shares.astype(np.float32),
            settled & self._uses_full_maps,
            self._resting_matrices(rests, given, before.matrices),
            self._resting_rows(rests, before.rows, rows),
        )
        names = [output.name for output in self._twin.graph.output]
        named = dict(zip(names[2:], outputs[2:], strict=True))
        parts = ("logits", "features")
        logits, features = xp.choose(
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
        """Matrices of the full sites; diagonal ones in a rest without full maps."""
        if not self._source.full:
            return matrices

        def diagonal() -> GraphArray:
            scales = (given[0][site.channels].reshape(-1, 1) for site in self._source.full)
            each = (
                s * xp.constant(np.eye(f.width), np.float32)
                for s, f in zip(scales, self._source.full, strict=True)
            )
            return xp.concat([matrix.reshape(-1) for matrix in each])

        return xp.choose_one(rests & ~self._uses_full_maps, diagonal, lambda: matrices)

    def _full_maps(
        self,
        full: GraphArray,
        target: GraphArray,  # (2, D), shrunk
        by_past: GraphArray,  # (2, D), the diagonal map
    ) -> list[GraphArray]:  # (D,), (sum of c^2,)
        """The shifts of all sites and the matrices of full sites, if `full`."""
        sites, zeros = self._source.full, xp.constant(np.zeros(self._squares, np.float32))
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
            joined = xp.concat([A.reshape(-1) for A in maps]).astype(np.float32)
            return [with_shifts(by_past[1], sites, shifts), joined]

        return xp.choose(full, found, lambda: [by_past[1], zeros])

    def _aligned_rows(
        self,
        batch: _Kept,
        is_phase: Mapping[Phase, GraphArray],
        start: GraphArray,
        stop: GraphArray,
    ) -> GraphArray:
        """Rows for the aligned copy: a piece of a settled pass, or all; few if it is idle."""
        settled = is_phase[Phase.SETTLED]
        end = xp.where(_measures(is_phase), batch.n, self._idle_rows)
        end = xp.where(settled, stop, end)
        return batch[xp.where(settled, start, 0) : end]

    def _resting_rows(self, rests: GraphArray, start: GraphArray, stop: GraphArray) -> GraphArray:
        """Rows for the resting copies, including implausible ones."""
        return self._images[xp.where(rests, start, 0) : xp.where(rests, stop, self._idle_rows)]

    def _frozen_rows(
        self, batch: _Kept, kept: GraphArray, wanted: GraphArray, others: GraphArray
    ) -> GraphArray:
        """Rows for the frozen copy: plausible ones or, once they are found, implausible ones."""
        return xp.choose_one(
            others,
            lambda: xp.selected(self._images, ~kept),
            lambda: batch[: xp.where(wanted, batch.n, self._idle_rows)],
        )

    def _in_order(
        self, scores: GraphArray, others: GraphArray, kept: GraphArray
    ) -> GraphArray:  # (n, C)
        """Interleave the scores of plausible and other samples in their original order.

        Implausible samples with logits that are not finite get scores of 0.
        """
        broken = xp.is_nan((others - others).sum(1, keepdims=True))
        both = xp.concat([scores, xp.where(~broken, others, 0.0)])
        own = kept.astype(np.int64)
        at = xp.where(kept, xp.running_sum(own), xp.length(scores) + xp.running_sum(1 - own)) - 1
        return xp.taken(both, at)

    def _of_classes(self, logits: GraphArray) -> GraphArray:  # (n, any) -> (n, C)
        """Select the logits of the state's classes."""
        return xp.taken(logits, xp.constant(np.array(self._columns)), axis=1)

    def _recent(
        self, moments: GraphArray, fresh: GraphArray, samples: GraphArray
    ) -> tuple[GraphArray, GraphArray]:
        """Moments of recent samples including the batch, at the sites that are compared."""
        known = self._state["recent.count"]
        room = xp.maximum(layer_passes.CHANGE_WINDOW - samples, 0.0)
        kept = xp.where(fresh, 0.0, xp.minimum(known, room))
        count = kept + samples
        share = (samples / count).astype(np.float32)
        shallow = moments[:, : sum(_compared_widths(self._source))]
        return moment_graph.merged(self._state["recent"], shallow, share), count

    def _change(self, moments: GraphArray, samples: GraphArray) -> GraphArray:  # (2, D) -> ()
        """Mean divergence of recent samples from the past; 0 while the past has no others."""
        widths = _compared_widths(self._source)
        recent, count = self._recent(moments, xp.constant(False), samples)
        found = moment_graph.change(recent, self._state["past"][:, : sum(widths)], widths)
        return xp.where(count < self._state["past.count"], found, 0.0)

    def _updated_labels(
        self,
        observes: GraphArray,
        logits: GraphArray,
        before: Carry,
        batch: _Kept,
        alone: GraphArray,  # (), whether the pass ignored the past
    ) -> tuple[LabelGraph, GraphArray]:
        """Labels after observing a batch, and the class mixture behind the merged moments."""
        kept = xp.where(before.fresh | alone, 0.0, batch.past(self._settings.memory))

        def observed() -> list[GraphArray]:
            p = xp.softmax(logits.astype(np.float64))
            initial = initial_labels(self._source.prior).values()
            parts = [  # an array of zeros would be stored whole
                xp.where(alone, value if value.any() else value.dtype.type(0), each)
                for value, each in zip(initial, self._labels.parts(), strict=True)
            ]
            seen, mixture = LabelGraph.of(self._pi_s, parts).observe(p)
            known = seen.is_kind("runs") | seen.is_kind("prior")
            decided = self._in_doubt & known  # the past assumed the source's mixture, so drop it
            past = xp.where(decided, 0.0, kept)
            merged = merged_mixture(self._state["mixture"], past, mixture, batch.samples)
            return [merged, *seen.parts()]

        mixture, *parts = xp.choose(
            observes, observed, lambda: [before.mixture, *before.labels.parts()]
        )
        return LabelGraph.of(self._pi_s, parts), mixture

    def _final_scores(self, logits: GraphArray, labels: LabelGraph) -> list[GraphArray]:
        """The scores that answer a batch, and the posterior of its last label."""
        p = xp.softmax(logits.astype(np.float64))

        def by_labels() -> GraphArray:
            answers = xp.maximum(labels.answers(p), layer_transport.MIN_PROBABILITY)
            return xp.log(answers).astype(np.float32)

        unchanged = labels.is_kind("source") | labels.is_kind("doubted")
        scores = xp.choose_one(unchanged, lambda: logits, by_labels)
        return [scores, labels.advance(p).chain.last]


def compile_layers(
    twin: ModelProto,
    source: Source,
    columns: Sequence[int],  # of the state's classes among the logits
    settings: LayerSettings,
    is_plausible: PlausibilityGraph,
    pieces: Pieces,  # of the twin's resting copies
    idle_rows: int,  # rows for a copy in a pass that does not need it
) -> ModelProto:
    """Build the graph that adapts to one batch of a stream.

    Inputs: the images, under the model's own name, and the state, which starts as zeros. Outputs:
    `probabilities` (n, C), `labels` (n,) as indices of the state's classes, `accepted`, `ratio`,
    `reason` as an index into `REASONS`, and the next state.
    """
    from onnx.helper import tensor_dtype_to_np_dtype

    images = twin.graph.input[0]
    kind = images.type.tensor_type
    shape = tuple(size.dim_value or None for size in kind.shape.dim)
    initial = initial_state(source, settings.window)
    with xp.under_construction():
        inputs = {
            images.name: argument(Tensor(tensor_dtype_to_np_dtype(kind.elem_type), shape)),
            **{name: argument(Tensor(each.dtype, each.shape)) for name, each in initial.items()},
        }
        state = _initialised({name: GraphArray(inputs[name]) for name in initial}, initial)
        batch = GraphArray(inputs[images.name])
        step = _Step(twin, source, columns, settings, is_plausible, batch, state, idle_rows, pieces)
        # A graph must declare the shapes of its outputs, and spox loses them in branches.
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
    """Name the batch size `n` in all inputs and outputs, and name all other dynamic sizes."""
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                size.dim_param = f"size{axis}" if axis else "n"
