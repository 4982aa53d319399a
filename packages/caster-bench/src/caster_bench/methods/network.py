"""A method's own copy of a torch module, and the normalisation layers in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.torch import TorchModel, answer_of, logits_of
from caster_bench.methods.protocol import Frozen, Retained, check_settings, nbytes
from caster_bench.methods.source import Source, class_columns

NORMS: dict[str, type[nn.Module]] = {
    "batch": _BatchNorm,
    "layer": nn.LayerNorm,
    "group": nn.GroupNorm,
}


@dataclass(eq=False, repr=False)
class TorchMethod:
    """Base class of methods on torch modules whose fields are their settings."""

    model: TorchModel
    source: InitVar[Source]
    _: KW_ONLY
    name: str = ""

    def __post_init__(self, source: Source) -> None:
        if not isinstance(self.model, TorchModel):
            raise CasterError(f"{self.name} needs a torch module, which {self.model.name} is not")
        check_settings(self)
        self.frozen = Frozen(self.model, source)
        self.columns = class_columns(source, self.name)


class Network:
    """A copy of a frozen model's module in eval mode, free to be changed.

    No parameter requires a gradient until a method asks for it.
    """

    def __init__(self, model: TorchModel, columns: Columns) -> None:
        self.model = model
        self.columns = columns
        try:
            self.module = copy.deepcopy(model.module).eval().requires_grad_(False)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            line = str(error).splitlines()[0]
            raise CasterError(f"{model.name} cannot be copied: {line}") from error

    def __call__(self, batch: Tensor) -> Tensor:  # (B, C), in float32
        """Logits of the state's classes for a batch on the model's device."""
        with torch.autocast(batch.device.type, torch.bfloat16, self.model.bf16):
            answer = answer_of(self.module, batch, self.model.name)
            logits = logits_of(answer, self.model.name)
        chosen: Tensor = self.columns(logits.float())
        return chosen

    def retained(self) -> Retained:
        """Bytes of the parameters and buffers."""
        return Retained(
            parameters=nbytes(*self.module.parameters()), buffers=nbytes(*self.module.buffers())
        )


def share_weights(network: Network) -> Network:
    """Replace copied weights with the model's own, for a copy that only needs hooks."""
    pairs = zip(network.module.parameters(), network.model.module.parameters(), strict=True)
    for own, shared in pairs:
        own.data = shared.data
    return network


@contextmanager
def gradients(enabled: bool = True) -> Iterator[None]:
    """Enable or disable gradients, regardless of the caller's mode."""
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def to_device(model: TorchModel, images: Any) -> Tensor:
    """Move a batch to the model's device, fit for a backward pass."""
    batch = model.placed(images)
    return batch.clone() if batch.is_inference() else batch


def first_source_images(
    model: TorchModel, source: Source, samples: int, name: str
) -> Iterator[Tensor]:
    """The first source images on the model's device, in the batches they come in."""
    missing = samples
    for images, _ in source.labelled(name):
        batch = to_device(model, images)[:missing]
        missing -= len(batch)
        yield batch
        if missing == 0:
            return


def check_finite(logits: Tensor, name: str) -> None:
    """Reject a batch with non-finite logits before anything is learnt from it."""
    if not bool(logits.detach().isfinite().all()):
        raise CasterError(f"{name} got logits that are not finite: drop or repair such images")


def validate_norms(norms: Sequence[str], name: str) -> tuple[str, ...]:
    """Check the kinds of normalisation layers that a user names."""
    if isinstance(norms, str) or not norms or any(kind not in NORMS for kind in norms):
        raise CasterError(f"norms of {name} must be some of {', '.join(NORMS)}, not {norms!r}")
    return tuple(kind for kind in NORMS if kind in norms)


def norm_layers(module: nn.Module, norms: Sequence[str]) -> dict[str, nn.Module]:
    """Normalisation layers of these kinds, by name, in the module's order."""
    wanted = tuple(NORMS[norm] for norm in norms)
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, wanted)}


def affine_parameters(layers: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Scales and shifts of normalisation layers, by name; shared ones once."""
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        for part, value in layer.named_parameters(recurse=False):
            known = any(value is other for other in found.values())
            if part in ("weight", "bias") and not known:
                found[f"{name}.{part}"] = value
    return found


def use_batch_statistics(module: nn.Module) -> None:
    """Make every BatchNorm normalise by batch statistics and track no running statistics.

    A layer that gets a single value per channel cannot: it uses the source statistics.
    """
    for layer in norm_layers(module, ("batch",)).values():
        assert isinstance(layer, _BatchNorm)
        if store_source_statistics(layer):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            layer.track_running_stats = False
            layer.register_forward_pre_hook(_use_source_for_single_values, with_kwargs=True)
            layer.register_forward_hook(_drop_statistics)


def override_batchnorm(
    module: nn.Module, forward: Callable[[_BatchNorm, Tensor], Tensor]
) -> list[_BatchNorm]:
    """Make every BatchNorm of a copy compute `forward(layer, values)`, and return these layers.

    Parameters, buffers and hooks stay where they are.
    """
    layers = []
    for layer in norm_layers(module, ("batch",)).values():
        assert isinstance(layer, _BatchNorm)
        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
        layers.append(layer)
    return layers


@contextmanager
def training(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Set layers to training mode, and back: dropout and stochastic depth stay off."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def store_source_statistics(layer: _BatchNorm) -> bool:
    """Copy running statistics to buffers that no pass writes to; False if there are none."""
    if layer.running_mean is None or layer.running_var is None:
        return False
    layer.register_buffer("source_mean", layer.running_mean.clone())
    layer.register_buffer("source_var", layer.running_var.clone())
    return True


def source_statistics(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The stored mean and variance."""
    return layer.get_buffer("source_mean"), layer.get_buffer("source_var")


def first_input(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The input of a layer, passed by position or by name."""
    first: Tensor = next(iter((*inputs, *named.values())))
    return first


def _use_source_for_single_values(
    layer: _BatchNorm, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    values = first_input(inputs, named)
    if values.numel() == values.shape[1]:
        layer.running_mean, layer.running_var = source_statistics(layer)


def _drop_statistics(layer: _BatchNorm, inputs: Any, output: Any) -> None:
    layer.running_mean = layer.running_var = None
