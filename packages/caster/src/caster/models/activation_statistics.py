"""A model whose sites are heard: on a twin of it, whose weights are the model's own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from caster.config import STATE_DTYPE
from caster.core.arrays import to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models.calls import first_tensor, keeps_statistics
from caster.models.full_maps import has_full_map, measure_full
from caster.models.protocol import FrozenModel, Outputs
from caster.models.sites import find_sites
from caster.models.torch import TorchModel
from caster.models.torch_channels import beside, measure

Change = Callable[[nn.Module, Tensor], Tensor | None]  # None leaves the values as they are

log = logging.getLogger("caster")


def hook_on(module: nn.Module, site: Site, change: Change, otherwise: str) -> None:
    """Have a module of one's own show the values at a site, and go on with what it is given.

    `otherwise` is what one can do where a pass has no values there.
    """

    def shown(layer: nn.Module, found: Tensor | None) -> Tensor | None:
        if found is None:
            raise CasterError(f"there are no values at {site} this time: {otherwise}")
        return change(layer, found)

    def given(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        values = first_tensor(inputs, named)
        new = shown(layer, values)
        if new is None:
            return None
        if inputs and inputs[0] is values:
            return (new, *inputs[1:]), named
        return with_part(inputs, values, new), with_part(named, values, new)

    def returned(layer: nn.Module, inputs: Any, output: Any) -> Any:
        values = first_tensor(output)
        new = shown(layer, values)
        return new if new is None or output is values else with_part(output, values, new)

    layer = module.get_submodule(site.module)
    if site.side == "in":
        layer.register_forward_pre_hook(given, with_kwargs=True)
    else:
        layer.register_forward_hook(returned)


def with_part(several: Any, old: Any, new: Any) -> Any:
    """A tuple, a list or a mapping of the same kind, with one part in the place of another.

    >>> with_part(("a", "b"), "b", "c")
    ('a', 'c')
    """
    if isinstance(several, dict):
        changed = copy.copy(several)
        for key in [key for key, part in several.items() if part is old]:
            changed[key] = new
        return changed
    make = getattr(several, "_make", type(several))  # a named tuple's
    return make(new if part is old else part for part in several)


class ActivationStatistics:
    """A model that measures its sites while it answers.

    The inputs of BatchNorms too: what those keep was summed up in training, of images that were
    cropped, coloured and mixed, by weights that still changed. With `full`, also the covariances of
    sites that can have a full map. `past` are the `sums` of an earlier gauge, to go on from.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> statistics = ActivationStatistics(TorchModel(net))
    >>> _ = statistics(torch.ones(5, 3))
    >>> {str(site): found.count for site, found in statistics.moments().items()}
    {'1:in': 5.0, '2:in': 5.0}
    """

    def __init__(
        self,
        model: TorchModel,
        past: Mapping[Site, ChannelMoments] | None = None,
        full: bool = False,
    ) -> None:
        self.model = model
        self.full = full
        self._twin: TorchModel | None = None  # until a batch shows where the sites are
        self._samples = 0  # of the batch at hand
        self._found: dict[Site, ChannelMoments] = {}  # in it
        self.input_range: tuple[float, float] | None = None  # of all values of the batches so far
        self._sums = {site: beside(found, model.device) for site, found in (past or {}).items()}

    def __call__(self, batch: Any) -> Outputs:
        """The model's answer to a batch."""
        placed = self.model.placed(batch)
        if self._twin is None:
            self._twin = self._hooked(placed)
        self._samples, self._found = len(placed), {}
        outputs = self._twin(placed)
        ends = [float(end) for end in placed.aminmax()]
        low, high = self.input_range or ends
        self.input_range = min(low, ends[0]), max(high, ends[1])
        for site, found in self._found.items():  # all sites or, where the pass failed, none
            past = self._sums.get(site)
            self._sums[site] = found if past is None else past + found
        return outputs

    def _hooked(self, batch: Tensor) -> TorchModel:
        sites = find_sites(self.model, batch)
        twin = self.model.twin()
        for site in sites:
            hook_on(twin.module, site, partial(self._note, site), "fit the last features only")
        if len(sites) == 1 and not is_batchnorm(twin.module, sites[0]):
            log.warning("layers of %s: no site but its classifier's input", self.model.name)
        return twin

    def _note(self, site: Site, layer: nn.Module, shown: Tensor) -> None:
        values = site.of_images(shown)
        # A BatchNorm is lent moments, and has no place for more of a map.
        full = self.full and not keeps_statistics(layer) and has_full_map(values, site.axis)
        found = (measure_full if full else measure)(values, site.axis, self._samples)
        self._found[site] = beside(found, found.mean.double())

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
        parts = (found.mean, found.variance, found.covariance)
        stored = [None if part is None else to_numpy(part).astype(STATE_DTYPE) for part in parts]
        if not all(np.isfinite(part).all() for part in stored if part is not None):
            raise CasterError(f"the values at {site} are not finite: repair such images")
        kept[site] = ChannelMoments(found.count, *stored)
    return kept


def activation_statistics_of(
    model: FrozenModel, past: Mapping[Site, ChannelMoments] | None = None, full: bool = False
) -> ActivationStatistics:
    """A gauge of a model, which must be a torch module."""
    assert isinstance(model, TorchModel)
    return ActivationStatistics(model, past, full)


def measured(
    model: TorchModel, batches: Iterable[Any], full: bool = False
) -> dict[Site, ChannelMoments]:
    """Moments of a model's sites over batches of source images."""
    statistics = ActivationStatistics(model, full=full)
    for batch in batches:
        statistics(batch)
    return statistics.moments()


def is_batchnorm(module: nn.Module, site: Site) -> bool:
    """Whether a site is the input of a BatchNorm, or of a layer that works like one."""
    return site.side == "in" and keeps_statistics(module.get_submodule(site.module))
