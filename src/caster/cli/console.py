"""Where the commands print: results to standard output, progress and errors to standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from caster.jobs.progress import Progress as Report

output = Console()
errors = Console(stderr=True)


def say(line: str, console: Console = output) -> None:
    """Print a line as it is: a label or a path may look like markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar for every stage of a job, on a terminal; nothing where output is piped."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    tasks: dict[str, object] = {}
    with bar:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield report


def size(count: float) -> str:
    """Bytes in a unit one reads at a glance.

    >>> size(999), size(34_600_000)
    ('999 B', '34.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
