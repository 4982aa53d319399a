"""Control threads: one at a time per stream, one for BLAS on small matrices, several for a fit."""

from __future__ import annotations

import os
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

MANY_CLASSES = 64  # number of classes from which changing the number of threads pays off
MOST_AT_ONCE = 8  # items of `parallel_map` in flight: each may need much memory

_is_item: ContextVar[bool] = ContextVar("_is_item", default=False)  # inside `parallel_map`

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SingleThread:
    """Raise if a second thread enters, because the batches of a stream are ordered."""

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
    """State of `one_blas_thread`: the first holder sets the limit, the last one removes it."""

    lock = Lock()
    holders = 0
    threads = 1  # BLAS threads without the limit
    setting: Any = None


_limit = _BlasLimit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the block.

    On matrices of a few dozen rows a second thread gains nothing, while idle workers of NumPy's
    and SciPy's separate pools spin on the cores that the next matrix needs. The limit is
    process-wide, and lasts while any Python thread is in such a block.
    """
    with _limit.lock:
        if not _limit.holders:
            _limit.threads = _blas_threads()
            _limit.setting = _blas().limit(limits=1)
            _share_limit()
        _limit.holders += 1
    try:
        yield
    finally:
        with _limit.lock:
            _limit.holders -= 1
            if not _limit.holders:
                _limit.setting.restore_original_limits()
                _share_limit()


def _share_limit() -> None:
    """Let any thread remove the limit, which threadpoolctl 3.8 reserves for its setter."""
    if hasattr(OpenBLASController, "clear_controlling_thread"):
        OpenBLASController.clear_controlling_thread()


def threads_for(n_classes: int) -> AbstractContextManager[None]:
    """Limit BLAS to one thread if there are enough classes for that to pay off."""
    return one_blas_thread() if n_classes >= MANY_CLASSES else nullcontext()


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Map a function over items, with as many threads as BLAS would use; results are in order.

    Parallel items scale better than parallel BLAS, whose threads wait for each other within a
    product and leave all other work to one core. NumPy's products release the interpreter's lock;
    SciPy's BLAS does not. Nested calls start no threads of their own.

    >>> list(parallel_map(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    alone = len(items) < 2 or _is_item.get()
    threads = 1 if alone else min(len(items), _blas_threads(), MOST_AT_ONCE)
    if threads < 2:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()  # bounded, because results may be large
    with one_blas_thread(), ThreadPoolExecutor(threads, "caster") as pool:
        for item in items:
            context = copy_context()  # includes np.errstate
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
