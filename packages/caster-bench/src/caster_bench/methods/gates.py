"""Gates: whether a method may adapt to a batch, by what the frozen model says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

from array_api_compat import array_namespace

from caster.adapt.protocol import Retained
from caster.adapt.source import Source, adapter_of, moments_of
from caster.core.reasons import DISAGREEMENT
from caster.core.types import Verdict
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs

ACCEPTED = "accepted"


@dataclass(frozen=True)
class Decision:
    """Whether to adapt, why, and the number it rests on: the smaller, the better.

    >>> Decision(accepted=False, reason="disagreement", ratio=0.3).accepted
    False
    """

    accepted: bool
    reason: str
    ratio: float
    verdict: Verdict | None = None  # of the transport, where that is what it rests on


class Gate(Protocol):
    """Decides on a batch before any method has seen it."""

    name: str

    def judge(self, outputs: Outputs) -> Decision:
        """Whether a method may adapt to the batch these came from."""
        ...

    def reset(self) -> None:
        """Exactly as constructed."""
        ...

    def retained(self) -> Retained:
        """What it keeps from batch to batch."""
        ...


class OnState:
    """A gate that rests on the source's state, and remembers nothing."""

    name: str

    def __init__(self, model: FrozenModel, source: Source) -> None:
        self._adapter = adapter_of(model, source, self.name)

    def reset(self) -> None:
        """Nothing to do."""

    def retained(self) -> Retained:
        """The source's moments."""
        return moments_of(self._adapter)


class Certificate(OnState):
    """CASTER's certificate: whether the batch supports an affine transport of the source.

    It certifies that transport alone. In front of a method that changes the representation it is
    an experiment, of which the paper reports that it fails. `tau` is the state's by default.

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
            _ = self._adapter.clf.set_params(tau=tau).settings  # refuses what is no threshold

    def judge(self, outputs: Outputs) -> Decision:
        """The verdict on the transport to this batch."""
        verdict = self._adapter.adapt(outputs).verdict
        return Decision(verdict.accepted, verdict.reason, verdict.ratio, verdict)


class Referee(OnState):
    """The source-statistic referee: whether head and Source-GDA agree on the batch.

    Accepts if they give at least a share `agreement` of the batch the same class. The paper does
    not say how many must; 0.97 is ours, from the four spare corruptions. Its ratio is the share on
    which they differ.

    >>> import numpy as np
    >>> from caster import wrap
    >>> labels = np.arange(300) % 3
    >>> images = np.random.default_rng(0).normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> gate = Referee(model, Source.fit(model, [(images, labels)]))
    >>> gate.judge(model(images[:64])).accepted
    True
    """

    name = "referee"

    def __init__(self, model: FrozenModel, source: Source, *, agreement: float = 0.97) -> None:
        if source.require_state(self.name).head is None:
            raise CasterError(
                "the referee compares the model's own classes, and the state's are others"
            )
        if not 0 <= agreement <= 1:
            raise CasterError(f"agreement must be a share from 0 to 1, not {agreement!r}")
        self.agreement = agreement
        super().__init__(model, source)

    def judge(self, outputs: Outputs) -> Decision:
        """Whether two answers that rest on the source alone agree."""
        head = self._adapter.head_logits(outputs)
        gda = self._adapter.clf.source_scores(outputs.features)
        xp = array_namespace(gda)
        same = xp.argmax(head, axis=1) == xp.argmax(gda, axis=1)
        share = int(xp.count_nonzero(same)) / gda.shape[0]
        accepted = share >= self.agreement
        return Decision(accepted, ACCEPTED if accepted else DISAGREEMENT, 1 - share)


GATES: dict[str, type[Certificate | Referee]] = {gate.name: gate for gate in (Certificate, Referee)}


def keywords(maker: Callable[..., Any]) -> dict[str, Any]:
    """The settings of what makes a method or a gate, and their defaults."""
    given = list(signature(maker).parameters.values())[2:]  # after the model and the source
    return {p.name: p.default for p in given if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def make_gate(name: str, model: FrozenModel, source: Source, **settings: Any) -> Gate:
    """A gate by name."""
    maker: Callable[..., Gate] = GATES[name]
    known = keywords(maker)
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        possible = ", ".join(known) or "none"
        raise CasterError(f"the {name} has no setting {unknown[0]!r}: its settings are {possible}")
    return maker(model, source, **settings)
