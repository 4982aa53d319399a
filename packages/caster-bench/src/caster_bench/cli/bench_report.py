"""The commands `caster bench verify`, `report`, `pack` and `claims`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import counted, errors, progress_bar, say, size
from caster.errors import CasterError
from caster_bench.cli.bench_options import Backbones, Only, Root, Runs, SweepFile

if TYPE_CHECKING:
    from caster_bench.records import Records
    from caster_bench.studies.results import Results
    from caster_bench.studies.verify import Problem
    from caster_bench.sweeps import Sweep

PackFolder = Annotated[
    Path | None,
    typer.Option(
        "--records", metavar="DIR", help="Packed records of `caster bench pack`, in place of a run."
    ),
]


def verify(
    sweep: SweepFile,
    out: Runs = None,
    records: PackFolder = None,
    root: Root = None,
    only: Only = None,
    backbone: Backbones = None,
) -> None:
    """Whether the records of a sweep are whole, unchanged and consistent.

    Every metric is recomputed from samples and batches. What is missing or wrong is listed, and
    the exit status is then 1. Of one study or some backbones all records must be there; what is
    recorded of the others is verified as well.
    """
    from caster_bench.studies.verify import compared
    from caster_bench.sweeps import read

    results = _verified(read(sweep), out, records, root, only, backbone)
    refused = f", {len(results.refused):,} of them refused" if results.refused else ""
    say(
        f"{counted(len(results.sweep.cells), 'cell')} verified{refused}, "
        f"{compared(results.sweep, root)}: nothing is wrong."
    )
    if results.part:
        say(results.part)


def report(
    sweep: SweepFile,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the report.")
    ],
    out: Runs = None,
    records: PackFolder = None,
    root: Root = None,
    only: Only = None,
    backbone: Backbones = None,
) -> None:
    """Tables, figures and a page of a sweep, from verified records alone.

    Markdown, LaTeX and CSV tables, PDF, SVG and PNG figures, and one HTML page to read them on.
    With anything missing or wrong in the records, that is listed and nothing is written. A report
    of one study or some backbones says so; what is missing of the others does not matter to it.
    """
    from caster.report import check_can_draw
    from caster_bench.sweeps import read

    check_can_draw()
    from caster_bench.studies import write

    write.check_folder(folder)
    results = _verified(read(sweep), out, records, root, only, backbone)
    made = write.write(results, folder)
    for section in made:
        for sentence in section.found:
            say(sentence)
    say(f"Written: {folder / write.PAGE}, {folder / write.TEXT}, tables and figures beside them")


def pack(
    sweep: SweepFile,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the packed records.")
    ],
    out: Runs = None,
    records: PackFolder = None,
    root: Root = None,
) -> None:
    """Pack the records of a run in few small files, for a repository.

    Nothing of them is lost but the fitted states, whose digests they have. Cells that are packed
    already stay as they are, so that runs of several days or machines can be added to one another;
    what was packed on another machine is added with `--records`. Backbones that were refused give
    way to what a later run has of them. What is there must verify, but for cells that are missing;
    otherwise nothing is written.
    """
    from caster_bench.engine.pack import pack as pack_run
    from caster_bench.records import Pack
    from caster_bench.sweeps import read

    known = read(sweep)
    where = _where(known, out, records)
    with progress_bar() as progress:
        packed, problems = pack_run(known, where, Pack(folder), root, progress)
    if packed is None:
        raise _listed(problems, folder)
    left = f"; {packed.missing:,} of the sweep are missing" if packed.missing else ""
    say(
        f"{counted(packed.cells, 'cell')} in {folder}, {packed.new:,} of them new{left}. "
        f"{counted(packed.files, 'file')}, {size(packed.size)}, the largest {size(packed.largest)}"
    )


def claims(
    file: Annotated[Path, typer.Argument(metavar="CLAIMS", help="TOML file of the claims.")],
    into: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where document and reports go."),
    ] = Path(),
    root: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="What the paths in the file are relative to."),
    ] = Path(),
) -> None:
    """A paper's claims beside what packed records say of them, in one document.

    Rules and words are of the file, figures of verified records alone. Claims whose study is not
    recorded in full are named as not run yet. With anything wrong in the records, that is listed
    and nothing is written.
    """
    from caster.report import check_can_draw

    check_can_draw()
    from caster_bench.studies.claims.evidence import gather
    from caster_bench.studies.claims.parse import read
    from caster_bench.studies.claims.write import write

    held = read(file)
    with progress_bar() as progress:
        evidence, problems = gather(held, root, progress)
    if problems:
        raise _listed(problems, root / held.records)
    for verdict, count in write(held, evidence, into).items():
        say(f"{counted(count, 'claim')} {verdict}")
    reports = f", and reports in {into / held.reports}" if (into / held.reports).exists() else ""
    say(f"Written: {into / held.document}{reports}")


def _verified(
    sweep: Sweep,
    out: Path | None,
    packed: Path | None,
    root: Path | None,
    only: str | None,
    backbones: list[str] | None,
) -> Results:
    """The results of a run, or of a part; what is wrong with its records ends the command."""
    from caster_bench.studies.read import load, restricted
    from caster_bench.sweeps import chosen

    part = chosen(sweep, only, backbones or ())
    where = _where(sweep, out, packed)
    with progress_bar() as progress:
        results, problems = load(sweep, where, root, progress, part.cells)
    if results is None:
        raise _listed(problems, where)
    return restricted(results, part)


def _where(sweep: Sweep, out: Path | None, packed: Path | None) -> Records:
    """Where the records of a sweep lie, in a run or packed."""
    from caster_bench.records import Pack

    if out is not None and packed is not None:
        raise CasterError("records are in a run or packed: give --out or --records, not both")
    if packed is not None and not packed.is_dir():
        raise CasterError(f"there is no folder {packed}")
    return Pack(packed) if packed is not None else out or Path("runs") / sweep.name


def _listed(problems: list[Problem], where: Records) -> typer.Exit:
    """Print what is wrong with records; what ends the command."""
    from caster_bench.studies.checks.problem import lines

    for line in lines(problems):
        say(line, errors)
    say(f"caster: {counted(len(problems), 'problem')} in the records of {where}", errors)
    return typer.Exit(1)
