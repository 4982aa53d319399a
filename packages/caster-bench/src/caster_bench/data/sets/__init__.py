"""Named sets, in the layouts of their publishers."""

from __future__ import annotations

import os
from pathlib import Path

from caster.errors import CasterError
from caster.io.image_arrays import ArrayImages
from caster.io.image_folder import FileImages
from caster_bench.data.sets.cifar import CIFAR
from caster_bench.data.sets.domains import DOMAINS
from caster_bench.data.sets.fashion import FASHION
from caster_bench.data.sets.fine import FINE
from caster_bench.data.sets.imagenet import IMAGENET
from caster_bench.data.sets.layout import REMEDY, DataSet, MissingFiles, missing
from caster_bench.data.sets.tiny import TINY

__all__ = ["SETS", "find", "known", "open_set", "root_folder"]

SETS: dict[str, DataSet] = CIFAR | TINY | IMAGENET | FINE | FASHION | DOMAINS
FEW = 4  # splits that an error names one by one


def known() -> list[str]:
    """The names there are; a colon and a split follow them.

    >>> known()
    ['cifar10', 'cifar100', 'cifar10-c', 'cifar100-c', 'tiny-imagenet', ...]
    """
    return list(SETS)


def find(name: str) -> tuple[str, DataSet, list[str]]:
    """A set and those of its splits that a name means: one, or all where it names none.

    >>> title, data, splits = find("imagenet-c:fog-3")
    >>> title, data.classes, splits
    ('imagenet-c', 1000, ['fog-3'])
    """
    title, colon, split = name.partition(":")
    if title not in SETS:
        raise CasterError(f"there is no set {title!r}: say one of {', '.join(known())}")
    data = SETS[title]
    if not colon:
        return title, data, data.names()
    if split not in data.names():
        raise CasterError(f"{name} is no split of {title}: say {_choices(title)}")
    return title, data, [split]


def root_folder(name: str, root: Path | None) -> Path:
    """Where a set is looked for: a root, or the folder CASTER_DATA names."""
    below = root or os.environ.get("CASTER_DATA")
    if not below:
        message = f"no folder is named to find {name} in: {REMEDY}"
        raise CasterError(message, argument="data_root")
    return Path(below)


def open_set(name: str, root: Path | None = None) -> ArrayImages | FileImages:
    """A split of a set, such as "cifar10:test", below a root or the folder CASTER_DATA names.

    A set of one split may be named without it.
    """
    title, data, splits = find(name)
    if len(splits) > 1:
        raise CasterError(f"{name} is no split of {title}: say {_choices(title)}")
    name = f"{title}:{splits[0]}"
    below = root_folder(name, root)
    begun = [layout for layout in data.layouts if os.path.isdir(below / layout.folder)]
    gaps = []
    for layout in begun or data.layouts:
        part = layout.part(name, below)
        gap = missing(part.folder, part.files)
        if not gap:
            return layout.open(part)
        gaps.append((part.folder, gap))
    remedy = f"run `caster data get {title}`" if data.archives else f"get it from {data.source}"
    raise MissingFiles(name, gaps, f"{REMEDY}, or {remedy}")


def _choices(title: str) -> str:
    words = []
    for splits in SETS[title].splits:
        if len(splits.names) <= FEW:
            words += [f"{title}:{name}" for name in splits.names]
        else:
            words.append(f"{title}:{splits.spelt}, such as {title}:{splits.names[0]}")
    return " or ".join(words)
