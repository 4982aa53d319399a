"""Published sets by name, in the layouts of their publishers."""

from __future__ import annotations

import os
from pathlib import Path

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.image_files import FileImages
from caster_bench.data.sets.dataset import REMEDY, DataSet, MissingFiles, missing_files
from caster_bench.data.sets.published import SETS

__all__ = ["SETS", "find", "open_set", "root_folder"]

MAX_LISTED = 4  # splits that an error lists one by one


def find(name: str) -> tuple[str, DataSet, list[str]]:
    """Find a set and the splits that a name means: one, or all if it names none.

    >>> title, data, splits = find("imagenet-c:fog-3")
    >>> title, data.classes, splits
    ('imagenet-c', 1000, ['fog-3'])
    """
    title, colon, split = name.partition(":")
    if title not in SETS:
        raise CasterError(f"there is no set {title!r}: choose from {', '.join(SETS)}")
    data = SETS[title]
    if not colon:
        return title, data, data.names()
    if split not in data.names():
        raise CasterError(f"{title} has no split {split!r}: choose {_choices(title)}")
    return title, data, [split]


def root_folder(name: str, root: Path | None) -> Path:
    """Return the folder with the sets: the root, or the one in CASTER_DATA."""
    below = root or os.environ.get("CASTER_DATA")
    if not below:
        raise CasterError(f"no data folder for {name}: {REMEDY}", argument="data_root")
    return Path(below)


def open_set(name: str, root: Path | None = None) -> ArrayImages | FileImages:
    """Open a split, such as "cifar10:test", below a root or the folder in CASTER_DATA.

    A set with a single split may be named alone.
    """
    title, data, splits = find(name)
    if len(splits) > 1:
        raise CasterError(f"{title} has several splits: choose {_choices(title)}")
    name = f"{title}:{splits[0]}"
    below = root_folder(name, root)
    present = [layout for layout in data.layouts if os.path.isdir(below / layout.folder)]
    missing = []
    for layout in present or data.layouts:
        files = layout.files(name, below)
        lacking = missing_files(files.folder, files.files)
        if not lacking:
            return layout.open(files)
        missing.append((files.folder, lacking))
    remedy = f"run `caster data get {title}`" if data.archives else f"get it from {data.page}"
    raise MissingFiles(name, missing, f"{REMEDY}, or {remedy}")


def _choices(title: str) -> str:
    choices = []
    for group in SETS[title].splits:
        if len(group.names) <= MAX_LISTED:
            choices += [f"{title}:{name}" for name in group.names]
        else:
            choices.append(f"{title}:{group.pattern}, such as {title}:{group.names[0]}")
    return " or ".join(choices)
