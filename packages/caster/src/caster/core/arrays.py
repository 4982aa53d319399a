"""Move arrays between namespaces, dtypes and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import (
    array_namespace,
    device,
    is_array_api_obj,
    is_cupy_array,
    is_numpy_array,
    is_torch_array,
    to_device,
)
from numpy.typing import NDArray
from scipy.sparse import issparse

from caster.core.linalg import Array
from caster.errors import CasterError


def as_real_array(values: Any) -> Array:
    """Convert to float32 or float64: half precision to float32, integers and booleans to float64.

    >>> as_real_array([[1, 2]]).dtype, as_real_array(np.float16([1])).dtype
    (dtype('float64'), dtype('float32'))
    """
    check_dense(values)
    array: Any = values if is_array_api_obj(values) else _from_sequence(values)
    if is_numpy_array(array):
        return _real_numpy(array)
    if is_torch_array(array):
        array = array.detach()  # no gradients are needed
    xp = array_namespace(array)
    if array.dtype in (xp.float32, xp.float64):
        return array
    try:
        real = xp.isdtype(array.dtype, ("bool", "integral", "real floating"))
    except TypeError:  # random keys of JAX
        real = False
    if not real:
        raise CasterError(f"expected numbers, not an array of {array.dtype}")
    narrow = xp.isdtype(array.dtype, "real floating")
    return xp.astype(array, xp.float32 if narrow else xp.float64)


def check_dense(values: Any) -> None:
    """Reject masked, sparse and meta arrays.

    >>> check_dense(np.ma.masked_less([1.0, 2.0], 1.5))
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: masked arrays are not supported: drop or fill the masked values
    """
    if isinstance(values, np.ma.MaskedArray):
        raise CasterError("masked arrays are not supported: drop or fill the masked values")
    if is_torch_array(values):
        if values.device.type == "meta":
            raise CasterError("a tensor on torch's meta device has no values")
        sparse = str(values.layout) != "torch.strided"
    else:
        sparse = issparse(values)
    if sparse:
        raise CasterError("sparse arrays are not supported: convert to a dense array")


def _from_sequence(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last one
        raise CasterError("expected numbers in rows of equal length") from None


def _real_numpy(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)  # np.matrix indexes differently
    if array.dtype.kind == "O":
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise CasterError("expected numbers, but some of these objects are not") from None
    if array.dtype.kind not in "biuf":
        raise CasterError(f"expected numbers, not an array of {array.dtype}")
    narrow = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    with np.errstate(over="ignore"):  # wider types become infinity, which is rejected later
        return array.astype(np.float32 if narrow else np.float64, copy=False)


def to_numpy(array: Any) -> NDArray[Any]:
    """Convert an array on any device to NumPy, without a copy if possible."""
    if is_torch_array(array):
        array = array.detach()
    if is_torch_array(array) or is_cupy_array(array):
        array = to_device(array, "cpu")
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError):
        raise CasterError(f"{type(array).__name__} cannot be read as an array") from None


def like(array: Any, reference: Array, dtype: Any = None) -> Array:
    """Move an array to the namespace and device of a reference."""
    xp = array_namespace(reference)
    if is_array_api_obj(array) and array_namespace(array) is not xp:
        array = to_numpy(array)
    return xp.asarray(array, dtype=dtype, device=device(reference))


class DeviceCopies:
    """A NumPy array, with a cached copy per namespace and device.

    >>> DeviceCopies(np.array([3, 4]))(np.zeros(1))
    array([3, 4])
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self._copies: dict[Any, Array] = {}

    def __call__(self, reference: Array) -> Array:
        """Return the copy in the namespace and on the device of a reference."""
        key = (array_namespace(reference), device(reference))
        if key not in self._copies:
            self._copies[key] = like(self.array, reference)
        return self._copies[key]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the copies."""
        return {"array": self.array, "_copies": {}}
