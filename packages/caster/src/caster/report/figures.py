"""Colours, styles and axes of all figures, and the plot of certificate against gain.

matplotlib is imported inside the functions that draw: an evaluation needs the terms without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from caster.report import CLASSIFIERS, noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from caster.report.evaluation_results import Batch

    Canvas = Figure | SubFigure

# Okabe and Ito's colours: distinct for any colour vision, on light and dark pages.
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"

ROUND = (1, 2, 5, 10)  # steps between ticks; matplotlib's own 2.5 and 6 need one more digit
MAX_VECTOR_POINTS = 1_000  # points above which they are rasterised, to keep the page small
VERDICTS = {  # kind of verdict: colour, marker
    "accepted": (BLUE, "o"),
    "ratio": (VERMILLION, "^"),
    "uncovered": (PURPLE, "s"),
}


@dataclass(frozen=True)
class Terms:
    """Words for a mechanism and its certificate in figures.

    >>> Terms("transport", "for coverage", "no confident sample").kinds["uncovered"]
    'rejected for coverage'
    >>> list(Terms("mixture transport", None, "no doubt without it").kinds)
    ['accepted', 'ratio']
    """

    noun: str
    uncovered: str | None  # why else batches are rejected than by the certificate, if they are
    without: str  # why a batch has no certificate

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of `VERDICTS` that can occur, in words."""
        words = {"accepted": "accepted", "ratio": "rejected by certificate"}
        return words | ({"uncovered": f"rejected {self.uncovered}"} if self.uncovered else {})


TRANSPORT_TERMS = Terms("transport", "otherwise", "no confident sample or no map")


@dataclass(frozen=True)
class LineStyle:
    """Style of a classifier in every figure."""

    label: str
    colour: str | None  # None: the ink's
    style: str
    width: float

    def line(self, ink: str) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        return {
            "label": self.label,
            "color": self.colour or ink,
            "ls": self.style,
            "lw": self.width,
        }


LINE_STYLES = {
    "frozen": LineStyle(CLASSIFIERS["frozen"], None, "-", 1.4),
    "source_gda": LineStyle(CLASSIFIERS["source_gda"], GREEN, ":", 1.8),
    "ungated": LineStyle(CLASSIFIERS["ungated"], VERMILLION, "--", 1.8),
    "gated": LineStyle(CLASSIFIERS["gated"], BLUE, "-", 2.6),
}


def kind_of(reason: str) -> str:
    """Map a reason to one of `VERDICTS`.

    >>> kind_of("ratio"), kind_of("min_classes")
    ('ratio', 'uncovered')
    """
    return reason if reason in VERDICTS else "uncovered"


def legend(ink: str) -> dict[str, Any]:
    """Keyword arguments of `Figure.legend` for a legend above the axes."""
    return {
        "loc": "outside upper center",
        "frameon": False,
        "labelcolor": ink,
        "fontsize": 9.5,
        "columnspacing": 1.4,
        "handletextpad": 0.5,
    }


def dress(axes: Axes, ink: str, grid: Literal["x", "y"] = "y") -> None:
    """Reduce axes to two spines, ticks and a faint grid, in the page's ink."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(colors=ink, labelsize=9)
    axes.grid(axis=grid, color=ink, alpha=0.15, lw=0.8)
    axes.set_axisbelow(True)


@dataclass(frozen=True)
class CertificateAxis:
    """Logarithmic axis of the certificate, with a position for batches without one."""

    low: float
    high: float
    missing: float  # beyond `high`

    @classmethod
    def of(cls, ratios: Iterable[float], tau: float) -> CertificateAxis:
        """Span all certificates, and always tau.

        >>> CertificateAxis.of([math.inf], tau=0.8)
        CertificateAxis(low=0.4, high=1.6, missing=2.0)
        """
        found = [ratio for ratio in ratios if 0 < ratio < math.inf]
        low = min([0.9 * ratio for ratio in found] + [0.5 * tau])
        high = max([1.15 * ratio for ratio in found] + [2.0 * tau])
        return cls(low, high, high * max(1.25, (high / low) ** 0.06))

    def position(self, ratio: float) -> float:
        """Where to draw a certificate; a missing one is infinite and goes beyond the others."""
        return min(max(ratio, self.low), self.missing)

    @property
    def ticks(self) -> list[float]:
        """Round numbers, coarser on a longer axis, for at most about eight powers of ten.

        >>> CertificateAxis(0.25, 2.2, 3.0).ticks
        [0.3, 0.5, 1.0, 2.0]
        >>> CertificateAxis(0.2, 2e12, 3e12).ticks[:3]
        [10.0, 1000.0, 100000.0]
        """
        span = self.high / self.low
        narrow = ("1", "1.2", "1.5", *"23456789")
        digits = narrow if span < 6 else "1235" if span < 1000 else "1"
        first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
        powers = range(first, last + 1, 1 + (last - first) // 8)
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        return [tick for tick in ticks if self.low <= tick <= self.high]

    def apply(self, axes: Axes, without: str | None, ink: str) -> None:
        """Set up the x axis; `without` says why some batches have no certificate."""
        from matplotlib.ticker import FixedLocator, NullLocator

        ticks, labels = self.ticks, [f"{tick:g}" for tick in self.ticks]
        words, end = "certificate, log scale", self.high
        if without is not None:
            words += f" (none: {without})"
            ticks, labels = [*ticks, self.missing], [*labels, "none"]
            end = self.missing**2 / self.high  # as far beyond it as it is beyond the others
            axes.axvline(self.high, color=ink, lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.set_xlim(self.low, end)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels(labels)
        axes.set_xlabel(words, color=ink)


def certificate_against_gain(
    axes: Axes, batches: Sequence[Batch], tau: float, baseline: str, terms: Terms, ink: str
) -> None:
    """Plot the ungated gain over a baseline against the certificate, one point per batch."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ratios = [batch.verdict.ratio for batch in batches]
    gains = [batch.gain(baseline) for batch in batches]
    axis = CertificateAxis.of(ratios, tau)
    largest = max(batch.size for batch in batches)
    for kind, words in terms.kinds.items():
        colour, marker = VERDICTS[kind]
        chosen = [i for i, b in enumerate(batches) if kind_of(b.verdict.reason) == kind]
        axes.scatter(
            [axis.position(ratios[i]) for i in chosen],
            [gains[i] for i in chosen],
            s=[4 + 26 * batches[i].size / largest for i in chosen] or 30,
            c=colour,
            marker=marker,
            alpha=0.75,
            linewidths=0,
            label=f"{words} ({len(chosen):,})",
            rasterized=len(batches) > MAX_VECTOR_POINTS,
        )
    axis.apply(axes, terms.without if math.inf in ratios else None, ink)
    reach = 1.05 * max(0.05, *(abs(gain) for gain in gains))
    axes.set_ylim(-reach, reach)
    axes.yaxis.set_major_locator(MaxNLocator(12, steps=ROUND))  # whole points
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    axes.set_ylabel(f"{terms.noun} less {CLASSIFIERS[baseline]}, points", color=ink)
    axes.axhline(0, color=ink, lw=0.8)
    axes.axvline(tau, color=ink, lw=1.2, ls="--")
    top = axes.get_xaxis_transform()
    axes.text(tau, 1.01, f"τ = {tau:g}", color=ink, ha="center", transform=top)
    dress(axes, ink)


def describe_certificate(batches: Sequence[Batch], baseline: str, terms: Terms) -> str:
    """Alternative text of `certificate_against_gain`."""
    accepted = [batch.gain(baseline) for batch in batches if batch.verdict.reason == "accepted"]
    rejected = [batch.gain(baseline) for batch in batches if batch.verdict.reason != "accepted"]
    return (
        f"Gain of {terms.noun} over {noun(baseline)} against the certificate, one point per batch. "
        f"{len(accepted)} batches are accepted, and {sum(gain < 0 for gain in accepted)} of them "
        f"lose; {len(rejected)} are rejected, and {sum(gain > 0 for gain in rejected)} of them "
        f"would have gained, {sum(gain < 0 for gain in rejected)} lost."
    )
