"""Where in a torch module layer transport works: its sites, found by one pass, and measured.

Sites are
- what every BatchNorm with running statistics is given;
- the residual stream of blocks without BatchNorm: what each returns, and what one is given where
  that is not what another returned, which is the stem's, the patch embedding's or a downsampling's;
- in a network without such blocks and BatchNorms, what other normalisation layers are given;
- in a network without BatchNorm, what the classifier is given.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from caster.core.layers import Site
from caster.errors import CasterError
from caster.frozen.torch import TorchModel

CHANNELS_FIRST = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WEIGHTS = (_ConvNd, nn.Linear)


def batchnorm_sites(module: nn.Module) -> list[Site]:
    """Inputs of BatchNorms that have running statistics.

    >>> [str(site) for site in batchnorm_sites(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3)))]
    ['1:in']
    """
    layers = ((n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm))
    return [Site(name, "in", 1) for name, layer in layers if layer.running_mean is not None]


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


def find_sites(model: TorchModel, batch: Any) -> list[Site]:
    """Every site of a model, in the order of its modules; a batch shows how they are connected.

    >>> import numpy as np
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    >>> [str(site) for site in find_sites(TorchModel(net), np.zeros((2, 3, 1, 1), "float32"))]
    ['1:in', '3:in']
    """
    twin = model.twin()
    few = twin.placed(batch)[:2]
    if twin.head is None:
        twin.run(few)
    calls = _calls(twin, few)
    batchnorms = batchnorm_sites(twin.module)
    blocks = _blocks(twin.module, calls)
    sites = [*batchnorms, *_stream(blocks, calls)]
    if not sites:
        sites = [
            Site(name, "in", _axis(name, layer, calls))
            for name, layer in twin.module.named_modules()
            if layer in calls and isinstance(layer, NORMS)
        ]
    if not batchnorms:
        sites.append(Site(str(twin.head), "in", -1))
    position = {name: i for i, (name, _) in enumerate(twin.module.named_modules())}
    return sorted(sites, key=lambda site: (position[site.module], site.side))


def selected(sites: list[Site], patterns: Any, name: str) -> list[Site]:
    """Sites whose names match one of some patterns, as of a shell; all of them without patterns.

    >>> sites = [Site("blocks.0", "out", -1), Site("blocks.1", "out", -1), Site("head", "in", -1)]
    >>> [str(site) for site in selected(sites, ("blocks.*",), "layer-transport")]
    ['blocks.0:out', 'blocks.1:out']
    """
    if patterns is None:
        return sites
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise CasterError(f"sites of {name} are a list of patterns, not {patterns!r}")
    for pattern in patterns:
        if not any(fnmatchcase(str(site), pattern) for site in sites):
            known = ", ".join(map(str, sites)) or "none"
            raise CasterError(f"{name} has no site {pattern!r}: there are {known}")
    return [site for site in sites if any(fnmatchcase(str(site), p) for p in patterns)]


def first_tensor(inputs: Any, named: dict[str, Any] | None = None) -> Tensor | None:
    """The first tensor a module is given or returns: alone, in a tuple, or by name."""
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    found = (v for v in (*several, *(named or {}).values()) if isinstance(v, Tensor))
    return next(found, None)


def _calls(twin: TorchModel, batch: Tensor) -> dict[nn.Module, Call]:
    """What every module that is called once does, on a twin's way through a batch."""
    calls: dict[nn.Module, Call] = {}
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
    return {module: call for module, call in calls.items() if times[module] == 1}


def _blocks(module: nn.Module, calls: dict[nn.Module, Call]) -> dict[str, nn.Module]:
    """Residual blocks without BatchNorm, by name: the outermost that repeat.

    A block has a normalisation and a layer with weights, and its class comes twice or more, most
    often with as much going out as in: a stage that begins with a downsampling is none.
    """
    kinds: dict[type[nn.Module], list[nn.Module]] = {}
    for layer in calls:
        inner = [part for part in layer.modules() if part is not layer]
        if _any(inner, NORMS) and _any(inner, WEIGHTS) and not _any(inner, (_BatchNorm,)):
            kinds.setdefault(type(layer), []).append(layer)
    chosen = set()
    for kind, layers in kinds.items():
        kept = sum(calls[layer].keeps_shape for layer in layers)
        if len(layers) > 1 and 2 * kept > len(layers) and not issubclass(kind, nn.Sequential):
            chosen |= set(layers)
    nested = {part for block in chosen for part in block.modules() if part is not block}
    return {n: m for n, m in module.named_modules() if m in chosen and m not in nested}


def _any(layers: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(layer, kinds) for layer in layers)


def _stream(blocks: dict[str, nn.Module], calls: dict[nn.Module, Call]) -> list[Site]:
    """The residual stream: what blocks return, and are given where no other block returned it."""
    sites = []
    returned = [calls[block].returned for block in blocks.values()]
    for name, block in blocks.items():
        call = calls[block]
        axis = _axis(name, block, calls)
        if not any(call.given is other for other in returned):
            sites.append(Site(name, "in", axis))
        sites.append(Site(name, "out", axis))
    return sites


def _axis(name: str, layer: nn.Module, calls: dict[nn.Module, Call]) -> int:
    """The channels' axis of what a layer is given, by the kinds of those that read or wrote it.

    Where none is of a known kind, the one that alone is as wide as a normalisation inside.
    """
    values = calls[layer].given
    readers = [layer, *calls[layer].readers]
    writers = [other for other, call in calls.items() if call.returned is values]
    for other in (*readers, *writers):
        if isinstance(other, CHANNELS_FIRST):
            return 1
        if isinstance(other, nn.Linear) or type(other).forward is nn.LayerNorm.forward:
            return -1
    norms = [part for part in layer.modules() if isinstance(part, NORMS)]
    for weight in (norm.weight for norm in norms if norm.weight is not None):
        fits = [axis for axis in (1, -1) if values.shape[axis] == weight.numel()]
        if len(fits) == 1:
            return fits[0]
    raise CasterError(
        f"which axis of {tuple(values.shape)} at {name!r} has the channels cannot be told by the "
        "layers that read it: layer transport does not know this network"
    )
