"""Records read back, or one line on why they cannot be trusted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import open_regular, read_regular
from caster_bench.records.digest import FormatError, key_of, of_table, unsealed
from caster_bench.records.layout import STATE, Where
from caster_bench.records.schema import (
    BATCHES,
    BATCHES_FILE,
    CELL_FILE,
    DONE,
    REFUSED,
    SAMPLES,
    SAMPLES_FILE,
    Admission,
    Batches,
    Cell,
    Samples,
)
from caster_bench.records.shard import SHARD, Row, open_shard, streams_path
from caster_bench.records.tables import Table, read_table
from caster_bench.sweeps.spec import Spec

PARQUET_END = b"PAR1"
TABLE_FILES = (SAMPLES_FILE, BATCHES_FILE)


@dataclass(frozen=True)
class Record:
    """A cell with its samples and batches; a refused one has neither."""

    cell: Cell
    spec: Spec
    samples: Samples | None
    batches: Batches | None


def read(where: Where) -> Record:
    """A record, every digest of it checked."""
    if isinstance(where, Row):
        cell, spec = _described_row(where)
        if cell.status == REFUSED:
            return Record(cell, spec, None, None)
        with _about(where):
            samples = _same(where.samples, cell, SAMPLES)
            return Record(cell, spec, samples, _same(where.batches, cell, BATCHES))
    cell, contents = _checked(where)
    with _about(where / CELL_FILE):
        spec = Spec.of(cell.identity.get("spec", {}))
    if cell.status == REFUSED:
        return Record(cell, spec, None, None)
    with _about(where / SAMPLES_FILE):
        samples = _same(read_table(contents[SAMPLES_FILE], Samples), cell, SAMPLES)
    with _about(where / BATCHES_FILE):
        batches = _same(read_table(contents[BATCHES_FILE], Batches), cell, BATCHES)
    return Record(cell, spec, samples, batches)


def _same(table: Table, cell: Cell, name: str) -> Table:
    """A table, if it is the one that the record was made with."""
    if of_table(table) != cell.tables[name]:
        raise CasterError(f"its {name} were changed after they were recorded")
    return table


def read_cell(where: Where) -> Cell:
    """`cell.json` of a record; the files of a folder have the digests it states."""
    return _described_row(where)[0] if isinstance(where, Row) else _checked(where)[0]


def described(where: Where) -> tuple[Cell, Spec]:
    """`cell.json` of a record and the cell that it is of, whatever its tables hold."""
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
            raise CasterError(f"it is of {spec.backbone} on {spec.data}")
    return cell, spec


def is_whole(folder: Path) -> bool:
    """Whether a record looks complete: a quick look, where `read_cell` reads every byte.

    One of another format is neither: that is an error.
    """
    try:
        with _about(folder / CELL_FILE):
            cell = unsealed(_bytes(folder / CELL_FILE), Cell)
        return all(_ends_well(folder / name) for name in cell.files)
    except FormatError:
        raise
    except (CasterError, OSError):
        return False


def _ends_well(path: Path) -> bool:
    """Whether a Parquet file has the end that it is written with last."""
    with open_regular(path) as file:
        file.seek(-len(PARQUET_END), os.SEEK_END)
        return file.read() == PARQUET_END


def read_admission(path: Path) -> Admission:
    """An admission, and the files beside it that it names, checked; a pack has none of those."""
    packed = path.suffix == SHARD
    with _about(path):
        admission = unsealed(open_shard(path).admission if packed else _bytes(path), Admission)
    if path.stem != admission.name:
        raise CasterError(f"{path} is of {admission.name}")
    if packed:
        return admission
    ours = {found.name for found in path.parent.glob(f"{admission.name}{STATE}")}
    if ours != admission.files.keys():
        raise CasterError(f"{path} names {_list(admission.files)}, and beside it is {_list(ours)}")
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
        cell = unsealed(_bytes(path), Cell)
        _check_parts(cell)
    if key_of(cell.identity) != folder.name:
        raise CasterError(
            f"{folder} holds the cell {key_of(cell.identity)}: it was moved or copied"
        )
    return cell


def _check_parts(cell: Cell) -> None:
    """A cell that is done has samples and batches, and a refused one neither."""
    if cell.status not in (DONE, REFUSED):
        raise CasterError(f"there is no status {cell.status!r}")
    done = cell.status == DONE
    for stated, names in ((cell.tables, (SAMPLES, BATCHES)), (cell.files, TABLE_FILES)):
        if set(stated) != set(names if done else ()):
            raise CasterError(f"it must name {_list(names if done else ())}, not {_list(stated)}")


def _check(path: Path, sha256: str) -> bytes:
    """The bytes of a file, if they are those that were written."""
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
def _about(where: Where) -> Iterator[None]:
    """Errors that say which file they are about."""
    files = (where.path, streams_path(where.path)) if isinstance(where, Row) else (where,)
    try:
        yield
    except CasterError as error:
        if any(str(path) in str(error) for path in files):
            raise
        raise type(error)(f"{where}: {error}") from None
