"""The frozen model as a method: what every other one is measured against."""

from __future__ import annotations

from caster.adapt.estimator import Caster
from caster.adapt.protocol import OnFeatures, Prediction
from caster.adapt.source import Source
from caster.core.linalg import Array
from caster.core.reasons import FROZEN
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import FrozenModel, Outputs


class Frozen(OnFeatures):
    """The frozen head's answer, and Source-GDA's where the model does not know the classes.

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
        headless = state is not None and state.head is None
        self._gda = Caster.from_state(state) if headless and state is not None else None

    @property
    def frozen(self) -> Frozen:
        """Itself."""
        return self

    def answer(self, outputs: Outputs) -> Prediction:
        """The model's own answer."""
        return Prediction(self.logits(outputs), accepted=False, reason=FROZEN)

    def logits(self, outputs: Outputs) -> Array:  # (B, C)
        """Its scores of the classes at hand."""
        if self._gda is not None:
            return self._gda.source_scores(outputs.features)
        if outputs.logits is None:
            raise CasterError(f"{self.model.name} has no classifier: give source=, a fitted state")
        return self._columns(outputs.logits)
