"""One file from the web: resumable, and kept only when its digest is the published one."""

from __future__ import annotations

import http.client
import shutil
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from caster._version import __version__
from caster.errors import CasterError
from caster.io.files import file_digest, move_into_place

CHUNK = 1 << 20
PATIENCE = 30  # seconds without a byte
KEPT = "what came is kept: run it again to go on"

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all (0: not known)


def download(url: str, path: Path, digest: str, size: int | None, report: Report) -> bool:
    """Download a file to a path, going on with what is in `path`.part already.

    The path appears when the file is complete and has the digest, "md5:..." or "sha256:...". A
    file that is there already, put there by hand or by an earlier run, is checked and not loaded;
    the answer says whether it was.
    """
    kind = digest.partition(":")[0]
    if path.exists():
        if (found := checked_digest(path, kind, report)) != digest:
            raise CasterError(
                f"{path} has the digest {found} and {digest} is published: remove it to load it "
                "anew"
            )
        return False
    part = path.with_name(f"{path.name}.part")
    _complete(url, part, size, report)
    if (found := checked_digest(part, kind, report)) != digest:
        part.unlink()
        raise CasterError(
            f"{url} came with the digest {found} and {digest} is published: it was removed; try "
            "again, and if that repeats the file has changed"
        )
    move_into_place(part, path)
    return True


def checked_digest(path: Path, kind: str, report: Report) -> str:
    """A file's digest, with its kind before it."""
    stage, total = f"checking {path.name}", path.stat().st_size
    return f"{kind}:{file_digest(path, kind, lambda done: report(stage, done, total))}"


def _complete(url: str, part: Path, size: int | None, report: Report) -> None:
    """Go on as long as every attempt brings something: long downloads break more than once."""
    while True:
        have = _size(part)
        if size is not None and have > size:
            part.unlink()
            have = 0
        if have == size or _attempt(url, part, have, size, report):
            return
        if _size(part) <= have:
            raise CasterError(f"{url} broke off after {_size(part):,} bytes; {KEPT}")


def _attempt(url: str, part: Path, have: int, size: int | None, report: Report) -> bool:
    """Append what a server sends; whether that was all, as far as the server says."""
    headers = {"User-Agent": f"caster/{__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            start, total = _extent(answer, have)
            if size is not None and total not in (None, size):
                raise CasterError(f"{url} is {total:,} bytes and {size:,} are published")
            _check_space(part, (total or 0) - start)
            with open(part, "ab" if start else "wb") as file:
                _copy(answer, file.write, part.name.removesuffix(".part"), start, total, report)
            whole = size if total is None else total
            return whole is None or _size(part) >= whole
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return True  # all of it is there, or something else: the digest tells
        raise CasterError(f"{url}: the server answers {error.code} {error.reason}") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError):
        return False
    except urllib.error.URLError as error:
        host = urllib.parse.urlsplit(url).hostname
        raise CasterError(
            f"cannot reach {host}: {_words(error.reason)}; without a network get {url} elsewhere "
            f"and put it into {part.parent}"
        ) from None
    except OSError as error:
        raise CasterError(f"cannot write {part}: {_words(error)}; {KEPT}") from None


def _extent(answer: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Where the answer begins, and how long the whole is; a server may ignore the range."""
    partial = answer.status == http.HTTPStatus.PARTIAL_CONTENT
    words = answer.headers.get("Content-Range", "") if partial else ""
    span, _, total = words.removeprefix("bytes ").partition("/")
    start = span.partition("-")[0] if partial else "0"
    total = total if partial else answer.headers.get("Content-Length", "*")
    if start != str(have if partial else 0) or not (total == "*" or total.isdecimal()):
        raise CasterError(f"{answer.url}: the server went on at another byte than it was asked to")
    return int(start), None if total == "*" else int(total)


def _copy(
    answer: http.client.HTTPResponse,
    write: Callable[[bytes], int],
    name: str,
    done: int,
    total: int | None,
    report: Report,
) -> None:
    report(f"loading {name}", done, total or 0)
    while chunk := answer.read(CHUNK):
        write(chunk)
        done += len(chunk)
        report(f"loading {name}", done, total or 0)


def _check_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise CasterError(
            f"{part.parent} has room for {free:,} bytes, and {needed:,} are to come: make room"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _words(reason: object) -> str:
    return str(getattr(reason, "strerror", None) or reason) or type(reason).__name__
