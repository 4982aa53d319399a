"""Moving arrays between namespaces, dtypes and devices: the one place that names NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import (
    array_namespace,
    device,
    is_array_api_obj,
    is_cupy_array,
    is_torch_array,
    to_device,
)
from numpy.typing import NDArray

from caster.core.linalg import Array


def as_real_array(values: Any) -> Array:
    """An array of float32 or float64; half precision widens to float32, integers to float64.

    >>> as_real_array([[1, 2]]).dtype, as_real_array(np.float16([1])).dtype
    (dtype('float64'), dtype('float32'))
    """
    array: Any = values if is_array_api_obj(values) else np.asarray(values)
    if is_torch_array(array):
        array = array.detach()  # nothing here is differentiated
    if array.dtype == object:
        array = array.astype(np.float64)
    xp = array_namespace(array)
    if array.dtype in (xp.float32, xp.float64):
        return array
    if xp.isdtype(array.dtype, "real floating"):
        return xp.astype(array, xp.float32)
    return xp.astype(array, xp.float64)


def to_numpy(array: Any) -> NDArray[Any]:
    """A NumPy copy or view of an array on any device."""
    if is_torch_array(array) or is_cupy_array(array):
        array = to_device(array, "cpu")
    return np.asarray(array)


def like(array: Any, reference: Array, dtype: Any = None) -> Array:
    """An array in the reference's namespace and on its device."""
    xp = array_namespace(reference)
    if is_array_api_obj(array) and array_namespace(array) is not xp:
        array = to_numpy(array)
    return xp.asarray(array, dtype=dtype, device=device(reference))
