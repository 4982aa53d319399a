"""Class folders whose names, and so their order, are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from caster.errors import CasterError
from caster.io.image_folder import FileImages, images_below, listed
from caster.io.labels import as_labels
from caster_bench.data.sets.layout import MissingFiles, Part, some


def open_class_folders(
    part: Part,
    folders: Sequence[str],
    labels: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> FileImages:
    """The images below a folder with one folder a class; the first needed file is that folder.

    `folders` are those there must be, in their order; `labels` what they stand for, unless that is
    their names; `classes` what the model knows, where it is more than the labels.
    """
    where = part.files[0]
    inside = listed(part.folder / where)
    there = {
        name
        for name in inside
        if not name.startswith(".") and os.path.isdir(part.folder / where / name)
    }
    if strange := sorted(there.difference(folders)):
        raise CasterError(
            f"{part.folder / where} holds the folder {some(strange)}: that is no class of "
            f"{part.name}; give the folder itself to take its classes as they are"
        )
    found = [_images(part, where, name) if name in there else [] for name in folders]
    gap = [_join(where, name, "*") for name, held in zip(folders, found, strict=True) if not held]
    if gap:
        raise MissingFiles(part.name, [(part.folder, gap)])
    known = as_labels(labels or folders)
    return FileImages(
        part.name,
        part.folder.absolute(),
        tuple(image for held in found for image in held),
        np.repeat(known, [len(held) for held in found]),
        known if classes is None else as_labels(classes),
    )


def _images(part: Part, where: str, name: str) -> list[str]:
    return images_below(part.folder, _join(where, name))


def _join(*parts: str) -> str:
    return str(PurePosixPath(*parts))
