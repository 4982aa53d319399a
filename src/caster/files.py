"""Whole files or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caster.errors import CasterError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends without an error.

    Readers see the old file or the new one, never part of one, and an error or Ctrl-C in the
    block leaves the old one untouched.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise CasterError(f"cannot write {target}: {error.strerror}") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp made it private
        os.replace(temporary, target)
    except IsADirectoryError:
        raise CasterError(f"cannot write {target}: it is a folder") from None
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse an output before the work that would be lost on it."""
    target = Path(path)
    if target.is_dir():
        raise CasterError(f"cannot write {target}: it is a folder")
    if not target.parent.is_dir():
        raise CasterError(f"cannot write {target}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise CasterError(f"cannot write {target}: no permission in {target.parent}")
