"""Cross-validate last-layer transport on the source itself."""

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
from caster.io.labels import rank_in_class
from caster.state.source_check import SourceCheck

FOLDS = 5
BATCH = 64  # samples of a simulated batch
MAX_CHECKED = 4096  # largest number of samples to classify

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]
# Maps a function over 0 .. n - 1.
ParallelMap = Callable[[Callable[[int], Any], int], Iterable[Any]]


def serial_map(function: Callable[[int], Any], n: int) -> Iterable[Any]:
    """Apply a function to 0 .. n - 1, sequentially in this process."""
    return map(function, range(n))


def check_source(
    z: Floats,  # (N, k), samples projected on a held-out basis
    y: Indices,  # (N,), class indices
    head: Indices | None,  # (N,), the frozen head's predictions
    n_classes: int,
    per_feature: float,
    settings: Settings,
    parallel_map: ParallelMap = serial_map,
) -> SourceCheck:
    """Classify the samples of every fold with the class moments of the other folds.

    Computed in the dtype of the samples, as for batches.
    """
    rng = np.random.default_rng(0)
    folds, fold = _folds(y, rng.permutation(len(y)), n_classes)
    parts = [np.flatnonzero(fold == f) for f in range(folds)]
    # Shuffled, because folds list the classes in turn: unshuffled batches would be balanced.
    rows = [rng.permutation(part)[: -(-MAX_CHECKED // folds)] for part in parts]
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
    rows: Sequence[Indices],  # samples of every fold to classify
    settings: Settings,
    f: int,
) -> tuple[Indices, list[bool]]:
    # Moments of a fold are as large as those of all samples: computed here, they take memory once
    # and are not sent to every worker.
    source, tested = _other_moments(whole, z, y, parts[f]), rows[f]
    return _answers(z[tested], source, None if head is None else head[tested], settings)


def held_out_scores(
    z: Floats,  # (m, k), some samples, projected on a held-out basis
    y: Indices,  # (m,), class indices
    whole: ClassMoments,  # of all samples
    settings: Settings,
) -> tuple[Floats, Floats]:  # (m, C), (m, C)
    """Scores of Source-GDA and of transport, with the class moments of other samples.

    Transport uses batches of `BATCH`, and falls back to Source-GDA if it fails numerically.
    """
    n_classes = len(whole.counts)
    folds, fold = _folds(y, np.arange(len(y)), n_classes)
    gda = np.empty((len(z), n_classes), z.dtype)
    adapted = np.empty_like(gda)
    for f in range(folds):
        left_out = np.flatnonzero(fold == f)
        source = _other_moments(whole, z, y, left_out)
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
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = rank_in_class(y[order]) % folds
    return folds, fold


def _other_moments(whole: ClassMoments, z: Floats, y: Indices, left_out: Indices) -> SourceMoments:
    """Moments of all samples except those left out, in the dtype of the samples."""
    found = whole - ClassMoments.of(z[left_out], y[left_out], len(whole.counts))
    U = np.eye(z.shape[1], dtype=z.dtype)  # the samples are already projected
    means, covariances = (each.astype(z.dtype) for each in (found.means, found.covariances))
    return SourceMoments(U, means, covariances, found.counts)


def _answers(
    z: Floats,  # (n, k)
    source: SourceMoments,
    head: Indices | None,  # (n,)
    settings: Settings,
) -> tuple[Indices, list[bool]]:  # (3, n), one per batch
    """Predictions of Source-GDA, of the identity map and of gated transport, and the verdicts."""
    batches = np.array_split(np.arange(len(z)), max(1, round(len(z) / BATCH)))
    sizes = np.repeat([len(batch) for batch in batches], [len(batch) for batch in batches])
    verdicts = []
    with threads_for(source.n_classes), np.errstate(all="ignore"):
        gda = _untransported(z, source, settings)
        identity, gated = gda.copy(), (gda if head is None else head).copy()
        actives = {}  # sizes differ by at most one, so there are at most two
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
    """Accuracy lost against the frozen head, plus one standard error.

    The standard error counts one disagreement more than observed, so that agreement on a few
    samples proves nothing.
    """
    lost, won = int(np.sum(frozen & ~other)), int(np.sum(other & ~frozen))
    return (lost - won + math.sqrt(lost + won + 1)) / len(frozen)
