"""Subsets of images and feature files, in their own order, and the choice of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import Limits
from caster.errors import CasterError
from caster.io.feature_files import FeatureFile
from caster.io.images import ImageArray, Images
from caster.io.labels import Labels, encode, is_by_class, unique_labels

Rows = NDArray[np.intp]  # (n,), increasing


def check_limit(limit: int | None) -> None:
    """Reject a limit that leaves nothing."""
    if limit is not None and limit < 1:
        raise CasterError(f"the limit must be at least 1, not {limit}")


def first(count: int, limit: int | None) -> Rows:
    """Choose the first rows, at most `limit`."""
    return np.arange(count if limit is None else min(limit, count))


def at_random(count: int, limit: int | None, seed: int) -> Rows:
    """Draw `limit` rows without replacement, or choose all.

    >>> at_random(10, 3, seed=0).tolist() == at_random(10, 3, seed=0).tolist()
    True
    """
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, limit, replace=False))


def over_classes(labels: Labels, limit: int | None) -> Rows:
    """Choose the first rows of every class, as evenly as possible, `limit` in total.

    >>> over_classes(np.array(["a", "a", "a", "a", "b", "b", "b"]), 5).tolist()
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
    indices = encode(labels, classes)
    order, counts = np.argsort(indices, kind="stable"), np.bincount(indices)
    rank = np.empty(len(labels), dtype=np.intp)  # of a row within its class
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(np.argsort(rank, kind="stable")[:limit])


def some_images(images: Images, rows: Rows) -> Images:
    """Take these images; returns the source itself for all of them."""
    return images if len(rows) == len(images) else ImageSubset(images, rows)


def some_features(file: FeatureFile, rows: Rows) -> FeatureFile:
    """Take these rows; returns the file itself for all of them."""
    return file if len(rows) == file.rows else FeatureSubset(file, rows)


@dataclass(frozen=True, eq=False)
class ImageSubset:
    """Some of the images of a source."""

    whole: Images
    rows: Rows

    @property
    def name(self) -> str:
        """Name of the whole source."""
        return self.whole.name

    @cached_property
    def names(self) -> Sequence[str]:
        """One per image."""
        return [self.whole.names[row] for row in self.rows]

    @cached_property
    def labels(self) -> Labels | None:
        """One per image; None without labels."""
        return None if self.whole.labels is None else self.whole.labels[self.rows]

    @property
    def classes(self) -> Labels | None:
        """Classes of the whole source, which correspond to the model's outputs."""
        return self.whole.classes

    @cached_property
    def by_class(self) -> bool:
        """Whether the images are sorted by class."""
        return is_by_class(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Digest of the whole source and of the rows."""
        rows = self.rows.astype("<i8").tobytes()
        return hashlib.sha256(self.whole.sha256.encode() + rows).hexdigest()

    @property
    def skipped(self) -> Sequence[str]:
        """Files of the folder that are not images."""
        return self.whole.skipped

    @property
    def limits(self) -> Limits:
        """Bounds on the size of one image."""
        return self.whole.limits

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> ImageArray:
        """Read one image."""
        return self.whole.read(int(self.rows[index]))


@dataclass(frozen=True, eq=False)
class FeatureSubset:
    """Some of the rows of a feature file."""

    whole: FeatureFile
    chosen: Rows

    @property
    def path(self) -> Path:
        """Path of the whole file."""
        return self.whole.path

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.chosen)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return self.whole.names

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
