"""Records read back, or one line on why they cannot be trusted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from caster.errors import CasterError
from caster.records.digest import KEY_LENGTH, key_of, unsealed
from caster.records.schema import (
    BATCHES_FILE,
    CELL_FILE,
    DONE,
    REFUSED,
    SAMPLES_FILE,
    Admission,
    Batches,
    Cell,
    Samples,
)
from caster.records.tables import read_table
from caster.sweeps.spec import Spec

TEMPORARY = ".tmp"  # how the names of unfinished files and folders end
PARQUET_END = b"PAR1"
STATE = ".caster"  # how a fitted state beside its admission ends


@dataclass(frozen=True)
class Record:
    """A cell with its samples and batches; a refused one has neither."""

    cell: Cell
    spec: Spec
    samples: Samples | None
    batches: Batches | None


@dataclass(frozen=True)
class Found:
    """What lies in the folder of a run."""

    cells: tuple[Path, ...]  # folders with the name of a key
    admissions: tuple[Path, ...]
    leftovers: tuple[Path, ...]  # of writers that were killed
    foreign: tuple[Path, ...]  # what no caster puts there


def cells_of(out: Path) -> Path:
    """Where a run keeps its cells."""
    return out / "cells"


def sources_of(out: Path) -> Path:
    """Where a run keeps its admissions and states."""
    return out / "sources"


def scan(out: Path) -> Found:
    """What lies among the cells and sources of a run, by name only."""
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
    return Found(tuple(cells), tuple(admissions), tuple(leftovers), tuple(foreign))


def read(folder: Path) -> Record:
    """A record, every digest of it checked."""
    cell, contents = _checked(folder)
    with _about(folder / CELL_FILE):
        spec = Spec.of(cell.identity.get("spec", {}))
    if cell.status == REFUSED:
        return Record(cell, spec, None, None)
    with _about(folder / SAMPLES_FILE):
        samples = read_table(contents[SAMPLES_FILE], Samples)
    with _about(folder / BATCHES_FILE):
        batches = read_table(contents[BATCHES_FILE], Batches)
    return Record(cell, spec, samples, batches)


def read_cell(folder: Path) -> Cell:
    """`cell.json` of a record, whose other files are there and have the digests it states."""
    return _checked(folder)[0]


def is_whole(folder: Path) -> bool:
    """Whether a record looks complete: a quick look, where `read_cell` reads every byte."""
    try:
        cell = unsealed(_bytes(folder / CELL_FILE), Cell)
        return all(_ends_well(folder / name) for name in cell.files)
    except (CasterError, OSError):
        return False


def _ends_well(path: Path) -> bool:
    """Whether a Parquet file has the end that it is written with last."""
    with path.open("rb") as file:
        file.seek(-len(PARQUET_END), os.SEEK_END)
        return file.read() == PARQUET_END


def read_admission(path: Path) -> Admission:
    """An admission, and the files beside it that it names, checked."""
    with _about(path):
        admission = unsealed(_bytes(path), Admission)
    if path.stem != admission.name:
        raise CasterError(f"{path} is of {admission.name}")
    ours = {found.name for found in path.parent.glob(f"{admission.name}{STATE}")}
    if ours != admission.files.keys():
        raise CasterError(f"{path} names {_list(admission.files)}, and beside it is {_list(ours)}")
    for name, sha256 in admission.files.items():
        _check(path.with_name(name), sha256)
    return admission


def _checked(folder: Path) -> tuple[Cell, dict[str, bytes]]:
    path = folder / CELL_FILE
    with _about(path):
        cell = unsealed(_bytes(path), Cell)
    if cell.status not in (DONE, REFUSED):
        raise CasterError(f"{path}: there is no status {cell.status!r}")
    if key_of(cell.identity) != folder.name:
        raise CasterError(
            f"{folder} holds the cell {key_of(cell.identity)}: it was moved or copied"
        )
    wanted = {SAMPLES_FILE, BATCHES_FILE} if cell.status == DONE else set()
    if set(cell.files) != wanted:
        raise CasterError(f"{path} must name {_list(wanted)}, not {_list(cell.files)}")
    extra = {found.name for found in folder.iterdir()} - wanted - {CELL_FILE}
    if extra:
        raise CasterError(f"{folder} holds foreign files: {_list(extra)}")
    return cell, {name: _check(folder / name, cell.files[name]) for name in sorted(wanted)}


def _check(path: Path, sha256: str) -> bytes:
    """The bytes of a file, if they are those that were written."""
    content = _bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CasterError(f"{path} was changed or cut off after it was written")
    return content


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CasterError(f"{path} is missing") from None
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_key(name: str) -> bool:
    return len(name) == KEY_LENGTH and set(name) <= set("0123456789abcdef")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Errors that say which file they are about."""
    try:
        yield
    except CasterError as error:
        raise CasterError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
