"""Work on what the model has given, done by another thread while the model is at the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from caster.frozen.protocol import Outputs

T = TypeVar("T")

WAITING = 2  # batches that may wait: their features are held in memory


class Ahead(Generic[T]):
    """Answers to whole batches of rows that come in pieces, by the row a batch begins with.

    >>> with Ahead(lambda outputs: float(outputs.features.sum()), batch_size=2) as ahead:
    ...     ahead.hear(0, Outputs(np.ones((3, 1)), None))
    ...     ahead.hear(3, Outputs(np.ones((2, 1)), None))
    ...     ahead.take(0), ahead.take(2), ahead.take(4)
    (2.0, 2.0, None)
    """

    def __init__(self, answer: Callable[[Outputs], T], batch_size: int) -> None:
        self.answer, self.batch_size = answer, batch_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="caster-adapt")
        self._answers: dict[int, Future[T]] = {}
        self._held: list[tuple[int, Outputs]] = []  # pieces of a batch to come: first row, rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def hear(self, row: int, outputs: Outputs) -> None:
        """Take the rows from this one on; they follow those of the last call."""
        self._held.append((row, outputs))
        first, end = self._held[0][0], row + len(outputs.features)
        start = -(-first // self.batch_size) * self.batch_size  # a resumed run starts in between
        while start + self.batch_size <= end:
            piece = self._cut(start, start + self.batch_size)
            self._wait()
            self._answers[start] = self._pool.submit(self.answer, piece)
            start += self.batch_size
        self._held = [(at, part) for at, part in self._held if at + len(part.features) > start]

    def take(self, row: int) -> T | None:
        """The answer to the batch that begins there; None where nobody heard of all its rows."""
        found = self._answers.pop(row, None)
        return None if found is None else found.result()

    def _wait(self) -> None:
        unfinished = [future for future in self._answers.values() if not future.done()]
        if len(unfinished) >= WAITING:
            unfinished[0].result()

    def _cut(self, start: int, stop: int) -> Outputs:
        def rows(name: str) -> Any:
            parts = [
                getattr(part, name)[max(0, start - at) : max(0, stop - at)]
                for at, part in self._held
            ]
            return np.concatenate(parts)

        bare = self._held[0][1].logits is None
        return Outputs(rows("features"), None if bare else rows("logits"))
