"""Layer transport: statistics in a network carried back to the source's, behind a certificate."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caster.adapt.alignment import Alignment, Implausible
from caster.adapt.comparison_schedule import ComparisonSchedule
from caster.adapt.frozen import Frozen
from caster.adapt.inert import answered_inert, warn_inert
from caster.adapt.layer_certificate import LayerCertificate
from caster.adapt.network import check_finite, torch_model
from caster.adapt.plausibility import Range
from caster.adapt.protocol import Prediction, Retained
from caster.adapt.source import Source, adapter_of, columns_of, moments_of
from caster.core.arrays import to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.core.linalg import Array
from caster.core.reasons import IMPLAUSIBLE, RESTING
from caster.errors import CasterError
from caster.models.activation_statistics import ActivationStatistics
from caster.models.full_maps import MOST_CHANNELS
from caster.models.modules import plain_name
from caster.models.protocol import FrozenModel, Outputs
from caster.models.sites import batchnorm_sites, selected
from caster.models.torch import TorchModel

log = logging.getLogger("caster")

Work = Callable[[Tensor, Outputs | None], tuple[Array, Prediction]]  # adapted scores, the answer


class NotFiniteError(Exception):
    """Aligned logits are not finite: the batch leaves no trace, and is answered as frozen."""


class OneCaller:
    """Rejects whoever comes while another thread is inside: a stream has an order.

    >>> with OneCaller("layer-transport"):
    ...     pass
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CasterError(
                f"one stream of {self._name} was called from two threads at once: give every "
                "thread and every client a stream of its own, with new_stream()"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start unlocked."""
        return type(self), (self._name,)


class LayerTransportUngated:
    """Align the channels at every site with the source's moments, in closed form, and answer.

    `prior` is how many samples the source's moments weigh as; `memory`, on how many samples the
    target's rest, those before the batch included where it has fewer; `depth`, the share of the
    network's sites that are aligned, from the first on: a shift of the images shows in shallow
    layers, the mixture of classes in deep ones; `sites`, patterns of names instead; `maps`, whether
    sites with few channels and many positions get full ones, for which the source's layers must be
    too. Weights are shared with the frozen model; nothing is learnt.

    An object is one stream, of one client: its statistics are those of the samples it was given.
    `new_stream` gives another client one of its own. Samples that no image could have given are
    answered by the frozen model and enter no statistics; see docs/threat-model.md.

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
        depth: float = 0.5,
        sites: Sequence[str] | None = None,
        maps: Literal["diagonal", "full"] = "diagonal",
    ) -> None:
        if not 0 <= prior < float("inf"):
            raise CasterError(f"prior of {name} is a number of samples from 0 up, not {prior!r}")
        if not isinstance(memory, int) or memory < 0:
            raise CasterError(f"memory of {name} is a number of samples from 0 up, not {memory!r}")
        if not 0 < depth <= 1:
            raise CasterError(f"depth of {name} is a share of the sites above 0, not {depth!r}")
        if maps not in ("diagonal", "full"):
            raise CasterError(f"maps of {name} are 'diagonal' or 'full', not {maps!r}")
        self.name = name
        self.model = torch_model(model, name)
        self.frozen = Frozen(model, source)
        self._columns = columns_of(source, name)
        layers, ends = layers_of(self.model, source, name, full=maps == "full")
        batchnorms = batchnorm_sites(self.model.module)
        known = list(layers or {})  # in the order of the network; those that a pass calls
        found = known if set(known) & set(batchnorms) else [*batchnorms, *known]
        shallow = found[: math.ceil(depth * len(found))]
        self.sites = shallow if sites is None else selected(found, sites, name)
        kept = layers and {site: found for site, found in layers.items() if site in self.sites}
        own = [site for site in batchnorms if site in self.sites]
        self._alignment = Alignment(self.model, kept, own, prior, memory, maps == "full", ends)
        self._one = OneCaller(name)
        if self.inert:
            unknown = "" if layers is not None else ": the state has no layers"
            warn_inert(name, model, f"site to align{unknown}")

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to align."""
        return not self.sites

    @property
    def aligned(self) -> list[Site]:
        """The sites but those that a first batch showed cannot be aligned."""
        return [site for site in self.sites if site not in self._alignment.left_alone]

    def new_stream(self) -> Self:
        """Another stream over the same model and source, as if no batch had been seen.

        Weights and source moments are shared; streams may be used in different threads.
        """
        stream = copy.copy(self)
        stream._alignment = self._alignment.new_stream()
        stream._one = OneCaller(self.name)
        return stream

    def predict(self, images: Any) -> Prediction:
        """The answer behind aligned layers; one thread at a time."""
        with self._one:
            if self.inert:
                return answered_inert(self.frozen, images)
            return self._plausibly(self.model.placed(images), None, self._work)[1]

    def _work(self, batch: Tensor, before: Outputs | None) -> tuple[Array, Prediction]:
        logits = self._aligned(batch)[1]
        return logits, Prediction(logits)

    def _plausibly(
        self,
        batch: Tensor,
        before: Outputs | None,  # what the frozen model gave, where that is known
        work: Work,
    ) -> tuple[Array, Prediction]:
        """Answer plausible samples as if they came alone, and others as the frozen model does."""
        try:
            return work(batch, before)
        except NotFiniteError:
            frozen = self.frozen.answer(before or self.model(batch))
            check_finite(torch.as_tensor(frozen.logits), self.name)
            return frozen.logits, replace(frozen, reason="numerical", ratio=math.inf)
        except Implausible as found:
            kept = found.kept
        rows = to_numpy(kept)
        others = self.model(batch[~kept]) if before is None else _chosen(before, ~rows)
        frozen = self.frozen.answer(others)
        if not bool(batch[~kept].isfinite().all()):  # bad input; large numbers are an attack
            check_finite(torch.as_tensor(frozen.logits), self.name)
        frozen = _zeroed(frozen)
        count = len(frozen.logits)
        if count == len(batch):
            answer = replace(frozen, reason=IMPLAUSIBLE, ratio=math.inf, implausible=count)
            return frozen.logits, answer
        known = None if before is None else _chosen(before, rows)
        scores, answer = self._plausibly(batch[kept], known, work)
        scores, logits = (_filled(kept, own, frozen.logits) for own in (scores, answer.logits))
        return scores, replace(answer, logits=logits, implausible=count + answer.implausible)

    def _aligned(self, images: Any) -> tuple[Outputs, Tensor]:
        outputs = self._alignment(images)
        logits: Tensor = self._columns(outputs.logits)
        if not bool(logits.isfinite().all()):
            raise NotFiniteError
        self._alignment.accept()
        return outputs, logits

    def reset(self) -> None:
        """No batch seen."""
        with self._one:
            self._reset()

    def _reset(self) -> None:
        self._alignment.reset()

    def retained(self) -> Retained:
        """Moments of the source and of the target so far; no weights."""
        return self._alignment.retained()


class LayerTransport(LayerTransportUngated):
    """Layer transport where its certificate allows, and else the frozen model's answer.

    `LayerCertificate` holds the network's doubt behind the update against its doubt without, over
    `window` samples; their ratio must be at most `tau`. The frozen model answers what is refused.
    While the verdict stays the same, one window in `every` is compared (`ComparisonSchedule`), and
    any batch of which the network is less sure than of those it was compared on. With
    `gated=False` every batch is compared and answered by the update. See docs/layer-transport.md.

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
        depth: float = 0.5,
        sites: Sequence[str] | None = None,
        maps: Literal["diagonal", "full"] = "diagonal",
        tau: float = 1.0,
        window: int = 256,
        every: int = 32,
        gated: bool = True,
        last: Literal["head", "transport"] = "head",
    ) -> None:
        super().__init__(
            model,
            source,
            name=name,
            prior=prior,
            memory=memory,
            depth=depth,
            sites=sites,
            maps=maps,
        )
        if not 0 < tau < float("inf"):
            raise CasterError(f"tau of {name} must be a number above 0, not {tau!r}")
        for setting, count in (("window", window), ("every", every)):
            if not isinstance(count, int) or count < 1:
                raise CasterError(f"{setting} of {name} must be 1 or more, not {count!r}")
        if last not in ("head", "transport"):
            raise CasterError(f"last of {name} is 'head' or 'transport', not {last!r}")
        self.tau = tau
        self.gated = gated
        self._last = adapter_of(model, source, name) if last == "transport" else None
        self._certificate = LayerCertificate(window)
        self._turns = ComparisonSchedule(every if gated else 1, window)

    def new_stream(self) -> Self:
        """Another stream over the same model and source, with a certificate of its own."""
        stream = super().new_stream()
        stream._certificate = LayerCertificate(self._certificate.window)
        stream._turns = ComparisonSchedule(self._turns.every, self._turns.window)
        return stream

    def _work(self, batch: Tensor, before: Outputs | None) -> tuple[Array, Prediction]:
        answer = self._predict(batch)
        return answer.logits, answer

    def _predict(self, batch: Tensor) -> Prediction:
        """The answer behind aligned layers if the certificate accepts it, else the frozen one."""
        after = before = None
        if self._turns.resting:
            updated = self._turns.accepted
            if updated:
                after = self._aligned(batch)
                answer = Prediction(self._answer(*after), reason=RESTING)
            else:
                before = self.model(batch)
                answer = replace(self.frozen.answer(before), reason=RESTING)
            scores = after[1] if after else answer.logits
            if not self._certificate.is_less_sure(scores, updated):
                self._turns.rested(len(batch))
                return answer
        before = before or self.model(batch)  # first: if it fails, the batch has left no trace
        answer = self._judged(after or self._aligned(batch), before)
        if self._turns.judged(len(batch), answer.accepted):
            self._certificate.settle()
            if not answer.accepted:
                self._alignment.reset()  # what comes after a rest is another part of the stream
        return answer

    def both(self, images: Any, before: Outputs) -> tuple[Array, Prediction]:
        """The logits behind aligned layers, whatever the certificate says, and what it allows.

        `before` is what the frozen model gave.
        """
        with self._one:
            return self._plausibly(self.model.placed(images), before, self._both)

    def _both(self, batch: Tensor, before: Outputs | None) -> tuple[Array, Prediction]:
        assert before is not None
        after = self._aligned(batch)
        return after[1], self._judged(after, before)

    def _judged(self, after: tuple[Outputs, Tensor], before: Outputs) -> Prediction:
        """The answer that the certificate allows."""
        frozen = self.frozen.answer(before)
        ratio = self._certificate.show(after[1], frozen.logits)
        if not self.gated:
            return Prediction(self._answer(*after), ratio=ratio)
        if ratio <= self.tau:
            return Prediction(self._answer(*after), True, "accepted", ratio)
        return replace(frozen, reason="ratio", ratio=ratio)

    def _answer(self, outputs: Outputs, logits: Tensor) -> Tensor:
        """What aligned layers answer, by the head or by transport of the last features."""
        if self._last is None or len(logits) == 1:
            return logits
        found = self._last.clf.adapt(outputs.features, logits)
        scores: Tensor = found.transported
        return scores if found.verdict.accepted else logits

    def _reset(self) -> None:
        super()._reset()
        self._certificate.reset()
        self._turns.reset()

    def retained(self) -> Retained:
        """Moments of the source and of the target so far; no weights."""
        own = super().retained()
        return own if self._last is None else own + moments_of(self._last)


def _chosen(outputs: Outputs, rows: NDArray[np.bool_]) -> Outputs:
    """Outputs of some samples."""
    logits = outputs.logits
    return Outputs(outputs.features[rows], None if logits is None else logits[rows])


def _zeroed(frozen: Prediction) -> Prediction:
    """The frozen answer to samples that could be no image: no class where it is not finite."""
    logits = torch.as_tensor(frozen.logits)
    sound = logits.isfinite().all(dim=1, keepdim=True)
    return frozen if bool(sound.all()) else replace(frozen, logits=logits.where(sound, 0.0))


def _filled(kept: Tensor, own: Array, others: Array) -> Tensor:  # (n,), (k, C), (n - k, C)
    """The scores of a batch, from those of the samples that were kept and of the others."""
    scores = torch.as_tensor(own)
    whole = scores.new_empty(len(kept), scores.shape[1])
    whole[kept], whole[~kept] = scores, torch.as_tensor(others).to(scores)
    return whole


def layers_of(
    model: TorchModel, source: Source, name: str, full: bool = False
) -> tuple[dict[Site, ChannelMoments] | None, Range | None]:
    """The source's moments at every site, and the range of its images.

    The state's, or measured on images; None where there are neither. A stated preprocessing has a
    range of its own.
    """
    layers = ends = None
    if source.state is not None and source.state.layers is not None:
        layers, ends = dict(source.state.layers), source.state.input_range
    elif source.batches is not None:
        statistics = ActivationStatistics(model, full=full)
        for images, _ in source.labelled(name):
            statistics(images)
        layers, ends = statistics.moments(), statistics.input_range
    parts = {plain_name(name) for name, _ in model.module.named_modules()}
    for site in layers or {}:  # deep ones too, which may not be aligned: it is another network's
        if site.module not in parts:
            raise CasterError(f"{model.name} has no layer of the state's site {site}")
    if full and all(found.covariance is None for found in (layers or {}).values()):
        raise CasterError(
            f"no full maps for {name}: fit with layers='full', and a network with sites of at most "
            f"{MOST_CHANNELS} channels that are no BatchNorms"
        )
    return layers, ends if model.preprocessing is None else model.preprocessing.ends
