"""Raw records of a run: what was predicted, batch by batch, and what made it."""

from caster_bench.records.digest import FormatError, canonical, content, digest, key_of, same
from caster_bench.records.layout import (
    Found,
    Pack,
    Records,
    Where,
    admission_path,
    cells_of,
    scan,
    sources_of,
)
from caster_bench.records.reader import Record, read, read_admission, read_cell
from caster_bench.records.schema import DONE, REFUSED, Admission, Batches, Cell, Samples
from caster_bench.records.tables import as_batches, as_samples
from caster_bench.records.writer import remove_leftovers, write, write_admission

__all__ = [
    "DONE",
    "REFUSED",
    "Admission",
    "Batches",
    "Cell",
    "FormatError",
    "Found",
    "Pack",
    "Record",
    "Records",
    "Samples",
    "Where",
    "admission_path",
    "as_batches",
    "as_samples",
    "canonical",
    "cells_of",
    "content",
    "digest",
    "key_of",
    "read",
    "read_admission",
    "read_cell",
    "remove_leftovers",
    "same",
    "scan",
    "sources_of",
    "write",
    "write_admission",
]
