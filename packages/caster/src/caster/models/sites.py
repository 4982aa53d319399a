"""Find the sites of a torch module: the activations that can be measured and aligned.

A forward pass over two random images shows how the modules are connected. The sites are
- the input of every BatchNorm with running statistics;
- the residual stream of blocks without BatchNorm: the output of each block, and the input of a
  block if it is not the output of another one (after a stem, a patch embedding or a downsampling);
- in a network with neither, the inputs of other normalisation layers;
- in a network without any of these, the residual stream of blocks without normalisation or, if
  there are no such blocks, the inputs of layers with weights, except the images themselves;
- in a network without BatchNorm, also the input of the classifier.

A site excludes tokens that do not depend on the images, such as a class token or registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from caster.core.channels import Site
from caster.errors import CasterError
from caster.models.torch import TorchModel, plain_name

CHANNELS_FIRST = (_ConvNd, _InstanceNorm, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.RMSNorm)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WEIGHTS = (_ConvNd, nn.Linear)
Kinds = tuple[type[nn.Module], ...]


def find_sites(model: TorchModel, batch: Any, user_hooks: bool = True) -> list[Site]:
    """Find all sites of a model, in the order of its modules.

    The random images take their shape and range from `batch`. The user's forward hooks run in this
    pass, because they may change what a layer returns, unless `user_hooks` is False.

    >>> import numpy as np
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    >>> [str(site) for site in find_sites(TorchModel(net), np.zeros((2, 3, 1, 1), "float32"))]
    ['1:in', '3:in']
    """
    twin = model.twin(user_hooks)
    images = twin.placed(_random_images(twin.placed(batch)))
    calls, _ = traced(twin, images)
    once = {name: layer for name, layer in twin.module.named_modules() if layer in calls}
    batchnorms = [site for site in batchnorm_sites(twin.module) if site.module in once]
    sites = [*batchnorms, *_residual_stream(_blocks(once, calls, NORMS), calls)]
    sites = sites or _inputs_of(NORMS, once, calls)
    if not batchnorms:
        sites = sites or _residual_stream(_blocks(once, calls, (nn.Module,)), calls)
        head = Site(str(twin.head), "in", -1)
        inner = {name: layer for name, layer in once.items() if calls[layer].input is not images}
        sites = sites or [s for s in _inputs_of(WEIGHTS, inner, calls) if s.module != head.module]
        sites.append(head)
    order = {name: i for i, (name, _) in enumerate(twin.module.named_modules())}
    ordered = sorted(sites, key=lambda site: (order[site.module], site.side))
    return _without_prefix_tokens(ordered, once, calls)


def batchnorm_sites(module: nn.Module) -> list[Site]:
    """List the inputs of BatchNorms with running statistics, named as in a twin.

    >>> [str(site) for site in batchnorm_sites(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3)))]
    ['1:in']
    """
    layers = module.named_modules()
    return [Site(plain_name(name), "in", 1) for name, m in layers if has_running_statistics(m)]


def times_called(twin: TorchModel, batch: Any) -> dict[str, int]:
    """Count how often one forward pass calls each module of a twin."""
    _, times = traced(twin, twin.placed(batch)[:2])
    return {name: times[layer] for name, layer in twin.module.named_modules()}


def convolutions_before(twin: TorchModel, batch: Any) -> dict[Site, str]:
    """Find the convolution before each BatchNorm, if nothing else reads its output.

    >>> net = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(2, 2))
    >>> {str(site): name for site, name in convolutions_before(TorchModel(net), [[[0.0]]]).items()}
    {'1:in': '0'}
    """
    calls, _ = traced(twin, twin.placed(batch)[:2])
    names = {layer: name for name, layer in twin.module.named_modules()}
    found: dict[Site, str] = {}
    for site in batchnorm_sites(twin.module):
        layer = twin.module.get_submodule(site.module)
        values = calls[layer].input if layer in calls else None
        writers = [other for other, call in calls.items() if call.output is values]
        readers = [other for other, call in calls.items() if call.input is values]
        if all(layer in reader.modules() for reader in readers):
            found |= {site: names[other] for other in writers if isinstance(other, _ConvNd)}  # noqa: B035
    return found


def has_running_statistics(layer: nn.Module) -> bool:
    """Whether a layer normalises with stored moments, as BatchNorm and frozen BatchNorm do.

    >>> has_running_statistics(nn.BatchNorm1d(3)), has_running_statistics(nn.LayerNorm(3))
    (True, False)
    """
    moments = [layer._buffers.get(name) for name in ("running_mean", "running_var")]
    return hasattr(layer, "eps") and all(part is not None and part.ndim == 1 for part in moments)


def first_tensor(values: Any, kwargs: dict[str, Any] | None = None) -> Tensor | None:
    """Return the first tensor among a module's inputs or outputs, in whatever container."""
    several = values if isinstance(values, tuple | list) else (values,)
    several = tuple(values.values()) if isinstance(values, dict) else several
    found = (v for v in (*several, *(kwargs or {}).values()) if isinstance(v, Tensor))
    return next(found, None)


# --- one forward pass: how the modules are connected ---------------------------------------------


@dataclass(eq=False)
class Call:
    """Input and output of a module, and the modules inside it that read the same input."""

    input: Tensor
    output: Tensor | None = None
    readers: list[nn.Module] = field(default_factory=list)

    @property
    def keeps_shape(self) -> bool:
        """Whether the output has the shape of the input."""
        return self.output is not None and self.output.shape == self.input.shape


Calls = dict[nn.Module, Call]


def traced(twin: TorchModel, images: Tensor) -> tuple[Calls, Counter[nn.Module]]:
    """Run a twin; return the calls of modules called exactly once, and the call counts of all."""
    calls: Calls = {}
    times: Counter[nn.Module] = Counter()
    open_calls: list[Call] = []

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        times[module] += 1
        tensor = first_tensor(args, kwargs)
        call = Call(images if tensor is None else tensor)
        for outer in open_calls:
            if outer.input is tensor:
                outer.readers.append(module)
        open_calls.append(call)
        calls[module] = call

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_calls.pop().output = first_tensor(output)

    with ExitStack() as hooks:
        for module in twin.module.modules():
            before = module.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        twin.run(images)
    return {module: call for module, call in calls.items() if times[module] == 1}, times


def _random_images(batch: Tensor) -> Tensor:
    """Draw two noise images in a batch's range; tokens equal for both do not depend on the input.

    >>> _random_images(torch.tensor([[0], [255]], dtype=torch.uint8)).shape
    torch.Size([2, 1])
    """
    low, high = (float(end) for end in (batch.min(), batch.max()))
    generator = torch.Generator("cpu").manual_seed(0)  # does not touch the global random state
    noise = torch.rand(2, *batch.shape[1:], generator=generator, device="cpu")
    return (low + (high - low or 1.0) * noise).to(batch)


# --- candidates ----------------------------------------------------------------------------------


def _inputs_of(kinds: Kinds, layers: dict[str, nn.Module], calls: Calls) -> list[Site]:
    chosen = {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}
    return [Site(name, "in", _channels_axis(name, layer, calls)) for name, layer in chosen.items()]


def _residual_stream(blocks: dict[str, nn.Module], calls: Calls) -> list[Site]:
    """Outputs of blocks, and those inputs of blocks that no other block outputs."""
    sites = []
    outputs = [calls[block].output for block in blocks.values()]
    for name, block in blocks.items():
        call = calls[block]
        axis = _channels_axis(name, block, calls)
        if not any(call.input is other for other in outputs):
            sites.append(Site(name, "in", axis))
        if call.output is not None:
            sites.append(Site(name, "out", axis))
    return sites


def _blocks(named: dict[str, nn.Module], calls: Calls, norms: Kinds) -> dict[str, nn.Module]:
    """Find residual blocks without BatchNorm, by name: the outermost repeated modules.

    A block contains a normalisation layer of one of these kinds and a layer with weights. Its class
    occurs at least twice, and most instances preserve the shape of their input, which rules out
    stages that start with a downsampling.
    """
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for layer in calls:
        inner = [part for part in layer.modules() if part is not layer]
        has_batchnorm = any(map(has_running_statistics, inner))
        if _any(inner, norms) and _any(inner, WEIGHTS) and not has_batchnorm:
            by_class.setdefault(type(layer), []).append(layer)
    blocks = set()
    for kind, layers in by_class.items():
        same_shape = sum(calls[layer].keeps_shape for layer in layers)
        if len(layers) > 1 and 2 * same_shape > len(layers) and not issubclass(kind, nn.Sequential):
            blocks |= set(layers)
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return {name: m for name, m in named.items() if m in blocks and m not in nested}


def _any(layers: Iterable[nn.Module], kinds: Kinds) -> bool:
    return any(isinstance(layer, kinds) for layer in layers)


def _without_prefix_tokens(
    sites: list[Site], layers: dict[str, nn.Module], calls: Calls
) -> list[Site]:
    """Count the leading tokens at each site that do not depend on the images.

    Where the network adds such tokens, they are equal for both images. Deeper in the network they
    have attended to other tokens and differ, so they are assumed to stay in front.
    """
    counted, prefix = [], 0
    for site in sites:
        call = calls[layers[site.module]] if site.module in layers else None
        values = None if call is None else call.input if site.side == "in" else call.output
        if values is not None and values.ndim == 3 and site.axis == -1 and len(values) == 2:
            prefix = max(prefix, _equal_leading_tokens(values))
            site = replace(site, prefix_tokens=prefix)
        counted.append(site)
    return counted


def _equal_leading_tokens(values: Tensor) -> int:  # (2, t, c)
    """Count the leading tokens that two images share; 0 if all tokens are equal."""
    same = (values[0] == values[1]).all(dim=-1)
    leading = int(same.long().cumprod(0).sum())
    return leading if leading < len(same) else 0


# --- channel axis --------------------------------------------------------------------------------


def _channels_axis(name: str, layer: nn.Module, calls: Calls) -> int:
    """Infer the channel axis of a layer's input from the modules that read or wrote it.

    If none of them is of a known kind, choose the only axis whose size matches a weight of a
    reader or of a normalisation layer inside, or axis 1 if only convolutions inside have weights.
    """
    values = calls[layer].input
    if values.ndim == 2:
        return -1
    readers = [layer, *calls[layer].readers]
    writers = [other for other, call in calls.items() if call.output is values]
    for other in (*readers, *writers):
        if isinstance(other, CHANNELS_FIRST) or has_running_statistics(other):
            return 1
        if isinstance(other, CHANNELS_LAST):
            return -1
        if isinstance(other, nn.LayerNorm) and other in calls:
            axis = _normalised_axis(other, calls[other])
            if axis is not None:
                return axis
    norms = [part for part in layer.modules() if isinstance(part, NORMS)]
    for weight in (weight for part in (*norms, *readers) for weight in part.parameters(False)):
        fits = [axis for axis in (1, -1) if values.shape[axis] == weight.numel()]
        if len(fits) == 1:
            return fits[0]
    weighted = [part for part in layer.modules() if isinstance(part, WEIGHTS)]
    if weighted and all(isinstance(part, _ConvNd) for part in weighted):
        return 1
    raise CasterError(
        f"cannot infer the channel axis of {tuple(values.shape)} at {name!r} from the layers that "
        "read it: the layers of this model cannot be aligned"
    )


@torch.inference_mode()
def _normalised_axis(norm: nn.LayerNorm, call: Call) -> int | None:
    """Find the axis that a LayerNorm or its subclass normalised; None if that is ambiguous.

    >>> class Channels(nn.LayerNorm):
    ...     def forward(self, x):
    ...         return super().forward(x.mT).mT
    >>> x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> _normalised_axis(Channels(4), Call(x, Channels(4)(x)))
    1
    """
    if type(norm).forward is nn.LayerNorm.forward:
        return -1
    if call.output is None or not call.keeps_shape or len(norm.normalized_shape) > 1:
        return None
    near = []
    for axis in (-1, 1):
        values, output = (x.float().movedim(axis, -1) for x in (call.input, call.output))
        if values.shape[-1] == norm.normalized_shape[0]:
            weight, bias = (None if p is None else p.float() for p in (norm.weight, norm.bias))
            expected = functional.layer_norm(values, values.shape[-1:], weight, bias, norm.eps)
            error = (expected - output).abs().mean()
            if error < 0.05 * expected.abs().mean():  # bf16 has a rounding error of 0.004
                near.append(axis)
    return near[0] if len(near) == 1 else None
