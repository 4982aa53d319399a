"""Verify records against their sweep: an empty list, or everything missing or wrong.

Digests and batch statistics are recomputed; cells are compared with the sweep, their sources and
one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caster.core.threads import available_cores
from caster.errors import CasterError, counted
from caster_bench.records.digest import FormatError
from caster_bench.records.schema import DONE, Cell
from caster_bench.records.store import Location, Pack, Records, read_cell, scan
from caster_bench.studies.check_cells import (
    DAMAGED,
    LEFT,
    MISSING,
    OF_ANOTHER,
    Pair,
    Problem,
    check_admissions,
    check_cells,
    check_files,
    foreign_files,
    read_admissions,
)
from caster_bench.studies.check_rows import Checked, Reading, check_stream
from caster_bench.sweeps import Spec, Sweep

Found = dict[Spec, tuple[Cell, Location]]
Progress = Callable[[str, int, int], None]  # stage, done, of how many
MIN_IMAGES = 20  # images from which two shuffles do not agree by chance
FEW_CELLS = 200  # below this, worker processes cost more than they save
FEW_PACKED_CELLS = 5000  # likewise for packed cells, which are read ten times as fast
MAX_WORKERS = 8  # beyond this the disk is the bottleneck
CHUNKS_PER_WORKER = 16  # so that no worker waits long for the last one
Given = TypeVar("Given")
Made = TypeVar("Made")


def verify(sweep: Sweep, out: Records, root: Path | None = None) -> list[Problem]:
    """List everything missing or wrong in a run's folder or a pack.

    `root` is the folder that checkpoint paths are relative to, by default the current one. Existing
    checkpoints must be those of the records.
    """
    return examine(sweep, out, root).problems


@dataclass(frozen=True)
class Examined:
    """Problems of records, the cells found, and what `reading` returned for the valid ones."""

    problems: list[Problem]
    found: Found
    read: dict[Spec, Any]


def examine(
    sweep: Sweep,
    out: Records,
    root: Path | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
    needed: Collection[Spec] | None = None,
) -> Examined:
    """Verify records as `verify` does, and apply `reading` to every finished record.

    `reading` relies on descriptions of cells, so it is skipped if there are problems before any
    table is read. Cells that are not `needed` (by default all are) may be missing; if present they
    are verified.
    """
    there = scan(out)
    if not any((there.cells, there.admissions, there.leftovers, there.foreign)):
        remedy = (
            "write them with `caster bench pack`"
            if isinstance(out, Pack)
            else "run it first with `caster bench run`, or give packed records with `--records DIR`"
        )
        raise CasterError(f"{out} has no records of {sweep.name}: {remedy}")
    problems = [Problem("foreign", str(path)) for path in there.foreign]
    problems += [Problem(LEFT, str(path)) for path in there.leftovers]
    problems += foreign_files(there, sweep)
    found: Found = {}
    unfound = list(_find(there.records, sweep, found))
    if unfound and not found and all(problem.kind == OF_ANOTHER for problem in unfound):
        raise CasterError(
            f"{out} has records of another sweep: none of its {counted(len(unfound), 'cell')} is "
            f"of {sweep.name}"
        )
    problems += unfound
    wanted = sweep.cells if needed is None else needed
    problems += [Problem(MISSING, spec.full) for spec in wanted if spec not in found]
    pairs = _pairs(sweep, {*found, *wanted}, there.admissions)
    admissions, unread = read_admissions(out, pairs)
    problems += unread
    cells = {spec: cell for spec, (cell, _) in found.items()}
    problems += check_admissions(admissions, sweep)
    problems += check_files(cells, admissions, sweep, root or Path())
    problems += check_cells(cells, admissions, sweep)
    read: dict[Spec, Any] = {}
    few = len(found) < (FEW_PACKED_CELLS if isinstance(out, Pack) else FEW_CELLS)
    if problems:
        reading = None
    check = partial(check_stream, constants=sweep.constants, reading=reading)
    problems += _check_streams(found, few, read, check, progress)
    return Examined(sorted(set(problems)), found, read)


def _find(cells: tuple[Location, ...], sweep: Sweep, found: Found) -> Iterator[Problem]:
    """Find the record of every cell, and report duplicates and unreadable ones."""
    for where in cells:
        try:
            cell = read_cell(where)
            spec = Spec.of(cell.identity.get("spec", {}))
            _check_identity(cell, where)
        except CasterError as error:
            of_another = isinstance(error, FormatError)
            kind = "of another format" if of_another else DAMAGED
            yield Problem(kind, str(error))
            continue
        if spec not in sweep.cells:
            yield Problem(OF_ANOTHER, f"{spec.full} in {where}")
        elif spec in found:
            first, there = found[spec]
            own = first.revision, cell.revision
            revisions = f", of the revisions {own[0]} and {own[1]}" if own[0] != own[1] else ""
            yield Problem("twice", f"{spec.full} in {there} and {where}{revisions}")
        else:
            found[spec] = cell, where


def _pairs(sweep: Sweep, cells: set[Spec], admissions: Iterable[Path]) -> list[Pair]:
    """Backbones on data that have an admission, or need one for these cells."""
    needed = {(spec.backbone, spec.data) for spec in cells}
    there = {path.stem for path in admissions}
    pairs = dict.fromkeys((spec.backbone, spec.data) for spec in sweep.cells)
    return [pair for pair in pairs if pair in needed or "--".join(pair) in there]


def _check_identity(cell: Cell, where: Location) -> None:
    """Check what the row checks rely on: a matching key only shows that nothing was changed."""
    target = cell.identity.get("target")
    sizes = (target.get("n") if isinstance(target, dict) else None, cell.identity.get("classes"))
    if cell.status == DONE and not all(type(size) is int and size > 0 for size in sizes):
        raise CasterError(f"{where} does not state its target and classes")


def _check_streams(
    found: Found,
    few: bool,
    read: dict[Spec, Any],
    check: Callable[[list[tuple[Spec, Location]]], Checked],
    progress: Progress | None,
) -> Iterator[Problem]:
    """Check the rows of every stream, and what streams must and must not share."""
    streams: dict[Spec, list[tuple[Spec, Location]]] = defaultdict(list)
    for spec, (cell, where) in found.items():
        if cell.status == DONE:
            streams[spec.stream].append((spec, where))
    labels: dict[str, NDArray[np.int16]] = {}
    orders: dict[Spec, dict[int, str]] = defaultdict(dict)
    all_checked = parallel_map(check, list(streams.values()), few)
    done, cells = 0, sum(map(len, streams.values()))
    for (stream, own), checked in zip(streams.items(), all_checked, strict=True):
        yield from checked.problems
        read.update(checked.read)
        done += len(own)
        if progress is not None:
            progress("reading", done, cells)
        if checked.labels is not None:
            yield from _check_labels(labels, checked.labels, stream)
            anonymous = replace(stream, backbone="", alone=False, seed=0)
            yield from _check_order(orders[anonymous], checked, stream)


def _check_labels(
    known: dict[str, NDArray[np.int16]],
    labels: NDArray[np.int16],  # (n,)
    stream: Spec,
) -> Iterator[Problem]:
    """Check that an image has the same label in every stream."""
    before = known.setdefault(stream.data, labels)
    if len(before) != len(labels) or np.any((before != labels) & (before >= 0) & (labels >= 0)):
        yield Problem("other labels than in other streams of the data", stream.full)
    else:
        known[stream.data] = np.maximum(before, labels)


def _check_order(known: dict[int, str], checked: Checked, stream: Spec) -> Iterator[Problem]:
    """Check that a seed gives one order for all backbones, and two seeds give different ones."""
    rows = checked.rows
    if known.setdefault(stream.seed, rows) != rows:
        yield Problem("another order than the same seed gives elsewhere", stream.full)
    by_chance = stream.order != "shuffled" or checked.batches < 2 or checked.n < MIN_IMAGES
    if not by_chance and any(o == rows for s, o in known.items() if s != stream.seed):
        yield Problem("the same order as another seed's", stream.full)


def parallel_map(
    function: Callable[[Given], Made], things: Sequence[Given], few: bool
) -> Iterator[Made]:
    """Map a module-level function over items, in order; in this process if they are few.

    >>> list(parallel_map(abs, [-1, 2], few=True))
    [1, 2]
    """
    workers = min(MAX_WORKERS, available_cores())
    if few or workers == 1:
        yield from map(function, things)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        chunk = max(1, len(things) // (workers * CHUNKS_PER_WORKER))
        yield from pool.map(function, things, chunksize=chunk)
