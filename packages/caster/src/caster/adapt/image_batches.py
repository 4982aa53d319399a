"""Decode images in several threads, preprocess them in batches, and run a frozen model."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from caster.config import IMAGES_AT_ONCE
from caster.core.arrays import to_numpy
from caster.core.threads import available_cores
from caster.errors import CasterError, LimitError
from caster.io.image_files import ImageArray, UnreadableImage
from caster.io.images import Images
from caster.models.preprocessing import REQUIRED, Preprocessing
from caster.models.protocol import FrozenModel, Outputs

THREADS = min(8, available_cores())

# Run the model on a batch, given with the rows of its images, and collect layer statistics.
Measure = Callable[[NDArray[Any], list[int]], Outputs]


@dataclass(frozen=True, eq=False)
class Group:
    """Images of one size, prepared for the model."""

    positions: list[int]  # in the batch
    prepared: NDArray[Any]

    def pieces(self) -> Iterator[Group]:
        """Split the group into parts for one forward pass each."""
        for start in range(0, len(self.positions), IMAGES_AT_ONCE):
            some = slice(start, start + IMAGES_AT_ONCE)
            yield Group(self.positions[some], self.prepared[some])


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images prepared for the model, with their rows."""

    rows: list[int]  # of the images that could be read
    groups: list[Group]  # one, unless images have several sizes after preprocessing
    unreadable: dict[int, str]  # error message, by row


class RecycledMemory:
    """Allocate arrays from memory that is reused once no array refers to it.

    A batch of 64 images of 224 pixels takes 38 MB. The C library would return them to the system
    and fetch them again page by page for the next batch, which takes as long as normalising.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[np.uint8], ReferenceType[NDArray[Any]]]] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Allocate an uninitialised array."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        unused = [block for block, array in self._blocks if array() is None]
        block = next((block for block in unused if block.size == size), None)
        block = np.empty(size, dtype=np.uint8) if block is None else block
        # From a buffer, not a view: NumPy would make all views refer to `block` instead of `array`.
        array: NDArray[Any] = np.frombuffer(block.data, dtype=dtype)
        in_use = [(other, user) for other, user in self._blocks if user() is not None]
        self._blocks = [*in_use, (block, ref(array))]
        return array.reshape(shape)


def require_preprocessing(model: FrozenModel) -> Preprocessing:
    """The model's preprocessing; raise if it has none."""
    if model.preprocessing is None:
        raise CasterError(
            f"{model.name} does not define its preprocessing: give {{argument}} FILE.toml, which "
            f"states {', '.join(REQUIRED)} and perhaps resize and crop, or in-graph if the model "
            "resizes and normalizes itself",
            argument="preprocessing",
        )
    return model.preprocessing


def read_batches(
    images: Images,
    preprocessing: Preprocessing,
    rows: Sequence[int],
    batch_size: int,
    *,
    skip_unreadable: bool,
) -> Generator[ImageBatch]:
    """Read these rows in this order, one batch ahead of the caller.

    An unreadable image is an error unless `skip_unreadable`. If you stop early, close the generator
    to end its threads.
    """

    def resized(row: int) -> ImageArray:
        return resize(images.read(row), preprocessing, images, row)

    readers = ThreadPoolExecutor(THREADS, thread_name_prefix="caster-read")
    memory = RecycledMemory()

    def batch(rows: Sequence[int], decoded: list[Future[ImageArray]]) -> ImageBatch:
        readable, unreadable = _collected(rows, decoded, skip_unreadable)
        # Not ahead: another thread would slow a model on the CPU by more than this takes.
        groups = _by_size(list(readable.values()), preprocessing, memory)
        return ImageBatch(list(readable), groups, unreadable)

    try:
        pending: tuple[Sequence[int], list[Future[ImageArray]]] | None = None
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            begun = chosen, [readers.submit(resized, row) for row in chosen]
            if pending is not None:
                yield batch(*pending)
            pending = begun
        if pending is not None:
            yield batch(*pending)
    finally:
        readers.shutdown(wait=True, cancel_futures=True)


def resize(image: ImageArray, preprocessing: Preprocessing, images: Images, row: int) -> ImageArray:
    """Resize and crop one image; it counts as unreadable if the result exceeds the limit."""
    name = images.names[row]
    try:
        return preprocessing.resize_and_crop(image, images.limits)
    except LimitError as error:
        raise UnreadableImage(f"cannot read {name}: {error}") from None
    except (ValueError, MemoryError) as error:
        raise CasterError(f"{name}: {str(error) or 'not enough memory to resize it'}") from None


def unreadable_error(why: str) -> CasterError:
    """Error for an unreadable image that may not be skipped."""
    return CasterError(
        f"{why}: repair or remove it, or leave it out with {{argument}}",
        argument="skip_unreadable",
    )


def run(
    model: FrozenModel,
    batch: ImageBatch,
    names: Sequence[str],
    measure: Measure | None = None,
) -> Outputs:
    """Run the model on a batch; features and logits in NumPy, in the order of its rows."""
    parts = []
    for piece in (piece for group in batch.groups for piece in group.pieces()):
        rows = [batch.rows[position] for position in piece.positions]
        parts.append(_answer(model, piece.prepared, rows, names[rows[0]], measure))
    order = np.argsort([position for group in batch.groups for position in group.positions])
    features = _joined([outputs.features for outputs in parts], order)
    broken = ~np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
    if broken.any():
        name = names[batch.rows[int(broken.argmax())]]
        raise CasterError(f"{model.name} gives NaN or infinity for {name}")
    if any(outputs.logits is None for outputs in parts):
        return Outputs(features, None)
    return Outputs(features, _joined([outputs.logits for outputs in parts], order))


@contextmanager
def naming_images(first: str, count: int) -> Iterator[None]:
    """Convert a model's error to one line that names its images."""
    those = first if count == 1 else f"{first} and {count - 1} more"
    try:
        yield
    except (CasterError, RuntimeError) as error:  # torch's, about a shape or memory
        message, argument = str(error), None
        if isinstance(error, CasterError):
            message, argument = error.template, error.argument
        line = " ".join(message.split())[:300]
        raise CasterError(f"{line} (on {those})", argument=argument) from None


def _collected(
    rows: Sequence[int], decoded: list[Future[ImageArray]], skip_unreadable: bool
) -> tuple[dict[int, ImageArray], dict[int, str]]:
    """Decoded images, and error messages of the others, by row."""
    readable: dict[int, ImageArray] = {}
    unreadable: dict[int, str] = {}
    for row, future in zip(rows, decoded, strict=True):
        try:
            readable[row] = future.result()
        except UnreadableImage as error:
            if not skip_unreadable:
                raise unreadable_error(str(error)) from None
            unreadable[row] = str(error)
    return readable, unreadable


def _by_size(
    images: list[ImageArray], preprocessing: Preprocessing, memory: RecycledMemory
) -> list[Group]:
    """Group images by size: a model that resizes takes any size, but one size per pass."""
    positions: dict[tuple[int, ...], list[int]] = {}
    for position, image in enumerate(images):
        positions.setdefault(image.shape, []).append(position)
    return [
        Group(those, preprocessing.batch([images[i] for i in those], memory.empty))
        for those in positions.values()
    ]


def _answer(
    model: FrozenModel,
    prepared: NDArray[Any],
    rows: list[int],
    first: str,
    measure: Measure | None,
) -> Outputs:
    with naming_images(first, len(rows)):
        outputs = model(prepared) if measure is None else measure(prepared, rows)
    for array in (outputs.features, outputs.logits):
        if array is not None and len(array) != len(rows):
            raise CasterError(f"{model.name} gives {len(array)} rows for {len(rows)} images")
    return outputs


def _joined(parts: list[Any], order: NDArray[np.intp]) -> NDArray[Any]:
    return np.concatenate([to_numpy(part) for part in parts])[order]
