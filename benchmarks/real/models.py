"""The real networks that are checked, as torch modules with their published weights.

`$CASTER_DATA/models/NAME.safetensors` holds the state dict of each. The two ImageNet networks take
RGB in [0, 255] and normalise inside; `resnet50` is Keras's first version (biased convolutions,
strides on the 1 x 1 ones), `efficientnet_lite0` the one of timm. `cifar10` is what train_cifar10.py
makes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from caster.models.preprocessing import Preprocessing

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "coverage"))  # its corruptions

from corruptions import CONDITIONS, corrupt

from measure import complete_torchvision
from networks import resnet18

__all__ = ["CONDITIONS", "RAW_32", "RAW_224", "Normalised", "corrupt", "exported", "load"]

complete_torchvision()

RAW_224 = Preprocessing(
    range=255.0, mean=(0.0,) * 3, std=(1.0,) * 3, layout="NCHW", resize=224,
    interpolation="bicubic", crop=(224, 224),
)  # fmt: skip
RAW_32 = Preprocessing(range=255.0, mean=(0.0,) * 3, std=(1.0,) * 3, layout="NCHW")


class Normalised(nn.Module):
    """A network that takes pixels of 0 to 255 and normalises them itself."""

    mean: Tensor

    def __init__(self, net: nn.Module, mean: list[float], scale: float, bgr: bool = False) -> None:
        super().__init__()
        self.net, self.scale, self.bgr = net, scale, bgr
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, C)."""
        ordered = pixels.flip(1) if self.bgr else pixels
        out: Tensor = self.net((ordered - self.mean) / self.scale)
        return out


def resnet50() -> nn.Module:
    """Keras's ResNet-50 in torchvision's modules."""
    from torchvision.models import resnet

    net = resnet.resnet50(weights=None)
    for block in [m for m in net.modules() if isinstance(m, resnet.Bottleneck)]:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return Normalised(net, [103.939, 116.779, 123.68], 1.0, bgr=True)


def efficientnet_lite0() -> nn.Module:
    """timm's EfficientNet-Lite0."""
    import timm

    return Normalised(timm.create_model("tf_efficientnet_lite0"), [127.0] * 3, 128.0)


def cifar10() -> nn.Module:
    """A ResNet-18 with a 3 x 3 stem."""
    return Normalised(resnet18(10), [127.5] * 3, 127.5)


BUILD = {"resnet50": resnet50, "efficientnet_lite0": efficientnet_lite0, "cifar10": cifar10}


def load(name: str, folder: Path) -> nn.Module:
    """A network with its weights, in eval mode."""
    module = BUILD[name]()
    module.load_state_dict(load_file(folder / f"{name}.safetensors"))
    return module.eval()


def exported(name: str, folder: Path, pixels: int) -> Path:
    """The network as an ONNX file, written beside its weights on first use."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            torch.onnx.export(
                load(name, folder), (torch.zeros(2, 3, pixels, pixels),), str(path), dynamo=False,
                input_names=["images"], dynamic_axes={"images": {0: "n"}},
            )  # fmt: skip
    return path
