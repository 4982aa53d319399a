"""Tensors of the Open Inference Protocol in JSON and binary, and the errors of requests."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError

Tensor = NDArray[Any]
Tensors = dict[str, Tensor]
BYTES = "BYTES"
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    BYTES: np.dtype(np.object_),
}
KINDS = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # kinds of JSON values per dtype kind
MAX_AXES = 16
LENGTH = struct.Struct("<I")  # before every element of a BYTES tensor


class Failure(Enum):
    """Why a request failed: its HTTP and gRPC status."""

    INVALID = 400, "INVALID_ARGUMENT"
    UNAUTHENTICATED = 401, "UNAUTHENTICATED"
    UNKNOWN = 404, "NOT_FOUND"
    CONFLICT = 409, "FAILED_PRECONDITION"
    TOO_LARGE = 413, "RESOURCE_EXHAUSTED"
    INTERNAL = 500, "INTERNAL"
    BUSY = 503, "RESOURCE_EXHAUSTED"
    UNAVAILABLE = 503, "UNAVAILABLE"


class RequestError(CasterError):
    """A request that is answered with an error, without changing any stream."""

    def __init__(self, message: str, failure: Failure = Failure.INVALID) -> None:
        super().__init__(message)
        self.failure = failure


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The protocol's name for a dtype; text is BYTES.

    >>> datatype_of(np.dtype(np.float32)), datatype_of(np.dtype("<U5"))
    ('FP32', 'BYTES')
    """
    return next((name for name, known in DTYPES.items() if known == dtype), BYTES)


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> Tensor:
    """Read a tensor from its binary contents, without copying them.

    >>> from_bytes("x", "FP32", [1, 2], np.float32([1, 2]).tobytes())
    array([[1., 2.]], dtype=float32)
    """
    dtype, count = _checked(name, datatype, shape)
    if datatype == BYTES:
        return _shaped(name, _elements(name, raw, count), shape)
    if len(raw) != count * dtype.itemsize:
        raise RequestError(
            f"tensor {name}: {datatype} of shape {list(shape)} has {count * dtype.itemsize:,} "
            f"bytes, not {len(raw):,}"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """Read a tensor from JSON values, flat or nested, or from the typed contents of gRPC.

    >>> from_values("x", "INT64", [2, 1], [[1], [2]])
    array([[1],
           [2]])
    """
    dtype, _ = _checked(name, datatype, shape)
    try:
        if datatype == BYTES:
            flat = np.asarray(values, np.object_).ravel().tolist()
            return _shaped(name, [_text(name, value) for value in flat], shape)
        array = np.asarray(values)
        cast = array.astype(dtype)
        fits = dtype.kind not in "iu" or np.array_equal(cast, array)
        if array.size and not (fits and array.dtype.kind in KINDS[dtype.kind]):
            raise ValueError(array.dtype)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise RequestError(f"tensor {name}: its data are not {datatype}") from None
    return _shaped(name, cast, shape)


def to_bytes(array: Tensor) -> bytes:
    """Write the binary contents of a tensor.

    >>> to_bytes(np.array(["ab"]))
    b'\\x02\\x00\\x00\\x00ab'
    """
    dtype = DTYPES[datatype_of(array.dtype)]
    if dtype != np.object_:
        return np.ascontiguousarray(array, dtype).tobytes()
    encoded = [str(value).encode(errors="replace") for value in array.ravel().tolist()]
    return b"".join(LENGTH.pack(len(text)) + text for text in encoded)


def to_json(array: Tensor) -> list[Any]:
    """Flatten a tensor's values to a list; infinities and NaN, which JSON lacks, become null.

    >>> to_json(np.array([[0.5, np.inf]]))
    [0.5, None]
    """
    values: list[Any] = array.ravel().tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [value if math.isfinite(value) else None for value in values]
    return values if array.dtype.kind in "biuf" else [str(value) for value in values]


def _checked(name: str, datatype: str, shape: Sequence[int]) -> tuple[np.dtype[Any], int]:
    """Check datatype and shape; return the dtype and the number of elements."""
    if datatype not in DTYPES:
        raise RequestError(f"tensor {name}: unknown datatype {datatype!r}")
    if len(shape) > MAX_AXES or not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"tensor {name}: {str(shape)[:80]} is not a shape")
    return DTYPES[datatype], math.prod(shape)


def _shaped(name: str, values: Any, shape: Sequence[int]) -> Tensor:
    array = np.asarray(values, np.object_ if isinstance(values, list) else None)
    if array.size != math.prod(shape):
        raise RequestError(f"tensor {name}: shape {list(shape)} does not match {array.size} values")
    return array.reshape(shape)


def _elements(name: str, raw: bytes | memoryview, count: int) -> list[str]:
    """Split a BYTES tensor into its elements."""
    found, at = list[str](), 0
    while at + LENGTH.size <= len(raw) and len(found) <= count:
        (length,) = LENGTH.unpack_from(raw, at)
        at += LENGTH.size + length
        if at <= len(raw):
            found.append(_text(name, bytes(raw[at - length : at])))
    if at != len(raw):
        raise RequestError(f"tensor {name}: the lengths of its elements do not add up to its bytes")
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise RequestError(f"tensor {name}: elements of BYTES must be strings")
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise RequestError(f"tensor {name}: its elements are not UTF-8") from None
