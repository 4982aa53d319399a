"""Threads: one at a time in a stream, and one for BLAS in sequences of small factorisations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

from threadpoolctl import ThreadpoolController

from caster.errors import CasterError

MANY_CLASSES = 64  # from here on, setting the number of threads pays off

_setting = Lock()


class SingleThread:
    """Reject a second thread: the batches of a stream have an order."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CasterError(
                "two threads called one stream at once: give every thread and every client a "
                "stream of its own, with new_stream()"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start unlocked."""
        return type(self), ()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the block.

    On matrices of a few dozen rows a second thread gains nothing, while idle workers of NumPy's
    and SciPy's separate pools spin on the cores that the next matrix needs. The setting is
    process-wide: of several Python threads only the first sets it, so that it restores the
    original value.
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
    """Limit BLAS to one thread if there are enough classes for that to pay off."""
    return one_blas_thread() if n_classes >= MANY_CLASSES else nullcontext()


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
