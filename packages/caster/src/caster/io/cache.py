"""The entries of a store: listed, and removed on request."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from caster.errors import CasterError
from caster.io.feature_cache import exclusively
from caster.io.growing import Damaged
from caster.io.lock import LockedError
from caster.io.note import Note, read_note

NAME = re.compile(r"([0-9a-f]{64})(\.partial)?")  # of an entry's folder
FILE = re.compile(r"(rows|features|logits)\.npy|(\.note\.json\..*\.tmp|note\.json)")


@dataclass(frozen=True)
class Kept:
    """One entry as it is on disk."""

    folder: Path
    note: Note | None  # None: damaged
    bytes: int
    age: float  # seconds since it was last written to

    @property
    def key(self) -> str:
        """What the entry is locked by, complete or not."""
        return self.folder.name.removesuffix(".partial")

    @property
    def complete(self) -> bool:
        """Whether all images are in it."""
        return self.note is not None and self.folder.name == self.key


def entries(root: Path) -> list[Kept]:
    """All entries of a store, the latest first; anything else in the folder is not looked at."""
    if not root.exists():
        return []
    try:
        folders = [path for path in root.iterdir() if NAME.fullmatch(path.name)]
        found = [entry for entry in map(_entry, folders) if entry is not None]
    except OSError as error:
        raise CasterError(f"cannot read {root}: {error.strerror}") from None
    return sorted(found, key=lambda entry: entry.age)


def clear(root: Path, older_than: float = 0.0) -> tuple[list[Kept], list[Kept]]:
    """Remove the entries of at least this age in seconds.

    Returns those removed, and those left because another process is using them.
    """
    removed, in_use = [], []
    for entry in entries(root):
        if entry.age < older_than:
            continue
        try:
            with exclusively(root, entry.key):
                now = _entry(entry.folder)  # it may have been completed or removed since
                if now is not None and now.age >= older_than:
                    shutil.rmtree(entry.folder)
                    removed.append(now)
        except LockedError:
            in_use.append(entry)
        except OSError as error:
            why = error.strerror or error
            raise CasterError(f"cannot remove {entry.folder}: {why}") from None
    return removed, in_use


def _entry(folder: Path) -> Kept | None:
    """The entry in a folder; None if there is none, or something that is not an entry's."""
    note = None
    try:
        files = [] if folder.is_symlink() else list(folder.iterdir())
        stats = [path.lstat() for path in (folder, *files)]
        with suppress(Damaged):
            note = read_note(folder)
    except (FileNotFoundError, NotADirectoryError):  # removed since it was listed, or a file
        return None
    ours = [FILE.fullmatch(file.name) for file in files]
    if not S_ISDIR(stats[0].st_mode) or not all(ours):
        return None
    if not all(S_ISREG(stat.st_mode) for stat in stats[1:]):
        return None
    age = max(0.0, time.time() - max(stat.st_mtime for stat in stats))
    return Kept(folder, note, sum(stat.st_size for stat in stats[1:]), age)
