"""Metrics of one cell, computed from its samples and batches; reports use nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.verdict import decide
from caster.errors import CasterError
from caster_bench.records.schema import Batches as Raw
from caster_bench.records.store import Record
from caster_bench.studies.check_gates import constants_of
from caster_bench.studies.check_rows import NO_HEAD
from caster_bench.studies.naming import ALWAYS
from caster_bench.sweeps.spec import Spec

PLATEAU = 0.003  # accuracy within this of the best counts as the plateau


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a cell in stream order; all arrays are (batches,)."""

    size: NDArray[Any]
    right: NDArray[Any]
    frozen: NDArray[Any]  # correct predictions of the frozen model
    accepted: NDArray[np.bool_]
    ratio: NDArray[np.float64]  # NaN without a gate
    min_tau: NDArray[np.float64]  # smallest tau that accepts the batch; infinite if none does
    seconds: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Score:
    """Metrics of a cell."""

    spec: Spec
    n: int
    accuracy: float
    frozen: float | None  # accuracy of the frozen model; None without a head
    harmed: float | None  # share of samples only the frozen model gets right
    batches: Batches
    tau: float  # from the cell's constants and settings
    retained: int  # bytes
    gradients: bool  # whether the method is gradient-based
    inert: bool
    memory: float | None  # peak MiB on the device

    @property
    def backward(self) -> bool:
        """Whether it ran a backward pass."""
        return self.gradients and not self.inert

    @property
    def gain(self) -> float:
        """Accuracy gain over the frozen model."""
        return self.accuracy - self._against_head(self.frozen)

    @property
    def harm(self) -> float:
        """Share of samples that the frozen model gets right and the method wrong."""
        return self._against_head(self.harmed)

    def _against_head(self, share: float | None) -> float:
        if share is None:
            raise CasterError(f"{self.spec.title}: the backbone has no head to compare with")
        return share

    @property
    def accept(self) -> float:
        """Share of accepted batches."""
        return float(self.batches.accepted.mean())

    @property
    def certificate(self) -> float:
        """Median ratio of the batches.

        Not the mean, because a batch without confident samples has an infinite ratio.
        """
        if np.isnan(self.batches.ratio).any():
            raise CasterError(f"{self.spec.title}: no certificate was measured")
        return float(np.median(self.batches.ratio))


def score(record: Record) -> Score:
    """Compute the metrics of a finished cell."""
    spec, samples, batches, cell = record.spec, record.samples, record.batches, record.cell
    if samples is None or batches is None:
        raise CasterError(f"{spec.title} was rejected and has no score")
    settings = constants_of(spec, cell.identity["constants"])
    right = samples.prediction == samples.label
    kept = samples.frozen == samples.label
    headless = bool((samples.frozen == NO_HEAD).any())
    count = len(batches.batch)
    return Score(
        spec=spec,
        n=len(right),
        accuracy=float(right.mean()),
        frozen=None if headless else float(kept.mean()),
        harmed=None if headless else float((kept & ~right).mean()),
        batches=Batches(
            size=batches.size,
            right=np.bincount(samples.batch[right], minlength=count),
            frozen=np.bincount(samples.batch[kept], minlength=count),
            accepted=batches.accepted,
            ratio=batches.ratio,
            min_tau=_min_tau(batches, settings, cell.identity["classes"]),
            seconds=batches.seconds,
        ),
        tau=settings.tau,
        retained=sum(cell.method["retained"].values()),
        gradients=cell.method["gradients"],
        inert=cell.method["inert"],
        memory=cell.memory["peak"],
    )


def _min_tau(batches: Raw, settings: Settings, classes: int) -> NDArray[np.float64]:
    """Ratio of every batch with sufficient coverage, and infinity for the others.

    A gate at tau accepts a batch if this is at most tau: `caster.core.verdict` decides it, called
    with a threshold that nothing exceeds.
    """
    min_tau = np.full(len(batches.batch), math.inf)
    without_threshold = replace(settings, tau=sys.float_info.max)
    for index in np.flatnonzero(batches.confident >= 0):
        evidence = (
            float(batches.ratio[index]),
            float(batches.confident[index]),
            float(batches.confident_classes[index]),
        )
        verdict = decide(evidence, classes, without_threshold)
        if verdict.accepted:
            min_tau[index] = verdict.ratio
    return min_tau


def transport_of(spec: Spec) -> Spec:
    """The ungated counterpart of a gated cell."""
    settings = tuple((name, value) for name, value in spec.settings if name != "tau")
    return replace(spec, method=ALWAYS, settings=settings)


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean gain over the frozen model by threshold: an exact step function."""

    steps: NDArray[np.float64]  # (n,), starting at 0, which accepts nothing
    gains: NDArray[np.float64]  # (n,), from each step on

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Curve:
        """Build the curve, with equal weight per cell; a batch counts once it is accepted."""
        min_tau = np.concatenate([score.batches.min_tau for score in scores])
        added = np.concatenate(
            [(s.batches.right - s.batches.frozen) / s.n / len(scores) for s in scores]
        )
        possible = np.isfinite(min_tau)
        steps, index = np.unique(min_tau[possible], return_inverse=True)
        gains = np.cumsum(np.bincount(index, added[possible], minlength=len(steps)))
        return cls(np.concatenate([[0.0], steps]), np.concatenate([[0.0], gains]))

    def at(self, tau: float) -> float:
        """Return the mean gain of a gate at `tau`."""
        return float(self.gains[np.searchsorted(self.steps, tau, side="right") - 1])

    @property
    def best(self) -> float:
        """Largest mean gain of any threshold."""
        return float(self.gains.max())

    def plateau(self, within: float = PLATEAU) -> tuple[float, float]:
        """Return the interval of thresholds around the best one that is nearly as good.

        The upper end is exclusive, and infinite if no threshold is too high.
        """
        near = self.gains >= self.best - within - 1e-12
        first = last = int(self.gains.argmax())
        while first > 0 and near[first - 1]:
            first -= 1
        while last + 1 < len(near) and near[last + 1]:
            last += 1
        end = self.steps[last + 1] if last + 1 < len(self.steps) else np.inf
        return float(self.steps[first]), float(end)


def gated_gain(score: Score, tau: float) -> float:
    """Gain of one cell under a gate at `tau`."""
    group = score.batches
    taken = group.min_tau <= tau
    return float((group.right - group.frozen)[taken].sum() / score.n)
