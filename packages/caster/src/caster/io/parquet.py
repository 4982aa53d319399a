"""Columns of an Apache Parquet file, through pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.npz import check_bytes

OBJECT_BYTES = 40  # of a value that goes through a Python object


class ParquetFile:
    """A .parquet file, read by row."""

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path, self.limits = path, limits
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise CasterError(
                f"reading {path} needs pyarrow: pip install 'caster-tta[parquet]'"
            ) from None
        with self._reading():
            metadata = pyarrow.parquet.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
            self.names = tuple(schema.names)
            self._file = pyarrow.parquet.ParquetFile(
                path,
                metadata=metadata,
                read_dictionary=[field.name for field in schema if _is_text(field.type)],
                page_checksum_verification=True,  # of pages that have a checksum
            )
            self.rows = int(self._file.metadata.num_rows)
        twice = [name for name in self.names if self.names.count(name) > 1]
        if twice:
            raise CasterError(f"{path} has two columns named `{twice[0]}`")

    def read(self, name: str) -> NDArray[Any]:
        """One whole column."""
        size = self.rows * max(OBJECT_BYTES, 8 * self.width(name))
        check_bytes(self.limits, name, self.path, size)
        with self._reading():
            column = self._file.read([name]).column(0)
            return self._array(name, column)

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These columns side by side, so many rows at a time."""
        tables = self._tables(names, min(rows, self.rows))
        while True:
            with self._reading():  # not around the yield: what the caller raises is no damage
                table = next(tables, None)
                if table is None:
                    return
                chunk = tuple(self._array(name, table.column(name)) for name in names)
            yield chunk

    def width(self, name: str) -> int:
        """Values in a row of a column, by its first row.

        The file's metadata state it too, but pyarrow ends the process on some damage of those.
        """
        (first,) = next(self.chunks((name,), 1))
        return int(first[0].size)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Damage is told in one line, wherever in the file it is met."""
        from pyarrow import ArrowException

        try:
            yield
        except PermissionError:
            raise CasterError(f"cannot read {self.path}: no permission") from None
        except CasterError:
            raise
        except (ArrowException, OSError, UnicodeDecodeError, ValueError):
            raise CasterError(f"{self.path} is truncated, damaged or no Parquet file") from None

    def _tables(self, names: tuple[str, ...], rows: int) -> Iterator[Any]:
        """Tables of exactly so many rows: Parquet's own batches end with every row group."""
        import pyarrow

        pending = None
        for batch in self._file.iter_batches(batch_size=rows, columns=list(names)):
            table = pyarrow.Table.from_batches([batch])
            pending = table if pending is None else pyarrow.concat_tables([pending, table])
            while pending.num_rows >= rows:
                yield pending.slice(0, rows).combine_chunks()
                pending = pending.slice(rows)
        if pending is not None and pending.num_rows:
            yield pending.combine_chunks()

    def _array(self, name: str, column: Any) -> NDArray[Any]:
        from pyarrow import ChunkedArray, types

        if isinstance(column, ChunkedArray):
            column = column.combine_chunks()
        self._check_complete(name, column)
        kind = column.type
        if types.is_dictionary(kind) and _is_text(kind.value_type):
            return self._texts(name, column)
        if not types.is_nested(kind):
            return np.asarray(column.to_pylist())
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not lists or types.is_nested(kind.value_type):
            raise CasterError(f"`{name}` in {self.path} must be numbers or lists of numbers")
        return self._matrix(name, column)

    def _texts(self, name: str, column: Any) -> NDArray[Any]:
        """Text stays a dictionary until its length is known: NumPy gives every row the longest."""
        distinct = np.asarray(column.dictionary.to_pylist())
        longest = distinct.dtype.itemsize // np.dtype(f"{distinct.dtype.kind}1").itemsize
        what = f"`{name}` in {self.path} has a text of {longest:,} characters"
        self.limits.check("label_length", longest, what)
        check_bytes(self.limits, name, self.path, len(column) * distinct.dtype.itemsize)
        texts: NDArray[Any] = distinct[column.indices.to_numpy(zero_copy_only=False)]
        return texts

    def _matrix(self, name: str, column: Any) -> NDArray[Any]:
        from pyarrow import compute

        lengths = compute.min_max(compute.list_value_length(column)).as_py()
        if lengths["min"] != lengths["max"]:
            raise CasterError(f"the rows of `{name}` in {self.path} differ in length")
        values = column.flatten()
        self._check_complete(name, values)
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)

    def _check_complete(self, name: str, column: Any) -> None:
        if column.null_count:
            raise CasterError(f"`{name}` in {self.path} has missing values")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_one(kind) for is_one in texts)
