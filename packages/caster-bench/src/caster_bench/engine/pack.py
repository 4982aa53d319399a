"""Records of a run, or of another pack, added to a pack, if all that then lies there verifies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import move_into_place
from caster.io.lock import locked
from caster_bench.records import Pack, Records, scan
from caster_bench.records.layout import TEMPORARY
from caster_bench.records.merge import Part, parts_of, write_parts
from caster_bench.studies.checks.cells import check_cells
from caster_bench.studies.checks.problem import Problem
from caster_bench.studies.checks.sources import check_admissions
from caster_bench.studies.read import load
from caster_bench.studies.verify import Progress, foreign_streams
from caster_bench.sweeps import Sweep

LOCK, NEW = f".lock{TEMPORARY}", f".new{TEMPORARY}"  # in the folder of a pack, while it is written
NAMED = 3  # cells in a line that refuses them; the rest are counted


@dataclass(frozen=True)
class Outcome:
    """What lies in a pack now."""

    cells: int
    new: int
    missing: int  # cells of the sweep that are not in it yet
    files: int
    size: int  # bytes
    largest: int


def pack(
    sweep: Sweep,
    out: Records,
    into: Pack,
    root: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Outcome | None, list[Problem]]:
    """Add the cells of a run that a pack lacks, or say what is wrong and change nothing.

    The run may be a part of the sweep; what is there of it, in the run and in the pack together,
    must be without fault. That is found out on the very files that then take their place, one
    by one: each is whole at any time, and the same command goes on where it was stopped.
    """
    if not scan(out).records:
        raise CasterError(f"there are no records in {out}")
    try:
        with _held(into) as new:
            return _pack(sweep, out, into, new, root or Path(), progress)
    except OSError as error:  # a full disk, for one
        raise CasterError(f"cannot pack: {error.strerror}: {error.filename or into}") from None


def _pack(
    sweep: Sweep, out: Records, into: Pack, new: Pack, root: Path, progress: Progress | None
) -> tuple[Outcome | None, list[Problem]]:
    parts = parts_of(into, out)
    _check_kept(parts, sweep, into)
    problems = _early(parts, sweep, root)
    there = scan(into)
    problems += [Problem("foreign", str(path)) for path in (*scan(out).foreign, *there.foreign)]
    problems += foreign_streams(there.streams, sweep)
    if problems:  # known before a table is read
        return None, sorted(set(problems))
    changed = write_parts(parts, new.folder)
    packed = {spec for part in parts for spec in part.cells}
    problems = load(sweep, new, root, progress, packed)[1]
    if problems:
        here = (str(new), str(into))
        return None, [replace(problem, where=problem.where.replace(*here)) for problem in problems]
    sizes = [path.stat().st_size for path in new.folder.iterdir()]
    for path in reversed(changed):  # streams before the cells that need them
        move_into_place(path, into.folder / path.name)
    added = sum(len(part.added) for part in parts)
    missing = len(sweep.cells) - len(packed)
    return Outcome(len(packed), added, missing, len(sizes), sum(sizes), max(sizes)), []


def _check_kept(parts: Sequence[Part], sweep: Sweep, into: Pack) -> None:
    """Refuse a pack of which cells are no longer in the sweep: nothing is taken out of a file."""
    gone = {spec: part.path.name for part in parts for spec in part.kept if spec not in sweep.cells}
    if not gone:
        return
    named = "; ".join(spec.full for spec in list(gone)[:NAMED])
    more = f"; and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
    raise CasterError(
        f"{into} holds {len(gone)} cells that the sweep does not have ({named}{more}): delete "
        f"{', '.join(sorted(set(gone.values())))} there, and pack what still holds from its run"
    )


def _early(parts: Sequence[Part], sweep: Sweep, root: Path) -> list[Problem]:
    """What the descriptions of cells tell, before any table is read or written."""
    strange = [
        Problem("not of this sweep", f"{spec.full} in {where}")
        for part in parts
        for spec, (_, where) in part.added.items()
        if spec not in sweep.cells
    ]
    if strange:
        return strange
    admissions = {(part.admission.backbone, part.admission.data): part.admission for part in parts}
    cells = {spec: cell for part in parts for spec, (cell, _) in part.cells.items()}
    return [*check_admissions(admissions, sweep, root), *check_cells(cells, admissions, sweep)]


@contextmanager
def _held(into: Pack) -> Iterator[Pack]:
    """An empty folder for new files in that of a pack, which nobody else writes to meanwhile."""
    folder = into.folder
    if folder.exists() and not folder.is_dir():
        raise CasterError(f"cannot write {into}: it is not a folder")
    if not folder.absolute().parent.is_dir():
        raise CasterError(f"cannot write {into}: there is no folder {folder.parent}")
    new = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        with locked(folder / LOCK, f"another `caster bench pack` writes to {into}: wait for it"):
            _remove_leftovers(into)
            (folder / NEW).mkdir()
            try:
                yield Pack(folder / NEW)
            finally:
                shutil.rmtree(folder / NEW, ignore_errors=True)
    finally:
        if new:
            with suppress(OSError):  # something lies there now
                folder.rmdir()


def _remove_leftovers(into: Pack) -> None:
    """Delete what a `pack` that was killed left."""
    for path in scan(into).leftovers:
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
