"""How the modules of a network are connected, and which axis of their values has the channels."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from caster.errors import CasterError
from caster.models.torch import TorchModel

CHANNELS_FIRST = (_ConvNd, _InstanceNorm, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.RMSNorm)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(eq=False)
class Call:
    """What a module was given and returned, and which modules inside it were given the same."""

    given: Tensor
    returned: Tensor | None = None
    readers: list[nn.Module] = field(default_factory=list)

    @property
    def keeps_shape(self) -> bool:
        """Whether what it returns has the shape of what it was given."""
        return self.returned is not None and self.returned.shape == self.given.shape


Calls = dict[nn.Module, Call]


def calls_of(twin: TorchModel, batch: Tensor) -> tuple[Calls, Counter[nn.Module]]:
    """What every module called once does on a twin's way through a batch; how often each is."""
    calls: Calls = {}
    times: Counter[nn.Module] = Counter()
    open_calls: list[Call] = []

    def enter(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        times[module] += 1
        given = first_tensor(inputs, named)
        call = Call(batch if given is None else given)
        for outer in open_calls:
            if outer.given is given:
                outer.readers.append(module)
        open_calls.append(call)
        calls[module] = call

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_calls.pop().returned = first_tensor(output)

    with ExitStack() as hooks:
        for module in twin.module.modules():
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        twin.run(batch)
    return {module: call for module, call in calls.items() if times[module] == 1}, times


def first_tensor(inputs: Any, named: dict[str, Any] | None = None) -> Tensor | None:
    """The first tensor a module is given or returns: alone, in a tuple, or by name."""
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    several = tuple(inputs.values()) if isinstance(inputs, dict) else several
    found = (v for v in (*several, *(named or {}).values()) if isinstance(v, Tensor))
    return next(found, None)


def keeps_statistics(layer: nn.Module) -> bool:
    """Whether a layer normalises by moments it keeps: a BatchNorm, a frozen one, and the like.

    >>> keeps_statistics(nn.BatchNorm1d(3)), keeps_statistics(nn.LayerNorm(3))
    (True, False)
    """
    held = [layer._buffers.get(name) for name in ("running_mean", "running_var")]
    return hasattr(layer, "eps") and all(part is not None and part.ndim == 1 for part in held)


def channels_axis(name: str, layer: nn.Module, calls: Calls) -> int:
    """The channels' axis of what a layer is given, by what those do that read or wrote it.

    Where none is of a known kind, the one that alone is as wide as weights of a reader or of a
    normalisation inside; and the second where all weights inside are convolutions.
    """
    values = calls[layer].given
    if values.ndim == 2:
        return -1
    readers = [layer, *calls[layer].readers]
    writers = [other for other, call in calls.items() if call.returned is values]
    for other in (*readers, *writers):
        if isinstance(other, CHANNELS_FIRST) or keeps_statistics(other):
            return 1
        if isinstance(other, CHANNELS_LAST):
            return -1
        if isinstance(other, nn.LayerNorm) and other in calls:
            axis = _normalised(other, calls[other])
            if axis is not None:
                return axis
    norms = [part for part in layer.modules() if isinstance(part, NORMS)]
    for weight in (weight for part in (*norms, *readers) for weight in part.parameters(False)):
        fits = [axis for axis in (1, -1) if values.shape[axis] == weight.numel()]
        if len(fits) == 1:
            return fits[0]
    weighted = [part for part in layer.modules() if isinstance(part, (_ConvNd, nn.Linear))]
    if weighted and all(isinstance(part, _ConvNd) for part in weighted):
        return 1
    raise CasterError(
        f"which axis of {tuple(values.shape)} at {name!r} has the channels cannot be told by the "
        "layers that read it: layer transport does not know this network"
    )


@torch.inference_mode()
def _normalised(norm: nn.LayerNorm, call: Call) -> int | None:
    """Along which axis a LayerNorm went, which a subclass may choose; None if neither explains it.

    >>> class Channels(nn.LayerNorm):
    ...     def forward(self, x):
    ...         return super().forward(x.mT).mT
    >>> x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> _normalised(Channels(4), Call(x, Channels(4)(x)))
    1
    """
    if type(norm).forward is nn.LayerNorm.forward:
        return -1
    if call.returned is None or not call.keeps_shape or len(norm.normalized_shape) > 1:
        return None
    near = []
    for axis in (-1, 1):
        given, returned = (x.float().movedim(axis, -1) for x in (call.given, call.returned))
        if given.shape[-1] == norm.normalized_shape[0]:
            weight, bias = (None if p is None else p.float() for p in (norm.weight, norm.bias))
            found = functional.layer_norm(given, given.shape[-1:], weight, bias, norm.eps)
            if (found - returned).abs().mean() < 0.05 * found.abs().mean():  # bf16 rounds by 0.004
                near.append(axis)
    return near[0] if len(near) == 1 else None
