"""Networks whose published ImageNet weights are turned into checkpoints, and not trained here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caster_bench.engine.networks.library import timm_models

if TYPE_CHECKING:
    from torch import nn


def keras_resnet50(n_classes: int, size: int, drop_path: float) -> nn.Module:
    """ResNet-50 as Keras has it: strides on the first 1 x 1 convolution of a block, not the 3 x 3.

    Biases of its convolutions are in the running means behind them.
    """
    from torch import nn

    models = timm_models("resnet")
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
    """TensorFlow's EfficientNet-Lite0, padded as TensorFlow does."""
    net: nn.Module = timm_models("efficientnet").tf_efficientnet_lite0(
        num_classes=n_classes, drop_path_rate=drop_path
    )
    return net
