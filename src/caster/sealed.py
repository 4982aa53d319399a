"""Safetensors files that are sealed by a digest of all that is in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from caster.errors import CasterError
from caster.files import AnyPath, replacing

Arrays = dict[str, NDArray[Any]]
Texts = dict[str, str]


def content_digest(arrays: Arrays, metadata: Texts) -> str:
    """SHA-256 over every array and every metadata entry but the digest itself."""
    digest = hashlib.sha256()
    described = {k: v for k, v in metadata.items() if k != "content_sha256"}
    digest.update(json.dumps(described, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def write(arrays: Arrays, metadata: Texts, path: AnyPath) -> None:
    """Write a file; an existing one is replaced whole or not at all."""
    sealed = metadata | {"content_sha256": content_digest(arrays, metadata)}
    content = to_safetensors(arrays, sealed)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def read(
    path: AnyPath,
    kind: str,  # "a caster state file"
    maker: str,  # the command that makes one
    check: Callable[[Texts], None],  # of the metadata, before any array is read
    error: type[CasterError] = CasterError,
) -> tuple[Arrays, Texts]:
    """Arrays and metadata of a file that is whole and unchanged."""
    try:
        with safe_open(path, framework="np") as file:
            metadata: Texts = file.metadata() or {}
            check(metadata)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise error(f"{path} does not exist: make it with `{maker}`") from None
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    except SafetensorError:
        raise error(f"{path} is truncated, damaged or not {kind}") from None
    if content_digest(arrays, metadata) != metadata.get("content_sha256"):
        raise error(f"{path} does not match its own digest: it was damaged or edited")
    return arrays, metadata
