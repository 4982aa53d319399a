"""Records on disk: find, read and check them, and write them atomically."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import file_digest, move_into_place, open_regular, read_regular, replacing
from caster_bench.records.digest import (
    KEY_LENGTH,
    FormatError,
    from_json,
    key_of,
    same,
    table_digest,
    to_json,
)
from caster_bench.records.parquet import Table, read_table, write_batches, write_samples
from caster_bench.records.schema import (
    BATCHES,
    BATCHES_FILE,
    CELL_FILE,
    DONE,
    REJECTED,
    SAMPLES,
    SAMPLES_FILE,
    Admission,
    Batches,
    Cell,
    Samples,
)
from caster_bench.records.shard import SHARD, Row, open_shard, streams_path
from caster_bench.sweeps.spec import Spec

TEMPORARY = ".tmp"  # suffix of unfinished files and folders
STATE = ".caster"  # suffix of a fitted state, next to its admission
PARQUET_END = b"PAR1"
TABLE_FILES = (SAMPLES_FILE, BATCHES_FILE)


@dataclass(frozen=True)
class Pack:
    """A folder of packed records.

    One file per backbone and data set holds the admission and cells; one file per data set holds
    the streams shared by all backbones.
    """

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)


Records = Path | Pack  # the folder of a run, or a pack


Location = Path | Row  # of one record: its folder, or its row in a pack


@dataclass(frozen=True)
class Listing:
    """Contents of a run's folder, or of a pack."""

    cells: tuple[Path, ...]  # folders named by key
    admissions: tuple[Path, ...]
    leftovers: tuple[Path, ...]  # from killed writers
    foreign: tuple[Path, ...]  # anything else
    rows: tuple[Row, ...] = ()  # cells of a pack
    streams: tuple[Path, ...] = ()  # files of a pack, one per data set

    @property
    def records(self) -> tuple[Location, ...]:
        """All records, in folders or packed."""
        return (*self.cells, *self.rows)


def cells_of(out: Path) -> Path:
    """Return the folder of a run's cells."""
    return out / "cells"


def sources_of(out: Path) -> Path:
    """Return the folder of a run's admissions and states."""
    return out / "sources"


def admission_path(out: Records, name: str) -> Path:
    """Return the file with the admission of a backbone on data."""
    if isinstance(out, Pack):
        return out.folder / f"{name}{SHARD}"
    return sources_of(out) / f"{name}.json"


def scan(out: Records) -> Listing:
    """List the records of a run by name, or those of a pack.

    Files of a pack are opened only for their number of rows; nothing is decoded.
    """
    if isinstance(out, Pack):
        return _scan_pack(out)
    cells, admissions, leftovers, foreign = [], [], [], []
    for path in _inside(cells_of(out)):
        if path.name.startswith(".") and path.name.endswith(TEMPORARY):
            leftovers.append(path)
        elif path.is_dir() and not path.is_symlink() and _is_key(path.name):
            cells.append(path)
        else:
            foreign.append(path)
    for path in _inside(sources_of(out)):
        if path.name.startswith(".") and path.name.endswith(TEMPORARY):
            leftovers.append(path)
        elif path.suffix == ".json" and path.is_file():
            admissions.append(path)
        elif not (path.suffix == STATE and path.with_suffix(".json").is_file()):
            foreign.append(path)
    return Listing(tuple(cells), tuple(admissions), tuple(leftovers), tuple(foreign))


def _scan_pack(pack: Pack) -> Listing:
    rows: list[Row] = []
    admissions, streams, leftovers, foreign = [], [], [], []
    for path in _inside(pack.folder):
        if path.name.startswith(".") and path.name.endswith(TEMPORARY):
            leftovers.append(path)
        elif path.suffix != SHARD or not path.is_file():
            foreign.append(path)
        elif "--" not in path.stem:
            streams.append(path)
        else:
            admissions.append(path)
            rows += [Row(path, number) for number in range(_count(path))]
    found = tuple(admissions), tuple(leftovers), tuple(foreign)
    return Listing((), *found, tuple(rows), tuple(streams))


def _count(path: Path) -> int:
    try:
        return open_shard(path).rows
    except CasterError:
        return 1  # reading it will say what is wrong


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_key(name: str) -> bool:
    return len(name) == KEY_LENGTH and set(name) <= set("0123456789abcdef")


@dataclass(frozen=True)
class Record:
    """A cell with its samples and batches; a rejected cell has neither."""

    cell: Cell
    spec: Spec
    samples: Samples | None
    batches: Batches | None


def read(where: Location) -> Record:
    """Read a record and check all of its digests."""
    if isinstance(where, Row):
        cell, spec = _described_row(where)
        if cell.status == REJECTED:
            return Record(cell, spec, None, None)
        with _about(where):
            samples = _same(where.samples, cell, SAMPLES)
            return Record(cell, spec, samples, _same(where.batches, cell, BATCHES))
    cell, contents = _checked(where)
    with _about(where / CELL_FILE):
        spec = Spec.of(cell.identity.get("spec", {}))
    if cell.status == REJECTED:
        return Record(cell, spec, None, None)
    with _about(where / SAMPLES_FILE):
        samples = _same(read_table(contents[SAMPLES_FILE], Samples), cell, SAMPLES)
    with _about(where / BATCHES_FILE):
        batches = _same(read_table(contents[BATCHES_FILE], Batches), cell, BATCHES)
    return Record(cell, spec, samples, batches)


def _same(table: Table, cell: Cell, name: str) -> Table:
    """Return a table if it has the recorded digest."""
    if table_digest(table) != cell.tables[name]:
        raise CasterError(f"its {name} were changed after they were recorded")
    return table


def read_cell(where: Location) -> Cell:
    """Read `cell.json` of a record, and check the digests of the files next to it."""
    return _described_row(where)[0] if isinstance(where, Row) else _checked(where)[0]


def described(where: Location) -> tuple[Cell, Spec]:
    """Read `cell.json` of a record and the cell's spec, without looking at its tables."""
    if isinstance(where, Row):
        return _described_row(where)
    with _about(where / CELL_FILE):
        cell = _described_folder(where)
        return cell, Spec.of(cell.identity.get("spec", {}))


def _described_row(row: Row) -> tuple[Cell, Spec]:
    with _about(row):
        cell = row.cell
        _check_parts(cell)
        spec = Spec.of(cell.identity.get("spec", {}))
        if row.path.stem != f"{spec.backbone}--{spec.data}":
            raise CasterError(f"it belongs to {spec.backbone} on {spec.data}")
    return cell, spec


def is_whole(folder: Path) -> bool:
    """Whether a record looks complete, without reading every byte as `read_cell` does.

    Another format is an error.
    """
    try:
        with _about(folder / CELL_FILE):
            cell = from_json(_bytes(folder / CELL_FILE), Cell)
        return all(_ends_well(folder / name) for name in cell.files)
    except FormatError:
        raise
    except (CasterError, OSError):
        return False


def _ends_well(path: Path) -> bool:
    """Whether a Parquet file has its footer, which is written last."""
    with open_regular(path) as file:
        file.seek(-len(PARQUET_END), os.SEEK_END)
        return file.read() == PARQUET_END


def read_admission(path: Path) -> Admission:
    """Read an admission and check the files it names; a pack has no such files."""
    packed = path.suffix == SHARD
    with _about(path):
        admission = from_json(open_shard(path).admission if packed else _bytes(path), Admission)
    if path.stem != admission.name:
        raise CasterError(f"{path} belongs to {admission.name}")
    if packed:
        return admission
    ours = {found.name for found in path.parent.glob(f"{admission.name}{STATE}")}
    if ours != admission.files.keys():
        raise CasterError(
            f"{path} names {_list(admission.files)}, but its folder has {_list(ours)}"
        )
    for name, sha256 in admission.files.items():
        _check(path.with_name(name), sha256)
    return admission


def _checked(folder: Path) -> tuple[Cell, dict[str, bytes]]:
    cell = _described_folder(folder)
    extra = {found.name for found in folder.iterdir()} - cell.files.keys() - {CELL_FILE}
    if extra:
        raise CasterError(f"{folder} holds foreign files: {_list(extra)}")
    return cell, {name: _check(folder / name, cell.files[name]) for name in sorted(cell.files)}


def _described_folder(folder: Path) -> Cell:
    path = folder / CELL_FILE
    with _about(path):
        cell = from_json(_bytes(path), Cell)
        _check_parts(cell)
    if key_of(cell.identity) != folder.name:
        raise CasterError(
            f"{folder} holds the cell {key_of(cell.identity)}: it was moved or copied"
        )
    return cell


def _check_parts(cell: Cell) -> None:
    """Check that a finished cell has samples and batches, and a rejected cell has neither."""
    if cell.status not in (DONE, REJECTED):
        raise CasterError(f"there is no status {cell.status!r}")
    done = cell.status == DONE
    for stated, names in ((cell.tables, (SAMPLES, BATCHES)), (cell.files, TABLE_FILES)):
        if set(stated) != set(names if done else ()):
            raise CasterError(f"it must name {_list(names if done else ())}, not {_list(stated)}")


def _check(path: Path, sha256: str) -> bytes:
    """Read a file and check its digest."""
    content = _bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CasterError(f"{path} was changed or cut off after it was written")
    return content


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise CasterError(f"{path} is missing") from None
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


@contextmanager
def _about(where: Location) -> Iterator[None]:
    """Prefix errors with the file they are about."""
    files = (where.path, streams_path(where.path)) if isinstance(where, Row) else (where,)
    try:
        yield
    except CasterError as error:
        if any(str(path) in str(error) for path in files):
            raise
        raise type(error)(f"{where}: {error}") from None


def write(
    cells: Path, cell: Cell, samples: Samples | None = None, batches: Batches | None = None
) -> Path:
    """Write a record to the cells of a run, and return its folder.

    Fills in `counts`, `tables` and `files`. An existing record stays if it agrees apart from times,
    and is an error otherwise, because two runs of a cell must agree.
    """
    if (cell.status == DONE) != (samples is not None) or (samples is None) != (batches is None):
        raise CasterError("a finished cell has samples and batches, a rejected cell has neither")
    cells.mkdir(parents=True, exist_ok=True)
    folder = cells / key_of(cell.identity)
    try:
        temporary = Path(tempfile.mkdtemp(dir=cells, prefix=f".{folder.name}.", suffix=TEMPORARY))
        try:
            written = _fill(temporary, cell, samples, batches)
            _take_place(temporary, folder, written, samples, batches)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:  # e.g. a full disk
        raise CasterError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder


def _fill(folder: Path, cell: Cell, samples: Samples | None, batches: Batches | None) -> Cell:
    """Write the files of a record."""
    counts, tables = {SAMPLES: 0, BATCHES: 0}, dict[str, str]()
    if samples is not None and batches is not None:
        write_samples(samples, folder / SAMPLES_FILE)
        write_batches(batches, folder / BATCHES_FILE)
        counts = {SAMPLES: len(samples.index), BATCHES: len(batches.batch)}
        tables = {  # of what is read back: NaN has many bit patterns, null has one
            SAMPLES: table_digest(read_table((folder / SAMPLES_FILE).read_bytes(), Samples)),
            BATCHES: table_digest(read_table((folder / BATCHES_FILE).read_bytes(), Batches)),
        }
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    cell = replace(cell, counts=counts, tables=tables, files=files)
    (folder / CELL_FILE).write_text(to_json(cell), encoding="utf-8")
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
    """Write the admission of a backbone on data to a run's folder, replacing an earlier one.

    The files it names, such as the fitted state, must already be there.
    """
    sources_of(out).mkdir(parents=True, exist_ok=True)
    path = sources_of(out) / f"{admission.name}.json"
    with replacing(path) as temporary:
        temporary.write_text(to_json(admission), encoding="utf-8")
    return path


def remove_leftovers(out: Path) -> int:
    """Delete what killed writers left, and return how many; no other process may be writing."""
    leftovers = scan(out).leftovers
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(leftovers)
