"""Colours, lines and axes of every figure, drawn without pyplot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from caster.report import CLASSIFIERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Canvas = Figure | SubFigure

# Okabe and Ito's colours, told apart with any colour vision and on a light or a dark page.
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"

ROUND = (1, 2, 5, 10)  # steps between ticks; matplotlib's own 2.5 and 6 need a digit more
VERDICTS = {  # kind of verdict: colour, marker
    "accepted": (BLUE, "o"),
    "ratio": (VERMILLION, "^"),
    "uncovered": (PURPLE, "s"),
}


@dataclass(frozen=True)
class Terms:
    """What a figure calls what adapts, and what there is to say of its certificate.

    >>> Terms("transport", "for coverage", "no confident sample").kinds["uncovered"]
    'rejected for coverage'
    >>> list(Terms("layer transport", None, "no doubt without it").kinds)
    ['accepted', 'ratio']
    """

    noun: str
    uncovered: str | None  # why else batches are rejected than by the certificate, if they are
    without: str  # why a batch has no certificate

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of `VERDICTS` that there can be, in words."""
        words = {"accepted": "accepted", "ratio": "rejected by certificate"}
        return words | ({"uncovered": f"rejected {self.uncovered}"} if self.uncovered else {})


TRANSPORT_TERMS = Terms("transport", "otherwise", "no confident sample or no map")


@dataclass(frozen=True)
class Look:
    """How a classifier is drawn everywhere."""

    label: str
    colour: str | None  # None: the ink's
    style: str
    width: float

    def line(self, ink: str) -> dict[str, Any]:
        """What `Axes.plot` takes."""
        return {
            "label": self.label,
            "color": self.colour or ink,
            "ls": self.style,
            "lw": self.width,
        }


LOOKS = {
    "frozen": Look(CLASSIFIERS["frozen"], None, "-", 1.4),
    "source_gda": Look(CLASSIFIERS["source_gda"], GREEN, ":", 1.8),
    "ungated": Look(CLASSIFIERS["ungated"], VERMILLION, "--", 1.8),
    "gated": Look(CLASSIFIERS["gated"], BLUE, "-", 2.6),
}


def kind_of(reason: str) -> str:
    """Which of `VERDICTS` a reason belongs to.

    >>> kind_of("ratio"), kind_of("min_classes")
    ('ratio', 'uncovered')
    """
    return reason if reason in VERDICTS else "uncovered"


def legend(ink: str) -> dict[str, Any]:
    """What `Figure.legend` takes for a legend above the axes."""
    return {
        "loc": "outside upper center",
        "frameon": False,
        "labelcolor": ink,
        "fontsize": 9.5,
        "columnspacing": 1.4,
        "handletextpad": 0.5,
    }


def dress(axes: Axes, ink: str, grid: Literal["x", "y"] = "y") -> None:
    """Nothing but two spines, ticks and a faint grid, all in the page's ink."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(colors=ink, labelsize=9)
    axes.grid(axis=grid, color=ink, alpha=0.15, lw=0.8)
    axes.set_axisbelow(True)
