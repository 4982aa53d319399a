"""What an evaluation found: a `Score` a classifier, a `Batch` a batch, and both in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from statistics import median
from typing import Any

from caster._version import __version__
from caster.config import Settings
from caster.core.types import Judgement, Reason
from caster.report import words
from caster.report.intervals import Interval
from caster.report.mechanism import TRANSPORT, Mechanism
from caster.report.metrics import Bin


@dataclass(frozen=True)
class Score:
    """One classifier over all samples; harm and help are against the baseline."""

    accuracy: float
    interval: Interval | None  # of the accuracy; None where there is only one batch
    harm: float
    help: float
    nll: float  # infinite where a true class had probability 0
    calibration_error: float
    reliability: tuple[Bin, ...]


@dataclass(frozen=True)
class Batch:
    """One batch: how many of its samples each classifier got right, and the verdict on it.

    >>> verdict = Judgement(True, "accepted", ratio=0.5)
    >>> Batch(4, classes=2, right={"frozen": 2, "gated": 3}, verdict=verdict).accuracy("gated")
    0.75
    """

    size: int
    classes: int  # distinct true ones
    right: Mapping[str, int]
    verdict: Judgement  # of transport a whole `Verdict`

    def accuracy(self, classifier: str) -> float:
        """Share of the batch a classifier got right."""
        return self.right[classifier] / self.size


@dataclass(frozen=True)
class ClassScore:
    """The samples of one class, and how many the baseline and the gated mechanism got right."""

    label: Any
    size: int
    baseline: int
    gated: int


@dataclass(frozen=True)
class Evaluation:
    """Everything `evaluate` found."""

    name: str  # what was evaluated
    settings: Settings
    digests: Mapping[str, str]  # SHA-256 of what took part, by what it is
    scores: Mapping[str, Score]  # by classifier, in the order of `caster.report.CLASSIFIERS`
    gain_interval: Interval | None
    batches: tuple[Batch, ...]
    classes: tuple[ClassScore, ...]  # those that came
    mechanism: Mechanism = TRANSPORT  # what "ungated" and "gated" adapt by
    source_check: str | None = None  # a sentence, where the source turns transport off by default
    left_out: Mapping[Any, int] = field(default_factory=dict)  # samples by class the state lacks

    @property
    def baseline(self) -> str:
        """The classifier a refused batch falls back to, and others are compared with."""
        return "frozen" if "frozen" in self.scores else "source_gda"

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(batch.size for batch in self.batches)

    @property
    def batch_size(self) -> int:
        """Samples in the largest batch; the last of a stream is often smaller."""
        return max(batch.size for batch in self.batches)

    @property
    def gain(self) -> float:
        """Accuracy of the gated mechanism less that of the baseline."""
        return self.scores["gated"].accuracy - self.scores[self.baseline].accuracy

    @property
    def acceptance(self) -> float:
        """Share of batches accepted."""
        return self.reasons.get("accepted", 0) / len(self.batches)

    @property
    def tau(self) -> float:
        """The largest certificate that would be accepted."""
        own = self.mechanism.settings
        return self.settings.tau if own is None else float(own["tau"])

    @property
    def reasons(self) -> dict[Reason, int]:
        """Number of batches by the reason of their verdict, most frequent first."""
        return dict(Counter(batch.verdict.reason for batch in self.batches).most_common())

    @property
    def ratio(self) -> float:
        """Median certificate; infinite where most batches have none."""
        return median(batch.verdict.ratio for batch in self.batches)

    @property
    def conclusion(self) -> str:
        """Whether to use it on such data, in one sentence with the gain and its interval."""
        return words.conclusion(self)

    @property
    def summary(self) -> str:
        """The outcome in plain words."""
        return words.summary(self)

    @property
    def warning(self) -> str | None:
        """A sentence if the stream looks ordered by class, which ruins batch statistics."""
        return words.warning(self)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON has it; null stands for what is infinite or unknown."""
        interval = self.gain_interval
        found = {
            "caster": __version__,
            "name": self.name,
            "mechanism": self.mechanism.name,
            "conclusion": self.conclusion,
            "summary": self.summary,
            "source_check": self.source_check,
            "warning": self.warning,
            "samples": self.size,
            "left_out": self.left_out,
            "batch_size": self.batch_size,
            "baseline": self.baseline,
            "scores": {name: asdict(score) for name, score in self.scores.items()},
            "gain": {"accuracy": self.gain, "interval": interval and asdict(interval)},
            "acceptance": self.acceptance,
            "reasons": self.reasons,
            "median_ratio": self.ratio,
            "batches": [
                {
                    "size": b.size,
                    "classes": b.classes,
                    "accuracy": {name: b.accuracy(name) for name in b.right},
                    "verdict": asdict(b.verdict),
                }
                for b in self.batches
            ],
            "classes": [
                {
                    "label": c.label,
                    "samples": c.size,
                    self.baseline: c.baseline / c.size,
                    "gated": c.gated / c.size,
                }
                for c in self.classes
            ],
            "settings": self.mechanism.settings or asdict(self.settings),
            "digests": self.digests,
        }
        plain: dict[str, Any] = _plain(found)
        return plain


def _plain(value: Any) -> Any:
    """Nothing but what JSON has; a label of another kind becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
