"""The cells of a backbone on data in one Parquet file.

A row is a cell: the text of its `cell.json`, the key of its stream, and the other columns of its
tables as lists. The frozen model's answers are told by where they are not the labels, predictions
by where they are not the frozen model's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster_bench.records.delta import restored, unlike
from caster_bench.records.digest import Parts, sealed, unsealed
from caster_bench.records.lists import HELD, Column, ListFile, Lists, stamp, write_lists
from caster_bench.records.schema import BATCHES, Batches, Cell, Samples, batches_schema
from caster_bench.records.streams import KEY, Stream, key_of_stream, open_streams, stream_of

if TYPE_CHECKING:
    import pyarrow as pa

SHARD = ".parquet"  # how the names of these files end
CELL, ADMISSION = "cell", b"admission"  # a column, and what the file says of all its rows
FROZEN, PREDICTION = "frozen", "prediction"
_SPLIT = (f"{FROZEN}_gaps", f"{PREDICTION}_gaps", f"{BATCHES}_ratio", f"{BATCHES}_seconds")


@dataclass(frozen=True)
class Row:
    """Where a cell lies in a pack."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}, row {self.number}"

    @property
    def text(self) -> bytes:
        """Its `cell.json`, to the letter."""
        return open_shard(self.path).text(self.number)

    @property
    def cell(self) -> Cell:
        """What that says, if nobody changed it."""
        return open_shard(self.path).cell(self.number)

    @property
    def samples(self) -> Samples:
        """Its samples; of a refused cell they mean nothing."""
        return open_shard(self.path).samples(self.number)

    @property
    def batches(self) -> Batches:
        """Its batches; likewise."""
        return open_shard(self.path).batches(self.number)


def streams_path(path: Path) -> Path:
    """The file of streams that a file of cells needs.

    >>> streams_path(Path("records/r18--cifar10.parquet")).name
    'cifar10.parquet'
    """
    return path.with_name(f"{path.stem.partition('--')[2]}{SHARD}")


class Shard:
    """Such a file."""

    def __init__(self, path: Path) -> None:
        self._file = ListFile(path, (CELL, KEY), _fields())
        self.path, self.rows = path, self._file.rows
        self.admission = self._file.metadata.get(ADMISSION, b"")
        self._cells: dict[int, Cell] = {}

    @cached_property
    def _texts(self) -> list[str]:
        return self._file.texts(CELL)

    @cached_property
    def streams(self) -> list[str]:
        """The key of every row's stream; nothing of a refused cell."""
        return self._file.texts(KEY)

    @cached_property
    def _lists(self) -> dict[str, Lists]:
        return self._file.lists()

    def text(self, number: int) -> bytes:
        """`cell.json` of a row."""
        if number >= self.rows:
            raise CasterError(f"{self.path} holds no row {number}")
        return self._texts[number].encode()

    def cell(self, number: int) -> Cell:
        """The same, read once."""
        if number not in self._cells:
            self._cells[number] = unsealed(self.text(number), Cell)
        return self._cells[number]

    def samples(self, number: int) -> Samples:
        """Samples of a row."""
        stream = open_streams(streams_path(self.path)).at(self.streams[number])
        frozen = self._told(FROZEN, number, stream["label"])
        prediction = self._told(PREDICTION, number, frozen)
        return Samples(**stream, frozen=frozen, prediction=prediction)

    def _told(self, name: str, number: int, other: Column) -> Column:
        gaps, values = (self._lists[f"{name}{end}"].at(number) for end in ("_gaps", ""))
        return restored(other, gaps, values)

    def batches(self, number: int) -> Batches:
        """Batches of a row."""
        names = batches_schema().names
        return Batches(**{name: self._lists[f"{BATCHES}_{name}"].at(number) for name in names})


def open_shard(path: Path) -> Shard:
    """A file of cells, kept in memory with the last few others."""
    return _shard(path, *stamp(path))


@lru_cache(maxsize=HELD)
def _shard(path: Path, *_: int) -> Shard:
    return Shard(path)


def write_shard(path: Path, admission: str, rows: Sequence[Parts]) -> dict[str, Stream]:
    """A file of cells, and of the admission that they share; the streams that it needs, by key."""
    streams: dict[str, Stream] = {}
    keys: list[str] = []
    lists: dict[str, list[Column | None]] = {name: [] for name in _fields()}
    for _, samples, batches in rows:
        keys.append("")
        if samples is not None:
            stream = stream_of(samples)
            keys[-1] = key_of_stream(stream)
            streams.setdefault(keys[-1], stream)
        for name, column in _columns(samples, batches).items():
            lists[name].append(column)
    texts = {CELL: [sealed(cell) for cell, _, _ in rows], KEY: keys}
    write_lists(path, texts, lists, _fields(), _SPLIT, {ADMISSION: admission.encode()})
    return streams


def _columns(samples: Samples | None, batches: Batches | None) -> dict[str, Column | None]:
    if samples is None or batches is None:
        return dict.fromkeys(_fields())
    found: dict[str, Column | None] = {}
    told = (FROZEN, samples.frozen, samples.label), (PREDICTION, samples.prediction, samples.frozen)
    for name, column, other in told:
        found[f"{name}_gaps"], found[name] = unlike(column, other)
    return found | {f"{BATCHES}_{name}": own for name, own in vars(batches).items()}


@cache
def _fields() -> dict[str, pa.Field]:
    """Every list of a row, by its name in the file, and what it is a list of."""
    import pyarrow as pa

    told = {
        name: field
        for own in (FROZEN, PREDICTION)
        for name, field in (
            (f"{own}_gaps", pa.field("gaps", pa.int32())),
            (own, pa.field(own, pa.int16())),
        )
    }
    return told | {f"{BATCHES}_{field.name}": field for field in batches_schema()}
