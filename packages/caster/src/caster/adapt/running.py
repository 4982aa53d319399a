"""One batch of images through a frozen model, and errors that say which image it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.reading import Group, ImageArrayBatch
from caster.core.arrays import to_numpy
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs


def run(
    model: FrozenModel,
    batch: ImageArrayBatch,
    names: Sequence[str],
    through: Callable[[Any], Outputs] | None = None,  # that measures what the model does
) -> Outputs:
    """Features and logits in NumPy, in the order of the batch's rows."""
    given = [
        _answer(through or model, model.name, group, names[batch.rows[group.places[0]]])
        for group in batch.groups
    ]
    order = np.argsort([place for group in batch.groups for place in group.places])
    features = _joined([outputs.features for outputs in given], order)
    broken = ~np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
    if broken.any():
        name = names[batch.rows[int(broken.argmax())]]
        raise CasterError(f"{model.name} gives NaN or infinity for {name}")
    if any(outputs.logits is None for outputs in given):
        return Outputs(features, None)
    return Outputs(features, _joined([outputs.logits for outputs in given], order))


@contextmanager
def naming(first: str, count: int) -> Iterator[None]:
    """Errors of a model in one line, with the images it was given."""
    those = first if count == 1 else f"{first} and {count - 1} more"
    try:
        yield
    except (CasterError, RuntimeError) as error:  # torch's, of a shape or of too little memory
        argument = error.argument if isinstance(error, CasterError) else None
        text = error.template if isinstance(error, CasterError) else str(error)
        line = " ".join(text.split())
        raise CasterError(f"{line[:300]} (on {those})", argument=argument) from None


def _answer(through: Callable[[Any], Outputs], name: str, group: Group, first: str) -> Outputs:
    count = len(group.places)
    with naming(first, count):
        outputs = through(group.prepared)
    for array in (outputs.features, outputs.logits):
        if array is not None and len(array) != count:
            raise CasterError(f"{name} gives {len(array)} rows for {count} images")
    return outputs


def _joined(parts: list[Any], order: NDArray[np.intp]) -> NDArray[Any]:
    return np.concatenate([to_numpy(part) for part in parts])[order]
