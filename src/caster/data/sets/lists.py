"""Pictures that a text file of the publisher lists, and how each publisher writes it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from caster.data.folder import FilePictures
from caster.data.sets.layout import Part, require
from caster.errors import CasterError
from caster.labels import as_labels, encode

Listed = list[tuple[str, str]]  # a picture relative to the set's folder, and its class


def open_pets(part: Part) -> FilePictures:
    """Oxford-IIIT Pets: an image, and the number of its class, a line."""
    (listing,) = part.files
    lines = [line for line in read_lines(part.folder / listing) if not line.startswith("#")]
    try:
        rows = [(int(number), image) for image, number, *_ in map(str.split, lines)]
    except ValueError:
        raise damaged(part, listing) from None
    # An image is named after its breed, and counted.
    pictures = [(f"images/{image}.jpg", image.rpartition("_")[0]) for _, image in rows]
    numbered = sorted({(row[0], breed) for row, (_, breed) in zip(rows, pictures, strict=True)})
    classes = [breed for _, breed in numbered]
    if not rows or [number for number, _ in numbered] != [*range(1, len(set(classes)) + 1)]:
        raise damaged(part, listing)
    return assembled(part, pictures, classes)


def open_class_lines(part: Part) -> FilePictures:
    """DTD and Food-101: a line is the class, a slash and the picture, in DTD with its suffix."""
    listing = part.files[0]
    pictures: Listed = []
    for line in read_lines(part.folder / listing):
        label, slash, name = line.partition("/")
        if not (label and slash and name) or "/" in name or ".." in (label, name):
            raise damaged(part, listing)
        suffix = "" if name.endswith(".jpg") else ".jpg"
        pictures.append((f"images/{line}{suffix}", label))
    if not pictures:
        raise damaged(part, listing)
    classes = sorted({label for _, label in pictures})
    return assembled(part, pictures, classes)


def open_tiny_validation(part: Part, classes: Sequence[str]) -> FilePictures:
    """Tiny-ImageNet's val: a picture, its class and its box, parted by tabs, a line."""
    (listing,) = part.files
    pictures: Listed = []
    for line in read_lines(part.folder / listing):
        image, tab, rest = line.partition("\t")
        if not tab or "/" in image:
            raise damaged(part, listing)
        pictures.append((f"val/images/{image}", rest.partition("\t")[0]))
    return assembled(part, pictures, classes)


def read_solution(path: Path) -> Listed:
    """LOC_val_solution.csv of Kaggle's ImageNet: a picture, then its class and box."""
    rows = list(csv.reader(read_lines(path)))
    if not rows or rows[0] != ["ImageId", "PredictionString"]:
        raise CasterError(f"{path} is damaged: its columns are not ImageId and PredictionString")
    try:
        listed = [(image, boxes.split()[0]) for image, boxes in rows[1:]]
    except (IndexError, ValueError):
        raise CasterError(f"{path} is damaged: a line is not a picture and its class") from None
    return sorted((f"{image}.JPEG", label) for image, label in listed)


def assembled(part: Part, pictures: Listed, classes: Sequence[str]) -> FilePictures:
    """The pictures of a list, each of which must be there."""
    require(part, [image for image, _ in pictures])
    ordered = as_labels(classes)
    try:
        indices = encode(as_labels([label for _, label in pictures]), ordered)
    except CasterError as error:
        raise CasterError(f"{part.name} in {part.folder} is damaged: {error}") from None
    names = tuple(image for image, _ in pictures)
    return FilePictures(
        part.name, part.folder.absolute(), names, ordered[np.asarray(indices)], ordered
    )


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CasterError(f"{path} is damaged: it is not text in UTF-8") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def damaged(part: Part, listing: str) -> CasterError:
    """For a list that says something else."""
    return CasterError(f"{part.folder / listing} is damaged: {part.name} cannot be told from it")
