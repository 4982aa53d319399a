"""Images that a text file of the publisher lists, and how each publisher writes it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from caster.errors import CasterError
from caster.io.image_folder import FileImages
from caster.io.labels import as_labels, encode
from caster_bench.data.sets.layout import Part, require

Listed = list[tuple[str, str]]  # an image relative to the set's folder, and its class


def open_pets(part: Part) -> FileImages:
    """Oxford-IIIT Pets: an image, and the number of its class, a line."""
    (listing,) = part.files
    lines = [line for line in read_lines(part.folder / listing) if not line.startswith("#")]
    try:
        rows = [(int(number), image) for image, number, *_ in map(str.split, lines)]
    except ValueError:
        raise damaged(part, listing) from None
    # An image is named after its breed, and counted.
    images = [(f"images/{image}.jpg", image.rpartition("_")[0]) for _, image in rows]
    numbered = sorted({(row[0], breed) for row, (_, breed) in zip(rows, images, strict=True)})
    classes = [breed for _, breed in numbered]
    if not rows or [number for number, _ in numbered] != [*range(1, len(set(classes)) + 1)]:
        raise damaged(part, listing)
    return assembled(part, images, classes)


def open_class_lines(part: Part) -> FileImages:
    """DTD and Food-101: a line is the class, a slash and the image, in DTD with its suffix."""
    listing = part.files[0]
    images: Listed = []
    for line in read_lines(part.folder / listing):
        label, slash, name = line.partition("/")
        if not (label and slash and name) or "/" in name or ".." in (label, name):
            raise damaged(part, listing)
        suffix = "" if name.endswith(".jpg") else ".jpg"
        images.append((f"images/{line}{suffix}", label))
    if not images:
        raise damaged(part, listing)
    classes = sorted({label for _, label in images})
    return assembled(part, images, classes)


def open_tiny_validation(part: Part, classes: Sequence[str]) -> FileImages:
    """Tiny-ImageNet's val: an image, its class and its box, parted by tabs, a line."""
    (listing,) = part.files
    images: Listed = []
    for line in read_lines(part.folder / listing):
        image, tab, rest = line.partition("\t")
        if not tab or "/" in image:
            raise damaged(part, listing)
        images.append((f"val/images/{image}", rest.partition("\t")[0]))
    return assembled(part, images, classes)


def read_solution(path: Path) -> Listed:
    """LOC_val_solution.csv of Kaggle's ImageNet: an image, then its class and box."""
    rows = list(csv.reader(read_lines(path)))
    if not rows or rows[0] != ["ImageId", "PredictionString"]:
        raise CasterError(f"{path} is damaged: its columns are not ImageId and PredictionString")
    try:
        listed = [(image, boxes.split()[0]) for image, boxes in rows[1:]]
    except (IndexError, ValueError):
        raise CasterError(f"{path} is damaged: a line is not an image and its class") from None
    return sorted((f"{image}.JPEG", label) for image, label in listed)


def assembled(part: Part, images: Listed, classes: Sequence[str]) -> FileImages:
    """The images of a list, each of which must be there."""
    require(part, [image for image, _ in images])
    ordered = as_labels(classes)
    try:
        indices = encode(as_labels([label for _, label in images]), ordered)
    except CasterError as error:
        raise CasterError(f"{part.name} in {part.folder} is damaged: {error}") from None
    names = tuple(image for image, _ in images)
    return FileImages(
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
