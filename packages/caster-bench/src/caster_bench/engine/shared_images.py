"""Image files that all workers of a run map: decoded once, corrupted once, deleted when done."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from caster.adapt.image_batches import THREADS, resize
from caster.errors import CasterError
from caster.io.files import replacing
from caster.io.image_files import ImageArray
from caster.io.images import Images
from caster.io.labels import encode, unique_labels
from caster.models.preprocessing import Preprocessing
from caster_bench.data import open_data
from caster_bench.data.corruptions import corrupt
from caster_bench.data.streams import Condition, generator
from caster_bench.engine.run_context import RunContext
from caster_bench.records.schema import Admission
from caster_bench.sweeps import Data, Spec

Pixels = NDArray[np.uint8]  # (N, H, W, 3)
ClassIndices = NDArray[np.int64]  # (N,)
Group = tuple[Spec, ...]  # cells of one stream
READ_AHEAD = 256  # images decoded before they are written


@dataclass(frozen=True)
class StoredImages:
    """Labelled images in a file, resized and cropped for a model."""

    name: str
    sha256: str  # of the images as read, before resizing, and of their labels
    n: int
    classes: int
    path: Path

    def pixels(self) -> Pixels:
        """Map the images."""
        mapped: Pixels = np.load(self.path, mmap_mode="r")
        return mapped

    def labels(self) -> ClassIndices:
        """Return the class of every image."""
        labels: ClassIndices = np.load(_labels_path(self.path))
        return labels


def source_images(context: RunContext, data: Data, preprocessing: Preprocessing) -> StoredImages:
    """Store source images in random order: the first of them must not be of a single class."""
    return _stored(context, data.source, data.source_limit, preprocessing, shuffle=True)


def target_images(context: RunContext, data: Data, preprocessing: Preprocessing) -> StoredImages:
    """Store target images in the order of their files."""
    return _stored(context, data.target, data.target_limit, preprocessing, shuffle=False)


def admitted_target(context: RunContext, admission: Admission) -> StoredImages:
    """Return the target images of an admitted backbone, without loading its model."""
    assert admission.preprocessing is not None  # it was admitted
    preprocessing = Preprocessing(**admission.preprocessing)
    return target_images(context, context.data[admission.data], preprocessing)


def _stored(
    context: RunContext, source: str, limit: int | None, preprocessing: Preprocessing, shuffle: bool
) -> StoredImages:
    """Decode, resize and store labelled images unless a process did so before.

    `limit` picks a fixed random subset.
    """
    images = open_data(source, context.data_root)
    labels, n_classes = classes_of(images)
    rows = generator(0, "pictures", len(labels)).permutation(len(labels))[:limit]
    rows = rows if shuffle else np.sort(rows)
    sizes = (preprocessing.resize, preprocessing.interpolation, preprocessing.crop)
    key = _key(images.name, images.sha256, len(rows), shuffle, sizes)
    path, note = context.images / f"{key}.npy", context.images / f"{key}.json"
    if not (path.exists() and note.exists() and _labels_path(path).exists()):
        context.images.mkdir(parents=True, exist_ok=True)
        sha256 = _write(path, images, rows, labels[rows], preprocessing)
        with replacing(_labels_path(path)) as temporary, temporary.open("wb") as file:
            np.save(file, labels[rows])
        with replacing(note) as temporary:
            temporary.write_text(json.dumps({"sha256": sha256}))
    sha256 = json.loads(note.read_text())["sha256"]
    return StoredImages(images.name, sha256, len(rows), n_classes, path)


def classes_of(images: Images) -> tuple[ClassIndices, int]:
    """Return the class index of every image, and the number of classes."""
    assert images.labels is not None  # they were opened as labelled images
    classes = unique_labels(images.labels) if images.classes is None else images.classes
    return encode(images.labels, classes), len(classes)


def corrupted(
    context: RunContext, stored: StoredImages, condition: Condition | None, seed: int
) -> Pixels:
    """Map the images under a condition; corrupt them now unless a process did so before."""
    if condition is None:
        return stored.pixels()
    path = corrupted_path(context, stored.path, condition, seed)
    if not path.exists():
        pixels = corrupt(stored.pixels(), condition.corruption, condition.severity, seed)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, pixels)
    mapped: Pixels = np.load(path, mmap_mode="r")
    return mapped


def corrupted_path(context: RunContext, stored: Path, condition: Condition, seed: int) -> Path:
    """Path of the images under a condition."""
    name = f"{condition.corruption}-{condition.severity}-{seed}"
    return context.images / f"{stored.stem}-{name}.npy"


class CorruptionPrefetcher:
    """Schedule corrupted images: made ahead of the workers, deleted after the last group."""

    def __init__(
        self,
        context: RunContext,
        admission: Callable[[Spec], Admission | None],
        groups: Iterable[Group],
        ahead: bool,  # whether there are helpers to make images
    ) -> None:
        self.context, self.admission, self.ahead = context, admission, ahead
        self.targets: dict[tuple[str, str], StoredImages] = {}
        self.in_progress: set[Path] = set()
        self.users = Counter(path for group in groups for path in self.paths(group))

    def paths(self, group: Group) -> list[Path]:
        """Return the files of the images that a group needs."""
        spec = group[0]
        admission = self.admission(spec)
        if admission is None or not admission.admitted:
            return []
        pair = (spec.backbone, spec.data)
        if pair not in self.targets:
            self.targets[pair] = admitted_target(self.context, admission)
        stored = self.targets[pair].path
        conditions = (Condition(*c) for c in spec.conditions)
        return [corrupted_path(self.context, stored, c, spec.seed) for c in conditions]

    def next_ready(self, queue: deque[Group]) -> Group | None:
        """Take the first group off the queue that does not wait for a helper."""
        for group in queue:
            if not self.in_progress.intersection(self.paths(group)):
                queue.remove(group)
                return group
        return None

    def to_prefetch(self, queue: deque[Group], free: int) -> list[Group]:
        """Choose at most `free` groups whose images helpers make now.

        Timed cells are left out: nothing may run next to them.
        """
        chosen: list[Group] = []
        for group in list(queue)[: 2 * free + 2] if self.ahead else ():
            paths = self.paths(group)
            idle = not group[0].alone and not self.in_progress.intersection(paths)
            if len(chosen) < free and idle and not all(path.exists() for path in paths):
                self.in_progress.update(paths)
                chosen.append(group)
        return chosen

    def prefetched(self, group: Group) -> None:
        """Note that a helper has finished a group's images."""
        self.in_progress.difference_update(self.paths(group))

    def release(self, group: Group) -> None:
        """Delete a finished group's images unless another group needs them."""
        for path in self.paths(group):
            self.users[path] -= 1
            if self.users[path] <= 0:
                path.unlink(missing_ok=True)


def _write(
    path: Path,
    images: Images,
    rows: NDArray[np.int64],
    labels: ClassIndices,
    preprocessing: Preprocessing,
) -> str:
    """Decode, resize and write images; return the digest of what was read.

    Plain writes raise an error on a full disk, where a memory map would end the process.
    """
    digest = hashlib.sha256(json.dumps([labels.tolist()]).encode())
    with replacing(path) as temporary, temporary.open("wb") as file:
        size: tuple[int, ...] | None = None
        for row, image in zip(rows, _read(images, rows), strict=True):
            digest.update(f"{image.shape}".encode())
            digest.update(np.ascontiguousarray(image).data)
            fitted = resize(image, preprocessing, images, int(row))
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
    """Yield images in this order; threads decode a little ahead."""
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(rows), READ_AHEAD):
            chosen = [int(row) for row in rows[start : start + READ_AHEAD]]
            yield from threads.map(images.read, chosen)


def _labels_path(path: Path) -> Path:
    return path.with_suffix(".labels.npy")


def _key(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]
