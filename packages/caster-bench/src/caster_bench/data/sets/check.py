"""Check that a set is present and complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caster.errors import CasterError, counted
from caster.io import Progress, silent
from caster.io.image_arrays import ArrayImages
from caster.io.image_files import FileImages
from caster_bench.data.sets import find, root_folder
from caster_bench.data.sets.dataset import (
    DataSet,
    Layout,
    Missing,
    MissingFiles,
    SplitFiles,
    missing_files,
)
from caster_bench.data.sets.download import digest_of


@dataclass(frozen=True)
class SplitStatus:
    """What was found of a split."""

    split: str
    folder: Path
    expected: int  # images
    images: int | None = None  # None if it cannot be opened
    missing: Missing = ()
    problems: Sequence[str] = ()  # sentences
    present: bool = True  # whether any of it is there

    @property
    def complete(self) -> bool:
        """Whether all images are there."""
        return self.images == self.expected and not self.problems


@dataclass(frozen=True)
class SetStatus:
    """What was found of a set."""

    name: str
    root: Path
    splits: Sequence[SplitStatus]
    digests_match: Mapping[Path, bool]  # for files with a published digest

    @property
    def complete(self) -> bool:
        """Whether all of it is there, as published."""
        return all(split.complete for split in self.splits) and not self.changed()

    @property
    def present(self) -> bool:
        """Whether any of it is there."""
        return any(split.present for split in self.splits)

    def missing(self) -> dict[Path, list[str]]:
        """List missing files by folder, each once: splits share files."""
        merged: dict[Path, dict[str, None]] = {}
        for split in self.splits:
            for folder, files in split.missing:
                merged.setdefault(folder, {}).update(dict.fromkeys(files))
        return {folder: list(files) for folder, files in merged.items()}

    def problems(self) -> list[str]:
        """List other problems, in sentences."""
        return list(dict.fromkeys(line for split in self.splits for line in split.problems))

    def changed(self) -> list[Path]:
        """List files whose digest is not the published one."""
        return [path for path, match in self.digests_match.items() if not match]


def check(name: str, root: Path | None = None, progress: Progress = silent) -> SetStatus:
    """Open the splits, count their images, and compare published digests; decode nothing."""
    title, data, splits = find(name)
    below = root_folder(name, root)
    found, digests_match = [], {}
    for done, split in enumerate(splits):
        progress(f"looking at {title}", done, len(splits))
        layout = _in_use(data, f"{title}:{split}", below)
        files = layout.files(f"{title}:{split}", below)
        found.append(_status(data, layout, files))
        for file in files.files:
            path = files.folder / file
            if file in layout.md5 and path not in digests_match and path.is_file():
                match = digest_of(path, "md5", progress) == f"md5:{layout.md5[file]}"
                digests_match[path] = match
    return SetStatus(name, below, tuple(found), digests_match)


def _in_use(data: DataSet, name: str, root: Path) -> Layout:
    """Choose the layout that would be opened, or else the most complete one."""

    def lacks(layout: Layout) -> tuple[int, bool]:
        files = layout.files(name, root)
        return len(missing_files(files.folder, files.files)), not os.path.isdir(files.folder)

    return min(data.layouts, key=lacks)


def _status(data: DataSet, layout: Layout, files: SplitFiles) -> SplitStatus:
    split, folder, expected = files.split, files.folder, data.group(files.split).images
    if missing := missing_files(folder, files.files):
        present = len(missing) < len(files.files)
        return SplitStatus(split, folder, expected, missing=[(folder, missing)], present=present)
    try:
        images = layout.open(files)
    except MissingFiles as error:
        return SplitStatus(split, folder, expected, missing=error.missing)
    except CasterError as error:
        return SplitStatus(split, folder, expected, problems=(str(error),))
    problems = tuple(_wrong_counts(data, files, images))
    return SplitStatus(split, folder, expected, len(images), problems=problems)


def _wrong_counts(
    data: DataSet, files: SplitFiles, images: ArrayImages | FileImages
) -> Iterator[str]:
    group = data.group(files.split)
    if len(images) != group.images:
        yield f"{files.name} has {counted(len(images), 'image')} instead of {group.images:,}"
    classes = data.classes_present or data.classes
    labels, counts = np.unique(np.asarray(images.labels), return_counts=True)
    if len(labels) != classes:
        yield f"{files.name} has {len(labels):,} classes instead of {classes:,}"
    if group.balanced:
        each = group.images // classes
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            if count != each:
                yield f"{files.name} has {counted(count, 'image')} of {label} instead of {each:,}"
