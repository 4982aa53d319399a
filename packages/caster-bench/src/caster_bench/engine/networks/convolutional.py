"""ResNets and ConvNeXts for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caster_bench.engine.networks.library import timm_models

if TYPE_CHECKING:
    from torch import nn

Four = tuple[int, int, int, int]


def resnet(
    depths: Four,
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    bottleneck: bool = False,
    widths: Four = (64, 128, 256, 512),
) -> nn.Module:
    """A ResNet whose stem is one 3 x 3 convolution, and no pooling after it.

    The first stage works on 32 x 32 positions, the last on 4 x 4.
    """
    from torch import nn

    models = timm_models("resnet")
    net: Any = models.ResNet(
        models.Bottleneck if bottleneck else models.BasicBlock,
        depths,
        num_classes=n_classes,
        channels=widths,
        stem_type="deep",  # replaced: of timm's stems the one that may be as wide as is wanted
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
    """A ConvNeXt on patches of 2 x 2: stages of 16, 8, 4 and 2 positions a side, as Swin's."""
    from torch import nn

    net: Any = timm_models("convnext").ConvNeXt(
        num_classes=n_classes,
        depths=depths,
        dims=widths,
        # At the published 1e-6 a block does nothing for as long as a short run warms up.
        ls_init_value=0.1,
        drop_path_rate=drop_path,
        patch_size=1,  # replaced: told of a patch of 2, timm halves the grid once more
    )
    patch = 2 * (size // 32)
    net.stem[0] = nn.Conv2d(3, widths[0], patch, stride=patch)
    nn.init.trunc_normal_(net.stem[0].weight, std=0.02)
    nn.init.zeros_(net.stem[0].bias)
    module: nn.Module = net
    return module
