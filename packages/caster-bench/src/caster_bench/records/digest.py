"""Digests of values and files, and JSON that shows when a hand has been in it."""

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
SEAL = "sha256"  # the field that holds a digest of all others
Kind = TypeVar("Kind", Cell, Admission)
Parts = tuple[Cell, Samples | None, Batches | None]  # of a record
_ENCODER = json.JSONEncoder(  # once: to make one takes as long as to use it
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


class FormatError(CasterError):
    """Records that a caster wrote who keeps them otherwise: not damaged, and not to be touched."""


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, and no NaN.

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
    """The name of a cell's folder.

    >>> len(key_of({"spec": {}}))
    32
    """
    return digest(identity)[:KEY_LENGTH]


def sealed(value: Cell | Admission) -> str:
    """Text of a JSON file that says what its own digest is, a field a line."""
    plain = vars(value)
    lines = {name: f"{canonical(name)}:{canonical(plain[name])}" for name in sorted(plain)}
    seal = hashlib.sha256(f"{{{','.join(lines.values())}}}".encode()).hexdigest()
    lines[SEAL] = f'"{SEAL}":"{seal}"'
    return "{\n" + ",\n".join(lines.values()) + "\n}\n"


def unsealed(content: bytes, kind: type[Kind]) -> Kind:
    """The value of such a file, if it is a field a line what was sealed.

    Records of another format are no damage: that is an error of its own.
    """
    nothing = CasterError("it is not what caster writes there")
    try:
        plain = json.loads(content, parse_constant=_no_number)
        seal, written = plain.pop(SEAL), plain["format"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise nothing from None
    if type(written) is int and written != FORMAT:
        raise FormatError(_told(written, plain.get("software")))
    try:
        value = kind(**plain)
        _check_tables(value)
    except (TypeError, AttributeError):
        raise nothing from None
    if _seal_of(content, len(plain)) != seal:
        raise CasterError("it was changed after it was written")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _told(written: int, software: Any) -> str:
    version = software.get("caster") if isinstance(software, dict) else None
    by = "another caster" if version is None else f"caster {version}"
    return (
        f"{by} wrote it, in format {written}, and this caster reads format {FORMAT}: use that "
        "version, or another folder"
    )


def _seal_of(content: bytes, fields: int) -> str | None:
    """The digest that a text should state, taken of the text itself; None if it is laid out wrong.

    To make the text again from its value, and compare, takes five times as long.
    """
    start, end, own = b"{\n", b"\n}\n", f'"{SEAL}":'.encode()
    lines = content[len(start) : -len(end)].split(b",\n")
    others = [line for line in lines if not line.startswith(own)]
    whole = content.startswith(start) and content.endswith(end)
    if not whole or (len(lines), len(others)) != (fields + 1, fields):
        return None
    return hashlib.sha256(b"{" + b",".join(others) + b"}").hexdigest()


def _check_tables(value: Cell | Admission) -> None:
    """Refuse what is not a table where one belongs: readers look into them by name."""
    for field in fields(value):
        optional = "None" in str(field.type) and getattr(value, field.name) is None
        if str(field.type).startswith("dict") and not optional:
            getattr(value, field.name).keys()


def same(a: Parts, b: Parts) -> bool:
    """Whether two records of a cell say the same, times and machines aside."""
    return content(*a) == content(*b)


def content(cell: Cell, samples: Samples | None, batches: Batches | None) -> str:
    """SHA-256 of all that two runs of a cell must agree in."""
    plain = {name: value for name, value in vars(cell).items() if name not in RUN}
    total = hashlib.sha256(canonical(plain).encode())
    for table in (samples, batches):
        for part in _columns(table, TIMES) if table is not None else ():
            total.update(part)
    return total.hexdigest()


def of_table(table: Samples | Batches) -> str:
    """SHA-256 of all columns of a table as it is read, whatever file they lie in."""
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
    """A column for a digest; text as one JSON, since its objects have no bytes of their own."""
    return canonical(column.tolist()).encode() if column.dtype == object else column.tobytes()
