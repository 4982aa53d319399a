"""Source-GDA: the source's own Gaussian discriminant, nothing transported."""

from __future__ import annotations

from caster.frozen.protocol import FrozenModel, Outputs
from caster.methods.frozen import Frozen
from caster.methods.protocol import OnFeatures, Prediction, Retained
from caster.methods.source import Source, adapter_of, moments_of


class SourceGDA(OnFeatures):
    """Gaussian scores of the frozen features under the source's class moments."""

    def __init__(self, model: FrozenModel, source: Source, *, name: str = "source-gda") -> None:
        super().__init__(model)
        self.name = name
        self._adapter = adapter_of(model, source, name)
        self.frozen = Frozen(model, source)

    def answer(self, outputs: Outputs) -> Prediction:
        """In all directions that are retained."""
        return Prediction(self._adapter.clf.source_scores(outputs.features))

    def retained(self) -> Retained:
        """The source's moments."""
        return moments_of(self._adapter)
