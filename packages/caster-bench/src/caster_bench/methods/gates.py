"""Gates decide from the frozen model's outputs whether a method may adapt to a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from array_api_compat import array_namespace

from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.protocol import Method, Prediction, Retained, answer_from_outputs
from caster_bench.methods.source import Source, moment_bytes, unguarded_adapter
from caster_bench.records.reasons import DISAGREEMENT

ACCEPTED = "accepted"


@dataclass(frozen=True)
class Decision:
    """Whether to adapt, why, and the ratio it is based on: lower is better.

    >>> Decision(accepted=False, reason="disagreement", ratio=0.3).accepted
    False
    """

    accepted: bool
    reason: str
    ratio: float
    verdict: Verdict | None = None  # on the transport, if the decision is based on it


class Gate:
    """Decides on a batch before the method sees it; by default it keeps nothing between batches."""

    name: str

    def judge(self, outputs: Outputs) -> Decision:
        """Decide whether a method may adapt to the batch with these outputs."""
        raise NotImplementedError

    def reset(self) -> None:
        """Restore the gate to exactly its state after construction."""

    def retained(self) -> Retained:
        """Count the bytes kept between batches."""
        return Retained()


class StateGate(Gate):
    """Base class of gates that use the source's state."""

    def __init__(self, model: FrozenModel, source: Source) -> None:
        self._adapter = unguarded_adapter(model, source, self.name)

    def retained(self) -> Retained:
        """Bytes of the source's moments."""
        return Retained(statistics=moment_bytes(self._adapter))


class Certificate(StateGate):
    """CASTER's certificate: whether the batch supports an affine transport of the source.

    It certifies that transport only. For a method that changes the representation it is an
    experiment, which the paper reports to fail. `tau` defaults to the state's.

    >>> import numpy as np
    >>> from caster import wrap
    >>> labels = np.arange(300) % 3
    >>> images = np.random.default_rng(0).normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> gate = Certificate(model, Source.fit(model, [(images, labels)]))
    >>> gate.judge(model(images[:64] + 2)).reason, gate.judge(model(images[:1])).reason
    ('accepted', 'batch_too_small')
    """

    name = "certificate"

    def __init__(self, model: FrozenModel, source: Source, *, tau: float | None = None) -> None:
        super().__init__(model, source)
        if tau is not None:
            _ = self._adapter.clf.set_params(tau=tau).settings  # rejects an invalid threshold

    def judge(self, outputs: Outputs) -> Decision:
        """Return the verdict on the transport to this batch."""
        verdict = self._adapter.adapt(outputs).verdict
        return Decision(verdict.accepted, verdict.reason, verdict.ratio, verdict)


class Referee(StateGate):
    """Source-statistic referee: whether the frozen head and Source-GDA agree on the batch.

    Accepts if they predict the same class for at least a share `agreement` of the batch. The paper
    does not state the share; 0.97 is ours, from the four spare corruptions. The ratio is the share
    on which they disagree.
    """

    name = "referee"

    def __init__(self, model: FrozenModel, source: Source, *, agreement: float = 0.97) -> None:
        if source.require_state(self.name).head is None:
            raise CasterError(
                "the referee compares the model's own classes, but the state has others"
            )
        if not 0 <= agreement <= 1:
            raise CasterError(f"agreement must be a share from 0 to 1, not {agreement!r}")
        self.agreement = agreement
        super().__init__(model, source)

    def judge(self, outputs: Outputs) -> Decision:
        """Accept if the two source-only predictions agree."""
        head = self._adapter.head_logits(outputs)
        gda = self._adapter.clf.source_scores(outputs.features)
        xp = array_namespace(gda)
        same = xp.argmax(head, axis=1) == xp.argmax(gda, axis=1)
        share = int(xp.count_nonzero(same)) / gda.shape[0]
        accepted = share >= self.agreement
        return Decision(accepted, ACCEPTED if accepted else DISAGREEMENT, 1 - share)


GATES: dict[str, type[Certificate | Referee]] = {gate.name: gate for gate in (Certificate, Referee)}


def make_gate(name: str, model: FrozenModel, source: Source, **settings: Any) -> Gate:
    """Make a gate by name."""
    maker: Callable[..., Gate] = GATES[name]
    known = keywords(maker)
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        possible = ", ".join(known) or "none"
        raise CasterError(f"the {name} has no setting {unknown[0]!r}: its settings are {possible}")
    return maker(model, source, **settings)


def keywords(maker: Callable[..., Any]) -> dict[str, Any]:
    """Settings of a method or gate, with their defaults."""
    given = list(signature(maker).parameters.values())[2:]  # after model and source
    return {p.name: p.default for p in given if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


class Gated:
    """A method that adapts only to batches its gate accepts.

    The gate decides before the update, from the frozen model's outputs. A rejected batch gets the
    frozen model's answer and never reaches the method.
    """

    def __init__(self, method: Method, gate: Gate) -> None:
        self.method = method
        self.gate = gate
        self.name = f"{method.name}+{gate.name}"
        self.frozen = method.frozen

    def predict(self, images: Any) -> Prediction:
        """Return the method's answer if the gate accepts the batch, else the frozen model's."""
        outputs = self.frozen.model(images)
        decision = self.gate.judge(outputs)
        measured: dict[str, Any] = {"ratio": decision.ratio, "verdict": decision.verdict}
        if not decision.accepted:
            return replace(self.frozen.answer(outputs), reason=decision.reason, **measured)
        answer = answer_from_outputs(self.method)  # shares the forward pass
        found = self.method.predict(images) if answer is None else answer(outputs)
        if not found.accepted:  # keep the method's own reason
            return replace(found, **measured)
        return replace(found, reason=decision.reason, **measured)

    def reset(self) -> None:
        """Reset method and gate."""
        self.method.reset()
        self.gate.reset()

    def retained(self) -> Retained:
        """Bytes kept by method and gate."""
        return self.method.retained() + self.gate.retained()


def ungated(method: Method) -> Method:
    """Return a method without its gate."""
    return method.method if isinstance(method, Gated) else method
