"""Which networks there are, and how each is fitted to images of 32 or 64 pixels.

All are timm's, with the part changed that meets the pixels: a backbone made for 224 pixels would
reduce 32 to a single one. At 64 pixels that part takes steps twice as long, so that every layer
after it works on the same grid as at 32. Two are for published ImageNet weights, at 224 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from caster.errors import CasterError
from caster_bench.engine.networks import convolutional, imagenet, transformers

if TYPE_CHECKING:
    from torch import nn

SIZES = (32, 64)  # pixels a side: CIFAR, Tiny-ImageNet
LARGE = (224,)  # ImageNet


@dataclass(frozen=True)
class Architecture:
    """A network by name.

    `make` is called with the number of classes, the size of images and the rate of stochastic
    depth.
    """

    name: str
    title: str
    family: str  # "batch" or "layer": how it normalises
    make: Callable[[int, int, float], nn.Module]
    sizes: tuple[int, ...] = SIZES  # of images, pixels a side


_ALL = (
    Architecture(
        "resnet18", "ResNet-18, 3 x 3 stem", "batch", partial(convolutional.resnet, (2, 2, 2, 2))
    ),
    Architecture(
        "resnet50",
        "ResNet-50, 3 x 3 stem",
        "batch",
        partial(convolutional.resnet, (3, 4, 6, 3), bottleneck=True),
    ),
    Architecture("convnext_tiny", "ConvNeXt-T, patch 2", "layer", convolutional.convnext),
    Architecture("vit_base", "ViT-B, patch 4", "layer", transformers.vit),
    # DeiT-B without its teacher is ViT-B: what is its own is the recipe.
    Architecture("deit_base", "DeiT-B, patch 4", "layer", transformers.vit),
    Architecture("swin_tiny", "Swin-T, patch 2, window 4", "layer", transformers.swin),
    Architecture(
        "mini-resnet",
        "a ResNet of 4 blocks",
        "batch",
        partial(convolutional.resnet, (1, 1, 1, 1), widths=(8, 16, 32, 64)),
    ),
    Architecture(
        "mini-convnext",
        "a ConvNeXt of 5 blocks",
        "layer",
        partial(convolutional.convnext, depths=(1, 1, 2, 1), widths=(16, 24, 32, 48)),
    ),
    Architecture(
        "mini-vit",
        "a ViT of 4 blocks, patch 8",
        "layer",
        partial(transformers.vit, patch=8, width=48, depth=4, heads=3),
    ),
    Architecture(
        "mini-deit",
        "the same with DeiT's recipe",
        "layer",
        partial(transformers.vit, patch=8, width=48, depth=4, heads=3),
    ),
    Architecture(
        "mini-swin",
        "a Swin of 5 blocks, patch 2, window 4",
        "layer",
        partial(transformers.swin, width=16, depths=(1, 1, 2, 1), heads=(1, 2, 2, 4)),
    ),
)
_PUBLISHED = (
    Architecture("keras_resnet50", "ResNet-50, Keras's", "batch", imagenet.keras_resnet50, LARGE),
    Architecture(
        "efficientnet_lite0", "EfficientNet-Lite0", "batch", imagenet.efficientnet_lite0, LARGE
    ),
)


def architectures() -> list[str]:
    """Every name that can be trained: the six backbones, then the small ones, which are for tests.

    >>> architectures()[:6]
    ['resnet18', 'resnet50', 'convnext_tiny', 'vit_base', 'deit_base', 'swin_tiny']
    """
    return [architecture.name for architecture in _ALL]


def find(name: str) -> Architecture:
    """A network by name, not yet built.

    >>> find("swin_tiny").family
    'layer'
    """
    for architecture in _ALL + _PUBLISHED:
        if architecture.name == name:
            return architecture
    near = get_close_matches(name, architectures(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(architectures())}"
    raise CasterError(f"there is no architecture {name!r}: {hint}")


def build(
    name: str,
    n_classes: int,
    size: int = 32,
    drop_path: float = 0.0,  # the rate of stochastic depth, for training
) -> nn.Module:
    """A network with the weights timm begins with, in eval mode.

    >>> net = build("mini-vit", n_classes=10)
    >>> sum(value.numel() for value in net.parameters())
    123802
    """
    architecture = find(name)
    if size not in architecture.sizes:
        known = " or ".join(map(str, architecture.sizes))
        raise CasterError(f"{name} takes images of {known} pixels a side, not {size}")
    if n_classes < 2:
        raise CasterError(f"at least 2 classes are needed, not {n_classes}")
    return architecture.make(n_classes, size, drop_path).eval()
