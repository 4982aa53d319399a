"""Images to prepared batches: decoded by several threads, one batch ahead of the model."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from caster.errors import CasterError, LimitError
from caster.io.decode import ImageArray, UnreadableImage
from caster.io.images import Images
from caster.models.preprocessing import Preprocessing

THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class Group:
    """Images of one size, as the model takes them."""

    places: list[int]  # in the batch
    prepared: NDArray[Any]


@dataclass(frozen=True, eq=False)
class ImageArrayBatch:
    """Images as the model takes them, and which ones they are."""

    rows: list[int]  # of the images that could be read
    groups: list[Group]  # one, unless the preprocessing leaves images of several sizes
    unreadable: dict[int, str]  # row to what is wrong with it


def read_batches(
    images: Images,
    preprocessing: Preprocessing,
    rows: Sequence[int],
    batch_size: int,
    *,
    skip_unreadable: bool,
) -> Generator[ImageArrayBatch]:
    """Batches of these rows, in this order. An unreadable image ends it, unless skipped.

    Close it when you stop early: its threads end then.
    """

    def fitted(row: int) -> ImageArray:
        return fit(images.read(row), preprocessing, images, row)

    readers = ThreadPoolExecutor(THREADS, thread_name_prefix="caster-read")

    def batch(rows: Sequence[int], decoded: list[Future[ImageArray]]) -> ImageArrayBatch:
        readable, unreadable = _sorted_out(rows, decoded, skip_unreadable)
        # Not ahead of time: a model on the CPU loses more to a thread beside it than this takes.
        groups = _groups(list(readable.values()), preprocessing)
        return ImageArrayBatch(list(readable), groups, unreadable)

    try:
        pending: tuple[Sequence[int], list[Future[ImageArray]]] | None = None
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


def fit(image: ImageArray, preprocessing: Preprocessing, images: Images, row: int) -> ImageArray:
    """Resize and crop one of the images; one that would grow over the limit is unreadable."""
    name = images.names[row]
    try:
        return preprocessing.fitted(image, images.limits)
    except LimitError as error:
        raise UnreadableImage(f"cannot read {name}: {error}") from None
    except (ValueError, MemoryError) as error:
        raise CasterError(f"{name}: {str(error) or 'not enough memory to resize it'}") from None


def refuse_unreadable(why: str) -> CasterError:
    """The error for an image that nobody asked to skip."""
    return CasterError(f"{why}: repair or remove it, or leave it out with --skip-unreadable")


def _sorted_out(
    rows: Sequence[int], decoded: list[Future[ImageArray]], skip_unreadable: bool
) -> tuple[dict[int, ImageArray], dict[int, str]]:
    """The images that could be read, by row, and what is wrong with the others."""
    readable: dict[int, ImageArray] = {}
    unreadable: dict[int, str] = {}
    for row, future in zip(rows, decoded, strict=True):
        try:
            readable[row] = future.result()
        except UnreadableImage as error:
            if not skip_unreadable:
                raise refuse_unreadable(str(error)) from None
            unreadable[row] = str(error)
    return readable, unreadable


def _groups(images: list[ImageArray], preprocessing: Preprocessing) -> list[Group]:
    """A model that resizes by itself takes images of any size, but of one size at a time."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, image in enumerate(images):
        places.setdefault(image.shape, []).append(place)
    return [
        Group(those, preprocessing.batch([images[place] for place in those]))
        for those in places.values()
    ]
