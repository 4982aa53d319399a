"""Class labels of any hashable kind: encoded as indices, stored as JSON."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj
from numpy.typing import NDArray

from caster.core.arrays import check_dense, to_numpy
from caster.errors import CasterError, first_few

Labels = NDArray[Any]
LABEL_BYTES = 1 << 26  # of all labels of a state, as NumPy stores them
STORABLE = re.compile(r"[<>|=][biufUO]\d*")  # dtypes, as written by `dtype.str`
_TYPES = {"b": bool, "i": int, "u": int, "f": float, "U": str}  # by kind of dtype


def as_labels(values: Any) -> Labels:  # (n,)
    """Convert to a one-dimensional label array; values without a NumPy type become objects.

    >>> as_labels(["cat", "dog"]).dtype.kind, as_labels([("cat", 1), "dog"]).dtype.kind
    ('U', 'O')
    """
    check_dense(values)
    if is_array_api_obj(values) or hasattr(values, "__array__"):
        labels = to_numpy(values)
        if labels.ndim != 1:
            raise CasterError(f"labels must be one-dimensional, not {labels.shape}")
    elif not isinstance(values, Iterable):
        raise CasterError(f"labels must be a sequence, not {type(values).__name__}")
    else:
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        kinds = {type(value) for value in values}
        plain = len(kinds) == 1 and kinds <= {bool, int, float, str}
        labels = np.asarray(values) if plain else as_object_array(values)
    _check_classes(labels)
    return labels


def _check_classes(labels: Labels) -> None:
    if labels.dtype.kind not in "biufUO":
        raise CasterError(f"labels of type {labels.dtype} are not supported: use numbers or text")
    if labels.dtype.kind == "f" and not np.all(np.isfinite(labels)):
        raise CasterError("labels are missing (NaN) or infinite: drop those rows")
    if labels.dtype.kind == "f" and not np.all(labels == np.round(labels)):
        raise CasterError("Unknown label type: continuous numbers are not classes")
    if labels.dtype.kind == "O":
        for label in labels.tolist():
            try:
                hash(label)
                missing = bool(label != label)
            except (TypeError, ValueError, RuntimeError):  # lists, arrays, pandas.NA, tensors
                raise CasterError(
                    f"labels must be hashable values, and {reprlib.repr(label)} is not"
                ) from None
            if missing:
                raise CasterError("labels are missing (NaN): drop those rows")


def unique_labels(labels: Labels) -> Labels:  # (C,)
    """Return the distinct labels, sorted if possible, else in order of first appearance.

    >>> unique_labels(as_labels(["dog", 3, "dog"]))
    array(['dog', 3], dtype=object)
    """
    if labels.dtype.kind != "O":
        return np.asarray(np.unique(labels))
    distinct: list[Any] = list(dict.fromkeys(labels.tolist()))
    with suppress(TypeError):  # types that cannot be compared with each other
        distinct.sort()
    return as_object_array(distinct)


def as_object_array(values: Iterable[Any]) -> Labels:
    """Convert to an object array with one element per value, even for sequences."""
    values = list(values)
    objects = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        objects[i] = value
    return objects


def encode(labels: Labels, classes: Labels) -> NDArray[np.int64]:  # (n,), (C,) -> (n,)
    """Return the index of every label in `classes`; an unknown label is an error.

    >>> encode(as_labels(["b", "a"]), as_labels(["a", "b"]))
    array([1, 0])
    """
    index = {label: i for i, label in enumerate(classes.tolist())}
    try:
        return np.fromiter((index[v] for v in labels.tolist()), dtype=np.int64, count=len(labels))
    except KeyError as missing:
        shown = first_few(map(repr, classes.tolist()))
        raise CasterError(
            f"label {missing.args[0]!r} is not one of the {len(classes):,} classes ({shown})"
        ) from None


def rank_in_class(classes: NDArray[np.integer]) -> NDArray[np.intp]:  # (n,) -> (n,)
    """Number the samples of every class, given their class indices.

    >>> rank_in_class(np.array([1, 0, 1, 1]))
    array([0, 0, 1, 2])
    """
    order, counts = np.argsort(classes, kind="stable"), np.bincount(classes)
    rank = np.empty(len(classes), np.intp)
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


class LabelIndex:
    """Number labels in order of first appearance, before all of them are known.

    >>> index = LabelIndex()
    >>> index(as_labels(["dog", "cat", "dog"])), index(as_labels(["ape", "cat"]))
    (array([0, 1, 0]), array([2, 1]))
    >>> index.of(index.classes)  # of the sorted labels
    array([2, 1, 0])
    """

    def __init__(self) -> None:
        self._parts: list[Labels] = []
        self._numbers: dict[Any, int] = {}

    def __call__(self, labels: Labels) -> NDArray[np.int64]:  # (n,)
        """Return the number of every label, assigning numbers to new ones."""
        self._parts.append(labels)
        numbers = (self._numbers.setdefault(v, len(self._numbers)) for v in labels.tolist())
        return np.fromiter(numbers, dtype=np.int64, count=len(labels))

    @property
    def classes(self) -> Labels:  # (C,)
        """Distinct labels so far, in the order of `unique_labels`."""
        return unique_labels(as_labels(np.concatenate(self._parts)))

    def of(self, classes: Labels) -> NDArray[np.int64]:  # (C,)
        """Return the numbers of these classes; an unknown class is an error."""
        try:
            return np.array([self._numbers[label] for label in classes.tolist()])
        except KeyError as missing:
            raise CasterError(f"no sample has the label {missing.args[0]!r}") from None


def is_by_class(labels: Labels | None) -> bool:
    """Whether labels are sorted by class, so that batches in this order have few classes.

    This is so if the label changes at most half as often as in random order: a list that runs
    through the classes twice, such as pets:trainval, is no better than one that does so once.

    >>> is_by_class(np.array(["cat", "cat", "dog"])), is_by_class(np.array(["cat", "dog", "cat"]))
    (True, False)
    """
    if labels is None:
        return False
    counts = np.unique(labels, return_counts=True)[1].astype(np.float64)
    changes = np.count_nonzero(labels[1:] != labels[:-1])
    in_random_order = len(labels) - np.sum(counts**2) / len(labels)
    few = max(len(counts) - 1, in_random_order / 2)
    return len(counts) < len(labels) and bool(changes <= few)


def to_json(classes: Labels) -> str:
    """Convert labels to JSON; supports numbers, text, booleans, None and tuples of these."""
    _check_bytes(classes.dtype, len(classes))
    return json.dumps({"dtype": classes.dtype.str, "labels": [_pack(v) for v in classes.tolist()]})


def from_json(text: str) -> Labels:
    """Restore labels written by `to_json`, with the same types; anything else is an error.

    >>> from_json(to_json(as_labels([("cat", 1), "dog"])))
    array([('cat', 1), 'dog'], dtype=object)
    """
    stored = json.loads(text)
    if not isinstance(stored["labels"], list) or not STORABLE.fullmatch(stored["dtype"]):
        raise CasterError("its labels have an unsupported format")
    dtype, values = np.dtype(stored["dtype"]), [_unpack(v) for v in stored["labels"]]
    _check_bytes(dtype, len(values))
    labels = as_object_array(values)
    if dtype.kind != "O":
        labels = np.asarray(values, dtype=dtype)
        same = labels.ndim == 1 and labels.tolist() == values
        if not same or any(type(value) is not _TYPES[dtype.kind] for value in values):
            raise CasterError(f"its labels are not of their type {dtype}")
    _check_classes(labels)
    if len(set(labels.tolist())) < len(labels):
        raise CasterError("it names a class twice")
    return labels


def _check_bytes(dtype: np.dtype[Any], count: int) -> None:
    """Bound the memory of labels: NumPy pads every text to the longest."""
    if dtype.itemsize * count > LABEL_BYTES:
        raise CasterError(
            f"{count} labels of type {dtype} take more than {LABEL_BYTES >> 20} MiB: use shorter "
            "labels"
        )


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_pack(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CasterError(
        f"a label of type {type(value).__name__} cannot be stored in a state file: "
        "use numbers, text, booleans, None or tuples of these"
    )


def _unpack(value: Any) -> Any:
    return tuple(_unpack(v) for v in value) if isinstance(value, list) else value
