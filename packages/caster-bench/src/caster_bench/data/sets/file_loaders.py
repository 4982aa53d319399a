"""Loaders of sets with one file per image: class folders, and lists by their publishers."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.image_files import FileImages, images_below, list_folder
from caster.io.labels import as_labels, encode
from caster_bench.data.sets.dataset import MissingFiles, SplitFiles, first_few, missing_files

DEVKIT, SOLUTION = "ILSVRC2012_devkit_t12", "LOC_val_solution.csv"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}

Listed = list[tuple[str, str]]  # image paths relative to the set's folder, and their classes


# Class folders


def open_class_folders(
    split: SplitFiles,
    folders: Sequence[str],
    labels: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> FileImages:
    """Open images in one folder per class, below the first required file.

    `folders` are the required folders, in the order of the classes; `labels` their classes, if not
    their names; `classes` those of a model, if more than the labels.
    """
    where = split.files[0]
    present = {
        name
        for name in list_folder(split.folder / where)
        if not name.startswith(".") and os.path.isdir(split.folder / where / name)
    }
    if unknown := sorted(present.difference(folders)):
        raise CasterError(
            f"{split.folder / where} has the folder {first_few(unknown)}, which is not a class of "
            f"{split.name}: give the folder itself to use its own classes"
        )
    found = [
        images_below(split.folder, _join(where, name)) if name in present else []
        for name in folders
    ]
    empty = [
        _join(where, name, "*") for name, images in zip(folders, found, strict=True) if not images
    ]
    if empty:
        raise MissingFiles(split.name, [(split.folder, empty)])
    known = as_labels(labels or folders)
    return FileImages(
        split.name,
        split.folder.absolute(),
        tuple(image for images in found for image in images),
        np.repeat(known, [len(images) for images in found]),
        known if classes is None else as_labels(classes),
    )


def _join(*parts: str) -> str:
    return str(PurePosixPath(*parts))


# Text lists


def open_pets(split: SplitFiles) -> FileImages:
    """Open Oxford-IIIT Pets: lines of an image and its class number."""
    (listing,) = split.files
    lines = [line for line in _read_lines(split.folder / listing) if not line.startswith("#")]
    try:
        rows = [(int(number), image) for image, number, *_ in map(str.split, lines)]
    except ValueError:
        raise _damaged(split, listing) from None
    # File names are the breed and a number.
    images = [(f"images/{image}.jpg", image.rpartition("_")[0]) for _, image in rows]
    numbered = sorted({(row[0], breed) for row, (_, breed) in zip(rows, images, strict=True)})
    classes = [breed for _, breed in numbered]
    if not rows or [number for number, _ in numbered] != [*range(1, len(set(classes)) + 1)]:
        raise _damaged(split, listing)
    return _open_listed(split, images, classes)


def open_class_lines(split: SplitFiles) -> FileImages:
    """Open DTD or Food-101: lines of class/image, in DTD with the suffix."""
    listing = split.files[0]
    images: Listed = []
    for line in _read_lines(split.folder / listing):
        label, slash, name = line.partition("/")
        if not (label and slash and name) or "/" in name or ".." in (label, name):
            raise _damaged(split, listing)
        suffix = "" if name.endswith(".jpg") else ".jpg"
        images.append((f"images/{line}{suffix}", label))
    if not images:
        raise _damaged(split, listing)
    return _open_listed(split, images, sorted({label for _, label in images}))


def open_tiny_imagenet(split: SplitFiles, classes: Sequence[str]) -> FileImages:
    """Open Tiny-ImageNet: train in class folders, val in one folder with a list.

    A line of the list has the image, its class and its box, separated by tabs.
    """
    if split.split != "val":
        return open_class_folders(split, classes)
    (listing,) = split.files
    images: Listed = []
    for line in _read_lines(split.folder / listing):
        image, tab, rest = line.partition("\t")
        if not tab or "/" in image:
            raise _damaged(split, listing)
        images.append((f"val/images/{image}", rest.partition("\t")[0]))
    return _open_listed(split, images, classes)


# ImageNet


def open_imagenet(
    split: SplitFiles,
    classes: Sequence[str],
    labels_folder: str = ".",  # relative to the split's folder
) -> FileImages:
    """Open class folders; or val in one folder, as published, with a list of labels.

    The list is Kaggle's LOC_val_solution.csv or in the development kit.
    """
    (where,) = split.files
    if not any(name.endswith(".JPEG") for name in list_folder(split.folder / where)):
        return open_class_folders(split, classes)
    images = _ground_truth(split, labels_folder)
    return _open_listed(split, [(f"{where}{image}", label) for image, label in images], classes)


def _ground_truth(split: SplitFiles, labels_folder: str) -> Listed:
    for folder in (split.folder / labels_folder, split.folder):
        if os.path.isfile(folder / SOLUTION):
            return _read_solution(folder / SOLUTION)
        if os.path.isdir(folder / DEVKIT):
            return _read_devkit(folder / DEVKIT)
    raise CasterError(
        f"{split.folder / split.files[0]} has images and no class folders: put {SOLUTION} (from "
        f"Kaggle) or {DEVKIT} (from image-net.org) into {split.folder}, or sort them into folders"
    )


def _read_solution(path: Path) -> Listed:
    """Read Kaggle's list: an image, then its class and box."""
    rows = list(csv.reader(_read_lines(path)))
    if not rows or rows[0] != ["ImageId", "PredictionString"]:
        raise CasterError(f"{path} is damaged: its columns are not ImageId and PredictionString")
    try:
        images = [(image, boxes.split()[0]) for image, boxes in rows[1:]]
    except (IndexError, ValueError):
        raise CasterError(f"{path} is damaged: a line is not an image and its class") from None
    return sorted((f"{image}.JPEG", label) for image, label in images)


def _read_devkit(folder: Path) -> Listed:
    """Read the development kit of ILSVRC 2012.

    Line i of its ground truth is the kit's own class number of image i, and `meta.mat` maps that to
    a WordNet identifier. The numbers are not in the order of the identifiers.
    """
    meta, truth = folder / "data/meta.mat", folder / GROUND_TRUTH
    content, lines = _load_matlab(meta), _read_lines(truth)
    try:
        synsets = np.atleast_1d(content["synsets"])
        wnids = {
            int(number): str(wnid)
            for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
        }
        labels = [wnids[int(line)] for line in lines]
    except (KeyError, IndexError, TypeError, ValueError):
        raise CasterError(
            f"{folder} is damaged: its {meta.name} and {truth.name} do not match"
        ) from None
    return [(f"ILSVRC2012_val_{i:08d}.JPEG", label) for i, label in enumerate(labels, start=1)]


# Flowers-102


def open_flowers(split: SplitFiles, classes: Sequence[str]) -> FileImages:
    """Open Flowers-102: image numbers of a split, and the class of every image from 1."""
    labels_file, splits_file = (split.folder / file for file in split.files)
    labels = _matlab_integers(labels_file, "labels")  # (N,)
    chosen = _matlab_integers(splits_file, FLOWER_SPLITS[split.split])
    if not len(chosen) or chosen.min() < 1 or chosen.max() > len(labels):
        raise CasterError(f"{splits_file} is damaged: it lists images that have no label")
    if labels.min() < 1 or labels.max() > len(classes):
        raise CasterError(f"{labels_file} is damaged: a label is not from 1 to {len(classes)}")
    images = [(f"jpg/image_{i:05d}.jpg", classes[labels[i - 1] - 1]) for i in chosen.tolist()]
    return _open_listed(split, images, classes)


def _matlab_integers(path: Path, name: str) -> NDArray[Any]:
    content = _load_matlab(path)
    if name not in content:
        raise CasterError(f"{path} is damaged: it has no `{name}`")
    values = np.atleast_1d(content[name])
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values):
        raise CasterError(f"{path} is damaged: `{name}` is not a list of integers")
    return values


def _load_matlab(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        return dict(loadmat(path, squeeze_me=True))
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # its readers raise anything on damaged bytes
        raise CasterError(f"{path} is damaged, or not a file of MATLAB 4 to 7.2") from None


# Shared by all lists


def _open_listed(split: SplitFiles, images: Listed, classes: Sequence[str]) -> FileImages:
    names = tuple(image for image, _ in images)
    if missing := missing_files(split.folder, names):
        raise MissingFiles(split.name, [(split.folder, missing)])
    ordered = as_labels(classes)
    try:
        indices = encode(as_labels([label for _, label in images]), ordered)
    except CasterError as error:
        raise CasterError(f"{split.name} in {split.folder} is damaged: {error}") from None
    labels = ordered[np.asarray(indices)]
    return FileImages(split.name, split.folder.absolute(), names, labels, ordered)


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CasterError(f"{path} is damaged: it is not UTF-8 text") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _damaged(split: SplitFiles, listing: str) -> CasterError:
    return CasterError(f"{split.folder / listing} is damaged: it does not list {split.name}")
