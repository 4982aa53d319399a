"""Corrupted images made by several processes, the same bytes whatever their number."""

from __future__ import annotations

import io
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import main_thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.threads import one_blas_thread
from caster.errors import CasterError
from caster_bench.data.corruptions import corrupt
from caster_bench.data.orphans import end_with_parent

QUALITY = 85  # of ImageNet-C's files

Result = NDArray[np.uint8] | list[bytes]  # (n, H, W, 3), or JPEG files


@dataclass(frozen=True)
class Chunk:
    """Some images under a corruption, to be made by any process."""

    pixels: Path  # .npy
    start: int
    stop: int
    corruption: str
    severity: int
    seed: int
    textures: str | None  # of frost
    as_files: bool

    def make(self) -> Result:
        """The corrupted images."""
        images = np.load(self.pixels, mmap_mode="r")[self.start : self.stop]
        options = {"textures": self.textures} if self.corruption == "frost" else {}
        with one_blas_thread():
            made = corrupt(images, self.corruption, self.severity, self.seed, **options)
        return [jpeg(image) for image in made] if self.as_files else made


def jpeg(
    image: NDArray[np.uint8],  # (H, W, 3)
) -> bytes:
    """An image as ImageNet-C's reference saves it: quality 85, optimised tables."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY, optimize=True)
    return file.getvalue()


def in_order(chunks: Iterable[Chunk], workers: int) -> Generator[Result]:
    """The results in the order of the chunks, with no more than a few of them waiting.

    Close it when you stop early: its processes end then.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk.make()
        return
    # Not forked: the parent has threads, whose locks a copy would inherit as they stand.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=end_with_parent)
    waiting: deque[Future[Any]] = deque()
    try:
        for chunk in chunks:
            with _no_ctrl_c():
                waiting.append(pool.submit(chunk.make))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise CasterError(
            "a worker process was ended from outside, maybe for want of memory: run it again to go "
            "on, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and processes that are started in it never see one.

    The mask is what they inherit. It is not enough for this process: another thread of it may take
    the signal, and Python has the main thread answer. Where nothing in Python answers, as in the
    background of a shell, which ignores it, nothing is to be held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    elsewhere = threading.current_thread() != main_thread()
    if not hasattr(signal, "pthread_sigmask") or elsewhere or not callable(handler):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, None)
