"""Digests of values and tables, and JSON files that carry a digest of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from caster.errors import CasterError
from caster_bench.records.schema import FORMAT, RUN, TIMES, Admission, Batches, Cell, Samples

KEY_LENGTH = 32  # hex digits
DIGEST_FIELD = "sha256"  # the field that holds a digest of all others
Kind = TypeVar("Kind", Cell, Admission)
Parts = tuple[Cell, Samples | None, Batches | None]  # a record
_ENCODER = json.JSONEncoder(  # shared: creating one takes as long as using it
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


class FormatError(CasterError):
    """Records in another version's format: not damaged, and not to be touched."""


def canonical(value: Any) -> str:
    """Canonical JSON of a value: sorted keys, no spaces, no NaN.

    >>> canonical({"b": (1, 2.5), "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise CasterError(f"a record cannot hold this: {error}") from None


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def key_of(identity: dict[str, Any]) -> str:
    """Return the name of a cell's folder.

    >>> len(key_of({"spec": {}}))
    32
    """
    return digest(identity)[:KEY_LENGTH]


def to_json(value: Cell | Admission) -> str:
    """Serialize to JSON with a digest of the other fields, one field per line."""
    plain = vars(value)
    lines = {name: f"{canonical(name)}:{canonical(plain[name])}" for name in sorted(plain)}
    digest = hashlib.sha256(f"{{{','.join(lines.values())}}}".encode()).hexdigest()
    lines[DIGEST_FIELD] = f'"{DIGEST_FIELD}":"{digest}"'
    return "{\n" + ",\n".join(lines.values()) + "\n}\n"


def from_json(content: bytes, kind: type[Kind]) -> Kind:
    """Parse what `to_json` wrote, and check its digest.

    Another format is a `FormatError`, not damage.
    """
    unreadable = CasterError("it is not a record of caster")
    try:
        plain = json.loads(content, parse_constant=_no_number)
        digest, written = plain.pop(DIGEST_FIELD), plain["format"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise unreadable from None
    if type(written) is int and written != FORMAT:
        raise FormatError(_format_message(written, plain.get("software")))
    try:
        value = kind(**plain)
        _check_tables(value)
    except (TypeError, AttributeError):
        raise unreadable from None
    if _text_digest(content, len(plain)) != digest:
        raise CasterError("it was changed after it was written")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _format_message(written: int, software: Any) -> str:
    version = software.get("caster") if isinstance(software, dict) else None
    by = "another version of caster" if version is None else f"caster {version}"
    return (
        f"it was written by {by} in format {written}, and this version reads format {FORMAT}: "
        "use that version, or another folder"
    )


def _text_digest(content: bytes, fields: int) -> str | None:
    """Compute the digest from the text itself; None if the layout is wrong.

    Serializing the value again and comparing takes five times as long.
    """
    start, end, own = b"{\n", b"\n}\n", f'"{DIGEST_FIELD}":'.encode()
    lines = content[len(start) : -len(end)].split(b",\n")
    others = [line for line in lines if not line.startswith(own)]
    whole = content.startswith(start) and content.endswith(end)
    if not whole or (len(lines), len(others)) != (fields + 1, fields):
        return None
    return hashlib.sha256(b"{" + b",".join(others) + b"}").hexdigest()


def _check_tables(value: Cell | Admission) -> None:
    """Reject fields that should be tables and are not: readers index them by name."""
    for field in fields(value):
        optional = "None" in str(field.type) and getattr(value, field.name) is None
        if str(field.type).startswith("dict") and not optional:
            getattr(value, field.name).keys()


def same(a: Parts, b: Parts) -> bool:
    """Whether two records of a cell agree, apart from times and machines."""
    return content(*a) == content(*b)


def content(cell: Cell, samples: Samples | None, batches: Batches | None) -> str:
    """SHA-256 of everything that two runs of a cell must agree on."""
    plain = {name: value for name, value in vars(cell).items() if name not in RUN}
    total = hashlib.sha256(canonical(plain).encode())
    for table in (samples, batches):
        for part in _columns(table, TIMES) if table is not None else ():
            total.update(part)
    return total.hexdigest()


def table_digest(table: Samples | Batches) -> str:
    """SHA-256 of all columns of a table, independent of how it is stored."""
    total = hashlib.sha256()
    for part in _columns(table):
        total.update(part)
    return total.hexdigest()


def _columns(table: Samples | Batches, without: tuple[str, ...] = ()) -> Iterator[bytes]:
    for field in fields(table):
        if field.name not in without:
            yield f"\n{field.name}\n".encode()
            yield bytes_of(getattr(table, field.name))


def bytes_of(column: np.ndarray[Any, Any]) -> bytes:
    """Bytes of a column for a digest; strings as JSON, since objects have no bytes."""
    return canonical(column.tolist()).encode() if column.dtype == object else column.tobytes()
