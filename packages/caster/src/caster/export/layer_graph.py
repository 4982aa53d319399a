"""Compile mixture transport into one ONNX graph.

The graph takes a batch and the state of a stream, and returns an answer and the next state. It
follows `adapt.layer_transport`. Each pass through the network is one iteration of a Loop. The body
of the Loop is a state machine: `TRANSITIONS` states which pass follows which. The body contains the
twin (`models.onnx.twin`) together with its weights, because ONNX Runtime optimises a network only
if its weights are in the same (sub)graph. Copies of the network that a pass does not need get no
images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

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
MORE_THAN_ANY_BATCH = 2**62  # exceeds the number of rows of any batch
AT_REST = 32  # images that all copies of a resting network take together, at least


class Phase(IntEnum):
    """The purpose of a pass through the twin and, from `RESTED` on, the outcome of the batch."""

    REST = 0  # run the resting copies, with constant maps
    CHECK = 1  # run the frozen copy on samples that no image could have produced
    SETTLED = 2  # align all sites with maps from the past
    SHALLOW = 3  # align the first sites with past and batch, to find classes and changes of shift
    FRESH = 4  # the same without the past, which belongs to another shift
    CONFIRM = 5  # the same as `SHALLOW`, after a settled pass that suggested another kind of stream
    ALONE = 6  # the same without the past and its labels, which may be why samples look alike
    WHOLE = 7  # align all sites with the batch's mixture; in doubt, only to update the memory
    RESTED = 8  # answered by the resting copies
    ALIGNED_BY_PAST = 9  # answered by a settled pass, from which the monitor may learn
    ALIGNED = 10  # answered by a whole pass or, in doubt, by the shallow one before it
    FAILED = 11  # no sample could be an image, or aligned logits are not finite


Event = Literal[
    "more",  # pieces of the batch are left
    "unchanged",  # the outputs at rest look as they did before
    "implausible",  # no sample could be an image
    "settled",  # the past alone is enough to align the batch
    "not finite",  # logits are not
    "changed",  # the shift is another one
    "turned",  # the stream looks to be of another kind than before
    "must confirm",  # the batch alone must confirm that
    "otherwise",
]

# What follows a pass: the first event of its phase that occurred decides. `LayerTransport` asks in
# the same order: in `_answered` after `REST`, in `_answer_plausible` whether a sample is plausible,
# and in `_first_pass` and `_adapted` everything else, where `_NotFiniteError` stands for "not
# finite".
TRANSITIONS: tuple[tuple[Phase, Event, Phase], ...] = (
    (Phase.REST, "more", Phase.REST),
    (Phase.REST, "unchanged", Phase.RESTED),
    (Phase.REST, "otherwise", Phase.CHECK),
    (Phase.CHECK, "implausible", Phase.FAILED),
    (Phase.CHECK, "settled", Phase.SETTLED),
    (Phase.CHECK, "otherwise", Phase.SHALLOW),
    (Phase.SETTLED, "more", Phase.SETTLED),
    (Phase.SETTLED, "not finite", Phase.FAILED),
    (Phase.SETTLED, "changed", Phase.FRESH),
    (Phase.SETTLED, "turned", Phase.CONFIRM),
    (Phase.SETTLED, "otherwise", Phase.ALIGNED_BY_PAST),
    (Phase.SHALLOW, "not finite", Phase.FAILED),
    (Phase.SHALLOW, "changed", Phase.FRESH),
    (Phase.SHALLOW, "must confirm", Phase.ALONE),
    (Phase.SHALLOW, "otherwise", Phase.WHOLE),
    (Phase.FRESH, "not finite", Phase.FAILED),
    (Phase.FRESH, "otherwise", Phase.WHOLE),
    (Phase.CONFIRM, "not finite", Phase.FAILED),
    (Phase.CONFIRM, "must confirm", Phase.ALONE),
    (Phase.CONFIRM, "otherwise", Phase.WHOLE),
    (Phase.ALONE, "not finite", Phase.FAILED),
    (Phase.ALONE, "otherwise", Phase.WHOLE),
    (Phase.WHOLE, "not finite", Phase.FAILED),
    (Phase.WHOLE, "otherwise", Phase.ALIGNED),
)


def pieces_of(shape: Sequence[int | None]) -> Pieces:
    """Choose how a resting network splits a batch of images of this shape."""
    if None in shape:
        return Pieces()  # batches of images with a dynamic size are not split
    rows = max(1, AT_ONCE // math.prod(size or 1 for size in shape))
    return Pieces(math.ceil(AT_REST / rows), rows)


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """The parts of a graph that adapts to one batch of a stream."""

    twin: ModelProto
    source: Source
    columns: Sequence[int]  # of the state's classes among the logits
    settings: LayerSettings
    is_plausible: PlausibilityGraph
    pieces: Pieces  # of the twin's resting copies
    idle_rows: int  # rows for a copy in a pass that does not need it

    def compiled(self) -> ModelProto:
        """Build the graph.

        Inputs: the images, under the model's own name, and the state, which starts as zeros.
        Outputs: `probabilities` (n, C), `labels` (n,) as indices of the state's classes,
        `accepted`, `ratio`, `reason` as an index into `REASONS`, and the next state.
        """
        from onnx.helper import tensor_dtype_to_np_dtype

        images = self.twin.graph.input[0]
        kind = images.type.tensor_type
        shape = tuple(size.dim_value or None for size in kind.shape.dim)
        initial = initial_state(self.source, self.settings.window)
        with xp.under_construction():
            inputs = {
                images.name: argument(Tensor(tensor_dtype_to_np_dtype(kind.elem_type), shape)),
                **{name: argument(Tensor(v.dtype, v.shape)) for name, v in initial.items()},
            }
            state = _initialised({name: GraphArray(inputs[name]) for name in initial}, initial)
            step = _Step(self, GraphArray(inputs[images.name]), state)
            # A graph must declare the shapes of its outputs, and spox loses them in branches.
            shapes: dict[str, tuple[int, ...]] = {
                **{"probabilities": (-1, len(self.source.prior)), "labels": (-1,)},
                **{f"{NEXT}{name}": each.shape for name, each in initial.items()},
            }
            found = {n: each.reshape(*shapes.get(n, ())) for n, each in step.answer().items()}
            model = build(inputs, {name: each.var for name, each in found.items()})
        embed(model, {NETWORK: self.twin, FIRST_LAYERS: self.is_plausible.first_layers})
        _name_open_sizes(model)
        return model


def _name_open_sizes(model: ModelProto) -> None:
    """Name the batch size `n` in all inputs and outputs, and name all other dynamic sizes."""
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                size.dim_param = f"size{axis}" if axis else "n"


# --- source ---------------------------------------------------------------------------------------


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
            table = ClassTable.of(group, layer_passes.CLASS_PRIOR_SAMPLES) if has_classes else None
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

    phase: GraphArray  # () int64, of the next pass, or the outcome
    kept: GraphArray  # (n,), which samples could be images
    frozen: GraphArray  # (k, C) frozen logits of these, from the first measured pass
    others: GraphArray  # (m, C) frozen logits of all other samples
    rows: GraphArray  # () int64, rows done so far by a pass in pieces
    logits: GraphArray  # (rows or k, C), of these rows or those that answer the batch so far
    features: GraphArray  # (rows or k, d), of the last pass
    given: GraphArray  # (2, D), scales and shifts from the past
    matrices: GraphArray  # (sum of c^2,), of full maps
    moments: GraphArray  # (2, D), of the batch in the last pass
    covariances: GraphArray  # (sum of c^2,), of the batch in the same pass
    fresh: GraphArray  # (), whether the memory restarts: another shift, or a doubt was settled
    mixture: GraphArray  # (C,), of the batch, once its classes were observed
    labels: LabelGraph  # likewise

    @classmethod
    def of(cls, source: GraphArray, arrays: Sequence[GraphArray]) -> Self:
        """Restore the loop variables from `arrays()`, with the source's prior."""
        own = len(cls._fields) - 1
        return cls._make([*arrays[:own], LabelGraph.of(source, arrays[own:])])

    def arrays(self) -> list[GraphArray]:
        """Flatten the loop variables."""
        return [*self[:-1], *self.labels.parts()]


Phases = Mapping[Phase, GraphArray]  # whether a pass is of this phase


class _Kept:
    """The plausible samples of a batch, the only ones that are aligned and measured."""

    def __init__(
        self, images: GraphArray, kept: GraphArray, past_count: GraphArray, memory: int
    ) -> None:
        self.all, self.none = kept.all(), ~kept.any()
        # Passes need at least one row: if no sample is plausible, use the first.
        rows = kept | (self.none & xp.arange(xp.length(images)).equals(0))
        self._images, self._rows = images, rows
        self.n = rows.astype(np.int64).sum()
        self.samples = self.n.astype(np.float64)
        # Samples of the past that fit into the memory beside the batch:
        self.room = xp.minimum(past_count, xp.maximum(memory - self.samples, 0.0))

    def past(self, fresh: GraphArray) -> GraphArray:  # ()
        """Weight of the past, in samples, once the batch is added; 0 if `fresh`."""
        return xp.where(fresh, 0.0, self.room)

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
        self, parts: LayerGraph, images: GraphArray, state: Mapping[str, GraphArray]
    ) -> None:
        source, settings = parts.source, parts.settings
        self._twin, self._source, self._columns = parts.twin, source, parts.columns
        self._settings, self._state, self._is_plausible = settings, state, parts.is_plausible
        self._images, self._idle_rows, self._pieces = images, parts.idle_rows, parts.pieces
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
        batch = self._plausible(found.kept)
        rested, failed = (found.phase.equals(end) for end in (Phase.RESTED, Phase.FAILED))
        aligned = ~(rested | failed)
        scores = xp.choose_one(
            aligned, lambda: self._scores(found), lambda: self._resting_scores(found.logits)
        )
        labels = [name for name in self._state if name.startswith("frozen_labels.")]
        ratio, *compared = xp.choose(
            aligned,
            lambda: self._comparison(found, scores),
            lambda: [
                xp.where(failed, xp.constant(math.inf), math.nan),
                *(self._state[name] for name in labels),
                *self._certificate.parts,
            ],
        )
        fits = aligned & (ratio <= self._settings.tau)
        accepted = fits | rested
        gated = xp.choose_one(accepted, lambda: scores, lambda: found.frozen)
        answers = xp.choose_one(
            batch.all, lambda: gated, lambda: _in_order(gated, found.others, found.kept)
        )
        reason = xp.where(batch.none, reason_code("implausible"), reason_code("numerical"))
        reason = xp.where(aligned, reason_code("ratio"), reason)
        reason = xp.where(fits, reason_code("accepted"), reason)
        reason = xp.where(rested, reason_code("rest"), reason)
        after = {
            "batches": self._state["batches"] + 1,
            **self._next_memory(found, batch, aligned),
            **dict(zip([*labels, *CERTIFICATE], compared, strict=True)),
            "schedule": self._next_schedule(batch, aligned, fits, rested),
            **self._next_monitor(found, scores, aligned, rested),
            "rest": rested,
            "rest.maps": xp.where(rested, found.given, 0.0),
            "rest.matrices": xp.where(rested, found.matrices, 0.0),
        }
        return {
            "probabilities": xp.softmax(answers),
            "labels": answers.argmax(1),
            "accepted": accepted,
            "ratio": ratio.astype(np.float32),
            "reason": reason,
            **{f"{NEXT}{name}": after[name] for name in self._state},
        }

    def _plausible(self, kept: GraphArray) -> _Kept:
        return _Kept(self._images, kept, self._state["past.count"], self._settings.memory)

    # --- from pass to pass ---

    def _start(self) -> Carry:
        """Loop variables before the first pass."""
        C, d, D = len(self._source.prior), self._source.features, self._source.moments.shape[1]
        none = xp.minimum(xp.length(self._images), 0)  # a constant would fix the size in all passes
        nothing = xp.filled(0.0, [none, C], np.float32)
        given, matrices = xp.choose(
            self._has_rest_maps,
            lambda: [self._state["rest.maps"], self._state["rest.matrices"]],
            self._maps_of_past,
        )
        return Carry(
            phase=xp.where(self._may_rest, xp.constant(Phase.REST), Phase.CHECK),
            kept=xp.filled(1.0, [xp.length(self._images)], np.float32) > 0.0,
            frozen=nothing,
            others=nothing,
            rows=xp.constant(0),
            logits=nothing,
            features=xp.filled(0.0, [none, d], np.float32),
            given=given,
            matrices=matrices,
            moments=xp.constant(np.zeros((2, D), np.float32)),
            covariances=xp.constant(np.zeros(self._squares, np.float32)),
            fresh=xp.constant(False),
            mixture=self._state["mixture"],
            labels=self._labels,
        )

    def _pass(self, *carried: GraphArray) -> tuple[GraphArray, list[GraphArray]]:
        """Run the twin once; return whether a pass follows, and what it needs."""
        before = Carry.of(self._pi_s, carried)
        now = {phase: before.phase.equals(phase) for phase in Phase if phase < Phase.RESTED}
        kept = xp.choose_one(
            now[Phase.CHECK], lambda: self._is_plausible(self._images), lambda: before.kept
        )
        batch = self._plausible(kept)
        found, more = self._forward(before._replace(kept=kept), now, batch)
        finite = xp.is_finite(found.logits)
        labels, mixture, stands = self._seen(found, now, finite & ~more)
        change = self._change(found.moments, batch.samples)
        events: dict[Event, GraphArray] = {
            "more": more,
            "unchanged": self._is_unchanged(found, now[Phase.REST] & ~more),
            "implausible": batch.none,
            "settled": self._is_settled(batch),
            "not finite": ~finite,
            "changed": change > layer_transport.CHANGED,
            "turned": ~labels.kind.equals(self._labels.kind),
            "must confirm": self._must_confirm(labels, change, batch.samples),
            "otherwise": xp.constant(True),
        }
        phase = _next_phase(now, events)
        outdated = phase.equals(Phase.FRESH) | (now[Phase.ALONE] & ~stands)
        # The past of a doubt was aligned with the wrong mixture, the source's.
        decided = self._in_doubt & (labels.is_kind("runs") | labels.is_kind("prior"))
        # In doubt, the shallow pass is the answer.
        keeps_answer = stands | (now[Phase.WHOLE] & labels.is_kind("doubted"))
        found = found._replace(
            phase=phase,
            logits=xp.choose_one(keeps_answer, lambda: before.logits, lambda: found.logits),
            fresh=before.fresh | outdated | decided,
            mixture=mixture,
            labels=labels,
        )
        return phase < Phase.RESTED, found.arrays()

    def _seen(
        self, found: Carry, now: Phases, complete: GraphArray
    ) -> tuple[LabelGraph, GraphArray, GraphArray]:  # labels, (C,), ()
        """The labels after observing a pass, and the class mixture of the batch.

        Also returns whether earlier ones stand, because the batch looks the same without the past.
        """
        alone = now[Phase.ALONE]
        observes = complete & ~(now[Phase.REST] | now[Phase.CHECK] | now[Phase.WHOLE])

        def observed() -> list[GraphArray]:
            initial = initial_labels(self._source.prior).values()
            parts = [  # an array of zeros would be stored whole
                xp.where(alone, value if value.any() else value.dtype.type(0), each)
                for value, each in zip(initial, self._labels.parts(), strict=True)
            ]
            seen, mixture = LabelGraph.of(self._pi_s, parts).observe(_probabilities(found.logits))
            same = seen.is_kind("runs") | seen.kind.equals(found.labels.kind)
            return [alone & same, mixture, *seen.parts()]

        earlier = [found.mixture, *found.labels.parts()]
        stands, *new = xp.choose(observes, observed, lambda: [xp.constant(False), *earlier])
        mixture, *parts = xp.choose(stands, lambda: earlier, lambda: new)
        return LabelGraph.of(self._pi_s, parts), mixture, stands

    def _is_unchanged(self, found: Carry, rested: GraphArray) -> GraphArray:  # ()
        """Whether the outputs look unchanged, if all of the batch has `rested`."""
        return xp.choose_one(
            rested,
            lambda: self._monitor.is_unchanged(found.features, self._resting_scores(found.logits)),
            lambda: xp.constant(False),
        )

    def _is_settled(self, batch: _Kept) -> GraphArray:  # ()
        """Whether the past is trusted, and enough to align a batch without its own statistics."""
        enough = xp.maximum(2.0 * batch.samples, float(layer_transport.ENOUGH_PAST))
        full_runs = self._in_runs & self._is_full(batch.samples)
        return self._schedule.accepted & (batch.room >= enough) & (self._shuffled | full_runs)

    def _must_confirm(
        self, now: LabelGraph, change: GraphArray, samples: GraphArray
    ) -> GraphArray:  # ()
        """Whether the batch alone, without the past, must confirm that it is not shuffled."""
        runs = now.is_kind("runs")
        stays = self._in_runs | now.kind.equals(self._labels.kind)
        can_tell = samples >= float(layer_transport.CONFIRMS)
        can_tell = can_tell & (self._state["past.count"] > 0.0)
        reason = (self._shuffled & runs & can_tell) | (change > layer_transport.SUSPECT)
        return (runs | now.is_kind("doubted")) & ~stays & reason

    def _change(self, moments: GraphArray, samples: GraphArray) -> GraphArray:  # (2, D) -> ()
        """Mean divergence of recent samples from the past; 0 while the past has no others."""
        widths = _compared_widths(self._source)
        recent, count = self._recent(moments, xp.constant(False), samples)
        found = moment_graph.change(recent, self._state["past"][:, : sum(widths)], widths)
        return xp.where(count < self._state["past.count"], found, 0.0)

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

    # --- one pass ---

    def _forward(self, before: Carry, now: Phases, batch: _Kept) -> tuple[Carry, GraphArray]:
        """Run the twin and collect its outputs; also return whether pieces of the batch are left.

        The frozen copy runs in the first pass that aligns, beside it. Idle copies get few rows.
        """
        rests, settled, whole = (now[p] for p in (Phase.REST, Phase.SETTLED, Phase.WHOLE))
        measures = ~(rests | now[Phase.CHECK])
        has_others = now[Phase.CHECK] & ~batch.all
        is_first = now[Phase.SHALLOW] | (settled & before.rows.equals(0))
        n = xp.where(rests, xp.length(self._images), batch.n)
        stop = xp.minimum(before.rows + self._at_once(now), n)
        given, reference, shares = self._maps(before, now, batch)
        D, sites = self._source.moments.shape[1], len(self._source.widths)
        untouched = xp.constant(np.stack([np.ones(D), np.zeros(D)]), np.float32)
        shallow = xp.constant(np.arange(sites) < math.ceil(layer_transport.FIRST_PASS * sites))
        frozen, *outputs = self._run_twin(
            rests,
            xp.choose_one(
                has_others,
                lambda: xp.selected(self._images, ~before.kept),
                lambda: batch[: xp.where(is_first, n, self._idle_rows)],
            ),
            batch[before.rows : xp.where(measures, stop, self._idle_rows)],
            xp.where(rests | settled, given, untouched),
            (shallow | whole) & ~settled,  # caster.measured
            self._state["past"],
            reference,
            shares,
            settled & self._uses_full_maps,
            self._resting_matrices(rests, given, before.matrices),
            self._images[before.rows : xp.where(rests, stop, self._idle_rows)],
        )
        logits, features, moments, covariances = xp.choose(
            before.rows > 0,
            lambda: self._appended(before, rests, stop, *outputs),
            lambda: outputs,
        )
        more = stop < n
        found = before._replace(
            frozen=xp.choose_one(is_first, lambda: frozen, lambda: before.frozen),
            others=xp.choose_one(has_others, lambda: frozen, lambda: before.others),
            rows=xp.where(more, stop, 0),
            logits=logits,
            features=features,
            given=given,
            moments=moments,
            covariances=covariances,
        )
        return found, more

    def _run_twin(self, rests: GraphArray, *inputs: GraphArray) -> list[GraphArray]:
        """Call the twin; return frozen logits, and (m, C), (m, d), (2, D), (sum of c^2,) aligned.

        If the stream `rests`, logits and features are those of the resting copies.
        """
        outputs = call(NETWORK, self._twin, *inputs)
        names = [output.name for output in self._twin.graph.output]
        named = dict(zip(names, outputs, strict=True))
        logits, features = xp.choose(
            rests,
            lambda: [named["caster.resting_logits"], named["caster.resting_features"]],
            lambda: [named["caster.logits"], named["caster.features"]],
        )
        columns = xp.constant(np.array(self._columns))  # the state's classes among the logits
        return [
            xp.taken(outputs[1], columns, axis=1),  # the model's own name for its logits varies
            xp.taken(logits, columns, axis=1),
            features.reshape(-1, self._source.features),
            named["caster.moments"],
            named["caster.covariances"],
        ]

    def _at_once(self, now: Phases) -> GraphArray:  # ()
        """Rows per pass; `MORE_THAN_ANY_BATCH` for one that needs the whole batch."""
        rows = self._pieces.rows
        if not rows:
            return xp.constant(MORE_THAN_ANY_BATCH)
        found = xp.where(now[Phase.SETTLED], xp.constant(2 * rows), MORE_THAN_ANY_BATCH)
        return xp.where(now[Phase.REST], self._pieces.copies * rows, found)

    def _maps(
        self, before: Carry, now: Phases, batch: _Kept
    ) -> tuple[GraphArray, GraphArray, GraphArray]:  # (2, D), (3, D), (2,)
        """Maps from the past; reference and weights of the maps that include the batch."""
        whole = now[Phase.WHOLE]
        mixture = xp.where(whole, self._mixture(before, batch), self._state["mixture"])
        known = self._has_rest_maps | self._uses_full_maps | (before.rows > 0)
        needed = (now[Phase.REST] | now[Phase.SETTLED]) & ~known
        mixed = (needed | whole) & ~is_reference(mixture, self._pi_s)
        reference = xp.choose_one(  # in a branch, because the class moments are large
            mixed, lambda: self._source.reference(mixture), lambda: self._source.reference(None)
        )
        given = xp.where(needed, self._to_reference(reference)[1], before.given)
        past = batch.past(before.fresh | now[Phase.ALONE])
        behind = past + batch.samples
        shares = xp.stack([batch.samples / behind, behind / (behind + self._settings.prior)])
        return given, reference, shares.astype(np.float32)

    def _mixture(self, found: Carry, batch: _Kept) -> GraphArray:  # (C,)
        """Class mixture behind the merged moments of past and batch."""
        past = batch.past(found.fresh)
        return merged_mixture(self._state["mixture"], past, found.mixture, batch.samples)

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

        def merged() -> list[GraphArray]:
            share = ((rows - before.rows).astype(np.float64) / rows.astype(np.float64)).astype(
                np.float32
            )
            found = moment_graph.merged(before.moments, moments, share)
            if not self._source.full:
                return [found, covariances]
            step = moments[0] - before.moments[0]
            parts = self._source.full, before.covariances, covariances, step, share
            return [found, merged_covariances(*parts)]

        return [
            xp.concat([before.logits, logits]),
            xp.concat([before.features, features]),
            *xp.choose(rests, lambda: [moments, covariances], merged),
        ]

    # --- the answer ---

    def _resting_scores(self, logits: GraphArray) -> GraphArray:  # (n, C)
        """The scores that answer a batch at rest."""
        return logits + self._labels.correction.astype(np.float32)

    def _scores(self, found: Carry) -> GraphArray:  # (n, C)
        """The scores that answer any other batch, corrected for the classes of the stream."""

        def by_labels() -> GraphArray:
            answers = found.labels.answers(_probabilities(found.logits))
            return xp.log(xp.maximum(answers, layer_transport.MIN_PROBABILITY)).astype(np.float32)

        unchanged = found.labels.is_kind("source") | found.labels.is_kind("doubted")
        return xp.choose_one(unchanged, lambda: found.logits, by_labels)

    def _comparison(self, found: Carry, scores: GraphArray) -> list[GraphArray]:
        """Compare aligned and frozen answers; return ratio, frozen labels and certificate."""
        answered = found.labels

        def in_runs() -> list[GraphArray]:
            certificate, errors = self._certificate.update(scores, found.frozen)
            return [errors, xp.constant(math.nan) + 0.0, *certificate.parts]  # norms are unused

        def shuffled() -> list[GraphArray]:
            certificate, errors, norms = self._certificate.update_shuffled(
                found.logits, found.frozen, answered.correction
            )
            return [errors, norms, *certificate.parts]

        errors, norms, *certificate = xp.choose(answered.is_kind("runs"), in_runs, shuffled)
        labels = LabelGraph.of(self._pi_s, _parts(self._state, "frozen_labels").values())

        def observed() -> list[GraphArray]:
            p = _probabilities(found.frozen)
            return labels.observe(p)[0].advance(p).parts()

        after = xp.choose(xp.is_finite(found.frozen), observed, labels.parts)
        frozen = LabelGraph.of(self._pi_s, after)
        ratio = gating_ratio(errors, norms, answered.is_kind("source"), frozen.is_kind("source"))
        return [ratio, *after, *certificate]

    # --- the next state ---

    def _next_memory(
        self, found: Carry, batch: _Kept, aligned: GraphArray
    ) -> dict[str, GraphArray]:
        """What the stream remembers after a batch, unchanged unless the batch was `aligned`."""
        past = batch.past(found.fresh)
        share = (batch.samples / (past + batch.samples)).astype(np.float32)
        recent, recent_count = self._recent(found.moments, found.fresh, batch.samples)
        labels = found.labels.advance(_probabilities(found.logits)).parts()
        names = (name for name in self._state if name.startswith("labels."))
        joined = {
            "past": moment_graph.merged(self._state["past"], found.moments, share),
            "past.count": past + batch.samples,
            "recent": recent,
            "recent.count": recent_count,
            "mixture": self._mixture(found, batch),
            **dict(zip(names, labels, strict=True)),
        }
        if self._source.full:
            step = found.moments[0] - self._state["past"][0]
            joined["past.covariances"] = merged_covariances(
                self._source.full, self._state["past.covariances"], found.covariances, step, share
            )
        chosen = xp.choose(
            aligned,
            lambda: list(joined.values()),
            lambda: [self._state[name] for name in joined],
        )
        return dict(zip(joined, chosen, strict=True))

    def _next_schedule(
        self, batch: _Kept, aligned: GraphArray, fits: GraphArray, rested: GraphArray
    ) -> GraphArray:  # (4,)
        """When to compare next; an ended rest means that outputs changed."""
        compared = self._schedule.compared(batch.n, fits, self._may_rest)
        skipped = self._schedule.skipped(xp.length(self._images))
        failed = self._schedule.state
        return xp.where(aligned, compared.state, xp.where(rested, skipped.state, failed))

    def _next_monitor(
        self, found: Carry, scores: GraphArray, aligned: GraphArray, rested: GraphArray
    ) -> dict[str, GraphArray]:
        """The output monitor after a batch; it learns what is usual from settled passes."""
        before = self._monitor.begin(self._may_rest & ~rested).reset(aligned & found.fresh)
        learns = found.phase.equals(Phase.ALIGNED_BY_PAST) & self._shuffled
        parts, outputs = before.parts(), (found.features, scores)

        def unlearnt() -> list[GraphArray]:
            return xp.choose(
                rested,
                lambda: list(before.wait(*outputs).parts().values()),
                lambda: list(parts.values()),
            )

        after = xp.choose(learns, lambda: list(before.learn(*outputs).parts().values()), unlearnt)
        return {f"monitor.{name}": each for name, each in zip(parts, after, strict=True)}


def _next_phase(now: Phases, events: Mapping[Event, GraphArray]) -> GraphArray:  # ()
    """Look up what follows in `TRANSITIONS`."""
    found = xp.constant(Phase.FAILED)
    for phase, event, following in reversed(TRANSITIONS):  # so that the first event wins
        found = xp.where(now[phase] & events[event], following, found)
    return found


def _probabilities(logits: GraphArray) -> GraphArray:  # (n, C) -> (n, C) float64
    return xp.softmax(logits.astype(np.float64))


def _in_order(
    scores: GraphArray,  # (k, C), of the kept samples
    others: GraphArray,  # (n - k, C)
    kept: GraphArray,  # (n,)
) -> GraphArray:  # (n, C)
    """Interleave the scores of plausible and other samples in their original order.

    Implausible samples with logits that are not finite get scores of 0.
    """
    broken = xp.is_nan((others - others).sum(1, keepdims=True))
    both = xp.concat([scores, xp.where(~broken, others, 0.0)])
    own = kept.astype(np.int64)
    at = xp.where(kept, xp.running_sum(own), xp.length(scores) + xp.running_sum(1 - own)) - 1
    return xp.taken(both, at)
