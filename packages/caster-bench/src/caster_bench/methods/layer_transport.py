"""Layer and mixture transport, the library's own, as methods of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from caster.adapt.layer_passes import PLAIN, LayerSettings
from caster.adapt.layer_transport import LayerAnswer
from caster.adapt.layer_transport import LayerTransport as Transport
from caster.core.channels import ChannelMoments, Site
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.io.labels import LabelIndex, as_labels
from caster.models.torch import TorchModel
from caster_bench.methods.network import TorchMethod
from caster_bench.methods.protocol import Prediction, Retained, inert_prediction, warn_inert
from caster_bench.methods.source import Source, moment_bytes, unguarded_adapter
from caster_bench.records.reasons import RESTING, UNGATED

REVISION = 9
Maps = Literal["diagonal", "full"]


@dataclass(eq=False, repr=False, kw_only=True)
class LayerTransportUngated(TorchMethod):
    """Layer or mixture transport of every batch, without its certificate.

    `prior`, `memory`, `depth`, `sites`, `maps` and `mixture` are those of `LayerSettings`. Without
    a state, layers are measured on the source's batches; without those, BatchNorms know their own
    moments. The defaults align shallow layers with the source's own mixture of classes, and those
    of "mixture-transport" all layers with the mixture of the batch, as the library does.
    """

    name: str = "layer-transport-ungated"
    prior: float = PLAIN.prior
    memory: int = PLAIN.memory
    depth: float = PLAIN.depth
    sites: Sequence[str] | None = None
    maps: Maps = PLAIN.maps
    mixture: bool = PLAIN.mixture

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        if self.mixture:
            source.require_state(self.name)  # for the order of its classes
        settings = self._settings()  # checked before the source is measured
        layers, ends = _layers(self.model, source, self.name)
        self.transport = Transport(self.model, layers, self.columns, ends, settings)
        if self.inert:
            unknown = "" if layers is not None else ": the state has no layers"
            warn_inert(self.name, self.model, f"site to align{unknown}")

    def _settings(self) -> LayerSettings:
        sites = None if self.sites is None else tuple(self.sites)
        return LayerSettings(self.prior, self.memory, self.depth, sites, self.maps, self.mixture)

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to align."""
        return not self.transport.sites

    def predict(self, images: Any) -> Prediction:
        """Answer a batch of images."""
        if self.inert:
            return inert_prediction(self.frozen, images)
        return self._predicted(self._answer(images))

    def _answer(self, images: Any) -> LayerAnswer:
        return self.transport.align(images)

    def _predicted(self, answer: LayerAnswer) -> Prediction:
        if answer.adapted is None:
            return _as_judged(answer)
        return Prediction(answer.adapted, implausible=answer.implausible)

    def reset(self) -> None:
        """Forget every batch."""
        self.transport.reset()

    def retained(self) -> Retained:
        """Moments of the source and of the target so far; no weights."""
        transport = self.transport
        return Retained(statistics=transport.source_bytes, buffers=transport.stream_bytes)


@dataclass(eq=False, repr=False, kw_only=True)
class LayerTransport(LayerTransportUngated):
    """Layer or mixture transport of accepted batches; the others get the frozen model's answer.

    `tau`, `window` and `every` are those of `LayerSettings`. With `gated=False` every batch is
    compared and answered by the update. With `last="transport"` the aligned features are answered
    by transport of the last layer, where that one's own certificate accepts them.
    """

    name: str = "layer-transport"
    tau: float = LayerSettings.tau
    window: int = LayerSettings.window
    every: int = 32
    gated: bool = True
    last: Literal["head", "transport"] = "head"

    def __post_init__(self, source: Source) -> None:
        if self.last not in ("head", "transport"):
            raise CasterError(f"last of {self.name} is 'head' or 'transport', not {self.last!r}")
        super().__post_init__(source)
        features = self.last == "transport"
        self._last = unguarded_adapter(self.model, source, self.name) if features else None

    def _settings(self) -> LayerSettings:
        every = self.every if self.gated else 1
        return replace(super()._settings(), tau=self.tau, window=self.window, every=every)

    def _answer(self, images: Any) -> LayerAnswer:
        return self.transport(images)

    def _predicted(self, answer: LayerAnswer) -> Prediction:
        if answer.adapted is None or (self.gated and not answer.verdict.accepted):
            return _as_judged(answer)
        reason = answer.verdict.reason if self.gated else UNGATED
        ratio, implausible = _measured(answer), answer.implausible
        return Prediction(self._refined(answer), True, reason, ratio, implausible=implausible)

    def _refined(self, answer: LayerAnswer) -> Array:
        """Aligned features answered by the head, or by transport of the last layer."""
        scores = answer.adapted
        if self._last is None or answer.features is None or len(answer.features) == 1:
            return scores
        found = self._last.clf.adapt(answer.features, scores)
        return found.adapted if found.verdict.accepted else scores

    def retained(self) -> Retained:
        """Moments of the source and of the target so far; no weights."""
        own = super().retained()
        if self._last is None:
            return own
        return own + Retained(statistics=moment_bytes(self._last))


def _measured(answer: LayerAnswer) -> float | None:
    """The ratio, if a comparison was made."""
    return None if answer.verdict.reason == RESTING else answer.verdict.ratio


def _as_judged(answer: LayerAnswer) -> Prediction:
    verdict = answer.verdict
    return Prediction(
        answer.scores,
        verdict.accepted,
        verdict.reason,
        _measured(answer),
        implausible=answer.implausible,
    )


def _layers(
    model: TorchModel, source: Source, name: str
) -> tuple[dict[Site, ChannelMoments] | None, Any]:
    """The source's moments at every site, and the range of its images."""
    if source.state is not None and source.state.layers is not None:
        return dict(source.state.layers), source.state.input_range
    if source.batches is None:
        return None, None
    from caster.models.activation_statistics import ActivationStatistics

    statistics, index = ActivationStatistics(model), LabelIndex()
    for images, labels in source.labelled(name):
        statistics(images, index(as_labels(labels)))
    classes = index.classes if source.state is None else source.state.classes
    return statistics.moments(index.of(classes)), statistics.input_range
