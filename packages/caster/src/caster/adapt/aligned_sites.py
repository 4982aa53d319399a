"""A site at work: what a network's values there are replaced by, given a target's moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models.full_maps import ROWS, FullToSource, measure_full
from caster.models.torch_channels import ToSource, beside, measure

EPS = 1e-5  # added to variances, in units of a site's mean variance: a dead channel stays dead
STATISTICS = ("running_mean", "running_var")
MADE = ("_held", "_map", "_full", "_made")


class Spot:
    """A site with the source's moments."""

    is_measured = True  # and no part of the model
    _held: ChannelMoments | None = None  # those, as the target's are

    def __init__(self, site: Site, source: ChannelMoments) -> None:
        self.site = site
        self.source = source

    def __getstate__(self) -> dict[str, Any]:
        """What it is, without what it has made of that."""
        return {name: part for name, part in vars(self).items() if name not in MADE}

    def source_like(self, found: ChannelMoments) -> ChannelMoments:
        """The source's moments in the precision and place that a target's have."""
        source = self._held or self.source
        mean = source.mean
        if mean.shape != found.mean.shape:
            raise CasterError(
                f"the state has {len(mean)} channels at {self.site}, and the model "
                f"{len(found.mean)}: fit again with this one"
            )
        if mean.dtype != found.mean.dtype or mean.device != found.mean.device:
            source = beside(self.source, found.mean)
        self._held = source
        return source

    def measure(self, values: Tensor, samples: int, alone: bool) -> ChannelMoments:
        """What values have; `alone` says that the target's moments will rest on them."""
        return measure(values, self.site.axis, samples)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor | None:
        """What the values are replaced by; None where the layer sees to it."""
        raise NotImplementedError


class Moved(Spot):
    """A site whose values are moved."""

    _map: ToSource | None = None

    def __init__(self, site: Site, source: ChannelMoments) -> None:
        super().__init__(site, source)
        tiny = torch.finfo(source.variance.dtype).tiny  # where every channel is dead
        self._eps = max(EPS * float(source.variance.mean()), tiny)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor:
        """The values, given the source's moments."""
        source = self.source_like(target)
        if self._map is None or self._map.source is not source:
            self._map = ToSource(source, self._eps)
        return self._map(values, target, self.site.axis)


class FullyMoved(Moved):
    """A site whose values are moved by a full map, where a batch has enough of them."""

    _full: FullToSource | None = None

    def measure(self, values: Tensor, samples: int, alone: bool) -> ChannelMoments:
        """What values have, with the covariance where it is supported."""
        channels = values.shape[self.site.axis]
        if alone and values.numel() >= ROWS * channels**2:
            return measure_full(values, self.site.axis, samples)
        return super().measure(values, samples, alone)

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> Tensor:
        """The values, given the source's moments."""
        if target.covariance is None:
            return super().apply(layer, values, target)
        source = self.source_like(target)
        if self._full is None or self._full.source is not source:
            self._full = FullToSource(source)
        return self._full(values, target, self.site.axis)


class Lent(Spot):
    """The input of a BatchNorm, which is lent other moments for a pass in place of its own.

    With m and v its own, m_s and v_s the source's and m' and v' the target's, moving a value to the
    source's moments and normalising it by the layer's own is normalising it by

        m' - (m_s - m) sqrt((v' + eps) / (v_s + eps)),    v (v' + eps) / (v_s + eps),

    with eps added to every variance: m' and v' where the source's are the layer's own, which is
    BatchNorm adaptation, and which they are taken for where they were not measured.

    >>> layer = nn.BatchNorm1d(1, affine=False, eps=0.0).eval()
    >>> spot = Lent(Site("", "in", 1), layer)
    >>> target = ChannelMoments(9.0, torch.tensor([2.0]), torch.tensor([4.0]))
    >>> spot.apply(layer, torch.tensor([[8.0]]), target)
    >>> layer(torch.tensor([[8.0]]))
    tensor([[3.]])
    >>> spot.restore()
    >>> layer(torch.tensor([[8.0]]))
    tensor([[8.]])
    """

    _made: tuple[ChannelMoments, tuple[Any, ...]] | None = None  # of these source moments

    def __init__(self, site: Site, layer: nn.Module, source: ChannelMoments | None = None) -> None:
        self._layer = layer
        self._own = {name: layer.get_buffer(name) for name in STATISTICS}
        self.is_measured = source is not None
        super().__init__(site, source or ChannelMoments(1.0, *self._own.values()))

    def apply(self, layer: nn.Module, values: Tensor, target: ChannelMoments) -> None:
        """Lend it what carries the target's to the source's, in the precision of its own."""
        lent = target.mean, target.variance
        if self.is_measured:
            step, share, rest, eps = self._constants(self.source_like(target))
            spread = (target.variance + eps).sqrt_()
            lent = (
                torch.addcmul(target.mean, step, spread, value=-1),
                torch.addcmul(rest, share, target.variance),
            )
        for (name, own), part in zip(self._own.items(), lent, strict=True):
            layer._buffers[name] = part.to(own.dtype)  # as an attribute it takes ten times as long

    def _constants(self, source: ChannelMoments) -> tuple[Any, ...]:
        """Of the formula above what no batch changes: step, share and rest of a variance, eps."""
        if self._made is None or self._made[0] is not source:
            eps: float = self._layer.eps  # type: ignore[assignment]
            mean, variance = (own.to(source.mean) for own in self._own.values())
            share = (variance + eps) / (source.variance + eps)
            step = (source.mean - mean) / (source.variance + eps).sqrt()
            self._made = source, (step, share, share * eps - eps, eps)
        return self._made[1]

    def restore(self) -> None:
        """Give it its own back, whatever came of the pass."""
        self._layer._buffers.update(self._own)
