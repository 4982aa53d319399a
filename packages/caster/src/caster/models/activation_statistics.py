"""Collect activation statistics at the sites of a torch model with forward hooks.

The hooks sit on a twin of the model, which shares its weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster.models.site_sums import SiteMoments, SiteSums, has_classes
from caster.models.sites import (
    convolutions_before,
    find_sites,
    first_tensor,
    has_running_statistics,
)
from caster.models.torch import TorchModel
from caster.models.torch_channels import (
    all_tensors,
    as_tensors,
    measure,
    measure_full,
    on_grid,
    sample_moments,
    supports_full_map,
)

Change = Callable[[nn.Module, Tensor], Tensor | None]  # None leaves the activations unchanged

log = logging.getLogger("caster")


class ActivationStatistics(SiteSums):
    """Measure the sites of a torch module while it runs, over all samples and per class.

    The inputs of BatchNorms are measured too, because their running statistics come from augmented
    training images and from weights that were still changing. Covariances are measured at sites
    that support a full map, except after a grouped convolution, whose weights cannot absorb one.

    >>> import numpy as np, torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> statistics = ActivationStatistics(TorchModel(net))
    >>> _ = statistics(torch.ones(5, 3), np.array([0, 2, 2, 0, 2]))
    >>> {str(site): found.count for site, found in statistics.moments().items()}
    {'1:in': 5.0, '2:in': 5.0}
    >>> [found.classes.counts.tolist() for found in statistics.moments().values()]
    [[2.0, 0.0, 3.0], [2.0, 0.0, 3.0]]
    """

    def __init__(
        self,
        model: FrozenModel,  # a TorchModel
        past: Mapping[Site, ChannelMoments] | None = None,
    ) -> None:
        assert isinstance(model, TorchModel)
        device = model.device
        past = {site: all_tensors(found, device) for site, found in (past or {}).items()}
        super().__init__(model, past)
        self._twin: TorchModel | None = None  # created on the first batch, which reveals the sites
        self._grouped: set[Site] = set()  # sites after a grouped convolution
        self._samples = 0  # in the current batch
        self._batch: dict[Site, tuple[ChannelMoments, tuple[Tensor, Tensor] | None]] = {}

    def _measure(self, placed: Tensor) -> tuple[Outputs, SiteMoments]:
        if self._twin is None:
            self._twin = self._hooked(placed)
        self._samples, self._batch = len(placed), {}
        return self._twin(placed), self._batch

    def _hooked(self, batch: Tensor) -> TorchModel:
        sites = find_sites(self.model, batch)
        before = convolutions_before(self.model.twin(), batch)
        twin: TorchModel = self.model.twin()
        get = twin.module.get_submodule
        self._grouped = {site for site, name in before.items() if get(name).groups != 1}
        for site in sites:
            hook_on(twin.module, site, partial(self._record, site), "fit the last features only")
        if len(sites) == 1 and not is_batchnorm(twin.module, sites[0]):
            log.warning("layers of %s: its only site is the classifier's input", self.model.name)
        return twin

    def _record(self, site: Site, layer: nn.Module, activations: Tensor) -> None:
        values = on_grid(site, site.patch_values(activations))
        full = supports_full_map(values, site.axis) and site not in self._grouped
        found = (measure_full if full else measure)(values, site.axis, self._samples)
        samples = None
        if has_classes(self.sums.get(site)):
            samples = sample_moments(values, site.axis, self._samples, found.mean)
        self._batch[site] = as_tensors(found, found.mean.double()), samples


def is_batchnorm(module: nn.Module, site: Site) -> bool:
    """Whether a site is the input of a BatchNorm or a similar layer."""
    return site.side == "in" and has_running_statistics(module.get_submodule(site.module))


# --- hooks ---------------------------------------------------------------------------------------


def hook_on(module: nn.Module, site: Site, change: Change, advice: str) -> None:
    """Register a forward hook that calls `change` on a site's activations and uses its result.

    If a pass has no activations there, the error message ends with `advice`.
    """

    def changed(layer: nn.Module, values: Tensor | None) -> Tensor | None:
        if values is None:
            raise CasterError(f"this pass has no activations at {site}: {advice}")
        return change(layer, values)

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = first_tensor(args, kwargs)
        new = changed(layer, values)
        if new is None:
            return None
        if args and args[0] is values:
            return (new, *args[1:]), kwargs
        return _replaced(args, values, new), _replaced(kwargs, values, new)

    def after(layer: nn.Module, args: Any, output: Any) -> Any:
        values = first_tensor(output)
        new = changed(layer, values)
        return new if new is None or output is values else _replaced(output, values, new)

    layer = module.get_submodule(site.module)
    if site.side == "in":
        layer.register_forward_pre_hook(before, with_kwargs=True)
    else:
        layer.register_forward_hook(after)


def _replaced(several: Any, old: Any, new: Any) -> Any:
    """Copy a tuple, list or mapping with one element replaced.

    >>> _replaced(("a", "b"), "b", "c")
    ('a', 'c')
    """
    if isinstance(several, dict):
        changed = copy.copy(several)
        for key in [key for key, part in several.items() if part is old]:
            changed[key] = new
        return changed
    make = getattr(several, "_make", type(several))  # of a named tuple
    return make(new if part is old else part for part in several)
