"""Fit source moments from labelled chunks in two passes, without storing the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import chain
from operator import add
from typing import Any, Self, TypeVar

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj, is_jax_array, is_numpy_array
from numpy.typing import NDArray

from caster.adapt.cross_validation import ParallelMap, check_source, held_out_scores, serial_map
from caster.config import CHUNK_ELEMENTS, STATE_DTYPE, Settings
from caster.core import threads
from caster.core.arrays import as_real_array, like, to_numpy
from caster.core.discriminant import probabilities
from caster.core.linalg import Array, failures
from caster.core.moments import ClassMoments, ClassScatter
from caster.core.subspace import Basis, HeldOutBasis, WithinScatter, retained_rank
from caster.core.types import SourceMoments
from caster.errors import CasterError
from caster.io.labels import Labels, as_labels, encode, rank_in_class
from caster.models.batches import INPUTS, named
from caster.models.heads import better_names
from caster.state.sketch import Sketch, sketch_size
from caster.state.source_check import SourceCheck

Chunks = Iterable[tuple[Any, ...]]  # (features, labels) or (features, labels, logits)
Piece = tuple[Array, Array, NDArray[Any] | None]  # features, class indices, the head's logits
Result = TypeVar("Result")
LABELS = "labels", "label", "y", "target", "targets"  # keys of the labels in a batch that is a dict
MAX_KEPT = 2**24  # largest number of projected values that are stored to check the fit
# Not 0: keys must be independent of a source that was shuffled by a generator with that seed.
SKETCH_SEED = int.from_bytes(b"sketch")
log = logging.getLogger("caster")

OUT_OF_RANGE = "the features are too large or too small for float32: rescale them"


@np.errstate(all="ignore")  # overflow is detected and reported in one line
def fit_moments(
    chunks: Chunks, classes: Labels, settings: Settings, sketched: bool = False
) -> tuple[SourceMoments, SourceCheck, Sketch | None]:
    """Fit in two passes over chunks of (features, labels) or (features, labels, logits).

    The first pass finds the subspace. The second computes held-out moments in it, cross-validates
    transport, and draws a sketch if `sketched`.
    """
    if isinstance(chunks, Iterator):
        raise CasterError(
            "the chunks can be read only once, and fitting reads them twice: "
            "pass a list, or an object that can be iterated over again"
        )
    if len(classes) < 2:
        raise CasterError(f"at least 2 classes are needed, the labels name {len(classes)} class")
    subspace = Subspace.of(class_scatter(chunks, classes), classes, settings)
    return held_out_sums(chunks, classes, subspace, sketched).fitted(subspace, classes, settings)


def class_scatter(chunks: Chunks, classes: Labels) -> ClassScatter:
    """Sum the class scatter of all chunks: the first pass."""
    of = partial(ClassScatter.of, n_classes=len(classes))
    sums = (_each(of, pieces) for pieces in _pieces(chunks, classes))
    return reduce(add, chain.from_iterable(sums))


@dataclass(frozen=True, eq=False)
class Subspace:
    """The subspace found by the first pass, and the projection for the second."""

    scatter: ClassScatter
    S_w: WithinScatter
    basis: Basis

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, scatter: ClassScatter, classes: Labels, settings: Settings) -> Self:
        """Find the basis; raise if the samples do not define one."""
        _check_counts(to_numpy(scatter.counts), classes)
        # A second thread speeds one factorisation up little, and stalls it on a busy machine.
        with threads.one_blas_thread():
            return cls(scatter, *_basis(scatter, settings))

    @property
    def rank(self) -> int:
        """Number of directions k."""
        return int(self.basis.U.shape[1])

    def held_out(self, dtype: Any) -> HeldOutBasis:
        """Held-out basis for features of one dtype, computed on first use."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = HeldOutBasis.of(self.scatter, self.S_w, self.basis, dtype)
        return self._by_dtype[dtype]

    @cached_property
    def _by_dtype(self) -> dict[Any, HeldOutBasis]:
        return {}


@np.errstate(all="ignore")
def held_out_sums(
    chunks: Chunks,
    classes: Labels,
    subspace: Subspace,
    sketched: bool,
    before: NDArray[np.int64] | None = None,  # (C,)
) -> HeldOutSums:
    """Sum the held-out moments of all chunks: the second pass.

    `before` counts the samples of each class in earlier chunks, if others summed those.
    """
    C = len(classes)
    before = np.zeros(C, dtype=np.int64) if before is None else before
    kept = _CheckSamples(before, subspace.rank)
    drawn = _SketchSampler(sketch_size(C) if sketched else 0, int(before.sum()))

    def projected() -> Iterator[tuple[Array, Array]]:
        for pieces in _pieces(chunks, classes):
            basis = subspace.held_out(pieces[0][0].dtype)
            for (_, y, logits), z in zip(pieces, _each(basis.project, pieces), strict=True):
                kept.add(z, y, logits)
                drawn.add(z, y, logits)
                yield z, y

    moments: ClassMoments | None = None
    for z, y in _gathered(projected(), CHUNK_ELEMENTS // subspace.rank):
        if moments is None:
            moments = ClassMoments.of(z, y, C)
        else:
            moments.include(z, y)
    assert moments is not None
    return HeldOutSums(moments, kept, drawn)


def _gathered(pieces: Iterator[tuple[Array, Array]], rows: int) -> Iterator[tuple[Array, Array]]:
    """Join small pieces up to `rows`: adding class moments costs C*k^2, however few the rows."""
    waiting: list[tuple[Array, Array]] = []

    def joined() -> tuple[Array, Array]:
        xp = array_namespace(waiting[0][0])
        z, y = (xp.concat(parts) for parts in zip(*waiting, strict=True))
        waiting.clear()
        return z, y

    for piece in pieces:
        if waiting and sum(z.shape[0] for z, _ in (*waiting, piece)) > rows:
            yield joined()
        waiting.append(piece)
    if waiting:
        yield joined()


@dataclass(frozen=True, eq=False)
class HeldOutSums:
    """Held-out moments, and samples for the source check and the sketch.

    Samples are chosen by their position in the source, so any division into parts gives the same.
    """

    moments: ClassMoments
    kept: _CheckSamples
    drawn: _SketchSampler

    @np.errstate(all="ignore")
    def fitted(
        self,
        subspace: Subspace,
        classes: Labels,
        settings: Settings,
        parallel_map: ParallelMap = serial_map,
    ) -> tuple[SourceMoments, SourceCheck, Sketch | None]:
        """Moments as the state stores them, the source check, and the sketch."""
        moments, scatter = self.moments, subspace.scatter
        if not np.array_equal(to_numpy(moments.counts), to_numpy(scatter.counts)):
            raise CasterError("the second pass over the chunks gave other samples than the first")
        found = SourceMoments(
            U=np.ascontiguousarray(to_numpy(subspace.basis.U), dtype=STATE_DTYPE),
            means=to_numpy(moments.means).astype(STATE_DTYPE),
            covariances=_storable(to_numpy(moments.covariances)),
            counts=to_numpy(moments.counts).astype(np.int64),
        )
        metric = replace(found).metric  # of a copy, so that its cached values are freed
        if not all(np.isfinite(array).all() for array in (found.means, found.covariances)):
            raise CasterError(OUT_OF_RANGE)
        if not np.isfinite(metric).all():
            raise CasterError(
                "the samples vary in fewer directions than separate the classes: add samples"
            )
        per_feature = scatter.total / scatter.width
        check = self.kept.check(classes, per_feature, settings, parallel_map)
        return found, check, self.drawn.sketch(moments, settings)


class _CheckSamples:
    """The first samples of every class, within a memory quota, for `check_source`."""

    def __init__(self, before: NDArray[np.int64], k: int) -> None:  # (C,)
        self._quota = max(2, MAX_KEPT // (len(before) * k))
        self._counts = before.copy()
        self._parts: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]] = []

    def add(self, z: Array, y: Array, logits: NDArray[Any] | None) -> None:
        """Store samples within the quota of their class."""
        classes = to_numpy(y)
        counts = np.bincount(classes, minlength=len(self._counts))
        rows = np.flatnonzero(rank_in_class(classes) + self._counts[classes] < self._quota)
        self._counts += counts
        kept = to_numpy(z)[rows].astype(STATE_DTYPE)
        head = None if logits is None else logits[rows].argmax(axis=1)
        self._parts.append((kept, classes[rows], head))

    def __add__(self, later: Self) -> Self:
        both = copy(later)  # its counts include these samples
        both._counts = later._counts.copy()
        both._parts = self._parts + later._parts
        both._parts = [both._joined()]  # copied: a view would keep a worker's whole message alive
        return both

    def _joined(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        z, y, head = zip(*self._parts, strict=True)
        answers = None if any(part is None for part in head) else np.concatenate(head)
        return np.concatenate(z), np.concatenate(y), answers

    def check(
        self, classes: Labels, per_feature: float, settings: Settings, parallel_map: ParallelMap
    ) -> SourceCheck:
        """Cross-validate on the stored samples; warn if the head's outputs look permuted."""
        z, y, head = self._joined()
        found = None if head is None else better_names(head, y, len(classes))
        if found is not None:
            log.warning(
                "the model's outputs do not seem to be in the order of the classes: on the source "
                "%s. Name them in their order (`classes`, or `--classes`), or sort the columns of "
                "`logits` like the labels",
                found.message(classes),
            )
        return check_source(z, y, head, len(classes), per_feature, settings, parallel_map)


class _SketchSampler:
    """Uniform sample of the source, of bounded size; the same for any division into chunks."""

    def __init__(self, size: int, before: int) -> None:
        self._size, self._seen = size, before
        self._parts: list[NDArray[Any]] = []  # keys, features, classes and, if given, logits

    def add(self, z: Array, y: Array, logits: NDArray[Any] | None) -> None:
        """Add samples to draw from."""
        if not self._size:
            return
        bits = np.random.PCG64(SKETCH_SEED).advance(self._seen)  # one step per sample
        self._seen += z.shape[0]
        keys = np.random.Generator(bits).random(z.shape[0])
        self._draw([keys, to_numpy(z), to_numpy(y), *([] if logits is None else [logits])])

    def __add__(self, other: Self) -> Self:
        both = copy(self)
        if other._parts:
            both._draw(other._parts)
        return both

    def _draw(self, arrays: list[NDArray[Any]]) -> None:
        if self._parts:  # once full, only keys below the largest one matter
            is_full = len(self._parts[0]) == self._size
            rows = arrays[0] < (self._parts[0].max() if is_full else 1)
            pairs = zip(self._parts, arrays, strict=True)
            arrays = [np.concatenate([a, b[rows]]) for a, b in pairs]
        smallest = np.argsort(arrays[0])[: self._size]
        self._parts = [array[smallest] for array in arrays]

    def sketch(self, whole: ClassMoments, settings: Settings) -> Sketch | None:
        """Drawn samples with their frozen and adapted answers; None if none is finite."""
        if not self._size:
            return None
        _, z, y, *logits = self._parts
        moments = ClassMoments(*map(to_numpy, (whole.counts, whole.means, whole.scatters)))
        gda, adapted = held_out_scores(z, y, moments, settings)
        answers = [probabilities(s.astype(np.float64)) for s in (*(logits or [gda]), adapted)]
        uncertainty = np.stack([1 - p.max(axis=1) for p in answers], axis=1)
        wrong = np.stack([p.argmax(axis=1) != y for p in answers], axis=1)
        numbers = (z, *answers)  # a head may give infinite logits
        rows = np.all([np.isfinite(array).all(axis=1) for array in numbers], axis=0)
        found = Sketch(
            features=z[rows].astype(STATE_DTYPE),
            probabilities=answers[0][rows].astype(np.float16),
            labels=y[rows].astype(np.int64),
            uncertainty=uncertainty[rows].astype(STATE_DTYPE),
            wrong=wrong[rows].astype(np.uint8),
        )
        return found if len(found) else None


def _storable(covariances: NDArray[Any]) -> NDArray[Any]:  # (C, k, k)
    """Round covariances to the stored dtype, exactly symmetric and positive semidefinite.

    A class with fewer samples than directions has a singular covariance, which rounding could make
    indefinite; twice the rounding error is added to the diagonal to prevent that.
    """
    symmetric = (covariances + covariances.transpose(0, 2, 1)) / 2
    traces = np.trace(symmetric, axis1=1, axis2=2)[:, None, None]
    slack = 2 * np.finfo(STATE_DTYPE).eps * traces * np.eye(covariances.shape[1])
    rounded: NDArray[Any] = (symmetric + slack).astype(STATE_DTYPE)
    return rounded


def _basis(scatter: ClassScatter, settings: Settings) -> tuple[WithinScatter, Basis]:
    """S_w and U; U is rounded before the second pass, so that source and target share its error."""
    variance = float(to_numpy(scatter.within).diagonal().sum())
    if not math.isfinite(variance):
        raise CasterError("the features are too large to square: rescale them")
    if variance == 0:
        raise CasterError("the features do not vary within any class: there is nothing to model")
    k0 = retained_rank(settings.k_max, int(scatter.counts.shape[0]), scatter.width)
    try:
        S_w = WithinScatter.of(scatter)
        basis = Basis.of(scatter, S_w, k0)
    except failures(array_namespace(scatter.within)):
        raise CasterError("the scatter of the features cannot be factored: rescale them") from None
    if basis.U.shape[1] == 0:
        raise CasterError("all class means coincide: these features do not separate the classes")
    U = np.ascontiguousarray(to_numpy(basis.U), dtype=STATE_DTYPE)  # as loaded from a file
    smallest = np.finfo(STATE_DTYPE).tiny
    if not (np.isfinite(U).all() and (np.abs(U).max(axis=0) > smallest).all()):
        raise CasterError(OUT_OF_RANGE)
    return S_w, replace(basis, U=like(U, basis.U, basis.U.dtype))


def _each(function: Callable[[Array, Array], Result], pieces: list[Piece]) -> Iterator[Result]:
    """Apply a function to features and class indices of every piece of a chunk."""
    # torch uses its own threads
    several = threads.parallel_map if is_numpy_array(pieces[0][0]) else map
    return several(lambda piece: function(*piece[:2]), pieces)


def _pieces(chunks: Chunks, classes: Labels) -> Iterator[list[Piece]]:
    """Check chunks and split them into small pieces; skip empty chunks."""
    width, seen = None, 0
    try:
        read = iter(chunks)
    except TypeError:
        raise CasterError(f"chunks must be a list of pairs, not {type(chunks).__name__}") from None
    for chunk in read:
        features, labels, *logits = chunk if _is_triple(chunk) else pair(chunk)
        # Sums need float64, which JAX lacks unless it was enabled at start-up.
        features = to_numpy(features) if is_jax_array(features) else features
        h, y = as_real_array(features), encode(as_labels(labels), classes)
        if h.ndim != 2 or (width is not None and h.shape[1] != width) or h.shape[1] == 0:
            shape = tuple(h.shape)
            raise CasterError(f"features must be (samples, {width or 'features'}), not {shape}")
        if h.shape[0] != len(y):
            raise CasterError(f"{h.shape[0]} rows of features have {len(y)} labels")
        head = _checked_logits(logits[0], len(y), len(classes)) if logits else None
        width = h.shape[1]
        rows = max(1, CHUNK_ELEMENTS // max(width, len(classes)))
        pieces: list[Piece] = []
        for start in range(0, len(y), rows):
            stop = min(start + rows, len(y))
            _check_finite(h[start:stop, :], seen + start)
            part = None if head is None else head[start:stop]
            pieces.append((h[start:stop, :], like(y[start:stop], h), part))
        if pieces:
            yield pieces
        seen += len(y)
    if seen == 0:
        raise CasterError("there are no samples to fit")


def _is_triple(chunk: Any) -> bool:
    return isinstance(chunk, tuple | list) and len(chunk) == 3


def _checked_logits(logits: Any, rows: int, n_classes: int) -> NDArray[Any]:  # (n, C)
    """Copy the frozen head's logits to the host, and check them."""
    found = to_numpy(as_real_array(logits))
    if found.shape != (rows, n_classes):
        raise CasterError(f"head_logits must be {(rows, n_classes)}, not {found.shape}")
    if np.isnan(found).any():
        raise CasterError("head_logits hold NaN: the frozen model's answer is undefined")
    return found


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels of a labelled batch: a pair, or a dict with known keys.

    >>> pair({"pixel_values": [[0.5]], "labels": [1]})
    ([[0.5]], [1])
    """
    if isinstance(batch, Mapping):
        return named(batch, INPUTS), named(batch, LABELS)
    try:
        if is_array_api_obj(batch):  # an array of two rows would unpack
            raise TypeError
        inputs, labels = batch
    except (TypeError, ValueError):
        raise CasterError(
            "every chunk or batch must be a pair: features or images, and labels"
        ) from None
    return inputs, labels


def _check_finite(piece: Array, first_row: int) -> None:
    xp = array_namespace(piece)
    if bool(xp.isfinite(xp.sum(piece))):  # fast, without a temporary; a sum may overflow
        return
    bad = np.argwhere(~np.isfinite(to_numpy(piece)))
    if len(bad):
        row, column = bad[0]
        raise CasterError(
            f"features hold NaN or infinity, first in row {first_row + row}, column {column}: "
            "drop or repair such rows"
        )


def _check_counts(counts: NDArray[Any], classes: Labels) -> None:
    scarce = np.flatnonzero(counts < 2)
    if len(scarce):
        label, count = classes.tolist()[scarce[0]], int(counts[scarce[0]])
        raise CasterError(
            f"class {label!r} has {count} sample{'' if count == 1 else 's'}, a covariance needs 2"
            + (f" ({len(scarce)} such classes)" if len(scarce) > 1 else "")
            + ": add samples or drop the class"
        )
