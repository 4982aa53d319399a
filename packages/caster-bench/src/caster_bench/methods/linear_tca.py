"""LinearTCA: align test features with the moments of the confident ones among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from caster.core.arrays import like
from caster.core.linalg import symmetric_roots
from caster.models.protocol import Outputs
from caster_bench.methods.coral import RunningMoments, scaled_ridge
from caster_bench.methods.features import LinearHead, finite_features, full_precision
from caster_bench.methods.gradient_method import entropy
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained, count, number
from caster_bench.methods.source import Source
from caster_bench.methods.t3a import Supports

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class LinearTCA(FeatureMethod):
    """CORAL without source data: confident test features stand in for the source.

    You, Lu and Huang, "Test-time Correlation Alignment", ICML 2025. The `filter_k` features of
    lowest entropy of each predicted class are the pseudo-source (20 per class, as in the authors'
    code). Test features are centred, mapped by W = (C_t + r I)^(-1/2) (C_p + r I)^(1/2), moved to
    the pseudo-source's mean and classified by the frozen head.

    The authors' code does this once after seeing all test data, approximates W by a few gradient
    steps, and scales `filter_k` by the true class shares. Here it is a stream: moments are those
    of all test features so far, including the current batch, W is the closed form of their paper,
    and no label is read. `ridge` is ours, as in `Coral`: r is that many times the test features'
    mean variance. Each batch costs two d x d matrix roots.
    """

    name: str = "linear-tca"
    filter_k: int = count(20)
    ridge: float = number(1.0, above=True)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        self._head = LinearHead(self.model, source, self.name)
        self.reset()

    def reset(self) -> None:
        """Forget every batch."""
        self._supports = Supports(self.filter_k)
        self._pseudo_source, self._target = RunningMoments(), RunningMoments()

    def answer(self, outputs: Outputs) -> Prediction:
        """Add the batch to both moments, and classify its aligned features."""
        features = finite_features(outputs, self.name)
        with full_precision(features):
            weight, bias = self._head(outputs)
            logits = self._head.logits(outputs)
            change = self._supports.add(features, logits.argmax(dim=1), entropy(logits))
            self._pseudo_source.add(features[change.added])
            self._pseudo_source.add(change.removed, sign=-1)
            self._target.add(features)
            covariance = self._target.covariance
            # Zero for a single feature or copies of it: then any positive scale will do.
            lam = scaled_ridge(covariance, self.ridge).clamp_min(1e-30)
            _, whiten = symmetric_roots((covariance / lam).to(features), 1.0)
            colour, _ = symmetric_roots((self._pseudo_source.covariance / lam).to(features), 1.0)
            centred = features - self._target.mean.to(features)
            aligned = centred @ whiten @ colour + self._pseudo_source.mean.to(features)
            scores = aligned @ weight.T + bias
            if not bool(scores.isfinite().all()):
                return replace(self.frozen.answer(outputs), reason="numerical")
            return Prediction(like(scores, outputs.features))

    def retained(self) -> Retained:
        """Bytes of the pseudo-source and the sums of both moments."""
        sums = self._pseudo_source.nbytes() + self._target.nbytes()
        return Retained(self._head.nbytes(), sums, self._supports.nbytes())
