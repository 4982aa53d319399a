"""What is known of a published set: its splits, its files, where they come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.image_folder import FileImages

SHOWN = 8  # missing files that are named; the rest are counted
REMEDY = "set CASTER_DATA or give {argument}"


@dataclass(frozen=True)
class Part:
    """One split of a set, where it lies."""

    name: str  # "cifar10-c:fog-3"
    folder: Path
    files: Sequence[str]  # what must be there to open it, relative to the folder

    @property
    def split(self) -> str:
        """What follows the colon of its name."""
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class Layout:
    """How a publisher lays a set out: a folder, and for every split what must be in it."""

    folder: str  # below the root
    needs: Callable[[str], Sequence[str]]  # split -> files, and folders with a slash at their end
    open: Callable[[Part], ArrayImages | FileImages]
    md5: Mapping[str, str] = field(default_factory=dict)  # of the published files

    def part(self, name: str, root: Path) -> Part:
        """A split below a root."""
        return Part(name, root / self.folder, tuple(self.needs(name.partition(":")[2])))


@dataclass(frozen=True)
class Splits:
    """Splits of one size; many of them share a way to be spelt."""

    names: Sequence[str]
    images: int  # in each
    spelt: str = ""  # "CORRUPTION-SEVERITY" for 95 of them
    balanced: bool = True  # whether each class has as many


@dataclass(frozen=True)
class Archive:
    """A file that anyone may download, and what it holds."""

    url: str
    digest: str  # "md5:..." or "sha256:..."
    stated_by: str  # who states the digest
    gives: Sequence[str]  # files and folders it becomes, below the root
    size: int | None = None  # bytes
    splits: Sequence[str] = ()  # those it is for; none means all

    @property
    def file(self) -> str:
        """Its name."""
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True)
class DataSet:
    """A published set."""

    title: str  # as its publisher writes it
    splits: Sequence[Splits]
    classes: int  # that a model for it has
    layouts: Sequence[Layout]  # the first that is there is read
    source: str  # the page of the publisher
    licence: str
    archives: Sequence[Archive] = ()
    present: int | None = None  # classes with images, where they are fewer

    def names(self) -> list[str]:
        """All its splits."""
        return [name for splits in self.splits for name in splits.names]

    def of(self, split: str) -> Splits:
        """The splits among which one is."""
        return next(splits for splits in self.splits if split in splits.names)


class MissingFiles(CasterError):  # noqa: N818
    """Files of a set that are not there; the message names the first of them."""

    def __init__(
        self,
        name: str,
        gaps: Sequence[tuple[Path, Sequence[str]]],  # a folder, and what is not in it, a layout
        remedy: str = REMEDY,
    ) -> None:
        self.gaps = gaps
        named = (f"{some(files)} in {folder}" for folder, files in gaps)
        message = f"{name} misses {', or '.join(named)}: {remedy}"
        super().__init__(message, argument="data_root")


def missing(folder: Path, files: Sequence[str]) -> list[str]:
    """The files and folders that are not in a folder."""
    return [
        file
        for file in files
        if not (os.path.isdir if file.endswith("/") else os.path.isfile)(folder / file)
    ]


def require(part: Part, files: Sequence[str]) -> None:
    """Refuse a split whose list names files that are not there."""
    if gap := missing(part.folder, files):
        raise MissingFiles(part.name, [(part.folder, gap)])


def some(items: Sequence[str]) -> str:
    """The first few of many, and how many more there are.

    >>> some(["a", "b"]), some("abcdefghij")
    ('a, b', 'a, b, c, d, e, f, g, h and 2 more')
    """
    more = f" and {len(items) - SHOWN:,} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
