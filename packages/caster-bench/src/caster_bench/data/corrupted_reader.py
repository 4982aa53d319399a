"""Read what `caster corrupt` wrote: a folder of any name, corruptions and severities."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from caster.errors import CasterError
from caster.io.files import read_regular
from caster.io.image_arrays import ArrayImages
from caster.io.image_files import FileImages, ImageArray, open_folder
from caster.io.labels import Labels, as_labels, unique_labels
from caster_bench.data.corrupted_writer import MANIFEST
from caster_bench.data.corruptions.constants import CORRUPTIONS
from caster_bench.data.sets.array_loaders import check_arrays, map_npy
from caster_bench.data.sets.dataset import first_few
from caster_bench.sweeps.spec import SEVERITIES

log = logging.getLogger("caster")

LAYOUTS = ("CIFAR-C", "ImageNet-C")
OUTPUT = re.compile(r"(\w+?)(?:[-/]([1-5]))?(?:\.npy)?")  # fog.npy, fog-3.npy, fog/3

Condition = tuple[str, int]  # corruption, severity


def is_corrupted_set(folder: Path) -> bool:
    """Whether `caster corrupt` wrote this folder."""
    return _manifest(folder).get("layout") in LAYOUTS


def open_corrupted_set(folder: Path, split: str = "") -> ArrayImages | FileImages:
    """Open all images of a corrupted set, of a corruption ("fog") or of a condition ("fog-3").

    Unless it is one condition, log which conditions they have.
    """
    manifest = _manifest(folder)
    present = _conditions(manifest)
    chosen = [one for one in present if split in ("", one[0], _name(one))]
    if not chosen:
        contents = ", ".join(map(_name, present)) or "no finished corruption"
        raise CasterError(f"{folder} has no {split or 'images'}: it has {contents}")
    first = _name(chosen[0])
    name = f"{folder}:{split or first}" if split or len(chosen) == 1 else str(folder)
    if manifest["layout"] == "ImageNet-C":
        found: ArrayImages | FileImages = _open_files(folder, name, chosen)
    else:
        found = _open_arrays(folder, name, chosen, manifest)
    if split != first:
        hint = f", together; for one of them give {folder}:{first}" if len(chosen) > 1 else ""
        conditions = first_few([_name(condition) for condition in chosen])
        log.warning("%s has %s images: %s%s", folder, f"{len(found):,}", conditions, hint)
    return found


def _name(condition: Condition) -> str:
    return f"{condition[0]}-{condition[1]}"


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / MANIFEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("written"), dict) else {}


def _conditions(manifest: dict[str, Any]) -> list[Condition]:
    """List finished conditions by corruption and severity."""
    found = set()
    for name in manifest["written"]:
        match = OUTPUT.fullmatch(name)
        if match and match[1] in CORRUPTIONS:
            found |= {(match[1], s) for s in ([int(match[2])] if match[2] else SEVERITIES)}
    return sorted(found)


def _open_files(folder: Path, name: str, conditions: Sequence[Condition]) -> FileImages:
    parts = [open_folder(folder / c / str(s), all_classes=True) for c, s in conditions]
    names = [
        f"{c}/{s}/{image}"
        for (c, s), part in zip(conditions, parts, strict=True)
        for image in part.names
    ]
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) < len(parts):
        raise CasterError(f"{folder} has images outside of class folders: write it again")
    return FileImages(name, folder.absolute(), names, np.concatenate(labels), parts[0].classes)


def _open_arrays(
    folder: Path, name: str, conditions: Sequence[Condition], manifest: dict[str, Any]
) -> ArrayImages:
    parts, names, labels = [], [], []
    labels_file = folder / "labels.npy"
    files = {labels_file: map_npy(labels_file)}
    for corruption, severity in conditions:
        all_severities = folder / f"{corruption}.npy"
        shared = os.path.isfile(all_severities)
        file = all_severities if shared else folder / f"{corruption}-{severity}.npy"
        pixels = files.setdefault(file, map_npy(file))
        numbers = check_arrays(file, pixels, labels_file, files[labels_file])
        size = len(pixels) // (len(SEVERITIES) if shared else 1)
        start = size * (severity - 1) if shared else 0
        parts.append(pixels[start : start + size])
        names += [f"{file.name}[{i}]" for i in range(start, start + size)]
        labels.append(numbers[start : start + size])

    size = len(parts[0])

    def image(index: int) -> ImageArray:
        return np.array(parts[index // size][index % size])

    found, classes = _with_names(np.concatenate(labels), manifest.get("classes"), labels_file)
    share = ",".join(map(_name, conditions))
    return ArrayImages(name, tuple(files), names, found, classes, image, share=share)


def _with_names(numbers: Labels, classes: Any, file: Path) -> tuple[Labels, Labels]:
    """Return labels and classes: names if the manifest has them, else the numbers."""
    if not classes:
        return numbers, unique_labels(numbers)
    ordered = as_labels(classes)
    if numbers.min() < 0 or numbers.max() >= len(ordered):
        raise CasterError(f"{file}: a label is not one of the {len(ordered)} classes of {MANIFEST}")
    return ordered[numbers], ordered
