"""One BLAS thread for work that is a long row of small factorisations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController

_lock = Lock()
_inside = 0
_limiter = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread; the last of several concurrent holders restores the old count.

    On matrices of a few dozen rows a second thread gains nothing, while the idle workers of
    NumPy's and SciPy's separate pools spin on the very cores the next matrix needs.
    """
    global _inside, _limiter
    with _lock:
        if _inside == 0:
            _limiter = _blas().limit(limits=1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _limiter.restore_original_limits()


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
