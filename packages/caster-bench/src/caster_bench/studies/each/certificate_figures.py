"""Pictures of the certificate study."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caster.report.figures import BLUE, GREEN, PURPLE, VERMILLION, dress, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from caster_bench.studies.each.certificate import Certificate

LOOKS = [(c, m) for m in "o^sDvP" for c in (BLUE, VERMILLION, GREEN, PURPLE)]
WIDTH, ROW, MARK, LETTER = 8.6, 0.2, 0.45, 0.075  # inches: figure, row, mark and letter of a legend
COLUMNS = 64  # a doubling, where a curve has more steps than can be seen
LINEAR = 2  # points of gain within which the axis is linear


def against_gain(figure: Figure, found: Certificate, ink: str) -> None:
    """Gain of transport against the certificate, a point a cell."""
    axes = figure.subplots()
    finite = [p.certificate for p in found.points if math.isfinite(p.certificate)]
    nowhere = 2 * max([*finite, found.tau])
    least = min([x for x in finite if x > 0] + [found.tau]) / 2  # where those are drawn that are 0
    for place, (colour, marker) in zip(
        found.by_place, LOOKS * (1 + len(found.by_place) // len(LOOKS)), strict=False
    ):
        held = [point for point in found.points if point.place == place]
        axes.scatter(
            [min(max(point.certificate, least), nowhere) for point in held],
            [100 * point.gain for point in held],
            s=22,
            c=colour,
            marker=marker,
            alpha=0.6,
            linewidths=0,
            label=f"{place} ({len(held):,})",
        )
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR)
    ticks = [t for t in (-50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50) if _within(axes, t)]
    axes.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    _plain_logs(axes)
    axes.axhline(0, color=ink, lw=0.8)
    axes.axvline(found.tau, color=ink, lw=1.2, ls="--")
    if found.pooled.lowest_losing is not None and math.isfinite(found.pooled.lowest_losing):
        axes.axvline(found.pooled.lowest_losing, color=VERMILLION, lw=1.2, ls=":")
    words = "certificate of the cell, log scale"
    if len(finite) < len(found.points):
        words += f" (drawn at {nowhere:.3g}: cells without one)"
    axes.set_xlabel(words, color=ink)
    axes.set_ylabel("gain of transport, points", color=ink)
    dress(axes, ink)
    figure.legend(**legend(ink), ncols=_columns(found))


def above(found: Certificate) -> float:
    """Inches that the legend of `against_gain` takes beyond its first row."""
    return ROW * (math.ceil(len(found.by_place) / _columns(found)) - 1)


def _columns(found: Certificate) -> int:
    """As many columns of a legend as the figure has room for."""
    longest = max(map(len, found.by_place))
    room = int(WIDTH / (MARK + LETTER * (longest + len(" (1,000)"))))
    return max(1, min(4, len(found.by_place), room))


def _within(axes: Axes, tick: float) -> bool:
    low, high = axes.get_ylim()
    return low <= tick <= high


def _plain_logs(axes: Axes) -> None:
    """Round numbers on a logarithmic axis, as many as it has room for."""
    low, high = axes.get_xlim()
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.intp]:
    """Places of a curve that show all there is to see: ends and extremes of narrow columns of x.

    A column is a 64th of a doubling, found without a logarithm: its last bits are another on
    every processor.

    >>> thinned(np.array([1.0, 1.001, 1.002, 1.003, 1.004, 2.0]), np.array([0.0, 5, 1, 2, 1, 1]))
    array([0, 1, 4, 5])
    """
    mantissa, exponent = np.frexp(x)
    column = exponent * COLUMNS + (2 * COLUMNS * (mantissa - 0.5)).astype(int)
    kept = set()
    for places in np.split(np.arange(len(x)), np.flatnonzero(np.diff(column)) + 1):
        kept |= {places[0], places[y[places].argmin()], places[y[places].argmax()], places[-1]}
    return np.array(sorted(kept))


def by_threshold(figure: Figure, found: Certificate, ink: str) -> None:
    """Mean gain of the gate by its threshold: a step at every batch."""
    axes = figure.subplots()
    steps, gains = found.curve.steps, 100 * found.curve.gains
    low, high = 0.5 * found.tau, 2 * found.tau
    if len(steps) > 1:
        low, high = min(low, 0.8 * steps[1]), max(high, 1.25 * steps[-1])
    low = max(low, high / 1e5)
    x = np.concatenate([[low], steps[steps > low], [high]])
    y = np.concatenate([[100 * found.curve.at(low)], gains[steps > low], gains[-1:]])
    kept = thinned(x, y)
    first, last = found.plateau
    axes.axvspan(max(first, low), min(last, high), color=GREEN, alpha=0.15, lw=0)
    axes.step(x[kept], y[kept], where="post", color=BLUE, lw=2, label="gated")
    always = 100 * found.pooled.ungated.value
    axes.axhline(always, color=VERMILLION, lw=1.4, ls="--", label="always")
    axes.axhline(0, color=ink, lw=1, label="never")
    axes.axvline(found.tau, color=ink, lw=1.2, ls="--")
    top = axes.get_xaxis_transform()
    axes.text(found.tau, 1.01, f"τ = {found.tau:g}", color=ink, ha="center", transform=top)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.minorticks_off()
    _plain_logs(axes)
    axes.set_xlabel("threshold, log scale", color=ink)
    axes.set_ylabel("mean gain, points", color=ink)
    dress(axes, ink)
    figure.legend(**legend(ink), ncols=3)
