"""Where in a torch module layer transport works: its sites, found by one pass, and measured.

Sites are
- what every BatchNorm with running statistics is given;
- the residual stream of blocks without BatchNorm: what each returns, and what one is given where
  that is not what another returned, which is the stem's, the patch embedding's or a downsampling's;
- in a network without such blocks and BatchNorms, what other normalisation layers are given;
- in a network without any of these, the residual stream of blocks that do not normalise, or else
  what layers with weights are given, but for the images themselves;
- in a network without BatchNorm, what the classifier is given.

Tokens that a network adds of itself, a class token or registers, are no part of a site's values.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from caster.core.channels import Site
from caster.errors import CasterError
from caster.models.calls import NORMS, Calls, calls_of, channels_axis, keeps_statistics
from caster.models.modules import plain_name
from caster.models.torch import TorchModel

WEIGHTS = (_ConvNd, nn.Linear)
Kinds = tuple[type[nn.Module], ...]


def batchnorm_sites(module: nn.Module) -> list[Site]:
    """Inputs of BatchNorms that have running statistics, by their names in a twin.

    >>> [str(site) for site in batchnorm_sites(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3)))]
    ['1:in']
    """
    layers = ((n, m) for n, m in module.named_modules() if keeps_statistics(m))
    return [Site(plain_name(name), "in", 1) for name, layer in layers]


def times_called(twin: TorchModel, batch: Any) -> dict[str, int]:
    """How often a pass calls each module of a twin."""
    _, times = calls_of(twin, twin.placed(batch)[:2])
    return {name: times[layer] for name, layer in twin.module.named_modules()}


def find_sites(model: TorchModel, batch: Any, user_hooks: bool = True) -> list[Site]:
    """Every site of a model, in the order of its modules; a pass shows how they are connected.

    `batch` is one of those to come, which the pass's own images are to look like. A user's hooks
    may change what a layer returns, and so belong to the pass unless `user_hooks` is False.

    >>> import numpy as np
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    >>> [str(site) for site in find_sites(TorchModel(net), np.zeros((2, 3, 1, 1), "float32"))]
    ['1:in', '3:in']
    """
    twin = model.twin(user_hooks)
    few = twin.placed(_unlike(twin.placed(batch)))
    calls, _ = calls_of(twin, few)
    once = {name: layer for name, layer in twin.module.named_modules() if layer in calls}
    batchnorms = [site for site in batchnorm_sites(twin.module) if site.module in once]
    sites = [*batchnorms, *_stream(_blocks(once, calls, NORMS), calls)]
    sites = sites or _given(once, calls, NORMS)
    if not batchnorms:
        sites = sites or _stream(_blocks(once, calls, (nn.Module,)), calls)
        last = Site(str(twin.head), "in", -1)
        others = {name: layer for name, layer in once.items() if calls[layer].given is not few}
        sites = sites or [s for s in _given(others, calls, WEIGHTS) if s.module != last.module]
        sites.append(last)
    position = {name: i for i, (name, _) in enumerate(twin.module.named_modules())}
    ordered = sorted(sites, key=lambda site: (position[site.module], site.side))
    return _counting_added(ordered, once, calls)


def _unlike(batch: Tensor) -> Tensor:
    """Two images of noise, as bright as a batch's: what they have in common is not of them.

    >>> _unlike(torch.tensor([[0], [255]], dtype=torch.uint8)).shape
    torch.Size([2, 1])
    """
    low, high = (float(end) for end in (batch.min(), batch.max()))
    own = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers stay as they were
    noise = torch.rand(2, *batch.shape[1:], generator=own, device="cpu")
    return (low + (high - low or 1.0) * noise).to(batch)


def _counting_added(sites: list[Site], layers: dict[str, nn.Module], calls: Calls) -> list[Site]:
    """The same sites, each with how many tokens come first that the network added of itself.

    Where it adds them they are the same for both images. Later, having looked at the others, they
    are not, and are taken to stay in front.
    """
    found, added = [], 0
    for site in sites:
        call = calls[layers[site.module]] if site.module in layers else None
        values = None if call is None else call.given if site.side == "in" else call.returned
        if values is not None and values.ndim == 3 and site.axis == -1 and len(values) == 2:
            added = max(added, _alike(values))
            site = replace(site, added=added)
        found.append(site)
    return found


def _alike(values: Tensor) -> int:  # (2, t, c)
    """How many tokens of two images are the same, from the first on; none if all of them are."""
    same = (values[0] == values[1]).all(dim=-1)
    leading = int(same.long().cumprod(0).sum())
    return leading if leading < len(same) else 0


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


def _given(layers: dict[str, nn.Module], calls: Calls, kinds: Kinds) -> list[Site]:
    """What layers of some kinds are given."""
    chosen = {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}
    return [Site(name, "in", channels_axis(name, layer, calls)) for name, layer in chosen.items()]


def _blocks(named: dict[str, nn.Module], calls: Calls, norms: Kinds) -> dict[str, nn.Module]:
    """Residual blocks without BatchNorm, by name: the outermost that repeat.

    A block has one of some normalisations and a layer with weights, and its class comes twice or
    more, most often with as much going out as in: a stage that begins with a downsampling is none.
    """
    kinds: dict[type[nn.Module], list[nn.Module]] = {}
    for layer in calls:
        inner = [part for part in layer.modules() if part is not layer]
        own = any(map(keeps_statistics, inner))
        if _any(inner, norms) and _any(inner, WEIGHTS) and not own:
            kinds.setdefault(type(layer), []).append(layer)
    chosen = set()
    for kind, layers in kinds.items():
        kept = sum(calls[layer].keeps_shape for layer in layers)
        if len(layers) > 1 and 2 * kept > len(layers) and not issubclass(kind, nn.Sequential):
            chosen |= set(layers)
    nested = {part for block in chosen for part in block.modules() if part is not block}
    return {name: m for name, m in named.items() if m in chosen and m not in nested}


def _any(layers: list[nn.Module], kinds: Kinds) -> bool:
    return any(isinstance(layer, kinds) for layer in layers)


def _stream(blocks: dict[str, nn.Module], calls: Calls) -> list[Site]:
    """The residual stream: what blocks return, and are given where no other block returned it."""
    sites = []
    returned = [calls[block].returned for block in blocks.values()]
    for name, block in blocks.items():
        call = calls[block]
        axis = channels_axis(name, block, calls)
        if not any(call.given is other for other in returned):
            sites.append(Site(name, "in", axis))
        if call.returned is not None:
            sites.append(Site(name, "out", axis))
    return sites
