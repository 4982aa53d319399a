"""The protocol every test-time adaptation method follows, and the frozen model as a method."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from caster.adapt.estimator import Caster
from caster.core.linalg import Array
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.source import Source
from caster_bench.records.reasons import FROZEN, INERT, UNGATED

log = logging.getLogger("caster")

REVISION = 1  # of `Frozen`: a method's module has one, which changes when its answers do


@dataclass(frozen=True, eq=False)
class Prediction:
    """A method's answer to one batch.

    If it is not `accepted`, the logits are the frozen model's own, bit for bit.

    >>> import numpy as np
    >>> Prediction(np.array([[0.1, 2.0]])).reason
    'ungated'
    """

    logits: Array  # (B, C)
    accepted: bool = True  # False if the frozen model answered
    reason: str = UNGATED  # one of `caster_bench.records.reasons.KNOWN`
    ratio: float | None = None  # measured by the gate; None without a gate
    verdict: Verdict | None = None  # on the transport, if one was tried
    implausible: int = 0  # samples excluded from the statistics and answered by the frozen model


@dataclass(frozen=True)
class Retained:
    """Bytes a method keeps between batches, not counting the frozen model.

    >>> Retained(parameters=400, optimizer=800).total
    1200
    """

    parameters: int = 0  # of network copies, and prompts
    buffers: int = 0  # of network copies, and running statistics
    features: int = 0  # banks of features or images
    statistics: int = 0  # of the source: moments, Fisher information
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Retained) -> Retained:
        """Add kind by kind."""
        names = [part.name for part in fields(self)]
        return Retained(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Method(Protocol):
    """A method at work on one stream."""

    name: str
    frozen: Frozen  # the immutable reference, which answers rejected batches

    def predict(self, images: Any) -> Prediction:
        """Answer a preprocessed batch; may update the method."""
        ...

    def reset(self) -> None:
        """Restore the method to exactly its state after construction."""
        ...

    def retained(self) -> Retained:
        """Count the bytes kept between batches."""
        ...


@runtime_checkable
class CanBeInert(Method, Protocol):
    """A method that may find nothing to adapt in a model."""

    @property
    def inert(self) -> bool:
        """Whether it finds nothing: it answers as the frozen model and never changes."""
        ...


class OnFeatures:
    """Base class of methods that need only the frozen model's outputs.

    Several of them can share one forward pass: `answer` takes its outputs.

    >>> import numpy as np
    >>> from caster import wrap
    >>> class Sharper(OnFeatures):
    ...     def answer(self, outputs):
    ...         return Prediction(2 * outputs.logits)
    >>> model = wrap(lambda batch: (batch, batch), version="example-1")
    >>> Sharper(model).predict(np.array([[1.0, 3.0]])).logits
    array([[2., 6.]])
    """

    def __init__(self, model: FrozenModel) -> None:
        self.model = model

    def predict(self, images: Any) -> Prediction:
        """Answer a batch of images."""
        return self.answer(self.model(images))

    def answer(self, outputs: Outputs) -> Prediction:
        """Answer a batch from its features and logits."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do nothing: by default a method keeps nothing between batches."""

    def retained(self) -> Retained:
        """Nothing by default."""
        return Retained()


class Frozen(OnFeatures):
    """The frozen head's answer, or Source-GDA's if the head does not have the state's classes.

    >>> import numpy as np
    >>> from caster import wrap
    >>> model = wrap(lambda batch: (batch, 2 * batch), version="example-1")
    >>> Frozen(model, Source()).predict(np.array([[1.0, 3.0]])).logits
    array([[2., 6.]])
    """

    def __init__(self, model: FrozenModel, source: Source, *, name: str = "frozen") -> None:
        super().__init__(model)
        self.name = name
        state = source.state
        self._columns = Columns(None if state is None else state.head)
        self._gda = Caster.from_state(state) if state is not None and state.head is None else None

    @property
    def frozen(self) -> Frozen:
        """The method itself."""
        return self

    def answer(self, outputs: Outputs) -> Prediction:
        """Return the model's own logits."""
        return Prediction(self.logits(outputs), accepted=False, reason=FROZEN)

    def logits(self, outputs: Outputs) -> Array:  # (B, C)
        """Logits of the state's classes, or of all the model's classes without a state."""
        if self._gda is not None:
            return self._gda.source_scores(outputs.features)
        if outputs.logits is None:
            raise CasterError(
                f"{self.model.name} has no classifier: pass a fitted state as {{argument}}",
                argument="source",
            )
        return self._columns(outputs.logits)


def warn_inert(name: str, model: FrozenModel, missing: str) -> None:
    """Log that a model has nothing the method could adapt."""
    log.warning("%s is inert: %s has no %s; it answers as frozen", name, model.name, missing)


def inert_prediction(frozen: Frozen, images: Any) -> Prediction:
    """Answer as the frozen model, for a method that has nothing to adapt."""
    return inert_answer(frozen, frozen.model(images))


def inert_answer(frozen: Frozen, outputs: Outputs) -> Prediction:
    """Answer as the frozen model, from outputs it has already computed."""
    return replace(frozen.answer(outputs), reason=INERT)


def is_inert(method: Method) -> bool:
    """Whether a method says that it has nothing to adapt.

    An `inert()` without @property says nothing: it would be true of any model.
    """
    return isinstance(method, CanBeInert) and method.inert is True


def answer_from_outputs(method: Method) -> Callable[[Outputs], Prediction] | None:
    """Return the function that answers from the frozen model's outputs, or None."""
    if isinstance(method, OnFeatures):
        return method.answer
    if is_inert(method):
        return partial(inert_answer, method.frozen)
    return None


def nbytes(*arrays: Any) -> int:
    """Total bytes of arrays or tensors; None counts as 0.

    >>> import numpy as np
    >>> nbytes(np.zeros(3), None)
    24
    """
    return sum(int(array.nbytes) for array in arrays if array is not None)


# --- settings, as fields of a method that is a dataclass -----------------------------------------


def number(default: Any, low: float = 0.0, high: float = math.inf, *, above: bool = False) -> Any:
    """A setting that is a finite number from `low`, or with `above` larger than it, to `high`."""
    upper = "" if high == math.inf else f" to {high:g}"
    bounds = f"{'above' if above else 'from'} {low:g}{upper}"

    def is_valid(value: Any) -> bool:
        return bool((low < value if above else low <= value) and value <= high and value < math.inf)

    return field(default=default, metadata={"is_valid": is_valid, "wanted": f"a number {bounds}"})


def count(default: Any, least: int = 1, most: float = math.inf) -> Any:
    """A setting that is an integer from `least` to `most`."""
    wanted = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"

    def is_valid(value: Any) -> bool:
        return isinstance(value, Integral) and least <= int(value) <= most

    return field(default=default, metadata={"is_valid": is_valid, "wanted": wanted})


def check_settings(method: Any) -> None:
    """Reject settings out of bounds; None stands for a default that depends on the model.

    >>> @dataclass
    ... class Mine:
    ...     name: str = "mine"
    ...     momentum: float = number(0.9, high=1)
    >>> check_settings(Mine(momentum=2))
    Traceback (most recent call last):
    caster.errors.CasterError: momentum of mine must be a number from 0 to 1, not 2
    """
    for each in fields(method):
        value, rule = getattr(method, each.name), each.metadata
        if rule and value is not None and not rule["is_valid"](value):
            raise CasterError(
                f"{each.name} of {method.name} must be {rule['wanted']}, not {value!r}"
            )


@dataclass(eq=False, repr=False)
class FeatureMethod(OnFeatures):
    """Base class of methods on features whose fields are their settings."""

    model: FrozenModel
    source: InitVar[Source]
    _: KW_ONLY
    name: str = ""

    def __post_init__(self, source: Source) -> None:
        check_settings(self)
        self.frozen = Frozen(self.model, source)
