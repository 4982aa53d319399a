"""Any method behind any gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from caster.adapt.protocol import Method, OnFeatures, Prediction, Retained
from caster.models.protocol import Outputs
from caster_bench.methods.gates import Gate


class Gated:
    """A method that adapts only to batches its gate accepts.

    The gate decides before the update, on what the frozen model says of the batch. A refused
    batch gets the frozen model's answer, and does not reach the method at all.

    >>> import numpy as np
    >>> from caster import wrap
    >>> from caster_bench.methods import Frozen, Source
    >>> from caster_bench.methods.gates import Decision
    >>> class Never:
    ...     name = "never"
    ...     def judge(self, outputs):
    ...         return Decision(False, "never", float("inf"))
    ...     def reset(self):
    ...         pass
    ...     def retained(self):
    ...         return Retained()
    >>> frozen = Frozen(wrap(lambda batch: (batch, batch), version="example-1"), Source())
    >>> Gated(frozen, Never()).predict(np.ones((1, 2))).reason
    'never'
    """

    def __init__(self, method: Method, gate: Gate) -> None:
        self.method = method
        self.gate = gate
        self.name = f"{method.name}+{gate.name}"
        self.frozen = method.frozen

    def predict(self, images: Any) -> Prediction:
        """The method's answer if the gate accepts the batch, else the frozen model's."""
        outputs = self.frozen.model(images)
        decision = self.gate.judge(outputs)
        measured: dict[str, Any] = {"ratio": decision.ratio, "verdict": decision.verdict}
        if not decision.accepted:
            kept = self.frozen.answer(outputs)
            return replace(kept, reason=decision.reason, **measured)
        given = self._answer(images, outputs)
        if not given.accepted:  # the method has its own reason not to
            return replace(given, **measured)
        return replace(given, reason=decision.reason, **measured)

    def _answer(self, images: Any, outputs: Outputs) -> Prediction:
        if isinstance(self.method, OnFeatures):  # one pass through the model will do
            return self.method.answer(outputs)
        return self.method.predict(images)

    def reset(self) -> None:
        """Reset method and gate."""
        self.method.reset()
        self.gate.reset()

    def retained(self) -> Retained:
        """What method and gate retain."""
        return self.method.retained() + self.gate.retained()
