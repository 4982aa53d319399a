"""BN-adapt: batch normalisation by the batch's own statistics, shrunk towards the source's."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster.adapt.frozen import Frozen
from caster.adapt.inert import answered_inert, warn_inert
from caster.adapt.network import (
    Network,
    check_finite,
    given_to,
    gradients,
    keep_source_statistics,
    norm_layers,
    placed,
    source_statistics,
    torch_model,
    use_batch_statistics,
)
from caster.adapt.protocol import Prediction, Retained
from caster.adapt.source import Source, columns_of
from caster.errors import CasterError
from caster.models.protocol import FrozenModel


class BNAdapt:
    """Normalise by N/(N+n) of the source's statistics and n/(N+n) of the batch's, n samples.

    Schneider et al. 2020. `prior` is N; 0 drops the source's statistics altogether, which is Tent
    without its update.

    >>> from caster import wrap
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> BNAdapt(wrap(net), Source(), prior=16).layers
    ('1',)
    """

    def __init__(
        self, model: FrozenModel, source: Source, *, name: str = "bn-adapt", prior: float = 0.0
    ) -> None:
        if not 0 <= prior < float("inf"):
            raise CasterError(f"prior of {name} is a number of samples from 0 up, not {prior!r}")
        self.name = name
        self.model = torch_model(model, name)
        self.frozen = Frozen(model, source)
        self.prior = prior
        self._network = Network(self.model, columns_of(source, name))
        module = self._network.module
        found = norm_layers(module, ("batch",))
        self.layers = tuple(k for k, layer in found.items() if layer.running_mean is not None)
        if not self.layers:
            warn_inert(name, model, "BatchNorm with running statistics")
        elif prior == 0:
            use_batch_statistics(module)
        else:
            for layer in self.layers:
                blend(found[layer], prior)

    @property
    def inert(self) -> bool:
        """Whether the model has nothing to adapt."""
        return not self.layers

    def predict(self, images: Any) -> Prediction:
        """The logits of the network with these statistics."""
        if self.inert:
            return answered_inert(self.frozen, images)
        with gradients(False):
            logits = self._network(placed(self.model, images))
        check_finite(logits, self.name)
        return Prediction(logits)

    def reset(self) -> None:
        """Nothing to do: no batch leaves a trace."""

    def retained(self) -> Retained:
        """Its copy of the network."""
        return self._network.retained()


def blend(layer: nn.Module, prior: float) -> None:
    """Have a BatchNorm normalise by a mixture of its running statistics and its batch's.

    >>> import torch
    >>> layer = nn.BatchNorm1d(1, affine=False, eps=0.0).eval()
    >>> blend(layer, prior=1.0)  # source mean 0 and variance 1; batch mean 4 and variance 0
    >>> layer(torch.tensor([[4.0]])).item()  # (4 - 2) / sqrt(0.5)
    2.82842...
    """
    assert isinstance(layer, _BatchNorm)
    keep_source_statistics(layer)

    def mix(layer: _BatchNorm, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        mean, var = source_statistics(layer)
        values = given_to(inputs, named).to(mean.dtype)  # sums of a half precision are rough
        share = prior / (prior + values.shape[0])
        every = [dim for dim in range(values.ndim) if dim != 1]
        layer.running_mean = share * mean + (1 - share) * values.mean(every)
        layer.running_var = share * var + (1 - share) * values.var(every, correction=0)

    layer.register_forward_pre_hook(mix, with_kwargs=True)
    layer.register_forward_hook(_unmix)


def _unmix(layer: _BatchNorm, inputs: Any, output: Any) -> None:
    layer.running_mean, layer.running_var = source_statistics(layer)
