"""Which normalisation layers are in the last part of a network: SAR leaves those alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from caster.errors import CasterError

Layers = dict[str, nn.Module]


def before_last(
    module: nn.Module,
    layers: Layers,  # some of the module's layers, by name, in its order
) -> Layers:
    """Layers that come before the last quarter of the module's blocks.

    Blocks are the outermost modules numbered in a row that hold more than half of the layers:
    layer1 to layer4 of a ResNet, stages.0 to stages.3, blocks.0 to blocks.11 of a ViT, of which
    the last, the last, and the last three are the last quarter. Whatever the module names after
    its first block of these, such as a final norm, goes with them. A module without such blocks
    loses the last quarter of the layers themselves. Quarters are rounded up; one layer stays.

    >>> net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    >>> list(before_last(net, dict(net.named_children())))
    ['0', '1']
    """
    names = list(layers)
    blocks = _blocks(module, names)
    if blocks:
        last = blocks[-math.ceil(len(blocks) / 4)]
        end = next(i for i, name in enumerate(names) if name.startswith(f"{last}."))
    else:
        end = len(names) - math.ceil(len(names) / 4)
    return {name: layers[name] for name in names[: max(end, 1)]}


def without(layers: Layers, patterns: Sequence[str], name: str) -> Layers:
    """Layers but those that patterns name, themselves or by a module they are in.

    >>> layers = {"stem.norm": nn.Identity(), "stage1.norm": nn.Identity()}
    >>> list(without(layers, ["stage*"], "sar"))
    ['stem.norm']
    """
    if isinstance(patterns, str):
        raise CasterError(f"skip of {name} is a list of names, not {patterns!r}")
    dropped: set[str] = set()
    for pattern in patterns:
        found = {k for k in layers if fnmatchcase(k, pattern) or fnmatchcase(k, f"{pattern}.*")}
        if not found:
            known = ", ".join(layers) or "none"
            raise CasterError(f"skip of {name} names no layer by {pattern!r}: there are {known}")
        dropped |= found
    return {k: layer for k, layer in layers.items() if k not in dropped}


def _blocks(module: nn.Module, names: list[str]) -> list[str]:
    """Outermost siblings, numbered in a row, that hold more than half of the names.

    There is one such row at most: the parts of two rows side by side have no name in common.
    """
    for path, parent in module.named_modules():  # a parent comes before its children
        rows: dict[str, list[str]] = defaultdict(list)
        held: dict[str, int] = defaultdict(int)
        for child, _ in parent.named_children():
            stem = child.rstrip("0123456789")
            full = f"{path}.{child}" if path else child
            inside = sum(name.startswith(f"{full}.") for name in names)
            if stem != child and inside:
                rows[stem].append(full)
                held[stem] += inside
        for stem, row in rows.items():
            if len(row) > 1 and held[stem] > len(names) / 2:
                return row
    return []
