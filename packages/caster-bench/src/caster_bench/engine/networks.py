"""The benchmark's networks: six backbones for small images, small versions of them for tests.

All are timm's, with the stem changed: a stem made for 224 pixels would reduce 32 to a single
position. At 64 pixels the stem's stride doubles, so that every later layer works on the same grid
as at 32. Two more networks take published ImageNet weights at 224 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from caster.errors import CasterError
from caster.models.pretrained import import_timm
from caster_bench.sweeps.spec import known

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = (32, 64)  # pixels per side: CIFAR, Tiny-ImageNet
LARGE = (224,)  # ImageNet
QUERY_KEY, VALUE_PROJECTION = 0.7, 0.4  # weights of I and -I in `mimetic`

Four = tuple[int, int, int, int]


def _timm(module: str) -> Any:
    return import_timm(f"timm.models.{module}", "this network")


# --- convolutional networks ------------------------------------------------------------------


def resnet(
    depths: Four,
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    bottleneck: bool = False,
    widths: Four = (64, 128, 256, 512),
) -> nn.Module:
    """Build a ResNet with a 3 x 3 stem and no pooling: stages of 32, 16, 8 and 4 positions."""
    from torch import nn

    models = _timm("resnet")
    net: Any = models.ResNet(
        models.Bottleneck if bottleneck else models.BasicBlock,
        depths,
        num_classes=n_classes,
        channels=widths,
        stem_type="deep",  # replaced below; only this stem of timm's has a free width
        stem_width=widths[0] // 2,
        drop_path_rate=drop_path,
    )
    net.conv1 = nn.Conv2d(3, widths[0], 3, stride=size // 32, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    module: nn.Module = net
    return module


def convnext(
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    depths: Four = (3, 3, 9, 3),
    widths: Four = (96, 192, 384, 768),
) -> nn.Module:
    """Build a ConvNeXt on 2 x 2 patches: stages of 16, 8, 4 and 2 positions, like Swin's."""
    from torch import nn

    net: Any = _timm("convnext").ConvNeXt(
        num_classes=n_classes,
        depths=depths,
        dims=widths,
        # At the published 1e-6, blocks stay inactive during a short run's warm-up.
        ls_init_value=0.1,
        drop_path_rate=drop_path,
        patch_size=1,  # replaced below: with a patch of 2, timm halves the grid once more
    )
    patch = 2 * (size // 32)
    net.stem[0] = nn.Conv2d(3, widths[0], patch, stride=patch)
    nn.init.trunc_normal_(net.stem[0].weight, std=0.02)
    nn.init.zeros_(net.stem[0].bias)
    module: nn.Module = net
    return module


# --- transformers ----------------------------------------------------------------------------


def vit(
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    patch: int = 4,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
) -> nn.Module:
    """Build a ViT with a class token; ViT-B and DeiT-B have a grid of 8 x 8 patches."""
    module: nn.Module = _timm("vision_transformer").VisionTransformer(
        img_size=size,
        patch_size=patch * (size // 32),
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=n_classes,
        drop_path_rate=drop_path,
    )
    return module


def swin(
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    width: int = 96,
    depths: Four = (2, 2, 6, 2),
    heads: Four = (3, 6, 12, 24),
) -> nn.Module:
    """Build a Swin transformer: stages of 16, 8, 4 and 2 patches per side, in windows of 4.

    timm shrinks the window to fit the last stage.
    """
    module: nn.Module = _timm("swin_transformer").SwinTransformer(
        img_size=size,
        patch_size=2 * (size // 32),
        embed_dim=width,
        depths=depths,
        num_heads=heads,
        window_size=4,
        num_classes=n_classes,
        drop_path_rate=drop_path,
    )
    return module


def drop_patches(net: nn.Module, share: float) -> None:
    """Drop a random share of a ViT's patches in training, which makes a step cheaper.

    With the network or its `patch_drop` in eval mode, all patches are used.
    """
    vit: Any = net
    if not hasattr(vit, "patch_drop"):
        raise CasterError(f"a {type(net).__name__} has no patches that can be left out")
    tokens = vit.num_prefix_tokens  # the class token stays
    dropout = _timm("vision_transformer").PatchDropout(share, tokens)
    vit.patch_drop = dropout.train(vit.training)


def mimetic(net: nn.Module) -> None:
    """Initialise a ViT's attention like a trained one's, for short runs on few images.

    After Trockman and Kolter 2023, who gain 5 points on CIFAR-10: queries times keys near the
    identity, projection times values near minus the identity, sine-cosine positions. They factor
    noisy identities; adding an orthogonal matrix to timm's small noise is equivalent.
    """
    import torch
    from torch import nn

    vit: Any = net
    if not hasattr(vit, "blocks") or not hasattr(vit, "pos_embed"):
        raise CasterError(f"a {type(net).__name__} has no attention to begin in this way")
    with torch.no_grad():
        for block in vit.blocks:
            query, key, value = block.attn.qkv.weight.chunk(3)
            shared = nn.init.orthogonal_(torch.empty_like(query))
            query += math.sqrt(QUERY_KEY) * shared
            key += math.sqrt(QUERY_KEY) * shared
            rotation = nn.init.orthogonal_(torch.empty_like(value))
            value += math.sqrt(VALUE_PROJECTION) * rotation
            block.attn.proj.weight -= math.sqrt(VALUE_PROJECTION) * rotation.T
        n_patches = vit.patch_embed.num_patches
        vit.pos_embed[:, -n_patches:] = positions(math.isqrt(n_patches), vit.pos_embed.shape[2])


def positions(side: int, width: int) -> Tensor:  # (side * side, width)
    """Return sine-cosine position embeddings of a square grid, half for rows, half for columns.

    >>> positions(8, 48).shape
    torch.Size([64, 48])
    """
    import torch

    n = width // 4
    frequencies = 10_000 ** -(torch.arange(n) / n)
    angles = torch.arange(side)[:, None] * frequencies  # (side, n)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, width / 2)
    rows = waves[:, None].expand(side, side, -1)
    columns = waves[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


# --- networks with published ImageNet weights ------------------------------------------------


def keras_resnet50(n_classes: int, size: int, drop_path: float) -> nn.Module:
    """Build Keras's ResNet-50: strides on the first 1 x 1 convolution of a block, not the 3 x 3.

    The biases of its convolutions are folded into the running means that follow them.
    """
    from torch import nn

    models = _timm("resnet")
    net: Any = models.ResNet(
        models.Bottleneck, (3, 4, 6, 3), num_classes=n_classes, drop_path_rate=drop_path
    )
    for module in net.modules():
        if isinstance(module, models.Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    whole: nn.Module = net
    return whole


def efficientnet_lite0(n_classes: int, size: int, drop_path: float) -> nn.Module:
    """Build TensorFlow's EfficientNet-Lite0, with TensorFlow's padding."""
    net: nn.Module = _timm("efficientnet").tf_efficientnet_lite0(
        num_classes=n_classes, drop_path_rate=drop_path
    )
    return net


# --- by name ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A network by name; `make` takes the classes, the image size and the stochastic depth."""

    name: str
    family: str  # normalisation: "batch" or "layer"
    make: Callable[[int, int, float], nn.Module]
    sizes: tuple[int, ...] = SIZES  # of images, pixels per side


_SMALL_VIT = partial(vit, patch=8, width=48, depth=4, heads=3)
_TRAINED = (
    Architecture("resnet18", "batch", partial(resnet, (2, 2, 2, 2))),
    Architecture("resnet50", "batch", partial(resnet, (3, 4, 6, 3), bottleneck=True)),
    Architecture("convnext_tiny", "layer", convnext),
    Architecture("vit_base", "layer", vit),
    Architecture("deit_base", "layer", vit),  # ViT-B with another recipe
    Architecture("swin_tiny", "layer", swin),
    Architecture("mini-resnet", "batch", partial(resnet, (1, 1, 1, 1), widths=(8, 16, 32, 64))),
    Architecture(
        "mini-convnext", "layer", partial(convnext, depths=(1, 1, 2, 1), widths=(16, 24, 32, 48))
    ),
    Architecture("mini-vit", "layer", _SMALL_VIT),
    Architecture("mini-deit", "layer", _SMALL_VIT),
    Architecture(
        "mini-swin", "layer", partial(swin, width=16, depths=(1, 1, 2, 1), heads=(1, 2, 2, 4))
    ),
)
_PUBLISHED = (
    Architecture("keras_resnet50", "batch", keras_resnet50, LARGE),
    Architecture("efficientnet_lite0", "batch", efficientnet_lite0, LARGE),
)


def architectures() -> list[str]:
    """Return the names that can be trained: the six backbones, then the small ones for tests.

    >>> architectures()[:6]
    ['resnet18', 'resnet50', 'convnext_tiny', 'vit_base', 'deit_base', 'swin_tiny']
    """
    return [architecture.name for architecture in _TRAINED]


def find(name: str) -> Architecture:
    """Look up a network by name, without building it.

    >>> find("swin_tiny").family
    'layer'
    """
    found = {architecture.name: architecture for architecture in _TRAINED + _PUBLISHED}
    return found[name if name in found else known(name, architectures(), "architecture")]


def build(
    name: str,
    n_classes: int,
    size: int = 32,
    drop_path: float = 0.0,  # rate of stochastic depth, for training
) -> nn.Module:
    """Build a network with timm's initial weights, in eval mode.

    >>> net = build("mini-vit", n_classes=10)
    >>> sum(value.numel() for value in net.parameters())
    123802
    """
    architecture = find(name)
    if size not in architecture.sizes:
        known = " or ".join(map(str, architecture.sizes))
        raise CasterError(f"{name} takes images of {known} pixels per side, not {size}")
    if n_classes < 2:
        raise CasterError(f"at least 2 classes are needed, not {n_classes}")
    return architecture.make(n_classes, size, drop_path).eval()
