"""CASTER: gated, always transporting, never transporting, and with the wrong metric."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from array_api_compat import array_namespace

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import OnFeatures, Prediction, Retained
from caster.adapt.source import Source, adapter_of, moments_of
from caster.core.discriminant import ridged_scores
from caster.core.gate import refuse
from caster.core.linalg import Array, identity_like
from caster.core.trial import try_transport
from caster.core.types import Verdict
from caster.models.protocol import FrozenModel, Outputs

TOO_SMALL = refuse("batch_too_small")  # one sample supports no direction to transport in
NUMERICAL = refuse("numerical")


class Caster(OnFeatures):
    """Transport the source's class moments to the batch, if its certificate allows.

    The constants are those of `caster.Caster`; None is the state's own.

    >>> import numpy as np
    >>> from caster import wrap
    >>> from caster_bench.methods import create
    >>> labels = np.arange(300) % 3
    >>> images = np.random.default_rng(0).normal(size=(300, 4)) + 6 * np.eye(3, 4)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> method = create("caster", model, Source.fit(model, [(images, labels)]))
    >>> method.predict(1.5 * images[:64] + 2.0).reason
    'accepted'
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "caster",
        lam: float | None = None,
        beta: float | None = None,
        tau: float | None = None,
        confidence: float | None = None,
        min_samples: int | None = None,
        min_classes: int | None = None,
    ) -> None:
        super().__init__(model)
        self.name = name
        self._adapter = adapter_of(model, source, name)
        chosen = {"lam": lam, "beta": beta, "tau": tau, "confidence": confidence}
        chosen |= {"min_samples": min_samples, "min_classes": min_classes}
        given = {constant: value for constant, value in chosen.items() if value is not None}
        self._clf = self._adapter.clf.set_params(**given)
        _ = self._clf.settings  # refuses what is no constant
        self.frozen = Frozen(model, source)

    def answer(self, outputs: Outputs) -> Prediction:
        """Transported scores if the batch supports them, else the frozen model's."""
        found = self._adapter.adapt(outputs)
        return self._decided(outputs, found.transported, found.verdict)

    def retained(self) -> Retained:
        """The source's moments."""
        return moments_of(self._adapter)

    def _decided(self, outputs: Outputs, scores: Array, verdict: Verdict) -> Prediction:
        if verdict.accepted:
            return Prediction(scores, True, verdict.reason, verdict.ratio, verdict)
        kept = self.frozen.answer(outputs)
        return replace(kept, reason=verdict.reason, ratio=verdict.ratio, verdict=verdict)


class Ungated(Caster):
    """Transport whatever the certificate says, and report what it says in the ratio."""

    def answer(self, outputs: Outputs) -> Prediction:
        """Transported scores."""
        found = self._adapter.adapt(outputs)
        if not found.verdict.has_proposal:
            return self._decided(outputs, found.transported, found.verdict)
        return Prediction(found.transported, ratio=found.verdict.ratio, verdict=found.verdict)


class NoTransport(Caster):
    """The classifier of `Ungated` with the identity for a map: what the transport itself adds.

    It differs from Source-GDA where a batch is too small to activate all directions.
    """

    def answer(self, outputs: Outputs) -> Prediction:
        """Source scores in the directions that a transport to this batch would use."""
        z, active = self._clf.transporter.projected(outputs.features)
        if z.shape[0] == 1:
            return self._decided(outputs, z, TOO_SMALL)
        with np.errstate(all="ignore"):
            ridge = self._clf.settings.beta * identity_like(active.within)
            scores = ridged_scores(z, active, ridge)
        xp = array_namespace(scores)
        if not bool(xp.all(xp.isfinite(scores))):
            return self._decided(outputs, scores, NUMERICAL)
        return Prediction(scores)


class MixedMetric(Caster):
    """The gate the paper warns of: a Euclidean residual over a Mahalanobis margin.

    Its ratio grows with the scale of the features, which says nothing about the transport.
    """

    def answer(self, outputs: Outputs) -> Prediction:
        """As `Caster`, judged by the wrong ratio."""
        z, active = self._clf.transporter.projected(outputs.features)
        if z.shape[0] == 1:
            return self._decided(outputs, z, TOO_SMALL)
        with np.errstate(all="ignore"):
            metric = active.euclidean
        proposal, verdict = try_transport(z, active, self._clf.settings, metric)
        return self._decided(outputs, proposal.scores, verdict)
