"""The frozen model's answers smoothed along the stream: mixture transport without alignment."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from caster.adapt.layer_transport import MIN_PROBABILITY
from caster.core.arrays import like
from caster.core.discriminant import host_probabilities
from caster.core.stream_labels import StreamLabels
from caster.errors import CasterError
from caster.models.protocol import Outputs
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained, nbytes
from caster_bench.methods.source import Source, class_columns

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class SmoothedFrozen(FeatureMethod):
    """Correct the frozen model's answers by the class structure of the stream.

    The baseline for mixture transport on correlated and long-tailed streams: the same estimate of
    runs and class priors, from the frozen model's probabilities instead of the aligned network's.
    What mixture transport gains beyond it is due to alignment, and to restarts when the shift
    changes. Where the stream looks shuffled with the source's prior, or is in doubt, the answers
    are the frozen model's. One frozen pass; no certificate, no gradients.

    >>> from caster import wrap
    >>> labels = np.repeat([0, 1], 32)
    >>> features = np.random.default_rng(0).normal(size=(64, 4)) + np.eye(2, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :2]), version="example-1")
    >>> method = SmoothedFrozen(model, Source.fit(model, [(features, labels)]))
    >>> found = method.predict(features).logits.argmax(axis=1)
    >>> (features[:, :2].argmax(axis=1) == labels).sum(), (found == labels).sum()
    (np.int64(50), np.int64(63))
    """

    name: str = "smoothed-frozen"

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        class_columns(source, self.name)  # rejects a state with other classes than the model's
        self._start = StreamLabels.of_counts(source.require_state(self.name).moments.counts)
        self.reset()

    def reset(self) -> None:
        """Forget the labels of all batches."""
        self._labels = self._start

    def answer(self, outputs: Outputs) -> Prediction:
        """Update the class structure with a batch, and correct its answers."""
        logits = self.frozen.logits(outputs)
        p = host_probabilities(logits)
        if not np.isfinite(p).all():
            raise CasterError(f"{self.name} got logits that are not finite")
        found, self._labels = self._labels.observe(p).answer(p)
        if found is None:
            return Prediction(logits)
        return Prediction(like(np.log(found.clip(min=MIN_PROBABILITY)), logits, logits.dtype))

    def retained(self) -> Retained:
        """Bytes of the label estimates."""
        chain = self._labels.chain
        parts = (getattr(chain, each.name) for each in fields(chain))
        arrays = (part for part in parts if isinstance(part, np.ndarray))
        return Retained(buffers=nbytes(self._labels.recent, *arrays))
