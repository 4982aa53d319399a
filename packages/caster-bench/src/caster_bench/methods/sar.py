"""SAR: sharpness-aware entropy minimisation on reliable samples, with recovery."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from caster.errors import CasterError
from caster_bench.methods.gradient_method import GradientMethod, OptimizerName, entropy
from caster_bench.methods.network import affine_parameters, norm_layers
from caster_bench.methods.protocol import number

log = logging.getLogger("caster")

REVISION = 1
LOSS_DECAY = 0.9  # of the running mean of the loss, per batch
Layers = dict[str, nn.Module]


@dataclass(eq=False, repr=False, kw_only=True)
class SAR(GradientMethod):
    """Reduce the entropy of reliable samples at the worst point within distance `rho`.

    Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023. A sample is
    reliable if its entropy is below `margin_e0` ln C. With g the gradient of the reliable samples'
    mean entropy at the weights θ, the step follows the gradient at θ + `rho` g / |g|, over those
    that are still reliable there. Without reliable samples nothing is learnt. If the running mean
    of the loss falls below `recovery` (for 1,000 classes; scaled by ln C), predictions have
    collapsed to overconfidence, and the method starts over from the source weights.

    Normalisation layers of the kinds in `norms` are learnt, except those of the last blocks and
    after (see `before_last_blocks`). `skip` excludes other layers instead, by patterns of layer or
    module names: ("layer4", "norm").

    The learning rate of 1e-3 is that of ports to CIFAR; preset "imagenet" is 2.5e-4, the authors'
    for ResNet-50; "imagenet-vit" is 1e-3, theirs for ViT; both at 64 samples per batch.

    >>> from caster import wrap
    >>> from caster_bench.methods import Source
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2))
    >>> list(SAR(wrap(net, head="0"), Source()).parameters)
    ['1.weight', '1.bias']
    """

    name: str = "sar"
    norms: Sequence[str] = ("batch", "layer", "group")
    optimizer: OptimizerName = field(default="sgd", init=False)
    skip: Sequence[str] | None = None
    margin_e0: float = number(0.4)
    rho: float = number(0.05)
    recovery: float = number(0.2)

    def eligible(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Select scales and shifts of the normalisation layers before the last blocks."""
        layers = norm_layers(module, self.norms)
        if self.skip is None:
            return affine_parameters(before_last_blocks(module, layers))
        return affine_parameters(excluding(layers, self.skip, self.name))

    def reset(self) -> None:
        """Start over with a new copy of the network and no running loss."""
        super().reset()
        self._mean_loss: float | None = None

    def step(self, batch: Tensor, logits: Tensor) -> None:
        """Reduce the entropy of the reliable samples, if there are any."""
        log_classes = math.log(logits.shape[1])
        margin = self.margin_e0 * log_classes
        entropies = entropy(logits)
        reliable = (entropies.detach() < margin).nonzero()[:, 0]
        if not len(reliable):
            return
        values = list(self.parameters.values())
        with ascended(values, entropies[reliable].mean(), self.rho):
            second = entropy(self.network(batch))[reliable]
            second = second[second.detach() < margin]
            if not len(second):
                return
            loss = second.mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._recover(loss.item(), self.recovery * log_classes / math.log(1000))

    def _recover(self, loss: float, least: float) -> None:
        """Update the running mean of the loss, and start over if it is below `least`."""
        if self._mean_loss is not None:
            loss = LOSS_DECAY * self._mean_loss + (1 - LOSS_DECAY) * loss
        self._mean_loss = loss
        if loss < least:
            log.info("%s starts over: its mean loss is %.3g, below %.3g", self.name, loss, least)
            with torch.no_grad():
                for name, value in self.origin.items():  # nothing else has changed
                    self.parameters[name].copy_(value)
            self._optimizer.state.clear()
            self._mean_loss = None


@contextmanager
def ascended(parameters: list[nn.Parameter], loss: Tensor, rho: float) -> Iterator[None]:
    """Move parameters a distance rho up the gradient of a loss, and restore them exactly.

    >>> at = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> with ascended([at], at.square().sum(), rho=5.0):
    ...     print(at.detach())
    tensor([6., 8.])
    >>> at.detach()
    tensor([3., 4.])
    """
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    before = [parameter.detach().clone() for parameter in parameters]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    step = rho / (norm + 1e-12)
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.add_(step * grad)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def before_last_blocks(
    module: nn.Module,
    layers: Layers,  # layers of the module by name, in its order
) -> Layers:
    """Layers before the last quarter of the module's blocks.

    Blocks are the outermost sequence of numbered modules that contains more than half of the
    layers: layer1 to layer4 of a ResNet, stages.0 to stages.3 of a ConvNeXt, blocks.0 to blocks.11
    of a ViT; their last quarter is the last, the last, and the last three. Layers after the first
    of these, such as a final norm, are excluded too. Without such blocks, the last quarter of the
    layers themselves is excluded. Quarters are rounded up; at least one layer remains.

    >>> net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    >>> list(before_last_blocks(net, dict(net.named_children())))
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


def _blocks(module: nn.Module, names: list[str]) -> list[str]:
    """Outermost numbered siblings that contain more than half of the names.

    There is at most one such sequence: two sequences of siblings have no name in common.
    """
    for path, parent in module.named_modules():  # parents come before their children
        siblings: dict[str, list[str]] = defaultdict(list)
        count: dict[str, int] = defaultdict(int)
        for child, _ in parent.named_children():
            stem = child.rstrip("0123456789")
            full = f"{path}.{child}" if path else child
            inside = sum(name.startswith(f"{full}.") for name in names)
            if stem != child and inside:
                siblings[stem].append(full)
                count[stem] += inside
        for stem, blocks in siblings.items():
            if len(blocks) > 1 and count[stem] > len(names) / 2:
                return blocks
    return []


def excluding(layers: Layers, patterns: Sequence[str], name: str) -> Layers:
    """Layers that no pattern matches, neither by their own name nor by that of a parent module.

    >>> layers = {"stem.norm": nn.Identity(), "stage1.norm": nn.Identity()}
    >>> list(excluding(layers, ["stage*"], "sar"))
    ['stem.norm']
    """
    if isinstance(patterns, str):
        raise CasterError(f"skip of {name} must be a list of names, not {patterns!r}")
    dropped: set[str] = set()
    for pattern in patterns:
        found = {k for k in layers if fnmatchcase(k, pattern) or fnmatchcase(k, f"{pattern}.*")}
        if not found:
            known = ", ".join(layers) or "none"
            raise CasterError(
                f"skip of {name} matches no layer with {pattern!r}: there are {known}"
            )
        dropped |= found
    return {k: layer for k, layer in layers.items() if k not in dropped}
