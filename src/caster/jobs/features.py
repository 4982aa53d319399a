"""What a model makes of pictures, in the shape of a feature file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.data import Pictures
from caster.errors import CasterError
from caster.frozen.protocol import Outputs
from caster.jobs.store import Entry
from caster.labels import Labels
from caster.state import Layers


@dataclass(frozen=True, eq=False)
class PictureFeatures:
    """What a model makes of pictures, as the feature file other jobs read."""

    path: Path
    pictures: Pictures
    entry: Entry

    @property
    def rows(self) -> int:
        """Pictures that could be read."""
        return self.entry.note.kept

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays there are."""
        logits = ("logits",) if "logits" in self.entry.arrays else ()
        labels = () if self.pictures.labels is None else ("labels",)
        return ("features", *logits, *labels)

    @property
    def unreadable(self) -> list[str]:
        """What is wrong with each picture that was skipped."""
        return list(self.entry.note.unreadable.values())

    @property
    def places(self) -> NDArray[Any]:
        """For every row, which of the pictures it is."""
        return self.entry.arrays["rows"]

    @property
    def outputs(self) -> Outputs:
        """All of them, as the model gave them."""
        return Outputs(self.entry.arrays["features"], self.entry.arrays.get("logits"))

    @property
    def layers(self) -> Layers | None:
        """Sums over the model's layers; None where they were not measured."""
        return self.entry.note.layers

    def read(self, name: str) -> NDArray[Any]:
        """One whole array."""
        if name != "labels":
            return self.entry.arrays[name]
        if self.pictures.labels is None:
            raise CasterError(f"{self.pictures.name} has no labels")
        labels: Labels = self.pictures.labels[self.places]
        return labels

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These arrays side by side, so many rows at a time."""
        arrays = [self.read(name) for name in names]
        for start in range(0, self.rows, rows):
            yield tuple(array[start : start + rows] for array in arrays)
