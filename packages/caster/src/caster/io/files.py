"""Atomic writes, locks between processes, safe reads, digests and TOML."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from caster.errors import CasterError

AnyPath = str | os.PathLike[str]
CHUNK = 1 << 20  # bytes read at once
LOCK_SECONDS = 0.1  # to try for a lock before giving up
TOML_BYTES, TOML_DEPTH = 1 << 20, 32  # limits on the file's size and on nesting
NOT_UTF8 = re.compile(r"[\ud800-\udfff]|\\ud[89a-f][0-9a-f]{2}")


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends without an error.

    Readers see the old file or the new one, never a partial one. An error or Ctrl-C in the block
    leaves the old file untouched. If `path` is a symbolic link, its target is replaced.
    """
    check_writable(path)
    target = Path(path).resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        os.close(handle)
    except OSError as error:
        raise CasterError(f"cannot write {path}: {error.strerror}") from None
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp created it for the owner only
        move_into_place(temporary, target)
    except OSError as error:  # a full disk, for example
        raise CasterError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def move_into_place(made: AnyPath, target: AnyPath) -> None:
    """Rename a finished file or folder so that a power cut leaves the old one or the whole new one.

    Contents are synced before the rename and the parent folder after it: otherwise a file system
    may persist the new name without the contents.
    """
    for folder, _, names in os.walk(made):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)
    if not os.path.isdir(made):
        _sync(made)
    os.replace(made, target)
    _sync(os.path.dirname(target) or ".")


def _sync(path: AnyPath) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if os.name == "nt":  # syncs neither folders nor files opened for reading
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync this kind of entry
            raise
    finally:
        os.close(handle)


def check_writable(path: AnyPath, *inputs: AnyPath) -> None:
    """Reject an output that cannot be written, or that is an input, before any work is done."""
    target = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            target.lstat()
    except (OSError, ValueError) as error:  # a name that is too long or contains a null byte
        raise CasterError(f"cannot write {str(path)[:80]!r}: {error.args[-1]}") from None
    if target.is_dir():
        raise CasterError(f"cannot write {target}: it is a folder")
    if target.exists() and not target.is_file():
        raise CasterError(f"cannot write {target}: it is not a regular file")
    if not target.parent.is_dir():
        raise CasterError(f"cannot write {target}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise CasterError(f"cannot write {target}: no permission in {target.parent}")
    for source in inputs:
        if target.exists() and os.path.exists(source) and target.samefile(source):
            raise CasterError(f"{target} is an input: write to another file")


class LockedError(CasterError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, message: str, argument: str | None = None) -> Iterator[None]:
    """Hold a lock between processes, or raise LockedError with this message if another has it.

    The operating system releases the lock when its holder ends, even if it is killed. A lock file
    that a killed process left behind blocks nobody.
    """
    from filelock import FileLock, Timeout  # slow to import, and rarely needed

    if not path.parent.is_dir():  # filelock would create it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    lock = FileLock(path, thread_local=False)
    try:
        # Try more than once: the holder may have removed the file between our open and our lock.
        lock.acquire(timeout=LOCK_SECONDS, poll_interval=LOCK_SECONDS / 10)
    except Timeout:
        raise LockedError(message, argument=argument) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove open files
            path.unlink()  # before the release: afterwards the file may be another holder's
        lock.release()


def check_regular(path: AnyPath) -> None:
    """Raise an OSError for a FIFO, socket or device: opening or reading one may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder has its own error
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file for reading bytes."""
    check_regular(path)
    return open(path, "rb")


def read_regular(path: AnyPath) -> bytes:
    """Read all bytes of a regular file."""
    with open_regular(path) as file:
        return file.read()


def as_utf8(text: str) -> str:
    r"""Make text encodable as UTF-8: a byte of a file name that is not UTF-8 becomes `\udcNN`.

    Backslashes are doubled in such text, and in text that looks like it, so that the original can
    be restored. All other text is returned unchanged.

    >>> as_utf8("a.png"), as_utf8(os.fsdecode(b"caf\xe9.png"))
    ('a.png', 'caf\\udce9.png')
    """
    if NOT_UTF8.search(text) is None:
        return text
    return text.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()


def file_digest(
    path: AnyPath,
    kind: str = "sha256",
    progress: Callable[[int], object] = lambda done: None,  # called with the bytes read so far
) -> str:
    """Compute a file's digest, as printed by sha256sum or md5sum."""
    digest, done = hashlib.new(kind, usedforsecurity=False), 0
    try:
        with open_regular(path) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(done)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def stat_digest(files: Iterable[tuple[str, Path]], *extra: Any) -> str:
    """Compute a SHA-256 of the names, sizes and times of files, and of extra JSON values.

    No file is opened: a second fit on a million images must not read them to see that they are
    unchanged. Of a file's two times, the one of its last status change cannot be set by hand, which
    distinguishes files that an archive gave the same date. The caller chooses the names, so that
    a renamed folder has the same digest; a copy does not.

    >>> here = Path(__file__)
    >>> stat_digest([("a", here)]) == stat_digest([("b", here)])
    False
    """
    sha256 = hashlib.sha256(json.dumps(extra).encode())
    for name, path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise CasterError(f"cannot read {path}: {error.strerror}") from None
        sha256.update(json.dumps([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]).encode())
    return sha256.hexdigest()


def read_toml(path: AnyPath) -> tuple[dict[str, Any], str]:
    """Read a TOML file; return its table and the SHA-256 of its bytes.

    Integers have at most 64 bits and nesting is bounded, so that any value can safely be compared,
    printed and walked.
    """
    try:
        with open_regular(path) as file:
            content = file.read(TOML_BYTES + 1)
        if len(content) > TOML_BYTES:
            raise CasterError(f"cannot read {path}: it has more than {TOML_BYTES:,} bytes")
        table = tomllib.loads(content.decode())
        _check_values(table)
    except CasterError:
        raise
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CasterError(f"cannot read {path}: it is not UTF-8 text") from None
    except RecursionError:
        raise CasterError(f"cannot read {path} as TOML: it is nested too deeply") from None
    except ValueError as error:  # from tomllib, or a number or date that Python cannot represent
        raise CasterError(f"cannot read {path} as TOML: {error}") from None
    return table, hashlib.sha256(content).hexdigest()


def _check_values(value: Any, depth: int = 0) -> None:
    if depth > TOML_DEPTH:
        raise RecursionError
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer has more than 64 bits")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_values(inner, depth + 1)
