"""A run as it goes: a table that is drawn anew, or a line now and then where output is piped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from caster.cli.console import errors, say

if TYPE_CHECKING:
    from caster_bench.engine.run import Standing, Watch

EVERY = 10.0  # seconds between two lines
SHOWN = 8  # cells under way


@contextmanager
def watching() -> Iterator[Watch]:
    """Show where a run stands, on standard error."""
    if errors.is_terminal:
        with Live(console=errors, transient=True, auto_refresh=False) as live:
            yield lambda standing: live.update(table(standing), refresh=True)
        return
    last = monotonic()

    def line(standing: Standing) -> None:
        nonlocal last
        if monotonic() - last >= EVERY:
            last = monotonic()
            say(words(standing), errors)

    yield line


def table(standing: Standing) -> Table:
    """All of it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("cells", counts(standing))
    grid.add_row("images/s", f"{standing.rate:,.0f}")
    grid.add_row("time left", left(standing))
    for title in standing.current[:SHOWN]:
        grid.add_row("running", title)
    if len(standing.current) > SHOWN:
        grid.add_row("", f"and {len(standing.current) - SHOWN} more")
    return grid


def words(standing: Standing) -> str:
    """The same in a line.

    >>> from caster_bench.engine.run import Standing
    >>> words(Standing(3, 10, 0, ("r on d, fog-1: tent",), 812.3, 75.0))
    '3 of 10 cells, 812 images/s, 1 min 15 s left, at r on d, fog-1: tent'
    """
    at = f", at {standing.current[0]}" if standing.current else ""
    return f"{counts(standing)} cells, {standing.rate:,.0f} images/s, {left(standing)} left{at}"


def counts(standing: Standing) -> str:
    """Cells done, of all, and failed."""
    failed = f" ({standing.failed:,} failed)" if standing.failed else ""
    return f"{standing.done:,} of {standing.total:,}{failed}"


def left(standing: Standing) -> str:
    """The time to go."""
    return "unknown time" if standing.left is None else duration(standing.left)


def duration(seconds: float) -> str:
    """Seconds in units one reads at a glance.

    >>> duration(0.4), duration(75), duration(7_300)
    ('0.4 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
