"""Cross-validate last-layer transport on its own source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.discriminant import source_scores
from caster.core.moments import ClassMoments
from caster.core.proposal import try_transport
from caster.core.subspace import active_rank
from caster.core.threads import threads_for
from caster.core.types import SourceMoments
from caster.state.source_check import SourceCheck

FOLDS = 5
BATCH = 64  # samples of a simulated batch
MOST_CHECKED = 4096  # samples that are classified

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]
# From a function and n to its results for 0 .. n - 1.
ParallelMap = Callable[[Callable[[int], Any], int], Iterable[Any]]


def serial_map(function: Callable[[int], Any], n: int) -> Iterable[Any]:
    """Apply a function to 0 .. n - 1, one after the other in this process."""
    return map(function, range(n))


def check_source(
    z: Floats,  # (N, k), samples projected on a basis that has not seen them
    y: Indices,  # (N,), class indices
    head: Indices | None,  # (N,), the frozen head's answers
    n_classes: int,
    per_feature: float,
    settings: Settings,
    parallel_map: ParallelMap = serial_map,
) -> SourceCheck:
    """Classify the samples of every fold by the class moments of the other folds.

    In the dtype of the samples, as batches are.
    """
    rng = np.random.default_rng(0)
    folds, fold = _folds(y, rng.permutation(len(y)), n_classes)
    parts = [np.flatnonzero(fold == f) for f in range(folds)]
    # Shuffled: folds take every class in turn, and in that order batches would be balanced.
    rows = [rng.permutation(part)[: -(-MOST_CHECKED // folds)] for part in parts]
    whole = ClassMoments.of(z, y, n_classes)
    check = partial(_check_fold, z, y, head, whole, parts, rows, settings)
    answers, verdicts = zip(*parallel_map(check, folds), strict=True)
    checked = np.concatenate(rows)
    gda, identity, gated = (a == y[checked] for a in np.concatenate(answers, axis=1))
    frozen = None if head is None else head[checked] == y[checked]
    return SourceCheck(
        samples=len(checked),
        head=None if frozen is None else float(frozen.mean()),
        source_gda=float(gda.mean()),
        identity=float(identity.mean()),
        gated=float(gated.mean()),
        accepted=float(np.mean(np.concatenate(verdicts))),
        loss=None if frozen is None else max(_loss(frozen, gda), _loss(frozen, gated)),
        per_feature=per_feature,
    )


def _check_fold(
    z: Floats,
    y: Indices,
    head: Indices | None,
    whole: ClassMoments,
    parts: Sequence[Indices],  # samples of every fold
    rows: Sequence[Indices],  # those that are classified
    settings: Settings,
    f: int,
) -> tuple[Indices, list[bool]]:
    left_out, tested = parts[f], rows[f]
    # A fold's moments are as large as the whole's: all folds' would take `folds` times the memory,
    # and would travel to every worker.
    others = whole - ClassMoments.of(z[left_out], y[left_out], len(whole.counts))
    source = _moments(others, z.dtype)
    del others  # as large as the source
    return _answers(z[tested], source, None if head is None else head[tested], settings)


def held_out_scores(
    z: Floats,  # (m, k), some samples, projected on a basis that has not seen them
    y: Indices,  # (m,), class indices
    whole: ClassMoments,  # of all samples
    settings: Settings,
) -> tuple[Floats, Floats]:  # (m, C), (m, C)
    """Scores of Source-GDA and of transport, by the class moments of other samples.

    Transport is that of batches of `BATCH`; where it fails numerically, Source-GDA answers.
    """
    n_classes = len(whole.counts)
    folds, fold = _folds(y, np.arange(len(y)), n_classes)
    gda = np.empty((len(z), n_classes), z.dtype)
    adapted = np.empty_like(gda)
    for f in range(folds):
        left_out = np.flatnonzero(fold == f)
        others = whole - ClassMoments.of(z[left_out], y[left_out], n_classes)
        source = _moments(others, z.dtype)
        with threads_for(source.n_classes), np.errstate(all="ignore"):
            for rows in np.array_split(left_out, max(1, round(len(left_out) / BATCH))):
                gda[rows] = adapted[rows] = source_scores(z[rows], source, settings.beta)
                active = source.restrict(active_rank(source.rank, len(rows)))
                if active.rank:
                    proposal, verdict = try_transport(z[rows, : active.rank], active, settings)
                    if verdict.has_proposal:
                        adapted[rows] = proposal.scores
    return gda, adapted


def _folds(y: Indices, order: Indices, n_classes: int) -> tuple[int, Indices]:
    """The number of folds, and the fold of every sample, balanced within each class."""
    counts = np.bincount(y, minlength=n_classes)
    folds = max(2, min(FOLDS, int(counts.min())))
    by_class = order[np.argsort(y[order], kind="stable")]
    turn = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    fold = np.empty(len(y), dtype=np.int64)
    fold[by_class] = turn % folds
    return folds, fold


def _moments(found: ClassMoments, dtype: Any) -> SourceMoments:
    U = np.eye(found.means.shape[1], dtype=dtype)  # the samples are projected already
    means, covariances = (each.astype(dtype) for each in (found.means, found.covariances))
    return SourceMoments(U, means, covariances, found.counts)


def _answers(
    z: Floats,  # (n, k)
    source: SourceMoments,
    head: Indices | None,  # (n,)
    settings: Settings,
) -> tuple[Indices, list[bool]]:  # (3, n), one per batch
    """Predictions of Source-GDA, without a map and with gated transport, and the verdicts."""
    batches = np.array_split(np.arange(len(z)), max(1, round(len(z) / BATCH)))
    sizes = np.repeat([len(batch) for batch in batches], [len(batch) for batch in batches])
    verdicts = []
    with threads_for(source.n_classes), np.errstate(all="ignore"):
        gda = _untransported(z, source, settings)
        identity, gated = gda.copy(), (gda if head is None else head).copy()
        actives = {}  # the sizes differ by one at most, so each moment is computed twice at most
        for size in set(sizes.tolist()) - {1}:
            k, rows = active_rank(source.rank, size), sizes == size
            actives[size] = source.restrict(k)
            if k < source.rank:
                identity[rows] = _untransported(z[rows, :k], actives[size], settings)
        for rows in batches:
            active = actives.get(len(rows))
            if active is None:  # a batch of one has no transport
                verdicts.append(False)
                continue
            proposal, verdict = try_transport(z[rows, : active.rank], active, settings)
            verdicts.append(verdict.accepted)
            if verdict.accepted:
                gated[rows] = proposal.assigned
    return np.stack([gda, identity, gated]), verdicts


def _untransported(z: Floats, source: SourceMoments, settings: Settings) -> Indices:  # (n,)
    return np.asarray(source_scores(z, source, settings.beta).argmax(axis=1))


def _loss(frozen: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Accuracy lost to the frozen head, plus one standard error.

    One more disagreement is counted than were seen, so that a few samples on which both agree
    prove nothing.
    """
    lost, won = int(np.sum(frozen & ~other)), int(np.sum(other & ~frozen))
    return (lost - won + math.sqrt(lost + won + 1)) / len(frozen)
