"""The feature cache: model outputs on disk, so that no image passes through a model twice.

An entry is a folder named by a digest of what determines its content: model, preprocessing and
images. Rows are appended in the order of the images. Until an entry is complete its folder ends in
`.partial`, and an interrupted run resumes there. Its manifest states the progress and a checksum
of every array: an entry that a crash or a bad disk damaged is computed again, never trusted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.arrays import to_numpy
from caster.core.channels import MEASURED, ChannelMoments, Site
from caster.core.class_moments import ClassChannelMoments
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.io.appendable_array import AppendableArray, DamagedError, read_checked
from caster.io.files import LockedError, locked, move_into_place, replacing
from caster.io.layer_arrays import Layers, packed, unpacked

FORMAT = "2"
MANIFEST = "note.json"
KEYS = {"description": "of"}  # named differently in the file
REQUIRED = {"rows", "features"}  # arrays of any entry that has rows
ENTRY_NAME = re.compile(r"([0-9a-f]{64})(\.partial)?")
ENTRY_FILE = re.compile(r"(rows|features|logits)\.npy|(\.note\.json\..*\.tmp|note\.json)")
SAVE_EVERY = 5.0  # seconds of work that a crash may cost
BUSY = (
    "another caster is reading these images with this model: wait until it is done, or name "
    "another folder with {argument}"
)

Arrays = Mapping[str, NDArray[Any]]

log = logging.getLogger(__name__)


def default_store() -> Path:
    """Return the user's cache folder for caster."""
    from platformdirs import user_cache_path

    try:
        return user_cache_path("caster", appauthor=False)
    except RuntimeError:  # the user of a container may have no home folder
        raise CasterError(
            "there is no home folder to cache features in: name a folder with {argument}",
            argument="cache",
        ) from None


def entry_key(model_sha256: str, preprocessing_sha256: str, images_sha256: str) -> str:
    """Return the name of the entry for a model, its preprocessing and the images."""
    parts = (FORMAT, model_sha256, preprocessing_sha256, images_sha256)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# Manifests


@dataclass(frozen=True)
class Manifest:
    """The state of an entry.

    >>> Manifest(seen=3, kept=2, unreadable={"1": "cannot read cat.jpg: it is empty"}).kept
    2
    """

    seen: int = 0  # images so far, readable or not
    kept: int = 0  # rows of every array
    unreadable: Mapping[str, str] = field(default_factory=dict)  # error message by image index
    checksums: Mapping[str, int] = field(default_factory=dict)  # by array
    layers: Layers | None = None  # moments over the rows; None: not measured on all of them
    description: str = ""  # model and images, for `caster cache`


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    content = {
        KEYS.get(entry.name, entry.name): getattr(manifest, entry.name)
        for entry in fields(manifest)
    }
    if manifest.layers is not None:
        sites = [
            [astuple(site), moments.count, *_moments_to_json(moments)]
            for site, moments in manifest.layers.items()
        ]
        content["layers"] = {"of": MEASURED, "sites": sites, "checksum": _checksum(sites)}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def _read_manifest(folder: Path) -> Manifest:
    """Read a manifest; raise DamagedError if it is missing or inconsistent."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        content["layers"] = _layers_from_json(content.get("layers"))
        for name, key in KEYS.items():
            if key in content:
                content[name] = content.pop(key)
        manifest = Manifest(**content)
        unreadable = {int(row) for row in manifest.unreadable}
        arrays = manifest.checksums.keys()
        consistent = (
            (arrays >= REQUIRED if manifest.kept else not arrays)
            and manifest.kept >= 0
            and manifest.seen == manifest.kept + len(unreadable)
            and isinstance(manifest.description, str)
        )
    except (FileNotFoundError, AttributeError, KeyError, TypeError, ValueError):
        raise DamagedError(folder) from None
    if not consistent:
        raise DamagedError(folder)
    return manifest


def _read_entry(folder: Path) -> tuple[Manifest, dict[str, NDArray[Any]]]:
    """Read a manifest and map its arrays; raise DamagedError if a checksum differs."""
    manifest = _read_manifest(folder)
    return manifest, {
        name: read_checked(_array_file(folder, name), manifest.kept, checksum)
        for name, checksum in manifest.checksums.items()
    }


def _array_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _layers_from_json(content: dict[str, Any] | None) -> Layers | None:
    """Return the moments of layers; None if another version measured them differently."""
    if content is None or content.get("of") != MEASURED:
        return None
    sites: list[list[Any]] = content["sites"]
    if _checksum(sites) != content["checksum"]:
        raise ValueError("layers")
    return {Site(*site): _moments_from_json(*moments) for site, *moments in sites}


def _moments_from_json(
    count: float, mean: str, variance: str, triangle: str | None, classes: list[str] | None
) -> ChannelMoments:
    moments = ChannelMoments(count, _from_base64(mean), _from_base64(variance))
    if triangle is not None:
        covariance = unpacked(_from_base64(triangle), len(moments.mean))
        moments = replace(moments, covariance=covariance)
    if classes is not None:
        counts, *rows = map(_from_base64, classes)
        by_class = ClassChannelMoments(counts, *(row.reshape(len(counts), -1) for row in rows))
        moments = replace(moments, classes=by_class)
    return moments


def _moments_to_json(moments: ChannelMoments) -> list[Any]:
    """Return mean, variance, the covariance's upper triangle and the classes, None if missing."""
    covariance, classes = moments.covariance, moments.classes
    return [
        _to_base64(moments.mean),
        _to_base64(moments.variance),
        None if covariance is None else _to_base64(packed(to_numpy(covariance))),
        None
        if classes is None
        else [_to_base64(part) for part in (classes.counts, classes.means, classes.variances)],
    ]


def _to_base64(array: Array) -> str:
    return b64encode(to_numpy(array).astype("<f8").tobytes()).decode()


def _from_base64(text: str) -> NDArray[np.float64]:
    return np.frombuffer(b64decode(text, validate=True), dtype="<f8").astype(np.float64)


def _checksum(sites: list[list[Any]]) -> int:
    """Checksum the JSON text, in which arrays are the bytes of float64."""
    return zlib.crc32(json.dumps(sites).encode())


# Reading and writing entries


@dataclass(frozen=True, eq=False)
class Entry:
    """The outputs of one model on one set of images."""

    manifest: Manifest
    arrays: Arrays  # `rows`, `features` and maybe `logits`, memory-mapped


def find_entry(root: Path, key: str, total: int) -> Entry | None:
    """Return the entry if it is complete and intact."""
    with _disk_errors(root):
        try:
            manifest, arrays = _read_entry(root / key)
        except DamagedError:  # or missing
            return None
    return Entry(manifest, arrays) if manifest.seen == total else None


@contextmanager
def write_entry(
    root: Path,
    key: str,
    total: int,
    outdated: Callable[[Manifest], bool] = lambda manifest: False,
    description: str = "",
) -> Iterator[EntryWriter]:
    """Yield a writer that resumes where an earlier run stopped; the block completes the entry.

    After an error or Ctrl-C in the block, the rows so far remain for the next run. A complete but
    `outdated` entry remains until it is replaced.
    """
    with ExitStack() as stack:
        with _disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_entry(root, key))
        complete = find_entry(root, key, total)
        if complete is not None and not outdated(complete.manifest):
            raise CasterError(BUSY, argument="cache")  # completed since the caller looked for it
        writer = EntryWriter(root / f"{key}.partial", description)
        with _disk_errors(root):
            if complete is None and (root / key).exists():
                shutil.rmtree(root / key)
                _warn_damaged(root / key)
            writer.resume()
        try:
            yield writer
        finally:
            with _disk_errors(root):
                writer.close()
        with _disk_errors(root):
            if complete is not None:
                shutil.rmtree(root / key)
            move_into_place(writer.folder, root / key)


def lock_entry(root: Path, key: str) -> AbstractContextManager[None]:
    """Lock an entry, complete or partial, against other processes."""
    return locked(root / f"{key}.lock", BUSY, argument="cache")


class EntryWriter:
    """Append batches to a partial entry, and save its manifest every few seconds."""

    def __init__(self, folder: Path, description: str = "") -> None:
        self.folder = folder
        self.manifest = Manifest(description=description)
        self._arrays: dict[str, AppendableArray] = {}
        self._saved_at = time.monotonic()

    def resume(self) -> None:
        """Continue from the rows that an earlier run left in the folder, if any."""
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / MANIFEST).exists():
            return
        try:
            manifest, arrays = _read_entry(self.folder)
        except DamagedError:
            self.clear()
            _warn_damaged(self.folder)
            return
        self.manifest = replace(manifest, description=self.manifest.description)
        for name, array in arrays.items():
            file = _array_file(self.folder, name)
            checksum = manifest.checksums[name]
            self._arrays[name] = AppendableArray(file, array, manifest.kept, checksum)

    def append(
        self, columns: Arrays, unreadable: Mapping[int, str], layers: Layers | None = None
    ) -> None:
        """Append the outputs for the next images, and the errors of those that are unreadable.

        `layers` are moments over all rows so far; without them, earlier ones are dropped because
        they no longer cover all rows.
        """
        before, count = self.manifest, len(columns["rows"])
        checksums = before.checksums
        if count:
            if before.kept and columns.keys() != checksums.keys():
                raise CasterError("the model gives logits with some batches and not with others")
            with _disk_errors(self.folder.parent):
                checksums = {name: self._append(name, columns[name]) for name in columns}
        # One assignment: Ctrl-C leaves the manifest from before this batch or from after it.
        self.manifest = replace(
            before,
            seen=before.seen + count + len(unreadable),
            kept=before.kept + count,
            unreadable={**before.unreadable, **{str(i): why for i, why in unreadable.items()}},
            checksums=checksums,
            layers=layers,
        )
        if time.monotonic() - self._saved_at > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Flush everything so far to disk, the manifest last."""
        with _disk_errors(self.folder.parent):
            for array in self._arrays.values():
                array.sync(self.manifest.kept)
            _write_manifest(self.manifest, self.folder)
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Save for the next run, or remove the folder if nothing was written."""
        try:
            if self.manifest.seen:
                self.save()
        finally:
            self._close_arrays()
        if self.manifest.seen == 0:
            shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Start from the first image again."""
        self._close_arrays()
        with _disk_errors(self.folder.parent):
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        self.manifest = Manifest(description=self.manifest.description)

    def _close_arrays(self) -> None:
        for array in self._arrays.values():
            array.close()
        self._arrays = {}

    def _append(self, name: str, values: NDArray[Any]) -> int:
        if name not in self._arrays:
            self._arrays[name] = AppendableArray(_array_file(self.folder, name), values)
        return self._arrays[name].append(values)


def _warn_damaged(folder: Path) -> None:
    log.warning("the cached features in %s were damaged and are computed again", folder)


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Turn an OSError into one line that names the cache."""
    try:
        yield
    except OSError as error:
        raise CasterError(
            f"cannot cache features in {root}: {error.strerror or error}: name another folder "
            "with {argument}",
            argument="cache",
        ) from None


# Listing and removing entries


@dataclass(frozen=True)
class EntryInfo:
    """An entry as it is on disk."""

    folder: Path
    manifest: Manifest | None  # None: damaged
    bytes: int
    age: float  # seconds since the last write

    @property
    def key(self) -> str:
        """The entry's key, complete or not."""
        return self.folder.name.removesuffix(".partial")

    @property
    def complete(self) -> bool:
        """Whether all images are in it."""
        return self.manifest is not None and self.folder.name == self.key


def list_entries(root: Path) -> list[EntryInfo]:
    """List all entries, the latest first; ignore anything else in the folder."""
    if not root.exists():
        return []
    try:
        folders = [path for path in root.iterdir() if ENTRY_NAME.fullmatch(path.name)]
        found = [entry for entry in map(_inspect, folders) if entry is not None]
    except OSError as error:
        raise CasterError(f"cannot read {root}: {error.strerror}") from None
    return sorted(found, key=lambda entry: entry.age)


def remove_entries(root: Path, older_than: float = 0.0) -> tuple[list[EntryInfo], list[EntryInfo]]:
    """Remove entries at least this many seconds old.

    Returns the removed entries, and those left because another process is using them.
    """
    removed, in_use = [], []
    for entry in list_entries(root):
        if entry.age < older_than:
            continue
        try:
            with lock_entry(root, entry.key):
                now = _inspect(entry.folder)  # it may have been completed or removed meanwhile
                if now is not None and now.age >= older_than:
                    shutil.rmtree(entry.folder)
                    removed.append(now)
        except LockedError:
            in_use.append(entry)
        except OSError as error:
            why = error.strerror or error
            raise CasterError(f"cannot remove {entry.folder}: {why}") from None
    return removed, in_use


def _inspect(folder: Path) -> EntryInfo | None:
    """Inspect a folder; None if it is missing or holds anything but an entry's files."""
    manifest = None
    try:
        files = [] if folder.is_symlink() else list(folder.iterdir())
        stats = [path.lstat() for path in (folder, *files)]
        with suppress(DamagedError):
            manifest = _read_manifest(folder)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a file
        return None
    if not all(ENTRY_FILE.fullmatch(file.name) for file in files):
        return None
    if not S_ISDIR(stats[0].st_mode) or not all(S_ISREG(stat.st_mode) for stat in stats[1:]):
        return None
    age = max(0.0, time.time() - max(stat.st_mtime for stat in stats))
    return EntryInfo(folder, manifest, sum(stat.st_size for stat in stats[1:]), age)
