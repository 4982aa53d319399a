"""One BLAS thread for work that is a long row of small factorisations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController

MANY_CLASSES = 64  # from here on, setting the number of threads pays for itself

_setting = Lock()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread inside the block.

    On matrices of a few dozen rows a second thread gains nothing, while the idle workers of
    NumPy's and SciPy's separate pools spin on the very cores the next matrix needs. The count
    belongs to the whole process: of several Python threads in here at once only the first sets
    it, so that what it restores is what was there before any of them came.
    """
    if not _setting.acquire(blocking=False):
        yield
        return
    try:
        with _blas().limit(limits=1):
            yield
    finally:
        _setting.release()


def threads_for(n_classes: int) -> AbstractContextManager[None]:
    """One BLAS thread where the classes are many enough for it to pay; else no change."""
    return one_blas_thread() if n_classes >= MANY_CLASSES else nullcontext()


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
