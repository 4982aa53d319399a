"""Add the records of a run, or of another pack, to a pack, if everything then verifies."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.io.files import locked, move_into_place
from caster_bench.records.digest import Parts, canonical, key_of, same, to_json
from caster_bench.records.schema import RUN, Admission, Cell
from caster_bench.records.shard import (
    Stream,
    open_shard,
    open_streams,
    streams_path,
    write_shard,
    write_streams,
)
from caster_bench.records.store import (
    TEMPORARY,
    Location,
    Pack,
    Records,
    admission_path,
    described,
    read,
    read_admission,
    scan,
)
from caster_bench.studies.check_cells import (
    Problem,
    check_admissions,
    check_cells,
    check_files,
    foreign_files,
)
from caster_bench.studies.results import load
from caster_bench.studies.verify import Progress
from caster_bench.sweeps import Sweep
from caster_bench.sweeps.spec import Spec

LOCK, NEW = f".lock{TEMPORARY}", f".new{TEMPORARY}"  # in the pack's folder while it is written
NAMED = 3  # examples of cells in a message
# Fields of an admission that may differ. Equal weights may lie in files of different bytes: the
# moments, which must be equal, belong to the weights.
LOCAL = ("seen", "files", "checkpoint")
Cells = dict[Spec, tuple[Cell, Location]]


@dataclass(frozen=True)
class Outcome:
    """Contents of a pack after packing."""

    cells: int
    new: int
    replaced: int  # by a later revision of their method
    outdated: int  # of an earlier revision than the packed ones, and left out
    missing: int  # cells of the sweep not packed yet
    files: int
    size: int  # bytes
    largest: int
    dropped: Sequence[Spec]  # not in the sweep, and left out


def pack(
    sweep: Sweep,
    out: Records,
    into: Pack,
    root: Path | None = None,
    progress: Progress | None = None,
    prune: bool = False,
) -> tuple[Outcome | None, list[Problem]]:
    """Add the cells of a run that a pack lacks, or return what is wrong and change nothing.

    Cells made by a later revision of their method replace packed ones. The run may cover part of
    the sweep; what run and pack hold together must verify. Cells that the sweep does not have are
    an error, or with `prune` left out. The new files themselves are verified and then moved into
    place one by one, so every file is complete at any time and an interrupted command can be
    repeated.
    """
    if not scan(out).records:
        raise CasterError(f"no records in {out}")
    try:
        with _held(into) as new:
            return _pack(sweep, out, into, new, root or Path(), progress, prune)
    except OSError as error:  # a full disk, for one
        raise CasterError(f"cannot pack: {error.strerror}: {error.filename or into}") from None


def _pack(
    sweep: Sweep,
    out: Records,
    into: Pack,
    new: Pack,
    root: Path,
    progress: Progress | None,
    prune: bool,
) -> tuple[Outcome | None, list[Problem]]:
    packed, recorded = read_cells(into), read_cells(out)
    dropped = _drop_foreign([*packed.values(), *recorded.values()], sweep, prune)
    parts = plan_parts(into, out, packed, recorded)
    problems = _early(parts, sweep, root)
    there = scan(into)
    problems += [Problem("foreign", str(path)) for path in (*scan(out).foreign, *there.foreign)]
    if not prune:
        problems += foreign_files(there, sweep)
    if problems:  # before any table is read
        return None, sorted(set(problems))
    changed = write_parts(parts, new.folder)
    cells = {spec for part in parts for spec in part.cells}
    problems = load(sweep, new, root, progress, cells)[1]
    if problems:
        here = (str(new), str(into))
        return None, [replace(problem, where=problem.where.replace(*here)) for problem in problems]
    sizes = {path.name: path.stat().st_size for path in new.folder.iterdir()}
    for path in reversed(changed):  # streams before the cells that need them
        move_into_place(path, into.folder / path.name)
    for path in (*there.admissions, *there.streams):
        if path.name not in sizes:  # nothing in it is needed any more
            path.unlink()
    replaced, outdated = (sum(getattr(p, kind) for p in parts) for kind in ("replaced", "outdated"))
    added = sum(len(part.added) for part in parts) - replaced
    missing = len(sweep.cells) - len(cells)
    counts = (len(cells), added, replaced, outdated, missing)
    size = sizes.values()
    return Outcome(*counts, len(size), sum(size), max(size), dropped), []


def _drop_foreign(files: Sequence[Cells], sweep: Sweep, prune: bool) -> list[Spec]:
    """Remove cells that the sweep does not have, and return them; without `prune`, raise."""
    every = dict.fromkeys(spec for cells in files for spec in cells)
    foreign = [spec for spec in every if spec not in sweep.cells]
    if foreign and not prune:
        raise CasterError(
            f"the sweep does not have {len(foreign):,} of the recorded cells, such as "
            f"{some_of(foreign)}: leave them out with {{argument}}",
            argument="prune",
        )
    if len(foreign) == len(every):
        raise CasterError(f"the sweep {sweep.name} has none of the recorded cells")
    for cells in files:
        for spec in foreign:
            cells.pop(spec, None)
    return foreign


def some_of(cells: Sequence[Spec]) -> str:
    """Name a few cells, without their seeds.

    >>> some_of([Spec("r18", "digits", "tent", seed=seed) for seed in (0, 1)])
    'r18 on digits, clean: tent'
    """
    return "; ".join([*dict.fromkeys(spec.title for spec in cells)][:NAMED])


def _early(parts: Sequence[Part], sweep: Sweep, root: Path) -> list[Problem]:
    """Problems visible in `cell.json` and admissions, before any table is read or written."""
    admissions = {(part.admission.backbone, part.admission.data): part.admission for part in parts}
    cells = {spec: cell for part in parts for spec, (cell, _) in part.cells.items()}
    return [
        *check_admissions(admissions, sweep),
        *check_files(cells, admissions, sweep, root),
        *check_cells(cells, admissions, sweep),
    ]


@contextmanager
def _held(into: Pack) -> Iterator[Pack]:
    """Lock a pack, and yield an empty folder inside it for new files."""
    folder = into.folder
    if folder.exists() and not folder.is_dir():
        raise CasterError(f"cannot write {into}: not a folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(
            folder / LOCK, f"another `caster bench pack` is writing to {into}: wait for it"
        ):
            _remove_leftovers(into)
            (folder / NEW).mkdir()
            try:
                yield Pack(folder / NEW)
            finally:
                shutil.rmtree(folder / NEW, ignore_errors=True)
    finally:
        if new:
            with suppress(OSError):  # not empty any more
                folder.rmdir()


def _remove_leftovers(into: Pack) -> None:
    """Delete what a killed `pack` left."""
    for path in scan(into).leftovers:
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class Part:
    """A file of the new pack: its admission, and where each of its cells is now."""

    path: Path  # in the pack
    admission: Admission
    packed: Cells  # already in the pack
    added: Cells  # not in the pack yet, or only in an earlier revision
    both: Cells  # in both, whose records must agree
    outdated: int = 0  # cells of the run of an earlier revision than the pack's

    @property
    def cells(self) -> Cells:
        """All cells of the new file."""
        return self.packed | self.added

    @property
    def replaced(self) -> int:
        """Number of packed cells that added ones replace."""
        return len(self.packed.keys() & self.added.keys())

    @property
    def is_changed(self) -> bool:
        """Whether the file differs from the packed one."""
        return bool(self.added) or len(self.packed) < open_shard(self.path).rows


def read_cells(records: Records) -> dict[str, Cells]:
    """All cells of a run or pack by the name of their file in a pack; no table is read."""
    found: dict[str, Cells] = defaultdict(dict)
    for where in scan(records).records:
        cell, spec = described(where)
        _put(found[f"{spec.backbone}--{spec.data}"], spec, cell, where)
    return found


def plan_parts(
    pack: Pack, out: Records, packed: Mapping[str, Cells], recorded: Mapping[str, Cells]
) -> list[Part]:
    """Plan a pack with the records of a run or of another pack added.

    Of a cell that both have, the later revision of its method is kept, and the pack's record if it
    is the same. A rejected backbone is replaced as a whole, since its cells only say that something
    was missing: in the pack, by what the run has; in the run, if it lacked a checkpoint, by what
    the pack has.
    """
    names = {name for files in (packed, recorded) for name, cells in files.items() if cells}
    return [
        _part(admission_path(pack, name), out, packed.get(name, {}), recorded.get(name, {}))
        for name in sorted(names)
    ]


def _part(path: Path, out: Records, theirs: Cells, ours: Cells) -> Part:
    if not ours:
        return Part(path, read_admission(path), theirs, {}, {})
    admission = read_admission(admission_path(out, path.stem))
    if not theirs:
        return Part(path, admission, {}, ours, {})
    packed = read_admission(path)
    if unlike := differences(packed, admission):
        if admission.checkpoint is None and packed.checkpoint is not None:
            return Part(path, packed, theirs, {}, {})
        if not packed.admitted:
            return Part(path, admission, {}, ours, {})
        raise CasterError(
            f"{path} and the records in {out} differ in {', '.join(unlike)}: "
            "delete that file if it is out of date, and pack again"
        )
    both: Cells = {}
    added: Cells = {}
    for spec, (cell, where) in ours.items():
        if spec not in theirs:
            added[spec] = cell, where
            continue
        old, row = theirs[spec]
        if not _same_inputs(cell, old):
            raise CasterError(
                f"{spec.full} in {where} was run with other settings or inputs than "
                f"{row}: delete {path} if it is out of date, and pack again"
            )
        if cell.revision > old.revision:
            added[spec] = cell, where
        elif cell.revision == old.revision:
            both[spec] = cell, where
    outdated = len(ours) - len(added) - len(both)
    return Part(path, packed, theirs, added, both, outdated)


def _same_inputs(one: Cell, other: Cell) -> bool:
    """Whether two cells differ at most in the revision of their method and in checkpoint files."""
    ignored = {"revision": None, "checkpoint": None}
    return key_of(one.identity | ignored) == key_of(other.identity | ignored)


def _put(found: Cells, spec: Spec, cell: Cell, where: Location) -> None:
    """Add a cell; of two revisions, which a run may hold, the later one counts."""
    if spec in found and _same_inputs(cell, found[spec][0]):
        if cell.revision < found[spec][0].revision:
            return
        if cell.revision > found[spec][0].revision:
            del found[spec]
    if spec in found:
        raise CasterError(
            f"{spec.full} is recorded twice, in {found[spec][1]} and {where}: delete the one that "
            "is out of date"
        )
    found[spec] = cell, where


def differences(one: Admission, other: Admission) -> list[str]:
    """Fields in which two admissions of a backbone on data differ, apart from `LOCAL`."""
    return [
        name
        for name, value in vars(one).items()
        if name not in LOCAL and canonical(value) != canonical(getattr(other, name))
    ]


def write_parts(parts: Iterable[Part], into: Path) -> list[Path]:
    """Write the files of a pack to an empty folder, and return those that are new or changed.

    Unchanged files are linked.
    """
    changed: list[Path] = []
    streams: dict[str, Stream] = {}
    data: dict[Path, set[str]] = defaultdict(set)  # streams that each file must hold
    for part in parts:
        path = into / part.path.name
        _check_both(part)
        if part.is_changed:
            changed.append(path)
            streams |= write_shard(path, to_json(part.admission), _rows(part))
        else:
            _link(part.path, path)
        data[streams_path(part.path)] |= set(open_shard(path).streams) - {""}
    for path, keys in data.items():
        if _write_streams(path, keys, streams, into / path.name):
            changed.append(into / path.name)
    return changed


def _write_streams(path: Path, keys: set[str], new: Mapping[str, Stream], to: Path) -> bool:
    """Write the streams of a data set, adding those of new cells; return whether they changed."""
    held = open_streams(path) if path.exists() else None
    if held is not None and keys == held.rows.keys():
        _link(path, to)
        return False
    if not keys:  # all cells were rejected
        return False
    old = {key: held.at(key) for key in keys & held.rows.keys()} if held is not None else {}
    write_streams(to, {key: old[key] if key in old else new[key] for key in keys})
    return True


def _check_both(part: Part) -> None:
    """Reject a run whose records disagree with the pack."""
    for spec, (cell, where) in part.both.items():
        kept, row = part.packed[spec]
        if cell.tables == kept.tables and _words(cell) == _words(kept):
            continue
        own, samples, batches = _parts(where)
        own = replace(own, identity=kept.identity)  # equal up to the checkpoint's file
        if not same(_parts(row), (own, samples, batches)):
            raise CasterError(
                f"{where} disagrees with the packed result of the same cell: find out why two "
                "runs differ"
            )


def _words(cell: Cell) -> str:
    return canonical({name: value for name, value in vars(cell).items() if name not in RUN})


def _rows(part: Part) -> list[Parts]:
    cells = part.cells
    return [_parts(cells[spec][1]) for spec in sorted(cells, key=_order)]


def _parts(where: Location) -> Parts:
    record = read(where)
    return record.cell, record.samples, record.batches


def _order(spec: Spec) -> tuple[Any, ...]:
    """Sort key that keeps similar cells together: first the order, then the stream."""
    order = (spec.batch_size, spec.order, repr(spec.order_settings), spec.schedule, spec.last)
    stream = (spec.seed, spec.alone, spec.conditions)
    return (*order, *stream, spec.method, repr(spec.settings))


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # not every file system supports links
        shutil.copyfile(path, to)
