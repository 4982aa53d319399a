"""Results of an evaluation: scores and batches, as numbers, in words and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from statistics import median
from typing import Any

import numpy as np

from caster._version import __version__
from caster.config import Settings
from caster.core.verdict import Reason, Verdict
from caster.report import noun
from caster.report.intervals import Interval
from caster.report.mechanism import TRANSPORT, Mechanism
from caster.report.metrics import Bin, expected_classes

# A stream is called ordered if its batches have less than this share of the classes expected in
# random ones. With two classes, an ordered batch has 1 of 2; a random batch rarely has only 1 of
# the expected 1.5.
MIN_CLASS_SHARE = 0.6
SAFEGUARDS: frozenset[Reason] = frozenset({"class_order", "source_check"})
MIN_BATCHES = 8  # for intervals and a conclusion: few batches resample to few values
LARGEST_TAU = 10.0  # a threshold above this hardly rejects anything
NEGLIGIBLE_GAIN = 0.01  # accuracy; a gain whose interval stays within it makes no difference
MANY_REJECTED = 0.5  # share of rejected batches above which the gate gets a sentence of its own


def in_points(difference: float) -> str:
    """Format a difference of shares in points.

    >>> in_points(0.0721), in_points(-0.0004)
    ('+7.2', '+0.0')
    """
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0 turns -0.0 into 0.0


@dataclass(frozen=True)
class Score:
    """One classifier over all samples; harm and help are relative to the baseline."""

    accuracy: float
    interval: Interval | None  # of the accuracy; None for a single batch
    harm: float
    help: float
    nll: float  # infinite if a true class had probability 0
    calibration_error: float
    reliability: tuple[Bin, ...]


@dataclass(frozen=True)
class Batch:
    """Correct answers of each classifier on one batch, and the verdict on it.

    >>> verdict = Verdict(True, "accepted", ratio=0.5)
    >>> Batch(4, classes=2, right={"frozen": 2, "gated": 3}, verdict=verdict).accuracy("gated")
    0.75
    """

    size: int
    classes: int  # distinct true classes
    right: Mapping[str, int]
    verdict: Verdict

    def accuracy(self, classifier: str) -> float:
        """Accuracy of a classifier on the batch."""
        return self.right[classifier] / self.size

    def gain(self, baseline: str) -> float:
        """Accuracy of adapting, whatever the verdict, minus that of the baseline."""
        return self.accuracy("ungated") - self.accuracy(baseline)


class VerdictSummary:
    """Summaries of the verdicts on a stream's batches."""

    batches: tuple[Batch, ...]

    @property
    def acceptance(self) -> float:
        """Share of batches accepted."""
        return self.reasons.get("accepted", 0) / len(self.batches)

    @property
    def reasons(self) -> dict[Reason, int]:
        """Number of batches per reason, most frequent first."""
        return dict(Counter(batch.verdict.reason for batch in self.batches).most_common())

    @property
    def ratio(self) -> float:
        """Median certificate; infinite if most batches have none."""
        return median(batch.verdict.ratio for batch in self.batches)


@dataclass(frozen=True)
class ClassScore:
    """Correct answers of the baseline and of the gated mechanism on one class."""

    label: Any
    size: int
    baseline: int
    gated: int


@dataclass(frozen=True)
class Evaluation(VerdictSummary):
    """Everything that `evaluate` measures."""

    name: str  # what was evaluated
    settings: Settings
    digests: Mapping[str, str]  # SHA-256 of what was used: "model", "state", ...
    scores: Mapping[str, Score]  # by classifier, in the order of `caster.report.CLASSIFIERS`
    gain_interval: Interval | None
    batches: tuple[Batch, ...]
    classes: tuple[ClassScore, ...]  # classes that occur
    mechanism: Mechanism = TRANSPORT  # of the classifiers "ungated" and "gated"
    source_check: str | None = None  # a sentence if the source turns transport off by default
    better_names: str | None = None  # a better order of the outputs, if they look mixed up
    collapse: str | None = None  # describes one class with far too many answers
    order: str | None = None  # of the samples, in words
    left_out: Mapping[Any, int] = field(default_factory=dict)  # samples of unknown classes

    @property
    def baseline(self) -> str:
        """The classifier that answers rejected batches, and that others are compared with."""
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
        """Accuracy of the gated mechanism minus that of the baseline."""
        return self.scores["gated"].accuracy - self.scores[self.baseline].accuracy

    @property
    def tau(self) -> float:
        """Largest accepted certificate."""
        own = self.mechanism.settings
        return self.settings.tau if own is None else float(own["tau"])

    @property
    def conclusion(self) -> str:
        """Say whether to use it on such data, what it gains, and how certain that is.

        Decided by the rounded numbers that it prints.
        """
        adapted, baseline = self.mechanism.noun, noun(self.baseline)
        if self.better_names is not None:
            return "Fix the order of the classes first: no accuracy here means anything before."
        if self.collapse is not None and 1 - self.acceptance > MANY_REJECTED:
            return (
                f"The model fails here: {self.collapse}. The answers of {baseline} collapsed, and "
                f"the gate kept them for {1 - self.acceptance:.0%} of the batches. "
                f"{self._without_the_gate()}"
            )
        if not self.reasons.get("accepted", 0):
            return (
                "It makes no difference here: the gate rejects every batch, and all answers are "
                f"those of {baseline}. {self._without_the_gate()}"
            )
        if self.collapse is not None:
            return (
                f"Do not use it here: {self.collapse}. The answers collapsed, and the gate "
                "accepted them."
            )
        interval, size = self.gain_interval, f"{abs(100 * self.gain):.1f} points"
        verb = "loses" if in_points(self.gain).startswith("-") else "gains"
        over = "to" if verb == "loses" else "over"
        if interval is None:
            n = len(self.batches)
            few, on_these = ("One batch", "this one") if n == 1 else (f"{n} batches", "these")
            return (
                f"{few} cannot tell whether to use it: on {on_these}, {adapted} {verb} {size} "
                f"{over} {baseline}. Evaluate {MIN_BATCHES} batches or more."
            )
        low, high = in_points(interval.low), in_points(interval.high)
        change = f"{adapted} {verb} {size} {over} {baseline} (95% interval {low} to {high})"
        if float(low) > 0:
            words = f"Use it here: {change}."
        elif float(high) < 0:
            words = f"Do not use it here: {change}."
        elif max(-interval.low, interval.high) <= NEGLIGIBLE_GAIN:
            words = f"It makes no difference here: {change}."
        else:
            words = (
                f"It is not clear whether to use it here: {change}. Evaluate more labelled samples."
            )
        lost = self.scores["ungated"].accuracy - self.scores["gated"].accuracy
        if 1 - self.acceptance > MANY_REJECTED and lost > NEGLIGIBLE_GAIN:
            words += (
                f" But the gate rejects {1 - self.acceptance:.0%} of the batches, and adapting to "
                f"all of them would gain {100 * lost:.1f} points more: {self._remedy()}"
            )
        return words

    def _without_the_gate(self) -> str:
        """Say what adapting to rejected batches would change."""
        change = self.scores["ungated"].accuracy - self.scores[self.baseline].accuracy
        points = f"{abs(100 * change):.1f} points"
        if change < -NEGLIGIBLE_GAIN:
            return f"The gate is right: adapting anyway would lose {points}."
        if change <= NEGLIGIBLE_GAIN:
            return f"Adapting anyway would change accuracy by {points}."
        return f"Adapting anyway would gain {points}: {self._remedy()}"

    def _remedy(self) -> str:
        """Suggest an option for the batches that the gate rejects."""
        reason = next(reason for reason in self.reasons if reason != "accepted")
        if reason in SAFEGUARDS:
            return f"a safeguard rejects them (`{reason}`); `--no-safeguards` turns it off."
        verdicts = [batch.verdict for batch in self.batches]
        highest = max((v.ratio for v in verdicts if v.reason == "ratio"), default=math.inf)
        option = "predict with `--no-gate`"
        if reason == "ratio" and highest <= LARGEST_TAU:
            # In floats, 100 times the ratio may round down, and its ceiling be below the ratio.
            tau = math.ceil(100 * Fraction(str(highest))) / 100
            option = f"try `--tau {tau:.2f}`, the highest ratio here"
        return f"if your other data are like these, {option}."

    @property
    def summary(self) -> str:
        """State the accuracies without and with the gate, and what the gate changed."""
        baseline, gated = noun(self.baseline), self.scores["gated"]
        n, accepted = len(self.batches), self.reasons.get("accepted", 0)
        batches = f"{n:,} batches of {self.batch_size:,}" if n > 1 else "one batch"
        order = "" if self.order is None else f", {self.order}"
        words = (
            f"On {self.size:,} samples in {batches}{order}, {baseline} reaches "
            f"{self.scores[self.baseline].accuracy:.1%} accuracy, {self.mechanism.noun} without "
            f"the gate {self.scores['ungated'].accuracy:.1%} and with it {gated.accuracy:.1%}"
        )
        if accepted:
            words += (
                f". The gate accepted {accepted:,} of {n:,}; {gated.help:.1%} of all samples "
                f"turned from wrong to right and {gated.harm:.1%} from right to wrong."
            )
        else:
            words += f": the gate rejected every batch, and all answers are those of {baseline}."
        if self.baseline != "frozen":
            words += " No logits were given: Source-GDA takes the frozen head's place."
        return words

    @property
    def warning(self) -> str | None:
        """Warn of mixed-up outputs, or of batches with far fewer classes than random ones."""
        if self.better_names is not None:
            return (
                f"The classes look mixed up: {self.better_names}. Check the labels of these data, "
                "and fit with the model's classes in the order of its outputs (`--classes`)."
            )
        counts = np.array([c.size for c in self.classes])
        sizes = {batch.size for batch in self.batches}
        expected = {size: expected_classes(counts, size) for size in sizes}
        if (
            median(batch.classes / expected[batch.size] for batch in self.batches)
            >= MIN_CLASS_SHARE
        ):
            return None
        return (
            "The stream looks ordered by class: the median batch holds "
            f"{median(batch.classes for batch in self.batches):g} of {len(counts):,} classes, "
            f"where a random one holds about "
            f"{median(expected[batch.size] for batch in self.batches):.1f}. {self._order_advice()}"
        )

    def _order_advice(self) -> str:
        if self.mechanism.settings is not None:
            return (
                "Aligned layers use the order: keep it if future streams have it too, otherwise "
                "evaluate without `--in-order`."
            )
        return (
            "The moments of such a batch reflect its classes, not a shift of the data: mix the "
            "classes, and do not trust what the gate accepted."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON; null if infinite or unknown."""
        interval = self.gain_interval
        found = {
            "caster": __version__,
            "name": self.name,
            "mechanism": self.mechanism.name,
            "method": self.mechanism.method,
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
    """Convert to JSON types; labels of other types become text."""
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
