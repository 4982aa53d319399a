"""Write a corrupted set in the layout of CIFAR-C or ImageNet-C, with a manifest.

An output is written under a name that ends in `.part`, noted in the manifest when it is complete,
and then renamed. A later run finds it under one of the two names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster._version import __version__
from caster.errors import CasterError
from caster.io.appendable_array import AppendableArray, DamagedError, read_checked
from caster.io.files import file_digest, locked, move_into_place, read_regular, replacing
from caster.io.image_files import FileImages
from caster.io.images import Images
from caster_bench.sweeps.spec import SEVERITIES

MANIFEST, LOCK, SCRATCH = "manifest.json", ".lock", ".images.npy"
FORMAT = 1
ENTRIES: dict[str, dict[str, type]] = {  # required fields of each entry
    "constants": {},
    "written": {"sha256": str, "bytes": int},
    "begun": {"rows": int, "checksum": int},
}
LIBRARIES = {"caster": "caster", "numpy": "NumPy", "scipy": "SciPy", "pillow": "Pillow"}
ELSEWHERE = "write to another folder"

Facts = Mapping[str, Any]
Results = Callable[[], Iterable[Any]]  # the next severity's, chunk by chunk


# The folder


@contextmanager
def output_folder(out: Path, images: Images) -> Iterator[None]:
    """Lock a folder for writing: a new or empty one, or one with a manifest.

    A new folder is removed again if nothing was written to it.
    """
    home = _image_folder(images)
    if home is not None and out.resolve().is_relative_to(home.resolve()):
        raise CasterError(f"{out} is inside {home}, among the images: {ELSEWHERE}")
    if out.exists() and not out.is_dir():
        raise CasterError(f"cannot write to {out}: it is not a folder")
    if not out.absolute().parent.is_dir():
        raise CasterError(f"cannot write to {out}: there is no folder {out.absolute().parent}")
    try:
        new = not out.exists()
        out.mkdir(exist_ok=True)
        try:
            with locked(out / LOCK, f"another caster is writing to {out}: wait until it is done"):
                foreign = sorted(set(os.listdir(out)) - {LOCK, SCRATCH})
                if foreign and MANIFEST not in foreign:
                    raise CasterError(
                        f"{out} contains {foreign[0]} and no {MANIFEST}: give a new or empty "
                        "folder, or one from an interrupted run"
                    )
                yield
        finally:
            if new:
                with suppress(OSError):  # it is not empty
                    out.rmdir()
    except OSError as error:
        path = Path(str(error.filename or out))
        verb = "write to" if path.absolute().is_relative_to(out.absolute()) else "read"
        raise CasterError(f"cannot {verb} {path}: {error.strerror or error}") from None


def _image_folder(images: Images) -> Path | None:
    """Find the folder that contains all image files.

    The root of a published set may be the data root, which other sets share.
    """
    if not isinstance(images, FileImages):
        return None
    if Path(images.name).is_dir():
        return images.root
    return images.root / os.path.commonpath({os.path.dirname(name) for name in images.names})


# The manifest


def versions() -> dict[str, str]:
    """Return the versions of everything that the bytes may depend on."""
    found = {"caster": __version__, "numpy": version("numpy"), "scipy": version("scipy")}
    with suppress(PackageNotFoundError):  # most corruptions of arrays do not need it
        found["pillow"] = version("pillow")
    return found


class Manifest:
    """How a corrupted set was made, and the digests of what is complete.

    It is rewritten whenever another output is complete, so that an interrupted run can resume.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = Manifest.open(Path(folder), {"seed": 0}, {"begun_from": "x.npz"})
    ...     manifest.finish("fog.npy", {"sha256": "2cf2...", "bytes": 5})
    ...     again = Manifest.open(Path(folder), {"seed": 0}, {"begun_from": "y.npz"})
    >>> again.finished("fog.npy"), again.finished("snow.npy")
    ({'bytes': 5, 'sha256': '2cf2...'}, None)
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def open(cls, out: Path, settings: Facts, notes: Facts) -> Manifest:
        """Open the manifest of a folder if it has these settings, or start a new one.

        Notes are written and not compared.
        """
        path = out / MANIFEST
        if not path.exists():
            empty: dict[str, Any] = {part: {} for part in ENTRIES}
            return cls(path, {"format": FORMAT, **notes, **_as_json(settings), **empty})
        content = _read_manifest(path)
        for name, value in _as_json(settings).items():
            if content.get(name) != value:
                raise CasterError(_difference(out, name, content.get(name), value))
        return cls(path, content)

    def finished(self, name: str) -> Any:
        """Return the facts of a complete output, or None."""
        return self.content["written"].get(name)

    def partial(self, name: str) -> Any:
        """Return how far an incomplete file has come, or None."""
        return self.content["begun"].get(name)

    def note_partial(self, name: str, facts: Facts) -> None:
        """Note how far a file has come."""
        self.content["begun"][name] = dict(facts)
        self.save()

    def finish(self, name: str, facts: Facts) -> None:
        """Note that an output is complete."""
        self.content["begun"].pop(name, None)
        self.content["written"][name] = dict(facts)
        self.save()

    def forget(self, name: str) -> None:
        """Drop an output that is not there any more."""
        self.content["begun"].pop(name, None)
        self.content["written"].pop(name, None)

    def set_constants(self, corruption: str, constants: Facts) -> None:
        """Note the constants of a corruption, or reject ones that differ from those noted."""
        new = _as_json(constants)
        old = self.content["constants"].setdefault(corruption, new)
        if old == new:
            return
        made = f"{self.path.parent} has {corruption} made with"
        if {**old, "textures": None} == {**new, "textures": None}:
            raise CasterError(f"{made} other textures: {ELSEWHERE}")
        raise CasterError(f"{made} {_text(old)}, not {_text(new)}: {ELSEWHERE}")

    def save(self) -> None:
        """Replace the file; keys are sorted, so the order of corruptions does not matter."""
        text = json.dumps(self.content, indent=1, sort_keys=True)
        with replacing(self.path) as temporary:
            temporary.write_text(f"{text}\n", encoding="utf-8")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise CasterError(f"{path} was written by another version of caster: {ELSEWHERE}")
    if not _is_manifest(content):
        raise CasterError(f"{path} is not a manifest of a corrupted set: {ELSEWHERE}")
    return dict(content)


def _is_manifest(content: Any) -> bool:
    """Whether all fields that are looked up exist and have their types."""

    def has(entry: Any, kinds: Mapping[str, type]) -> bool:
        return isinstance(entry, dict) and all(type(entry.get(k)) is t for k, t in kinds.items())

    return has(content, {"format": int, **dict.fromkeys(ENTRIES, dict)}) and all(
        has(entry, kinds) for part, kinds in ENTRIES.items() for entry in content[part].values()
    )


def _difference(out: Path, name: str, old: Any, new: Any) -> str:
    if name == "source":
        return f"{out} was made from other images or labels: {ELSEWHERE}"
    if name == "versions":
        old = old if isinstance(old, dict) else {}
        name = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        old, new = old.get(name, "none"), new.get(name, "none")
    name = LIBRARIES.get(name, name)
    return f"{out} was made with {name} {_text(old)}, not {name} {_text(new)}: {ELSEWHERE}"


def _as_json(values: Any) -> Any:
    return json.loads(json.dumps(values))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).strip("[]{}").replace('"', "")


# Outputs


@dataclass(frozen=True)
class ArrayFile:
    """`fog.npy`: images, one severity after the other."""

    out: Path
    corruption: str
    severities: Sequence[int]
    shape: tuple[int, ...]  # (N, H, W, 3), of one severity
    name: str

    def missing(self, manifest: Manifest) -> Sequence[int]:
        """List the severities after those whose checksum matches."""
        if _is_finished(self, manifest):
            return ()
        partial = manifest.partial(self.name)
        if partial is None:
            return self.severities
        try:
            read_checked(_part(self), partial["rows"], partial["checksum"])
        except DamagedError:
            manifest.forget(self.name)
            return self.severities
        return self.severities[partial["rows"] // self.shape[0] :]

    def write(self, manifest: Manifest, results: Results) -> None:
        """Append the missing severities, each synced to disk."""
        partial = manifest.partial(self.name) or {"rows": 0, "checksum": None}
        rows, like = partial["rows"], np.empty((0, *self.shape[1:]), dtype=np.uint8)
        with closing(AppendableArray(_part(self), like, rows, partial["checksum"])) as array:
            total = len(self.severities) * self.shape[0]
            while rows < total:
                for values in results():
                    array.append(values)
                rows += self.shape[0]
                array.sync(rows)
                if rows < total:  # with the last severity it is complete, which is noted below
                    manifest.note_partial(self.name, {"rows": rows, "checksum": array.checksum})
        _finish(self, manifest, {"sha256": file_digest(_part(self))})


@dataclass(frozen=True)
class ImageFolder:
    """`fog/3`: one folder per class, one JPEG file per image."""

    out: Path
    corruption: str
    severity: int
    paths: Sequence[str]  # "class/name.JPEG", sorted

    @property
    def name(self) -> str:
        """Path below the output folder."""
        return f"{self.corruption}/{self.severity}"

    def missing(self, manifest: Manifest) -> Sequence[int]:
        """List its severity, unless it is complete."""
        return () if _is_finished(self, manifest) else (self.severity,)

    def write(self, manifest: Manifest, results: Results) -> None:
        """Write all files from the start.

        The digest is that of the listing that `sha256sum` prints for the sorted names.
        """
        part, listing = _part(self), hashlib.sha256()
        if part.exists():
            shutil.rmtree(part)
        for folder in {os.path.dirname(path) for path in self.paths}:
            (part / folder).mkdir(parents=True)
        contents = (content for files in results() for content in files)
        for path, content in zip(self.paths, contents, strict=True):
            (part / path).write_bytes(content)
            listing.update(hashlib.sha256(content).hexdigest().encode())
            listing.update(b"  " + os.fsencode(path) + b"\n")
        _finish(self, manifest, {"sha256": listing.hexdigest(), "files": len(self.paths)})


@dataclass(frozen=True, eq=False)
class LabelFile:
    """`labels.npy`: the labels, repeated for every severity in an array file."""

    out: Path
    labels: NDArray[Any]  # (N,)
    severities: Sequence[int]
    name: str = "labels.npy"

    def ensure(self, manifest: Manifest) -> None:
        """Write it, unless it is complete."""
        if not _is_finished(self, manifest):
            copies = len(SEVERITIES) if len(self.severities) == len(SEVERITIES) else 1
            with _part(self).open("wb") as file:
                np.save(file, np.tile(self.labels, copies))
            _finish(self, manifest, {"sha256": file_digest(_part(self))})


Output = ArrayFile | ImageFolder


def outputs(
    out: Path,
    corruptions: Sequence[str],
    severities: Sequence[int],
    shape: tuple[int, ...],
    paths: Sequence[str] | None,  # None for arrays
) -> list[Output]:
    """List the outputs of a set, except its labels.

    CIFAR-C's files have five severities, and its readers take a fifth of a file for one. With
    fewer, each severity has its own file, with a name that such readers do not look for.

    >>> [o.name for o in outputs(Path(), ["fog"], (1, 2, 3, 4, 5), (9, 32, 32, 3), None)]
    ['fog.npy']
    >>> [o.name for o in outputs(Path(), ["fog"], (3, 5), (9, 32, 32, 3), None)]
    ['fog-3.npy', 'fog-5.npy']
    """
    if paths is not None:
        return [ImageFolder(out, c, s, paths) for c in corruptions for s in severities]
    if len(severities) == len(SEVERITIES):
        return [ArrayFile(out, c, severities, shape, f"{c}.npy") for c in corruptions]
    return [ArrayFile(out, c, (s,), shape, f"{c}-{s}.npy") for c in corruptions for s in severities]


def _part(output: Output | LabelFile) -> Path:
    return output.out / f"{output.name}.part"


def _finish(output: Output | LabelFile, manifest: Manifest, facts: Facts) -> None:
    manifest.finish(output.name, {**facts, "bytes": _count_and_bytes(_part(output))[1]})
    move_into_place(_part(output), output.out / output.name)


def _is_finished(output: Output | LabelFile, manifest: Manifest) -> bool:
    """Whether an output exists as noted; if a run ended just before the rename, rename it now."""
    facts, path, part = manifest.finished(output.name), output.out / output.name, _part(output)
    if facts is None:
        if path.exists():
            raise CasterError(f"{path} does not belong to this set: move it away")
        return False
    if path.exists():
        if _matches(facts, path):
            return True
        raise CasterError(f"{path} was changed since it was written: remove it to make it again")
    if part.exists() and _matches(facts, part):
        move_into_place(part, path)
        return True
    manifest.forget(output.name)
    return False


def _matches(facts: Facts, path: Path) -> bool:
    """Compare a file by its digest; a folder by count and size, as reading it takes minutes."""
    if _count_and_bytes(path) != (facts.get("files", 1), facts["bytes"]):
        return False
    return path.is_dir() or file_digest(path) == facts["sha256"]


def _count_and_bytes(path: Path) -> tuple[int, int]:
    if path.is_file():
        return 1, path.stat().st_size
    inside = [p for folder, _, names in os.walk(path) for p in (Path(folder, n) for n in names)]
    return len(inside), sum(p.stat().st_size for p in inside)
