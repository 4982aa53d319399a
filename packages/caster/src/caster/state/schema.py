"""What every array of a state file must be: its type, shape and least value, one line each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten

import numpy as np

from caster.errors import CasterError
from caster.io.sealed import Arrays


@dataclass(frozen=True)
class Stored:
    """An array of the file."""

    dtype: str
    shape: tuple[str, ...]  # of named sizes; the array is there where all of them are known
    least: float = -math.inf  # value


STORED = {
    "U": Stored("float32", ("features", "directions")),
    "means": Stored("float32", ("classes", "directions")),
    "covariances": Stored("float32", ("classes", "triangle")),
    "counts": Stored("int64", ("classes",), least=1),
    "layer_means": Stored("float32", ("channels",)),
    "layer_variances": Stored("float32", ("channels",), least=0),
    "layer_covariances": Stored("float32", ("layer triangles",)),
}


def check(arrays: Arrays, sizes: Mapping[str, int]) -> None:
    """Raise unless these are the arrays of such sizes, each as `STORED` has it and finite.

    >>> check({"counts": np.array([3, 0])}, {"classes": 2})
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: its counts hold 0, less than 1
    """
    expected = {name: of for name, of in STORED.items() if sizes.keys() >= set(of.shape)}
    if arrays.keys() != expected.keys():
        held, wanted = (", ".join(sorted(names)) for names in (arrays, expected))
        raise CasterError(f"it holds {shorten(held, 200)} instead of {wanted}")
    for name, of in expected.items():
        array, shape = arrays[name], tuple(sizes[size] for size in of.shape)
        if array.dtype != of.dtype or array.shape != shape:
            raise CasterError(
                f"its arrays do not fit together: {name} is {array.dtype} {array.shape}, not "
                f"{of.dtype} {shape}"
            )
        if not np.isfinite(array).all():
            raise CasterError(f"its {name} hold NaN or infinity")
        if array.size and array.min() < of.least:
            raise CasterError(f"its {name} hold {array.min():g}, less than {of.least:g}")
