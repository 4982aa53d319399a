"""Records beside their sweep: an empty list, or all that is missing or wrong.

Nothing is taken on trust. Every digest is computed again, and every figure of a batch from its
samples; cells are held against the sweep, their sources, and one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster_bench.records import DONE, Cell, FormatError, Pack, Records, Where, read_cell, scan
from caster_bench.studies.checks.cells import check_cells
from caster_bench.studies.checks.problem import Problem, lines
from caster_bench.studies.checks.sources import (
    Pair,
    check_admissions,
    compared,
    foreign_admissions,
    read_admissions,
)
from caster_bench.studies.checks.streams import Checked, Reading, check_stream
from caster_bench.studies.parallel import FEW, FEW_PACKED, mapped
from caster_bench.sweeps import Spec, Sweep

__all__ = ["Problem", "compared", "lines", "verify"]

Found = dict[Spec, tuple[Cell, Where]]
Progress = Callable[[str, int, int], None]  # stage, done, of how many
MANY = 20  # pictures from which two shuffles of them do not agree by chance


def verify(sweep: Sweep, out: Records, root: Path | None = None) -> list[Problem]:
    """What is missing or wrong in a run's folder or a pack; nothing, where a report may be made.

    `root` is what the sweep's checkpoints are relative to, by default the current folder: those
    that are there must be the ones the records were made from. `compared` says how many are.
    """
    return examine(sweep, out, root).problems


@dataclass(frozen=True)
class Examined:
    """What is wrong with records, what cells were found, and what was made of the sound ones."""

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
    """As `verify`, which says what of; and what `reading` makes of every record that is done.

    Cells that are not `needed`, by default all, may be missing; they are verified where they are
    there.
    """
    there = scan(out)
    if not any((there.cells, there.admissions, there.leftovers, there.foreign)):
        raise CasterError(
            f"{out} has no records of {sweep.name}: run it first, with `caster bench run`"
        )
    problems = [Problem("foreign", str(path)) for path in there.foreign]
    problems += [Problem("left by a killed run", str(path)) for path in there.leftovers]
    problems += foreign_admissions(there.admissions, sweep)
    problems += foreign_streams(there.streams, sweep)
    found: Found = {}
    problems += _find(there.records, sweep, found)
    wanted = sweep.cells if needed is None else needed
    problems += [Problem("missing", spec.full) for spec in wanted if spec not in found]
    pairs = _pairs(sweep, {*found, *wanted}, there.admissions)
    admissions, unread = read_admissions(out, pairs)
    problems += unread
    problems += check_admissions(admissions, sweep, root or Path())
    problems += check_cells({spec: cell for spec, (cell, _) in found.items()}, admissions, sweep)
    read: dict[Spec, Any] = {}
    few = len(found) < (FEW_PACKED if isinstance(out, Pack) else FEW)
    check = partial(check_stream, constants=sweep.constants, reading=reading)
    problems += _check_streams(found, few, read, check, progress)
    return Examined(sorted(set(problems)), found, read)


def foreign_streams(paths: Iterable[Path], sweep: Sweep) -> list[Problem]:
    """Streams in a pack of data that are not in the sweep."""
    known = {spec.data for spec in sweep.cells}
    return [Problem("not of this sweep", str(path)) for path in paths if path.stem not in known]


def _find(cells: tuple[Where, ...], sweep: Sweep, found: Found) -> Iterator[Problem]:
    """The record of every cell of the sweep, once."""
    for where in cells:
        try:
            cell = read_cell(where)
            spec = Spec.of(cell.identity.get("spec", {}))
            _check_identity(cell, where)
        except CasterError as error:
            of_another = isinstance(error, FormatError)
            kind = "of another format" if of_another else "changed or damaged"
            yield Problem(kind, str(error))
            continue
        if spec not in sweep.cells:
            yield Problem("not of this sweep", f"{spec.full} in {where}")
        elif spec in found:
            yield Problem("twice", f"{spec.full} in {where} and {found[spec][1]}")
        else:
            found[spec] = cell, where


def _pairs(sweep: Sweep, cells: set[Spec], admissions: Iterable[Path]) -> list[Pair]:
    """Backbones on data that have an admission, or must have one for these cells."""
    needed = {(spec.backbone, spec.data) for spec in cells}
    there = {path.stem for path in admissions}
    pairs = dict.fromkeys((spec.backbone, spec.data) for spec in sweep.cells)
    return [pair for pair in pairs if pair in needed or "--".join(pair) in there]


def _check_identity(cell: Cell, where: Where) -> None:
    """What the checks of rows count on: a key shows that it was not changed, and no more."""
    target = cell.identity.get("target")
    sizes = (target.get("n") if isinstance(target, dict) else None, cell.identity.get("classes"))
    if cell.status == DONE and not all(type(size) is int and size > 0 for size in sizes):
        raise CasterError(f"{where} does not state its target and classes")


def _check_streams(
    found: Found,
    few: bool,
    read: dict[Spec, Any],
    check: Callable[[list[tuple[Spec, Where]]], Checked],
    progress: Progress | None,
) -> Iterator[Problem]:
    """The rows of every stream, and what streams must and must not have in common."""
    streams: dict[Spec, list[tuple[Spec, Where]]] = defaultdict(list)
    for spec, (cell, where) in found.items():
        if cell.status == DONE:
            streams[spec.stream].append((spec, where))
    labels: dict[str, NDArray[np.int16]] = {}
    orders: dict[Spec, dict[int, str]] = defaultdict(dict)
    all_checked = mapped(check, list(streams.values()), few)
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
    """A picture has one label, whatever stream it is met in."""
    before = known.setdefault(stream.data, labels)
    if len(before) != len(labels) or np.any((before != labels) & (before >= 0) & (labels >= 0)):
        yield Problem("other labels than in other streams of the data", stream.full)
    else:
        known[stream.data] = np.maximum(before, labels)


def _check_order(known: dict[int, str], checked: Checked, stream: Spec) -> Iterator[Problem]:
    """One seed gives one order, whatever the backbone; two seeds do not give the same."""
    rows = checked.rows
    if known.setdefault(stream.seed, rows) != rows:
        yield Problem("another order than the same seed gives elsewhere", stream.full)
    by_chance = stream.order != "shuffled" or checked.batches < 2 or checked.n < MANY
    if not by_chance and any(o == rows for s, o in known.items() if s != stream.seed):
        yield Problem("the same order as another seed's", stream.full)
