"""Named sets, in the layouts of their publishers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from caster.data.arrays import ArrayPictures
from caster.data.cifar import open_binary_version, open_python_version
from caster.data.folder import FilePictures
from caster.errors import CasterError
from caster.labels import as_labels

SHOWN = 8  # missing files that are named; the rest are counted
REMEDY = "set CASTER_DATA or give a root"


def open_pets(name: str, folder: Path, files: Sequence[str]) -> FilePictures:
    """A split of Oxford-IIIT Pets: its file names an image, and the number of its class, a line."""
    (listing,) = files
    images, numbers = [], []
    breeds: dict[int, str] = {}  # an image is named after its breed, and counted
    try:
        for line in (folder / listing).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                image, number = line.split()[:2]
                images.append(f"images/{image}.jpg")
                numbers.append(int(number))
                breed = image.rpartition("_")[0]
                if breeds.setdefault(int(number), breed) != breed:
                    raise ValueError("a class of two breeds")
        if not breeds or sorted(breeds) != list(range(1, len(set(breeds.values())) + 1)):
            raise ValueError("classes that are not numbered from 1")
    except OSError as error:
        raise CasterError(f"cannot read {folder / listing}: {error.strerror}") from None
    except ValueError:
        raise CasterError(f"{folder / listing} is damaged: {name} cannot be told from it") from None
    if gap := _missing(folder, images):
        raise CasterError(f"{name} misses {gap}: {REMEDY}")
    classes = as_labels([breeds[number] for number in sorted(breeds)])
    labels = classes[np.asarray(numbers) - 1]
    return FilePictures(name, folder.absolute(), tuple(images), labels, classes)


@dataclass(frozen=True)
class Layout:
    """How a publisher lays a set out: a folder, and for every split its files."""

    folder: str
    splits: Mapping[str, Sequence[str]]
    open: Callable[[str, Path, Sequence[str]], ArrayPictures | FilePictures]


def _cifar10(folder: str, end: str, meta: str, opener: Callable[..., ArrayPictures]) -> Layout:
    train = [f"data_batch_{i}{end}" for i in range(1, 6)]
    return Layout(folder, {"train": (*train, meta), "test": (f"test_batch{end}", meta)}, opener)


def _cifar100(folder: str, end: str, meta: str, opener: Callable[..., ArrayPictures]) -> Layout:
    return Layout(folder, {split: (f"{split}{end}", meta) for split in ("train", "test")}, opener)


one_label, two_labels = (partial(open_binary_version, labels=labels) for labels in (1, 2))

SETS: dict[str, tuple[Layout, ...]] = {  # the first layout that is there is read
    "cifar10": (
        _cifar10("cifar-10-batches-py", "", "batches.meta", open_python_version),
        _cifar10("cifar-10-batches-bin", ".bin", "batches.meta.txt", one_label),
    ),
    "cifar100": (
        _cifar100("cifar-100-python", "", "meta", open_python_version),
        _cifar100("cifar-100-binary", ".bin", "fine_label_names.txt", two_labels),
    ),
    "pets": (
        Layout(
            "oxford-iiit-pet",
            {split: (f"annotations/{split}.txt",) for split in ("trainval", "test")},
            open_pets,
        ),
    ),
}


def known() -> list[str]:
    """The names there are, with their splits.

    >>> known()
    ['cifar10:train', 'cifar10:test', 'cifar100:train', 'cifar100:test', 'pets:trainval', ...]
    """
    return [f"{name}:{split}" for name, layouts in SETS.items() for split in layouts[0].splits]


def open_set(name: str, root: Path | None = None) -> ArrayPictures | FilePictures:
    """A split of a set, such as "cifar10:test", below a root or the folder CASTER_DATA names."""
    title, _, split = name.partition(":")
    layouts = SETS[title]
    if split not in layouts[0].splits:
        choices = " or ".join(f"{title}:{split}" for split in layouts[0].splits)
        raise CasterError(f"{name} is no split of {title}: say {choices}")
    below = root or os.environ.get("CASTER_DATA")
    if not below:
        raise CasterError(f"no folder is named to find {name} in: {REMEDY}")
    begun = [layout for layout in layouts if os.path.isdir(Path(below, layout.folder))]
    gaps = []
    for layout in begun or layouts:
        folder, files = Path(below, layout.folder), layout.splits[split]
        gap = _missing(folder, files)
        if not gap:
            return layout.open(name, folder, files)
        gaps.append(gap)
    raise CasterError(f"{name} misses {', or '.join(gaps)}: {REMEDY}")


def _missing(folder: Path, files: Sequence[str]) -> str:
    """The files that are not in a folder, in words; nothing where all are."""
    missing = [file for file in files if not os.path.isfile(folder / file)]
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"{', '.join(missing[:SHOWN])}{more} in {folder}" if missing else ""
