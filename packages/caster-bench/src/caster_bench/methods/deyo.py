"""DeYO: entropy minimisation on samples whose prediction depends on the shape of objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from caster.errors import CasterError
from caster_bench.methods.gradient_method import GradientMethod, OptimizerName, entropy
from caster_bench.methods.network import affine_parameters, norm_layers
from caster_bench.methods.protocol import count, number
from caster_bench.methods.sar import before_last_blocks

REVISION = 1


@dataclass(eq=False, repr=False, kw_only=True)
class DeYO(GradientMethod):
    """Reduce the weighted entropy of samples that shuffled patches make less certain.

    Lee et al., "Entropy Is Not Enough for Test-Time Adaptation: From the Perspective of
    Disentangled Factors", ICLR 2024. A sample is selected if its entropy H is below `margin` ln C,
    and if its predicted class loses PLPD > `drop` of its probability when `patches` x `patches`
    patches of the image change places at random. Its weight is exp(`margin_e0` ln C - H) +
    exp(PLPD). A batch without a selected sample changes nothing.

    The learnt parameters are SAR's: scales and shifts of normalisation layers before the last
    blocks. Each step needs another forward pass, of shuffled images; nothing is kept but the
    optimizer's state.

    The default optimizer and `drop` are those of the authors' wild settings and of ports to CIFAR;
    presets "imagenet" (`drop` 0.3, for BatchNorm) and "imagenet-vit" are the authors'.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))
    >>> list(DeYO(wrap(net), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "deyo"
    norms: Sequence[str] = ("batch", "layer", "group")
    optimizer: OptimizerName = "adam"
    margin: float = number(0.5)
    margin_e0: float = number(0.4)
    drop: float = number(0.2, low=-1, high=1)
    patches: int = count(4)
    seed: int = 0

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Select scales and shifts of the normalisation layers before the last blocks."""
        return affine_parameters(before_last_blocks(module, norm_layers(module, self.norms)))

    def reset(self) -> None:
        """Start over with a new copy of the network and the same random numbers."""
        super().reset()
        self._generator = torch.Generator().manual_seed(self.seed)

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Reduce the weighted entropy of the selected samples, if there are any."""
        if batch.ndim != 4 or min(batch.shape[2:]) < self.patches:
            raise CasterError(
                f"{self.name} shuffles {self.patches} x {self.patches} patches of images (samples, "
                f"channels, height, width), not of {tuple(batch.shape)}"
            )
        log_classes = math.log(logits.shape[1])
        entropies = entropy(logits)
        certain = (entropies.detach() < self.margin * log_classes).nonzero()[:, 0]
        if not len(certain):
            return
        shuffled = shuffle_patches(batch[certain], self.patches, self._generator)
        with torch.no_grad():
            before, after = logits[certain].softmax(dim=1), self.network(shuffled).softmax(dim=1)
        predicted = before.argmax(dim=1, keepdim=True)
        lost = (before.gather(1, predicted) - after.gather(1, predicted))[:, 0]
        selected = (lost > self.drop).nonzero()[:, 0]
        if not len(selected):
            return
        chosen = entropies[certain[selected]]
        weights = (self.margin_e0 * log_classes - chosen.detach()).exp() + lost[selected].exp()
        self.descend((weights * chosen).mean())


def shuffle_patches(
    images: Tensor,  # (B, C, H, W)
    per_side: int,  # number of patches
    generator: torch.Generator,  # on the CPU, so that all devices draw the same
) -> Tensor:  # (B, C, H, W)
    """Permute the patches of every image, each in its own way.

    A side that is not a multiple of `per_side` is resized to one before, and back after.

    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> shuffle_patches(image, 2, torch.Generator().manual_seed(0)).flatten().sort().values
    tensor([0., 1., 2., 3.])
    """
    n, channels, height, width = images.shape
    fitted = _resized(images, height // per_side * per_side, width // per_side * per_side)
    h, w = (length // per_side for length in fitted.shape[2:])
    tiles = fitted.reshape(n, channels, per_side, h, per_side, w).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(n, per_side * per_side, generator=generator).argsort(dim=1).to(images.device)
    tiles = tiles.reshape(n, per_side * per_side, channels, h, w)
    tiles = tiles[torch.arange(n, device=images.device)[:, None], order]
    tiles = tiles.reshape(n, per_side, per_side, channels, h, w).permute(0, 3, 1, 4, 2, 5)
    return _resized(tiles.reshape(fitted.shape), height, width)


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[2:] == (height, width):
        return images
    return interpolate(images, (height, width), mode="bilinear", antialias=True)
