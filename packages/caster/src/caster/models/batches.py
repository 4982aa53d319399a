"""What a DataLoader yields: the inputs of a batch, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caster.errors import CasterError

INPUTS = "pixel_values", "images", "image", "inputs", "x"  # names in a batch that is a dict


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch, without labels or whatever else a DataLoader yields.

    An array is a batch itself, and so is a list of arrays with equally many axes: its rows.

    >>> import numpy as np
    >>> inputs_of([np.zeros((2, 3)), np.array([0, 1])]).shape
    (2, 3)
    """
    if isinstance(batch, Mapping):
        return named(batch, INPUTS)
    if isinstance(batch, tuple | list) and batch:
        axes, *others = (getattr(part, "ndim", 0) for part in batch)
        if axes > 1 and all(other < axes for other in others):
            return batch[0]
    return batch


def named(batch: Mapping[Any, Any], names: tuple[str, ...]) -> Any:
    """The first of these entries that a batch has."""
    for name in names:
        if name in batch:
            return batch[name]
    has = ", ".join(map(str, batch)) or "nothing"
    raise CasterError(f"a batch that is a dict must have one of {', '.join(names)}: it has {has}")
