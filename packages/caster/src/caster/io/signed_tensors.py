"""Safetensors files with a digest of their content, and an optional signature."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from caster.errors import CasterError
from caster.io.files import AnyPath, open_regular, replacing

Arrays = dict[str, NDArray[Any]]
Texts = dict[str, str]
Key = bytes | AnyPath  # the key itself, or its file

DIGEST, SIGNATURE = "content_sha256", "signature"  # metadata entries that cover all others
HEADER_BYTES = 1 << 24  # largest header: its JSON takes many times that in memory
KEY_BYTES = range(32, 4097)


def content_digest(arrays: Arrays, metadata: Texts) -> str:
    """Compute a SHA-256 of all arrays and all metadata except the digest and the signature."""
    digest = hashlib.sha256()
    described = {k: v for k, v in metadata.items() if k not in (DIGEST, SIGNATURE)}
    digest.update(json.dumps(described, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def key_bytes(key: Key) -> bytes:
    """Return a signing key, read from its file unless it is bytes.

    A line break at the end of the file is not part of the key.

    >>> key_bytes(b"too short")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: a key has 32 to 4096 bytes, not 9: `openssl rand -hex 32` makes one
    """
    where = ""
    if not isinstance(key, bytes):
        try:
            if not Path(key).is_file():
                raise CasterError(f"there is no key file {os.fspath(key)}")
            with open(key, "rb") as file:
                where, key = f" ({os.fspath(key)})", file.read(2 * KEY_BYTES.stop).rstrip(b"\r\n")
        except OSError as problem:
            raise CasterError(f"cannot read the key: {problem.strerror}") from None
    if len(key) not in KEY_BYTES:
        raise CasterError(
            f"a key has {KEY_BYTES[0]} to {KEY_BYTES[-1]} bytes, not {len(key)}{where}: "
            "`openssl rand -hex 32` makes one"
        )
    return key


def check_name(path: AnyPath) -> None:
    """Reject the name of an ONNX file, which may be a model that must not be overwritten."""
    if Path(path).suffix.lower() == ".onnx":
        raise CasterError(f"{path} has the name of an ONNX file: choose another")


def write(arrays: Arrays, metadata: Texts, path: AnyPath, key: Key | None = None) -> None:
    """Write a file atomically, signed if there is a key: the same bytes for the same content."""
    check_name(path)
    digest = content_digest(arrays, metadata)
    metadata = metadata | {DIGEST: digest}
    if key is not None:
        metadata[SIGNATURE] = _signature(key, digest)
    content = to_safetensors(arrays, metadata)
    if _header_bytes(content) > HEADER_BYTES:
        raise CasterError(
            f"cannot write {path}: its labels and other metadata take more than "
            f"{HEADER_BYTES >> 20} MiB: use shorter labels"
        )
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_ordered_header(content))
        file.write(memoryview(content)[8 + _header_bytes(content) :])


def read_format(
    path: AnyPath,
    kind: str,  # "a saved stream"
    maker: str,  # the command that writes one
    name: str,  # of the format, with its version
) -> tuple[Arrays, Texts]:
    """Read arrays and metadata; reject a file of another format or version."""

    def check(metadata: Texts) -> None:
        found = metadata.get("format", "")
        if found != name and found.split()[:1] == name.split()[:1]:
            raise CasterError(
                f"{path} was saved by another version of caster: start a new stream, or use that "
                "version"
            )
        if found != name:
            raise CasterError(f"{path} is a safetensors file, but not {kind}")

    return read(path, kind, maker, check)


def read(
    path: AnyPath,
    kind: str,  # "a caster state file"
    maker: str,  # the command that writes one
    check: Callable[[Texts], None],  # checks the metadata before any array is read
    error: type[CasterError] = CasterError,
    key: Key | None = None,  # to verify the signature with
) -> tuple[Arrays, Texts]:
    """Read arrays and metadata; reject a damaged or edited file, or one not signed with the key."""
    signer = None if key is None else key_bytes(key)
    if Path(path).suffix == ".onnx":
        raise error(f"{path} is an ONNX file, not {kind}: `caster inspect` shows a compiled one")
    try:
        with open_regular(path) as start:
            if _header_bytes(start.read(8)) > HEADER_BYTES:
                raise error(f"{path} is damaged or not {kind}: its header is too long")
        with safe_open(path, framework="np") as file:
            metadata: Texts = file.metadata() or {}
            check(metadata)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except CasterError:
        raise
    except FileNotFoundError:
        raise error(f"{path} does not exist: make it with `{maker}`") from None
    except IsADirectoryError:
        raise error(f"{path} is a folder, not {kind}") from None
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    except MemoryError:
        raise error(f"{path} does not fit into free memory") from None
    except (SafetensorError, AttributeError, OverflowError, TypeError, ValueError):
        # The last four: a dtype or shape that NumPy does not support.
        raise error(f"{path} is truncated, damaged or not {kind}") from None
    digest = content_digest(arrays, metadata)
    if digest != metadata.get(DIGEST):
        raise error(f"{path} does not match its own digest: it was damaged or edited")
    if signer is not None:
        if SIGNATURE not in metadata:
            raise error(f"{path} is not signed: sign it when it is made, with `{maker} --key`")
        found = metadata[SIGNATURE].encode(errors="replace")
        if not hmac.compare_digest(_signature(signer, digest).encode(), found):
            raise error(f"{path} was not signed with this key, or was changed since: do not use it")
    return arrays, metadata


def _signature(key: Key, digest: str) -> str:
    """Compute the HMAC-SHA256 of a content digest."""
    return hmac.digest(key_bytes(key), digest.encode(), "sha256").hex()


def _ordered_header(content: bytes) -> bytes:
    """Sort the metadata in the header: safetensors writes them in random order."""
    header = json.loads(content[8 : 8 + _header_bytes(content)])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the arrays
    return len(text).to_bytes(8, "little") + text


def _header_bytes(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")
