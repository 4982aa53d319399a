"""A model whose sites are heard: on a twin of it, whose weights are the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from caster.arrays import to_numpy
from caster.config import STATE_DTYPE
from caster.core.layers import ChannelMoments, Site
from caster.errors import CasterError
from caster.frozen.protocol import FrozenModel, Outputs
from caster.frozen.sites import find_sites, first_tensor
from caster.frozen.torch import TorchModel

Change = Callable[[Site, Tensor], Tensor | None]  # None leaves the values as they are


def hook_on(module: nn.Module, site: Site, change: Change) -> None:
    """Have a module of one's own show the values at a site, and go on with what it is given."""
    layer = module.get_submodule(site.module)

    def given(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        values = first_tensor(inputs, named)
        assert values is not None  # sites are where there are some
        new = change(site, values)
        if new is None:
            return None
        if inputs and inputs[0] is values:
            return (new, *inputs[1:]), named
        return inputs, {k: new if v is values else v for k, v in named.items()}

    def returned(layer: nn.Module, inputs: Any, output: Any) -> Any:
        values = first_tensor(output)
        assert values is not None
        new = change(site, values)
        if new is None or output is values:
            return new
        return type(output)(new if part is values else part for part in output)

    if site.side == "in":
        layer.register_forward_pre_hook(given, with_kwargs=True)
    else:
        layer.register_forward_hook(returned)


class Gauge:
    """A model that measures its sites while it answers.

    Sites but those of BatchNorms, which keep the source's moments themselves. `past` are the
    `sums` of an earlier gauge, to go on from.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> gauge = Gauge(TorchModel(net))
    >>> _ = gauge(torch.ones(5, 3))
    >>> {str(site): found.count for site, found in gauge.moments().items()}
    {'1:in': 5.0, '2:in': 5.0}
    """

    def __init__(
        self, model: TorchModel, past: Mapping[Site, ChannelMoments] | None = None
    ) -> None:
        self.model = model
        self._twin: TorchModel | None = None  # until a batch shows where the sites are
        self._sums = {site: beside(found, model.device) for site, found in (past or {}).items()}

    def __call__(self, batch: Any) -> Outputs:
        """The model's answer to a batch."""
        if self._twin is None:
            self.model(self.model.placed(batch)[:2])  # so that its classifier is known
            self._twin = self.model.twin()
            for site in find_sites(self.model, batch):
                if not is_batchnorm(self._twin.module, site):
                    hook_on(self._twin.module, site, self._note)
        return self._twin(batch)

    def _note(self, site: Site, values: Tensor) -> None:
        found = ChannelMoments.of(values.float(), site.axis)
        wide = ChannelMoments(found.count, found.mean.double(), found.variance.double())
        self._sums[site] = self._sums[site] + wide if site in self._sums else wide

    @property
    def sums(self) -> dict[Site, ChannelMoments]:
        """What was measured so far, in float64 beside the model."""
        return dict(self._sums)

    def moments(self) -> dict[Site, ChannelMoments]:
        """What was measured so far, as a state has it."""
        return rounded(self._sums)


def rounded(sums: Mapping[Site, ChannelMoments]) -> dict[Site, ChannelMoments]:
    """A gauge's sums in NumPy, as a state has them."""
    kept = {}
    for site, found in sums.items():
        mean, variance = (to_numpy(p).astype(STATE_DTYPE) for p in (found.mean, found.variance))
        if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
            raise CasterError(f"the values at {site} are not finite: repair such images")
        kept[site] = ChannelMoments(found.count, mean, variance)
    return kept


def beside(found: ChannelMoments, device: torch.device) -> ChannelMoments:
    """Moments of any kind of array as tensors on a device."""
    mean, variance = (torch.as_tensor(part).to(device) for part in (found.mean, found.variance))
    return ChannelMoments(found.count, mean, variance)


def gauge_of(model: FrozenModel, past: Mapping[Site, ChannelMoments] | None = None) -> Gauge:
    """A gauge of a model, which must be a torch module."""
    assert isinstance(model, TorchModel)
    return Gauge(model, past)


def measured(model: TorchModel, batches: Iterable[Any]) -> dict[Site, ChannelMoments]:
    """Moments of a model's sites over batches of source images."""
    gauge = Gauge(model)
    for batch in batches:
        gauge(batch)
    return gauge.moments()


def is_batchnorm(module: nn.Module, site: Site) -> bool:
    """Whether a site is the input of a BatchNorm."""
    return hasattr(module.get_submodule(site.module), "running_mean") and site.side == "in"
