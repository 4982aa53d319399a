"""Archives from elsewhere, unpacked into one folder and nowhere else."""

from __future__ import annotations

import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from caster.errors import CasterError
from caster_bench.data.download import Report

# RuntimeError: of an encrypted .zip, and of one that is packed in a way zipfile does not know.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)
Member = tuple[str, IO[bytes] | None]  # a path, and its content unless it is a folder


def unpack(archive: Path, into: Path, report: Report) -> None:
    """Unpack a .zip or a .tar, compressed or not, below a folder that is there.

    Files and folders only: a link, a device, or a path that leads out of the folder refuses the
    archive. Owners, permissions and times are not taken over.
    """
    inside = os.path.realpath(into)
    try:
        with open(archive, "rb") as raw:
            total = os.fstat(raw.fileno()).st_size
            zipped = raw.read(2) == b"PK"
            raw.seek(0)
            members = _zipped(raw) if zipped else _tarred(raw)
            for name, content in members:
                target = _target(inside, name)
                os.makedirs(target if content is None else os.path.dirname(target), exist_ok=True)
                if content is not None:
                    with content, open(target, "wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
                report(f"unpacking {archive.name}", min(raw.tell(), total), total)
    except _Refused as error:
        raise CasterError(f"{archive} is refused: {error}") from None
    except DAMAGE:
        raise CasterError(f"{archive} is damaged, or no archive") from None
    except OSError as error:
        reason = error.strerror or error
        raise CasterError(f"cannot unpack {archive} into {into}: {reason}") from None


class _Refused(Exception):  # noqa: N818
    """Why no part of an archive is taken; its name is added where it is known."""


def _target(inside: str, name: str) -> str:
    """Where a member goes: in the folder, whatever links there may be in it."""
    path = PurePosixPath(name)
    strange = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    target = inside if strange else os.path.realpath(os.path.join(inside, *path.parts))
    if strange or os.path.commonpath((inside, target)) != inside:
        raise _Refused(f"{name!r} leads out of the folder")
    return target


def _tarred(raw: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=raw, mode="r:*") as archive:
        for member in archive:
            if not (member.isfile() or member.isdir()):
                raise _Refused(f"{member.name!r} is a link or a device")
            yield member.name, archive.extractfile(member)


def _zipped(raw: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(raw) as archive:
        for member in archive.infolist():
            yield member.filename, None if member.is_dir() else archive.open(member)
