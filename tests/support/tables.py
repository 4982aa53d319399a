"""Tables of predictions, read without caster."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.parquet as pq


def read_table(path: Path) -> list[dict]:
    """The rows of a .csv or .parquet file."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
