"""A lock between processes that ends with the process that holds it, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caster.errors import CasterError


class LockedError(CasterError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of that name, or refuse where another process holds it.

    The file is only the lock's name: one left behind by a process that was killed is in nobody's
    way.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: two runs at once on the same images are up to the user
        yield
        return
    while True:
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(refusal) from None
            if not _is_still(path, handle.fileno()):
                continue  # its holder ended, and took the name away, while we opened it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
