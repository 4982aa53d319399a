"""Moving arrays between namespaces, dtypes and devices: the one place that names NumPy."""

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
    """An array of float32 or float64; half precision widens to float32, other numbers to float64.

    >>> as_real_array([[1, 2]]).dtype, as_real_array(np.float16([1])).dtype
    (dtype('float64'), dtype('float32'))
    """
    check_dense(values)
    array: Any = values if is_array_api_obj(values) else _from_sequence(values)
    if is_numpy_array(array):
        return _real_numpy(array)
    if is_torch_array(array):
        array = array.detach()  # nothing here is differentiated
    xp = array_namespace(array)
    if array.dtype in (xp.float32, xp.float64):
        return array
    try:
        real = xp.isdtype(array.dtype, ("bool", "integral", "real floating"))
    except TypeError:  # keys of JAX's generators
        real = False
    if not real:
        raise CasterError(f"numbers are needed, not an array of {array.dtype}")
    narrow = xp.isdtype(array.dtype, "real floating")
    return xp.astype(array, xp.float32 if narrow else xp.float64)


def check_dense(values: Any) -> None:
    """Reject arrays some of whose values are missing or not stored.

    >>> check_dense(np.ma.masked_less([1.0, 2.0], 1.5))
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: masked arrays are not supported: drop or fill what is masked
    """
    if isinstance(values, np.ma.MaskedArray):
        raise CasterError("masked arrays are not supported: drop or fill what is masked")
    if is_torch_array(values):
        if values.device.type == "meta":
            raise CasterError("a tensor on torch's meta device holds no numbers")
        sparse = str(values.layout) != "torch.strided"
    else:
        sparse = issparse(values)
    if sparse:
        raise CasterError("sparse arrays are not supported: convert to a dense one")


def _from_sequence(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last one
        raise CasterError("numbers are needed in rows of equal length") from None


def _real_numpy(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)  # np.matrix has other rules of indexing
    if array.dtype.kind == "O":
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise CasterError("numbers are needed, and not all of these objects are") from None
    if array.dtype.kind not in "biuf":
        raise CasterError(f"numbers are needed, not an array of {array.dtype}")
    narrow = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    with np.errstate(over="ignore"):  # of a wider type: infinity, which is rejected as such
        return array.astype(np.float32 if narrow else np.float64, copy=False)


def to_numpy(array: Any) -> NDArray[Any]:
    """A NumPy copy or view of an array on any device."""
    if is_torch_array(array):
        array = array.detach()
    if is_torch_array(array) or is_cupy_array(array):
        array = to_device(array, "cpu")
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError):
        raise CasterError(f"{type(array).__name__} cannot be read as an array") from None


def like(array: Any, reference: Array, dtype: Any = None) -> Array:
    """An array in the reference's namespace and on its device."""
    xp = array_namespace(reference)
    if is_array_api_obj(array) and array_namespace(array) is not xp:
        array = to_numpy(array)
    return xp.asarray(array, dtype=dtype, device=device(reference))


class Beside:
    """A NumPy array wherever it is needed: a copy for every namespace and device, made once.

    >>> Beside(np.array([3, 4]))(np.zeros(1))
    array([3, 4])
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self._placed: dict[Any, Array] = {}

    def __call__(self, reference: Array) -> Array:
        """The array in the reference's namespace and on its device."""
        place = (array_namespace(reference), device(reference))
        if place not in self._placed:
            self._placed[place] = like(self.array, reference)
        return self._placed[place]

    def __getstate__(self) -> dict[str, Any]:
        """Pickles carry the array alone."""
        return {"array": self.array, "_placed": {}}
