"""Download sets that anyone may have, verify them, and unpack them in their layout.

Not pooch: it starts a broken download over, and these archives have up to 22 GB; it does not check
free space, and it unpacks links.
"""

from __future__ import annotations

import http.client
import lzma
import os
import shutil
import ssl
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from caster._version import __version__
from caster.errors import CasterError
from caster.io import Progress, silent
from caster.io.files import file_digest, move_into_place
from caster_bench.data.sets import find, root_folder
from caster_bench.data.sets.dataset import Archive

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte
RESUME = "run it again to resume"
PACKED = (".tar", ".tar.gz", ".tgz", ".zip")
# RuntimeError: an encrypted .zip, or a compression that zipfile does not know.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)

Member = tuple[str, IO[bytes] | None]  # a path, and its content unless it is a folder


def get(name: str, root: Path | None = None, progress: Progress = silent) -> list[Archive]:
    """Download what a set or split lacks below a root; return the archives that were needed.

    An archive is unpacked under a temporary name: a folder of the set appears when it is complete.
    """
    title, data, splits = find(name)
    below = root_folder(name, root)
    wanted = [
        archive
        for archive in data.archives
        if not archive.splits or set(archive.splits) & set(splits)
    ]
    if not wanted:
        folders = " or ".join(dict.fromkeys(str(below / x.folder) for x in data.layouts))
        raise CasterError(
            f"{title} has no public download that caster could verify: get it from {data.page} "
            f"and put it into {folders}"
        )
    try:
        below.mkdir(parents=True, exist_ok=True)
        return [archive for archive in wanted if obtain(archive, below, progress)]
    except OSError as error:
        raise CasterError(f"cannot write to {below}: {error.strerror or error}") from None


def obtain(archive: Archive, root: Path, progress: Progress) -> bool:
    """Download and unpack one archive, unless its contents are there; return whether it did."""
    lacking = [piece for piece in archive.contents if not os.path.exists(root / piece)]
    if not lacking:
        return False
    local, staged = root / archive.file_name, root / f".{archive.file_name}.unpacking"
    packed = download(archive.url, local, archive.digest, archive.size, progress)
    shutil.rmtree(staged, ignore_errors=True)  # left by an interrupted run
    staged.mkdir()
    try:
        if archive.file_name.endswith(PACKED):
            unpack(packed, staged, progress)
        else:
            shutil.copyfile(packed, staged / local.name)
        found = {piece: _find_piece(staged, local.name, Path(piece).name) for piece in lacking}
        for piece, path in found.items():
            (root / piece).parent.mkdir(parents=True, exist_ok=True)
            move_into_place(path, root / piece)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    if packed != local:  # keep what the user put there
        packed.unlink()
    return True


def _find_piece(staged: Path, archive: str, name: str) -> Path:
    """Find a piece at the top level, or in the only folder there."""
    tops = [staged, *(staged / top for top in os.listdir(staged) if not top.startswith("."))]
    for top in tops if len(tops) == 2 else tops[:1]:
        if os.path.exists(top / name):
            return top / name
    raise CasterError(f"{archive} does not contain {name}")


# Download


def download(url: str, path: Path, digest: str, size: int | None, progress: Progress) -> Path:
    """Return a file with this digest, "md5:..." or "sha256:...": the one at `path`, if it exists.

    Otherwise the URL is downloaded to `path`.part, which a later call continues, and that is
    returned: a file without the suffix is always the user's own.
    """
    kind = digest.partition(":")[0]
    if path.exists():
        if (found := digest_of(path, kind, progress)) != digest:
            raise CasterError(
                f"{path} has the digest {found} instead of {digest}: remove it to download it again"
            )
        return path
    part = path.with_name(f"{path.name}.part")
    _complete(url, part, size, progress)
    if (found := digest_of(part, kind, progress)) != digest:
        part.unlink()
        raise CasterError(
            f"{url} has the digest {found} instead of {digest}: the download was removed; try "
            "again, and if that fails too the published file has changed"
        )
    return part


def digest_of(path: Path, kind: str, progress: Progress) -> str:
    """Compute the digest of a file, prefixed with its kind."""
    stage, total = f"checking {path.name}", path.stat().st_size
    return f"{kind}:{file_digest(path, kind, lambda done: progress(stage, done, total))}"


def _complete(url: str, part: Path, size: int | None, progress: Progress) -> None:
    """Retry as long as every attempt makes progress: long downloads break more than once."""
    while True:
        have = _size(part)
        if size is not None and have > size:
            part.unlink()
            have = 0
        if have == size or _attempt(url, part, have, size, progress):
            return
        if _size(part) <= have:
            raise CasterError(f"{url} broke off after {_size(part):,} bytes: {RESUME}")


def _attempt(url: str, part: Path, have: int, size: int | None, progress: Progress) -> bool:
    """Append what the server sends; return whether the file is complete, as far as is known."""
    headers = {"User-Agent": f"caster/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            start, total = _extent(answer, have)
            if size is not None and total not in (None, size):
                raise CasterError(f"{url} has {total:,} bytes instead of {size:,}")
            _check_space(part, (total or 0) - start)
            stage = f"downloading {part.name.removesuffix('.part')}"
            with open(part, "ab" if start else "wb") as file:
                progress(stage, start, total or 0)
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
                    start += len(chunk)
                    progress(stage, start, total or 0)
            whole = size if total is None else total
            return whole is None or _size(part) >= whole
    except urllib.error.HTTPError as error:
        error.close()  # its connection
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return True  # complete, or another file: the digest tells
        raise CasterError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError):
        return False
    except urllib.error.URLError as error:
        host = urllib.parse.urlsplit(url).hostname
        raise CasterError(
            f"cannot reach {host}: {_reason(error.reason)}; without a network, get {url} elsewhere "
            f"and put it into {part.parent}"
        ) from None
    except OSError as error:
        raise CasterError(f"cannot write {part}: {_reason(error)}; {RESUME}") from None


def _extent(answer: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Read where the answer starts, and the total size; a server may ignore the range."""
    partial = answer.status == http.HTTPStatus.PARTIAL_CONTENT
    content_range = answer.headers.get("Content-Range", "") if partial else ""
    span, _, total = content_range.removeprefix("bytes ").partition("/")
    start = span.partition("-")[0] if partial else "0"
    total = total if partial else answer.headers.get("Content-Length", "*")
    if start != str(have if partial else 0) or not (total == "*" or total.isdecimal()):
        raise CasterError(f"{answer.url}: the server resumed at another byte than requested")
    return int(start), None if total == "*" else int(total)


def _check_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise CasterError(
            f"{part.parent} has {free:,} bytes free, and {needed:,} are needed: make room"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


# Unpack


def unpack(archive: Path, into: Path, progress: Progress) -> None:
    """Unpack a .zip or a .tar, compressed or not, into an existing folder and nowhere else.

    Files and folders only: a link, a device, or a path out of the folder rejects the archive.
    Owners, permissions and times are not restored.
    """
    inside = os.path.realpath(into)
    try:
        with open(archive, "rb") as raw:
            total = os.fstat(raw.fileno()).st_size
            zipped = raw.read(2) == b"PK"
            raw.seek(0)
            for name, content in _zip_members(raw) if zipped else _tar_members(raw):
                target = _target(inside, name)
                os.makedirs(target if content is None else os.path.dirname(target), exist_ok=True)
                if content is not None:
                    with content, open(target, "wb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
                progress(f"unpacking {archive.name}", min(raw.tell(), total), total)
    except _UnsafeMember as error:
        raise CasterError(f"{archive} is rejected: {error}") from None
    except DAMAGE:
        raise CasterError(f"{archive} is damaged, or not an archive") from None
    except OSError as error:
        reason = error.strerror or error
        raise CasterError(f"cannot unpack {archive} into {into}: {reason}") from None


class _UnsafeMember(Exception):  # noqa: N818
    """Why an archive is rejected."""


def _target(inside: str, name: str) -> str:
    """Return the path of a member, and reject one outside the folder, links resolved."""
    path = PurePosixPath(name)
    strange = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    target = inside if strange else os.path.realpath(os.path.join(inside, *path.parts))
    if strange or os.path.commonpath((inside, target)) != inside:
        raise _UnsafeMember(f"{name!r} leads out of the folder")
    return target


def _tar_members(raw: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=raw, mode="r:*") as archive:
        for member in archive:
            if not (member.isfile() or member.isdir()):
                raise _UnsafeMember(f"{member.name!r} is a link or a device")
            yield member.name, archive.extractfile(member)


def _zip_members(raw: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(raw) as archive:
        for member in archive.infolist():
            yield member.filename, None if member.is_dir() else archive.open(member)
