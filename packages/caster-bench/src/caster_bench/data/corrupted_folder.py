"""What `caster corrupt` wrote: a folder of any name, with any corruptions and severities."""

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
from caster.io.decode import ImageArray
from caster.io.files import read_regular
from caster.io.image_arrays import ArrayImages
from caster.io.image_folder import FileImages, open_folder
from caster.io.labels import Labels, as_labels, unique_labels
from caster_bench.data.corruptions import CORRUPTIONS
from caster_bench.data.sets.corrupted import check_arrays, mapped
from caster_bench.data.sets.layout import some
from caster_bench.data.sets.names import SEVERITIES

log = logging.getLogger("caster")

MANIFEST = "manifest.json"
LAYOUTS = ("CIFAR-C", "ImageNet-C")
WRITTEN = re.compile(r"(\w+?)(?:[-/]([1-5]))?(?:\.npy)?")  # fog.npy, fog-3.npy, fog/3

Condition = tuple[str, int]  # corruption, severity


def is_corrupted(folder: Path) -> bool:
    """Whether `caster corrupt` wrote this folder."""
    return _manifest(folder).get("layout") in LAYOUTS


def open_corrupted_folder(folder: Path, split: str = "") -> ArrayImages | FileImages:
    """All images of a corrupted set, or those of a corruption ("fog") or condition ("fog-3").

    A line is logged that says which conditions they are, unless one is named.
    """
    manifest = _manifest(folder)
    there = _conditions(manifest)
    chosen = [one for one in there if split in ("", one[0], _spelt(one))]
    if not chosen:
        held = ", ".join(map(_spelt, there)) or "no finished corruption"
        raise CasterError(f"{folder} holds no {split or 'images'}: it holds {held}")
    one = _spelt(chosen[0])
    name = f"{folder}:{split or one}" if split or len(chosen) == 1 else str(folder)
    if manifest["layout"] == "ImageNet-C":
        found: ArrayImages | FileImages = _files(folder, name, chosen)
    else:
        found = _arrays(folder, name, chosen, manifest)
    if split != one:
        fewer = f", together; for one of them give {folder}:{one}" if len(chosen) > 1 else ""
        what = some([_spelt(condition) for condition in chosen])
        log.warning("%s has %s images: %s%s", folder, f"{len(found):,}", what, fewer)
    return found


def _spelt(condition: Condition) -> str:
    return f"{condition[0]}-{condition[1]}"


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / MANIFEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("written"), dict) else {}


def _conditions(manifest: dict[str, Any]) -> list[Condition]:
    """Those that are finished, by corruption and severity."""
    found = set()
    for name in manifest["written"]:
        match = WRITTEN.fullmatch(name)
        if match and match[1] in CORRUPTIONS:
            found |= {(match[1], s) for s in ([int(match[2])] if match[2] else SEVERITIES)}
    return sorted(found)


def _files(folder: Path, name: str, conditions: Sequence[Condition]) -> FileImages:
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


def _arrays(
    folder: Path, name: str, conditions: Sequence[Condition], manifest: dict[str, Any]
) -> ArrayImages:
    parts, names, labels = [], [], []
    labels_file = folder / "labels.npy"
    files = {labels_file: mapped(labels_file)}
    for corruption, severity in conditions:
        whole = folder / f"{corruption}.npy"
        file = whole if os.path.isfile(whole) else folder / f"{corruption}-{severity}.npy"
        pixels = files.setdefault(file, mapped(file))
        numbers = check_arrays(file, pixels, labels_file, files[labels_file])
        size = len(pixels) // (len(SEVERITIES) if file == whole else 1)
        start = size * (severity - 1) if file == whole else 0
        parts.append(pixels[start : start + size])
        names += [f"{file.name}[{i}]" for i in range(start, start + size)]
        labels.append(numbers[start : start + size])

    size = len(parts[0])

    def image(index: int) -> ImageArray:
        return np.array(parts[index // size][index % size])

    known, classes = _named(np.concatenate(labels), manifest.get("classes"), labels_file)
    share = ",".join(map(_spelt, conditions))
    return ArrayImages(name, tuple(files), names, known, classes, image, share=share)


def _named(numbers: Labels, classes: Any, file: Path) -> tuple[Labels, Labels]:
    """Labels and classes: names where the manifest has them, else the numbers."""
    if not classes:
        return numbers, unique_labels(numbers)
    ordered = as_labels(classes)
    if numbers.min() < 0 or numbers.max() >= len(ordered):
        raise CasterError(f"{file}: a label is none of the {len(ordered)} classes of {MANIFEST}")
    return ordered[numbers], ordered
