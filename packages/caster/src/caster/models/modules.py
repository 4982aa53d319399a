"""Looking into a torch module: its classifier, what a layer is given, its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from caster.errors import CasterError
from caster.models.protocol import SINGLE_IMAGE

# Held while hooks are added or removed, and while a module is copied with those it has.
HOOKS = Lock()


@contextmanager
def input_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What a layer is given while the block runs."""
    seen: list[Tensor] = []
    # A Linear leaves its input alone; another layer, named by hand, may work in place.
    keep = (lambda given: given) if isinstance(layer, nn.Linear) else Tensor.clone

    thread = get_ident()  # another one may be in the same layer at the same time

    def note(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if get_ident() == thread:
            seen.append(keep(next(iter((*inputs, *named.values())))))

    with HOOKS:
        handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        with HOOKS:
            handle.remove()


def find_head(
    module: nn.Module, answer: Callable[[Tensor], Any], batch: Tensor, name: str
) -> tuple[str, Tensor, Tensor]:
    """Find the Linear layer that yields the logits of a batch: its name and input, the logits."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    with HOOKS:
        handles = [
            layer.register_forward_hook(_noting(calls, layer_name), with_kwargs=True)
            for layer_name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
        ]
    try:
        logits = logits_of(answer(batch), name)
    finally:
        with HOOKS:
            for handle in handles:
                handle.remove()
    for layer_name, given, output in reversed(calls):
        if output.shape == logits.shape and torch.allclose(output, logits, 0, 0, equal_nan=True):
            return layer_name, given, logits
    raise CasterError(
        f"{name} does not return the output of a Linear layer as it is: name its classifier "
        f"with {{argument}}; {linear_layers(module)}",
        argument="head",
    )


def _noting(calls: list[tuple[str, Tensor, Tensor]], name: str) -> Any:
    thread = get_ident()

    def note(layer: nn.Module, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        if get_ident() == thread and output.ndim == 2:  # logits are
            calls.append((name, next(iter((*inputs, *named.values()))), output))

    return note


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that a pass through a module and its submodules calls."""
    return [hook for part in module.modules() for held in _held(part) for hook in held.values()]


def drop_hooks(module: nn.Module, drop: Callable[[Any], bool]) -> None:
    """Remove the forward hooks that `drop` selects from a module of one's own."""
    for part in module.modules():
        for held in _held(part):
            for key in [key for key, hook in held.items() if drop(hook)]:
                del held[key]


def _held(part: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return part._forward_pre_hooks, part._forward_hooks


def is_captured(hook: Any) -> bool:
    """Whether a hook is one of this module's own, which another thread's pass has put there."""
    return getattr(hook, "__module__", None) == __name__


def is_from_torch(hook: Any) -> bool:
    """Whether torch registered a hook itself, as weight_norm and pruning do: it makes weights.

    >>> is_from_torch(torch.nn.utils.weight_norm), is_from_torch(print)
    (True, False)
    """
    made = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(made, "__module__", "")).split(".")[0] == "torch"


def uncompiled(module: nn.Module) -> nn.Module:
    """A module of one's own without what torch.compile wraps: hooks are its own then."""
    module = getattr(module, "_orig_mod", module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(parent, name, child._orig_mod)
    return module


def plain_name(name: str) -> str:
    """What a layer is called in a module that is not compiled.

    >>> plain_name("_orig_mod.blocks.0._orig_mod.norm")
    'blocks.0.norm'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def linear_layers(module: nn.Module) -> str:
    """The last few Linear layers in words, for a message."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return f"its last Linear layers are {', '.join(names[-3:])}" if names else "it has no Linear"


def answer_of(module: nn.Module, batch: Tensor, name: str) -> Any:
    """What a module returns for a batch, or one line that says why it does not."""
    try:
        returned = module(batch)
        if batch.ndim == 3 and getattr(returned, "ndim", 2) == 1:
            raise ValueError("it gets one row of logits")
        return returned
    except CasterError:
        raise
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        line = " ".join(str(error).split())
        line = f"{SINGLE_IMAGE} ({line})" if batch.ndim == 3 else line
        shape, dtype = tuple(batch.shape), str(batch.dtype).removeprefix("torch.")
        raise CasterError(f"{name} cannot take a batch of {dtype} {shape}: {line[:300]}") from error


def logits_of(returned: Any, name: str) -> Tensor:
    """The logits a module returns: a tensor, or what transformers wraps them in."""
    logits = getattr(returned, "logits", returned)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CasterError(f"{name} must return logits (samples, classes), not {shape}")
    return logits


def as_rows(features: Tensor, head: str) -> Tensor:  # (B, d) or (B, d, 1, 1) -> (B, d)
    """What a head is given, as one row a sample."""
    if features.ndim == 4 and features.shape[2:] == (1, 1):
        features = features.flatten(1)
    if features.ndim != 2:
        raise CasterError(
            f"the input of {head!r} is {tuple(features.shape)}, not (samples, features): "
            "name a layer after the pooling with {argument}",
            argument="head",
        )
    return features


def settings_of(module: nn.Module) -> str:
    """How those layers are set that do not say so themselves: by their plain attributes."""
    lines = []
    for name, layer in module.named_modules():
        speaks = type(layer).extra_repr is not nn.Module.extra_repr
        if not (speaks and type(layer).__module__.startswith("torch.")):  # torch's say it all
            own = {k: v for k, v in vars(layer).items() if k[0] != "_" and k != "training"}
            plain = {key: _in_words(own[key]) for key in sorted(own)}
            lines.append(f"{name} {plain}")
    return "\n".join(lines)


def _in_words(value: Any) -> str | None:
    """A plain value, or a function by its name; None of what cannot be put in words."""
    if isinstance(value, bool | int | float | str | tuple | list | torch.dtype | None):
        return repr(value)
    return getattr(value, "__qualname__", None)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file."""
    if not checkpoint.is_file():
        raise CasterError(f"the checkpoint {checkpoint} does not exist")
    if checkpoint.suffix != ".safetensors":
        raise CasterError(
            f"the checkpoint {checkpoint} must be a .safetensors file: caster never unpickles; "
            "safetensors.torch.save_file converts a state dict"
        )
    try:
        return load_file(checkpoint)
    except (SafetensorError, OSError):
        raise CasterError(f"the checkpoint {checkpoint} is truncated or damaged") from None


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill a module; a ValueError or RuntimeError if names, shapes or kinds of number differ."""
    for name, value in module.state_dict().items():
        given = weights.get(name, value)
        if value.is_floating_point() and not given.is_floating_point():  # torch would convert it
            raise ValueError(f"`{name}` holds {given.dtype}, not {value.dtype}")
    module.load_state_dict(weights)


def digest_of(module: nn.Module) -> str:
    """SHA-256 over the layers' own words, parameters, and buffers, stored ones or not."""
    digest = hashlib.sha256()
    for name, layer in module.named_modules():
        digest.update(f"{name} {type(layer).__name__}({layer.extra_repr()})\n".encode())
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.is_quantized:
            raise CasterError(
                f"`{name}` is quantised, and torch shows nothing of it: export such a model to ONNX"
            )
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta:
            raise CasterError(
                f"`{name}` is on the meta device and has no values: load the weights first"
            )
        if is_lazy(value) or value.layout != torch.strided:
            raise CasterError(
                f"`{name}` is sparse or not initialised: no digest can be taken of it"
            )
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
