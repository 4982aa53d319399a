"""Columns of an Apache Parquet file, through pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError


class ParquetFile:
    """A .parquet file, read by row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise CasterError(
                f"reading {path} needs pyarrow: pip install 'caster-tta[parquet]'"
            ) from None
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid:
            raise CasterError(f"{path} is truncated, damaged or not a Parquet file") from None
        self.names = tuple(self._file.schema_arrow.names)
        self.rows = int(self._file.metadata.num_rows)

    def read(self, name: str) -> NDArray[Any]:
        """One whole column."""
        return self._array(name, self._file.read([name]).column(0))

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These columns side by side, so many rows at a time."""
        for batch in self._rows(names, rows):
            yield tuple(self._array(name, batch.column(name)) for name in names)

    def _rows(self, names: tuple[str, ...], rows: int) -> Iterator[Any]:
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
        import pyarrow
        from pyarrow import compute

        if isinstance(column, pyarrow.ChunkedArray):
            column = column.combine_chunks()
        if column.null_count:
            raise CasterError(f"`{name}` in {self.path} has missing values")
        if not pyarrow.types.is_nested(column.type):
            return np.asarray(column.to_pylist())
        lengths = compute.min_max(compute.list_value_length(column)).as_py()
        if lengths["min"] != lengths["max"]:
            raise CasterError(f"the rows of `{name}` in {self.path} differ in length")
        values = column.flatten()
        if values.null_count:
            raise CasterError(f"`{name}` in {self.path} has missing values")
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)
