"""Make a corrupted copy of labelled images, as CIFAR-C and ImageNet-C are published."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.image_batches import ImageBatch, read_batches, resize
from caster.core.threads import one_blas_thread
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.appendable_array import AppendableArray
from caster.io.files import file_digest
from caster.io.image_files import FileImages
from caster.io.images import Images
from caster.io.labels import encode
from caster.models.preprocessing import Preprocessing
from caster_bench.data.corrupted_writer import (
    SCRATCH,
    ImageFolder,
    LabelFile,
    Manifest,
    Output,
    output_folder,
    outputs,
    versions,
)
from caster_bench.data.corruptions import CORRUPTIONS, chunks, corrupt
from caster_bench.data.corruptions.constants import (
    TINY_SIDE,
    as_integer,
    check_corruption,
    constants_for,
)
from caster_bench.data.corruptions.digital import require_pillow
from caster_bench.data.corruptions.textures import photographs, textures_for
from caster_bench.data.worker_processes import run_in_order
from caster_bench.sweeps.spec import SEVERITIES

READING, CHECKING, CORRUPTING = "reading images", "checking existing files", "corrupting"
BATCH = 256  # images read at once
CHUNK_VALUES = 2**22  # values per task: about a second of work
JPEG_QUALITY = 85  # of ImageNet-C's files
LONGEST_NAME = 255  # bytes, on most file systems
DRAWN = "textures drawn by caster"
NEED_PILLOW = frozenset(("pixelate", "jpeg_compression"))
PIXELS = {"range": 255.0, "mean": (0.0,) * 3, "std": (1.0,) * 3, "layout": "NHWC", "dtype": "uint8"}
UNCHANGED = Preprocessing(**PIXELS)  # type: ignore[arg-type]
# As in https://github.com/hendrycks/robustness, ImageNet-C/create_c/make_imagenet_c.py (commit
# e0377d4), by torchvision's Resize and CenterCrop.
IMAGENET = Preprocessing(
    **PIXELS,  # type: ignore[arg-type]
    resize=256,
    interpolation="bilinear",
    crop=(224, 224),
)

Result = NDArray[np.uint8] | list[bytes]  # (n, H, W, 3), or JPEG files


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    images: int
    made: int  # corruptions times severities
    existing: int  # of them, from earlier runs
    size: int  # bytes of all outputs
    layout: str


def corrupt_images(
    images: Images,
    out: Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    textures: Path | None = None,  # a folder of photographs, for frost
    workers: int = 1,
    progress: Progress = silent,
) -> Summary:
    """Write a corrupted set, or resume one with the same settings.

    Arrays become CIFAR-C's files, image files ImageNet-C's folders. The bytes do not depend on
    the number of workers, nor on where an earlier run was interrupted.
    """
    plan = Plan.checked(corruptions, severities, seed, textures)
    if as_integer("workers", workers) < 1:
        raise CasterError(f"workers is {workers}: it must be at least 1")
    layout = SetLayout.of(images)
    with output_folder(out, images), read_source(images, out, layout, progress) as source:
        settings = {
            "versions": versions(),
            "layout": layout.name,
            "source": {"sha256": source.sha256, "shape": source.shape, "fitted": source.fitted},
            "seed": plan.seed,
            "severities": plan.severities,
        }
        notes = {"begun_from": images.name, "classes": layout.classes}
        manifest = Manifest.open(out, settings, notes)
        for name in plan.corruptions:
            manifest.set_constants(name, plan.constants(name, source))
        wanted = outputs(out, plan.corruptions, plan.severities, source.shape, layout.paths)
        missing = _missing(wanted, manifest, progress)
        if layout.labels is not None:
            LabelFile(out, layout.labels, plan.severities).ensure(manifest)
        made = _make(plan, source, manifest, missing, workers, progress)
        size = sum(manifest.finished(output.name)["bytes"] for output in wanted)
    total = len(plan.corruptions) * len(plan.severities)
    return Summary(len(images), made, total - made, size, layout.name)


@dataclass(frozen=True)
class Plan:
    """What to make."""

    corruptions: Sequence[str]
    severities: Sequence[int]
    seed: int
    textures: Path | None

    @classmethod
    def checked(
        cls,
        corruptions: Sequence[str],
        severities: Sequence[int],
        seed: int,
        textures: Path | None,
    ) -> Plan:
        """Remove duplicates, sort severities, and check that all requirements are met."""
        names = list(dict.fromkeys(check_corruption(name) for name in corruptions))
        if not names or not severities:
            raise CasterError("there is nothing to make: give a corruption and a severity")
        for severity in severities:
            constants_for(names[0], severity, 1, 1)  # rejects an invalid one
        if textures is not None and "frost" not in names:
            raise CasterError("textures are for frost, which is not among the corruptions")
        absolute = None if textures is None else textures.absolute()
        if absolute is not None:
            photographs(str(absolute))  # rejects a folder without any
        if not NEED_PILLOW.isdisjoint(names):
            require_pillow()
        return cls(names, sorted({int(s) for s in severities}), as_integer("seed", seed), absolute)

    def constants(self, corruption: str, source: SourceImages) -> dict[str, Any]:
        """Return all that its images depend on, besides pixels and seed."""
        _, height, width, _ = source.shape
        found: dict[str, Any] = {
            str(s): constants_for(corruption, s, height, width) for s in self.severities
        }
        if corruption != "frost":
            return found
        textures_for(height, width, self.textures)  # rejects small ones
        if self.textures is None:
            return {**found, "textures": DRAWN}
        names = photographs(str(self.textures))
        return {**found, "textures": {name: file_digest(self.textures / name) for name in names}}


# The source images


@dataclass(frozen=True, eq=False)
class SetLayout:
    """Order and classes of a corrupted set: numbers for arrays, class folders for image files."""

    name: str
    order: Sequence[int]  # rows
    labels: NDArray[Any] | None = None  # (N,)
    classes: Sequence[str] = ()  # names of the numbers, if any
    paths: Sequence[str] | None = None  # "class/name.JPEG", sorted

    @classmethod
    def of(cls, images: Images) -> SetLayout:
        """Choose CIFAR-C's layout for arrays, ImageNet-C's for files."""
        if images.labels is None:
            raise CasterError(f"{images.name} has no labels: a corrupted set needs them")
        if isinstance(images, FileImages):
            paths = _output_paths(images)
            order = sorted(range(len(paths)), key=paths.__getitem__)
            return cls("ImageNet-C", order, paths=sorted(paths))
        labels, classes = numbered_labels(images)
        return cls("CIFAR-C", range(len(images)), labels, classes)

    def facts(self) -> list[Any]:
        """Return what identifies it, as plain values."""
        labels = None if self.labels is None else self.labels.tolist()
        return [labels, list(self.classes), self.paths]


def numbered_labels(images: Images) -> tuple[NDArray[np.uint8 | np.int64], list[str]]:
    """Return a number for every image, and the class names if labels are not numbers already.

    Numbers are bytes if they fit, as published.

    >>> from caster.io.image_arrays import ArrayImages
    >>> cat, dog = np.array(["cat", "dog"])
    >>> labels, classes = np.array([dog, cat, dog]), np.array([cat, dog])
    >>> numbered_labels(ArrayImages("three", (), "abc", labels, classes, None))
    (array([1, 0, 1], dtype=uint8), ['cat', 'dog'])
    """
    labels, classes = images.labels, images.classes
    assert labels is not None
    assert classes is not None
    names = []
    if labels.dtype.kind not in "iu":
        labels, names = encode(labels, classes), [str(name) for name in classes.tolist()]
    byte = labels.min() >= 0 and labels.max() <= np.iinfo(np.uint8).max
    return labels.astype(np.uint8 if byte else np.int64), names


def _output_paths(images: Images) -> list[str]:
    """Name the output of every image: a folder per class, and its own name with JPEG's suffix."""
    assert images.labels is not None
    paths: dict[str, str] = {}
    for label, name in zip(images.labels.tolist(), images.names, strict=True):
        folder = str(label)
        if folder.startswith(".") or not folder or {"/", os.sep, "\0"} & set(folder):
            raise CasterError(f"the class {folder!r} of {images.name} is not a valid folder name")
        path = f"{folder}/{PurePosixPath(name).stem}.JPEG"
        if max(len(os.fsencode(part)) for part in path.split("/")) > LONGEST_NAME:
            raise CasterError(
                f"{name} would become {path}, longer than the {LONGEST_NAME} bytes of a file "
                "name: rename it"
            )
        if path in paths:
            raise CasterError(f"{paths[path]} and {name} would both become {path}: rename one")
        paths[path] = name
    return list(paths)


@dataclass(frozen=True)
class SourceImages:
    """Images of one size in one file that every worker maps."""

    pixels: Path  # .npy, uint8 (N, H, W, 3)
    shape: tuple[int, ...]
    sha256: str  # of pixels, and of labels or names: the same on any machine
    fitted: str  # description of the preprocessing, for the manifest


@contextmanager
def read_source(
    images: Images,
    out: Path,  # where the file exists during the block
    layout: SetLayout,
    progress: Progress,
) -> Iterator[SourceImages]:
    """Read all images once, so that nothing is made from a damaged set.

    Files larger than 64 pixels are resized and cropped as for ImageNet-C; smaller ones, as in
    Tiny-ImageNet, and arrays keep their size.
    """
    scratch, order = out / SCRATCH, layout.order
    first = images.read(order[0])
    large = layout.paths is not None and max(first.shape[:2]) > TINY_SIDE
    preprocessing = IMAGENET if large else UNCHANGED
    like = np.empty((0, *resize(first, preprocessing, images, order[0]).shape), dtype=np.uint8)
    shape = (len(order), *like.shape[1:])
    digest = hashlib.sha256(json.dumps([shape, *layout.facts()]).encode())
    try:
        with (
            closing(AppendableArray(scratch, like)) as array,
            closing(
                read_batches(images, preprocessing, order, BATCH, skip_unreadable=True)
            ) as batches,
        ):
            done = 0
            progress(READING, 0, len(order))
            for batch in batches:
                values = _same_size(batch, images, shape)
                array.append(values)
                digest.update(values.data)
                done += len(values)
                progress(READING, done, len(order))
            array.sync(len(order))
        fitted = "short side 256 (bilinear), centre crop 224 x 224" if large else "as they are"
        yield SourceImages(scratch.absolute(), shape, digest.hexdigest(), fitted)
    finally:
        scratch.unlink(missing_ok=True)


def _same_size(
    batch: ImageBatch, images: Images, shape: tuple[int, ...]
) -> NDArray[np.uint8]:  # (n, H, W, 3)
    for reason in batch.unreadable.values():
        raise CasterError(f"{reason}: repair or remove it")
    for group in batch.groups:
        _, height, width, _ = group.prepared.shape
        if (height, width) != shape[1:3]:
            name = images.names[batch.rows[group.positions[0]]]
            raise CasterError(
                f"{name} has {width} x {height} pixels and the first image {shape[2]} x "
                f"{shape[1]}: images of up to {TINY_SIDE} pixels must all have the same size"
            )
    (group,) = batch.groups
    return group.prepared


# The corrupted images


@dataclass(frozen=True)
class Chunk:
    """Images to corrupt in one task, in any process."""

    pixels: Path  # .npy
    start: int
    stop: int
    corruption: str
    severity: int
    seed: int
    textures: str | None  # for frost
    as_files: bool

    def make(self) -> Result:
        """Corrupt the images."""
        images = np.load(self.pixels, mmap_mode="r")[self.start : self.stop]
        options = {"textures": self.textures} if self.corruption == "frost" else {}
        with one_blas_thread():
            made = corrupt(images, self.corruption, self.severity, self.seed, **options)
        return [_jpeg(image) for image in made] if self.as_files else made


def _jpeg(
    image: NDArray[np.uint8],  # (H, W, 3)
) -> bytes:
    """Encode an image as ImageNet-C's reference does: quality 85, optimised tables."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return file.getvalue()


def _missing(
    wanted: Sequence[Output], manifest: Manifest, progress: Progress
) -> list[tuple[Output, Sequence[int]]]:
    """List incomplete outputs, and the severities that they lack."""
    missing = []
    for done, output in enumerate(wanted, 1):
        if severities := output.missing(manifest):
            missing.append((output, severities))
        progress(CHECKING, done, len(wanted))
    return missing


def _make(
    plan: Plan,
    source: SourceImages,
    manifest: Manifest,
    missing: Sequence[tuple[Output, Sequence[int]]],
    workers: int,
    progress: Progress,
) -> int:
    """Write the missing severities; return their number."""
    pieces = [(output, severity) for output, severities in missing for severity in severities]
    count, parts = source.shape[0], list(chunks(source.shape, CHUNK_VALUES))
    textures = None if plan.textures is None else str(plan.textures)
    tasks = (
        Chunk(
            source.pixels,
            part.start,
            part.stop,
            output.corruption,
            severity,
            plan.seed,
            textures,
            as_files=isinstance(output, ImageFolder),
        ).make
        for output, severity in pieces
        for part in parts
    )
    total = count * len(plan.corruptions) * len(plan.severities)
    existing = total - count * len(pieces)

    def reported(results: Iterator[Result]) -> Iterator[Result]:
        done = existing
        for result in results:
            done += len(result)
            progress(CORRUPTING, done, total)
            yield result

    progress(CORRUPTING, existing, total)
    manifest.save()
    with closing(run_in_order(tasks, workers)) as made:
        results = reported(made)
        for output, _ in missing:
            output.write(manifest, lambda: islice(results, len(parts)))
    return len(pieces)
