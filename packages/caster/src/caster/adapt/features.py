"""What a model makes of images, in the shape of a feature file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.feature_cache import Entry
from caster.io.images import Images
from caster.io.labels import Labels
from caster.models.protocol import Outputs
from caster.state import Layers


@dataclass(frozen=True, eq=False)
class ImageArrayFeatures:
    """What a model makes of images, as the feature file other jobs read."""

    path: Path
    images: Images
    entry: Entry

    @property
    def rows(self) -> int:
        """Images that could be read."""
        return self.entry.note.kept

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays there are."""
        logits = ("logits",) if "logits" in self.entry.arrays else ()
        labels = () if self.images.labels is None else ("labels",)
        return ("features", *logits, *labels)

    @property
    def unreadable(self) -> list[str]:
        """What is wrong with each image that was skipped."""
        return list(self.entry.note.unreadable.values())

    @property
    def places(self) -> NDArray[Any]:
        """For every row, which of the images it is."""
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
        if self.images.labels is None:
            raise CasterError(f"{self.images.name} has no labels")
        labels: Labels = self.images.labels[self.places]
        return labels

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These arrays side by side, so many rows at a time."""
        arrays = [self.read(name) for name in names]
        for start in range(0, self.rows, rows):
            yield tuple(array[start : start + rows] for array in arrays)
