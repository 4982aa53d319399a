"""A batch that a gate refuses never happened, as far as the method behind it is concerned."""

from __future__ import annotations

from itertools import cycle

from caster.adapt.protocol import Retained
from caster.models.protocol import Outputs
from caster_bench.methods.checks.content import same
from caster_bench.methods.checks.fingerprint import difference, parts_of
from caster_bench.methods.checks.suite import Make, Stream, check, insist, insist_equal, replay
from caster_bench.methods.gated import Gated
from caster_bench.methods.gates import Decision


class Scripted:
    """A gate that decides as it is told, over and over.

    >>> gate = Scripted([True, False])
    >>> [gate.judge(None).accepted for _ in range(3)]
    [True, False, True]
    """

    name = "scripted"

    def __init__(self, decisions: list[bool]) -> None:
        self._told = decisions
        self.reset()

    def judge(self, outputs: Outputs) -> Decision:
        """The next decision."""
        accepted = next(self._decisions)
        return Decision(accepted, "told to" if accepted else "told not to", 0.0)

    def reset(self) -> None:
        """From the first decision on."""
        self._decisions = cycle(self._told)

    def retained(self) -> Retained:
        """Nothing."""
        return Retained()


@check
def refused_gate(make: Make, stream: Stream) -> None:
    """Behind a gate that refuses, a method does not change, and the frozen model answers.

    Behind one that refuses every second batch, the others are answered as if they were all.
    """
    method = make()
    replay(method, stream.few[:1])  # one that has seen something has more to lose
    before = parts_of(method)
    for i, batch in enumerate(stream.batches):
        given = Gated(method, Scripted([False])).predict(batch)
        frozen = method.frozen.predict(batch).logits
        insist(not given.accepted, f"batch {i} is refused, and answered all the same")
        insist(same(given.logits, frozen), f"batch {i} is refused, and not answered as frozen")
    changed = difference(before, parts_of(method))
    insist(changed is None, f"refused batches change it at {changed}")
    alone = replay(make(), stream.batches[::2])
    gated = replay(Gated(make(), Scripted([True, False])), stream.batches)
    insist_equal(alone, gated[::2], "behind a gate it", verdicts=False)
