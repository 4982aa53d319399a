"""Descriptions of published sets: splits, layouts on disk, downloads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.image_files import FileImages

MAX_LISTED = 8  # missing files that an error lists; the rest are counted
REMEDY = "set CASTER_DATA or pass {argument}"

Missing = Sequence[tuple[Path, Sequence[str]]]  # folders, and the files missing in each


@dataclass(frozen=True)
class SplitFiles:
    """One split of a set in a folder."""

    name: str  # "cifar10-c:fog-3"
    folder: Path
    files: Sequence[str]  # required to open it, relative to the folder

    @property
    def split(self) -> str:
        """The name of the split alone."""
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class Layout:
    """A publisher's layout: a folder, and the files that every split needs in it."""

    folder: str  # below the root
    needs: Callable[[str], Sequence[str]]  # split -> files, and folders with a trailing slash
    open: Callable[[SplitFiles], ArrayImages | FileImages]
    md5: Mapping[str, str] = field(default_factory=dict)  # of the published files

    def files(self, name: str, root: Path) -> SplitFiles:
        """Locate a split below a root."""
        return SplitFiles(name, root / self.folder, tuple(self.needs(name.partition(":")[2])))


@dataclass(frozen=True)
class SplitGroup:
    """Splits of the same size."""

    names: Sequence[str]
    images: int  # in each
    pattern: str = ""  # "CORRUPTION-SEVERITY" for 95 of them
    balanced: bool = True  # whether all classes have the same size


@dataclass(frozen=True)
class Archive:
    """A file that anyone may download."""

    url: str
    digest: str  # "md5:..." or "sha256:..."
    digest_source: str  # who states the digest
    contents: Sequence[str]  # files and folders that it becomes, below the root
    size: int | None = None  # bytes
    splits: Sequence[str] = ()  # that it serves; empty for all

    @property
    def file_name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True)
class DataSet:
    """A published set."""

    title: str  # as its publisher writes it
    splits: Sequence[SplitGroup]
    classes: int  # outputs of a model for it
    layouts: Sequence[Layout]  # the first complete one is read
    page: str  # of the publisher
    licence: str
    archives: Sequence[Archive] = ()
    classes_present: int | None = None  # classes with images, if fewer

    def names(self) -> list[str]:
        """List all splits."""
        return [name for group in self.splits for name in group.names]

    def group(self, split: str) -> SplitGroup:
        """Find the group of a split."""
        return next(group for group in self.splits if split in group.names)


class MissingFiles(CasterError):  # noqa: N818
    """Files of a set that are missing; the message lists the first of them."""

    def __init__(self, name: str, missing: Missing, remedy: str = REMEDY) -> None:
        self.missing = missing
        found = (f"{first_few(files)} in {folder}" for folder, files in missing)
        message = f"{name} is missing {', or '.join(found)}: {remedy}"
        super().__init__(message, argument="data_root")


def missing_files(folder: Path, files: Sequence[str]) -> list[str]:
    """List the files and folders that do not exist in a folder."""
    return [
        file
        for file in files
        if not (os.path.isdir if file.endswith("/") else os.path.isfile)(folder / file)
    ]


def first_few(items: Sequence[str]) -> str:
    """List the first items and count the rest.

    >>> first_few(["a", "b"]), first_few("abcdefghij")
    ('a, b', 'a, b, c, d, e, f, g, h and 2 more')
    """
    more = f" and {len(items) - MAX_LISTED:,} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more
