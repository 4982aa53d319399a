"""What a method keeps alive from batch to batch, counted."""

from __future__ import annotations

from dataclasses import dataclass

from caster.adapt.protocol import Method
from caster_bench.methods.checks.content import is_array, storage
from caster_bench.methods.checks.insides import held_by, kept, referents
from caster_bench.methods.checks.walk import Children, walk


@dataclass(frozen=True)
class Size:
    """How much there is."""

    bytes: int  # of arrays and tensors, memory that several share once
    items: int  # other objects and numbers


def reachable_bytes(method: Method, *, caches: bool = True) -> int:
    """Bytes of all arrays and tensors a method keeps alive, beside the frozen model's own.

    Without `caches` only of what makes up its state, as `fingerprint` sees it.

    >>> import numpy as np
    >>> from caster import wrap
    >>> from caster_bench.methods import Frozen, Source
    >>> method = Frozen(wrap(lambda batch: (batch, batch), version="example-1"), Source())
    >>> before = reachable_bytes(method)
    >>> method.memory = [np.zeros(3), {"more": np.zeros((2, 3))}]
    >>> reachable_bytes(method) - before
    72
    """
    return measure(method, referents if caches else kept).bytes


def measure(method: Method, children: Children = referents) -> Size:
    """Bytes, and how many things there are beside."""
    outside = held_by(method.frozen.model)
    shared = {storage(value)[0] for value in outside.values() if is_array(value)}
    memory: dict[int, int] = {}
    items = 0
    for _, value, again in walk(method, children, outside):
        if is_array(value):
            memory.update([storage(value)])
        elif again is None:
            items += 1
    return Size(sum(size for place, size in memory.items() if place not in shared), items)
