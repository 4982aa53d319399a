"""The demo command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from caster.cli.console import output, progress_bar, say
from caster.io.files import check_writable
from caster.report import CLASSIFIERS, check_can_draw

if TYPE_CHECKING:
    from caster.report.digits_demo import Results


def demo(
    page: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="HTML page to write.")
    ] = Path("caster-demo.html"),
) -> None:
    """Freeze a small digit classifier, shift its data, and watch the gate at work.

    Prints one row per stream, and writes one self-contained page with the figures.
    """
    from caster.report.digits_demo import run, write_page

    check_writable(page)
    check_can_draw()
    with progress_bar() as progress:
        results = run(lambda done, total, step: progress("streaming digits", done, total))
    write_page(results, page)
    output.print(_table(results))
    for story in results.stories:
        output.print(f"{story.sentence}\n", highlight=False)
    say(f"Figures: {page}")


def _table(results: Results) -> Table:
    title = "Accuracy in percent, one row per stream"
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("stream", no_wrap=True)
    for heading in ("batch", "frozen", "GDA", "ungated", "gated", "accepted", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for stream in results.streams:
        table.add_row(
            stream.name if stream.order == "shuffled" else f"{stream.name}, {stream.order}",
            str(stream.batch_size),
            *(f"{100 * stream.accuracy(classifier):.1f}" for classifier in CLASSIFIERS),
            f"{stream.acceptance:.0%}",
            f"{stream.ratio:.2f}" if math.isfinite(stream.ratio) else "none",
        )
    return table
