"""Runs in which one gated cell is not what its gate would have made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from caster_bench.records.parquet import as_batches, as_samples
from caster_bench.records.store import read, write
from caster_bench.studies.check_gates import ANSWERED, MEASURED, THRESHOLD
from caster_bench.sweeps import Spec
from tests.support.record_maker import Maker


def altered(out: Path, folder: Path, maker: Maker, spec: Spec, change) -> Path:
    """A copy of a run, with one cell whose columns were changed before they were written."""
    copy = Path(shutil.copytree(out, folder / "run"))
    cell = next(f for f in (copy / "cells").iterdir() if read(f).spec == spec)
    record = read(cell)
    samples, batches = maker.columns(spec)
    shutil.rmtree(cell)
    change(samples, batches)
    write(copy / "cells", record.cell, as_samples(samples), as_batches(batches))
    return copy


def accept_a_refused_batch(samples, batches):
    place = int(np.flatnonzero(~batches["accepted"])[0])
    batches["accepted"][place] = True
    batches["reason"][place] = "accepted"


def change_a_prediction(samples, batches):
    """In an accepted batch, where nothing else says what it must be."""
    accepted = int(np.flatnonzero(batches["accepted"])[0])
    row = int(np.flatnonzero(samples["batch"] == accepted)[0])
    samples["prediction"][row] = (samples["prediction"][row] + 1) % 4


def accept_with_a_ratio_to_match(samples, batches):
    """An accepted batch that contradicts nothing in its own cell."""
    place = int(np.flatnonzero(~batches["accepted"])[0])
    accept_a_refused_batch(samples, batches)
    batches["ratio"][place] = 0.1
    if batches["confident"][0] is not None:
        batches["confident"][place] = batches["size"][place]
        batches["confident_classes"][place] = 4


FAULTS = [
    (accept_a_refused_batch, {THRESHOLD}),
    (accept_with_a_ratio_to_match, {MEASURED, ANSWERED}),
    (change_a_prediction, {ANSWERED}),
]
