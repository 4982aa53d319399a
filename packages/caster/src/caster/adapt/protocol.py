"""What every method of test-time adaptation is to the rest of caster: images in, scores out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from caster.core.linalg import Array
from caster.core.reasons import UNGATED
from caster.core.types import Verdict
from caster.models.protocol import FrozenModel, Outputs

if TYPE_CHECKING:
    from caster.adapt.frozen import Frozen


@dataclass(frozen=True, eq=False)
class Prediction:
    """One batch answered.

    If not `accepted`, the scores are the frozen model's own, bit for bit.

    >>> import numpy as np
    >>> Prediction(np.array([[0.1, 2.0]])).reason
    'ungated'
    """

    logits: Array  # (B, C), a column a class; the largest score is the answer
    accepted: bool = True  # whether the method answered, and not the frozen model
    reason: str = UNGATED  # why: one of `caster.core.reasons.KNOWN`
    ratio: float | None = None  # what a gate measured; None where none did
    verdict: Verdict | None = None  # of the transport, where it was tried, followed or not
    implausible: int = 0  # samples kept out of the method's statistics, answered as frozen


@dataclass(frozen=True)
class Retained:
    """Bytes a method keeps from one batch to the next, beside the frozen model itself.

    >>> Retained(parameters=400, optimizer=800).total
    1200
    """

    parameters: int = 0  # of its own copies of the network, and prompts
    buffers: int = 0  # of those copies, and running statistics of its own
    features: int = 0  # a bank of features or images
    statistics: int = 0  # of the source: moments, Fisher information
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Retained) -> Retained:
        """What two parts of a method keep together."""
        names = [part.name for part in fields(self)]
        return Retained(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Method(Protocol):
    """A method at work on one stream."""

    name: str
    frozen: Frozen  # the immutable reference: what a refused batch is answered with

    def predict(self, images: Any) -> Prediction:
        """Answer a batch that is prepared as the model takes it; may update the method."""
        ...

    def reset(self) -> None:
        """Exactly as constructed."""
        ...

    def retained(self) -> Retained:
        """What it keeps from batch to batch."""
        ...


class OnFeatures:
    """A method that needs nothing of a batch but what the frozen model says of it.

    Several of them can share one pass through the model: `answer` takes what it gave.

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
        """Answer a batch by its features and logits."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing to do, unless a method remembers something."""

    def retained(self) -> Retained:
        """Nothing, unless a method says otherwise."""
        return Retained()


def nbytes(*arrays: Any) -> int:
    """Bytes of arrays or tensors; None counts nothing.

    >>> import numpy as np
    >>> nbytes(np.zeros(3), None)
    24
    """
    return sum(int(array.nbytes) for array in arrays if array is not None)
