"""The files of a pack: the streams of a data set, and the cells of a backbone on that data.

All methods and backbones see the same streams, so a stream is stored once per data set and cells
refer to its key. A row of the other files is a cell: its `cell.json`, its stream's key and the rest
of its tables as lists. Frozen predictions are delta-encoded against the labels, predictions against
the frozen ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster_bench.records.digest import KEY_LENGTH, Parts, bytes_of, from_json, to_json
from caster_bench.records.parquet import (
    CACHED_FILES,
    Column,
    ListFile,
    Lists,
    delta_decode,
    delta_encode,
    file_stamp,
    write_lists,
)
from caster_bench.records.schema import (
    BATCHES,
    Batches,
    Cell,
    Samples,
    batches_schema,
    samples_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "stream"
SHARED = ("index", "label", "batch")  # columns of samples that belong to the stream
Stream = dict[str, Column]  # by column, all (N,)
SHARD = ".parquet"  # suffix of these files
CELL, ADMISSION = "cell", b"admission"  # a column, and the metadata shared by all rows
FROZEN, PREDICTION = "frozen", "prediction"
_SPLIT = (f"{FROZEN}_gaps", f"{PREDICTION}_gaps", f"{BATCHES}_ratio", f"{BATCHES}_seconds")


def stream_of(samples: Samples) -> Stream:
    """Columns of samples that all cells of a stream share."""
    return {name: getattr(samples, name) for name in SHARED}


def key_of_stream(stream: Stream) -> str:
    """Return the digest of a stream."""
    total = hashlib.sha256()
    for name in SHARED:
        total.update(f"\n{name}\n".encode() + bytes_of(stream[name]))
    return total.hexdigest()[:KEY_LENGTH]


class Streams:
    """A file of streams."""

    def __init__(self, path: Path) -> None:
        self._file = ListFile(path, (KEY,), _stream_fields())
        self.path = path

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row of every stream, by key."""
        return {key: row for row, key in enumerate(self._file.texts(KEY))}

    @cached_property
    def _lists(self) -> dict[str, Lists]:
        return self._file.lists()

    def at(self, key: str) -> Stream:
        """Return a stream by its key."""
        row = self.rows.get(key)
        if row is None:
            raise CasterError(f"its stream is not in {self.path}")
        return {name: self._lists[name].at(row) for name in SHARED}


def open_streams(path: Path) -> Streams:
    """Open a file of streams; the last few stay in memory."""
    return _streams(path, *file_stamp(path))


@lru_cache(maxsize=CACHED_FILES)
def _streams(path: Path, *_: int) -> Streams:
    return Streams(path)


def write_streams(path: Path, streams: Mapping[str, Stream]) -> None:
    """Write streams by key; those of the same images are adjacent."""
    keys = sorted(streams, key=lambda key: (_images(streams[key]), key))
    lists = {name: [streams[key][name] for key in keys] for name in SHARED}
    write_lists(path, {KEY: keys}, lists, _stream_fields(), (), {})


def _images(stream: Stream) -> str:
    return hashlib.sha256(bytes_of(stream["index"]) + bytes_of(stream["label"])).hexdigest()


@cache
def _stream_fields() -> dict[str, pa.Field]:
    return {name: samples_schema().field(name) for name in SHARED}


@dataclass(frozen=True)
class Row:
    """Location of a cell in a pack."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}, row {self.number}"

    @property
    def text(self) -> bytes:
        """Its `cell.json`, verbatim."""
        return open_shard(self.path).text(self.number)

    @property
    def cell(self) -> Cell:
        """Its `cell.json`, parsed and checked."""
        return open_shard(self.path).cell(self.number)

    @property
    def samples(self) -> Samples:
        """Its samples; meaningless for a rejected cell."""
        return open_shard(self.path).samples(self.number)

    @property
    def batches(self) -> Batches:
        """Its batches; meaningless for a rejected cell."""
        return open_shard(self.path).batches(self.number)


def streams_path(path: Path) -> Path:
    """Return the file of streams that a file of cells needs.

    >>> streams_path(Path("records/r18--cifar10.parquet")).name
    'cifar10.parquet'
    """
    return path.with_name(f"{path.stem.partition('--')[2]}{SHARD}")


class Shard:
    """A file of cells."""

    def __init__(self, path: Path) -> None:
        self._file = ListFile(path, (CELL, KEY), _cell_fields())
        self.path, self.rows = path, self._file.rows
        self.admission = self._file.metadata.get(ADMISSION, b"")
        self._cells: dict[int, Cell] = {}

    @cached_property
    def _texts(self) -> list[str]:
        return self._file.texts(CELL)

    @cached_property
    def streams(self) -> list[str]:
        """Key of every row's stream; empty for a rejected cell."""
        return self._file.texts(KEY)

    @cached_property
    def _lists(self) -> dict[str, Lists]:
        return self._file.lists()

    def text(self, number: int) -> bytes:
        """Return the `cell.json` of a row."""
        if number >= self.rows:
            raise CasterError(f"{self.path} holds no row {number}")
        return self._texts[number].encode()

    def cell(self, number: int) -> Cell:
        """Return the parsed `cell.json` of a row, cached."""
        if number not in self._cells:
            self._cells[number] = from_json(self.text(number), Cell)
        return self._cells[number]

    def samples(self, number: int) -> Samples:
        """Return the samples of a row."""
        stream = open_streams(streams_path(self.path)).at(self.streams[number])
        frozen = self._decode(FROZEN, number, stream["label"])
        prediction = self._decode(PREDICTION, number, frozen)
        return Samples(**stream, frozen=frozen, prediction=prediction)

    def _decode(self, name: str, number: int, other: Column) -> Column:
        gaps, values = (self._lists[f"{name}{end}"].at(number) for end in ("_gaps", ""))
        return delta_decode(other, gaps, values)

    def batches(self, number: int) -> Batches:
        """Return the batches of a row."""
        names = batches_schema().names
        return Batches(**{name: self._lists[f"{BATCHES}_{name}"].at(number) for name in names})


def open_shard(path: Path) -> Shard:
    """Open a file of cells; the last few stay in memory."""
    return _shard(path, *file_stamp(path))


@lru_cache(maxsize=CACHED_FILES)
def _shard(path: Path, *_: int) -> Shard:
    return Shard(path)


def write_shard(path: Path, admission: str, rows: Sequence[Parts]) -> dict[str, Stream]:
    """Write cells and the admission they share; return the streams they need, by key."""
    streams: dict[str, Stream] = {}
    keys: list[str] = []
    lists: dict[str, list[Column | None]] = {name: [] for name in _cell_fields()}
    for _, samples, batches in rows:
        keys.append("")
        if samples is not None:
            stream = stream_of(samples)
            keys[-1] = key_of_stream(stream)
            streams.setdefault(keys[-1], stream)
        for name, column in _columns(samples, batches).items():
            lists[name].append(column)
    texts = {CELL: [to_json(cell) for cell, _, _ in rows], KEY: keys}
    write_lists(path, texts, lists, _cell_fields(), _SPLIT, {ADMISSION: admission.encode()})
    return streams


def _columns(samples: Samples | None, batches: Batches | None) -> dict[str, Column | None]:
    if samples is None or batches is None:
        return dict.fromkeys(_cell_fields())
    found: dict[str, Column | None] = {}
    encoded = (
        (FROZEN, samples.frozen, samples.label),
        (PREDICTION, samples.prediction, samples.frozen),
    )
    for name, column, other in encoded:
        found[f"{name}_gaps"], found[name] = delta_encode(column, other)
    return found | {f"{BATCHES}_{name}": own for name, own in vars(batches).items()}


@cache
def _cell_fields() -> dict[str, pa.Field]:
    """Element type of every list column."""
    import pyarrow as pa

    encoded = {
        name: field
        for own in (FROZEN, PREDICTION)
        for name, field in (
            (f"{own}_gaps", pa.field("gaps", pa.int32())),
            (own, pa.field(own, pa.int16())),
        )
    }
    return encoded | {f"{BATCHES}_{field.name}": field for field in batches_schema()}
