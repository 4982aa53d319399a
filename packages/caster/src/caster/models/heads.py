"""Which of a model's logits belong to which class."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from caster.core.arrays import Beside
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.io.labels import Labels, as_labels


def head_columns(
    classes: Labels,  # (C,)
    n_logits: int | None,
    names: Any = None,  # (n_logits,), the model's outputs by name, in their order
) -> tuple[int, ...] | None:
    """For every class its column among the logits; None if the model has no logits.

    Names decide where there are any. Whole numbers, also as names of folders, are columns
    themselves, as in torch; other labels must be as many as the columns, and are taken to be in
    their order.

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
    numbers = _as_numbers(classes)
    if numbers is not None:
        if min(numbers) < 0 or max(numbers) >= n_logits:
            raise CasterError(
                f"labels {min(numbers)} to {max(numbers)} are no columns of {n_logits} logits: "
                "name the model's classes in their order with {argument}, or use its features only",
                argument="classes",
            )
        return tuple(numbers)
    if len(classes) != n_logits:
        raise CasterError(
            f"the model gives {n_logits} logits and the data have {len(classes)} classes: "
            "name the model's classes in their order with {argument}, or use its features only",
            argument="classes",
        )
    return tuple(range(n_logits))


def of_classes(logits: Any, head: tuple[int, ...] | None) -> Any:  # (B, n) -> (B, C), NumPy
    """A model's logits, of a state's classes in their order; without a head they are so already.

    >>> import numpy as np
    >>> of_classes(np.array([[1.0, 2.0, 3.0]]), head=(2, 0))
    array([[3., 1.]])
    """
    if head is None:
        return logits
    if logits.ndim != 2 or logits.shape[1] <= max(head):
        raise CasterError(
            f"the state is bound to a model of at least {max(head) + 1} logits, and the file has "
            f"{tuple(logits.shape)}: give them as the model does"
        )
    return logits[:, list(head)]


class Columns:
    """A model's logits of the classes at hand, in their order.

    >>> Columns((2, 0))(np.array([[1.0, 2.0, 3.0]]))
    array([[3., 1.]])
    """

    def __init__(self, head: tuple[int, ...] | None) -> None:
        self.head = head  # None: all of them
        self._indices = Beside(np.asarray(head or ()))

    def __call__(self, logits: Array) -> Array:  # (B, n) -> (B, C)
        """Those of the classes; the very same array where those are all there are."""
        width = int(logits.shape[1])
        if self.head is None or self.head == tuple(range(width)):
            return logits
        if width <= max(self.head):
            needed = max(self.head) + 1
            raise CasterError(f"the model gives {width} logits, too few for the state: {needed}")
        return array_namespace(logits).take(logits, self._indices(logits), axis=1)


def _as_numbers(classes: Labels) -> list[int] | None:
    """Labels that are whole numbers, written as numbers or as text; None if they are not."""
    labels: list[Any] = classes.tolist()
    if classes.dtype.kind in "iu":
        return labels
    written = all(isinstance(text, str) and text.isascii() and text.isdigit() for text in labels)
    if not written or any(text != str(int(text)) for text in labels):  # 007 is a name
        return None
    return [int(text) for text in labels]


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
