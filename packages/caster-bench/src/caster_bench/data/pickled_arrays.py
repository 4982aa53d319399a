"""The names that may stand in a pickle of arrays, and what each is taken to mean.

NumPy pickles an array as a call of a constructor and a description to fill its result with. Here
the names are keys of a table: none is looked up, imported or called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError


@dataclass(frozen=True)
class Symbol:
    """A name from the file, and what its use in a call makes."""

    make: Callable[..., Any]


@dataclass(frozen=True, eq=False)  # two of a kind are still two
class Unbuilt:
    """A dtype, or where it has no `dtype` an array, whose description is still to come."""

    dtype: str | None = None

    def build(self, state: Any) -> Any:
        """What the description makes of it."""
        return _array(*state) if self.dtype is None else _dtype(self.dtype, *state)


def _dtype(name: str, version: int, order: str | bytes, *details: Any) -> np.dtype[Any]:
    if _text(order) not in ("<", ">", "|", "="):
        raise ValueError("an unknown order of bytes")
    return np.dtype(_text(order) + name)


def _array(
    version: int, shape: tuple[int, ...], dtype: Any, fortran: bool, content: Any
) -> NDArray[Any]:
    if not isinstance(dtype, np.dtype):
        raise TypeError("an array without a dtype")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _from_buffer(content: Any, dtype: Any, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    return _array(1, shape, dtype, order == "F", content)


def _number_type(name: str | bytes, *flags: Any) -> Unbuilt:
    if not re.fullmatch("[biuf][1248]", _text(name)):
        raise CasterError("it has an array of something else than numbers")
    return Unbuilt(_text(name))


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in another encoding")
    return text.encode("latin-1")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else str(value, "ascii")


_ARRAY = Symbol(lambda kind, shape, code: Unbuilt())

SYMBOLS = {
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,  # NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,  # NumPy 2
    ("numpy.core.numeric", "_frombuffer"): Symbol(_from_buffer),  # protocol 5
    ("numpy._core.numeric", "_frombuffer"): Symbol(_from_buffer),
    ("numpy", "ndarray"): Symbol(lambda: None),  # an argument of `_reconstruct`, never called
    ("numpy", "dtype"): Symbol(_number_type),
    ("_codecs", "encode"): Symbol(_encoded),  # how Python 3 writes bytes for Python 2
}
