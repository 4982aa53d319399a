"""Print results to standard output, progress and errors to standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from caster.errors import visible
from caster.io import Progress as Report

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID


class PlainConsole(Console):
    """A console that prints text literally: labels and paths are data.

    `[red]` and `:x:` are not markup, and control characters are shown instead of obeyed. All output
    of the commands goes through it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render text in visible characters; rich's own control codes pass through."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)


output = PlainConsole()
errors = PlainConsole(stderr=True)


def say(text: str, console: Console = output) -> None:
    """Print a line without wrapping it."""
    console.print(text, highlight=False, soft_wrap=True)


def new_table(*headings: str, numbers: Iterable[str] = (), title: str | None = None) -> Table:
    """A table in the style of all commands; columns in `numbers` are right-aligned and never wrap.

    Other cells wrap on a narrow terminal. Pass labels and paths as `Text`.
    """
    table = Table(
        title=None if title is None else Text(title),
        title_justify="left",
        title_style="",
        min_width=None if title is None else len(title),  # or the title would wrap
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption_justify="left",
    )
    numbers = set(numbers)
    for heading in headings:
        number = heading in numbers
        table.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
            min_width=len(heading) if number else None,
        )
    return table


class Warnings(logging.Handler):
    """Print the library's log records in the style of the commands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record to standard error, above the progress bar if there is one."""
        say(f"caster: {record.getMessage()}", errors)


@contextmanager
def progress_bar(*counts: ProgressColumn) -> Iterator[Report]:
    """Show a progress bar per stage of a job, on a terminal only.

    `counts` replaces the column "done/total"; a total of 0 means unknown.
    """
    from rich.progress import (  # slow, and --help does not need it
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *(counts or (MofNCompleteColumn(),)),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    tasks: dict[str, TaskID] = {}
    with bar:

        def report(stage: str, done: int, total: int) -> None:
            if stage in tasks:
                bar.update(tasks[stage], completed=done, total=total or None)
            else:  # resumed work must not count towards the time left
                tasks[stage] = bar.add_task(stage, total=total or None, completed=done)

        yield report


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(999), size(34_600_000)
    ('999 B', '34.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
