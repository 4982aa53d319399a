"""Features kept on disk, so that no image is read twice: filled in order, resumed where it ended.

An entry is a folder named by what determines its content. While it fills it carries the suffix
`.partial`; only a whole one gets its final name. Its note says how far it is complete, with a
checksum of every array: what a crash or a bad disk left behind is made anew, never believed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import move_into_place
from caster.io.filling import Arrays, Filling, say_damaged, telling
from caster.io.growing import Damaged
from caster.io.lock import locked
from caster.io.note import Note, read_folder, read_note, write_note

FORMAT = "2"
BUSY = (
    "another caster is reading these images with this model: wait until it is done, or name "
    "another folder with --cache"
)


def default_store() -> Path:
    """Where features are kept unless told otherwise."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user without a home
        raise CasterError(
            "there is no home folder to keep features in: name a folder with --cache"
        ) from None
    return Path(base) / "caster"


def entry_key(model_sha256: str, preprocessing_sha256: str, images_sha256: str) -> str:
    """Name of the entry for a model, a preprocessing and the images."""
    parts = (FORMAT, model_sha256, preprocessing_sha256, images_sha256)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Entry:
    """The features of one model on one set of images."""

    note: Note
    arrays: Arrays  # `rows`, `features` and maybe `logits`: mapped from disk, read when looked at


def find(root: Path, key: str, total: int) -> Entry | None:
    """The entry of that name, if it is there with all the images in it."""
    with telling(root):
        try:
            note, arrays = read_folder(root / key)
        except Damaged:  # or not there at all
            return None
    return Entry(note, arrays) if note.seen == total else None


def keep(root: Path, key: str, total: int) -> Entry | None:
    """`find`, where the job that made it had it for itself only: from now on it stays."""
    with telling(root), exclusively(root, key):
        entry = find(root, key, total)
        if entry is None:  # that job ended since the caller looked for it
            return None
        note = replace(entry.note, passing=False)
        write_note(note, root / key)
        return replace(entry, note=note)


def release(root: Path, key: str) -> None:
    """Forget a whole entry, unless a job keeps it."""
    with telling(root), exclusively(root, key), suppress(Damaged):  # or it is not there at all
        if read_note(root / key).passing:
            _discard(root, key)


@contextmanager
def filling(
    root: Path,
    key: str,
    total: int,
    outdated: Callable[[Note], bool] = lambda note: False,
    passing: bool = False,
    of: str = "",
) -> Iterator[Filling]:
    """Fill an entry, from where an earlier attempt ended; it is complete when the block ends.

    An error or Ctrl-C in the block keeps what is there for the next attempt. A whole entry that is
    `outdated` stays until another takes its place. What is `passing` is there for one job only, to
    be released at its end; what another job has kept or begun to keep stays kept. `of` names model
    and images, for whoever lists the store.
    """
    with ExitStack() as held:
        with telling(root):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusively(root, key))
        whole = find(root, key, total)
        if whole is not None and not outdated(whole.note):
            raise CasterError(BUSY)  # completed since the caller looked for it
        mine = passing and (whole is None or whole.note.passing)
        entry = Filling(root / f"{key}.partial", mine, of)
        with telling(root):
            if whole is None and (root / key).exists():
                _discard(root, key)
                say_damaged(root / key)
            entry.resume()
        try:
            yield entry
        finally:
            with telling(root):
                entry.close()
        with telling(root):
            if whole is not None:
                _discard(root, key)
            move_into_place(entry.folder, root / key)


def exclusively(root: Path, key: str) -> AbstractContextManager[None]:
    """Hold an entry, complete or not, for this process alone."""
    return locked(root / f"{key}.lock", BUSY)


def _discard(root: Path, key: str) -> None:
    shutil.rmtree(root / key)
