"""Images of a sweep in files that all workers map: read once, corrupted once."""

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

from caster.adapt.reading import THREADS, fit
from caster.errors import CasterError
from caster.io.decode import ImageArray
from caster.io.files import replacing
from caster.io.images import Images
from caster.io.labels import encode, unique_labels
from caster.models.preprocessing import Preprocessing
from caster_bench.data.corruptions import corrupt
from caster_bench.data.digits import open_data
from caster_bench.data.streams import Condition
from caster_bench.data.streams.orders import generator
from caster_bench.engine.run_context import RunContext

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
Codes = NDArray[np.int64]  # (N,) places in the classes
AT_ONCE = 256  # images decoded before they are written


@dataclass(frozen=True)
class Kept:
    """Images in a file, fitted to what a model takes, and what they are."""

    name: str
    sha256: str  # of the images as they were read, before any fitting, and of their labels
    n: int
    classes: int
    path: Path

    def pixels(self) -> Pixels:
        """The images, mapped."""
        mapped: Pixels = np.load(self.path, mmap_mode="r")
        return mapped

    def codes(self) -> Codes:
        """The class of every image."""
        codes: Codes = np.load(_labels_of(self.path))
        return codes


def keep(
    context: RunContext, source: str, limit: int | None, preprocessing: Preprocessing, shuffle: bool
) -> Kept:
    """Read labelled images once, and keep them fitted; those of `limit` are a fixed choice.

    `shuffle` is for a source: a method that asks for some of it must not get one class.
    """
    images = open_data(source, context.data_root)
    codes, n_classes = classes_of(images)
    rows = generator(0, "pictures", len(codes)).permutation(len(codes))[:limit]
    rows = rows if shuffle else np.sort(rows)
    sizes = (preprocessing.resize, preprocessing.interpolation, preprocessing.crop)
    key = _key(images.name, images.sha256, len(rows), shuffle, sizes)
    path, note = context.images / f"{key}.npy", context.images / f"{key}.json"
    if not (path.exists() and note.exists() and _labels_of(path).exists()):
        context.images.mkdir(parents=True, exist_ok=True)
        sha256 = _write(path, images, rows, codes[rows], preprocessing)
        with replacing(_labels_of(path)) as temporary, temporary.open("wb") as file:
            np.save(file, codes[rows])
        with replacing(note) as temporary:
            temporary.write_text(json.dumps({"sha256": sha256}))
    sha256 = json.loads(note.read_text())["sha256"]
    return Kept(images.name, sha256, len(rows), n_classes, path)


def classes_of(images: Images) -> tuple[Codes, int]:
    """The class of every image as a place among the classes, and how many of those there are."""
    assert images.labels is not None  # they were opened as labelled ones
    classes = unique_labels(images.labels) if images.classes is None else images.classes
    return encode(images.labels, classes), len(classes)


def under(context: RunContext, kept: Kept, condition: Condition | None, seed: int) -> Pixels:
    """The images under a condition, mapped; made now unless a process made them before."""
    if condition is None:
        return kept.pixels()
    path = corrupted_path(context, kept.path, condition, seed)
    if not path.exists():
        pixels = corrupt(kept.pixels(), condition.corruption, condition.severity, seed)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, pixels)
    mapped: Pixels = np.load(path, mmap_mode="r")
    return mapped


def corrupted_path(context: RunContext, fitted: Path, condition: Condition, seed: int) -> Path:
    """Where images under a condition are."""
    name = f"{condition.corruption}-{condition.severity}-{seed}"
    return context.images / f"{fitted.stem}-{name}.npy"


def _write(
    path: Path,
    images: Images,
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
        for at, image in enumerate(_read(images, rows)):
            digest.update(f"{image.shape}".encode())
            digest.update(np.ascontiguousarray(image).data)
            fitted = fit(image, preprocessing, images, int(rows[at]))
            if size is None:
                size = fitted.shape
                shape = (len(rows), *size)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(file, header)
            if fitted.shape != size:
                raise CasterError(
                    f"images of {images.name} differ in size after preprocessing "
                    f"({fitted.shape[:2]} and {size[:2]}): state a resize in the preprocessing"
                )
            file.write(fitted.astype(np.uint8, copy=False).tobytes())
    return digest.hexdigest()


def _read(images: Images, rows: Sequence[int] | NDArray[np.int64]) -> Iterator[ImageArray]:
    """Images in this order, decoded by several threads a little ahead."""
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(rows), AT_ONCE):
            chosen = [int(row) for row in rows[start : start + AT_ONCE]]
            yield from threads.map(images.read, chosen)


def _labels_of(path: Path) -> Path:
    return path.with_suffix(".labels.npy")


def _key(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]
