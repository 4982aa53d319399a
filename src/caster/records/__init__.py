"""Raw records of a run: what was predicted, batch by batch, and what made it."""

from caster.records.digest import canonical, content, digest, key_of, same
from caster.records.reader import (
    Found,
    Record,
    cells_of,
    read,
    read_admission,
    read_cell,
    scan,
    sources_of,
)
from caster.records.schema import DONE, REFUSED, Admission, Batches, Cell, Samples
from caster.records.tables import as_batches, as_samples
from caster.records.writer import remove_leftovers, write, write_admission

__all__ = [
    "DONE",
    "REFUSED",
    "Admission",
    "Batches",
    "Cell",
    "Found",
    "Record",
    "Samples",
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
