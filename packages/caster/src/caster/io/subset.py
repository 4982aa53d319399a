"""Choose rows, and restrict images and feature files to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.feature_files import FeatureFile
from caster.io.images import ImageArray, Images
from caster.io.labels import Labels, encode, rank_in_class, unique_labels

Rows = NDArray[np.intp]  # (n,), increasing


def check_limit(limit: int | None) -> None:
    """Raise for a limit below 1."""
    if limit is not None and limit < 1:
        raise CasterError(f"the limit must be at least 1, not {limit}")


def first_rows(count: int, limit: int | None) -> Rows:
    """Choose the first rows, at most `limit`."""
    return np.arange(count if limit is None else min(limit, count))


def random_rows(count: int, limit: int | None, seed: int) -> Rows:
    """Draw `limit` rows without replacement, or choose all.

    >>> random_rows(10, 3, seed=0).tolist() == random_rows(10, 3, seed=0).tolist()
    True
    """
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))


def balanced_rows(labels: Labels, limit: int | None) -> Rows:
    """Choose the first rows of every class, as evenly as possible, `limit` in total.

    >>> balanced_rows(np.array(["a", "a", "a", "a", "b", "b", "b"]), 5).tolist()
    [0, 1, 2, 4, 5]
    """
    if limit is None or limit >= len(labels):
        return np.arange(len(labels))
    classes = unique_labels(labels)
    if limit < 2 * len(classes):
        raise CasterError(
            f"a limit of {limit} leaves fewer than 2 samples for some of the {len(classes):,} "
            f"classes: set {{argument}} to at least {2 * len(classes):,}",
            argument="limit",
        )
    rank = rank_in_class(encode(labels, classes))
    return np.sort(np.argsort(rank, kind="stable")[:limit])


def select_images(images: Images, rows: Rows) -> Images:
    """Restrict images to these rows; returns the source itself for all rows."""
    return images if len(rows) == len(images) else ImageSubset(images, rows)


def select_features(file: FeatureFile, rows: Rows) -> FeatureFile:
    """Restrict a feature file to these rows; returns the file itself for all rows."""
    return file if len(rows) == file.rows else FeatureSubset(file, rows)


class ImageSubset(Images):
    """Some of the images of a source."""

    def __init__(self, whole: Images, rows: Rows) -> None:
        self.whole, self.rows = whole, rows
        self.name, self.skipped, self.limits = whole.name, whole.skipped, whole.limits
        self.names = [whole.names[row] for row in rows]
        self.labels = None if whole.labels is None else whole.labels[rows]
        self.classes = whole.classes  # they correspond to the model's outputs

    @cached_property
    def sha256(self) -> str:
        """Digest of the whole source and of the rows."""
        rows = self.rows.astype("<i8").tobytes()
        return hashlib.sha256(self.whole.sha256.encode() + rows).hexdigest()

    def read(self, index: int) -> ImageArray:
        """Read one image."""
        return self.whole.read(int(self.rows[index]))


class FeatureSubset:
    """Some of the rows of a feature file."""

    def __init__(self, whole: FeatureFile, chosen: Rows) -> None:
        self.whole, self.chosen = whole, chosen
        self.path, self.names, self.rows = whole.path, whole.names, len(chosen)

    def read(self, name: str) -> NDArray[Any]:
        """Read these rows of an array."""
        return self.whole.read(name)[self.chosen]

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """Read these arrays side by side, `rows` at a time; stops after the last chosen row."""
        pending: tuple[NDArray[Any], ...] | None = None
        start = 0
        for chunk in self.whole.chunks(names, rows):
            stop = start + len(chunk[0])
            low, high = np.searchsorted(self.chosen, (start, stop))
            found = tuple(array[self.chosen[low:high] - start] for array in chunk)
            if pending is not None:
                found = tuple(map(np.concatenate, zip(pending, found, strict=True)))
            if len(found[0]) >= rows:
                yield tuple(array[:rows] for array in found)
                found = tuple(array[rows:] for array in found)
            pending, start = found, stop
            if high == len(self.chosen):
                break
        if pending is not None and len(pending[0]):
            yield pending
