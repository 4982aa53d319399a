"""CASTER's feature transport with its gate, without it, and its ablations; and Source-GDA."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace

from caster.core.discriminant import source_scores
from caster.core.linalg import Array, identity_like
from caster.core.proposal import try_transport
from caster.core.verdict import Verdict, reject
from caster.models.protocol import Outputs
from caster_bench.methods.protocol import FeatureMethod, Prediction, Retained
from caster_bench.methods.source import Source, moment_bytes, unguarded_adapter

REVISION = 1
TOO_SMALL = reject("batch_too_small")  # one sample supports no direction of transport
NUMERICAL = reject("numerical")
CONSTANTS = ("lam", "beta", "tau", "confidence", "min_samples", "min_classes")


@dataclass(eq=False, repr=False, kw_only=True)
class SourceGDA(FeatureMethod):
    """Gaussian scores of the frozen features under the source's class moments."""

    name: str = "source-gda"

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        self._adapter = unguarded_adapter(self.model, source, self.name)

    def answer(self, outputs: Outputs) -> Prediction:
        """Return scores in all retained directions."""
        return Prediction(self._adapter.clf.source_scores(outputs.features))

    def retained(self) -> Retained:
        """Bytes of the source's moments."""
        return Retained(statistics=moment_bytes(self._adapter))


@dataclass(eq=False, repr=False, kw_only=True)
class Caster(SourceGDA):
    """Transport the source's class moments to the batch, if its certificate allows.

    The constants are those of `caster.Caster`; None means the state's own.

    >>> import numpy as np
    >>> from caster import wrap
    >>> labels = np.arange(300) % 3
    >>> images = np.random.default_rng(0).normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> method = Caster(model, Source.fit(model, [(images, labels)]))
    >>> method.predict(1.5 * images[:64] + 2.0).reason
    'accepted'
    """

    name: str = "caster"
    lam: float | None = None
    beta: float | None = None
    tau: float | None = None
    confidence: float | None = None
    min_samples: int | None = None
    min_classes: int | None = None

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        given = {constant: getattr(self, constant) for constant in CONSTANTS}
        chosen = {constant: value for constant, value in given.items() if value is not None}
        self._clf = self._adapter.clf.set_params(**chosen)
        _ = self._clf.settings  # rejects invalid constants

    def answer(self, outputs: Outputs) -> Prediction:
        """Return transported scores if the batch supports them, else the frozen model's."""
        found = self._adapter.adapt(outputs)
        return self._gated(outputs, found.adapted, found.verdict)

    def _gated(self, outputs: Outputs, scores: Array, verdict: Verdict) -> Prediction:
        if verdict.accepted:
            return Prediction(scores, True, verdict.reason, verdict.ratio, verdict)
        frozen = self.frozen.answer(outputs)
        return replace(frozen, reason=verdict.reason, ratio=verdict.ratio, verdict=verdict)


class Ungated(Caster):
    """Transport every batch, and report the certificate's ratio."""

    def answer(self, outputs: Outputs) -> Prediction:
        """Return transported scores."""
        found = self._adapter.adapt(outputs)
        if not found.verdict.has_proposal:
            return self._gated(outputs, found.adapted, found.verdict)
        return Prediction(found.adapted, ratio=found.verdict.ratio, verdict=found.verdict)


class NoTransport(Caster):
    """Ablation: the classifier of `Ungated` with the identity in place of the transport.

    It differs from Source-GDA if a batch is too small to activate all directions.
    """

    def answer(self, outputs: Outputs) -> Prediction:
        """Return source scores in the directions that a transport to this batch would use."""
        z, active = self._clf.transport.projected(outputs.features)
        if z.shape[0] == 1:
            return self._gated(outputs, z, TOO_SMALL)
        with np.errstate(all="ignore"):
            scores = source_scores(z, active, self._clf.settings.beta)
        xp = array_namespace(scores)
        if not bool(xp.all(xp.isfinite(scores))):
            return self._gated(outputs, scores, NUMERICAL)
        return Prediction(scores)


class MixedMetric(Caster):
    """Ablation: the gate the paper warns of, a Euclidean residual over a Mahalanobis margin.

    Its ratio grows with the scale of the features, which says nothing about the transport.
    """

    def answer(self, outputs: Outputs) -> Prediction:
        """Answer as `Caster`, gated by the mixed ratio."""
        z, active = self._clf.transport.projected(outputs.features)
        if z.shape[0] == 1:
            return self._gated(outputs, z, TOO_SMALL)
        xp = array_namespace(active.U)
        with np.errstate(all="ignore"):
            euclidean = identity_like(active.within) * xp.linalg.vector_norm(active.U, axis=0)
        proposal, verdict = try_transport(z, active, self._clf.settings, metric=euclidean)
        return self._gated(outputs, proposal.scores, verdict)
