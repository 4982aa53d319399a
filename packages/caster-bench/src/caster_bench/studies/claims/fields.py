"""Fields of a TOML table, each of the kind it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from caster.errors import CasterError
from caster_bench.sweeps.names import known

T = TypeVar("T")


def check(table: Any, keys: tuple[str, ...]) -> None:
    """Refuse what is not a table of these keys."""
    if not isinstance(table, dict):
        raise CasterError("there must be a table")
    for key in table:
        known(key, keys, "key")


def listed(table: dict[str, Any], key: str) -> list[Any]:
    """A list that must be there, and not empty."""
    found = table.get(key)
    if not isinstance(found, list) or not found:
        raise CasterError(f"there is no [[{key}]]")
    return found


def inner(table: dict[str, Any], key: str) -> dict[str, Any]:
    """A table that may be there."""
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise CasterError(f"{key!r} must be a table")
    return found


def texts(table: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of text that may be there."""
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise CasterError(f"{key!r} must be a list of text")
    return tuple(found)


def text(table: dict[str, Any], key: str) -> str:
    """Text that must be there."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CasterError(f"{key!r} must be there, as text")
    return value.strip()


def maybe(table: dict[str, Any], key: str) -> str | None:
    """Text that may be there."""
    return text(table, key) if key in table else None


def within(where: str, make: Callable[[], T]) -> T:
    """What is made, or its error with the place it came from."""
    try:
        return make()
    except CasterError as error:
        raise CasterError(f"{where}: {error}") from None
