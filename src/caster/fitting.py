"""Source moments from a stream of labelled chunks, in two passes that never hold the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_jax_array
from numpy.typing import NDArray

from caster.arrays import as_real_array, like, to_numpy
from caster.config import CHUNK_ELEMENTS, STATE_DTYPE, Settings
from caster.core.linalg import Array, failures
from caster.core.moments import ClassMoments, ClassScatter
from caster.core.subspace import (
    between_factor,
    discriminative_basis,
    retained_rank,
    scatter_ridge,
    within_scatter,
)
from caster.core.types import SourceMoments
from caster.errors import CasterError
from caster.labels import Labels, as_labels, encode

Chunks = Iterable[tuple[Any, Any]]
OUT_OF_RANGE = "the features are too large or too small for float32: rescale them"


@np.errstate(all="ignore")  # what leaves the range of numbers is found, and reported in one line
def fit_moments(chunks: Chunks, classes: Labels, settings: Settings) -> SourceMoments:
    """Two passes over chunks of (features, labels): the subspace, then the moments in it."""
    if isinstance(chunks, Iterator):
        raise CasterError(
            "the chunks can be read only once, and fitting reads them twice: "
            "pass a list, or an object whose __iter__ starts anew"
        )
    if len(classes) < 2:
        raise CasterError(f"at least 2 classes are needed, the labels name {len(classes)} class")
    scatter = reduce(add, (ClassScatter.of(*piece) for piece in _pieces(chunks, classes)))
    _check_counts(to_numpy(scatter.counts), classes)
    U, ridge = _basis(scatter, settings)
    moments = reduce(
        add,
        (ClassMoments.of(h @ like(U, h, h.dtype), *rest) for h, *rest in _pieces(chunks, classes)),
    )
    if not np.array_equal(to_numpy(moments.counts), to_numpy(scatter.counts)):
        raise CasterError("the second pass over the chunks gave other samples than the first")
    found = SourceMoments(
        U=U,
        means=to_numpy(moments.means).astype(STATE_DTYPE),
        covariances=_storable(to_numpy(moments.covariances)),
        counts=to_numpy(moments.counts).astype(np.int64),
        ridge=ridge,
    )
    metric = replace(found).metric  # of a copy, which takes the cached values with it
    if not all(np.isfinite(array).all() for array in (found.means, found.covariances, metric)):
        raise CasterError(OUT_OF_RANGE)
    return found


def _storable(covariances: NDArray[Any]) -> NDArray[Any]:  # (C, k, k)
    """Covariances that rounding leaves symmetric, for the packed half to be the whole, and PSD.

    A class of fewer samples than directions has a singular covariance, which rounding alone would
    make indefinite; twice the rounding error on the diagonal keeps it from that.
    """
    symmetric = (covariances + covariances.transpose(0, 2, 1)) / 2
    traces = np.trace(symmetric, axis1=1, axis2=2)[:, None, None]
    slack = 2 * np.finfo(STATE_DTYPE).eps * traces * np.eye(covariances.shape[1])
    rounded: NDArray[Any] = (symmetric + slack).astype(STATE_DTYPE)
    return rounded


def _basis(scatter: ClassScatter, settings: Settings) -> tuple[NDArray[Any], float]:
    """U and its ridge. U is rounded before the second pass: source and target share its error."""
    ridge = scatter_ridge(scatter, settings.scatter_ridge)
    if not math.isfinite(ridge):
        raise CasterError("the features are too large to square: rescale them")
    if ridge == 0:
        raise CasterError("the features do not vary within any class: there is nothing to model")
    k0 = retained_rank(settings.k_max, int(scatter.counts.shape[0]), scatter.width)
    S_w, F = within_scatter(scatter, ridge), between_factor(scatter)
    try:
        exact = discriminative_basis(S_w, F, k0)
    except failures(array_namespace(S_w)):
        raise CasterError(
            "the scatter of the features cannot be factored: rescale them or raise scatter_ridge"
        ) from None
    if exact.shape[1] == 0:
        raise CasterError("all class means coincide: these features do not tell the classes apart")
    U = np.ascontiguousarray(to_numpy(exact), dtype=STATE_DTYPE)  # as a file gives it back
    smallest = np.finfo(STATE_DTYPE).tiny
    if not (np.isfinite(U).all() and (np.abs(U).max(axis=0) > smallest).all()):
        raise CasterError(OUT_OF_RANGE)
    return U, ridge


def _pieces(chunks: Chunks, classes: Labels) -> Iterator[tuple[Array, Array, int]]:
    """Chunks as (features, class indices, C), checked, and cut so that a piece stays small."""
    width, seen = None, 0
    try:
        read = iter(chunks)
    except TypeError:
        raise CasterError(f"chunks must be a list of pairs, not {type(chunks).__name__}") from None
    for chunk in read:
        features, labels = pair(chunk)
        # JAX has no float64 unless told so at its start, and sums need it.
        features = to_numpy(features) if is_jax_array(features) else features
        h, y = as_real_array(features), encode(as_labels(labels), classes)
        if h.ndim != 2 or (width is not None and h.shape[1] != width) or h.shape[1] == 0:
            shape = tuple(h.shape)
            raise CasterError(f"features must be (samples, {width or 'features'}), not {shape}")
        if h.shape[0] != len(y):
            raise CasterError(f"{h.shape[0]} rows of features have {len(y)} labels")
        width = h.shape[1]
        rows = max(1, CHUNK_ELEMENTS // max(width, len(classes)))
        for start in range(0, len(y), rows):
            stop = min(start + rows, len(y))
            _check_finite(h[start:stop, :], seen + start)
            yield h[start:stop, :], like(y[start:stop], h), len(classes)
        seen += len(y)
    if seen == 0:
        raise CasterError("there are no samples to fit")


def pair(chunk: Any) -> tuple[Any, Any]:
    """A chunk's features and labels, or a batch's images and labels."""
    try:
        features, labels = chunk
    except (TypeError, ValueError):
        raise CasterError(
            "every chunk or batch must be a pair: features or images, and labels"
        ) from None
    return features, labels


def _check_finite(piece: Array, first_row: int) -> None:
    xp = array_namespace(piece)
    if bool(xp.isfinite(xp.sum(piece))):  # one pass without a temporary; a sum may overflow
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
