"""The same stream gets the same answers: after a reset, and from a new method."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from caster_bench.methods.checks.content import content, loaded_torch
from caster_bench.methods.checks.fingerprint import difference, parts_of
from caster_bench.methods.checks.suite import Make, Stream, check, insist, insist_equal, replay


@check
def reset_exact(make: Make, stream: Stream) -> None:
    """After a reset a method is exactly as constructed, and answers so."""
    method = make()
    fresh = parts_of(method)
    first = replay(method, stream.batches)
    method.reset()
    left = difference(fresh, parts_of(method))
    insist(left is None, f"after a reset it is not as constructed at {left}")
    insist_equal(first, replay(method, stream.batches), "after a reset it")


@check
def seeded_runs_repeat(make: Make, stream: Stream) -> None:
    """Two new methods answer alike, and the global random generators play no part."""
    runs = []
    for seed in (1, 2):
        with _seeded(seed):
            before = _states()
            runs.append(replay(make(), stream.batches))
            moved = [name for name, state in _states().items() if state != before[name]]
            insist(not moved, f"it draws from the global generator of {', '.join(moved)}")
    insist_equal(runs[0], runs[1], "a second method, under other global seeds,")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Other global seeds, and in the end those of the caller."""
    torch = loaded_torch()
    python, numpy = random.getstate(), np.random.get_state()
    devices = torch.cuda.is_initialized() if torch else False
    tensors = torch.get_rng_state() if torch else None
    on_gpu = torch.cuda.get_rng_state_all() if devices else None
    try:
        random.seed(seed)
        np.random.seed(seed)
        if torch:
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.set_rng_state(tensors)
        if devices:
            torch.cuda.set_rng_state_all(on_gpu)


def _states() -> dict[str, Any]:
    torch = loaded_torch()
    numpy: Any = np.random.get_state(legacy=False)
    key, place = numpy["state"]["key"], numpy["state"]["pos"]
    states: dict[str, Any] = {"Python": random.getstate(), "NumPy": (content(key), place)}
    if torch:
        states["torch"] = content(torch.get_rng_state())
        if torch.cuda.is_initialized():
            states["CUDA"] = [content(state) for state in torch.cuda.get_rng_state_all()]
    return states
