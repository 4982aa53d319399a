"""Source-GDA: the source's own Gaussian discriminant, nothing transported."""

from __future__ import annotations

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import OnFeatures, Prediction, Retained
from caster.adapt.source import Source, adapter_of, moments_of
from caster.models.protocol import FrozenModel, Outputs


class SourceGDA(OnFeatures):
    """Gaussian scores of the frozen features under the source's class moments.

    >>> import numpy as np
    >>> from caster import wrap
    >>> from caster_bench.methods import create
    >>> labels = np.arange(300) % 3
    >>> images = np.random.default_rng(0).normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> method = create("source-gda", model, Source.fit(model, [(images, labels)]))
    >>> method.predict(1.5 * images[:64] + 2.0).reason
    'ungated'
    """

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
