"""LinearTCA: test features aligned to the moments of the confident ones among them."""

from __future__ import annotations

from dataclasses import replace

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import OnFeatures, Prediction, Retained
from caster.adapt.source import Source
from caster.core.arrays import like
from caster.core.linalg import symmetric_roots
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.gradient.entropy import entropy
from caster_bench.methods.linear_head import LinearHead
from caster_bench.methods.moments import Moments, scale_of
from caster_bench.methods.supports import Supports
from caster_bench.methods.tensors import features_of, plain


class LinearTCA(OnFeatures):
    """CORAL without a source: confident test features stand in for it.

    You, Lu and Huang 2025. The `filter_k` features of lowest entropy in each predicted class are
    the pseudo-source (20 a class, as in the authors' code). Test features are centred, mapped by
    W = (C_t + r I)^(-1/2) (C_p + r I)^(1/2), moved to the pseudo-source's mean and given to the
    frozen classifier.

    The authors' code does this once, when it has seen all test data, approaches W by a few
    gradient steps, and scales `filter_k` by the true class shares. Here it is a stream: moments
    are of all test features so far, a batch enters before it is answered, W is the closed form
    of their paper, and no label is read. `ridge` is ours, as in `Coral`: r is that many times the
    test features' mean variance. Costs two d x d roots a batch.
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "linear-tca",
        filter_k: int = 20,
        ridge: float = 1.0,
    ) -> None:
        super().__init__(model)
        if filter_k < 1:
            raise CasterError(f"filter_k of {name} is a number from 1 up, not {filter_k!r}")
        if not 0 < ridge < float("inf"):
            raise CasterError(f"ridge of {name} is a number above 0, not {ridge!r}")
        self.name = name
        self.filter_k = filter_k
        self.ridge = ridge
        self.frozen = Frozen(model, source)
        self._head = LinearHead(model, source, name)
        self.reset()

    def reset(self) -> None:
        """Nothing seen."""
        self._supports = Supports(self.filter_k)
        self._pseudo, self._seen = Moments(), Moments()

    def answer(self, outputs: Outputs) -> Prediction:
        """Take the batch in, and score it aligned."""
        features = features_of(outputs, self.name)
        with plain(features):
            weight, bias = self._head(outputs)
            logits = self._head.logits(outputs)
            change = self._supports.enter(features, logits.argmax(dim=1), entropy(logits))
            self._pseudo.add(features[change.came])
            self._pseudo.add(change.gone, sign=-1)
            self._seen.add(features)
            covariance = self._seen.covariance
            # So far one feature, or copies of it: anything but zero will do for a scale.
            lam = scale_of(covariance, self.ridge).clamp_min(1e-30)
            _, whiten = symmetric_roots((covariance / lam).to(features), 1.0)
            colour, _ = symmetric_roots((self._pseudo.covariance / lam).to(features), 1.0)
            centred = features - self._seen.mean.to(features)
            aligned = centred @ whiten @ colour + self._pseudo.mean.to(features)
            scores = aligned @ weight.T + bias
            if not bool(scores.isfinite().all()):
                return replace(self.frozen.answer(outputs), reason="numerical")
            return Prediction(like(scores, outputs.features))

    def retained(self) -> Retained:
        """The pseudo-source, and the sums behind both moments."""
        sums = self._pseudo.nbytes() + self._seen.nbytes()
        return Retained(self._head.nbytes(), sums, self._supports.nbytes())
