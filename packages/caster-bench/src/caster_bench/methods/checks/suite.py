"""How checks run and fail: their stream of batches, and the comparison of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import cycle, islice
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from caster.errors import CasterError
from caster_bench.methods.checks.fingerprint import is_array, same
from caster_bench.methods.protocol import Method, Prediction

Make = Callable[[], Method]
Check = Callable[[Make, Sequence[Any]], None]
LEAST_BATCHES, LEAST_IMAGES = 4, 64


class CheckFailed(AssertionError):  # noqa: N818 - not an error of the caller
    """A method fails a check: one line with its name, the check, and what is wrong."""


class Stream:
    """Batches without labels, as passed in or split differently.

    >>> stream = Stream(list(np.zeros((4, 16, 3))))
    >>> [len(batch) for batch in stream.split([1, 2, 64])]
    [1, 2, 64]
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        batches = list(batches)
        if any(isinstance(batch, tuple) for batch in batches):
            raise CasterError("checks take batches of images only, not pairs with labels")
        self.batches = [batch if is_array(batch) else np.asarray(batch) for batch in batches]
        count = sum(len(batch) for batch in self.batches)
        if len(self.batches) < LEAST_BATCHES or count < LEAST_IMAGES:
            raise CasterError(
                f"checks need {LEAST_BATCHES} batches and {LEAST_IMAGES} images or more, "
                f"not {len(self.batches)} and {count}"
            )
        self.few = self.batches[:LEAST_BATCHES]

    def split(self, sizes: Iterable[int]) -> list[Any]:
        """Batches of these sizes, cycling through the images."""
        images = array_namespace(*self.batches).concat(self.batches)
        rows = cycle(range(len(images)))
        return [images[list(islice(rows, size))] for size in sizes]


def check(function: Callable[[Make, Stream], None]) -> Check:
    """Make a check whose failures name the check and the method, whatever the method raises."""

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
            cause = line if isinstance(error, CheckFailed) else f"{type(error).__name__}: {line}"
            raise CheckFailed(f"{names[-1]} fails {function.__name__}: {cause}") from error

    return run


def require(condition: bool, message: str) -> None:
    """Fail the check unless a condition holds."""
    if not condition:
        raise CheckFailed(message)


def replay(method: Method, batches: Iterable[Any]) -> list[Prediction]:
    """Answer batches in order."""
    return [method.predict(batch) for batch in batches]


def require_equal(
    expected: Sequence[Prediction],
    found: Sequence[Prediction],
    which: str,
    *,
    verdicts: bool = True,
) -> None:
    """Fail unless answers, and their verdicts, are equal bit for bit."""
    for i, (first, second) in enumerate(zip(expected, found, strict=True)):
        require(same(first.logits, second.logits), f"{which} gives other logits for batch {i}")
        require(
            not verdicts or _verdict(first) == _verdict(second),
            f"{which} gives another verdict on batch {i}: {_verdict(first)}, {_verdict(second)}",
        )


def _verdict(prediction: Prediction) -> tuple[bool, str, float | None]:
    return prediction.accepted, prediction.reason, prediction.ratio
