"""Sketch of the source: a few labelled samples, with which the monitor compares a stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.estimated_accuracy import Calibration
from caster.errors import CasterError

SAMPLES = 512  # largest number of samples
NUMBERS = 2**20  # largest number of probabilities, 2 MiB: fewer samples if above 2,048 classes
MIN_SAMPLES = 32  # samples, for any number of classes
ANSWERS = ("frozen", "adapted")  # columns of `uncertainty` and `wrong`
PREFIX = "sketch_"  # of its arrays in a state file


def sketch_size(n_classes: int) -> int:
    """Largest number of samples in a sketch of this many classes.

    >>> sketch_size(10), sketch_size(10_000)
    (512, 104)
    """
    return max(MIN_SAMPLES, min(SAMPLES, NUMBERS // n_classes))


@dataclass(frozen=True, eq=False)
class Sketch:
    """Random source samples, each classified with statistics of other samples.

    Adapted answers come from transport, in batches of 64 source samples.
    """

    features: NDArray[np.float32]  # (m, k), projected on U
    probabilities: NDArray[np.float16]  # (m, C), of the frozen head or, without one, Source-GDA
    labels: NDArray[np.int64]  # (m,), class indices
    uncertainty: NDArray[np.float32]  # (m, 2), 1 - largest probability, by `ANSWERS`
    wrong: NDArray[np.uint8]  # (m, 2), 1 if the answer differs from the label

    def __len__(self) -> int:
        return len(self.labels)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays of the state file."""
        return {PREFIX + each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def calibrations(self) -> dict[str, Calibration]:
        """Calibration of the frozen and of the adapted answers on the source."""
        return {
            name: Calibration.of(self.uncertainty[:, i].astype(np.float64), self.wrong[:, i])
            for i, name in enumerate(ANSWERS)
        }


def unpack_sketch(arrays: dict[str, NDArray[Any]], n_classes: int) -> Sketch | None:
    """Read the sketch of a state file, None if it has none; raise if it is invalid."""
    if f"{PREFIX}labels" not in arrays:
        return None
    sketch = Sketch(**{each.name: arrays[PREFIX + each.name] for each in fields(Sketch)})
    if not 1 <= len(sketch) <= sketch_size(n_classes):
        raise CasterError(f"its sketch has {len(sketch):,} samples")
    if sketch.labels.max() >= n_classes or sketch.wrong.max() > 1:
        raise CasterError("its sketch has labels of no class")
    if max(sketch.probabilities.max(), sketch.uncertainty.max()) > 1:
        raise CasterError("its sketch has probabilities above 1")
    return sketch
