"""Image files: list them from folders or text files, and decode them to RGB with Pillow."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError, first_few
from caster.io.files import open_regular, read_regular, stat_digest
from caster.io.labels import Labels, as_labels, is_by_class

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("caster")

ImageArray = NDArray[np.uint8]  # (H, W, 3), RGB
FORMATS = {  # Pillow's format by file suffix; every build of Pillow reads these
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jfif": "JPEG",
    ".jpe": "JPEG",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pgm": "PPM",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
HEIF = (".heic", ".heif")
NAMED = 5  # skipped files listed by name


class UnreadableImage(CasterError):  # noqa: N818
    """An image that exists but cannot be decoded; the message names it and says why."""


@cache
def formats() -> Mapping[str, str]:
    """Return the formats that can be decoded here, by suffix.

    AVIF depends on how Pillow was built, HEIC on the package pillow-heif. Pillow's other formats
    are excluded: some of them start external programs.
    """
    found = dict(FORMATS)
    with suppress(ImportError):
        from PIL import features

        if "avif" in features.modules and features.check("avif"):
            found[".avif"] = "AVIF"
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
        found |= dict.fromkeys(HEIF, "HEIF")
    return found


def decode(path: Path, limits: Limits = DEFAULT_LIMITS) -> ImageArray:
    """Decode a file to uint8 (H, W, 3) RGB.

    The format is detected from the content, not the suffix, and must be one of `formats`. The
    number of pixels is checked in the header, before anything is decoded. As in torchvision and
    timm, EXIF orientation and transparency are ignored: a model sees what it was trained on.
    Pillow's warnings are passed on; if the user made them errors, such an image is unreadable.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise CasterError("reading images needs Pillow: pip install 'caster-tta[images]'") from None
    allowed = tuple(sorted(set(formats().values())))
    pillow_limit = Image.MAX_IMAGE_PIXELS  # global: raised only if the user asks for more
    if pillow_limit is not None and limits.pixels > max(pillow_limit, DEFAULT_LIMITS.pixels):
        Image.MAX_IMAGE_PIXELS = limits.pixels
    try:
        with open_regular(path) as file, Image.open(file, formats=allowed) as image:
            width, height = image.size
            limits.check("pixels", width * height, f"it has {width:,} x {height:,} pixels")
            return _rgb(image)
    except UnidentifiedImageError:
        reason = (
            f"it is empty, damaged or in a format that is not allowed ({', '.join(allowed)} are)"
        )
    except MemoryError:
        reason = "not enough memory"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = _over_pillow_limit(str(error), limits)
    except Exception as error:  # decoders raise all kinds of errors on damaged bytes
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        reason = reason or type(error).__name__
    raise UnreadableImage(f"cannot read {path}: {reason}")


def _over_pillow_limit(message: str, limits: Limits) -> str:
    """Return our message for an image that Pillow rejects, if it is over our limit too."""
    pixels = re.search(r"(\d+) pixels", message)
    try:
        limits.check("pixels", int(pixels[1]) if pixels else 0, "it is too large")
    except CasterError as error:
        return str(error)
    return message


def _rgb(image: Image) -> ImageArray:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Take the upper byte, as Pillow does for 16-bit colour; for grey it would clip to white.
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, np.newaxis], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of type {image.mode} have no fixed range: save 8 or 16 bits")
    # It does not affect colours, and Pillow warns if it cannot convert it.
    image.info.pop("transparency", None)
    return np.asarray(image.convert("RGB"))


class Images(ABC):
    """A sequence of images, read on access.

    Attributes
    ----------
    name : display name, a path or "cifar10:test".
    names : one per image, a path as the user would recognise it or "images.npz[17]".
    labels : (N,), one per image; None if unknown.
    classes : (C,), the labels in the assumed order of the model's outputs: sorted folder names, the
        publisher's order for a named set, the `classes` of an .npz file or its sorted labels.
    limits : bounds on the size of one image, decoded and resized.
    skipped : files of a folder that are not images.
    """

    name: str
    names: Sequence[str]
    labels: Labels | None
    classes: Labels | None
    limits: Limits
    skipped: Sequence[str]

    @cached_property
    def by_class(self) -> bool:
        """Whether the images are sorted by class: batches in this order have few classes."""
        return is_by_class(self.labels)

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Digest of names, sizes and times of files, and of labels.

        Computed without reading an image, so that a second fit on the same images reads none.
        """

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def read(self, index: int) -> ImageArray:
        """Return one image, or raise UnreadableImage; thread-safe.

        A damaged file of many images raises a plain CasterError: none of them can be read.
        """


@dataclass(frozen=True, eq=False)
class FileImages(Images):
    """One file per image, decoded on access.

    >>> images = FileImages("images", Path("/images"), ("cat/1.jpg",), np.array(["cat"]))
    >>> len(images), images.names[0], images.classes
    (1, 'cat/1.jpg', None)
    """

    name: str
    root: Path  # the names are relative to it
    names: Sequence[str]
    labels: Labels | None = None
    classes: Labels | None = None
    limits: Limits = DEFAULT_LIMITS
    skipped: Sequence[str] = ()  # files that are not images, and hidden folders with a slash

    @cached_property
    def sha256(self) -> str:
        """Digest of the path, size and times of every file, in this order, and of the labels."""
        files = ((name, self.root / name) for name in self.names)
        extra = (x if x is None else x.tolist() for x in (self.labels, self.classes))
        return stat_digest(files, *extra)

    def part(self, rows: NDArray[np.intp]) -> FileImages:
        """Select some of the images, with a digest of their own."""
        labels = None if self.labels is None else self.labels[rows]
        names = tuple(self.names[row] for row in rows)
        return replace(self, names=names, labels=labels, skipped=())

    def read(self, index: int) -> ImageArray:
        """Decode one image."""
        return decode(self.root / self.names[index], self.limits)


def open_folder(folder: Path, all_classes: bool = False) -> FileImages:
    """Open a folder of images, or of class folders in the order of torchvision's ImageFolder.

    `all_classes` rejects a class folder without images. Otherwise it remains among the classes,
    because the model has an output for it.
    """
    inside = sorted(list_folder(folder))
    folders = {name for name in inside if os.path.isdir(folder / name)}
    classes = [name for name in inside if name in folders and not name.startswith(".")]
    images = [name for name in inside if _is_image(name) and name not in folders]
    others = set(inside).difference(classes, images)
    skipped = [f"{name}/" if name in folders else name for name in inside if name in others]
    by_class = {name: images_below(folder, name, skipped) for name in classes}
    filled = [name for name in classes if by_class[name]]
    if images and filled:
        raise CasterError(
            f"{folder} has both images ({images[0]}) and class folders ({filled[0]}): put every "
            "image in a class folder, or none"
        )
    if images:
        return FileImages(str(folder), folder.absolute(), tuple(images), skipped=skipped)
    if not filled:
        raise CasterError(
            f"{folder} has no image, and no folder with one (an image ends in "
            f"{', '.join(sorted(formats()))})"
            + (f"; {describe_skipped(skipped)}" if skipped else "")
        )
    empty = [name for name in classes if not by_class[name]]
    if empty and all_classes:
        raise CasterError(f"no image in the class folder {', '.join(empty)} of {folder}")
    if all_classes and all(_only_in_subfolders(by_class[name]) for name in filled):
        log.warning(
            "every class folder of %s (%s) has its images in subfolders only: if those are the "
            "classes, give one of them instead, such as %s",
            folder,
            first_few(filled),
            folder / filled[0],
        )
    labels = np.repeat(np.asarray(classes), [len(by_class[name]) for name in classes])
    names = tuple(image for name in classes for image in by_class[name])
    return FileImages(
        str(folder), folder.absolute(), names, labels, as_labels(classes), skipped=skipped
    )


def _only_in_subfolders(images: Sequence[str]) -> bool:
    """Whether the images of a class folder are in two or more subfolders, and none beside them."""
    nested = all(image.count("/") > 1 for image in images)
    return nested and len({image.split("/")[1] for image in images}) > 1


def describe_skipped(skipped: Sequence[str]) -> str:
    """Say how many files were skipped, and which.

    >>> describe_skipped(["a.mp4", "notes.txt"])
    'skipped 2 files that are not images: a.mp4, notes.txt'
    """
    files = f"{len(skipped):,} files that are not images"
    files = "1 file that is not an image" if len(skipped) == 1 else files
    more = f" and {len(skipped) - NAMED:,} more" if len(skipped) > NAMED else ""
    heif = [name for name in skipped if os.path.splitext(name)[1].lower() in HEIF]
    remedy = f"; to read {heif[0]}: pip install pillow-heif" if heif else ""
    return f"skipped {files}: {', '.join(skipped[:NAMED])}{more}{remedy}"


def open_list(path: Path) -> FileImages:
    """Open a text file with one image path per line, relative to the file's own folder."""
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
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
    """Open image files, in this order."""
    for path in paths:
        if os.path.isdir(path):
            raise CasterError(f"{path} is a folder: give only that folder, or only image files")
        if not os.path.isfile(path):
            raise CasterError(f"there is no file {path}")
    names = tuple(str(path) for path in paths)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FileImages(names[0] + more, Path.cwd(), names)


def images_below(root: Path, name: str, skipped: list[str] | None = None) -> list[str]:
    """List the images anywhere below a folder, folder by folder, relative to the root.

    Appends other files, and hidden folders with a slash, to `skipped`.
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


def list_folder(folder: Path) -> list[str]:
    """List the names in a folder."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise _unreadable_folder(error) from None


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    def fail(error: OSError) -> None:  # `os.walk` would silently skip a folder it cannot read
        raise _unreadable_folder(error)

    seen = set()
    for where, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link to a parent folder would be followed without end
            raise CasterError(f"{where} leads to {real} a second time: remove that link")
        seen.add(real)
        hidden = [f"{name}/" for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield where, sorted(names + hidden)


def _unreadable_folder(error: OSError) -> CasterError:
    return CasterError(f"cannot read the folder {error.filename}: {error.strerror}")
