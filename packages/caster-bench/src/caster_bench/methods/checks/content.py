"""Arrays and random generators as the checks see them: their bits, and where they lie."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj, is_torch_array

from caster.core.arrays import to_numpy


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor; a scalar of NumPy's is a number, not an array.

    >>> is_array(np.zeros(2)), is_array(np.float32(2))
    (True, False)
    """
    return is_array_api_obj(value) and not isinstance(value, np.generic)


def content(array: Any) -> str:
    """A digest of dtype, shape and bits.

    >>> content(np.zeros(2)) == content(np.zeros(2)), content(np.zeros(2)) == content(-np.zeros(2))
    (True, False)
    """
    if is_torch_array(array):
        import torch

        dtype, plain = str(array.dtype), array.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    else:
        raw = np.ascontiguousarray(to_numpy(array))
        dtype = raw.dtype.str
    digest = hashlib.sha256(f"{dtype} {tuple(array.shape)}\n".encode())
    digest.update(raw.tobytes())
    return digest.hexdigest()


def same(first: Any, second: Any) -> bool:
    """Whether two arrays are equal bit for bit, of one dtype and shape."""
    return content(first) == content(second)


def storage(array: Any) -> tuple[int, int]:
    """Where an array's memory is, and its bytes: of a view those of all it is a view of.

    >>> whole = np.zeros((4, 2))
    >>> storage(whole[1:2]) == storage(whole), storage(whole)[1]
    (True, 64)
    """
    if is_torch_array(array):
        held = array.untyped_storage()
        return held.data_ptr(), held.nbytes()
    if not isinstance(array, np.ndarray):
        return id(array), int(array.nbytes)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data, array.nbytes


def random_state(value: Any) -> Any:
    """Where a random generator stands; None of what is none.

    >>> random_state(random.Random(3)) == random_state(random.Random(3))
    True
    """
    torch = loaded_torch()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.get_state() if torch is not None and isinstance(value, torch.Generator) else None


def loaded_torch() -> Any:
    """The module torch if anybody has imported it, else None: then no object can be of it."""
    return sys.modules.get("torch")
