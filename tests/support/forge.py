"""Records changed and signed again, with every digest in order: what `verify` must still find."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from caster_bench.records.store import Record, read, scan, write
from caster_bench.studies.verify import verify
from caster_bench.sweeps import Sweep

FOG = (("fog", 1),)


class Run:
    """Records to spoil."""

    def __init__(self, sweep: Sweep, out: Path) -> None:
        self.sweep, self.out = sweep, out
        self.folders = {read(folder).spec: folder for folder in scan(out).cells}

    def kinds(self) -> set[str]:
        return {problem.kind for problem in verify(self.sweep, self.out, self.out)}

    def folder(self, method: str, **wanted: Any) -> Path:
        given = {"backbone": "r18", "seed": 0, "conditions": FOG} | wanted
        (found,) = (
            folder
            for spec, folder in self.folders.items()
            if spec.method == method and all(getattr(spec, k) == v for k, v in given.items())
        )
        return found

    def forge(self, folder: Path, change: Callable[[Record], Record]) -> Path:
        """A record changed and signed again, with every digest of its own in order."""
        record = change(read(folder))
        shutil.rmtree(folder)
        return write(folder.parent, record.cell, record.samples, record.batches)


def column(part: str, name: str, row: int, value: Any) -> Callable[[Record], Record]:
    """Change one value of a column."""

    def change(record: Record) -> Record:
        table = getattr(record, part)
        values = getattr(table, name).copy()
        values[row] = value(values[row]) if callable(value) else value
        return replace(record, **{part: replace(table, **{name: values})})

    return change


def other_class(value: Any) -> Any:
    """Another of four classes."""
    return (value + 1) % 4


@contextmanager
def flipped_byte(data: Any, files: list[Path]) -> Iterator[None]:
    """Change one byte of one of these files, as Hypothesis draws it, during the block."""
    path = data.draw(st.sampled_from(files), label="file")
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1), label="byte")
    flip = data.draw(st.integers(1, 255), label="flip")
    path.write_bytes(before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(before)
