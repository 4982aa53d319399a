"""Image files: a folder for each class, one folder, or a list."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.decode import HEIF, ImageArray, decode, formats
from caster.io.files import read_regular
from caster.io.labels import Labels, as_labels
from caster.io.traits import digest, is_by_class

NAMED = 5  # skipped files that are named one by one


@dataclass(frozen=True, eq=False)
class FileImages:
    """Images that are a file each, decoded when asked for.

    >>> shots = FileImages("shots", Path("/shots"), ("cat/1.jpg",), np.array(["cat"]))
    >>> len(shots), shots.names[0], shots.classes
    (1, 'cat/1.jpg', None)
    """

    name: str
    root: Path  # where the names start
    names: Sequence[str]
    labels: Labels | None = None
    classes: Labels | None = None
    limits: Limits = DEFAULT_LIMITS
    skipped: Sequence[str] = ()  # other files in the folder, and hidden folders with a slash

    @cached_property
    def by_class(self) -> bool:
        """Whether the images come class by class."""
        return is_by_class(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Digest of the path, size and time of change of every file, in this order, and labels."""
        files = ((name, self.root / name) for name in self.names)
        return digest(files, *(x if x is None else x.tolist() for x in (self.labels, self.classes)))

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> ImageArray:
        """Decode one."""
        return decode(self.root / self.names[index], self.limits)


def open_folder(folder: Path, all_classes: bool = False) -> FileImages:
    """Images in one folder, or below one folder a class in the order of torchvision's ImageFolder.

    `all_classes` refuses a class folder without an image. Otherwise it stays among the classes:
    the output of the model that stands for it is still there.
    """
    inside = sorted(listed(folder))
    folders = {name for name in inside if os.path.isdir(folder / name)}
    classes = [name for name in inside if name in folders and not name.startswith(".")]
    images = [name for name in inside if _is_image(name) and name not in folders]
    skipped = [
        f"{name}/" if name in folders else name
        for name in inside
        if name not in classes and name not in images
    ]
    found = {name: images_below(folder, name, skipped) for name in classes}
    filled = [name for name in classes if found[name]]
    if images and filled:
        raise CasterError(
            f"{folder} holds images ({images[0]}) beside class folders ({filled[0]}): "
            "keep every image in a class folder, or none"
        )
    if images:
        return FileImages(str(folder), folder.absolute(), tuple(images), skipped=skipped)
    if not filled:
        raise CasterError(
            f"{folder} holds no image, and no folder with one (an image ends in "
            f"{', '.join(sorted(formats()))})" + (f"; {in_words(skipped)}" if skipped else "")
        )
    empty = [name for name in classes if not found[name]]
    if empty and all_classes:
        raise CasterError(f"no image in the class folder {', '.join(empty)} of {folder}")
    labels = np.repeat(np.asarray(classes), [len(found[name]) for name in classes])
    names = tuple(image for name in classes for image in found[name])
    return FileImages(
        str(folder), folder.absolute(), names, labels, as_labels(classes), skipped=skipped
    )


def in_words(skipped: Sequence[str]) -> str:
    """How many files were skipped, and which.

    >>> in_words(["a.mp4", "notes.txt"])
    'skipped 2 files that are not images: a.mp4, notes.txt'
    """
    files = f"{len(skipped):,} files that are not images"
    files = "1 file that is not an image" if len(skipped) == 1 else files
    more = f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else ""
    heif = [name for name in skipped if os.path.splitext(name)[1].lower() in HEIF]
    remedy = f"; to read {heif[0]}: pip install pillow-heif" if heif else ""
    return f"skipped {files}: {', '.join(skipped[:NAMED])}{more}{remedy}"


def open_list(path: Path) -> FileImages:
    """A text file with the path of an image on each line, relative to the file's own folder."""
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise CasterError(f"cannot read the list {path}: {reason}") from None
    numbered = [(i, line.strip()) for i, line in enumerate(lines, start=1)]
    numbered = [(i, name) for i, name in numbered if name and not name.startswith("#")]
    for i, name in numbered:
        if not os.path.isfile(path.parent / name):
            raise CasterError(f"{path}, line {i}: there is no file {name}")
    if not numbered:
        raise CasterError(f"the list {path} names no file")
    return FileImages(str(path), path.parent.absolute(), tuple(name for _, name in numbered))


def open_files(paths: Sequence[Path]) -> FileImages:
    """Image files in the order given."""
    for path in paths:
        if os.path.isdir(path):
            raise CasterError(f"{path} is a folder: give it alone, or image files only")
        if not os.path.isfile(path):
            raise CasterError(f"there is no file {path}")
    names = tuple(str(path) for path in paths)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FileImages(names[0] + more, Path.cwd(), names)


def images_below(root: Path, name: str, skipped: list[str] | None = None) -> list[str]:
    """The images anywhere below a folder, folder by folder, relative to the root.

    Other files, and hidden folders with a slash, are appended to `skipped`.
    """
    found = []
    for where, names in sorted(_walk(root / name)):
        relative = Path(where).relative_to(root).as_posix()
        found += [f"{relative}/{file}" for file in names if _is_image(file)]
        if skipped is not None:
            skipped += [f"{relative}/{file}" for file in names if not _is_image(file)]
    return found


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in formats()


def listed(folder: Path) -> list[str]:
    """The names in a folder."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise CasterError(f"cannot read the folder {folder}: {error.strerror}") from None


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    seen = set()
    for where, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link to a folder above it would be walked until the system gives up
            raise CasterError(f"{where} leads to {real} a second time: remove that link")
        seen.add(real)
        hidden = [f"{name}/" for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield where, sorted(names + hidden)


def _refuse(error: OSError) -> None:
    """`os.walk` passes over a folder it cannot read; its images would be missing in silence."""
    raise CasterError(f"cannot read the folder {error.filename}: {error.strerror}")
