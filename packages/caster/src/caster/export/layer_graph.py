"""Mixture transport as one ONNX graph: a batch and the stream's state in, an answer and the next
state out.

The graph follows `adapt.layer_transport`. Its passes through the network are the trips of a Loop,
whose body holds the twin (`models.onnx.twin`) with its weights: ONNX Runtime optimises a network
only where its weights are in the same graph. What the next pass is follows from what the last one
showed, so the body is a state machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from spox import Tensor, argument, build

from caster.adapt import layer_passes, layer_transport
from caster.adapt.layer_passes import LayerSettings
from caster.core.channels import ChannelMoments
from caster.export import moment_graph
from caster.export.certificate_graph import (
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
    ChainGraph,
    LabelGraph,
    initial_labels,
    is_reference,
    merged_mixture,
)
from caster.export.moment_graph import ClassTable
from caster.export.plausibility_graph import FIRST_LAYERS, PlausibilityGraph
from caster.models.onnx.compiled import NEXT

if TYPE_CHECKING:
    from onnx import ModelProto

Floats = NDArray[Any]
PASSES = 5  # at most: three with aligned layers, a frozen one, one of implausible samples
NETWORK = "network"  # name of the embedded twin
# Input values that a settled pass takes at once, four images of 224 x 224: what they become inside
# the network fits the caches, and a map of values that are there costs half of what it costs behind
# a whole batch. No other pass can be cut: its maps are made of the whole batch.
AT_ONCE = 4 * 3 * 224 * 224
LARGEST = 2**62  # a number of rows that no batch has


class Phase(IntEnum):
    """What a pass through the twin is for."""

    FROZEN = 0  # the frozen copy only
    SETTLED = 1  # all sites, by the past
    SHALLOW = 2  # the first sites, by the batch: shows its classes, and whether the shift changed
    FRESH = 3  # the same without a past, which was of another shift
    CONFIRM = 4  # the same after a settled pass that suggested other classes
    WHOLE = 5  # all sites, by the batch, with the reference of its mixture
    OTHERS = 6  # the frozen copy, of samples that no image could have produced
    DONE = 7


@dataclass(frozen=True, eq=False)
class Source:
    """What a compiled stream knows of the source: S sites with D channels in all."""

    widths: tuple[int, ...]  # (S,)
    moments: Floats  # (2, D) float32
    eps: Floats  # (D,) float32
    parts: tuple[tuple[int, ClassTable | None], ...]  # channels of sites in a row, and classes
    prior: Floats  # (C,) float64
    full: tuple[FullSite, ...] = ()  # sites with full maps

    @classmethod
    def of(
        cls,
        layers: Sequence[ChannelMoments],
        positions: Sequence[int | None],  # at a site, per sample; None: not known
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
    shallow = sum(_compared_widths(source))
    labels = initial_labels(source.prior)
    return {
        "batches": np.array(0),
        "past": np.zeros((2, D), np.float32),
        "past.count": np.array(0.0),
        **_initial_covariances(source),
        "recent": np.zeros((2, shallow), np.float32),
        "recent.count": np.array(0.0),
        "mixture": source.prior,
        **{f"labels.{name}": value for name, value in labels.items()},
        **{f"frozen_labels.{name}": value for name, value in labels.items()},
        **initial_certificate(C, window),
        "schedule": np.zeros(4, np.int64),
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


def _initial_covariances(source: Source) -> dict[str, NDArray[Any]]:
    size = sum(site.width**2 for site in source.full)
    return {"past.covariances": np.zeros(size, np.float32)} if size else {}


def _compared_widths(source: Source) -> list[int]:
    """Channels of the sites where the last samples are compared with the past."""
    return list(source.widths[: math.ceil(layer_passes.CHANGE_SITES * len(source.widths))])


def _labels_of(state: Mapping[str, GraphArray], name: str, source: GraphArray) -> LabelGraph:
    known = {
        part.removeprefix(f"{name}."): each
        for part, each in state.items()
        if part.startswith(f"{name}.")
    }
    chain = ChainGraph(source, known["last"], known["evidence"], known["totals"], known["count"])
    return LabelGraph(chain, known["recent"], known["recent.count"], source, known["believed"])


def _certificate_of(state: Mapping[str, GraphArray], settings: LayerSettings) -> CertificateGraph:
    stats, rows, count = (state[f"certificate{part}"] for part in ("", ".rows", ".count"))
    return CertificateGraph(stats, rows, count, settings.window)


def _label_state(labels: LabelGraph, name: str) -> dict[str, GraphArray]:
    chain = labels.chain
    return {
        f"{name}.last": chain.last,
        f"{name}.evidence": chain.evidence,
        f"{name}.totals": chain.totals,
        f"{name}.count": chain.count,
        f"{name}.recent": labels.recent,
        f"{name}.recent.count": labels.count,
        f"{name}.believed": labels.believed,
    }


# --- one batch -----------------------------------------------------------------------------------


class Carry(NamedTuple):
    """What a pass leaves for the next one, and the last pass for the answer."""

    phase: GraphArray  # () int64, of the next pass
    fresh: GraphArray  # (), whether the past was of another shift
    frozen: GraphArray  # (n, C) logits, once `compared`
    has_frozen: GraphArray  # ()
    scores: GraphArray  # (n, C), with aligned layers, once `has_scores`
    has_scores: GraphArray  # ()
    failed: GraphArray  # (), whether aligned logits were not finite, or no sample an image
    others: GraphArray  # (m, C) frozen logits of implausible samples, once `has_others`
    has_others: GraphArray  # ()
    rows: GraphArray  # () int64, of a settled pass so far
    logits: GraphArray  # (n, C), theirs
    given: GraphArray  # (2, D), its scales and shifts: those of full maps, until it finds others
    matrices: GraphArray  # (sum of c^2,), of full maps
    moments: GraphArray  # (2, D), of the batch in the last aligned pass
    covariances: GraphArray  # (sum of c^2,), in the same pass
    mixture: GraphArray  # (C,), behind the merged moments
    prior: GraphArray  # (C,), of labels that have observed the batch, as the rest
    believed: GraphArray
    last: GraphArray
    evidence: GraphArray
    totals: GraphArray
    seen: GraphArray
    recent: GraphArray
    known: GraphArray

    def labels(self, source: GraphArray) -> LabelGraph:
        """The stream's labels."""
        chain = ChainGraph(source, self.last, self.evidence, self.totals, self.seen)
        return LabelGraph(chain, self.recent, self.known, self.prior, self.believed)


def _label_parts(labels: LabelGraph) -> dict[str, GraphArray]:
    """A stream's labels as fields of `Carry`."""
    chain = labels.chain
    return {
        "prior": labels.prior,
        "believed": labels.believed,
        "last": chain.last,
        "evidence": chain.evidence,
        "totals": chain.totals,
        "seen": chain.count,
        "recent": labels.recent,
        "known": labels.count,
    }


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
    ) -> None:
        self._twin, self._source, self._columns = twin, source, columns
        self._idle_rows = idle_rows
        self._settings, self._state = settings, state
        kept = is_plausible(images)
        self._all, self._kept, self._none = images, kept, ~kept.any()
        # A graph takes no empty batch: without a plausible sample, the first stands for them.
        first = arange(length(images)).equals(0)
        self._images = selected(images, kept | (self._none & first))
        self._squares = sum(site.width**2 for site in source.full)
        self._pi_s = constant(source.prior)
        self._labels = _labels_of(state, "labels", self._pi_s)
        self._n = length(self._images)
        self._samples = self._n.astype(np.float64)
        room = maximum(settings.memory - self._samples, 0.0)
        self._past = minimum(state["past.count"], room)  # samples of the past that still count
        self._schedule = ScheduleGraph(state["schedule"], settings.every, settings.window)
        self._certificate = _certificate_of(state, settings)
        sizes = images.shape[1:]
        known = all(isinstance(size, int) for size in sizes)
        # Where the size of images is open, batches are not cut.
        self._at_once = max(1, AT_ONCE // math.prod(sizes)) if known else LARGEST
        self._settles = self._first_phase().equals(int(Phase.SETTLED))
        self._full = self._settles & is_reference(state["mixture"], self._pi_s)

    def answer(self) -> dict[str, GraphArray]:
        """All outputs of the graph."""
        pieces = self._n / self._at_once + 1  # of integers, at most
        found = Carry(*repeat(pieces + PASSES, self._start(), self._pass))
        compares = found.has_scores & found.has_frozen
        state = self._state
        unmeasured = where(found.failed, constant(math.inf), math.nan)
        names = [name for name in state if name.startswith(("frozen_labels.", "certificate"))]
        ratio, *measured = choose(
            compares,
            lambda: self._compared(found),
            lambda: [unmeasured, *(state[name] for name in names)],
        )
        following = dict(zip(names, measured, strict=True))
        fits = compares & (ratio <= self._settings.tau)
        stands = ~compares & ~found.failed & self._schedule.accepted
        accepted = fits | stands
        reason = where(self._none, reason_code("implausible"), reason_code("numerical"))
        reason = where(found.failed, reason, reason_code("rest"))
        reason = where(compares, where(fits, reason_code("accepted"), reason_code("ratio")), reason)
        after = self._after(found, fits, following)
        scores = self._in_order(where(accepted, found.scores, found.frozen), found.others)
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
        certificate, errors = self._certificate.update(found.scores, found.frozen)
        certificate, norms = certificate.update_norms(found.scores, found.frozen)
        labels = _labels_of(self._state, "frozen_labels", self._pi_s)

        def observed() -> list[GraphArray]:
            p = softmax(found.frozen.astype(np.float64))
            return [*_label_state(labels.observe(p).advance(p), "frozen_labels").values()]

        before = _label_state(labels, "frozen_labels")
        after = choose(is_finite(found.frozen), observed, lambda: list(before.values()))
        frozen = _labels_of(dict(zip(before, after, strict=True)), "frozen_labels", self._pi_s)
        is_source = found.labels(self._pi_s).is_source
        ratio = gating_ratio(errors, norms, is_source, frozen.is_source)
        return [ratio, *after, certificate.stats, certificate.rows, certificate.count]

    def _after(
        self,
        found: Carry,
        fits: GraphArray,
        following: Mapping[str, GraphArray],  # what a comparison leaves
    ) -> dict[str, GraphArray]:
        """The state after a batch: that before it if it failed."""
        compares = found.has_scores & found.has_frozen
        skipped = where(found.failed, self._schedule.state, self._schedule.skipped(self._n).state)
        schedule = replace(
            self._schedule,
            state=where(compares, self._schedule.compared(self._n, fits).state, skipped),
        )
        settles = compares & schedule.skips
        certificate = _certificate_of(following, self._settings).settle(settles)
        kept = where(found.fresh, constant(0.0), self._past)
        share = (self._samples / (kept + self._samples)).astype(np.float32)
        recent, recent_count = self._recent(found.moments, found.fresh)
        joined = {
            "past": moment_graph.merged(self._state["past"], found.moments, share),
            "past.count": kept + self._samples,
            "recent": recent,
            "recent.count": recent_count,
            "mixture": found.mixture,
            **_label_state(found.labels(self._pi_s), "labels"),
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
        after = dict(zip(joined, chosen, strict=True))
        # The next comparison after a rest is of another part of the stream.
        resets = settles & ~fits
        for name in (name for name in after if name.startswith(("past", "recent"))):
            after[name] = where(~resets, after[name], 0.0)
        return {
            **after,
            "batches": self._state["batches"] + 1,
            **{name: each for name, each in following.items() if name.startswith("frozen")},
            "certificate": certificate.stats,
            "certificate.rows": certificate.rows,
            "certificate.count": certificate.count,
            "schedule": schedule.state,
        }

    # --- passes ---

    def _start(self) -> Carry:
        """Before the first pass."""
        C, D = len(self._source.prior), self._source.moments.shape[1]
        nothing = filled(0.0, [self._n, C], np.float32)
        no = constant(False)
        by_past, matrices = self._maps_of_past()
        rests = self._schedule.skips & ~self._schedule.accepted
        phase = where(rests, constant(int(Phase.FROZEN)), self._first_phase())
        return Carry(
            phase=where(self._none, constant(int(Phase.OTHERS)), phase),
            fresh=no,
            frozen=nothing,
            has_frozen=no,
            scores=nothing,
            has_scores=no,
            failed=self._none,
            others=constant(np.zeros((1, C), np.float32)),
            has_others=self._kept.all(),
            rows=constant(0),
            logits=nothing,
            given=by_past,
            matrices=matrices,
            moments=constant(np.zeros((2, D), np.float32)),
            covariances=constant(np.zeros(self._squares, np.float32)),
            mixture=self._state["mixture"],
            **_label_parts(self._labels),
        )

    def _first_phase(self) -> GraphArray:  # ()
        """The past is all that a pass needs if it is long, shuffled and trusted."""
        enough = maximum(2.0 * self._samples, float(layer_transport.ENOUGH_PAST))
        settled = (self._past >= enough) & self._schedule.accepted
        return where(settled, constant(int(Phase.SETTLED)), int(Phase.SHALLOW))

    def _pass(self, *carried: GraphArray) -> tuple[GraphArray, Carry]:
        """Run the twin once, and decide what comes next."""
        before = Carry(*carried)
        is_phase = {phase: before.phase.equals(int(phase)) for phase in Phase}
        is_others = is_phase[Phase.OTHERS]
        ran = ~is_phase[Phase.FROZEN] & ~is_others
        shows_frozen = ~before.has_frozen & (is_phase[Phase.FROZEN] | ~self._schedule.skips)
        shows_frozen = shows_frozen & ~is_others
        settled = is_phase[Phase.SETTLED]
        # Not `_n`: ONNX Runtime warns about a Loop that takes a number and a cast of it.
        n = length(self._images)
        rows = where(settled, minimum(before.rows + self._at_once, n), 0)
        given, logits_frozen, *measured = self._run(before, is_phase, shows_frozen, rows)
        logits, moments, covariances = choose(
            settled,
            lambda: self._joined(before, rows, *measured),
            lambda: measured,
        )
        (frozen,) = choose(shows_frozen, lambda: [logits_frozen], lambda: [before.frozen])
        (others,) = choose(is_others, lambda: [logits_frozen], lambda: [before.others])
        found = before._replace(
            frozen=frozen,
            has_frozen=before.has_frozen | shows_frozen,
            others=others,
            has_others=before.has_others | is_others,
            rows=rows,
            logits=where(settled, logits, before.logits),
            given=where(settled, given, before.given),
            moments=where(ran, moments, before.moments),
            covariances=where(ran, covariances, before.covariances),
        )

        is_piece = settled & (rows < n)  # more of the batch is to come
        ran = ran & ~is_piece
        finite = ran & is_finite(logits)
        first = is_phase[Phase.SETTLED] | is_phase[Phase.SHALLOW]
        changed = finite & first & self._has_changed(moments)
        observes = finite & ~is_phase[Phase.WHOLE] & ~changed
        labels, mixture = self._observed(observes, logits, before)
        doubted = labels.chain.is_correlated ^ self._labels.chain.is_correlated
        doubted = doubted | (labels.is_source ^ self._labels.is_source)
        doubted = observes & is_phase[Phase.SETTLED] & doubted
        ends = is_phase[Phase.WHOLE] | (is_phase[Phase.SETTLED] & ~changed & ~doubted)
        ends = finite & ends
        scores, last = choose(
            ends,
            lambda: self._finished(logits, labels),
            lambda: [before.scores, labels.chain.last],
        )
        labels = replace(labels, chain=replace(labels.chain, last=last))
        found = found._replace(
            fresh=before.fresh | changed,
            scores=scores,
            has_scores=before.has_scores | ends,
            failed=before.failed | (ran & ~finite),
            mixture=mixture,
            **_label_parts(labels),
        )
        phase = self._next_phase(found, is_phase, changed, doubted)
        phase = where(is_piece, constant(int(Phase.SETTLED)), phase)
        return ~phase.equals(int(Phase.DONE)), found._replace(phase=phase)

    def _next_phase(
        self,
        found: Carry,
        is_phase: Mapping[Phase, GraphArray],
        changed: GraphArray,
        doubted: GraphArray,
    ) -> GraphArray:  # ()
        """What follows a pass."""

        def number(phase: Phase) -> GraphArray:
            return constant(int(phase))

        skips, accepted = self._schedule.skips, self._schedule.accepted
        answered = found.has_scores | found.failed
        (dropped,) = choose(
            skips,
            lambda: [
                self._certificate.has_dropped(
                    where(found.has_scores, found.scores, found.frozen), accepted
                )
            ],
            lambda: [constant(False)],
        )
        # With an answer: the frozen one is needed too, unless the comparison is skipped.
        stands = found.has_frozen | (found.has_scores & skips & ~dropped)
        after_answer = where(stands, number(Phase.DONE), int(Phase.FROZEN))
        after_frozen = where(skips & ~dropped, number(Phase.DONE), self._first_phase())
        following = where(is_phase[Phase.FROZEN], after_frozen, number(Phase.WHOLE))
        following = where(doubted, number(Phase.CONFIRM), following)
        following = where(changed, number(Phase.FRESH), following)
        following = where(answered, after_answer, following)
        done = is_phase[Phase.OTHERS] | following.equals(int(Phase.DONE))
        last = where(found.has_others, number(Phase.DONE), int(Phase.OTHERS))
        return where(done, last, following)

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
        rows: GraphArray,  # () int64, with this piece
        logits: GraphArray,  # (m, C)
        moments: GraphArray,  # (2, D)
        covariances: GraphArray,  # (sum of c^2,)
    ) -> list[GraphArray]:  # (n, C), (2, D), (sum of c^2,)
        """Logits and moments of a settled pass, with another piece of the batch."""
        joined = concat([before.logits[: before.rows], logits, before.logits[rows:]])
        share = ((rows - before.rows).astype(np.float64) / rows.astype(np.float64)).astype(
            np.float32
        )
        merged = moment_graph.merged(before.moments, moments, share)
        if self._source.full:
            step = moments[0] - before.moments[0]
            covariances = merged_covariances(
                self._source.full, before.covariances, covariances, step, share
            )
        return [joined, merged, covariances]

    def _run(
        self,
        before: Carry,
        is_phase: Mapping[Phase, GraphArray],
        shows_frozen: GraphArray,
        rows: GraphArray,  # () int64, of a settled pass after this piece
    ) -> list[GraphArray]:  # (2, D), (n or less, C), (n or less, C), (2, D), (sum of c^2,)
        """Given maps, frozen and aligned logits, and moments; a copy that idles gets few rows."""
        settled, whole = is_phase[Phase.SETTLED], is_phase[Phase.WHOLE]
        mixture = where(whole, before.mixture, self._state["mixture"])
        begun = settled & (before.rows > 0)  # an earlier piece found the maps
        mixed = ((settled & ~begun) | whole) & ~is_reference(mixture, self._pi_s)
        (reference,) = choose(  # only here: the moments of classes are large
            mixed,
            lambda: [self._source.reference(mixture)],
            lambda: [self._source.reference(None)],
        )
        _, by_past = self._to_reference(reference)
        D, sites = self._source.moments.shape[1], len(self._source.widths)
        untouched = constant(np.stack([np.ones(D), np.zeros(D)]), np.float32)
        shallow = constant(np.arange(sites) < math.ceil(layer_transport.FIRST_PASS * sites))
        kept = where(before.fresh, constant(0.0), self._past)
        behind = kept + self._samples
        shares = stack([self._samples / behind, behind / (behind + self._settings.prior)])
        by_past = where(begun | self._full, before.given, by_past)
        given = where(settled, by_past, untouched)
        outputs = call(
            NETWORK,
            self._twin,
            self._frozen_rows(shows_frozen, is_phase[Phase.OTHERS]),
            self._aligned_rows(is_phase, before.rows, rows),
            given,
            (shallow | whole) & ~settled,  # caster.measured
            self._state["past"],
            reference,
            shares.astype(np.float32),
            settled & self._full,
            before.matrices,
        )
        frozen, aligned = self._of_classes(outputs[1]), self._of_classes(outputs[3])
        return [given, frozen, aligned, *outputs[4:]]

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
        self, is_phase: Mapping[Phase, GraphArray], start: GraphArray, stop: GraphArray
    ) -> GraphArray:
        """The rows of the aligned copy: a piece of a settled pass, or all; one if it idles.

        No rows have no moments.
        """
        idles = is_phase[Phase.FROZEN] | is_phase[Phase.OTHERS]
        settled = is_phase[Phase.SETTLED]
        end = where(settled, stop, where(idles, constant(1), length(self._images)))
        return self._images[where(settled, start, 0) : end]

    def _frozen_rows(self, wanted: GraphArray, others: GraphArray) -> GraphArray:
        """The rows of the frozen copy: images or, in a pass of their own, the implausible ones."""
        (rows,) = choose(
            others,
            lambda: [selected(self._all, ~self._kept)],
            lambda: [self._images[: where(wanted, length(self._images), self._idle_rows)]],
        )
        return rows

    def _in_order(self, scores: GraphArray, others: GraphArray) -> GraphArray:  # (n, C)
        """Scores of all samples in the order they came, from those kept and the others.

        Implausible samples whose logits are not finite have no class: their scores are 0.
        """
        broken = is_nan((others - others).sum(1, keepdims=True))
        both = concat([scores, where(~broken, others, 0.0)])
        kept = self._kept.astype(np.int64)
        at = where(self._kept, running_sum(kept), length(scores) + running_sum(1 - kept)) - 1
        return taken(both, at)

    def _of_classes(self, logits: GraphArray) -> GraphArray:  # (n, any) -> (n, C)
        """The logits of the state's classes."""
        return taken(logits, constant(np.array(self._columns)), axis=1)

    def _recent(self, moments: GraphArray, fresh: GraphArray) -> tuple[GraphArray, GraphArray]:
        """Moments of the last samples with the batch, at the sites where they are compared."""
        known = self._state["recent.count"]
        room = maximum(layer_passes.CHANGE_WINDOW - self._samples, 0.0)
        kept = where(fresh, constant(0.0), minimum(known, room))
        count = kept + self._samples
        share = (self._samples / count).astype(np.float32)
        shallow = moments[:, : sum(_compared_widths(self._source))]
        return moment_graph.merged(self._state["recent"], shallow, share), count

    def _has_changed(self, moments: GraphArray) -> GraphArray:  # (2, D) -> ()
        """Whether the last samples are of another shift than the past."""
        widths = _compared_widths(self._source)
        recent, count = self._recent(moments, constant(False))
        found = moment_graph.change(recent, self._state["past"][:, : sum(widths)], widths)
        return (count < self._state["past.count"]) & (found > layer_transport.CHANGED)

    def _observed(
        self, observes: GraphArray, logits: GraphArray, before: Carry
    ) -> tuple[LabelGraph, GraphArray]:
        """Labels that have seen a batch, and the mixture behind the moments with it."""
        kept = where(before.fresh, constant(0.0), self._past)
        was = before.labels(self._pi_s)

        def observed() -> list[GraphArray]:
            p = softmax(logits.astype(np.float64))
            seen = self._labels.observe(p)
            merged = merged_mixture(self._state["mixture"], kept, seen.mixture(p), self._samples)
            return [merged, *_label_parts(seen).values()]

        mixture, *parts = choose(
            observes, observed, lambda: [before.mixture, *_label_parts(was).values()]
        )
        seen = before._replace(**dict(zip(_label_parts(was), parts, strict=True)))
        return seen.labels(self._pi_s), mixture

    def _finished(self, logits: GraphArray, labels: LabelGraph) -> list[GraphArray]:
        """The scores that answer a batch, and the last label's probabilities after it."""
        p = softmax(logits.astype(np.float64))

        def by_labels() -> list[GraphArray]:
            answers = maximum(labels.answers(p), layer_transport.RARE)
            return [log(answers).astype(np.float32)]

        (scores,) = choose(labels.is_source, lambda: [logits], by_labels)
        return [scores, labels.advance(p).chain.last]


def compile_layers(
    twin: ModelProto,
    source: Source,
    columns: Sequence[int],  # of the state's classes among the logits
    settings: LayerSettings,
    is_plausible: PlausibilityGraph,
    idle_rows: int = 1,  # of the frozen copy in a pass that does not need it
) -> ModelProto:
    """The graph of one batch of a stream.

    Inputs: the images, under the model's own name, and the state, of which zeros start a stream.
    Outputs: `probabilities` (n, C), `labels` (n,) among the state's classes, `accepted`, `ratio`,
    `reason` as a position in `REASONS`, and the next state.
    """
    images = twin.graph.input[0]
    kind = images.type.tensor_type
    shape = tuple(size.dim_value or None for size in kind.shape.dim)
    initial = initial_state(source, settings.window)
    with under_construction():
        inputs = {
            images.name: argument(Tensor(_dtype(kind.elem_type), shape)),
            **{name: argument(Tensor(each.dtype, each.shape)) for name, each in initial.items()},
        }
        state = _begun({name: GraphArray(inputs[name]) for name in initial}, initial)
        batch = GraphArray(inputs[images.name])
        step = _Step(twin, source, columns, settings, is_plausible, batch, state, idle_rows)
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


def _dtype(number: int) -> Any:
    from onnx.helper import tensor_dtype_to_np_dtype

    return tensor_dtype_to_np_dtype(number)
