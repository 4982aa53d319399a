"""Pictures to prepared batches: decoded by several threads, one batch ahead of the model."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from caster.data import Pictures, UnreadablePicture
from caster.errors import CasterError, LimitError
from caster.frozen.preprocessing import Picture, Preprocessing

THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class Group:
    """Pictures of one size, as the model takes them."""

    places: list[int]  # in the batch
    prepared: NDArray[Any]


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """Pictures as the model takes them, and which ones they are."""

    rows: list[int]  # of the pictures that could be read
    groups: list[Group]  # one, unless the preprocessing leaves pictures of several sizes
    unreadable: dict[int, str]  # row to what is wrong with it


def read_batches(
    pictures: Pictures,
    preprocessing: Preprocessing,
    rows: Sequence[int],
    batch_size: int,
    *,
    skip_unreadable: bool,
) -> Generator[PictureBatch]:
    """Batches of these rows, in this order. An unreadable picture ends it, unless skipped.

    Close it when you stop early: its threads end then.
    """

    def fitted(row: int) -> Picture:
        return fit(pictures.read(row), preprocessing, pictures, row)

    readers = ThreadPoolExecutor(THREADS, thread_name_prefix="caster-read")

    def batch(rows: Sequence[int], decoded: list[Future[Picture]]) -> PictureBatch:
        readable, unreadable = _sorted_out(rows, decoded, skip_unreadable)
        # Not ahead of time: a model on the CPU loses more to a thread beside it than this takes.
        groups = _groups(list(readable.values()), preprocessing)
        return PictureBatch(list(readable), groups, unreadable)

    try:
        pending: tuple[Sequence[int], list[Future[Picture]]] | None = None
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            begun = chosen, [readers.submit(fitted, row) for row in chosen]
            if pending is not None:
                yield batch(*pending)
            pending = begun
        if pending is not None:
            yield batch(*pending)
    finally:
        readers.shutdown(wait=True, cancel_futures=True)


def fit(picture: Picture, preprocessing: Preprocessing, pictures: Pictures, row: int) -> Picture:
    """Resize and crop one of the pictures; one that would grow over the limit is unreadable."""
    name = pictures.names[row]
    try:
        return preprocessing.fitted(picture, pictures.limits)
    except LimitError as error:
        raise UnreadablePicture(f"cannot read {name}: {error}") from None
    except (ValueError, MemoryError) as error:
        raise CasterError(f"{name}: {str(error) or 'not enough memory to resize it'}") from None


def refuse_unreadable(why: str) -> CasterError:
    """The error for a picture that nobody asked to skip."""
    return CasterError(f"{why}: repair or remove it, or leave it out with --skip-unreadable")


def _sorted_out(
    rows: Sequence[int], decoded: list[Future[Picture]], skip_unreadable: bool
) -> tuple[dict[int, Picture], dict[int, str]]:
    """The pictures that could be read, by row, and what is wrong with the others."""
    readable: dict[int, Picture] = {}
    unreadable: dict[int, str] = {}
    for row, future in zip(rows, decoded, strict=True):
        try:
            readable[row] = future.result()
        except UnreadablePicture as error:
            if not skip_unreadable:
                raise refuse_unreadable(str(error)) from None
            unreadable[row] = str(error)
    return readable, unreadable


def _groups(pictures: list[Picture], preprocessing: Preprocessing) -> list[Group]:
    """A model that resizes by itself takes pictures of any size, but of one size at a time."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, picture in enumerate(pictures):
        places.setdefault(picture.shape, []).append(place)
    return [
        Group(those, preprocessing.batch([pictures[place] for place in those]))
        for those in places.values()
    ]
