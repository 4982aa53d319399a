"""Pictures to prepared batches: decoded by several threads, one batch ahead of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from caster.data import Pictures, UnreadablePicture
from caster.errors import CasterError
from caster.frozen.preprocessing import Picture, Preprocessing

THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """Pictures as the model takes them, and which ones they are."""

    rows: list[int]  # of the pictures that could be read
    prepared: NDArray[Any] | None  # None if none could
    unreadable: dict[int, str]  # row to what is wrong with it


def read_batches(
    pictures: Pictures,
    preprocessing: Preprocessing,
    rows: Sequence[int],
    batch_size: int,
    *,
    skip_unreadable: bool,
) -> Iterator[PictureBatch]:
    """Batches of these rows, in this order. An unreadable picture ends it, unless skipped."""

    def prepared(row: int) -> Picture:
        return preprocessing.fitted(pictures.read(row))

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="caster-read")
    try:
        pending: tuple[Sequence[int], list[Future[Picture]]] | None = None
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            begun = chosen, [pool.submit(prepared, row) for row in chosen]
            if pending is not None:
                yield _gathered(*pending, preprocessing, skip_unreadable)
            pending = begun
        if pending is not None:
            yield _gathered(*pending, preprocessing, skip_unreadable)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _gathered(
    rows: Sequence[int],
    decoded: list[Future[Picture]],
    preprocessing: Preprocessing,
    skip_unreadable: bool,
) -> PictureBatch:
    readable: dict[int, Picture] = {}
    unreadable: dict[int, str] = {}
    for row, future in zip(rows, decoded, strict=True):
        try:
            readable[row] = future.result()
        except UnreadablePicture as error:
            if not skip_unreadable:
                raise CasterError(
                    f"{error}: repair it, or skip it with --skip-unreadable"
                ) from None
            unreadable[row] = str(error)
    batch = preprocessing.batch(list(readable.values())) if readable else None
    return PictureBatch(list(readable), batch, unreadable)
