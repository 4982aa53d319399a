"""Whole files or none, their digests, and TOML."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from caster.errors import CasterError

AnyPath = str | os.PathLike[str]
CHUNK = 1 << 20  # bytes read at once
TOML_BYTES, TOML_DEPTH = 1 << 20, 32  # largest TOML file, and tables and lists inside each other
NOT_UTF8 = re.compile(r"[\ud800-\udfff]|\\ud[89a-f][0-9a-f]{2}")


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends without an error.

    Readers see the old file or the new one, never part of one, and an error or Ctrl-C in the
    block leaves the old one untouched. A link stays a link: what it points to is replaced.
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
        temporary.chmod(0o666 & ~_umask())  # mkstemp made it private
        move_into_place(temporary, target)
    except OSError as error:  # a full disk, for one
        raise CasterError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(made: AnyPath, target: AnyPath) -> None:
    """Rename a finished file or folder; after a power cut `target` is the old one or whole.

    Every file goes to the disk before the rename and the renamed entry after it: file systems
    may otherwise keep the new name and lose the content.
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
    """Have the system write a file, or the entries of a folder, to the disk."""
    if os.name == "nt":  # which syncs neither folders nor what is open for reading only
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
    """Refuse an output before the work that would be lost on it, or the input it would replace."""
    target = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            target.lstat()
    except (OSError, ValueError) as error:  # too long a name, or one with a null byte
        raise CasterError(f"cannot write {str(path)[:80]!r}: {error.args[-1]}") from None
    if target.is_dir():
        raise CasterError(f"cannot write {target}: it is a folder")
    if target.exists() and not target.is_file():
        raise CasterError(f"cannot write {target}: it is not a regular file")
    if not target.parent.is_dir():
        raise CasterError(f"cannot write {target}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise CasterError(f"cannot write {target}: no permission in {target.parent}")
    for given in inputs:
        if target.exists() and os.path.exists(given) and target.samefile(given):
            raise CasterError(f"{target} is an input: write to another file")


def check_regular(path: AnyPath) -> None:
    """Raise an OSError for a FIFO, socket or device: opening or reading one may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder has its own error
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a file to read its bytes, if it is a regular one."""
    check_regular(path)
    return open(path, "rb")


def read_regular(path: AnyPath) -> bytes:
    """Read all bytes of a file, if it is a regular one."""
    with open_regular(path) as file:
        return file.read()


def as_utf8(text: str) -> str:
    r"""Text that UTF-8 can encode: a byte of a file name that is not UTF-8 becomes `\udcNN`.

    Backslashes are doubled in such a text, and in one that looks like it, so that the original can
    be restored; any other text stays as it is.

    >>> as_utf8("a.png"), as_utf8(os.fsdecode(b"caf\xe9.png"))
    ('a.png', 'caf\\udce9.png')
    """
    if NOT_UTF8.search(text) is None:
        return text
    return text.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()


def file_digest(
    path: AnyPath,
    kind: str = "sha256",
    told: Callable[[int], object] = lambda done: None,  # hears how many bytes are read
) -> str:
    """A file's digest, as sha256sum or md5sum prints it."""
    digest, done = hashlib.new(kind, usedforsecurity=False), 0
    try:
        with open_regular(path) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                told(done)
    except OSError as error:
        raise CasterError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def read_toml(path: AnyPath) -> tuple[dict[str, Any], str]:
    """The table of a TOML file, and the SHA-256 of its bytes.

    Integers are those of TOML, 64 bits, and nesting is bounded, so that what reads the table can
    compare, print and walk through any value in it.
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
    except ValueError as error:  # tomllib's own, and of numbers and dates that Python lacks
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
