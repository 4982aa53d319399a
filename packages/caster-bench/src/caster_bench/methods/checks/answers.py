"""What a method answers: sound scores of the right shape, given before its update, and for good."""

from __future__ import annotations

import math
from numbers import Real

from array_api_compat import array_namespace, device

from caster.adapt.protocol import Prediction
from caster.core.linalg import Array
from caster.core.reasons import KNOWN
from caster_bench.methods.checks.content import content, is_array, same
from caster_bench.methods.checks.fingerprint import difference, parts_of
from caster_bench.methods.checks.suite import Make, Stream, check, insist, replay

SIZES = (1, 2, 64, 5, 64, 2, 1, 7)  # alone, in order, and mixed


@check
def sound_answers(make: Make, stream: Stream) -> None:
    """Finite logits (B, C) of the frozen model's kind for batches of any size, and a verdict."""
    method = make()
    for batch in stream.cut(SIZES):
        _insist_sound(method.predict(batch), method.frozen.predict(batch).logits)


def _insist_sound(given: Prediction, frozen: Array) -> None:
    logits, size = given.logits, len(frozen)
    insist(is_array(logits), f"logits are {type(logits).__name__}, not an array")
    shape, wanted = tuple(logits.shape), tuple(frozen.shape)
    insist(shape == wanted, f"logits of a batch of {size} are {shape}, not {wanted}")
    xp = array_namespace(frozen)
    insist(
        array_namespace(logits) is xp and device(logits) == device(frozen),
        f"logits are not of the kind and on the device of the frozen model's: {type(logits)}",
    )
    insist(bool(xp.all(xp.isfinite(logits))), f"logits of a batch of {size} are not finite")
    insist(isinstance(given.accepted, bool), f"accepted is {given.accepted!r}, not True or False")
    insist(
        given.reason in KNOWN,
        f"reason is {given.reason!r}, not one of {', '.join(sorted(KNOWN))}",
    )
    number = isinstance(given.ratio, Real) and not math.isnan(given.ratio)
    insist(given.ratio is None or number, f"ratio is {given.ratio!r}, neither None nor a number")


@check
def forward_before_update(make: Make, stream: Stream) -> None:
    """Where a method has `forward`, that is what `predict` gives next, and changes nothing."""
    method = make()
    forward = getattr(method, "forward", None)
    if forward is None:
        return
    for i, batch in enumerate(stream.few):
        before = parts_of(method)
        scores = forward(batch)
        changed = difference(before, parts_of(method))
        insist(changed is None, f"forward changes it at {changed}")
        insist(
            same(scores, method.predict(batch).logits),
            f"predict does not answer batch {i} as forward does before the update",
        )


@check
def answers_stay(make: Make, stream: Stream) -> None:
    """A later batch does not change the answer to an earlier one."""
    method = make()
    given = method.predict(stream.few[0]).logits
    before = content(given)
    replay(method, stream.few[1:])
    replay(method, stream.few[:1])
    insist(content(given) == before, "a later batch changes the logits of an earlier one")
