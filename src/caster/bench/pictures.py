"""Pictures of a sweep in files that all workers map: read once, corrupted once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.bench.digits import open_data
from caster.bench.place import Place
from caster.data import Pictures, corrupt
from caster.data.streams import Condition
from caster.data.streams.orders import generator
from caster.errors import CasterError
from caster.files import replacing
from caster.frozen.preprocessing import Picture, Preprocessing
from caster.jobs.reading import THREADS, fit
from caster.labels import encode, unique_labels

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
Codes = NDArray[np.int64]  # (N,) places in the classes
AT_ONCE = 256  # pictures decoded before they are written


@dataclass(frozen=True)
class Kept:
    """Pictures in a file, fitted to what a model takes, and what they are."""

    name: str
    sha256: str  # of the pictures as they were read, before any fitting, and of their labels
    n: int
    classes: int
    path: Path

    def pixels(self) -> Pixels:
        """The pictures, mapped."""
        mapped: Pixels = np.load(self.path, mmap_mode="r")
        return mapped

    def codes(self) -> Codes:
        """The class of every picture."""
        codes: Codes = np.load(_labels_of(self.path))
        return codes


def keep(
    place: Place, source: str, limit: int | None, preprocessing: Preprocessing, shuffle: bool
) -> Kept:
    """Read labelled pictures once, and keep them fitted; those of `limit` are a fixed choice.

    `shuffle` is for a source: a method that asks for some of it must not get one class.
    """
    pictures = open_data(source, place.data_root)
    codes, n_classes = classes_of(pictures)
    rows = generator(0, "pictures", len(codes)).permutation(len(codes))[:limit]
    rows = rows if shuffle else np.sort(rows)
    sizes = (preprocessing.resize, preprocessing.interpolation, preprocessing.crop)
    key = _key(pictures.name, pictures.sha256, len(rows), shuffle, sizes)
    path, note = place.pictures / f"{key}.npy", place.pictures / f"{key}.json"
    if not (path.exists() and note.exists() and _labels_of(path).exists()):
        place.pictures.mkdir(parents=True, exist_ok=True)
        sha256 = _write(path, pictures, rows, codes[rows], preprocessing)
        with replacing(_labels_of(path)) as temporary, temporary.open("wb") as file:
            np.save(file, codes[rows])
        with replacing(note) as temporary:
            temporary.write_text(json.dumps({"sha256": sha256}))
    sha256 = json.loads(note.read_text())["sha256"]
    return Kept(pictures.name, sha256, len(rows), n_classes, path)


def classes_of(pictures: Pictures) -> tuple[Codes, int]:
    """The class of every picture as a place among the classes, and how many of those there are."""
    assert pictures.labels is not None  # they were opened as labelled ones
    classes = unique_labels(pictures.labels) if pictures.classes is None else pictures.classes
    return encode(pictures.labels, classes), len(classes)


def under(place: Place, kept: Kept, condition: Condition | None, seed: int) -> Pixels:
    """The pictures under a condition, mapped; made now unless a process made them before."""
    if condition is None:
        return kept.pixels()
    path = corrupted_path(place, kept.path, condition, seed)
    if not path.exists():
        pixels = corrupt(kept.pixels(), condition.corruption, condition.severity, seed)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, pixels)
    mapped: Pixels = np.load(path, mmap_mode="r")
    return mapped


def corrupted_path(place: Place, fitted: Path, condition: Condition, seed: int) -> Path:
    """Where pictures under a condition are."""
    name = f"{condition.corruption}-{condition.severity}-{seed}"
    return place.pictures / f"{fitted.stem}-{name}.npy"


def _write(
    path: Path,
    pictures: Pictures,
    rows: NDArray[np.int64],
    codes: Codes,
    preprocessing: Preprocessing,
) -> str:
    """Decode and fit images into a file; the digest of what was read.

    By plain writes: on a full disk those raise an error, where a memory map would end the process.
    """
    digest = hashlib.sha256(json.dumps([codes.tolist()]).encode())
    with replacing(path) as temporary, temporary.open("wb") as file:
        size: tuple[int, ...] | None = None
        for at, picture in enumerate(_read(pictures, rows)):
            digest.update(f"{picture.shape}".encode())
            digest.update(np.ascontiguousarray(picture).data)
            fitted = fit(picture, preprocessing, pictures, int(rows[at]))
            if size is None:
                size = fitted.shape
                shape = (len(rows), *size)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(file, header)
            if fitted.shape != size:
                raise CasterError(
                    f"pictures of {pictures.name} differ in size, and the preprocessing leaves "
                    f"them so: {fitted.shape[:2]} and {size[:2]}: state a resize"
                )
            file.write(fitted.astype(np.uint8, copy=False).tobytes())
    return digest.hexdigest()


def _read(pictures: Pictures, rows: Sequence[int] | NDArray[np.int64]) -> Iterator[Picture]:
    """Pictures in this order, decoded by several threads a little ahead."""
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(rows), AT_ONCE):
            chosen = [int(row) for row in rows[start : start + AT_ONCE]]
            yield from threads.map(pictures.read, chosen)


def _labels_of(path: Path) -> Path:
    return path.with_suffix(".labels.npy")


def _key(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]
