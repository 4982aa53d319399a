"""A method on its way through a stream: what it answers, and how long each batch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.protocol import Prediction
from caster.core.arrays import to_numpy
from caster.core.reasons import KNOWN
from caster.errors import CasterError
from caster_bench.data.streams import Batch

Synchronise = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Answers:
    """What a method said of a stream: N images in T batches."""

    classes: NDArray[np.int64]  # (N,) in the order of the stream
    accepted: list[bool]  # (T,)
    reason: list[str]
    ratio: list[float | None]
    confident: list[int | None]
    confident_classes: list[int | None]
    seconds: NDArray[np.float64]  # (T,)


def follow(
    reset: Callable[[], None],  # of the method
    answer: Callable[[Any], Prediction],  # of one of these:
    given: Iterable[Any],
    plan: list[Batch],
    synchronise: Synchronise,
) -> Answers:
    """Every batch answered in turn, the method reset where a segment begins.

    The clock runs from a batch that is prepared to an answer that is there: on a GPU until all
    its work is done.
    """
    classes, said, seconds = [], [], []
    for batch, item in zip(plan, given, strict=True):
        if batch.starts_segment:
            reset()
        synchronise()
        began = perf_counter()
        prediction = answer(item)
        chosen = to_numpy(prediction.logits).argmax(axis=1)
        synchronise()
        seconds.append(perf_counter() - began)
        classes.append(chosen)
        said.append((prediction.accepted, prediction.reason, prediction.ratio, prediction.verdict))
    verdicts = [verdict for *_, verdict in said]
    unknown = {reason for _, reason, *_ in said} - KNOWN
    if unknown:  # or the record would never verify
        known = ", ".join(sorted(KNOWN))
        raise CasterError(f"the method gives the reason {min(unknown)!r}, not one of {known}")
    return Answers(
        classes=np.concatenate(classes),
        accepted=[accepted for accepted, *_ in said],
        reason=[reason for _, reason, *_ in said],
        ratio=[ratio for *_, ratio, _ in said],
        confident=[None if v is None else v.confident for v in verdicts],
        confident_classes=[None if v is None else v.classes for v in verdicts],
        seconds=np.array(seconds),
    )
