"""What a method keeps does not grow with the stream, and is what it says it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caster.adapt.protocol import Method
from caster_bench.methods.checks.size import Size, measure, reachable_bytes
from caster_bench.methods.checks.suite import Make, Stream, check, insist, replay
from caster_bench.methods.gated import Gated

HALF = 100  # batches; by then a memory that is bounded should be full
BATCH = 4  # images in each
STEP = 12  # batches from one look to the next
SHARE, SLACK = 0.1, 4096  # of what is there: by how much a method may be wrong about it


@check
def bounded_memory(make: Make, stream: Stream) -> None:
    """After 200 small batches a method keeps no more than after 100, unless it is `unbounded`.

    Arrays must not grow at all. Other objects may by a few a batch, a log say, but not by as many
    as there are images.
    """
    method = make()
    if _unbounded(method):
        return
    batches = stream.cut([BATCH] * 2 * HALF)
    early, late = _sizes(method, batches[:HALF]), _sizes(method, batches[HALF:])
    for what, allowed in (("bytes", 0), ("items", HALF // 2 * BATCH)):  # so many between two looks
        before, after = ([getattr(size, what) for size in sizes] for sizes in (early, late))
        insist(
            min(after) - max(before) <= allowed,
            f"it keeps {after[-1] - before[-1]} {what} more after {2 * HALF} batches "
            f"than after {HALF}",
        )


@check
def retained_is_true(make: Make, stream: Stream) -> None:
    """What `retained` states are the bytes that can be found, to a tenth and 4 KiB.

    It may count caches or leave them out.
    """
    method = make()
    replay(method, stream.batches)
    stated = method.retained().total
    least, most = reachable_bytes(method, caches=False), reachable_bytes(method)
    insist(stated >= (1 - SHARE) * least - SLACK, f"it retains {least} bytes, and states {stated}")
    insist(stated <= (1 + SHARE) * most + SLACK, f"it states {stated} bytes, and retains {most}")


def _unbounded(method: Method) -> bool:
    inner = method.method if isinstance(method, Gated) else method
    return bool(getattr(inner, "unbounded", False))


def _sizes(method: Method, batches: Sequence[Any]) -> list[Size]:
    """Sizes along the last of some batches, since one that goes up and down does not grow."""
    sizes = []
    for start in range(0, len(batches), STEP):
        replay(method, batches[start : start + STEP])
        if start >= len(batches) // 2:
            sizes.append(measure(method))
    return sizes
