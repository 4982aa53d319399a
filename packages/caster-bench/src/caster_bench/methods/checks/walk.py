"""Everything an object holds, to any depth."""

from __future__ import annotations

import logging
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

Children = Callable[[Any], Iterable[tuple[str, Any]]]  # of a value, each with a label
PLAIN = (bool, int, float, complex, np.generic, str, bytes, type(None), type, np.dtype)
# What these refer to is not their owner's: loggers lead to all of a program.
OPAQUE = (types.ModuleType, logging.Logger, logging.Handler, weakref.ref)
_GLOBAL: tuple[Any, ...] = (random.random, np.random.random)
SHARED = {id(draw.__self__) for draw in _GLOBAL}  # generators of the whole program


def walk(
    root: Any, children: Children, outside: Collection[int] = ()
) -> Iterator[tuple[str, Any, str | None]]:
    """Path and value of all that is reachable, depth first, and where a value was met before.

    What was met before is not entered again. `outside` are ids of what does not belong to it.

    >>> from caster_bench.methods.checks.insides import kept
    >>> both = [1.5]
    >>> [(path, again) for path, value, again in walk({"a": both, "b": both}, kept)]
    [('', None), ("['a']", None), ("['a'][0]", None), ("['b']", "['a']")]
    """
    held: dict[int, tuple[Any, str]] = {}  # alive, or another object could get its id
    todo = [("", root)]
    while todo:
        path, value = todo.pop()
        if value is not root and (id(value) in outside or id(value) in SHARED):
            continue
        found = held.get(id(value))
        yield path, value, None if found is None else found[1]
        if found is None and not isinstance(value, PLAIN + OPAQUE):
            below = [(path + label, child) for label, child in children(value)]
            todo.extend(reversed(below))
            if not isinstance(value, tuple):  # which two may share, or not, as Python likes
                held[id(value)] = value, path
