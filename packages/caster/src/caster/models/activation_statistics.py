"""Collect activation statistics at a model's sites with forward hooks, while it runs.

The hooks are on a twin of the model, which shares its weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster.models.site_sums import SiteSums, check_labels, has_classes
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

Change = Callable[[nn.Module, Tensor], Tensor | None]  # None leaves the values as they are

log = logging.getLogger("caster")


class ActivationStatistics(SiteSums):
    """A torch module that measures its sites while it runs, over all samples and per class.

    Inputs of BatchNorms are measured too: running statistics come from augmented training images
    and from weights that were still changing. Covariances are measured at sites that support a full
    map; not behind a grouped convolution, whose weight could not take it.

    >>> import torch
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
        super().__init__({site: all_tensors(found, device) for site, found in (past or {}).items()})
        self.model = model
        self._twin: TorchModel | None = None  # made on the first batch, which shows the sites
        self._grouped: set[Site] = set()  # behind a convolution that no full map can be folded into
        self._samples = 0  # in the current batch
        self._batch: dict[Site, tuple[ChannelMoments, tuple[Tensor, Tensor] | None]] = {}

    def __call__(
        self,
        batch: Any,
        targets: NDArray[np.int64],  # (n,), class indices
    ) -> Outputs:
        """Run the model on a batch, and add its moments to the sums if they need it."""
        placed = self.model.placed(batch)
        check_labels(placed, targets)
        low, high = (float(end) for end in placed.aminmax())
        if not self.needs(targets):
            self.extend_range((low, high))
            return self.model(placed)
        if self._twin is None:
            self._twin = self._hooked(placed)
        self._samples, self._batch = len(placed), {}
        outputs = self._twin(placed)
        self.add(self._batch, targets, (low, high))  # after the pass: a failed pass adds nothing
        return outputs

    def _hooked(self, batch: Tensor) -> TorchModel:
        sites = find_sites(self.model, batch)
        before = convolutions_before(self.model.twin(), batch)
        twin = self.model.twin()
        get = twin.module.get_submodule
        self._grouped = {site for site, name in before.items() if get(name).groups != 1}
        for site in sites:
            hook_on(twin.module, site, partial(self._measure, site), "fit the last features only")
        if len(sites) == 1 and not is_batchnorm(twin.module, sites[0]):
            log.warning("layers of %s: no site but its classifier's input", self.model.name)
        return twin

    def _measure(self, site: Site, layer: nn.Module, activations: Tensor) -> None:
        values = on_grid(site, site.of_images(activations))
        full = supports_full_map(values, site.axis) and site not in self._grouped
        found = (measure_full if full else measure)(values, site.axis, self._samples)
        samples = None
        if has_classes(self.sums.get(site)):
            samples = sample_moments(values, site.axis, self._samples, found.mean)
        self._batch[site] = as_tensors(found, found.mean.double()), samples


def is_batchnorm(module: nn.Module, site: Site) -> bool:
    """Whether a site is the input of a BatchNorm, or of a layer that works like one."""
    return site.side == "in" and has_running_statistics(module.get_submodule(site.module))


# --- hooks ---------------------------------------------------------------------------------------


def hook_on(module: nn.Module, site: Site, change: Change, advice: str) -> None:
    """Call `change` on the values at a site, and continue with the values it returns.

    `advice` ends the error message if a pass has no values there.
    """

    def changed(layer: nn.Module, values: Tensor | None) -> Tensor | None:
        if values is None:
            raise CasterError(f"this pass has no values at {site}: {advice}")
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
    """A tuple, list or mapping of the same type, with one part replaced.

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
