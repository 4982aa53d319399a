"""Extract the inputs from whatever a DataLoader yields, with or without labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caster.errors import CasterError

INPUTS = "pixel_values", "images", "image", "inputs", "x"  # accepted keys of a dict


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch, without labels or other extras.

    An array is the inputs themselves. So is a list of arrays with the same number of axes, which
    are its rows.

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
    """Return the first of these entries that a batch has."""
    for name in names:
        if name in batch:
            return batch[name]
    has = ", ".join(map(str, batch)) or "nothing"
    raise CasterError(f"a batch that is a dict must have one of {', '.join(names)}: it has {has}")
