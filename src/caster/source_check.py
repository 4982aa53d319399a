"""Whether last-layer transport holds up on its own source, cross-validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.discriminant import ridged_scores
from caster.core.linalg import identity_like
from caster.core.moments import ClassMoments
from caster.core.subspace import active_rank
from caster.core.types import SourceMoments
from caster.threads import threads_for
from caster.trial import try_transport

FOLDS = 5
BATCH = 64  # samples of a simulated batch
MOST_CHECKED = 4096  # samples that are classified
ENOUGH = 4.0  # source samples a feature, where transport cannot be held against a head
ALLOWED_LOSS = 0.01  # of accuracy, on the source itself, for transport to be on by default
MEMORIZED = 0.995  # accuracy of a head from which on the source looks like its training images

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SourceCheck:
    """Cross-validated accuracies on the source, in shuffled batches of 64.

    >>> check = SourceCheck(2000, head=0.99, source_gda=0.95, identity=0.95, gated=0.96,
    ...                     accepted=0.8, loss=0.046, per_feature=2.0)
    >>> check.supported
    False
    """

    samples: int  # that were classified
    head: float | None  # accuracy of the frozen head; None: no logits came with the features
    source_gda: float  # of the source's Gaussians, in all directions
    identity: float  # of the same in the directions that a batch activates: no map
    gated: float  # of transport behind its certificate
    accepted: float  # share of the batches
    loss: float | None  # what the head has over Source-GDA or gated transport, plus one s.e.
    per_feature: float  # samples of the source for every feature, N / d

    @property
    def supported(self) -> bool:
        """Whether transport may answer by default.

        It must lose at most a point to the head on the source or, where no head was given to
        compare with, rest on enough samples.
        """
        return self.per_feature >= ENOUGH if self.loss is None else self.loss <= ALLOWED_LOSS

    def sentences(self) -> list[str]:
        """What follows for a user."""
        state = "on" if self.supported else "off by default for this state"
        if self.head is None:
            return [
                f"Last-layer transport is {state}: {self.per_feature:.3g} source samples a feature "
                f"(at least {ENOUGH:g} are needed), and no logits to hold it against the head."
            ]
        found = (
            f"cross-validated on {self.samples:,} source samples, the frozen head reaches "
            f"{self.head:.1%}, Source-GDA {self.source_gda:.1%}, without a map {self.identity:.1%} "
            f"and gated transport {self.gated:.1%}"
        )
        said = [f"Last-layer transport is {state}: {found}."]
        if self.head >= MEMORIZED:
            said.append(
                "The head is almost always right on these images, as on images it was trained on: "
                "held-out images give honest statistics."
            )
        return said


def check_source(
    z: Floats,  # (N, k), samples projected on a basis that has not seen them
    y: Indices,  # (N,), class indices
    head: Indices | None,  # (N,), the frozen head's answers
    n_classes: int,
    per_feature: float,
    settings: Settings,
) -> SourceCheck:
    """Classify the samples of every fold by the class moments of the other folds."""
    rng = np.random.default_rng(0)
    folds, fold = _folds(y, rng.permutation(len(y)), n_classes)
    rows, answers, verdicts = [], [], []
    for f in range(folds):
        rest = fold != f
        source = _moments(z[rest], y[rest], n_classes)
        # In an order of its own: every class takes turns, which would balance the batches.
        tested = rng.permutation(np.flatnonzero(fold == f))[: -(-MOST_CHECKED // folds)]
        for batch in np.array_split(tested, max(1, round(len(tested) / BATCH))):
            found, accepted = _answers(z[batch], source, settings)
            if not accepted:
                found[2] = found[0] if head is None else head[batch]
            rows.append(batch)
            answers.append(found)
            verdicts.append(accepted)
    checked = np.concatenate(rows)
    gda, identity, gated = (a == y[checked] for a in np.concatenate(answers, axis=1))
    frozen = None if head is None else head[checked] == y[checked]
    return SourceCheck(
        samples=len(checked),
        head=None if frozen is None else float(frozen.mean()),
        source_gda=float(gda.mean()),
        identity=float(identity.mean()),
        gated=float(gated.mean()),
        accepted=float(np.mean(verdicts)),
        loss=None if frozen is None else max(_loss(frozen, gda), _loss(frozen, gated)),
        per_feature=per_feature,
    )


def _folds(y: Indices, order: Indices, n_classes: int) -> tuple[int, Indices]:
    """How many folds, and the fold of every sample: a class's samples take turns."""
    counts = np.bincount(y, minlength=n_classes)
    folds = max(2, min(FOLDS, int(counts.min())))
    by_class = order[np.argsort(y[order], kind="stable")]
    turn = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    fold = np.empty(len(y), dtype=np.int64)
    fold[by_class] = turn % folds
    return folds, fold


def _moments(z: Floats, y: Indices, n_classes: int) -> SourceMoments:
    found = ClassMoments.of(z, y, n_classes)
    U = np.eye(z.shape[1])  # the samples are projected already
    return SourceMoments(U, found.means, found.covariances, found.counts)


def _answers(z: Floats, source: SourceMoments, settings: Settings) -> tuple[Indices, bool]:
    """Class indices by Source-GDA, without a map and by transport (3, B); the verdict on it."""
    k = active_rank(source.rank, len(z))
    active = source.restrict(k)
    with threads_for(source.n_classes), np.errstate(all="ignore"):
        gda, identity = (
            ridged_scores(z[:, : m.rank], m, settings.beta * identity_like(m.within))
            for m in (source, active)
        )
        if k == 0:
            return np.stack([gda.argmax(axis=1)] * 3), False
        proposal, verdict = try_transport(z[:, :k], active, settings)
    found = [scores.argmax(axis=1) for scores in (gda, identity, proposal.scores)]
    return np.stack(found), verdict.accepted


def _loss(frozen: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Accuracy lost to the frozen head, plus a standard error of that.

    One more disagreement is counted than were seen, so that a few samples on which both agree
    prove nothing.
    """
    lost, won = int(np.sum(frozen & ~other)), int(np.sum(other & ~frozen))
    return (lost - won + math.sqrt(lost + won + 1)) / len(frozen)
