"""What the checks share: how they fail, the stream they run on, and how answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import cycle, islice
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from caster.adapt.protocol import Method, Prediction
from caster.errors import CasterError
from caster_bench.methods.checks.content import is_array, same

Make = Callable[[], Method]
Check = Callable[[Make, Sequence[Any]], None]
LEAST_BATCHES, LEAST_IMAGES = 4, 64


class CheckFailed(AssertionError):  # noqa: N818 - it is no error of the caller's
    """A method is not what it must be: one line with its name, the check, and what is wrong."""


class Stream:
    """Batches without labels, as they were given or cut anew.

    >>> stream = Stream(list(np.zeros((4, 16, 3))))
    >>> [len(batch) for batch in stream.cut([1, 2, 64])]
    [1, 2, 64]
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        given = list(batches)
        if any(isinstance(batch, tuple) for batch in given):
            raise CasterError("checks take batches of images alone, not pairs with labels")
        self.batches = [batch if is_array(batch) else np.asarray(batch) for batch in given]
        count = sum(len(batch) for batch in self.batches)
        if len(self.batches) < LEAST_BATCHES or count < LEAST_IMAGES:
            raise CasterError(
                f"checks need {LEAST_BATCHES} batches and {LEAST_IMAGES} images or more, "
                f"not {len(self.batches)} and {count}"
            )
        self.few = self.batches[:LEAST_BATCHES]

    def cut(self, sizes: Iterable[int]) -> list[Any]:
        """Batches of these sizes, which take the images in turn, again and again."""
        images = array_namespace(*self.batches).concat(self.batches)
        rows = cycle(range(len(images)))
        return [images[list(islice(rows, size))] for size in sizes]


def check(function: Callable[[Make, Stream], None]) -> Check:
    """A check whose failures, whatever a method raises among them, name check and method."""

    @wraps(function)
    def run(make: Make, batches: Sequence[Any]) -> None:
        if not callable(make):
            raise CasterError(
                f"checks take a function that makes a method, not a {type(make).__name__}"
            )
        stream = Stream(batches)
        names = ["the method"]

        def named() -> Method:
            method = make()
            names.append(method.name)
            return method

        try:
            function(named, stream)
        except Exception as error:  # a method under test may raise anything
            line = " ".join(str(error).split())
            said = line if isinstance(error, CheckFailed) else f"{type(error).__name__}: {line}"
            raise CheckFailed(f"{names[-1]} fails {function.__name__}: {said}") from error

    return run


def insist(met: bool, otherwise: str) -> None:
    """Fail unless a condition is met."""
    if not met:
        raise CheckFailed(otherwise)


def replay(method: Method, batches: Iterable[Any]) -> list[Prediction]:
    """A method's answers to batches, in their order."""
    return [method.predict(batch) for batch in batches]


def insist_equal(
    expected: Sequence[Prediction],
    found: Sequence[Prediction],
    which: str,
    *,
    verdicts: bool = True,
) -> None:
    """Fail unless answers are equal bit for bit, and their verdicts too."""
    for i, (first, second) in enumerate(zip(expected, found, strict=True)):
        insist(same(first.logits, second.logits), f"{which} gives other logits for batch {i}")
        insist(
            not verdicts or _verdict(first) == _verdict(second),
            f"{which} gives another verdict on batch {i}: {_verdict(first)}, {_verdict(second)}",
        )


def _verdict(given: Prediction) -> tuple[bool, str, float | None]:
    return given.accepted, given.reason, given.ratio
