"""Raw records of a run: every prediction, batch by batch, and what produced it."""

from caster_bench.records.digest import FormatError, canonical, content, digest, key_of, same
from caster_bench.records.parquet import as_batches, as_samples
from caster_bench.records.schema import DONE, REFUSED, Admission, Batches, Cell, Samples
from caster_bench.records.store import (
    Listing,
    Location,
    Pack,
    Record,
    Records,
    admission_path,
    cells_of,
    read,
    read_admission,
    read_cell,
    remove_leftovers,
    scan,
    sources_of,
    write,
    write_admission,
)

__all__ = [
    "DONE",
    "REFUSED",
    "Admission",
    "Batches",
    "Cell",
    "FormatError",
    "Listing",
    "Location",
    "Pack",
    "Record",
    "Records",
    "Samples",
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
