"""What the samples and batches of one cell come to; every figure of a report is made of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Settings
from caster.core.gate import decide
from caster.errors import CasterError
from caster_bench.records.reader import Record
from caster_bench.records.schema import Batches as Raw
from caster_bench.studies.checks.gates import constants_of
from caster_bench.studies.checks.streams import NO_HEAD
from caster_bench.studies.method_names import LAYERS
from caster_bench.sweeps.spec import Spec


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a cell, in order; all arrays are (batches,)."""

    size: NDArray[Any]
    right: NDArray[Any]
    frozen: NDArray[Any]  # how many the frozen model has right
    accepted: NDArray[np.bool_]
    ratio: NDArray[np.float64]  # NaN where no gate measured one
    opens: NDArray[np.float64]  # the least tau that accepts it; infinite where none does
    seconds: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Score:
    """A cell in numbers."""

    spec: Spec
    n: int
    accuracy: float
    frozen: float | None  # accuracy of the frozen model on these samples; None without a head
    harmed: float | None  # share of samples that the frozen model has right and the method wrong
    batches: Batches
    tau: float  # of the cell's own constants and settings
    settings: dict[str, Any]  # of the method, all of them
    retained: int  # bytes
    gradients: bool  # whether the method is one that learns
    inert: bool
    memory: float | None  # MiB on the device, at its peak

    @property
    def backward(self) -> bool:
        """Whether it did learn, with a backward pass."""
        return self.gradients and not self.inert

    @property
    def gain(self) -> float:
        """Of accuracy over the frozen model."""
        return self.accuracy - self._against_head(self.frozen)

    @property
    def harm(self) -> float:
        """Share of all samples that the frozen model has right and the method wrong."""
        return self._against_head(self.harmed)

    def _against_head(self, share: float | None) -> float:
        if share is None:
            raise CasterError(f"{self.spec.title}: the backbone has no head to compare with")
        return share

    @property
    def accept(self) -> float:
        """Share of batches that the method answered."""
        return float(self.batches.accepted.mean())

    @property
    def certificate(self) -> float:
        """Median ratio of the batches.

        The median, not the mean: a batch without one confident sample has an infinite ratio.
        """
        if np.isnan(self.batches.ratio).any():
            raise CasterError(f"{self.spec.title}: no certificate was measured")
        return float(np.median(self.batches.ratio))


def score(record: Record) -> Score:
    """The score of a cell that is done."""
    spec, samples, batches, cell = record.spec, record.samples, record.batches, record.cell
    if samples is None or batches is None:
        raise CasterError(f"{spec.title} was refused and has no score")
    settings = constants_of(spec, cell.identity["constants"])
    right = samples.prediction == samples.label
    kept = samples.frozen == samples.label
    headless = bool((samples.frozen == NO_HEAD).any())
    count = len(batches.batch)
    own = cell.identity["settings"]
    if spec.method == LAYERS:
        tau, opens = own["tau"], np.where(np.isnan(batches.ratio), math.inf, batches.ratio)
    else:
        tau, opens = settings.tau, _opens(batches, settings, cell.identity["classes"])
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
            opens=opens,
            seconds=batches.seconds,
        ),
        tau=tau,
        settings=own,
        retained=sum(cell.method["retained"].values()),
        gradients=cell.method["gradients"],
        inert=cell.method["inert"],
        memory=cell.memory["peak"],
    )


def _opens(batches: Raw, settings: Settings, classes: int) -> NDArray[np.float64]:
    """The ratio of every batch whose coverage suffices, and infinity for the others.

    A gate at tau accepts a batch if this is at most tau: the rule of `caster.core.gate` itself,
    asked once with a threshold that nothing exceeds.
    """
    opens = np.full(len(batches.batch), math.inf)
    for place in np.flatnonzero(batches.confident >= 0):
        verdict = decide(
            float(batches.ratio[place]),
            float(batches.confident[place]),
            float(batches.confident_classes[place]),
            n_classes=classes,
            tau=math.inf,
            min_samples=settings.min_samples,
            min_classes=settings.min_classes,
        )
        if verdict.accepted:
            opens[place] = verdict.ratio
    return opens
