"""Features kept on disk, so that no picture is read twice: filled in order, resumed where it ended.

An entry is a folder named by what determines its content. While it fills it carries the suffix
`.partial`, with a note of how far it is complete; only a whole one gets its final name.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.files import replacing

FORMAT = "1"
NOTE_EVERY = 5.0  # seconds between notes of progress: what a crash may cost


def default_store() -> Path:
    """Where features are kept unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "caster"


def entry_key(model_sha256: str, preprocessing_sha256: str, pictures_sha256: str) -> str:
    """Name of the entry for a model, a preprocessing and the pictures."""
    parts = (FORMAT, model_sha256, preprocessing_sha256, pictures_sha256)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class Note:
    """How far an entry is complete."""

    seen: int = 0  # pictures read or found unreadable, from the first on
    kept: int = 0  # rows of features
    unreadable: dict[str, str] = field(default_factory=dict)  # row to what is wrong with it


class Entry:
    """The features of one model on one set of pictures, as files of NumPy arrays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note = Note(**json.loads((folder / "note.json").read_text(encoding="utf-8")))

    def array(self, name: str) -> NDArray[Any]:
        """`features`, `logits` or `rows`: mapped from disk, read where it is looked at."""
        mapped: NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return mapped[: self.note.kept]

    def has(self, name: str) -> bool:
        """Whether the entry holds that array."""
        return (self.folder / f"{name}.npy").exists()


class Filling:
    """An entry in the making."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total
        note = folder / "note.json"
        self.note = (
            Note(**json.loads(note.read_text(encoding="utf-8"))) if note.exists() else Note()
        )
        self._arrays: dict[str, NDArray[Any]] = {}
        self._noted_at = time.monotonic()

    def append(self, columns: dict[str, NDArray[Any]], unreadable: dict[int, str]) -> None:
        """Add the outputs for the next pictures, and the rows among them that have none."""
        count = len(columns["rows"])
        for name, values in columns.items():
            held = self._array(name, values)
            held[self.note.kept : self.note.kept + count] = values
        self.note.kept += count
        self.note.seen += count + len(unreadable)
        self.note.unreadable |= {str(row): why for row, why in unreadable.items()}
        if time.monotonic() - self._noted_at > NOTE_EVERY:
            self.save()

    def save(self) -> None:
        """Put everything so far on disk, the note last."""
        for held in self._arrays.values():
            held.flush()  # type: ignore[attr-defined]
        with replacing(self.folder / "note.json") as temporary:
            temporary.write_text(json.dumps(vars(self.note)), encoding="utf-8")
        self._noted_at = time.monotonic()

    def _array(self, name: str, like: NDArray[Any]) -> NDArray[Any]:
        if name not in self._arrays:
            path = self.folder / f"{name}.npy"
            shape = (self.total, *like.shape[1:])
            if self.note.kept:
                self._arrays[name] = open_memmap(path, mode="r+")
            else:
                self._arrays[name] = open_memmap(path, mode="w+", dtype=like.dtype, shape=shape)
        return self._arrays[name]


def find(root: Path, key: str) -> Entry | None:
    """The complete entry of that name, if there is one."""
    return Entry(root / key) if (root / key / "note.json").exists() else None


@contextmanager
def filling(root: Path, key: str, total: int) -> Iterator[Filling]:
    """Fill an entry, from where an earlier attempt ended; it is complete when the block ends.

    An error or Ctrl-C in the block keeps what is there for the next attempt.
    """
    partial = root / f"{key}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            entry = Filling(partial, total)
            try:
                yield entry
            finally:
                entry.save()
            os.replace(partial, root / key)
    except OSError as error:
        raise CasterError(f"cannot keep features in {root}: {error.strerror or error}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, or refuse if another one holds it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: two runs at once on the same pictures are up to the user
        yield
        return
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CasterError(
                "another caster is reading these pictures with this model: wait until it is done"
            ) from None
        yield
        path.unlink(missing_ok=True)
