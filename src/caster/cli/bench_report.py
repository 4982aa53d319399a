"""The commands `caster bench verify` and `caster bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import counted, errors, progress_bar, say

if TYPE_CHECKING:
    from caster.report.bench.results import Results
    from caster.sweeps import Sweep

SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="TOML file of the sweep.")]
Runs = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUNS", help="Folder of the run; runs/NAME of the sweep."),
]
Root = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="What checkpoints are relative to; the current folder."),
]


def verify(sweep: SweepFile, out: Runs = None, root: Root = None) -> None:
    """Whether the records of a sweep are whole, unchanged and consistent.

    Every metric is recomputed from samples and batches. What is missing or wrong is listed, and
    the exit status is then 1.
    """
    from caster.report.bench.verify import compared
    from caster.sweeps import read

    results = _verified(read(sweep), out, root)
    refused = f", {len(results.refused):,} of them refused" if results.refused else ""
    say(
        f"{counted(len(results.sweep.cells), 'cell')} verified{refused}, "
        f"{compared(results.sweep, root)}: nothing is wrong."
    )


def report(
    sweep: SweepFile,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the report.")
    ],
    out: Runs = None,
    root: Root = None,
) -> None:
    """Tables, figures and a page of a sweep, from verified records alone.

    Markdown, LaTeX and CSV tables, PDF, SVG and PNG figures, and one HTML page to read them on.
    With anything missing or wrong in the records, that is listed and nothing is written.
    """
    from caster.report import check_can_draw
    from caster.sweeps import read

    check_can_draw()
    from caster.report.bench import write

    write.check_folder(folder)
    results = _verified(read(sweep), out, root)
    made = write.write(results, folder)
    for section in made:
        for sentence in section.found:
            say(sentence)
    say(f"Written: {folder / write.PAGE}, {folder / write.TEXT}, tables and figures beside them")


def _verified(sweep: Sweep, out: Path | None, root: Path | None) -> Results:
    """The results of a run; what is wrong with its records ends the command."""
    from caster.report.bench.checks.problem import lines
    from caster.report.bench.read import load

    folder = out or Path("runs") / sweep.name
    with progress_bar() as progress:
        results, problems = load(sweep, folder, root, progress)
    if results is None:
        for line in lines(problems):
            say(line, errors)
        say(f"caster: {counted(len(problems), 'problem')} in the records of {folder}", errors)
        raise typer.Exit(1)
    return results
