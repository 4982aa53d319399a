"""Worker processes that return results in order and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from caster.errors import CasterError

Result = TypeVar("Result")


def run_in_order(
    tasks: Iterable[Callable[[], Result]],  # that can be pickled
    workers: int,
) -> Generator[Result]:
    """Yield the results in the order of the tasks, with only a few of them waiting.

    Close it to stop early: its processes end then.
    """
    if workers == 1:
        for task in tasks:
            yield task()
        return
    # Not forked: the parent has threads, and a fork would copy their locks in any state.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=end_with_parent)
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with _defer_ctrl_c():
                waiting.append(pool.submit(task))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise CasterError(
            "a worker process was killed, maybe out of memory: run it again to resume, with a "
            "smaller {argument}",
            argument="workers",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def end_with_parent() -> None:
    """End this process at once when its parent is gone, however the parent ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextmanager
def _defer_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, and hide it from processes started in it.

    They inherit the signal mask. For this process the mask is not enough: another thread may
    receive the signal, and Python then runs the handler in the main thread. If no Python handler is
    set, as in the background of a shell, which ignores the signal, there is nothing to defer.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() == threading.main_thread()
    if not hasattr(signal, "pthread_sigmask") or not in_main or not callable(handler):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(signal.SIGINT, None)
