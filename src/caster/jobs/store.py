"""Features kept on disk, so that no picture is read twice: filled in order, resumed where it ended.

An entry is a folder named by what determines its content. While it fills it carries the suffix
`.partial`; only a whole one gets its final name. Its note says how far it is complete, with a
checksum of every array: what a crash or a bad disk left behind is made anew, never believed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from caster.errors import CasterError
from caster.jobs.growing import Damaged, GrowingArray
from caster.jobs.lock import locked
from caster.jobs.note import Note, array_file, read_folder, write_note
from caster.state import Layers

FORMAT = "2"
NOTE_EVERY = 5.0  # seconds between notes of progress: what a crash may cost
BUSY = (
    "another caster is reading these pictures with this model: wait until it is done, or name "
    "another folder with --cache"
)

Arrays = Mapping[str, NDArray[Any]]

log = logging.getLogger(__name__)


def default_store() -> Path:
    """Where features are kept unless told otherwise."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user without a home
        raise CasterError(
            "there is no home folder to keep features in: name a folder with --cache"
        ) from None
    return Path(base) / "caster"


def entry_key(model_sha256: str, preprocessing_sha256: str, pictures_sha256: str) -> str:
    """Name of the entry for a model, a preprocessing and the pictures."""
    parts = (FORMAT, model_sha256, preprocessing_sha256, pictures_sha256)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Entry:
    """The features of one model on one set of pictures."""

    note: Note
    arrays: Arrays  # `rows`, `features` and maybe `logits`: mapped from disk, read when looked at


class Filling:
    """An entry in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder, Note()
        self._arrays: dict[str, GrowingArray] = {}
        self._noted_at = time.monotonic()

    def resume(self) -> None:
        """Go on from what an earlier attempt left in the folder, if it did."""
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / "note.json").exists():
            return
        try:
            note, arrays = read_folder(self.folder)
        except Damaged:
            self.clear()
            _say_damaged(self.folder)
            return
        self.note = note
        for name, held in arrays.items():
            file = array_file(self.folder, name)
            self._arrays[name] = GrowingArray(file, held, note.kept, note.checksums[name])

    def append(
        self, columns: Arrays, unreadable: Mapping[int, str], layers: Layers | None = None
    ) -> None:
        """Add the outputs for the next pictures, and the rows among them that have none.

        `layers` are sums over all rows so far; without them, earlier sums are no longer those.
        """
        note, count = self.note, len(columns["rows"])
        checksums = note.checksums
        if count:
            if note.kept and columns.keys() != checksums.keys():
                raise CasterError("the model gives logits with some batches and not with others")
            with _telling(self.folder.parent):
                checksums = {name: self._grown(name, columns[name]) for name in columns}
        # One assignment: Ctrl-C finds the note of before this batch or of after it.
        self.note = Note(
            note.seen + count + len(unreadable),
            note.kept + count,
            {**note.unreadable, **{str(row): why for row, why in unreadable.items()}},
            checksums,
            layers,
        )
        if time.monotonic() - self._noted_at > NOTE_EVERY:
            self.save()

    def save(self) -> None:
        """Put everything so far on disk, the note last."""
        with _telling(self.folder.parent):
            for array in self._arrays.values():
                array.sync(self.note.kept)
            write_note(self.note, self.folder)
        self._noted_at = time.monotonic()

    def close(self) -> None:
        """Leave what there is to the next attempt; where there is nothing, leave nothing."""
        try:
            if self.note.seen:
                self.save()
        finally:
            self._let_go()
        if self.note.seen == 0:
            shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Start anew."""
        self._let_go()
        with _telling(self.folder.parent):
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        self.note = Note()

    def _let_go(self) -> None:
        for array in self._arrays.values():
            array.close()
        self._arrays = {}

    def _grown(self, name: str, values: NDArray[Any]) -> int:
        """Append to one array; returns its checksum."""
        if name not in self._arrays:
            self._arrays[name] = GrowingArray(array_file(self.folder, name), values)
        return self._arrays[name].append(values)


def find(root: Path, key: str, total: int) -> Entry | None:
    """The entry of that name, if it is there with all the pictures in it."""
    with _telling(root):
        try:
            note, arrays = read_folder(root / key)
        except Damaged:  # or not there at all
            return None
    return Entry(note, arrays) if note.seen == total else None


def discard(root: Path, key: str) -> None:
    """Forget a whole entry."""
    with _telling(root):
        shutil.rmtree(root / key)


@contextmanager
def filling(
    root: Path,
    key: str,
    total: int,
    outdated: Callable[[Note], bool] = lambda note: False,
) -> Iterator[Filling]:
    """Fill an entry, from where an earlier attempt ended; it is complete when the block ends.

    An error or Ctrl-C in the block keeps what is there for the next attempt. A whole entry that is
    `outdated` stays until another takes its place.
    """
    entry = Filling(root / f"{key}.partial")
    with ExitStack() as held:
        with _telling(root):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(root / f"{key}.lock", BUSY))
        whole = find(root, key, total)
        if whole is not None and not outdated(whole.note):
            raise CasterError(BUSY)  # completed since the caller looked for it
        with _telling(root):
            if whole is None and (root / key).exists():
                discard(root, key)
                _say_damaged(root / key)
            entry.resume()
        try:
            yield entry
        finally:
            with _telling(root):
                entry.close()
        if whole is not None:
            discard(root, key)
        with _telling(root):
            os.replace(entry.folder, root / key)


def _say_damaged(folder: Path) -> None:
    log.warning("the features kept in %s were damaged, and are made anew", folder)


@contextmanager
def _telling(root: Path) -> Iterator[None]:
    """What the disk has to say, in one line."""
    try:
        yield
    except OSError as error:
        raise CasterError(
            f"cannot keep features in {root}: {error.strerror or error}; --cache names another "
            "folder"
        ) from None
