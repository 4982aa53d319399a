"""Networks of the benchmarks: features, then a linear classifier."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from measure import complete_torchvision


class Residual(nn.Module):
    """Basic ResNet block."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip = nn.Sequential()
        if stride > 1 or width_in != width:
            conv = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width_in, H, W) -> (N, width, H / stride, W / stride)."""
        return relu(self.main(x) + self.skip(x))


class Bottleneck(nn.Module):
    """Bottleneck ResNet block: 1 x 1, 3 x 3 and 1 x 1 convolutions, with an expansion of four."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.skip = nn.Sequential()
        if stride > 1 or width_in != 4 * width:
            conv = nn.Conv2d(width_in, 4 * width, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width_in, H, W) -> (N, 4 width, H / stride, W / stride)."""
        return relu(self.main(x) + self.skip(x))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> the same."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Next(nn.Module):
    """ConvNeXt block with a 5 x 5 depthwise convolution and layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            ChannelNorm(width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> the same."""
        return x + self.scale * self.main(x)


def resnet18(n_classes: int, width: int = 64) -> nn.Sequential:
    widths = [width * times for times in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
    blocks = (Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths))
    return _resnet(width, blocks, 8 * width, n_classes)


def resnet50(n_classes: int, width: int = 64) -> nn.Sequential:
    stages = [width * 2**stage for stage, depth in enumerate((3, 4, 6, 3)) for _ in range(depth)]
    blocks = (
        Bottleneck(width if before is None else 4 * before, narrow, 1 + (before == narrow // 2))
        for before, narrow in pairwise([None, *stages])
    )
    return _resnet(width, blocks, 32 * width, n_classes)


def _resnet(
    width: int, blocks: Iterable[nn.Module], width_out: int, n_classes: int
) -> nn.Sequential:
    """Build a ResNet with a 3 x 3 stem, for images of 32 pixels."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Sequential(*stem, *blocks, *pool), nn.Linear(width_out, n_classes))


def convnext12(n_classes: int, width: int = 96) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 2, 2), ChannelNorm(width)]
    for times, depth in ((1, 3), (2, 6), (4, 3)):
        wide = width * times
        if times > 1:
            layers += [ChannelNorm(wide // 2), nn.Conv2d(wide // 2, wide, 2, 2)]
        layers += [Next(wide) for _ in range(depth)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4 * width)]
    return nn.Sequential(nn.Sequential(*layers, *pool), nn.Linear(4 * width, n_classes))


def vit_s4(n_classes: int, width: int = 384, depth: int = 12) -> nn.Module:
    """Build timm's vision transformer on 4 x 4 patches."""
    complete_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    net: nn.Module = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=depth, num_heads=6, num_classes=n_classes
    )
    return net
