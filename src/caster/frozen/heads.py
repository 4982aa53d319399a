"""Which of a model's logits belong to which class."""

from __future__ import annotations

from typing import Any

from caster.errors import CasterError
from caster.labels import Labels, as_labels


def head_columns(
    classes: Labels,  # (C,)
    n_logits: int | None,
    names: Any = None,  # (n_logits,), the model's outputs by name, in their order
) -> tuple[int, ...] | None:
    """For every class its column among the logits; None if the model has no logits.

    Names decide where there are any. Whole numbers are columns themselves, as in torch; other
    labels must be as many as the columns, and are taken to be in their order.

    >>> import numpy as np
    >>> head_columns(np.array([3, 7]), n_logits=10), head_columns(np.array(["cat", "dog"]), 2)
    ((3, 7), (0, 1))
    >>> head_columns(np.array(["cat", "dog"]), 3, names=["dog", "owl", "cat"])
    (2, 0)
    """
    if n_logits is None:
        return None
    if names is not None:
        return _by_name(classes, n_logits, as_labels(names).tolist())
    if classes.dtype.kind in "iu":
        if classes.min() < 0 or classes.max() >= n_logits:
            raise CasterError(
                f"labels {classes.min()} to {classes.max()} are no columns of {n_logits} logits: "
                "name the model's classes in their order, or use its features without its head"
            )
        return tuple(classes.tolist())
    if len(classes) != n_logits:
        raise CasterError(
            f"the model gives {n_logits} logits and the data have {len(classes)} classes: "
            "name the model's classes in their order, or use its features without its head"
        )
    return tuple(range(n_logits))


def _by_name(classes: Labels, n_logits: int, names: list[Any]) -> tuple[int, ...]:
    if len(names) != n_logits:
        raise CasterError(f"{len(names)} classes are named, and the model gives {n_logits} logits")
    column = {name: i for i, name in enumerate(names)}
    if len(column) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CasterError(f"the model's class {twice!r} is named twice")
    unknown = [label for label in classes.tolist() if label not in column]
    if unknown:
        raise CasterError(f"the data's class {unknown[0]!r} is not among the model's named classes")
    return tuple(column[label] for label in classes.tolist())
