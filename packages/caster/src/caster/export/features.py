"""Compile the transport of last-layer features into an ONNX graph that adapts itself.

The graph computes what `FeatureTransport` computes. ONNX has no matrix factorisations, so

- everything is scored in source coordinates, centred on the source mean: log |det A| is the same
  for all classes and cancels in the probabilities;
- class covariances, plus the ridge of the batch, are inverted by block elimination of all classes
  at once, in the directions that the batch supports;
- the root of the target covariance comes from Newton-Schulz iterations.

A graph cannot raise errors. Where `FeatureTransport` raises, it rejects the batch as "numerical".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import spox.opset.ai.onnx.v18 as op
from numpy.typing import NDArray

from caster.config import STATE_DTYPE, Settings
from caster.core.linalg import LARGEST_CONDITION, whiten
from caster.core.order import MAX_EXCESS, MAX_NEIGHBOURS
from caster.core.types import SourceMoments
from caster.core.verdict import Reason
from caster.errors import CasterError
from caster.export import graph_arrays as xp
from caster.export.certificate_graph import reason_code
from caster.export.embedding import check_operators
from caster.export.graph_arrays import GraphArray
from caster.export.matrix_roots import scaled_roots
from caster.models.onnx.standard import in_opset
from caster.state import State

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

Numbers = NDArray[np.float64]
LEAF = 8  # order of the blocks that are inverted element by element
DECOUPLED = 1e20  # variance added to unsupported directions, so that they have no weight
WIDE_ENTRIES = 2**21  # entries of the class covariances up to which float64 inversion is affordable


class Answer(NamedTuple):
    """Outputs of the graph for one batch."""

    probabilities: GraphArray  # (B, C), float32
    labels: GraphArray  # (B,), class indices
    accepted: GraphArray  # (), boolean
    ratio: GraphArray  # (), float32
    reason: GraphArray  # (), code of the verdict's reason


def compile_features(
    model: ModelProto,  # with outputs features (B, d) and logits (B, n): see `OnnxModel.exposed`
    state: State,
    settings: Settings | None = None,  # those of the state by default
) -> ModelProto:
    """Compile a model and the transport of its features into one model that adapts itself.

    It has the input of the model and the outputs of `Answer`. It carries no state between batches.
    """
    from onnx import inliner
    from spox import argument, build, inline

    settings = state.settings if settings is None else settings
    model = inliner.inline_local_functions(model)
    check_operators(model)
    model = in_opset(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    (given,) = (value for value in model.graph.input if value.name not in weights)
    with xp.under_construction():
        images = argument(_type_of(given))
        found = inline(model)(**{given.name: images}).values()
        features, logits = map(GraphArray, found)
        answer = transport(features, logits, state, settings)
        outputs = {name: array.var for name, array in answer._asdict().items()}
        compiled = build({given.name: images}, outputs)
    _lift_constants(compiled.graph)
    return compiled


def _type_of(value: Any) -> Any:
    """Convert the type of a graph input to spox's."""
    from onnx import helper
    from spox import Tensor

    tensor = value.type.tensor_type
    sizes = tuple(size.dim_value or size.dim_param or None for size in tensor.shape.dim)
    if sizes and isinstance(sizes[0], int):
        images = f"{sizes[0]} image{'s' * (sizes[0] > 1)}"
        raise CasterError(
            f"the model takes {images} at a time: export it with a dynamic batch size"
        )
    return Tensor(helper.tensor_dtype_to_np_dtype(tensor.elem_type), sizes or None)


def _lift_constants(graph: GraphProto) -> None:
    """Turn Constant nodes into initializers, where tools expect the weights."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and values:
            graph.initializer.append(values[0])
            graph.initializer[-1].name = node.output[0]
        else:
            graph.node.append(node)


# --- the source, as constants --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Source:
    """Source moments in float64, and constants derived from them for every number of directions."""

    moments: SourceMoments
    stored: NDArray[np.float32]  # (C, K, K), class covariances; K: the rank, rounded up to leaves

    @classmethod
    def of(cls, moments: SourceMoments) -> Self:
        """Convert stored moments to float64, and pad the class covariances to whole leaves."""
        U, means, covariances = (
            np.asarray(x, np.float64) for x in (moments.U, moments.means, moments.covariances)
        )
        missing = -moments.rank % LEAF
        pad = ((0, 0), (0, missing), (0, missing))
        wide = SourceMoments(U, means, covariances, moments.counts)
        return cls(wide, np.pad(moments.covariances.astype(np.float32), pad))

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.moments.rank

    @property
    def room(self) -> int:
        """Number of directions rounded up to whole leaves, K."""
        return int(self.stored.shape[1])

    @cached_property
    def means(self) -> Numbers:  # (C, K)
        """Class means minus the source mean, padded."""
        centred: Numbers = self.moments.means - self.moments.mean
        return np.pad(centred, ((0, 0), (0, self.room - self.rank)))

    @cached_property
    def slacks(self) -> Numbers:  # (rank,)
        """`SourceMoments.slack` in 1, 2, ... directions."""
        variances: Numbers = np.diagonal(self.moments.covariances, axis1=1, axis2=2)
        traces: Numbers = np.max(np.cumsum(variances, axis=1), axis=0)
        return 4 * float(np.finfo(STATE_DTYPE).eps) * traces

    @cached_property
    def whitener(self) -> Numbers:  # (rank, rank)
        """Inverse factor of the metric; its leading blocks serve fewer directions."""
        inverse: Numbers = whiten(np.eye(self.rank), self.moments.metric)
        return inverse.T

    @cached_property
    def margins(self) -> Numbers:  # (rank,)
        """`SourceMoments.margin` in 1, 2, ... directions."""
        whitened = self.moments.means @ self.whitener.T
        nearest: Numbers = np.full(self.rank, np.inf)
        for c in range(len(whitened) - 1):
            steps = whitened[c + 1 :] - whitened[c]
            nearest = np.minimum(nearest, np.min(np.cumsum(steps * steps, axis=1), axis=0))
        return np.asarray(np.sqrt(nearest))

    @cached_property
    def dtype(self) -> type[np.floating[Any]]:
        """Precision of the inverses: float32, as in `FeatureTransport`, if float64 is too slow."""
        small = self.moments.n_classes * self.rank**2 <= WIDE_ENTRIES
        return np.float64 if small else np.float32

    def block(self, rows: slice, columns: slice) -> GraphArray:  # (C, r, c)
        """A block of all class covariances, as one shared constant."""
        key = rows.start, rows.stop, columns.start, columns.stop
        if key not in self._blocks:
            values = np.ascontiguousarray(self.stored[:, rows, columns])
            self._blocks[key] = xp.constant(values).astype(self.dtype)
        return self._blocks[key]

    @cached_property
    def _blocks(self) -> dict[tuple[int, ...], GraphArray]:
        return {}


# --- one batch -----------------------------------------------------------------------------------


def transport(
    features: GraphArray,  # (B, d), float32
    logits: GraphArray,  # (B, n), float32
    state: State,
    settings: Settings,
) -> Answer:
    """Answer a batch as `FeatureTransport.adapt` does."""
    width = state.moments.U.shape[0]
    if features.shape[1] not in (width, None):
        raise CasterError(f"the model has {features.shape[1]} features, and the state {width}")
    source = Source.of(state.moments)
    batch = Batch(features, source)
    pulled, scores = propose(batch, source, settings)
    fallback = _fallback(batch, logits, state, source, settings)
    chosen = fallback.argmax(1)
    evidence = certificate(batch, pulled, scores, source, settings)
    sound = xp.is_finite(features) & ~xp.is_nan(fallback).any()
    ordered = is_ordered(chosen, batch.size, state.moments)
    reason, ratio = decide(evidence, sound, batch.size, ordered, state, settings)
    accepted = reason.equals(reason_code("accepted"))
    adapted = xp.softmax(scores).astype(np.float32)
    return Answer(
        xp.where(accepted, adapted, xp.softmax(fallback)),
        xp.where(accepted, scores.argmax(1), chosen),
        accepted,
        ratio.astype(np.float32),
        reason,
    )


class Batch:
    """Features of a batch in the source's directions, and their moments."""

    def __init__(self, features: GraphArray, source: Source) -> None:
        self._source = source
        self.size = xp.length(features)
        self.k = xp.maximum(xp.minimum(self.size - 1, source.rank), 1)  # Eq. 2
        self.z = features.astype(np.float64) @ xp.constant(source.moments.U)  # (B, rank)
        self.centred = self.z - self.z.mean(0)
        count = self.size.astype(np.float64)
        self.covariance = self.centred.transposed(1, 0) @ self.centred / count  # (rank, rank)
        self.active = xp.constant(np.arange(source.room)) < self.k  # (K,)

    def supported(self, x: GraphArray) -> GraphArray:  # (..., rank) -> (..., K)
        """Set the directions that the batch does not support to zero."""
        return xp.where(self.active, _padded(x, self._source, axes=1), 0.0)


def propose(
    batch: Batch, source: Source, settings: Settings
) -> tuple[GraphArray, GraphArray]:  # (B, K), (B, C)
    """Pulled-back features, centred on the source mean, and transported class scores (Eqs. 3-6)."""
    slack = xp.taken(xp.constant(source.slacks), batch.k - 1)
    spare = xp.where(batch.active, slack, DECOUPLED)  # (K,)

    def full() -> list[GraphArray]:
        root, _ = source.moments.roots(settings.lam)
        inverse = xp.constant(root) @ inverse_root(batch.covariance, settings.lam)
        pulled = batch.supported(batch.centred @ inverse.transposed(1, 0))
        ridge = _padded(settings.beta * inverse @ inverse.transposed(1, 0), source, axes=2)
        ridge = ridge + spare * np.eye(source.room)
        return [pulled, class_scores(pulled, source, ridge, batch.active)]

    def diagonal() -> list[GraphArray]:
        target = (batch.centred * batch.centred).mean(0) + settings.lam
        variance = np.diagonal(source.moments.covariance) + settings.lam
        squares = xp.constant(variance) / target  # of the inverse map
        pulled = batch.supported(batch.centred * xp.sqrt(squares))
        ridge = batch.supported(settings.beta * squares) + spare
        return [pulled, class_scores(pulled, source, ridge, batch.active, batch.k)]

    # If the batch supports fewer directions than the source, k = B - 1: the map is diagonal, or
    # k is 1.
    pulled, scores = xp.choose(batch.size >= 2 * source.rank, full, diagonal)
    return pulled, scores


def inverse_root(C: GraphArray, lam: float) -> GraphArray:  # (k, k) -> (k, k)
    """(C + lam I)^-1/2, as `newton_schulz_roots` computes it; NaN if it does not converge."""
    identity = xp.constant(np.eye(C.shape[-1]))
    root, inverse, scale = scaled_roots(C + lam * identity, identity, LARGEST_CONDITION**-0.5)
    off = inverse @ root - identity
    return xp.where((off * off).max() < 1e-12, inverse / scale, np.nan)


def _padded(x: GraphArray, source: Source, axes: int) -> GraphArray:  # (..., rank) -> (..., K)
    """Pad the last axes with zeros."""
    pads = np.zeros((2, len(x.shape)), np.int64)
    pads[1, -axes:] = source.room - source.rank
    return GraphArray(op.pad(x.var, op.const(pads.ravel())))


def _fallback(
    batch: Batch, logits: GraphArray, state: State, source: Source, settings: Settings
) -> GraphArray:  # (B, C), float32
    """Scores for a rejected batch: the head's logits, or Source-GDA in all directions."""
    if state.head is not None:
        width = logits.shape[1]
        if width is not None and width <= max(state.head):
            needed = max(state.head) + 1
            raise CasterError(f"the model has {width} logits, and the state needs {needed}")
        if width is not None and state.head == tuple(range(width)):
            return logits
        return xp.taken(logits, xp.constant(state.head), axis=1)
    active = np.arange(source.room) < source.rank
    ridge = np.where(active, settings.beta + source.slacks[-1], DECOUPLED)
    x = _padded(batch.z - source.moments.mean, source, axes=1)
    scores = class_scores(x, source, xp.constant(ridge), xp.constant(active))
    total = scores.sum(1, keepdims=True)
    computed = ~xp.is_nan(total - total)
    return xp.where(computed, scores, np.log(source.moments.priors)).astype(np.float32)


# --- classes -------------------------------------------------------------------------------------


def class_scores(
    x: GraphArray,  # (B, K), in source coordinates, centred on the source mean
    source: Source,
    ridge: GraphArray,  # (K, K), or its diagonal (K,)
    active: GraphArray,  # (K,), boolean: the first k; the ridge decouples the others
    k: GraphArray | None = None,  # all directions of the source by default
) -> GraphArray:  # (B, C)
    """g_c of classes with covariances Sigma_c + ridge (Eq. 5).

    The class covariances are inverted in 8 directions, then in 16, 32, ... until that covers k.
    """
    elimination = Elimination(source, ridge)

    def in_directions(blocks: Blocks, pivots: Pivots, end: int) -> GraphArray:
        def deeper() -> GraphArray:
            stop = min(2 * end, source.room)
            bordered, more = elimination.border(source_block, joined(blocks), 0, end, stop)
            return in_directions(bordered, pivots + more, stop)

        def here() -> GraphArray:
            shares = active[:end].astype(np.float64).reshape(1, end)
            log_det = shares @ xp.log(xp.concat(pivots).astype(np.float64))  # (1, C)
            distance = _distances(x, source.means, blocks)
            return xp.constant(np.log(source.moments.priors)) - 0.5 * (log_det + distance)

        if end == source.room:
            return here()
        return deeper() if k is None else xp.choose_one(k > end, deeper, here)

    source_block = elimination.source_block
    inverse, pivots = elimination.inverse(source_block, 0, LEAF)
    return in_directions([(slice(LEAF), slice(LEAF), inverse)], pivots, LEAF)


Block = Callable[[slice, slice], GraphArray]  # rows, columns -> (C, r, c), of a symmetric matrix
Blocks = list[tuple[slice, slice, GraphArray]]  # lower-triangular blocks of a symmetric matrix
Pivots = list[GraphArray]  # each (1, C)


@dataclass(frozen=True, eq=False)
class Elimination:
    """Invert all class covariances plus a ridge; the pivots multiply to the determinants.

    With blocks A, -B and D of a symmetric matrix and H = B A^-1, the inverse T of the Schur
    complement D - H B' is the last block of the inverse. The others are T H and A^-1 + H' T H.
    """

    source: Source
    ridge: GraphArray  # (K, K) or (K,)

    def source_block(self, rows: slice, columns: slice) -> GraphArray:  # (C, r, c)
        """A block of the class covariances, plus the ridge unless that is diagonal."""
        found = self.source.block(rows, columns)
        if len(self.ridge.shape) == 1:
            return found
        return found + self.ridge[rows, columns].astype(self.source.dtype)

    def inverse(self, block: Block, lo: int, hi: int) -> tuple[GraphArray, Pivots]:
        """Invert the diagonal block of a matrix from lo to hi."""
        if hi - lo == LEAF:
            return self._leaf(block(slice(lo, hi), slice(lo, hi)), lo, hi)
        mid = lo + LEAF
        while 2 * (mid - lo) < hi - lo:
            mid = lo + 2 * (mid - lo)
        first, pivots = self.inverse(block, lo, mid)
        blocks, more = self.border(block, first, lo, mid, hi)
        return joined(blocks), pivots + more

    def border(
        self, block: Block, first: GraphArray, lo: int, mid: int, hi: int
    ) -> tuple[Blocks, Pivots]:
        """Extend the inverse of the block from lo to mid up to hi."""
        before, after = slice(lo, mid), slice(mid, hi)
        B = -block(after, before)
        H = B @ _mirrored(first)
        schur = block(after, after) - H @ _mirrored(B)

        def rest(rows: slice, columns: slice) -> GraphArray:
            if (rows, columns) == (after, after):
                return schur
            starts, stops = zip(
                *((s.start - mid, s.stop - mid) for s in (rows, columns)), strict=True
            )
            ends = (op.const(np.array(each)) for each in (starts, stops, (1, 2)))
            return GraphArray(op.slice(schur.var, *ends))

        last, pivots = self.inverse(rest, mid, hi)
        T = _mirrored(last) @ H
        whole = first + _mirrored(H) @ T
        return [(before, before, whole), (after, before, T), (after, after, last)], pivots

    def _leaf(self, S: GraphArray, lo: int, hi: int) -> tuple[GraphArray, Pivots]:
        """Invert (C, 8, 8) by sweeping direction by direction, with classes on the last axis."""
        identity = np.eye(LEAF)[:, :, None]
        # Merge axes first: ONNX Runtime pushes a Transpose through later nodes, but not a Reshape.
        T, pivots = S.reshape(0, LEAF**2).transposed(1, 0).reshape(LEAF, LEAF, -1), []
        if len(self.ridge.shape) == 1:
            ridge = self.ridge[lo:hi].astype(self.source.dtype).reshape(LEAF, 1, 1)
            T = T + ridge * identity
        for j in range(LEAF):
            row = T[j : j + 1]
            pivot = row[:, j : j + 1]
            pivots.append(pivot.reshape(1, -1))
            others = np.arange(LEAF)[:, None] != j
            row = xp.where(xp.constant(others), row, -1.0)
            T = T * (others & others.T)[:, :, None] - row.transposed(1, 0, 2) * (row / pivot)
        T = T.reshape(LEAF**2, -1).transposed(1, 0).reshape(-1, LEAF, LEAF)
        return -T, pivots


def _mirrored(S: GraphArray) -> GraphArray:  # (C, r, c) -> (C, c, r)
    """Transpose matrices, even symmetric ones: ONNX Runtime multiplies by transposes faster."""
    return S.transposed(0, 2, 1)


def joined(blocks: Blocks) -> GraphArray:
    """Assemble a symmetric matrix from its lower blocks."""
    if len(blocks) == 1:
        return blocks[0][2]
    (_, _, A), (_, _, B), (_, _, D) = blocks
    return xp.concat([xp.concat([A, B], axis=1), xp.concat([_mirrored(B), D], axis=1)], axis=2)


def _distances(
    x: GraphArray,  # (B, K)
    means: Numbers,  # (C, K)
    inverses: Blocks,
) -> GraphArray:  # (B, C)
    """(x - mu_c)' P_c (x - mu_c) in float64, expanded because (B, C, k) would not fit in memory."""
    total: GraphArray | None = None
    for rows, columns, P in inverses:
        P = P.astype(np.float64)
        r, c = rows.stop - (rows.start or 0), columns.stop - (columns.start or 0)
        left, right = x[:, rows], x[:, columns]
        outer = (left.reshape(0, r, 1) * right.reshape(0, 1, c)).reshape(0, r * c)
        mu, nu = xp.constant(means[:, rows]), xp.constant(means[:, columns])
        mu_P = (mu.reshape(0, 1, r) @ P).reshape(0, c)  # (C, c)
        P_nu = mu_P if rows == columns else (nu.reshape(0, 1, c) @ _mirrored(P)).reshape(0, r)
        form = _times(outer, P.reshape(0, r * c)) - _times(left, P_nu) - _times(right, mu_P)
        form = form + (mu * P_nu).sum(1)
        form = form if rows == columns else 2.0 * form  # the block above the diagonal
        total = form if total is None else total + form
    assert total is not None
    return total


def _times(x: GraphArray, y: GraphArray) -> GraphArray:  # (n, k), (m, k) -> (n, m)
    """Product x y' without a transposed copy."""
    return GraphArray(op.gemm(x.var, y.var, transB=1))


# --- the verdict ---------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """Float64 scalars that the verdict is based on."""

    ratio: GraphArray
    confident: GraphArray
    classes: GraphArray


def certificate(
    batch: Batch, pulled: GraphArray, scores: GraphArray, source: Source, settings: Settings
) -> Evidence:
    """Ratio (Eqs. 7-9) and coverage of the certificate; NaN if `propose` returned NaN."""
    top = scores.max(1, keepdims=True)
    kept = 1.0 / xp.exp(scores - top).sum(1) > settings.confidence
    assigned = scores.argmax(1)
    alike = (assigned.reshape(-1, 1).equals(assigned) & kept).astype(np.float64)  # (B, B)
    counts = alike.sum(1, keepdims=True)  # confident samples of every sample's class
    means = xp.taken(xp.constant(source.means), assigned)
    delta = alike @ pulled / xp.maximum(counts, 1.0) - means  # of every sample's class
    delta = xp.where((counts > 0.0) & batch.active, delta, 0.0)[:, : source.rank]
    whitened = batch.supported(delta @ xp.constant(source.whitener.T))
    margin = xp.taken(xp.constant(source.margins), batch.k - 1)
    ratio = xp.sqrt((whitened * whitened).sum(1).max()) / (margin + settings.eps)
    representable = xp.is_finite(scores) & xp.is_finite(batch.covariance.astype(np.float32))
    classes = xp.constant(np.arange(source.moments.n_classes)[:, None])
    occupied = (classes.equals(assigned) & kept).astype(np.int32).max(1)
    confident = kept.astype(np.float64).sum()
    return Evidence(
        xp.where(representable, ratio, np.nan), confident, occupied.sum().astype(np.float64)
    )


def is_ordered(
    chosen: GraphArray,  # (B,)
    size: GraphArray,
    moments: SourceMoments,
) -> GraphArray:
    """Evaluate `core.order.is_ordered` for a batch, in float32 as there."""
    priors = moments.priors.astype(np.float32)
    B = size.astype(np.float32)
    classes = xp.constant(np.arange(len(priors)))
    counts = chosen.reshape(-1, 1).equals(classes).astype(np.float32).sum(0)
    alike = (counts * (counts - 1.0)).sum() / (B * (B - 1.0))
    neighbours = chosen[1:].equals(chosen[:-1]).astype(np.float32).sum() / (B - 1.0)
    tiny = float(np.finfo(np.float32).eps)
    error = xp.sqrt(xp.maximum(alike * (1.0 - alike), tiny) / (B - 1.0))
    expected = float(np.sum(priors * priors))
    excess = (alike - expected) / (1 - expected)
    return ((neighbours - alike) / error > MAX_NEIGHBOURS) | (excess > MAX_EXCESS)


def decide(
    evidence: Evidence,
    sound: GraphArray,  # whether features are finite and no logit is NaN
    size: GraphArray,
    ordered: GraphArray,
    state: State,
    settings: Settings,
) -> tuple[GraphArray, GraphArray]:
    """Decide reason and ratio as `FeatureTransport.conclude` does."""
    ratio, confident, classes = evidence
    unmeasured = confident.equals(0.0)
    failed = xp.is_nan(ratio) | (xp.is_nan(ratio - ratio) & ~unmeasured) | ~sound
    single = size.equals(1) & sound
    needed = min(settings.min_classes, len(state.classes))
    causes: list[tuple[GraphArray, Reason]] = [  # later causes override earlier ones
        (ratio > settings.tau, "ratio"),
        (classes < needed, "min_classes"),
        (confident < settings.min_samples, "min_samples"),
        (unmeasured, "no_confident_class"),
    ]
    if settings.safeguards:
        causes.append(
            (ordered, "class_order")
            if state.supports_transport
            else (xp.constant(True), "source_check")
        )
    causes += [(failed, "numerical"), (single, "batch_too_small")]
    reason = reason_code("accepted")
    for holds, cause in causes:
        reason = xp.where(holds, reason_code(cause), reason)
    return reason, xp.where(unmeasured | failed | single, np.inf, ratio)
