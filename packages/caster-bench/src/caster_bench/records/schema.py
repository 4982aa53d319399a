"""Schema of a cell's record: three files in a folder, raw data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 2
DONE, REJECTED = "done", "refused"  # as records spell them
SAMPLES_FILE, BATCHES_FILE, CELL_FILE = "samples.parquet", "batches.parquet", "cell.json"
SAMPLES, BATCHES = "samples", "batches"  # names of these tables in `cell.json`


def samples_schema() -> pa.Schema:
    """One row per image, by index and then batch: a quarter smaller than in stream order."""
    import pyarrow as pa

    return pa.schema(
        [
            ("index", pa.int32()),  # image in the target data
            ("label", pa.int16()),  # indices into the classes of the data
            ("frozen", pa.int16()),  # frozen model's prediction; -1 if it has no head for the data
            ("prediction", pa.int16()),
            ("batch", pa.int32()),
        ]
    )


def batches_schema() -> pa.Schema:
    """One row per batch."""
    import pyarrow as pa

    return pa.schema(
        [
            ("batch", pa.int32()),
            ("size", pa.int32()),
            ("classes", pa.int16()),  # number of true classes in the batch
            ("accepted", pa.bool_()),  # whether the method answered, rather than the frozen model
            ("reason", pa.string()),
            ("ratio", pa.float64()),  # measured by a gate; null without one
            ("confident", pa.int32()),  # samples the certificate is based on; null without one
            ("confident_classes", pa.int16()),
            ("seconds", pa.float64()),  # for this batch, including a shared frozen pass
        ]
    )


TIMES = ("seconds",)  # columns that may differ between two runs of one cell
RUN = ("memory", "hardware", "software", "tables", "files")  # likewise, fields of `cell.json`
NULLS = ("ratio", "confident", "confident_classes")  # columns that may be null

Ints = NDArray[np.int32]
Shorts = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Samples:
    """Columns of `samples.parquet`: N images."""

    index: Ints  # (N,)
    label: Shorts  # (N,)
    frozen: Shorts  # (N,)
    prediction: Shorts  # (N,)
    batch: Ints  # (N,)


@dataclass(frozen=True, eq=False)
class Batches:
    """Columns of `batches.parquet`: T batches, in stream order."""

    batch: Ints  # (T,) 0, 1, 2, ...
    size: Ints  # (T,)
    classes: Shorts  # (T,)
    accepted: NDArray[np.bool_]  # (T,)
    reason: NDArray[np.object_]  # (T,) text
    ratio: NDArray[np.float64]  # (T,) NaN without a gate
    confident: Ints  # (T,) -1 without a certificate
    confident_classes: Shorts  # (T,) likewise
    seconds: NDArray[np.float64]  # (T,)


@dataclass(frozen=True)
class Cell:
    """`cell.json`: what a cell is, its inputs, and the run that produced it.

    `identity` determines the predictions and gives the key; the rest describes the run. The writer
    fills in `counts`, `tables` and `files`. `method`, `frozen` and `stream` are empty in a rejected
    cell.
    """

    identity: dict[str, Any]  # spec, settings, constants, checkpoint, moments, source, target, …
    status: str  # DONE, or REJECTED (without samples and batches)
    reason: str | None  # why rejected
    admission: dict[str, Any]  # accuracy on clean images, their number n, threshold
    method: dict[str, Any]  # inert, gradients, settings, retained bytes by kind
    frozen: dict[str, Any]  # digest of the frozen weights: before, after
    stream: dict[str, Any]  # relative_diversity, class_ordered
    memory: dict[str, Any]  # peak, MiB: of torch on a GPU, else of the process; null if unknown
    software: dict[str, str]  # versions: python, numpy, torch, caster, ...
    hardware: dict[str, Any]  # device, ...
    counts: dict[str, int] = field(default_factory=dict)  # samples, batches
    tables: dict[str, str] = field(default_factory=dict)  # samples, batches: SHA-256 of columns
    files: dict[str, str] = field(default_factory=dict)  # name: SHA-256 of its bytes
    format: int = FORMAT

    @property
    def revision(self) -> int:
        """Revision of the method; the first is not stated."""
        return int(self.identity.get("revision", 1))


@dataclass(frozen=True)
class Admission:
    """`sources/<backbone>--<data>.json`: whether a checkpoint is admitted on data, and why not.

    >>> Admission("r18", "digits", "ab", "cd", 0.97, 360, 0.9, True, None).name
    'r18--digits'
    """

    backbone: str
    data: str
    checkpoint: str | None  # its SHA-256; None if missing
    moments: str | None  # SHA-256 of the state's content; None if none was fitted
    accuracy: float | None  # on clean images; None without a head
    n: int  # number of these images
    threshold: float | None
    admitted: bool
    reason: str | None  # why not
    files: dict[str, str] = field(default_factory=dict)  # state file: SHA-256 of its bytes
    source: dict[str, Any] | None = None  # name, sha256 and n of the source images
    target: dict[str, Any] | None = None  # likewise of the target images
    classes: int | None = None
    preprocessing: dict[str, Any] | None = None  # from image to model input
    constants: dict[str, Any] = field(default_factory=dict)  # all constants of caster
    seen: dict[str, Any] = field(default_factory=dict)  # lets a later run check that it still holds
    format: int = FORMAT

    @property
    def name(self) -> str:
        """Stem of its files."""
        return f"{self.backbone}--{self.data}"
