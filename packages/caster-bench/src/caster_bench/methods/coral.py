"""CORAL: the batch's features given the source's mean and covariance, then the frozen head."""

from __future__ import annotations

from dataclasses import replace

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import OnFeatures, Prediction, Retained, nbytes
from caster.adapt.source import Source
from caster.core.arrays import like
from caster.core.linalg import symmetric_roots
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.linear_head import LinearHead
from caster_bench.methods.moments import Moments, scale_of, whitened
from caster_bench.methods.tensors import features_of, plain


class Coral(OnFeatures):
    """Whiten a batch's features, colour them as the source's, and ask the frozen classifier.

    Sun, Feng and Saenko 2016, the other way round: there the source is mapped to the target and a
    classifier trained on it; here the classifier is frozen, so the target comes to the source.
    h becomes m_s + (h - m_t) (C_t + r I)^(-1/2) (C_s + r I)^(1/2), with all d x d covariances.

    r is `ridge` times the source's mean variance. 1.0 is the paper's identity matrix, which it
    adds to covariances of standardised features, in whatever scale the features have. It also
    keeps a batch of fewer samples than features from being whitened to a simplex. A single sample
    has no spread, and its own mean would be mapped: it gets the frozen model's answer.
    """

    def __init__(
        self, model: FrozenModel, source: Source, *, name: str = "coral", ridge: float = 1.0
    ) -> None:
        super().__init__(model)
        if not 0 < ridge < float("inf"):
            raise CasterError(f"ridge of {name} is a number above 0, not {ridge!r}")
        self.name = name
        self.frozen = Frozen(model, source)
        head = LinearHead(model, source, name)
        moments = Moments()
        for images, _ in source.labelled(name):
            outputs = model(images)
            features = features_of(outputs, name)
            with plain(features):
                moments.add(features)
        with plain(features):
            weight, bias = (part.double() for part in head(outputs))
            covariance = moments.covariance
            self._lam = float(scale_of(covariance, ridge))
            if self._lam <= 0:
                raise CasterError(f"{name}: the source's features do not vary")
            root, _ = symmetric_roots(covariance / self._lam, 1.0)
            # The colouring and the classifier are both fixed: one (d, C) matrix does both.
            self._weight = (root @ weight.T).to(features)
            self._bias = (moments.mean @ weight.T + bias).to(features)
            if not bool(self._weight.isfinite().all()):  # how the roots fail on a GPU
                raise CasterError(f"{name}: a ridge of {ridge} is too small for these features")

    def answer(self, outputs: Outputs) -> Prediction:
        """Scores of the aligned features."""
        features = features_of(outputs, self.name)
        if len(features) == 1:
            return replace(self.frozen.answer(outputs), reason="batch_too_small")
        with plain(features):
            white = whitened(features - features.mean(0), self._lam)
            logits = white @ self._weight.to(features) + self._bias.to(features)
            if not bool(logits.isfinite().all()):
                return replace(self.frozen.answer(outputs), reason="numerical")
            return Prediction(like(logits, outputs.features))

    def retained(self) -> Retained:
        """The source's moments, folded into the classifier."""
        return Retained(statistics=nbytes(self._weight, self._bias))
