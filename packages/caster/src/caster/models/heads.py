"""Map a model's logits to classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from caster.core.arrays import DeviceCopies
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.io.labels import Labels, as_labels

NAME_CLASSES = (
    "list the model's classes in the order of its logits with {argument}, or use its features only"
)


def head_columns(
    classes: Labels,  # (C,)
    n_logits: int | None,
    names: Any = None,  # (n_logits,), the model's classes in the order of its logits
) -> tuple[int, ...] | None:
    """The column of each class among the logits; None if the model has no logits.

    Names decide if there are any. Otherwise integers, also as names of folders, are columns, as in
    torch; other labels must be as many as the columns and are taken in order.

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
    numbers = _as_integers(classes)
    if numbers is not None:
        if min(numbers) < 0 or max(numbers) >= n_logits:
            raise CasterError(
                f"labels {min(numbers)} to {max(numbers)} are not columns of {n_logits} logits: "
                f"{NAME_CLASSES}",
                argument="classes",
            )
        return tuple(numbers)
    if len(classes) != n_logits:
        raise CasterError(
            f"the model has {n_logits} logits and the data has {len(classes)} classes: "
            f"{NAME_CLASSES}",
            argument="classes",
        )
    return tuple(range(n_logits))


def class_logits(logits: Any, head: tuple[int, ...] | None) -> Any:  # (B, n) -> (B, C)
    """Select the logits of a state's classes in NumPy; all of them without a head.

    >>> import numpy as np
    >>> class_logits(np.array([[1.0, 2.0, 3.0]]), head=(2, 0))
    array([[3., 1.]])
    """
    if head is None:
        return logits
    if logits.ndim != 2 or logits.shape[1] <= max(head):
        raise CasterError(
            f"the state needs the model's own logits, at least {max(head) + 1} per image, and the "
            f"file has {tuple(logits.shape)}"
        )
    return logits[:, list(head)]


class Columns:
    """`class_logits` in any array namespace, with the indices cached per device.

    >>> Columns((2, 0))(np.array([[1.0, 2.0, 3.0]]))
    array([[3., 1.]])
    """

    def __init__(self, head: tuple[int, ...] | None) -> None:
        self.head = head  # None: all columns
        self._indices = DeviceCopies(np.asarray(head or ()))

    def __call__(self, logits: Array) -> Array:  # (B, n) -> (B, C)
        """Select the columns; returns the same array if they are all of them, in order."""
        width = int(logits.shape[1])
        if self.head is None or self.head == tuple(range(width)):
            return logits
        if width <= max(self.head):
            needed = max(self.head) + 1
            raise CasterError(f"the model has {width} logits, and the state needs {needed}")
        return array_namespace(logits).take(logits, self._indices(logits), axis=1)


def _as_integers(classes: Labels) -> list[int] | None:
    """Labels that are integers, or text of integers; None if any is not."""
    labels: list[Any] = classes.tolist()
    if classes.dtype.kind in "iu":
        return labels
    digits = all(isinstance(text, str) and text.isascii() and text.isdigit() for text in labels)
    if not digits or any(text != str(int(text)) for text in labels):  # 007 is a name
        return None
    return [int(text) for text in labels]


def _by_name(classes: Labels, n_logits: int, names: list[Any]) -> tuple[int, ...]:
    if len(names) != n_logits:
        raise CasterError(f"{len(names)} classes are named, and the model has {n_logits} logits")
    column = {name: i for i, name in enumerate(names)}
    if len(column) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CasterError(f"the model's class {twice!r} is named twice")
    unknown = [label for label in classes.tolist() if label not in column]
    if unknown:
        raise CasterError(f"the class {unknown[0]!r} of the data is not one of the model's classes")
    return tuple(column[label] for label in classes.tolist())
