"""One function of many things, on every core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

FEW = 200  # cells in folders, below which other processes take longer to start than they save
FEW_PACKED = 5000  # the same of packed cells, which are read ten times as fast
MOST = 8  # processes: beyond these the disk is what is waited for
CHUNKS = 16  # a process, so that none waits long for the last

Given = TypeVar("Given")
Made = TypeVar("Made")


def mapped(function: Callable[[Given], Made], things: Sequence[Given], few: bool) -> Iterator[Made]:
    """What a function of a module makes of each, in order; in this process where they are few.

    >>> list(mapped(abs, [-1, 2], few=True))
    [1, 2]
    """
    workers = min(MOST, os.cpu_count() or 1)
    if few or workers == 1:
        yield from map(function, things)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        chunk = max(1, len(things) // (workers * CHUNKS))
        yield from pool.map(function, things, chunksize=chunk)
