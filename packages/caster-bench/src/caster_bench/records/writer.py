"""A record written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import file_digest, move_into_place, replacing
from caster_bench.records.digest import key_of, of_table, same, sealed
from caster_bench.records.layout import TEMPORARY, scan, sources_of
from caster_bench.records.reader import read
from caster_bench.records.schema import (
    BATCHES,
    BATCHES_FILE,
    CELL_FILE,
    DONE,
    SAMPLES,
    SAMPLES_FILE,
    Admission,
    Batches,
    Cell,
    Samples,
)
from caster_bench.records.tables import read_table, write_batches, write_samples


def write(
    cells: Path, cell: Cell, samples: Samples | None = None, batches: Batches | None = None
) -> Path:
    """Put a record among the cells of a run, and return its folder.

    `counts`, `tables` and `files` of the cell are filled in here. A record that is there already
    stays if it says the same, times aside, and is an error if not: two runs of a cell must agree.
    """
    if (cell.status == DONE) != (samples is not None) or (samples is None) != (batches is None):
        raise CasterError("a cell that is done has samples and batches, and a refused one neither")
    cells.mkdir(parents=True, exist_ok=True)
    folder = cells / key_of(cell.identity)
    try:
        temporary = Path(tempfile.mkdtemp(dir=cells, prefix=f".{folder.name}.", suffix=TEMPORARY))
        try:
            written = _fill(temporary, cell, samples, batches)
            _take_place(temporary, folder, written, samples, batches)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:  # a full disk, for one
        raise CasterError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder


def _fill(folder: Path, cell: Cell, samples: Samples | None, batches: Batches | None) -> Cell:
    """Write the files of a record."""
    counts, tables = {SAMPLES: 0, BATCHES: 0}, dict[str, str]()
    if samples is not None and batches is not None:
        write_samples(samples, folder / SAMPLES_FILE)
        write_batches(batches, folder / BATCHES_FILE)
        counts = {SAMPLES: len(samples.index), BATCHES: len(batches.batch)}
        tables = {  # of what is read: a NaN has many forms, a null has one
            SAMPLES: of_table(read_table((folder / SAMPLES_FILE).read_bytes(), Samples)),
            BATCHES: of_table(read_table((folder / BATCHES_FILE).read_bytes(), Batches)),
        }
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    cell = replace(cell, counts=counts, tables=tables, files=files)
    (folder / CELL_FILE).write_text(sealed(cell), encoding="utf-8")
    folder.chmod(0o755)  # mkdtemp made it private
    return cell


def _take_place(
    temporary: Path, folder: Path, cell: Cell, samples: Samples | None, batches: Batches | None
) -> None:
    try:
        move_into_place(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
        there = read(folder)
        if not same((there.cell, there.samples, there.batches), (cell, samples, batches)):
            raise CasterError(
                f"{folder} holds another result of the same cell: find out why two runs differ, "
                "then delete the wrong one"
            ) from None


def write_admission(out: Path, admission: Admission) -> Path:
    """Put the admission of a backbone on data in a run's folder, in place of an earlier one.

    The files it names, the fitted state for one, must lie beside it already.
    """
    sources_of(out).mkdir(parents=True, exist_ok=True)
    path = sources_of(out) / f"{admission.name}.json"
    with replacing(path) as temporary:
        temporary.write_text(sealed(admission), encoding="utf-8")
    return path


def remove_leftovers(out: Path) -> int:
    """Delete what killed writers left; only while no other process writes here. How many."""
    leftovers = scan(out).leftovers
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(leftovers)
