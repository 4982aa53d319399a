"""The frozen model stays what it is, and answers whatever a method does not."""

from __future__ import annotations

from caster.core.reasons import INERT
from caster.models.protocol import FrozenModel
from caster_bench.methods.checks.content import content, same
from caster_bench.methods.checks.fingerprint import difference, parts_of, state_of
from caster_bench.methods.checks.suite import Make, Stream, check, insist, replay


@check
def frozen_unchanged(make: Make, stream: Stream) -> None:
    """Nothing a method does leaves a trace in the frozen model.

    Its digest, its answers, and of a torch module every attribute: modes, hooks, gradients. What
    the first method ever made on it did to it cannot be seen any more.
    """
    model = make().frozen.model
    before = _answers(model, stream)  # a torch model finds its head by these
    state = _attributes(model)
    method = make()
    replay(method, stream.batches)
    method.reset()
    replay(method, stream.few)
    model.verify()
    changed = difference(state, _attributes(model))
    insist(changed is None, f"it changes the frozen model at {changed}")
    insist(before == _answers(model, stream), "the frozen model answers otherwise than before")


def _attributes(model: FrozenModel) -> dict[str, str]:
    """Of a torch module all there is; other models do not show their insides."""
    return state_of(model) if hasattr(model, "module") else {}


def _answers(model: FrozenModel, stream: Stream) -> list[str]:
    given = [model(batch) for batch in stream.few]
    arrays = [array for outputs in given for array in (outputs.features, outputs.logits)]
    return [content(array) for array in arrays if array is not None]


@check
def refused_is_frozen(make: Make, stream: Stream) -> None:
    """Where a method does not answer, the logits are the frozen model's, bit for bit.

    An inert method answers no batch, says so, and is not changed by any.
    """
    method = make()
    inert = getattr(method, "inert", False)
    before = parts_of(method)
    for i, batch in enumerate(stream.batches):
        given = method.predict(batch)
        insist(
            not inert or (not given.accepted and given.reason == INERT),
            f"it is inert, and answers batch {i} with {given.reason!r}",
        )
        insist(
            given.accepted or same(given.logits, method.frozen.predict(batch).logits),
            f"batch {i} is not accepted, and its logits are not the frozen model's",
        )
    changed = difference(before, parts_of(method)) if inert else None
    insist(changed is None, f"it is inert, and changes at {changed}")
