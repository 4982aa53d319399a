"""Map a model's logits to the classes of a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.core.arrays import DeviceCopies
from caster.core.linalg import Array
from caster.errors import CasterError, first_few
from caster.io.labels import Labels, as_labels

NAME_CLASSES = (
    "list the model's classes in the order of its logits with {argument}, or fit without "
    "its head (`--no-head`)"
)
MIXED_UP = 0.1  # gain in accuracy from which a renaming is suggested
MAX_NAMED = 3  # outputs or classes named in a message


def head_columns(
    classes: Labels,  # (C,)
    n_logits: int | None,
    names: Any = None,  # (n_logits,), the model's classes in the order of its logits
) -> tuple[int, ...] | None:
    """Find the column of each class among the logits; None if the model has no logits.

    With `names`, classes are matched by name. Otherwise integer labels, or folder names that are
    integers, are column indices, as in torch. Other labels must be as many as the columns, and are
    matched in order.

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
            f"the model has {n_logits} logits and the data has {len(classes)} classes "
            f"({first_few(classes, MAX_NAMED)}): {NAME_CLASSES}",
            argument="classes",
        )
    return tuple(range(n_logits))


@dataclass(frozen=True)
class Renaming:
    """A renaming of a model's outputs that makes it far more accurate."""

    accuracy: float
    renamed: float  # accuracy after the renaming
    outputs: tuple[tuple[int, int], ...]  # old and new class of each renamed output

    def message(self, classes: Labels) -> str:  # (C,)
        """Report both accuracies and some of the new names."""
        labels = classes.tolist()
        renamed = [f"{labels[old]!r} to {labels[new]!r}" for old, new in self.outputs[:MAX_NAMED]]
        more = (
            f" and {len(self.outputs) - MAX_NAMED:,} more" if len(self.outputs) > MAX_NAMED else ""
        )
        return (
            f"the frozen head reaches {self.accuracy:.1%}, and {self.renamed:.1%} with the outputs "
            f"renamed: {', '.join(renamed)}{more}"
        )


def better_names(
    answers: NDArray[np.integer[Any]],  # (N,)
    truth: NDArray[np.integer[Any]],  # (N,)
    n_classes: int,
) -> Renaming | None:
    """Suggest a renaming of the outputs if most answers are then right, and far more than now.

    On one half of the samples, a class and an output are paired if each is the other's most
    frequent partner. The other half measures the gain, which must exceed three standard errors.
    Classes have equal weight: otherwise a head that always answers one class would be renamed to
    the most frequent one.

    >>> truth = np.repeat([0, 1, 2], 20)
    >>> better_names((truth + 1) % 3, truth, 3).outputs
    ((0, 2), (1, 0), (2, 1))
    >>> better_names(truth, truth, 3) is better_names(0 * truth, truth, 3) is None
    True
    """
    rows = np.random.default_rng(0).permutation(len(truth))
    pairing, held_out = rows[::2], rows[1::2]
    pairs, counts = np.unique(truth[pairing] * n_classes + answers[pairing], return_counts=True)
    by_class, by_output = np.divmod(pairs[np.argsort(-counts, kind="stable")], n_classes)
    firsts, others = (np.unique(part, return_index=True)[1] for part in (by_class, by_output))
    mutual = np.intersect1d(firsts, others)
    output = np.arange(n_classes)  # of each class; -1 if another class took it
    output[by_output[mutual]] = -1
    output[by_class[mutual]] = by_output[mutual]
    right, renamed = truth == answers, output[truth] == answers
    weight = 1.0 / np.bincount(truth, minlength=n_classes)[truth]
    weight /= weight.mean()
    gained = weight[held_out] * (renamed[held_out].astype(int) - right[held_out])
    enough = max(MIXED_UP * len(gained), 3 * math.sqrt(np.sum(gained**2)))
    if gained.sum() <= enough or np.mean(weight * renamed) <= 0.5:
        return None
    moved = sorted((new, old) for old, new in enumerate(output.tolist()) if new not in (old, -1))
    return Renaming(float(right.mean()), float(renamed.mean()), tuple(moved))


class Columns:
    """Selects the logits of a state's classes, with the indices cached per device.

    >>> Columns((2, 0))(np.array([[1.0, 2.0, 3.0]]))
    array([[3., 1.]])
    """

    def __init__(self, head: tuple[int, ...] | None) -> None:
        self.head = head  # None: all columns
        self._indices = DeviceCopies(np.asarray(head or ()))

    def __call__(self, logits: Array) -> Array:  # (B, n) -> (B, C)
        """Select the columns; return the same array if that is all of them, in order."""
        if self.head is None:
            return logits
        if logits.ndim != 2 or logits.shape[1] <= max(self.head):
            raise CasterError(
                f"the state needs the model's own logits, at least {max(self.head) + 1} per "
                f"sample, and there are {tuple(logits.shape)}"
            )
        if self.head == tuple(range(logits.shape[1])):
            return logits
        return array_namespace(logits).take(logits, self._indices(logits), axis=1)


def _as_integers(classes: Labels) -> list[int] | None:
    """Parse labels that are integers or decimal strings; None if any is neither."""
    labels: list[Any] = classes.tolist()
    if classes.dtype.kind in "iu":
        return labels
    digits = all(isinstance(text, str) and text.isascii() and text.isdigit() for text in labels)
    if not digits or any(text != str(int(text)) for text in labels):  # "007" is a name
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
