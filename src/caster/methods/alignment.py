"""A frozen model whose layers are given values with the moments the source gave them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster.core.layers import ChannelMoments, Site, shrunk, to_source
from caster.errors import CasterError
from caster.frozen.gauge import beside, hook_on
from caster.frozen.protocol import Outputs
from caster.frozen.torch import TorchModel
from caster.methods.protocol import Retained, nbytes

EPS = 1e-5  # added to variances, in units of a site's mean variance: a dead channel stays dead


class Alignment:
    """A twin of a model, on whose way every site's channels get the source's mean and variance.

    Those of the target come from the batch and, where it has fewer samples than `memory`, for the
    rest from what came before; shrunk towards the source's by `prior` samples. The input of a
    BatchNorm need not be moved: it is given the target's moments in place of its own.

    Attributes
    ----------
    source : the source's moments at every site, beside the model.
    past : the target's so far; nothing at first.
    """

    def __init__(
        self,
        model: TorchModel,
        layers: dict[Site, ChannelMoments],  # NumPy's; of a BatchNorm's input they are its own
        batchnorms: list[Site],
        prior: float,
        memory: int,
    ) -> None:
        self.model = model
        self.prior = prior
        self.memory = memory
        self.past: dict[Site, ChannelMoments] = {}
        self._twin = model.twin()
        self._twin.head = None  # known when a batch comes
        parts = dict(self._twin.module.named_modules())
        missing = [str(site) for site in (*layers, *batchnorms) if site.module not in parts]
        if missing:
            raise CasterError(f"{model.name} has no layer of the state's site {missing[0]}")
        self.source = {site: beside(found, model.device) for site, found in layers.items()}
        self._eps = {s: EPS * float(m.variance.mean()) for s, m in self.source.items()}
        for site in layers:
            hook_on(self._twin.module, site, self._move)
        for site in batchnorms:
            layer = parts[site.module]
            assert isinstance(layer, _BatchNorm)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            self.source[site] = ChannelMoments(1.0, layer.running_mean, layer.running_var)
            hook_on(self._twin.module, site, self._renormalise)
            layer.register_forward_hook(_restorer(layer.running_mean, layer.running_var))

    def __call__(self, batch: Any) -> Outputs:
        """Features and logits behind aligned layers; the batch becomes part of the past."""
        placed = self.model.placed(batch)
        if self._twin.head is None:
            if self.model.head is None:
                self.model.run(placed[:1])
            self._twin.head = self.model.head
        return self._twin(placed)

    def reset(self) -> None:
        """Forget what came before."""
        self.past = {}
        self._twin.head = None

    def retained(self) -> Retained:
        """The source's moments and the past's; weights are the model's own."""
        own = [self.source[site] for site in self._eps]
        return Retained(
            statistics=sum(nbytes(m.mean, m.variance) for m in own),
            buffers=sum(nbytes(m.mean, m.variance) for m in self.past.values()),
        )

    def _target(self, site: Site, values: Tensor) -> ChannelMoments | None:
        """What a site's moments are taken to be; None where all there is is a single value."""
        wide = values if values.dtype == torch.float64 else values.float()  # halves are rough
        found = ChannelMoments.of(wide, site.axis)
        if self.memory:
            before = self.past.get(site)
            missing = self.memory - found.count
            if before is not None and missing > 0:
                found = before.at_most(missing) + found
            self.past[site] = found
        alone = values.numel() == values.shape[site.axis] and found.count <= 1
        return None if alone and self.prior == 0 else shrunk(found, self.source[site], self.prior)

    def _move(self, site: Site, values: Tensor) -> Tensor | None:
        target = self._target(site, values)
        if target is None:
            return None
        scale, shift = to_source(target, self.source[site], self._eps[site])
        shape = [1] * values.ndim
        shape[site.axis] = -1
        moved = torch.addcmul(shift.view(shape), values, scale.view(shape))
        return moved.to(values.dtype)

    def _renormalise(self, site: Site, values: Tensor) -> None:
        target = self._target(site, values)
        if target is not None:
            layer = self._twin.module.get_submodule(site.module)
            layer.running_mean, layer.running_var = target.mean, target.variance


def _restorer(mean: Tensor, variance: Tensor) -> Any:
    """A hook that gives a BatchNorm its own statistics back."""

    def restore(layer: nn.Module, inputs: Any, output: Any) -> None:
        layer.running_mean, layer.running_var = mean, variance

    return restore
