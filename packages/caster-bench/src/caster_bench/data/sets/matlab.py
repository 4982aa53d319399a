"""What two publishers keep in files of MATLAB, read through SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.image_folder import FileImages
from caster_bench.data.sets.layout import Part
from caster_bench.data.sets.lists import Listed, assembled, read_lines

FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"


def open_flowers(part: Part, classes: Sequence[str]) -> FileImages:
    """Flowers-102: the numbers of a split's images, and the class of every image from 1."""
    labels_file, splits_file = (part.folder / file for file in part.files)
    labels = _numbers(labels_file, "labels")  # (N,)
    chosen = _numbers(splits_file, FLOWER_SPLITS[part.split])
    if not len(chosen) or chosen.min() < 1 or chosen.max() > len(labels):
        raise CasterError(f"{splits_file} is damaged: it names images that have no label")
    if labels.min() < 1 or labels.max() > len(classes):
        raise CasterError(f"{labels_file} is damaged: a label is not from 1 to {len(classes)}")
    images = [(f"jpg/image_{i:05d}.jpg", classes[labels[i - 1] - 1]) for i in chosen.tolist()]
    return assembled(part, images, classes)


def read_devkit(folder: Path) -> Listed:
    """The images of ImageNet's val and their classes, from the development kit of ILSVRC 2012.

    Line i of its ground truth is the kit's own number of image i's class; `meta.mat` says which
    WordNet identifier that is. The kit's numbers are not in the order of the identifiers.
    """
    meta, truth = folder / "data/meta.mat", folder / GROUND_TRUTH
    content, lines = _loaded(meta), read_lines(truth)
    try:
        synsets = np.atleast_1d(content["synsets"])
        wnids = {
            int(number): str(wnid)
            for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
        }
        labels = [wnids[int(line)] for line in lines]
    except (KeyError, IndexError, TypeError, ValueError):
        raise CasterError(f"{folder} is damaged: its {meta.name} and {truth.name} differ") from None
    return [(f"ILSVRC2012_val_{i:08d}.JPEG", label) for i, label in enumerate(labels, start=1)]


def _numbers(path: Path, name: str) -> NDArray[Any]:
    content = _loaded(path)
    if name not in content:
        raise CasterError(f"{path} is damaged: it holds no `{name}`")
    values = np.atleast_1d(content[name])
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values):
        raise CasterError(f"{path} is damaged: `{name}` is no list of whole numbers")
    return values


def _loaded(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        return dict(loadmat(path, squeeze_me=True))
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # its readers raise whatever damaged bytes lead them to
        raise CasterError(f"{path} is damaged, or no file of MATLAB 4 to 7.2") from None
