"""Which images a corrupted set holds, in which order, and how it tells their classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.image_folder import FileImages
from caster.io.images import Images
from caster.io.labels import encode

LONGEST = 255  # bytes that file systems take for a name


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Arrays have a number for every image, image files a place in a class folder."""

    layout: str
    order: Sequence[int]  # rows
    labels: NDArray[Any] | None = None  # (N,)
    classes: Sequence[str] = ()  # what the numbers count, if they have names
    places: Sequence[str] | None = None  # "class/name.JPEG", sorted

    @classmethod
    def of(cls, images: Images) -> Catalogue:
        """The layout that goes with the images: that of CIFAR-C, or of ImageNet-C."""
        if images.labels is None:
            raise CasterError(f"{images.name} has no labels: a corrupted set needs them")
        if isinstance(images, FileImages):
            places = placed(images)
            order = sorted(range(len(places)), key=places.__getitem__)
            return cls("ImageNet-C", order, places=sorted(places))
        labels, classes = numbered(images)
        return cls("CIFAR-C", range(len(images)), labels, classes)

    def facts(self) -> list[Any]:
        """All of it, as plain values."""
        labels = None if self.labels is None else self.labels.tolist()
        return [labels, list(self.classes), self.places]


def numbered(images: Images) -> tuple[NDArray[np.uint8 | np.int64], list[str]]:
    """A number for every image, and the names that the numbers count, if there are some.

    Labels that are whole numbers stay what they are. Bytes where they suffice, as published.

    >>> from caster.io.image_arrays import ArrayImages
    >>> cat, dog = np.array(["cat", "dog"])
    >>> labels, classes = np.array([dog, cat, dog]), np.array([cat, dog])
    >>> numbered(ArrayImages("three", (), "abc", labels, classes, None))
    (array([1, 0, 1], dtype=uint8), ['cat', 'dog'])
    """
    labels, classes = images.labels, images.classes
    assert labels is not None
    assert classes is not None
    names = []
    if labels.dtype.kind not in "iu":
        labels, names = encode(labels, classes), [str(name) for name in classes.tolist()]
    byte = labels.min() >= 0 and labels.max() <= np.iinfo(np.uint8).max
    return labels.astype(np.uint8 if byte else np.int64), names


def placed(images: Images) -> list[str]:
    """Where every image goes: a folder a class, and its own name with JPEG's suffix."""
    assert images.labels is not None
    places: dict[str, str] = {}
    for label, name in zip(images.labels.tolist(), images.names, strict=True):
        folder = str(label)
        if folder.startswith(".") or not folder or {"/", os.sep, "\0"} & set(folder):
            raise CasterError(f"the class {folder!r} of {images.name} cannot name a folder")
        place = f"{folder}/{PurePosixPath(name).stem}.JPEG"
        if max(len(os.fsencode(part)) for part in place.split("/")) > LONGEST:
            raise CasterError(
                f"{name} would become {place}, longer than the {LONGEST} bytes that a name may "
                "have: rename it"
            )
        if place in places:
            raise CasterError(
                f"{places[place]} and {name} would both become {place}: give one another name"
            )
        places[place] = name
    return list(places)
