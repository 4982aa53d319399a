"""Open images from any source: a folder, files, a list, an .npz file or a published set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.image_arrays import open_npz
from caster.io.image_files import (
    FileImages,
    ImageArray,
    Images,
    UnreadableImage,
    formats,
    open_files,
    open_folder,
    open_list,
)

__all__ = ["ImageArray", "Images", "UnreadableImage", "open_images"]


def open_images(
    source: str | Path | Sequence[Path],
    root: Path | None = None,
    labelled: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Images:
    """Open a folder, an .npz file, a list of files, or a named set below `root`.

    A folder with one folder per class is labelled, and so is an .npz file with `labels`. A folder
    written by `caster corrupt` gives all its corruptions, or those named after a colon, as in
    "out:fog" and "out:fog-3".

    `root` overrides the environment variable CASTER_DATA; `labelled` rejects a source without
    labels. An image over the `limits` is an UnreadableImage. Limits above Pillow's raise
    `PIL.Image.MAX_IMAGE_PIXELS` too.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    ...     np.savez(Path(folder, "two.npz"), images=images, labels=["dog", "cat"])
    ...     two = open_images(Path(folder, "two.npz"), labelled=True)
    >>> two.names, two.classes.tolist(), two.read(0).shape
    (('two.npz[0]', 'two.npz[1]'), ['cat', 'dog'], (8, 8, 3))
    """
    images = _open(source, root, labelled, limits)
    if isinstance(images, FileImages):
        images = replace(images, limits=limits)
    if labelled and images.labels is None:
        raise CasterError(
            f"{images.name} has no labels: give a folder with one folder per class, an .npz file "
            "with `labels`, or a split of a published set (caster data list)"
        )
    return images


def _open(
    source: str | Path | Sequence[Path], root: Path | None, labelled: bool, limits: Limits
) -> Images:
    if not source:
        raise CasterError(f"no images are named: {_kinds()}")
    if not isinstance(source, str | Path):
        if len(source) != 1:
            return open_files(source)
        (source,) = source
    path = Path(source)
    for plugin in entry_points(group="caster.images"):  # caster-bench opens published sets
        found: Images | None = plugin.load()(str(source), root)
        if found is not None:
            return found
    if os.path.isdir(path):
        return open_folder(path, all_classes=labelled)
    if os.path.isfile(path):
        return _open_file(path, limits)
    raise CasterError(f"{source} does not exist: {_kinds()}")


def _open_file(path: Path, limits: Limits) -> Images:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return open_npz(path, limits)
    if suffix == ".txt":
        return open_list(path)
    if suffix == ".npy":
        raise CasterError(
            f"{path} is one array of a set: name what `caster corrupt` wrote as "
            f"{path.parent}:{path.stem}, or save `images` and `labels` as .npz"
        )
    if suffix in formats():
        return open_files([path])
    raise CasterError(f"{path} is of an unknown kind: {_kinds()}")


def _kinds() -> str:
    return (
        "DATA is a folder of images or of class folders, an .npz file, a .txt list of images, "
        "image files or, with caster-bench installed, a split of a published set such as "
        "cifar10:test, or a folder that `caster corrupt` wrote (OUT or OUT:fog-3)"
    )
