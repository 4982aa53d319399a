"""The networks: features, then a linear classifier layer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


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


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of NCHW."""

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


def resnet18(n_classes: int) -> nn.Sequential:
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Sequential(*stem, *blocks, *pool), nn.Linear(512, n_classes))


def convnext12(n_classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 2, 2), ChannelNorm(96)]
    for width, depth in ((96, 3), (192, 6), (384, 3)):
        if width > 96:
            layers += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [Next(width) for _ in range(depth)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(384)]
    return nn.Sequential(nn.Sequential(*layers, *pool), nn.Linear(384, n_classes))
