"""BN-adapt: BatchNorm with batch statistics, shrunk towards the source's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster_bench.methods.network import (
    Network,
    TorchMethod,
    check_finite,
    first_input,
    gradients,
    norm_layers,
    source_statistics,
    store_source_statistics,
    to_device,
    use_batch_statistics,
)
from caster_bench.methods.protocol import Prediction, Retained, inert_prediction, number, warn_inert
from caster_bench.methods.source import Source

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class BNAdapt(TorchMethod):
    """Normalise by N/(N+n) of the source's statistics and n/(N+n) of a batch of n samples.

    Schneider et al., "Improving robustness against common corruptions by covariate shift
    adaptation", NeurIPS 2020. `prior` is N; 0 uses batch statistics only, as Tent without its
    update.

    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> BNAdapt(wrap(net), Source(), prior=16).layers
    ('1',)
    """

    name: str = "bn-adapt"
    prior: float = number(0.0)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        self._network = Network(self.model, self.columns)
        module = self._network.module
        found = norm_layers(module, ("batch",))
        self.layers = tuple(k for k, layer in found.items() if layer.running_mean is not None)
        if not self.layers:
            warn_inert(self.name, self.model, "BatchNorm with running statistics")
        elif self.prior == 0:
            use_batch_statistics(module)
        else:
            for layer in self.layers:
                mix_statistics(found[layer], self.prior)

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to adapt."""
        return not self.layers

    def predict(self, images: Any) -> Prediction:
        """Return logits of the network with these statistics."""
        if self.inert:
            return inert_prediction(self.frozen, images)
        with gradients(False):
            logits = self._network(to_device(self.model, images))
        check_finite(logits, self.name)
        return Prediction(logits)

    def reset(self) -> None:
        """Do nothing: no batch leaves a trace."""

    def retained(self) -> Retained:
        """Bytes of the network copy."""
        return self._network.retained()


def mix_statistics(layer: nn.Module, prior: float) -> None:
    """Make a BatchNorm normalise by a mixture of its running and batch statistics.

    >>> import torch
    >>> layer = nn.BatchNorm1d(1, affine=False, eps=0.0).eval()
    >>> mix_statistics(layer, prior=1.0)  # source mean 0 and variance 1; batch mean 4, variance 0
    >>> layer(torch.tensor([[4.0]])).item()  # (4 - 2) / sqrt(0.5)
    2.82842...
    """
    assert isinstance(layer, _BatchNorm)
    store_source_statistics(layer)

    def mix(layer: _BatchNorm, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        mean, var = source_statistics(layer)
        values = first_input(inputs, named).to(mean.dtype)  # sums in half precision are rough
        share = prior / (prior + values.shape[0])
        dims = [dim for dim in range(values.ndim) if dim != 1]
        layer.running_mean = share * mean + (1 - share) * values.mean(dims)
        layer.running_var = share * var + (1 - share) * values.var(dims, correction=0)

    layer.register_forward_pre_hook(mix, with_kwargs=True)
    layer.register_forward_hook(_restore_statistics)


def _restore_statistics(layer: _BatchNorm, inputs: Any, output: Any) -> None:
    layer.running_mean, layer.running_var = source_statistics(layer)
