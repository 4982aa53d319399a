"""One aligned site: measure its values, and give them the source's moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models.torch_channels import (
    FULL_MAP_ROWS,
    FullToSource,
    ToSource,
    as_tensors,
    measure,
    measure_full,
)

EPS = 1e-5  # of a site's mean variance, added to every variance: a dead channel stays dead
STATISTICS = ("running_mean", "running_var")
DERIVED = ("_placed", "_map", "_full", "_constants_of")


class AlignedSite:
    """A site, and the source's moments there."""

    is_measured = True  # False: the moments are the layer's own
    _placed: ChannelMoments | None = (
        None  # the moments in the dtype and on the device of the values
    )

    def __init__(self, site: Site, source: ChannelMoments) -> None:
        self.site = site
        self.source = source

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without what is derived."""
        return {name: part for name, part in vars(self).items() if name not in DERIVED}

    def source_like(self, found: ChannelMoments) -> ChannelMoments:
        """The source's moments, in the dtype and on the device of the target's."""
        source = self._placed or self.source
        mean = source.mean
        if mean.shape != found.mean.shape:
            raise CasterError(
                f"the state has {len(mean)} channels at {self.site}, and the model "
                f"{len(found.mean)}: fit again with this one"
            )
        if mean.dtype != found.mean.dtype or mean.device != found.mean.device:
            source = as_tensors(self.source, found.mean)
        self._placed = source
        return source

    def measure(self, values: Tensor, samples: int, alone: bool) -> ChannelMoments:
        """Measure the values; `alone` if the target's moments rest on this batch only."""
        return measure(values, self.site.axis, samples)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor | None:
        """Return the aligned values; None if the layer itself aligns them."""
        raise NotImplementedError


class MappedSite(AlignedSite):
    """A site whose values are mapped channel by channel."""

    _map: ToSource | None = None

    def __init__(self, site: Site, source: ChannelMoments) -> None:
        super().__init__(site, source)
        tiny = torch.finfo(source.variance.dtype).tiny  # where every channel is dead
        self._eps = max(EPS * float(source.variance.mean()), tiny)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor:
        """Map the values to the source's moments."""
        source = self.source_like(target)
        if self._map is None or self._map.source is not source:
            self._map = ToSource(source, self._eps)
        return self._map(values, target, self.site.axis)


class FullMapSite(MappedSite):
    """A site whose values get a full map, where a batch has enough of them."""

    _full: FullToSource | None = None

    def measure(self, values: Tensor, samples: int, alone: bool) -> ChannelMoments:
        """Measure the values, with their covariance if there are enough of them."""
        channels = values.shape[self.site.axis]
        if alone and values.numel() >= FULL_MAP_ROWS * channels**2:
            return measure_full(values, self.site.axis, samples)
        return super().measure(values, samples, alone)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor:
        """Map the values to the source's moments."""
        if target.covariance is None:
            return super().apply(layer, values, target)
        source = self.source_like(target)
        if self._full is None or self._full.source is not source:
            self._full = FullToSource(source)
        return self._full(values, target, self.site.axis)


class BatchNormSite(AlignedSite):
    """The input of a BatchNorm, aligned by replacing the layer's statistics for one pass.

    With the layer's own moments m and v, the source's m_s and v_s and the target's m' and v',
    mapping a value to the source's moments and normalising it by the layer's own equals normalising
    it by

        m' - (m_s - m) sqrt((v' + eps) / (v_s + eps)),    v (v' + eps) / (v_s + eps).

    If the source's moments are the layer's own, or were not measured, these are m' and v', which
    is BatchNorm adaptation.

    >>> layer = nn.BatchNorm1d(1, affine=False, eps=0.0).eval()
    >>> site = BatchNormSite(Site("", "in", 1), layer)
    >>> target = ChannelMoments(9.0, torch.tensor([2.0]), torch.tensor([4.0]))
    >>> site.apply(layer, torch.tensor([[8.0]]), target)
    >>> layer(torch.tensor([[8.0]]))
    tensor([[3.]])
    >>> site.restore()
    >>> layer(torch.tensor([[8.0]]))
    tensor([[8.]])
    """

    _constants_of: tuple[ChannelMoments, tuple[Any, ...]] | None = None  # of these source moments

    def __init__(self, site: Site, layer: nn.Module, source: ChannelMoments | None = None) -> None:
        self._layer = layer
        self._own = {name: layer.get_buffer(name) for name in STATISTICS}
        self.is_measured = source is not None
        super().__init__(site, source or ChannelMoments(1.0, *self._own.values()))

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> None:
        """Replace the layer's statistics, in their own precision."""
        replaced = target.mean, target.variance
        if self.is_measured:
            step, share, rest, eps = self._constants(self.source_like(target))
            spread = (target.variance + eps).sqrt_()
            replaced = (
                torch.addcmul(target.mean, step, spread, value=-1),
                torch.addcmul(rest, share, target.variance),
            )
        for (name, own), part in zip(self._own.items(), replaced, strict=True):
            layer._buffers[name] = part.to(own.dtype)  # as an attribute it takes ten times as long

    def _constants(self, source: ChannelMoments) -> tuple[Any, ...]:
        """The parts of the formula that no batch changes."""
        if self._constants_of is None or self._constants_of[0] is not source:
            eps: float = self._layer.eps  # type: ignore[assignment]
            mean, variance = (own.to(source.mean) for own in self._own.values())
            share = (variance + eps) / (source.variance + eps)
            step = (source.mean - mean) / (source.variance + eps).sqrt()
            self._constants_of = source, (step, share, share * eps - eps, eps)
        return self._constants_of[1]

    def restore(self) -> None:
        """Give the layer its own statistics back."""
        self._layer._buffers.update(self._own)
