"""Threads: one at a time in a stream, one for BLAS in small problems, several for a large fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import cache
from threading import Lock
from typing import Any, TypeVar

from threadpoolctl import OpenBLASController, ThreadpoolController

from caster.errors import CasterError

MANY_CLASSES = 64  # from here on, setting the number of threads pays off
MOST_AT_ONCE = 8  # items of `parallel_map`: each may need much memory

_is_item: ContextVar[bool] = ContextVar("_is_item", default=False)  # of `parallel_map`

Item = TypeVar("Item")
Result = TypeVar("Result")


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


class _BlasLimit:
    """The limit of `one_blas_thread`: the first holder sets it, the last one lifts it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.holders = 0
        self.threads = 1  # of BLAS without the limit

    def acquire(self) -> None:
        with self.lock:
            if not self.holders:
                self.threads = _blas_threads()
                self._setting = _blas().limit(limits=1)
                self._share()
            self.holders += 1

    def release(self) -> None:
        with self.lock:
            self.holders -= 1
            if not self.holders:
                self._setting.restore_original_limits()
                self._share()

    def _share(self) -> None:
        """Let every thread lift the limit, not only the one that set it: threadpoolctl 3.8."""
        if hasattr(OpenBLASController, "clear_controlling_thread"):
            OpenBLASController.clear_controlling_thread()


_limit = _BlasLimit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the block.

    On matrices of a few dozen rows a second thread gains nothing, while idle workers of NumPy's
    and SciPy's separate pools spin on the cores that the next matrix needs. The setting is
    process-wide, and stands while any Python thread is in such a block.
    """
    _limit.acquire()
    try:
        yield
    finally:
        _limit.release()


def threads_for(n_classes: int) -> AbstractContextManager[None]:
    """Limit BLAS to one thread if there are enough classes for that to pay off."""
    return one_blas_thread() if n_classes >= MANY_CLASSES else nullcontext()


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results in order, computed by as many threads as BLAS would use for one item.

    Whole items scale better than the threads of BLAS, which wait for each other within a product
    and leave every other step to one core. NumPy's products release the interpreter's lock;
    SciPy's BLAS does not. A call within an item starts no threads of its own.

    >>> list(parallel_map(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    alone = len(items) < 2 or _is_item.get()
    threads = 1 if alone else min(len(items), _blas_threads(), MOST_AT_ONCE)
    if threads < 2:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()  # bounded: results may be large
    with one_blas_thread(), ThreadPoolExecutor(threads, "caster") as pool:
        for item in items:
            context = copy_context()  # np.errstate
            pending.append(pool.submit(context.run, _run_item, function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _run_item(function: Callable[[Item], Result], item: Item) -> Result:
    _is_item.set(True)
    return function(item)


def _blas_threads() -> int:
    if _limit.holders:
        return _limit.threads
    return max((library["num_threads"] for library in _blas().info()), default=1)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
