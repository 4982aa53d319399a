"""Layer transport: activation statistics aligned with the source's, behind a certificate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caster.adapt.alignment import Alignment, ImplausibleSamples
from caster.adapt.layer_certificate import ComparisonSchedule, LayerCertificate
from caster.adapt.plausibility import Range
from caster.core.arrays import to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.core.linalg import Array
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import Outputs
from caster.models.sites import batchnorm_sites, selected
from caster.models.torch import TorchModel, plain_name
from caster.models.torch_channels import FULL_MAP_CHANNELS

UNCHECKED = math.nan  # the ratio where no comparison was made


@dataclass(frozen=True)
class LayerSettings:
    """The constants of layer transport, chosen on the four spare corruptions.

    >>> LayerSettings(depth=2.0)
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: depth is a share of the sites above 0, not 2.0
    """

    prior: float = 16.0  # weight of the source's moments, in samples
    memory: int = 64  # samples behind the target's moments, earlier ones if a batch has fewer
    depth: float = 0.5  # share of the sites that are aligned, from the first on
    sites: tuple[str, ...] | None = None  # patterns of site names instead
    maps: Literal["diagonal", "full"] = "diagonal"  # full where a site has few channels
    tau: float = 1.0  # largest accepted ratio
    window: int = 256  # samples behind the certificate
    every: int = 1  # compare one window in this many while the verdict is stable

    def __post_init__(self) -> None:
        if not 0 <= self.prior < math.inf:
            raise CasterError(f"prior is a number of samples from 0 up, not {self.prior!r}")
        if not isinstance(self.memory, int) or self.memory < 0:
            raise CasterError(f"memory is a number of samples from 0 up, not {self.memory!r}")
        if not 0 < self.depth <= 1:
            raise CasterError(f"depth is a share of the sites above 0, not {self.depth!r}")
        if self.maps not in ("diagonal", "full"):
            raise CasterError(f"maps are 'diagonal' or 'full', not {self.maps!r}")
        if not 0 < self.tau < math.inf:
            raise CasterError(f"tau must be a number above 0, not {self.tau!r}")
        for name in ("window", "every"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise CasterError(f"{name} must be 1 or more, not {count!r}")


@dataclass(frozen=True, eq=False)
class LayerAnswer:
    """One batch: scores with aligned layers, scores of the frozen model, and the verdict."""

    scores: Array  # (n, C), those that the verdict chooses
    verdict: Verdict
    adapted: Array | None  # (n, C), with aligned layers; None if there is no such answer
    frozen: Array | None  # (n, C); None if the comparison was skipped
    features: Array | None = None  # (n, d), behind aligned layers
    implausible: int = 0  # samples that no image could have produced, answered as frozen


class LayerTransport:
    """One stream through a network whose layers are aligned with the source's moments.

    Every site's channels get the source's mean and variance, in closed form; weights are shared
    with the frozen model and nothing is learnt. The answer is used while the certificate is at
    most `tau`, and the frozen model's otherwise.

    A shift of the images shows in shallow layers and the mixture of classes in deep ones, which is
    why only the first half of the sites is aligned. Samples that no image could have produced are
    answered by the frozen model and enter no statistics: see docs/threat-model.md.

    >>> from torch import nn
    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> [str(site) for site in LayerTransport(wrap(net), None, Columns(None)).sites]
    ['1:in']
    """

    def __init__(
        self,
        model: TorchModel,
        layers: Mapping[Site, ChannelMoments] | None,  # of the source; None: BatchNorms' own
        columns: Columns,  # which logits are the classes
        input_range: Range | None = None,  # of images, where the preprocessing does not state it
        settings: LayerSettings | None = None,
    ) -> None:
        self.model = model
        self.settings = settings or LayerSettings()
        self.columns = columns
        found = None if layers is None else dict(layers)
        _check_sites(model, found or {})
        full = self.settings.maps == "full"
        batchnorms = batchnorm_sites(model.module)
        mapped = [moments for site, moments in (found or {}).items() if site not in batchnorms]
        if full and all(moments.covariance is None for moments in mapped):
            raise CasterError(
                "the state has no covariances for full maps, which need sites of at most "
                f"{FULL_MAP_CHANNELS} channels besides BatchNorms"
            )
        self.sites = self._select_sites(list(found or {}), batchnorms)
        kept = found and {site: found[site] for site in found if site in self.sites}
        own = [site for site in batchnorms if site in self.sites]
        ends = input_range if model.preprocessing is None else model.preprocessing.value_range
        settings = self.settings
        self._alignment = Alignment(model, kept, own, settings.prior, settings.memory, full, ends)
        self._certificate = LayerCertificate(settings.window)
        self._schedule = ComparisonSchedule(settings.every, settings.window)
        self._guard = _SingleThread()

    def _select_sites(self, measured: list[Site], batchnorms: Sequence[Site]) -> list[Site]:
        """The sites to align: the first ones in the order of the network, or those named."""
        found = measured if set(measured) & set(batchnorms) else [*batchnorms, *measured]
        if self.settings.sites is not None:
            return selected(found, self.settings.sites, "layer transport")
        return found[: math.ceil(self.settings.depth * len(found))]

    @property
    def aligned_sites(self) -> list[Site]:
        """The sites, without those that the first batch showed cannot be aligned."""
        return [site for site in self.sites if site not in self._alignment.left_alone]

    @property
    def full_maps(self) -> int:
        """How many of them get full maps, where a batch supports them."""
        return self._alignment.full_maps

    def __call__(self, batch: Any, frozen: Outputs | None = None) -> LayerAnswer:
        """Answer a batch behind the certificate; `frozen` is the model's output, if known."""
        with self._guard:
            return self._answer_plausible(self.model.placed(batch), frozen, self._gated)

    def align(self, batch: Any) -> LayerAnswer:
        """Answer a batch with aligned layers, without a certificate."""
        with self._guard:
            return self._answer_plausible(self.model.placed(batch), None, self._always)

    def new_stream(self) -> Self:
        """Another stream over the same model and source, as if no batch had been seen.

        Weights and source moments are shared; streams may run in different threads.
        """
        stream = copy.copy(self)
        stream._alignment = self._alignment.new_stream()
        stream._certificate = LayerCertificate(self.settings.window)
        stream._schedule = ComparisonSchedule(self.settings.every, self.settings.window)
        stream._guard = _SingleThread()
        return stream

    def reset(self) -> None:
        """Forget the stream."""
        with self._guard:
            self._alignment.reset()
            self._certificate.reset()
            self._schedule.reset()

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything the stream remembers, as named arrays."""
        with self._guard:
            return {
                **self._alignment.state(),
                "certificate": self._certificate.state(),
                "schedule": self._schedule.state(),
            }

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue exactly where a stream was when its `state` was taken."""
        with self._guard:
            self._alignment.resume(state)
            self._certificate.resume(state["certificate"])
            self._schedule.resume(state["schedule"])

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""
        return self._alignment.source_bytes

    @property
    def stream_bytes(self) -> int:
        """Size of the target's moments."""
        return self._alignment.stream_bytes

    def _gated(self, batch: Tensor, before: Outputs | None) -> LayerAnswer:
        """Answer by the stable verdict if the batch is as sure as before, else compare."""
        after = None
        if self._schedule.skips:
            if self._schedule.accepted:
                after = self._aligned(batch)
                answer = self._ungated(after)
            else:
                before = before or self.model(batch)
                logits = self.columns(before.logits)
                answer = LayerAnswer(logits, Verdict(False, "rest", UNCHECKED), None, logits)
            if not self._certificate.has_dropped(answer.scores, self._schedule.accepted):
                self._alignment.accept()
                self._schedule.skipped(len(batch))
                return answer
        before = before or self.model(batch)
        after = after or self._aligned(batch)
        self._alignment.accept()  # both passes succeeded: until here the batch left no trace
        answer = self._compared(after, before)
        if self._schedule.compared(len(batch), answer.verdict.accepted):
            self._certificate.settle()
            if not answer.verdict.accepted:
                self._alignment.reset()  # the next comparison is of another part of the stream
        return answer

    def _always(self, batch: Tensor, before: Outputs | None) -> LayerAnswer:
        answer = self._ungated(self._aligned(batch))
        self._alignment.accept()
        return answer

    def _ungated(self, after: Outputs) -> LayerAnswer:
        verdict = Verdict(True, "rest", UNCHECKED)
        return LayerAnswer(after.logits, verdict, after.logits, None, after.features)

    def _compared(self, after: Outputs, before: Outputs) -> LayerAnswer:
        frozen = self.columns(before.logits)
        assert after.logits is not None
        ratio = self._certificate.update(after.logits, frozen)
        accepted = ratio <= self.settings.tau
        verdict = Verdict(accepted, "accepted" if accepted else "ratio", ratio)
        scores = after.logits if accepted else frozen
        return LayerAnswer(scores, verdict, after.logits, frozen, after.features)

    def _aligned(self, batch: Tensor) -> Outputs:
        """Features, and logits of the classes, with aligned layers."""
        outputs = self._alignment(batch)
        logits: Tensor = self.columns(outputs.logits)
        if not bool(logits.isfinite().all()):
            raise _NotFiniteError
        return Outputs(outputs.features, logits)

    def _answer_plausible(
        self,
        batch: Tensor,
        before: Outputs | None,
        work: Callable[[Tensor, Outputs | None], LayerAnswer],
    ) -> LayerAnswer:
        """Answer plausible samples as if they came alone, and others as the frozen model does."""
        try:
            return work(batch, before)
        except _NotFiniteError:
            frozen = self.columns((before or self.model(batch)).logits)
            _check_finite(frozen)
            return LayerAnswer(frozen, Verdict(False, "numerical", math.inf), None, frozen)
        except ImplausibleSamples as found:
            kept = found.kept
        rows = to_numpy(kept)
        others = self.model(batch[~kept]) if before is None else _rows(before, ~rows)
        logits = self.columns(others.logits)
        if not bool(batch[~kept].isfinite().all()):  # bad input; large numbers are an attack
            _check_finite(logits)
        rest = _zeroed(logits)
        if len(rest) == len(batch):
            verdict = Verdict(False, "implausible", math.inf)
            return LayerAnswer(rest, verdict, None, rest, implausible=len(rest))
        known = None if before is None else _rows(before, rows)
        answer = self._answer_plausible(batch[kept], known, work)
        filled = {
            name: None if part is None else _filled(kept, part, rest)
            for name in ("scores", "adapted", "frozen")
            for part in (getattr(answer, name),)
        }
        implausible = len(rest) + answer.implausible
        return replace(answer, **filled, features=None, implausible=implausible)  # type: ignore[arg-type]


class _NotFiniteError(Exception):
    """Aligned logits are not finite: the batch is answered as frozen and leaves no trace."""


class _SingleThread:
    """Reject a second thread: the batches of a stream have an order."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CasterError(
                "two threads called one stream at once: give every thread and every client a "
                "stream of its own, with new_stream()"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start unlocked."""
        return type(self), ()


def _check_sites(model: TorchModel, layers: Mapping[Site, ChannelMoments]) -> None:
    """Reject the layers of another network, deep ones that are not aligned included."""
    parts = {plain_name(name) for name, _ in model.module.named_modules()}
    for site in layers:
        if site.module not in parts:
            raise CasterError(f"{model.name} has no layer of the state's site {site}")


def _check_finite(logits: Array) -> None:
    broken = ~torch.as_tensor(logits).isfinite().all(dim=1)
    if bool(broken.any()):
        row = int(broken.int().argmax())
        raise CasterError(
            f"the model's logits are not finite, first for sample {row} of {len(broken)}: drop or "
            "repair such images"
        )


def _rows(outputs: Outputs, rows: NDArray[np.bool_]) -> Outputs:
    logits = outputs.logits
    return Outputs(outputs.features[rows], None if logits is None else logits[rows])


def _zeroed(logits: Array) -> Tensor:
    """The frozen scores of samples that no image produced: no class where they are not finite."""
    scores = torch.as_tensor(logits)
    return scores.where(scores.isfinite().all(dim=1, keepdim=True), 0.0)


def _filled(kept: Tensor, own: Array, others: Array) -> Tensor:  # (n,), (k, C), (n - k, C)
    """The scores of a batch, from those of the samples that were kept and of the others."""
    scores = torch.as_tensor(own)
    kept = kept.to(scores.device)
    whole = scores.new_empty(len(kept), scores.shape[1])
    whole[kept], whole[~kept] = scores, torch.as_tensor(others).to(scores)
    return whole
