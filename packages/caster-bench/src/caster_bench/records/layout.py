"""Where records lie: in the folder of a run, or packed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caster.errors import CasterError
from caster_bench.records.digest import KEY_LENGTH
from caster_bench.records.shard import SHARD, Row, open_shard

TEMPORARY = ".tmp"  # how the names of unfinished files and folders end
STATE = ".caster"  # how a fitted state beside its admission ends


@dataclass(frozen=True)
class Pack:
    """A folder of packed records.

    A file a backbone on data, with its admission and cells, and a file a data set, with the streams
    that all backbones meet.
    """

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)


Records = Path | Pack  # the folder of a run, or a pack
Where = Path | Row  # of one record: its folder, or its row in a pack


@dataclass(frozen=True)
class Found:
    """What lies in the folder of a run, or in a pack."""

    cells: tuple[Path, ...]  # folders with the name of a key
    admissions: tuple[Path, ...]
    leftovers: tuple[Path, ...]  # of writers that were killed
    foreign: tuple[Path, ...]  # what no caster puts there
    rows: tuple[Row, ...] = ()  # of a pack, which has no folders
    streams: tuple[Path, ...] = ()  # of a pack, by data

    @property
    def records(self) -> tuple[Where, ...]:
        """All records, wherever they are."""
        return (*self.cells, *self.rows)


def cells_of(out: Path) -> Path:
    """Where a run keeps its cells."""
    return out / "cells"


def sources_of(out: Path) -> Path:
    """Where a run keeps its admissions and states."""
    return out / "sources"


def admission_path(out: Records, name: str) -> Path:
    """Where the admission of a backbone on data is."""
    if isinstance(out, Pack):
        return out.folder / f"{name}{SHARD}"
    return sources_of(out) / f"{name}.json"


def scan(out: Records) -> Found:
    """What lies among the cells and sources of a run, by name only; or in a pack.

    The files of a pack are opened for the number of their rows, and nothing of them is decoded.
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
    return Found(tuple(cells), tuple(admissions), tuple(leftovers), tuple(foreign))


def _scan_pack(pack: Pack) -> Found:
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
    return Found((), *found, tuple(rows), tuple(streams))


def _count(path: Path) -> int:
    try:
        return open_shard(path).rows
    except CasterError:
        return 1  # to read it tells what is wrong


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_key(name: str) -> bool:
    return len(name) == KEY_LENGTH and set(name) <= set("0123456789abcdef")
