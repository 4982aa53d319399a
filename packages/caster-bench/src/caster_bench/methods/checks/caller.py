"""What belongs to the caller: labels, batches, and the mode torch is in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from array_api_compat import is_torch_array

from caster.core.arrays import to_numpy
from caster_bench.methods.checks.content import content, loaded_torch
from caster_bench.methods.checks.suite import (
    CheckFailed,
    Make,
    Stream,
    check,
    insist,
    insist_equal,
    replay,
)

LABELS = "label", "labels", "y", "target", "targets"


@check
def labels_unseen(make: Make, stream: Stream) -> None:
    """`predict` takes images alone, and does not look for labels on them."""
    method = make()
    parameters = inspect.signature(method.predict).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty and p.name in named]
    insist(len(required) == 1, f"predict needs {required}, and not the images alone")
    read: list[str] = []
    for batch in stream.few:
        method.predict(_with_labels(batch, read))
    insist(not read, f"it reads {', '.join(dict.fromkeys(read))} of a batch")


@check
def batches_left_alone(make: Make, stream: Stream) -> None:
    """The caller's arrays are not written to, and may be read-only."""
    method = make()
    for i, batch in enumerate(stream.few):
        before = content(batch)
        method.predict(batch)
        insist(content(batch) == before, f"it writes to batch {i}")
        if isinstance(batch, np.ndarray):
            locked = batch.copy()
            locked.setflags(write=False)
            method.predict(locked)


@check
def any_grad_mode(make: Make, stream: Stream) -> None:
    """In every mode of autograd a method gives the same answers, without a graph.

    Whether it is made or only used and reset in it; and it leaves the mode as it was.
    """
    torch = loaded_torch()
    if torch is None:
        return
    batches = stream.few[:2]
    with torch.enable_grad(), _left_as_it_was(torch, "enable_grad"):
        method = make()
        expected = replay(method, batches)
        method.reset()
        after = replay(method, batches)
    graph = any(getattr(given.logits, "requires_grad", False) for given in expected)
    insist(not graph, "its logits hold a graph: detach them")
    for mode in (torch.no_grad, torch.inference_mode):
        for made in (make(), None):
            with mode(), _left_as_it_was(torch, mode.__name__):
                try:
                    method = made or make()
                    found = replay(method, batches)
                    method.reset()
                    again = replay(method, batches)
                except RuntimeError as error:  # what torch says names neither cause nor remedy
                    raise CheckFailed(
                        f"used, made or reset under torch.{mode.__name__} it fails: copy modules "
                        f"under torch.inference_mode(False); {error}"
                    ) from error
            insist_equal(expected, found, f"under torch.{mode.__name__} it")
            insist_equal(after, again, f"after a reset under torch.{mode.__name__} it")


@contextmanager
def _left_as_it_was(torch: Any, name: str) -> Iterator[None]:
    before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    yield
    after = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    insist(before == after, f"it leaves torch in another mode than {name}")


def _with_labels(batch: Any, read: list[str]) -> Any:
    """The same batch with labels that nobody may read."""

    def forbidden(name: str) -> property:
        def look(batch: Any) -> None:
            read.append(name)
            raise CheckFailed(f"it reads {name} of a batch")

        return property(look)

    own: dict[str, Any] = {name: forbidden(name) for name in LABELS}
    if is_torch_array(batch):
        import torch

        own["__torch_function__"] = torch._C._disabled_torch_function_impl  # answers are plain
        return batch.as_subclass(type("Labelled", (torch.Tensor,), own))
    return to_numpy(batch).view(type("Labelled", (np.ndarray,), own))
