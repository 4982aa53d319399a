"""Raw records of a run: what was predicted, batch by batch, and what made it."""

from caster.records.digest import FormatError, canonical, content, digest, key_of, same
from caster.records.places import (
    Found,
    Pack,
    Records,
    Where,
    admission_path,
    cells_of,
    scan,
    sources_of,
)
from caster.records.reader import Record, read, read_admission, read_cell
from caster.records.schema import DONE, REFUSED, Admission, Batches, Cell, Samples
from caster.records.tables import as_batches, as_samples
from caster.records.writer import remove_leftovers, write, write_admission

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
