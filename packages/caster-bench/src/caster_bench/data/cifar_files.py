"""CIFAR-10 and CIFAR-100, in the two versions of their publisher that need no MATLAB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.decode import ImageArray
from caster.io.image_arrays import ArrayImages
from caster.io.labels import as_labels
from caster_bench.data.plain_pickle import read_plain_pickle

PIXELS = 3 * 32 * 32  # a row: all red, then all green, then all blue

Batch = tuple[NDArray[np.uint8], NDArray[Any]]  # (n, PIXELS), (n,)


def open_python_version(name: str, folder: Path, files: Sequence[str]) -> ArrayImages:
    """The pickles of cifar-10-batches-py and cifar-100-python, read without unpickling.

    The last of the files names the classes, the others hold images.
    """
    *batches, meta = (folder / file for file in files)
    names = _value(meta, read_plain_pickle(meta), "fine_label_names", "label_names")
    if not isinstance(names, list) or not all(isinstance(n, str | bytes) for n in names):
        raise CasterError(f"{meta} is damaged: the names of the classes are no list of names")
    classes = [n if isinstance(n, str) else n.decode("latin-1") for n in names]
    return _assembled(name, batches, meta, [_pickled(path) for path in batches], classes)


def open_binary_version(
    name: str,
    folder: Path,
    files: Sequence[str],
    labels: int,  # bytes before a row; the last is the label, of CIFAR-100 the fine one
) -> ArrayImages:
    """The records of cifar-10-batches-bin and cifar-100-binary.

    The last of the files names the classes, the others hold images.
    """
    *batches, meta = (folder / file for file in files)
    try:
        classes = meta.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise CasterError(f"cannot read {meta}: {reason}") from None
    return _assembled(name, batches, meta, [_records(path, labels) for path in batches], classes)


def _pickled(path: Path) -> Batch:
    content = read_plain_pickle(path)
    pixels = _value(path, content, "data")
    labels = _value(path, content, "fine_labels", "labels")
    numbers = isinstance(labels, list) and all(isinstance(label, int) for label in labels)
    rows = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
    if not numbers or not rows or pixels.shape != (len(labels), PIXELS):
        raise CasterError(f"{path} is damaged: it must hold {PIXELS} pixels for every label")
    return pixels, np.asarray(labels)


def _value(path: Path, content: Any, *keys: str) -> Any:
    """The value of the first key there is; Python 2 wrote keys as bytes."""
    for key in keys:
        for spelling in (key, key.encode()):
            if isinstance(content, dict) and spelling in content:
                return content[spelling]
    raise CasterError(f"{path} is damaged: it holds no `{keys[-1]}`")


def _records(path: Path, labels: int) -> Batch:
    try:
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        records = content.reshape(-1, labels + PIXELS)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CasterError(
            f"{path} is truncated or damaged: it is no number of records of {labels + PIXELS} bytes"
        ) from None
    return records[:, labels:], records[:, labels - 1]


def _assembled(
    name: str, files: list[Path], meta: Path, batches: list[Batch], classes: list[str]
) -> ArrayImages:
    for path, (_, labels) in zip(files, batches, strict=True):
        if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(classes):
            raise CasterError(f"{path} is damaged: a label is none of the {len(classes)} classes")
    rows = tuple(row for pixels, _ in batches for row in pixels)
    names = tuple(
        f"{path.name}[{i}]"
        for path, (pixels, _) in zip(files, batches, strict=True)
        for i in range(len(pixels))
    )

    def image(index: int) -> ImageArray:
        return np.ascontiguousarray(rows[index].reshape(3, 32, 32).transpose(1, 2, 0))

    ordered = as_labels(classes)
    labels = ordered[np.concatenate([labels for _, labels in batches])]
    return ArrayImages(name, (*files, meta), names, labels, ordered, image)
