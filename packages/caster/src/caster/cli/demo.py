"""The demo command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import new_table, output, progress_bar, say
from caster.io.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from caster.report.digits_demo import Results


def demo(
    page: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="HTML page to write.")
    ] = Path("caster-demo.html"),
) -> None:
    """Show on digits, in seconds, what adaptation gains and when the verdict rejects it.

    A small frozen network, an ONNX file, meets a shuffled, a shifted and a sorted stream. It is
    adapted by the default mechanism, mixture transport, which aligns its layers. Prints one row per
    stream, and writes one self-contained page with figures and explained verdicts.
    """
    from caster.report.digits_demo import check_can_run, run, write_page

    check_writable(page)
    check_can_run()
    with progress_bar() as progress:
        results = run(lambda done, total, step: progress("streaming digits", done, total))
    write_page(results, page)
    say(results.headline)
    say("The network is a small ONNX file; mixture transport, the default, adapts it.")
    output.print(_table(results))
    for highlight in (*results.highlights, results.costs):
        if highlight is not None:
            output.print(f"- {highlight.sentence}", highlight=False)
    say(f"\nFigures, and the verdicts explained: {page}")


def _table(results: Results) -> Table:
    from caster.report.digits_demo import ANSWERS

    numbers = ("frozen", "ungated", "returned", "accepted")
    table = new_table(
        "stream",
        *numbers,
        numbers=numbers,
        title="Accuracy in percent; returned: adapted where accepted, else frozen",
    )
    for title, stream in ((highlight.title, highlight.stream) for highlight in results.highlights):
        accuracies = (f"{100 * stream.accuracy(name):.1f}" for name in ANSWERS)
        table.add_row(title, *accuracies, f"{stream.acceptance:.0%}")
    return table
