"""Certificate against gain: the figure that says what the gate saved and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from caster.report import CLASSIFIERS, noun
from caster.report.figures import ROUND, VERDICTS, Terms, dress, kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 1_000  # points: as outlines, more of them would be most of the page


@dataclass(frozen=True)
class Point:
    """A batch: its certificate, what adapting gained on it, and the verdict's reason."""

    ratio: float
    gain: float  # of accuracy
    size: int
    reason: str


@dataclass(frozen=True)
class Span:
    """The logarithmic axis of the certificate, with a place for batches that have none."""

    low: float
    high: float
    nowhere: float  # beyond `high`

    @classmethod
    def of(cls, points: Sequence[Point], tau: float) -> Span:
        """All certificates, and tau even where all of them are on one side of it.

        >>> Span.of([Point(math.inf, 0.0, 1, "batch_too_small")], tau=0.8)
        Span(low=0.4, high=1.6, nowhere=2.0)
        """
        found = [p.ratio for p in points if 0 < p.ratio < math.inf]
        low = min([0.9 * ratio for ratio in found] + [0.5 * tau])
        high = max([1.15 * ratio for ratio in found] + [2.0 * tau])
        return cls(low, high, high * max(1.25, (high / low) ** 0.06))

    def place(self, ratio: float) -> float:
        """Where a certificate is drawn; none, infinite, is beyond the others."""
        return min(max(ratio, self.low), self.nowhere)

    @property
    def ticks(self) -> list[float]:
        """Round numbers, fewer the more the axis spans; of many powers of ten, eight or so.

        >>> Span(0.25, 2.2, 3.0).ticks
        [0.3, 0.5, 1.0, 2.0]
        >>> Span(0.2, 2e12, 3e12).ticks[:3]
        [10.0, 1000.0, 100000.0]
        """
        span = self.high / self.low
        narrow = ("1", "1.2", "1.5", *"23456789")
        digits = narrow if span < 6 else "1235" if span < 1000 else "1"
        first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
        powers = range(first, last + 1, 1 + (last - first) // 8)
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def certificate_against_gain(
    axes: Axes, points: Sequence[Point], tau: float, baseline: str, terms: Terms, ink: str
) -> Span:
    """What adapting gained over a baseline against the certificate, a point a batch."""
    span = Span.of(points, tau)
    largest = max(point.size for point in points)
    for kind, words in terms.kinds.items():
        colour, marker = VERDICTS[kind]
        chosen = [point for point in points if kind_of(point.reason) == kind]
        axes.scatter(
            [span.place(point.ratio) for point in chosen],
            [point.gain for point in chosen],
            s=[4 + 26 * point.size / largest for point in chosen] or 30,
            c=colour,
            marker=marker,
            alpha=0.6,
            linewidths=0,
            label=f"{words} ({len(chosen):,})",
            rasterized=len(points) > MANY,
        )
    some_have_none = any(math.isinf(point.ratio) for point in points)
    _certificate_axis(axes, span, terms.without if some_have_none else None, ink)
    reach = 1.05 * max(0.05, *(abs(point.gain) for point in points))
    axes.set_ylim(-reach, reach)
    axes.yaxis.set_major_locator(MaxNLocator(12, steps=ROUND))  # whole points
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    axes.set_ylabel(f"{terms.noun} less {CLASSIFIERS[baseline]}, points", color=ink)
    axes.axhline(0, color=ink, lw=0.8)
    axes.axvline(tau, color=ink, lw=1.2, ls="--")
    top = axes.get_xaxis_transform()
    axes.text(tau, 1.01, f"τ = {tau:g}", color=ink, ha="center", transform=top)
    dress(axes, ink)
    return span


def _certificate_axis(axes: Axes, span: Span, without: str | None, ink: str) -> None:
    ticks, labels = span.ticks, [f"{tick:g}" for tick in span.ticks]
    words, end = "certificate, log scale", span.high
    if without is not None:
        words += f" (none: {without})"
        ticks, labels = [*ticks, span.nowhere], [*labels, "none"]
        end = span.nowhere**2 / span.high  # as far beyond them as they are beyond the others
        axes.axvline(span.high, color=ink, lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xlim(span.low, end)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)
    axes.set_xlabel(words, color=ink)


def in_words(points: Sequence[Point], baseline: str, terms: Terms) -> str:
    """The figure, for those who cannot see it."""
    accepted = [point.gain for point in points if point.reason == "accepted"]
    refused = [point.gain for point in points if point.reason != "accepted"]
    return (
        f"Gain of {terms.noun} over {noun(baseline)} against the certificate, a point a batch. "
        f"{len(accepted)} batches are accepted, and {sum(gain < 0 for gain in accepted)} of them "
        f"lose; {len(refused)} are refused, and {sum(gain > 0 for gain in refused)} of them would "
        f"have gained, {sum(gain < 0 for gain in refused)} lost."
    )
