"""Records and a pack brought together: what is to be packed, and the files of it."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster_bench.records.digest import Parts, canonical, key_of, same, sealed
from caster_bench.records.layout import Pack, Records, Where, admission_path, scan
from caster_bench.records.reader import described, read, read_admission
from caster_bench.records.schema import RUN, Admission, Cell
from caster_bench.records.shard import Row, open_shard, streams_path, write_shard
from caster_bench.records.streams import Stream, open_streams, write_streams
from caster_bench.sweeps.spec import Spec

LOCAL = ("seen", "files")  # what of an admission is of one machine: times of files, a state's file
Cells = dict[Spec, tuple[Cell, Where]]


@dataclass(frozen=True)
class Part:
    """A file of a pack as it is to be: the admission, and where every cell of it lies now."""

    path: Path  # of the file in the pack
    admission: Admission
    kept: Cells  # that the pack has
    added: Cells  # that it does not have yet
    both: Cells  # that are there twice, whose records must say the same

    @property
    def cells(self) -> Cells:
        """All of them."""
        return self.kept | self.added


def parts_of(pack: Pack, out: Records) -> list[Part]:
    """What a pack becomes with the records of a run or of another; no table is looked into.

    Of a cell that both have, the pack's record is kept. A backbone that was refused gives way as a
    whole, since its cells say nothing but that something was not there: in the pack, to what the
    run has of it; in the run, and for want of a checkpoint, to what the pack has.
    """
    ours: dict[str, Cells] = defaultdict(dict)
    for where in scan(out).records:
        cell, spec = described(where)
        _put(ours[f"{spec.backbone}--{spec.data}"], spec, cell, where)
    names = {path.stem for path in scan(pack).admissions} | ours.keys()
    return [_part(admission_path(pack, name), out, ours.get(name, {})) for name in sorted(names)]


def _part(path: Path, out: Records, ours: Cells) -> Part:
    theirs = _packed(path)
    if not ours:
        return Part(path, read_admission(path), theirs, {}, {})
    admission = read_admission(admission_path(out, path.stem))
    if not path.exists():
        return Part(path, admission, {}, ours, {})
    packed = read_admission(path)
    if unlike := differences(packed, admission):
        if admission.checkpoint is None and packed.checkpoint is not None:
            return Part(path, packed, theirs, {}, {})
        if not packed.admitted:
            return Part(path, admission, {}, ours, {})
        raise CasterError(
            f"{path} was packed with other {', '.join(unlike)} than the records in {out} have: "
            "delete that file if it is out of date, and pack again"
        )
    both = {spec: own for spec, own in ours.items() if spec in theirs}
    for spec, (cell, where) in both.items():
        if key_of(cell.identity) != key_of(theirs[spec][0].identity):
            raise CasterError(
                f"{spec.full} in {where} was run with other settings or from something else than "
                f"{theirs[spec][1]}: delete {path} if it is out of date, and pack again"
            )
    added = {spec: own for spec, own in ours.items() if spec not in theirs}
    return Part(path, packed, theirs, added, both)


def _packed(path: Path) -> Cells:
    """All cells of a file, which may not be there yet."""
    found: Cells = {}
    for number in range(open_shard(path).rows if path.exists() else 0):
        row = Row(path, number)
        cell, spec = described(row)
        _put(found, spec, cell, row)
    return found


def _put(found: Cells, spec: Spec, cell: Cell, where: Where) -> None:
    if spec in found:
        raise CasterError(
            f"{spec.full} is there twice, in {found[spec][1]} and {where}: delete the one that is "
            "out of date"
        )
    found[spec] = cell, where


def differences(one: Admission, other: Admission) -> list[str]:
    """In what two admissions of a backbone on data differ that makes other records."""
    return [
        name
        for name, value in vars(one).items()
        if name not in LOCAL and canonical(value) != canonical(getattr(other, name))
    ]


def write_parts(parts: Iterable[Part], into: Path) -> list[Path]:
    """The files of a pack in an empty folder; those that are new or changed.

    Of the others the folder has links.
    """
    changed: list[Path] = []
    streams: dict[str, Stream] = {}
    data: dict[Path, set[str]] = defaultdict(set)  # which streams each file of them must hold
    for part in parts:
        path = into / part.path.name
        _check_both(part)
        if part.added:
            changed.append(path)
            streams |= write_shard(path, sealed(part.admission), _rows(part))
        else:
            _link(part.path, path)
        data[streams_path(part.path)] |= set(open_shard(path).streams) - {""}
    for path, keys in data.items():
        if _write_streams(path, keys, streams, into / path.name):
            changed.append(into / path.name)
    return changed


def _write_streams(path: Path, keys: set[str], new: Mapping[str, Stream], to: Path) -> bool:
    """Streams of data, as they are or with those that new cells met; whether they changed."""
    held = open_streams(path) if path.exists() else None
    if held is not None and keys == held.places.keys():
        _link(path, to)
        return False
    if not keys:  # all cells were refused
        return False
    old = {key: held.at(key) for key in keys & held.places.keys()} if held is not None else {}
    write_streams(to, {key: old[key] if key in old else new[key] for key in keys})
    return True


def _check_both(part: Part) -> None:
    """Refuse a run whose records do not say what is packed."""
    for spec, (cell, where) in part.both.items():
        kept, row = part.kept[spec]
        if cell.tables == kept.tables and _words(cell) == _words(kept):
            continue
        if not same(_parts(row), _parts(where)):
            raise CasterError(
                f"{where} is another result of a cell that is packed: find out why two runs differ"
            )


def _words(cell: Cell) -> str:
    return canonical({name: value for name, value in vars(cell).items() if name not in RUN})


def _rows(part: Part) -> list[Parts]:
    return [_parts(part.cells[spec][1]) for spec in sorted(part.cells, key=_order)]


def _parts(where: Where) -> Parts:
    record = read(where)
    return record.cell, record.samples, record.batches


def _order(spec: Spec) -> tuple[Any, ...]:
    """Cells that have the most in common stand together: one order, then one stream."""
    order = (spec.batch_size, spec.order, repr(spec.order_settings), spec.schedule, spec.last)
    stream = (spec.seed, spec.alone, spec.conditions)
    return (*order, *stream, spec.method, repr(spec.settings))


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # not every file system has links
        shutil.copyfile(path, to)
