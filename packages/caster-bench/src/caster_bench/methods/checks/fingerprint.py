"""What a method is at a moment: every number it holds, without caches and the frozen model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np

from caster.adapt.protocol import Method
from caster_bench.methods.checks.content import content, is_array, random_state
from caster_bench.methods.checks.insides import held_by, kept, qualified
from caster_bench.methods.checks.walk import PLAIN, walk


def fingerprint(method: Method) -> str:
    """A digest of all of a method's state; two are equal if nothing that matters differs.

    Arrays and tensors enter with dtype, shape and bits, numbers and text as they are, random
    generators and optimizers with their state, functions with what they close over; ids and
    addresses never. Left out are the frozen model, and what an object leaves out of its pickle or
    holds in a `cached_property`: a class says in `__getstate__` what of it is a mere cache.

    >>> import numpy as np
    >>> from caster import wrap
    >>> from caster_bench.methods import Frozen, Source
    >>> method = Frozen(wrap(lambda batch: (batch, batch), version="example-1"), Source())
    >>> before = fingerprint(method)
    >>> method.memory = np.zeros(3)
    >>> fingerprint(method) == before
    False
    """
    digest = hashlib.sha256()
    for path, said in parts_of(method).items():
        digest.update(f"{path}\0{said}\n".encode())
    return digest.hexdigest()


def parts_of(method: Method) -> dict[str, str]:
    """Every part of a method's state by its path, in words or as a digest."""
    return state_of(method, held_by(method.frozen.model))


def state_of(value: Any, outside: Collection[int] = ()) -> dict[str, str]:
    """Every part of an object by its path, in words or as a digest.

    >>> state_of({"step": 3})
    {'': "dict 'step'", "['step']": 'int 3'}
    """
    return {path: _said(part, again) for path, part, again in walk(value, kept, outside)}


def difference(before: dict[str, str], after: dict[str, str]) -> str | None:
    """Where two states differ first; None if they do not.

    >>> difference(state_of({"step": 3}), state_of({"step": 4}))
    "['step']"
    """
    for path in (*before, *after):
        if before.get(path) != after.get(path):
            return path
    return None


def _said(value: Any, again: str | None) -> str:
    kind, drawn = type(value).__qualname__, random_state(value)
    if drawn is not None:
        return f"{kind} {state_of(drawn)}"
    if is_array(value) and not _of_objects(value):
        return f"{kind} {content(value)} {getattr(value, 'requires_grad', False)}"
    if isinstance(value, PLAIN) and not isinstance(value, type):
        return f"{kind} {value!r}"
    if again is not None:
        return f"{kind} as {again}"
    if isinstance(value, dict):  # whose order a method may rely on
        return " ".join([kind, *(repr(key) for key in value if isinstance(key, PLAIN))])
    return qualified(value)


def _of_objects(array: Any) -> bool:
    """Whether an array holds addresses, and what is there is looked at one by one."""
    return isinstance(array, np.ndarray) and array.dtype.hasobject
