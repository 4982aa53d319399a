"""Layer transport: every layer's statistics carried back to the source's, behind a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from caster.core.layers import ChannelMoments, Site
from caster.errors import CasterError
from caster.frozen.gauge import measured
from caster.frozen.protocol import FrozenModel, Outputs
from caster.frozen.sites import batchnorm_sites, selected
from caster.frozen.torch import TorchModel
from caster.methods.alignment import Alignment
from caster.methods.frozen import Frozen
from caster.methods.inert import answered_inert, warn_inert
from caster.methods.layer_certificate import LayerCertificate
from caster.methods.network import check_finite, torch_model
from caster.methods.protocol import Prediction, Retained
from caster.methods.source import Source, adapter_of, columns_of
from caster.state import ARRAYS, array_sizes


class LayerTransportUngated:
    """Align the channels at every site with the source's moments, in closed form, and answer.

    `prior` is how many samples the source's moments weigh as; `memory`, on how many samples the
    target's rest, those before the batch included where it has fewer; `sites`, patterns of names
    among `method.sites`. Weights are shared with the frozen model; nothing is learnt.

    >>> from torch import nn
    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> [str(site) for site in LayerTransportUngated(wrap(net), Source()).sites]
    ['1:in']
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "layer-transport-ungated",
        prior: float = 16.0,
        memory: int = 64,
        sites: Sequence[str] | None = None,
    ) -> None:
        if not 0 <= prior < float("inf"):
            raise CasterError(f"prior of {name} is a number of samples from 0 up, not {prior!r}")
        if not isinstance(memory, int) or memory < 0:
            raise CasterError(f"memory of {name} is a number of samples from 0 up, not {memory!r}")
        self.name = name
        self.model = torch_model(model, name)
        self.frozen = Frozen(model, source)
        self._columns = columns_of(source, name)
        layers = layers_of(self.model, source, name)
        batchnorms = batchnorm_sites(self.model.module)
        self.sites = selected([*batchnorms, *layers], sites, name)
        kept = {site: found for site, found in layers.items() if site in self.sites}
        own = [site for site in batchnorms if site in self.sites]
        self._alignment = Alignment(self.model, kept, own, prior, memory)
        if self.inert:
            warn_inert(name, model, "site to align")

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to align."""
        return not self.sites

    def predict(self, images: Any) -> Prediction:
        """The answer behind aligned layers."""
        if self.inert:
            return answered_inert(self.frozen, images)
        return Prediction(self._aligned(images)[1])

    def _aligned(self, images: Any) -> tuple[Outputs, Tensor]:
        outputs = self._alignment(images)
        logits: Tensor = self._columns(outputs.logits)
        check_finite(logits, self.name)
        return outputs, logits

    def reset(self) -> None:
        """No batch seen."""
        self._alignment.reset()

    def retained(self) -> Retained:
        """Moments of the source and of the target so far; no weights."""
        return self._alignment.retained()


class LayerTransport(LayerTransportUngated):
    """Layer transport where its certificate allows, and else the frozen model's answer.

    `LayerCertificate` measures it on the representation after the update, over `window` samples;
    its ratio must be at most `tau`, and until it rests on `min_samples` every batch is refused.
    The frozen model answers every batch that is refused, and one in `every` to be compared with.
    See docs/layer-transport.md.

    With `last="transport"` the aligned features are answered by caster's transport of the last
    layer where that one's own certificate accepts them.
    """

    def __init__(
        self,
        model: FrozenModel,
        source: Source,
        *,
        name: str = "layer-transport",
        prior: float = 16.0,
        memory: int = 64,
        sites: Sequence[str] | None = None,
        tau: float = 1.0,
        window: int = 128,
        min_samples: int = 32,
        every: int = 1,
        last: Literal["head", "transport"] = "head",
    ) -> None:
        super().__init__(model, source, name=name, prior=prior, memory=memory, sites=sites)
        if not 0 < tau < float("inf"):
            raise CasterError(f"tau of {name} must be a number above 0, not {tau!r}")
        counts = {
            "min_samples": (min_samples, 2),
            "window": (window, min_samples),
            "every": (every, 1),
        }
        for setting, (count, least) in counts.items():
            if not isinstance(count, int) or count < least:
                raise CasterError(f"{setting} of {name} must be {least} or more, not {count!r}")
        if last not in ("head", "transport"):
            raise CasterError(f"last of {name} is 'head' or 'transport', not {last!r}")
        self.tau = tau
        self.min_samples = min_samples
        self.every = every
        self.last = last
        self._certificate = LayerCertificate(adapter_of(model, source, name), window)
        self._since = 0  # batches since one was compared

    def predict(self, images: Any) -> Prediction:
        """The answer behind aligned layers if the certificate accepts it, else the frozen one."""
        if self.inert:
            return answered_inert(self.frozen, images)
        batch = self.model.placed(images)
        due = self._since + 1 >= self.every or not self._certificate.full
        return self.predict_with(batch, self.model(batch) if due else None)

    def predict_with(self, images: Any, before: Outputs | None) -> Prediction:
        """The same, of a batch that the frozen model has answered already, or need not."""
        return self.both(images, before)[1]

    def both(self, images: Any, before: Outputs | None) -> tuple[Tensor, Prediction]:
        """The logits behind aligned layers, whatever the certificate says, and what it allows."""
        after, logits = self._aligned(images)
        self._since += 1
        certificate = self._certificate
        certificate.show_after(after.features, logits)
        if before is not None:
            self._compare(before)
        ratio = certificate.ratio()
        enough = certificate.samples >= self.min_samples
        if enough and ratio <= self.tau:  # which NaN is not
            return logits, Prediction(self._answer(after, logits), True, "accepted", ratio)
        if before is None:
            before = self.model(images)
            self._compare(before)
        kept = self.frozen.answer(before)
        return logits, replace(kept, reason="ratio" if enough else "min_samples", ratio=ratio)

    def _compare(self, before: Outputs) -> None:
        self._certificate.show_before(before.features, self.frozen.logits(before))
        self._since = 0

    def _answer(self, after: Outputs, logits: Tensor) -> Tensor:
        if self.last == "head" or len(logits) == 1:
            return logits
        found = self._certificate.adapter.clf.adapt(after.features, logits)
        scores: Tensor = found.transported
        return scores if found.verdict.accepted else logits

    def reset(self) -> None:
        """No batch seen."""
        super().reset()
        self._certificate.reset()
        self._since = 0

    def retained(self) -> Retained:
        """Moments of the source, its classes and the target so far; no weights."""
        sizes = dict(array_sizes(self._certificate.adapter.state))
        classes = Retained(
            statistics=sum(sizes[name] for name in ARRAYS), buffers=self._certificate.nbytes()
        )
        return super().retained() + classes  # sites once, be they the state's or measured


def layers_of(model: TorchModel, source: Source, name: str) -> dict[Site, ChannelMoments]:
    """The source's moments at every site but BatchNorms': the state's, or measured on images."""
    if source.state is not None and source.state.layers is not None:
        return dict(source.state.layers)
    if source.batches is not None:
        return measured(model, (images for images, _ in source.labelled(name)))
    return {}
