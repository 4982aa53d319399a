"""What a corrupted set consists of, in the layouts that CIFAR-C and ImageNet-C are published in.

A target is written under a name that ends in `.part`, noted in the manifest when it is whole, and
renamed then: wherever a run ends, the next one finds the one name or the other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import file_digest, move_into_place
from caster.io.growing import Damaged, GrowingArray, read_grown
from caster_bench.data.corrupted.manifest import Facts, Manifest

ALL = 5  # severities

Results = Callable[[], Iterable[Any]]  # the next severity's, chunk by chunk


@dataclass(frozen=True)
class ArrayFile:
    """`fog.npy`: the images at one severity after the other."""

    out: Path
    corruption: str
    severities: Sequence[int]
    shape: tuple[int, ...]  # (N, H, W, 3), of one severity
    name: str

    def left(self, manifest: Manifest) -> Sequence[int]:
        """The severities after those whose checksum is right."""
        if _is_whole(self, manifest):
            return ()
        begun = manifest.begun(self.name)
        if begun is None:
            return self.severities
        try:
            read_grown(_part(self), begun["rows"], begun["checksum"])
        except Damaged:
            manifest.forget(self.name)
            return self.severities
        return self.severities[begun["rows"] // self.shape[0] :]

    def write(self, manifest: Manifest, results: Results) -> None:
        """Append what is left; after every severity it is on the disk for good."""
        begun = manifest.begun(self.name) or {"rows": 0, "checksum": None}
        rows, like = begun["rows"], np.empty((0, *self.shape[1:]), dtype=np.uint8)
        with closing(GrowingArray(_part(self), like, rows, begun["checksum"])) as array:
            total = len(self.severities) * self.shape[0]
            while rows < total:
                for values in results():
                    array.append(values)
                rows += self.shape[0]
                array.sync(rows)
                if rows < total:  # with the last one it is whole, which is noted below
                    manifest.begin(self.name, {"rows": rows, "checksum": array.checksum})
        _put(self, manifest, {"sha256": file_digest(_part(self))})


@dataclass(frozen=True)
class ImageArrayFolder:
    """`fog/3`: a folder a class, a JPEG file an image."""

    out: Path
    corruption: str
    severity: int
    places: Sequence[str]  # "class/name.JPEG", sorted

    @property
    def name(self) -> str:
        """Where it goes."""
        return f"{self.corruption}/{self.severity}"

    def left(self, manifest: Manifest) -> Sequence[int]:
        """Its severity, unless it is whole."""
        return () if _is_whole(self, manifest) else (self.severity,)

    def write(self, manifest: Manifest, results: Results) -> None:
        """Write all files anew.

        The digest is that of the listing which `sha256sum` prints of the sorted names.
        """
        part, listing = _part(self), hashlib.sha256()
        if part.exists():
            shutil.rmtree(part)
        for folder in {os.path.dirname(place) for place in self.places}:
            (part / folder).mkdir(parents=True)
        contents = (content for files in results() for content in files)
        for place, content in zip(self.places, contents, strict=True):
            (part / place).write_bytes(content)
            listing.update(hashlib.sha256(content).hexdigest().encode())
            listing.update(b"  " + os.fsencode(place) + b"\n")
        _put(self, manifest, {"sha256": listing.hexdigest(), "files": len(self.places)})


@dataclass(frozen=True, eq=False)
class LabelFile:
    """`labels.npy`: the labels once for every severity in an array file."""

    out: Path
    labels: NDArray[Any]  # (N,)
    severities: Sequence[int]
    name: str = "labels.npy"

    def ensure(self, manifest: Manifest) -> None:
        """Write it, unless it is whole."""
        if not _is_whole(self, manifest):
            copies = ALL if len(self.severities) == ALL else 1
            with _part(self).open("wb") as file:
                np.save(file, np.tile(self.labels, copies))
            _put(self, manifest, {"sha256": file_digest(_part(self))})


Target = ArrayFile | ImageArrayFolder


def targets(
    out: Path,
    corruptions: Sequence[str],
    severities: Sequence[int],
    shape: tuple[int, ...],
    places: Sequence[str] | None,  # None for arrays
) -> list[Target]:
    """All that a set consists of, besides its labels.

    CIFAR-C's files hold five severities, and its readers take a fifth of a file for one: where
    there are fewer, each has a file of its own, with a name that no such reader looks for.

    >>> [t.name for t in targets(Path(), ["fog"], (1, 2, 3, 4, 5), (9, 32, 32, 3), None)]
    ['fog.npy']
    >>> [t.name for t in targets(Path(), ["fog"], (3, 5), (9, 32, 32, 3), None)]
    ['fog-3.npy', 'fog-5.npy']
    """
    if places is not None:
        return [ImageArrayFolder(out, c, s, places) for c in corruptions for s in severities]
    if len(severities) == ALL:
        return [ArrayFile(out, c, severities, shape, f"{c}.npy") for c in corruptions]
    return [ArrayFile(out, c, (s,), shape, f"{c}-{s}.npy") for c in corruptions for s in severities]


def _part(target: Target | LabelFile) -> Path:
    return target.out / f"{target.name}.part"


def _put(target: Target | LabelFile, manifest: Manifest, facts: Facts) -> None:
    manifest.finish(target.name, {**facts, "bytes": _measured(_part(target))[1]})
    move_into_place(_part(target), target.out / target.name)


def _is_whole(target: Target | LabelFile, manifest: Manifest) -> bool:
    """Whether it is there as it was noted.

    It may still bear its first name, if the run that finished it ended right then.
    """
    noted, path, part = manifest.whole(target.name), target.out / target.name, _part(target)
    if noted is None:
        if path.exists():
            raise CasterError(f"{path} is there and not of this set: move it away")
        return False
    if path.exists():
        if _is_as(noted, path):
            return True
        raise CasterError(f"{path} was changed since it was written: remove it to make it anew")
    if part.exists() and _is_as(noted, part):
        move_into_place(part, path)
        return True
    manifest.forget(target.name)
    return False


def _is_as(noted: Facts, path: Path) -> bool:
    """A file by its digest; a folder by its files and bytes, as reading it would take minutes."""
    if _measured(path) != (noted.get("files", 1), noted["bytes"]):
        return False
    return path.is_dir() or file_digest(path) == noted["sha256"]


def _measured(path: Path) -> tuple[int, int]:
    """Files and bytes."""
    if path.is_file():
        return 1, path.stat().st_size
    inside = [p for folder, _, names in os.walk(path) for p in (Path(folder, n) for n in names)]
    return len(inside), sum(p.stat().st_size for p in inside)
