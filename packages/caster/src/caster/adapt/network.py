"""A method's own copy of a torch module: what of it may be adapted, and its statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from caster.adapt.protocol import Retained, nbytes
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.modules import answer_of, logits_of
from caster.models.protocol import FrozenModel
from caster.models.torch import TorchModel

Norm = Literal["batch", "layer", "group"]
KINDS: dict[Norm, tuple[type[nn.Module], ...]] = {
    "batch": (_BatchNorm,),
    "layer": (nn.LayerNorm,),
    "group": (nn.GroupNorm,),
}


class Network:
    """A copy of a frozen model's module, in eval mode, to be changed at will.

    Nothing in it asks for a gradient until a method says so; `module` is the copy.
    """

    def __init__(self, model: TorchModel, columns: Columns) -> None:
        self.model = model
        self.columns = columns
        try:
            self.module = copy.deepcopy(model.module).eval().requires_grad_(False)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            line = str(error).splitlines()[0]
            raise CasterError(f"{model.name} cannot be copied: {line}") from error

    def __call__(self, batch: Tensor) -> Tensor:  # (B, C), of the classes at hand, in float32
        """Logits of a batch that is `placed`."""
        with torch.autocast(batch.device.type, torch.bfloat16, self.model.bf16):
            answer = answer_of(self.module, batch, self.model.name)
            logits = logits_of(answer, self.model.name)
        chosen: Tensor = self.columns(logits.float())
        return chosen

    def retained(self) -> Retained:
        """Its parameters and buffers."""
        return Retained(
            parameters=nbytes(*self.module.parameters()), buffers=nbytes(*self.module.buffers())
        )


@contextmanager
def gradients(enabled: bool = True) -> Iterator[None]:
    """Whether gradients are recorded, whatever mode the caller works in."""
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def torch_model(model: FrozenModel, name: str) -> TorchModel:
    """The model, which must be a torch module for a method that changes a copy of it."""
    if not isinstance(model, TorchModel):
        raise CasterError(f"{name} changes a copy of a torch module, and {model.name} is none")
    return model


def placed(model: TorchModel, images: Any) -> Tensor:
    """A batch beside the model, fit for a backward pass."""
    batch = model.placed(images)
    return batch.clone() if batch.is_inference() else batch


def check_finite(logits: Tensor, name: str) -> None:
    """Refuse a batch whose answer is not finite, before anything is learnt from it."""
    if not bool(logits.detach().isfinite().all()):
        raise CasterError(f"{name} got logits that are not finite: drop or repair such images")


def checked_norms(norms: Sequence[str], name: str) -> tuple[Norm, ...]:
    """Kinds of normalisation layers as a user names them."""
    known = get_args(Norm)
    if isinstance(norms, str) or not norms or any(kind not in known for kind in norms):
        raise CasterError(f"norms of {name} are some of {', '.join(known)}, not {norms!r}")
    return tuple(kind for kind in known if kind in norms)


def norm_layers(module: nn.Module, norms: Sequence[Norm]) -> dict[str, nn.Module]:
    """Normalisation layers of these kinds, by name, in the module's order."""
    wanted = tuple(kind for norm in norms for kind in KINDS[norm])
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, wanted)}


def affine_parameters(layers: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Scales and shifts of normalisation layers, by name; one that layers share, once."""
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        for part, value in layer.named_parameters(recurse=False):
            known = any(value is other for other in found.values())
            if part in ("weight", "bias") and not known:
                found[f"{name}.{part}"] = value
    return found


def use_batch_statistics(module: nn.Module) -> None:
    """Have every BatchNorm normalise by its batch, and keep no running statistics.

    A layer that is given a single value a channel cannot: it goes on with the source's.
    """
    for layer in norm_layers(module, ("batch",)).values():
        assert isinstance(layer, _BatchNorm)
        if keep_source_statistics(layer):
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            layer.track_running_stats = False
            layer.register_forward_pre_hook(_lend, with_kwargs=True)
            layer.register_forward_hook(_take_back)


def keep_source_statistics(layer: _BatchNorm) -> bool:
    """Keep a layer's running statistics under names that no forward writes to; False without."""
    if layer.running_mean is None or layer.running_var is None:
        return False
    layer.register_buffer("source_mean", layer.running_mean.clone())
    layer.register_buffer("source_var", layer.running_var.clone())
    return True


def source_statistics(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The mean and variance that were kept."""
    return layer.get_buffer("source_mean"), layer.get_buffer("source_var")


def given_to(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """What a layer is called with, also if it is by name."""
    first: Tensor = next(iter((*inputs, *named.values())))
    return first


def _lend(layer: _BatchNorm, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = given_to(inputs, named)
    if given.numel() == given.shape[1]:
        layer.running_mean, layer.running_var = source_statistics(layer)


def _take_back(layer: _BatchNorm, inputs: Any, output: Any) -> None:
    layer.running_mean = layer.running_var = None
