"""Whether a set is there, and all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.image_folder import FileImages
from caster_bench.data.download import Report, checked_digest
from caster_bench.data.sets import find, root_folder
from caster_bench.data.sets.layout import DataSet, Layout, MissingFiles, Part, missing

Gaps = Sequence[tuple[Path, Sequence[str]]]  # folders, and what is not in them


@dataclass(frozen=True)
class Found:
    """A split, as far as it is there."""

    split: str
    folder: Path
    expected: int  # images
    images: int | None = None  # None where it cannot be opened
    gaps: Gaps = ()
    wrong: Sequence[str] = ()  # sentences
    begun: bool = True  # whether anything of it is there

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self.images == self.expected and not self.wrong


@dataclass(frozen=True)
class Checked:
    """A set, as far as it is there."""

    name: str
    root: Path
    splits: Sequence[Found]
    published: Mapping[Path, bool]  # files with a known digest: whether they have it

    @property
    def complete(self) -> bool:
        """Whether all of it is there, and as it was published."""
        return all(split.complete for split in self.splits) and not self.changed()

    @property
    def begun(self) -> bool:
        """Whether anything of it is there."""
        return any(split.begun for split in self.splits)

    def gaps(self) -> dict[Path, list[str]]:
        """What is not in which folder, each piece once: splits share files."""
        merged: dict[Path, dict[str, None]] = {}
        for split in self.splits:
            for folder, files in split.gaps:
                merged.setdefault(folder, {}).update(dict.fromkeys(files))
        return {folder: list(files) for folder, files in merged.items()}

    def wrong(self) -> list[str]:
        """What else is amiss, in sentences."""
        return list(dict.fromkeys(line for split in self.splits for line in split.wrong))

    def changed(self) -> list[Path]:
        """Files that have not the published digest."""
        return [path for path, same in self.published.items() if not same]


def check(name: str, root: Path | None = None, report: Report = lambda *_: None) -> Checked:
    """Open the splits a name means, count their images, and compare digests where some are known.

    No image is decoded.
    """
    title, data, splits = find(name)
    below = root_folder(name, root)
    found, published = [], {}
    for done, split in enumerate(splits):
        report(f"looking at {title}", done, len(splits))
        layout = _in_use(data, f"{title}:{split}", below)
        part = layout.part(f"{title}:{split}", below)
        found.append(_look(data, layout, part))
        for file in part.files:
            path = part.folder / file
            if file in layout.md5 and path not in published and path.is_file():
                published[path] = checked_digest(path, "md5", report) == f"md5:{layout.md5[file]}"
    return Checked(name, below, tuple(found), published)


def _in_use(data: DataSet, name: str, root: Path) -> Layout:
    """The layout that would be opened, or else the one that is most likely meant."""

    def lacks(layout: Layout) -> tuple[int, bool]:
        part = layout.part(name, root)
        return len(missing(part.folder, part.files)), not os.path.isdir(part.folder)

    return min(data.layouts, key=lacks)


def _look(data: DataSet, layout: Layout, part: Part) -> Found:
    expected = data.of(part.split).images
    if gap := missing(part.folder, part.files):
        gaps = [(part.folder, gap)]
        begun = len(gap) < len(part.files)
        return Found(part.split, part.folder, expected, gaps=gaps, begun=begun)
    try:
        images = layout.open(part)
    except MissingFiles as error:
        return Found(part.split, part.folder, expected, gaps=error.gaps)
    except CasterError as error:
        return Found(part.split, part.folder, expected, wrong=(str(error),))
    wrong = tuple(_miscounted(data, part, images))
    return Found(part.split, part.folder, expected, len(images), wrong=wrong)


def _miscounted(data: DataSet, part: Part, images: ArrayImages | FileImages) -> Iterator[str]:
    splits = data.of(part.split)
    if len(images) != splits.images:
        yield f"{part.name} has {len(images):,} images and {splits.images:,} are published"
    classes = data.present or data.classes
    labels, counts = np.unique(np.asarray(images.labels), return_counts=True)
    if len(labels) != classes:
        yield f"{part.name} has images of {len(labels):,} classes and {classes:,} are published"
    if splits.balanced:
        each = splits.images // classes
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            if count != each:
                yield f"{part.name} has {count:,} images of {label} and {each:,} are published"
