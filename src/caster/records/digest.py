"""Digests of values and files, and JSON that shows when a hand has been in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from caster.errors import CasterError
from caster.records.schema import FORMAT, RUN, TIMES, Admission, Batches, Cell, Samples

KEY_LENGTH = 32  # hex digits
SEAL = "sha256"  # the field that holds a digest of all others
Kind = TypeVar("Kind", Cell, Admission)


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, and no NaN.

    >>> canonical({"b": (1, 2.5), "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
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
    """The value of such a file, if it is to the letter what was written."""
    try:
        plain = json.loads(content)
        del plain[SEAL]
        value = kind(**plain)
        _check_tables(value)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise CasterError("it is not what caster writes there") from None
    if value.format != FORMAT:
        raise CasterError(f"its format is {value.format}, and this caster reads {FORMAT}")
    if sealed(value).encode() != content:
        raise CasterError("it was changed after it was written")
    return value


def _check_tables(value: Cell | Admission) -> None:
    """Refuse what is not a table where one belongs: readers look into them by name."""
    for field in fields(value):
        optional = "None" in str(field.type) and getattr(value, field.name) is None
        if str(field.type).startswith("dict") and not optional:
            getattr(value, field.name).keys()


def same(
    a: tuple[Cell, Samples | None, Batches | None], b: tuple[Cell, Samples | None, Batches | None]
) -> bool:
    """Whether two records of a cell say the same, times and machines aside."""
    return content(*a) == content(*b)


def content(cell: Cell, samples: Samples | None, batches: Batches | None) -> str:
    """SHA-256 of all that two runs of a cell must agree in."""
    plain = {name: value for name, value in vars(cell).items() if name not in RUN}
    total = hashlib.sha256(canonical(plain).encode())
    for table in (samples, batches):
        for field in fields(table) if table is not None else ():
            if field.name not in TIMES:
                total.update(f"\n{field.name}\n".encode())
                total.update(_bytes(getattr(table, field.name)))
    return total.hexdigest()


def _bytes(column: np.ndarray[Any, Any]) -> bytes:
    """A column of text as one JSON, since its objects have no bytes of their own."""
    return canonical(column.tolist()).encode() if column.dtype == object else column.tobytes()
