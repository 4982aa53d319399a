"""What the demo found: one `Stream` a row, and what its rows say about the gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from caster.config import Settings
from caster.core.types import REASONS, Reason, Verdict

Order = Literal["shuffled", "sorted by class"]


@dataclass(frozen=True)
class Batch:
    """One batch: how many of its samples each classifier got right, and the verdict on it."""

    size: int
    frozen: int
    source_gda: int
    ungated: int
    gated: int
    verdict: Verdict

    @property
    def gain(self) -> float:
        """Accuracy of transport, whatever the verdict, less that of the frozen head."""
        return (self.ungated - self.frozen) / self.size


@dataclass(frozen=True)
class Plan:
    """What a stream is made of.

    >>> Plan("haze", 5, 64, "shuffled").words
    'haze at severity 5'
    >>> Plan("clean", 0, 64, "sorted by class").words
    'clean digits sorted by class'
    """

    shift: str  # a key of `caster.report.demo.digits.SHIFTS`, or "clean"
    severity: int  # 1 to 5; 0 if clean
    batch_size: int
    order: Order

    @property
    def name(self) -> str:
        """Shift and severity, in short."""
        return f"{self.shift} {self.severity}" if self.severity else self.shift

    @property
    def words(self) -> str:
        """Shift, severity and order, as a sentence has them."""
        shift = f"{self.shift} at severity {self.severity}" if self.severity else "clean digits"
        return shift if self.order == "shuffled" else f"{shift} {self.order}"


@dataclass(frozen=True)
class Stream(Plan):
    """All target digits once, as planned, and the score on them.

    >>> verdict = Verdict(True, "accepted", ratio=0.5, confident=3, classes=2)
    >>> batch = Batch(4, frozen=1, source_gda=2, ungated=3, gated=3, verdict=verdict)
    >>> stream = Stream("blur", 2, 4, "shuffled", (batch, batch))
    >>> stream.name, stream.frozen, stream.gated, stream.acceptance, stream.ratio
    ('blur 2', 0.25, 0.75, 1.0, 0.5)
    """

    batches: tuple[Batch, ...]

    @property
    def frozen(self) -> float:
        """Accuracy of the frozen network's own head."""
        return self._share(batch.frozen for batch in self.batches)

    @property
    def source_gda(self) -> float:
        """Accuracy of the Gaussian discriminant of the source, not transported."""
        return self._share(batch.source_gda for batch in self.batches)

    @property
    def ungated(self) -> float:
        """Accuracy of transport where every batch is accepted, whatever its verdict."""
        return self._share(batch.ungated for batch in self.batches)

    @property
    def gated(self) -> float:
        """Accuracy of what CASTER answers: transport where accepted, else the frozen head."""
        return self._share(batch.gated for batch in self.batches)

    @property
    def acceptance(self) -> float:
        """Share of batches accepted."""
        return self.reasons.get("accepted", 0) / len(self.batches)

    @property
    def ratio(self) -> float:
        """Median certificate r_t; infinite where most batches have no confident sample."""
        return median(batch.verdict.ratio for batch in self.batches)

    @property
    def reasons(self) -> dict[Reason, int]:
        """Number of batches by the reason of their verdict, most frequent first."""
        return dict(Counter(batch.verdict.reason for batch in self.batches).most_common())

    def _share(self, right: Iterable[int]) -> float:
        return sum(right) / sum(batch.size for batch in self.batches)


@dataclass(frozen=True)
class Story:
    """One stream that shows something about the gate, in one sentence; `stream` None if none."""

    title: str
    stream: Stream | None
    sentence: str


@dataclass(frozen=True)
class Results:
    """Everything the demo found, in the order it was run."""

    seed: int
    settings: Settings
    streams: tuple[Stream, ...]

    @property
    def clean(self) -> Stream:
        """The unspoilt stream every other one is to be compared with."""
        return self.streams[0]

    @property
    def saves(self) -> Story:
        """Where the gate gains most over transport without it."""
        best = max(self.streams, key=lambda stream: stream.gated - stream.ungated)
        return _story("The gate saves", best, best.gated - best.ungated, _refusals(best))

    @property
    def costs(self) -> Story:
        """Where the gate loses most against transport without it."""
        worst = max(self.streams, key=lambda stream: stream.ungated - stream.gated)
        return _story("The gate costs", worst, worst.ungated - worst.gated, _refusals(worst))

    @property
    def misses(self) -> Story:
        """Where the gated answer loses most against the frozen head: the gate is no guarantee."""
        worst = max(self.streams, key=lambda stream: stream.frozen - stream.gated)
        return _story("The gate misses", worst, worst.frozen - worst.gated, _acceptances(worst))

    @property
    def stories(self) -> tuple[Story, Story, Story]:
        """The best case and the two kinds of bad one."""
        return self.saves, self.costs, self.misses


def _story(title: str, stream: Stream, difference: float, why: str) -> Story:
    if difference <= 0:
        return Story(title, None, f"{title} on no stream of this run.")
    sentence = (
        f"{title} {100 * difference:.1f} points on {stream.words}, in batches of "
        f"{stream.batch_size}: the frozen head gets {stream.frozen:.1%} right, transport without "
        f"the gate {stream.ungated:.1%} and with it {stream.gated:.1%}, since it {why}."
    )
    return Story(title, stream, sentence)


def _refusals(stream: Stream) -> str:
    refused = {reason: n for reason, n in stream.reasons.items() if reason != "accepted"}
    n, total = sum(refused.values()), len(stream.batches)
    if n == 0:
        return f"refused none of {total} batches"
    why = ", ".join(f"{REASONS[reason]}: {count}" for reason, count in refused.items())
    return f"refused {'all' if n == total else f'{n} of'} {total} batches ({why})"


def _acceptances(stream: Stream) -> str:
    return f"accepted {stream.reasons.get('accepted', 0)} of {len(stream.batches)} batches"
