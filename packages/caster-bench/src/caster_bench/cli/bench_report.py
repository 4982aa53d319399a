"""The commands `caster bench verify`, `report`, `pack`, `claims` and `leaderboard`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import errors, progress_bar, say, size
from caster.errors import CasterError, counted
from caster_bench.cli.bench import Backbones, Only, Root, Runs, SweepFile

if TYPE_CHECKING:
    from caster_bench.records.store import Records
    from caster_bench.studies.check_cells import Problem
    from caster_bench.studies.results import Results
    from caster_bench.sweeps import Sweep

PackFolder = Annotated[
    Path | None,
    typer.Option(
        "--records", metavar="DIR", help="Packed records of `caster bench pack`, instead of a run."
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
    """Check that the records of a sweep are complete, unchanged and consistent.

    Every metric is recomputed from samples and batches. Anything missing or wrong is listed, and
    the exit status is then 1. With --only or --backbone, all records of that part must exist; any
    other records are verified as well.
    """
    from caster_bench.studies.check_cells import compared
    from caster_bench.sweeps import read

    results = _verified(read(sweep), out, records, root, only, backbone)
    rejected = f", {len(results.rejected):,} of them rejected" if results.rejected else ""
    recorded = {own.backbone for own in results.provenance.values() if own.checkpoint is not None}
    say(
        f"{counted(len(results.sweep.cells), 'cell')} verified{rejected}, "
        f"{compared(results.sweep, recorded, root)}: no problems found."
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
    """Write tables, figures and a page for a sweep, from verified records only.

    Markdown, LaTeX and CSV tables, PDF, SVG and PNG figures, and one HTML page to read them on.
    If anything is missing or wrong in the records, it is listed and nothing is written. A report on
    one study or some backbones says so; it does not need the records of the others.
    """
    from caster.report import check_can_draw
    from caster_bench.sweeps import read

    check_can_draw()
    from caster_bench.studies.report import PAGE, TEXT, check_folder, write_report

    check_folder(folder)
    results = _verified(read(sweep), out, records, root, only, backbone)
    for section in write_report(results, folder):
        for sentence in section.found:
            say(sentence)
    say(f"Written: {folder / PAGE}, {folder / TEXT}, with tables and figures")


def pack(
    sweep: SweepFile,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the packed records.")
    ],
    out: Runs = None,
    records: PackFolder = None,
    root: Root = None,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Leave out cells that the sweep does not have, in DIR too."),
    ] = False,
) -> None:
    """Pack the records of a run into a few small files, for a repository.

    Only the fitted states are left out; the records keep their digests. Cells already in the pack
    stay as they are, so runs from several days or machines can be combined; use --records to add
    another pack. Cells of a later revision of their method replace packed ones, and what a later
    run recorded for a rejected backbone replaces all of its cells. Everything except missing cells
    must verify, otherwise nothing is written. If the sweep lost cells, --prune removes them from
    the pack: give the pack itself as --records if its run is gone.
    """
    from caster_bench.engine.pack import pack as pack_run
    from caster_bench.engine.pack import some_of
    from caster_bench.records.store import Pack
    from caster_bench.sweeps import read

    parsed = read(sweep)
    with progress_bar() as progress:
        packed, problems = pack_run(
            parsed, _location(parsed, out, records), Pack(folder), root, progress, prune
        )
    if packed is None:
        raise _listed(problems, Pack(folder))
    if packed.dropped:
        dropped = counted(len(packed.dropped), "cell")
        say(f"left out {dropped} that the sweep does not have, such as {some_of(packed.dropped)}")
    also = f", {packed.replaced:,} replaced by a later revision" if packed.replaced else ""
    also += f"; {packed.outdated:,} of an earlier revision left out" if packed.outdated else ""
    also += f"; {packed.missing:,} of the sweep are missing" if packed.missing else ""
    say(
        f"{counted(packed.cells, 'cell')} in {folder}, {packed.new:,} of them new{also}. "
        f"{counted(packed.files, 'file')}, {size(packed.size)}, the largest {size(packed.largest)}"
    )


def claims(
    file: Annotated[Path, typer.Argument(metavar="CLAIMS", help="TOML file with the claims.")],
    into: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where document and reports go."),
    ] = Path(),
    root: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder that paths in the file are relative to."),
    ] = Path(),
) -> None:
    """Compare a paper's claims with packed records, in one document.

    The file gives rules and text; all figures come from verified records. Claims whose study is not
    fully recorded are marked as not run yet. If anything is wrong in the records, it is listed and
    nothing is written.
    """
    from caster.report import check_can_draw

    check_can_draw()
    from caster_bench.records.store import Pack
    from caster_bench.studies.claims.claim_file import read_claims
    from caster_bench.studies.claims.document import write_document
    from caster_bench.studies.claims.verdicts import gather

    parsed = read_claims(file)
    with progress_bar() as progress:
        evidence, problems = gather(parsed, root, progress)
    if problems:
        raise _listed(problems, Pack(root / parsed.records))
    for verdict, count in write_document(parsed, evidence, into).items():
        say(f"{counted(count, 'claim')} {verdict}")
    folder = into / parsed.reports
    say(
        f"Written: {into / parsed.document}"
        f"{f', and reports in {folder}' if folder.exists() else ''}"
    )


def leaderboard(
    sweeps: Annotated[list[Path], typer.Argument(metavar="SWEEP", help="TOML files of sweeps.")],
    records: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder with the packed records of each sweep, by name."),
    ],
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the page.")
    ],
    root: Root = None,
) -> None:
    """Rank all methods on all kinds of streams, in a sortable page and its text.

    Rows come from verified records only. A backbone counts once all of its cells in a study are
    recorded, and a method is ranked on a board if it ran on all of its streams. If anything is
    wrong in the records, it is listed and nothing is written.
    """
    from caster.report import check_can_draw

    check_can_draw()
    from caster_bench.records.store import Pack
    from caster_bench.studies.leaderboard import PAGE, TEXT, write_leaderboard
    from caster_bench.studies.results import load_recorded
    from caster_bench.sweeps import read

    recorded = []
    read_sweeps = [read(file) for file in sweeps]
    if not any((records / sweep.name).is_dir() for sweep in read_sweeps):
        names = ", ".join(sweep.name for sweep in read_sweeps)
        raise CasterError(f"{records} has no folder of packed records named {names}")
    if folder.exists() and not folder.is_dir():  # before records are verified: that takes minutes
        raise CasterError(f"{folder} is a file, not a folder")
    for sweep in read_sweeps:
        pack = Pack(records / sweep.name)
        with progress_bar() as progress:
            found, problems = load_recorded(sweep, pack, root, progress)
        if problems:
            raise _listed(problems, pack)
        recorded.append(found)
    for sentence in write_leaderboard(recorded, [file.as_posix() for file in sweeps], folder):
        say(sentence)
    say(f"Written: {folder / TEXT} and {folder / PAGE}")


def _verified(
    sweep: Sweep,
    out: Path | None,
    packed: Path | None,
    root: Path | None,
    only: list[str] | None,
    backbones: list[str] | None,
) -> Results:
    """Load the results of a run, or of a part; problems in its records end the command."""
    from caster_bench.studies.results import load, restrict
    from caster_bench.sweeps import select

    part = select(sweep, only or (), backbones or ())
    location = _location(sweep, out, packed)
    with progress_bar() as progress:
        results, problems = load(sweep, location, root, progress, part.cells)
    if results is None:
        raise _listed(problems, location)
    return restrict(results, part)


def _location(sweep: Sweep, out: Path | None, packed: Path | None) -> Records:
    """Where the records of a sweep are: a run's folder or a pack."""
    from caster_bench.records.store import Pack

    if out is not None and packed is not None:
        raise CasterError("records come from a run or a pack: use --out or --records, not both")
    if packed is not None and not packed.is_dir():
        raise CasterError(f"there is no folder {packed}")
    return Pack(packed) if packed is not None else out or Path("runs") / sweep.name


def _listed(problems: list[Problem], records: Records) -> typer.Exit:
    """Print the problems of records, and return what ends the command."""
    from caster_bench.studies.check_cells import lines

    for line in lines(problems):
        say(line, errors)
    found = f"caster: {counted(len(problems), 'problem')} in the records of {records}"
    say(": ".join([found, *_remedy({problem.kind for problem in problems}, records)]), errors)
    return typer.Exit(1)


def _remedy(kinds: set[str], records: Records) -> Iterator[str]:
    """Say what to do about records that are incomplete or damaged; other faults have no remedy."""
    from caster_bench.records.store import Pack
    from caster_bench.studies.check_cells import CHANGED, DAMAGED, LEFT, MISSING, UNADMITTED

    packed = isinstance(records, Pack)
    if kinds <= {MISSING, UNADMITTED, LEFT}:
        part = "name a recorded part with --only or --backbone"
        also = "record and pack the rest" if packed else "`caster bench run` continues the run"
        yield f"{also}, or {part}"
    elif kinds & {DAMAGED, CHANGED} and not packed:
        what = "the admissions and the folders of cells listed as damaged"
        yield f"delete {what}, and `caster bench run` makes them again"
