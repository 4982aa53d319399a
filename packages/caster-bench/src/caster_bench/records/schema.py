"""What is kept of a cell: three files in a folder, and not one figure that is not raw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 2
DONE, REFUSED = "done", "refused"
SAMPLES_FILE, BATCHES_FILE, CELL_FILE = "samples.parquet", "batches.parquet", "cell.json"
SAMPLES, BATCHES = "samples", "batches"  # what `cell.json` calls the tables of these files


def samples_schema() -> pa.Schema:
    """A row an image, by index and then batch: a quarter smaller than in stream order."""
    import pyarrow as pa

    return pa.schema(
        [
            ("index", pa.int32()),  # of the image in the target data
            ("label", pa.int16()),  # places in the classes of the data
            ("frozen", pa.int16()),  # what the frozen model says; -1 where it has no head for them
            ("prediction", pa.int16()),
            ("batch", pa.int32()),
        ]
    )


def batches_schema() -> pa.Schema:
    """A row a batch."""
    import pyarrow as pa

    return pa.schema(
        [
            ("batch", pa.int32()),
            ("size", pa.int32()),
            ("classes", pa.int16()),  # how many true classes it holds: the stream's diversity
            ("accepted", pa.bool_()),  # whether the method answered, and not the frozen model
            ("reason", pa.string()),
            ("ratio", pa.float64()),  # what a gate measured; null where none did
            ("confident", pa.int32()),  # samples that the certificate rests on; null without one
            ("confident_classes", pa.int16()),
            ("seconds", pa.float64()),  # of this batch, a shared frozen pass included
        ]
    )


TIMES = ("seconds",)  # columns in which two runs of one cell may differ
RUN = ("memory", "hardware", "software", "tables", "files")  # and what of `cell.json`
NULLS = ("ratio", "confident", "confident_classes")  # columns that may have nothing to say

Ints = NDArray[np.int32]
Shorts = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Samples:
    """The columns of `samples.parquet`: N images."""

    index: Ints  # (N,)
    label: Shorts  # (N,)
    frozen: Shorts  # (N,)
    prediction: Shorts  # (N,)
    batch: Ints  # (N,)


@dataclass(frozen=True, eq=False)
class Batches:
    """The columns of `batches.parquet`: T batches, in the order of the stream."""

    batch: Ints  # (T,) 0, 1, 2, ...
    size: Ints  # (T,)
    classes: Shorts  # (T,)
    accepted: NDArray[np.bool_]  # (T,)
    reason: NDArray[np.object_]  # (T,) text
    ratio: NDArray[np.float64]  # (T,) NaN where no gate measured one
    confident: Ints  # (T,) -1 without a certificate
    confident_classes: Shorts  # (T,) likewise
    seconds: NDArray[np.float64]  # (T,)


@dataclass(frozen=True)
class Cell:
    """`cell.json`: what a cell is, what it was made from, and what made it.

    `identity` shapes the predictions and gives the key; the rest describes the run. The writer
    fills in `counts`, `tables` and `files`. A refused cell says nothing under `method`, `frozen`
    and `stream`.
    """

    identity: dict[str, Any]  # spec, settings, constants, checkpoint, moments, source, target, …
    status: str  # DONE, or REFUSED and then without samples and batches
    reason: str | None  # why refused
    admission: dict[str, Any]  # accuracy on clean images, n of these, threshold
    method: dict[str, Any]  # inert, gradients, settings, retained bytes by kind
    frozen: dict[str, Any]  # digest of the frozen model's weights: before, after
    stream: dict[str, Any]  # relative_diversity, class_ordered
    memory: dict[str, Any]  # peak: MiB on the device; null on a CPU
    software: dict[str, str]  # versions: python, numpy, torch, caster, ...
    hardware: dict[str, Any]  # device, ...
    counts: dict[str, int] = field(default_factory=dict)  # samples, batches
    tables: dict[str, str] = field(default_factory=dict)  # samples, batches: SHA-256 of columns
    files: dict[str, str] = field(default_factory=dict)  # name: SHA-256 of its bytes
    format: int = FORMAT


@dataclass(frozen=True)
class Admission:
    """`sources/<backbone>--<data>.json`: whether a checkpoint may speak for its data, and why not.

    >>> Admission("r18", "digits", "ab", "cd", 0.97, 360, 0.9, True, None).name
    'r18--digits'
    """

    backbone: str
    data: str
    checkpoint: str | None  # its SHA-256; None where there is none
    moments: str | None  # SHA-256 of the content of the state; None where none was fitted
    accuracy: float | None  # on clean images; None where there is no head
    n: int  # of these images
    threshold: float | None
    admitted: bool
    reason: str | None  # why not
    files: dict[str, str] = field(default_factory=dict)  # the state's file: SHA-256 of its bytes
    source: dict[str, Any] | None = None  # name, sha256 and n of the images it was fitted on
    target: dict[str, Any] | None = None  # the same of those it is tested on
    classes: int | None = None
    preprocessing: dict[str, Any] | None = None  # from an image to what the model takes
    constants: dict[str, Any] = field(default_factory=dict)  # of caster, all of them
    seen: dict[str, Any] = field(default_factory=dict)  # by which a later run knows it still holds
    format: int = FORMAT

    @property
    def name(self) -> str:
        """What its files are called, but for their endings."""
        return f"{self.backbone}--{self.data}"
