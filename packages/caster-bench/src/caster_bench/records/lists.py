"""Parquet files of lists in which nothing is said twice, and which know their own digest.

A list that is the same as in the row above is null. The metadata hold a SHA-256 of the file's bytes
with zeros in its own place, which is checked before anything of a file is decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import read_regular
from caster_bench.records.digest import FormatError, bytes_of
from caster_bench.records.tables import to_arrow, to_numpy

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = b"2"
MARK = b"caster-pack-sha256:"  # before the digest that a file holds of its own bytes
BLANK = b"0" * 64  # in the place of that digest while it is taken
HELD = 8  # files that are kept in memory
_WRITING = {
    "compression": "zstd",
    "compression_level": 19,  # a pack is written seldom, and read by everyone
    "data_page_size": 2**30,  # what repeats is found within a page alone
    "write_statistics": False,
    "store_schema": False,
}
Column = NDArray[Any]


class Lists:
    """A column of lists: its values end to end, and which of them each row has."""

    def __init__(self, column: pa.ChunkedArray, name: str) -> None:
        import pyarrow as pa

        lists = column.combine_chunks()
        self.values: Column = to_numpy(pa.chunked_array([lists.values]), name)
        self.ends = lists.offsets.to_numpy()
        own = np.where(lists.is_valid(), np.arange(len(lists)), -1)
        self.source = np.maximum.accumulate(own)  # the row itself, or the last that had one

    def at(self, number: int) -> Column:
        """The list of a row."""
        source = self.source[number]
        if source < 0:
            raise CasterError("a column is missing")
        return self.values[self.ends[source] : self.ends[source + 1]]


class ListFile:
    """Such a file, whose columns are decoded when they are asked for."""

    def __init__(self, path: Path, texts: Collection[str], lists: Mapping[str, pa.Field]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        with _reading(path):
            content = read_regular(path)
            if not _unchanged(content):
                raise CasterError(f"{path} was changed or cut off after it was written")
            self._file = pq.ParquetFile(pa.BufferReader(content))
            schema = self._file.schema_arrow
        self.metadata: dict[bytes, bytes] = self._file.metadata.metadata or {}
        if self.metadata.get(b"format") != FORMAT:
            raise FormatError(f"{path} was packed by another version of caster: read it with that")
        wanted = [(name, pa.string()) for name in texts]
        wanted += [(name, pa.list_(field.type)) for name, field in lists.items()]
        if [(field.name, field.type) for field in schema] != wanted:
            raise CasterError(f"{path}: its columns are not those of a pack")
        self.rows = int(self._file.metadata.num_rows)
        self._fields = lists

    def texts(self, name: str) -> list[str]:
        """A column of texts; where one is missing, nothing."""
        return [text or "" for text in self._column(name).to_pylist()]

    def lists(self) -> dict[str, Lists]:
        """All columns of lists."""
        return {name: Lists(self._column(name), field.name) for name, field in self._fields.items()}

    def _column(self, name: str) -> pa.ChunkedArray:
        with _reading(self.path):
            return self._file.read(columns=[name], use_threads=False).column(0)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of Arrow and of the system as ours."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise CasterError(f"{path} is missing") from None
    except (pa.ArrowException, OSError) as error:
        raise CasterError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: what is held in memory is held for it."""
    with _reading(path):
        now = os.stat(path)
    return now.st_ino, now.st_size, now.st_mtime_ns


def write_lists(
    path: Path,
    texts: Mapping[str, Sequence[str]],
    lists: Mapping[str, Sequence[Column | None]],
    fields: Mapping[str, pa.Field],  # of what each is a list
    split: Collection[str],  # lists of numbers whose high bytes are alike
    metadata: Mapping[bytes, bytes],
) -> None:
    """Write a file of texts and lists, sealed by its digest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {name: pa.array(column, pa.string()) for name, column in texts.items()}
        | {name: _lists(lists[name], field) for name, field in fields.items()}
    )
    with pq.ParquetWriter(
        path,
        table.schema,
        use_dictionary=[_leaf(name) for name in fields if name not in split],
        column_encoding={_leaf(name): "BYTE_STREAM_SPLIT" for name in split},
        **_WRITING,
    ) as file:
        file.write_table(table, row_group_size=len(table))  # all in one, or pages would be small
        file.add_key_value_metadata({**metadata, b"format": FORMAT, b"sha256": MARK + BLANK})
    with open(path, "r+b") as handle:
        content = handle.read()
        handle.seek(_own_digest(content))
        handle.write(hashlib.sha256(content).hexdigest().encode())


def _leaf(name: str) -> str:
    """What Parquet calls the values of a list."""
    return f"{name}.list.element"


def _own_digest(content: bytes) -> int:
    """Where in a file its own digest is."""
    return content.rindex(MARK) + len(MARK)


def _unchanged(content: bytes) -> bool:
    """Whether the bytes of a file are those that were written."""
    if MARK not in content:
        return False
    start = _own_digest(content)
    stop = start + len(BLANK)
    blank = hashlib.sha256(content[:start] + BLANK + content[stop:])
    return blank.hexdigest().encode() == content[start:stop]


def _lists(found: Sequence[Column | None], field: pa.Field) -> pa.Array:
    """Columns of rows as one column of lists, null where there is none or it is the last again."""
    import pyarrow as pa

    kept: list[Column] = []
    lengths, absent = [0], []
    above: bytes | None = None
    for column in found:
        now = None if column is None else bytes_of(column)
        again = column is None or now == above
        if column is not None and not again:
            kept.append(column)
            above = now
        lengths.append(0 if again else len(kept[-1]))
        absent.append(again)
    flat = np.concatenate(kept) if kept else np.empty(0, field.type.to_pandas_dtype())
    values = to_arrow(flat, field)
    ends = pa.array(np.cumsum(lengths), pa.int32())
    return pa.ListArray.from_arrays(ends, values, mask=pa.array(absent))
