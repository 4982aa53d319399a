"""Run a torch module as a frozen model: find its classifier and capture the classifier's input."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import SINGLE_IMAGE, Outputs, error_line

# Held while hooks are registered or removed, and while a module is copied with its hooks.
HOOKS = Lock()
_TRAINING = attrgetter("training")


class TorchModel:
    """An `nn.Module` in eval mode, run without gradients and never modified.

    The classifier is the Linear layer whose output the module returns. It is found on the first
    batch, unless `head` names it. Its input is the features. With `cuda_graph`, an `Adapter` on a
    GPU captures the module and the adaptation as one CUDA graph and replays it. That helps modules
    that do the same work on every batch and are bound by kernel launches.

    >>> module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> model = TorchModel(module)
    >>> outputs = model(torch.zeros(2, 3, 2, 2))
    >>> outputs.features.shape, outputs.logits.shape, model.head
    (torch.Size([2, 4]), torch.Size([2, 3]), '3')
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str | None = None,
        head: str | None = None,
        preprocessing: Preprocessing | None = None,
        device: str | None = None,
        bf16: bool = False,
        channels_last: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        self.module = moved(module.eval(), device, channels_last)
        self.name = name or type(module).__name__
        self.head = head
        self.preprocessing = preprocessing
        self.bf16 = bf16
        self.channels_last = channels_last
        self.cuda_graph = cuda_graph
        self._parts = tuple(module.modules())  # cached: `placed` visits hundreds on every batch
        # Adding and removing a hook would make torch.compile recompile on every batch.
        self.compiles = any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in self._parts)
        self._compiled: Callable[[Tensor], tuple[Tensor, Any]] | None = None
        self._weight = next(module.parameters(), None)
        if head is not None and head not in dict(module.named_modules()):
            raise CasterError(f"{self.name} has no layer {head!r}: {_last_linear_layers(module)}")
        if preprocessing is not None and preprocessing.layout != "NCHW":
            raise CasterError(f"{self.name} is a torch module and needs the layout NCHW")
        self._content = digest_of(self.module)
        # Plain attributes are part of the identity. `verify` ignores them, because a module may
        # change them while it runs.
        identity = f"head {head}\n{_attributes(self.module)}\n{self._content}"
        self.sha256 = hashlib.sha256(identity.encode()).hexdigest()

    def __repr__(self) -> str:
        head = "not found yet" if self.head is None else repr(self.head)
        return f"TorchModel({self.name!r}, head={head}, device={str(self.device)!r})"

    def verify(self) -> None:
        """Raise if a parameter, a buffer or a layer has changed since the module was wrapped."""
        if digest_of(self.module) != self._content:
            raise CasterError(
                f"{self.name} was changed while it was in use: it is not frozen. Restore its "
                "weights, or wrap it and fit again"
            )

    def __call__(self, batch: Any) -> Outputs:
        """Compute features and logits of a batch, in float32 on the module's device."""
        features, logits = self.run(batch)
        return Outputs(features.float(), logits.float())

    def run(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute features and logits in the module's own precision."""
        return self.run_placed(self.placed(batch))

    def run_placed(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Run the module on a batch that `placed` returned."""
        # Autocast frees its cached bf16 weights on exit, so a CUDA graph must not read them.
        autocast = torch.autocast(
            self.device.type, torch.bfloat16, self.bf16, cache_enabled=not self.cuda_graph
        )
        with torch.inference_mode(), autocast:
            if self.compiles:
                return self._run_compiled(batch)
            if self.head is None:
                self.head, features, logits = self._find_head(batch)
                return as_rows(features, self.head), logits
            with _captured_input(self.module.get_submodule(self.head)) as inputs:
                logits = self._logits(batch)
            if not inputs:
                raise CasterError(f"{self.name} did not call its head {self.head!r}")
            return as_rows(inputs[-1], self.head), logits

    def _run_compiled(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Run a copy that also returns its features, compiled with torch.compile's defaults."""
        if self._compiled is None:
            twin = self.twin()
            if twin.head is None:
                twin.head = twin._find_head(batch)[0]
                names = (name for name, _ in self.module.named_modules())
                self.head = next(name for name in names if plain_name(name) == twin.head)
            self._compiled = torch.compile(_WithFeatures(twin.module, twin.head))
        features, returned = answer_of(self._compiled, batch, self.name)
        return as_rows(features, str(self.head)), logits_of(returned, self.name)

    def recompile(self) -> None:
        """Drop the compiled copy, so that the next batch compiles again with the new tensors."""
        self._compiled = None

    def placed(self, batch: Any) -> Tensor:
        """Convert a batch to the module's dtype, memory format and device."""
        if any(map(_TRAINING, self._parts)):
            raise CasterError(f"{self.name} was put into training mode: call eval() on it")
        if isinstance(batch, np.ndarray) and not batch.flags.writeable:
            batch = batch.copy()  # torch warns about read-only arrays
        try:
            tensor = torch.as_tensor(batch)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CasterError(f"a batch for {self.name} must be an array: {error}") from None
        if tensor.ndim == 0 or len(tensor) == 0:
            raise CasterError(f"a batch for {self.name} must have at least one sample")
        dtype, weight = tensor.dtype, self._weight
        if weight is not None and weight.is_floating_point() and tensor.is_floating_point():
            dtype = weight.dtype  # NumPy defaults to float64, which float32 layers reject
        # The copy overlaps with other work only if the caller pinned the memory.
        tensor = tensor.to(self.device, dtype, non_blocking=True)
        if self.channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _logits(self, batch: Tensor) -> Tensor:
        return logits_of(answer_of(self.module, batch, self.name), self.name)

    def _find_head(self, batch: Tensor) -> tuple[str, Tensor, Tensor]:
        """Find the last Linear layer that outputs the logits; return its name, input and output.

        NaN compares equal to NaN, so that even a first batch of NaN finds it.
        """
        calls: list[tuple[str, Tensor, Tensor]] = []
        layers = self.module.named_modules()
        names: dict[nn.Module, str] = {m: name for name, m in layers if isinstance(m, nn.Linear)}
        thread = get_ident()

        def record(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
            if get_ident() == thread and output.ndim == 2:
                calls.append((names[layer], _first(args, kwargs), output))

        with _hooked(names, lambda m: m.register_forward_hook(record, with_kwargs=True)):
            logits = self._logits(batch)
        for name, features, output in reversed(calls):
            if output.shape == logits.shape and torch.allclose(output, logits, 0, 0, True):
                return name, features, logits
        raise CasterError(
            f"{self.name} does not return the output of a Linear layer unchanged: name its "
            f"classifier with {{argument}}; {_last_linear_layers(self.module)}",
            argument="head",
        )

    def linear_head(self) -> tuple[Tensor, Tensor] | None:  # (n, d), (n,)
        """Weight and bias of the classifier in float32; None until the head has been found."""
        if self.head is None:
            return None
        layer = self.module.get_submodule(self.head)
        if not isinstance(layer, nn.Linear):
            kind = type(layer).__name__
            raise CasterError(f"the head {self.head!r} of {self.name} is a {kind}, not a Linear")
        weight = layer.weight.detach().float()
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().float()
        return weight, bias

    def twin(self, user_hooks: bool = True) -> Self:
        """Copy the module so that we can hook the copy; the weights are shared, not copied.

        Submodules compiled by torch.compile are uncompiled in the copy and have their plain names.
        The copy keeps the user's forward hooks, because they may change the output of the model.
        Pass `user_hooks=False` for a pass that is not over the user's data.

        >>> model = TorchModel(nn.Linear(2, 2))
        >>> other = model.twin()
        >>> other.module is model.module, other.module.weight is model.module.weight
        (False, True)
        """
        if any(isinstance(part, nn.DataParallel) for part in self._parts):
            raise CasterError(
                f"{self.name} is an nn.DataParallel, whose replicas see only part of a batch: wrap "
                "the module inside it"
            )
        shared: list[Any] = [*self.module.parameters(), *self.module.buffers()]
        try:
            with HOOKS:
                shared += _hook_owners(self.module)
                module = copy.deepcopy(self.module, {id(value): value for value in shared})
        except (RuntimeError, TypeError, NotImplementedError) as error:
            line = str(error).splitlines()[0]
            raise CasterError(f"{self.name} cannot be copied: {line}") from error
        for hooks in _forward_hooks(module):
            for key, hook in list(hooks.items()):
                if _is_own(hook) or not (user_hooks or is_from_torch(hook)):
                    del hooks[key]
        twin = copy.copy(self)
        twin.compiles, twin._compiled = False, None
        twin.module = _uncompiled(module)
        twin._parts = tuple(twin.module.modules())
        twin.head = None if self.head is None else plain_name(self.head)
        return twin

    @property
    def has_hooks(self) -> bool:
        """Whether the user has registered forward hooks on the module."""
        hooks = (hook for held in _forward_hooks(self.module) for hook in held.values())
        return any(not (_is_own(hook) or is_from_torch(hook)) for hook in hooks)

    def values(self) -> list[Tensor]:
        """List all parameters and buffers, on their current device."""
        return [value.detach() for value in (*self.module.parameters(), *self.module.buffers())]

    @property
    def device(self) -> torch.device:
        """Current device of the module."""
        return torch.device("cpu") if self._weight is None else self._weight.device


def moved(module: nn.Module, device: str | None, channels_last: bool = False) -> nn.Module:
    """Move a module to a device, in place."""
    try:
        module = module if device is None else module.to(device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise CasterError(f"the model cannot be moved to {device!r}: {line}") from None
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


# --- one forward pass: the input of the head, and the logits -------------------------------------


@contextmanager
def _captured_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of a layer during the `with` block."""
    inputs: list[Tensor] = []
    thread = get_ident()  # another thread may run the same layer at the same time
    in_place = not isinstance(layer, nn.Linear)  # another kind of layer may overwrite its input

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == thread:
            tensor = _first(args, kwargs)
            inputs.append(tensor.clone() if in_place else tensor)

    with _hooked([layer], lambda m: m.register_forward_pre_hook(record, with_kwargs=True)):
        yield inputs


@contextmanager
def _hooked(layers: Iterable[nn.Module], register: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Register a hook on each layer for the duration of the `with` block."""
    with HOOKS:
        handles = [register(layer) for layer in layers]
    try:
        yield
    finally:
        with HOOKS:
            for handle in handles:
                handle.remove()


class _WithFeatures(nn.Module):
    """A module that returns the input of its head along with its output."""

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__()
        self.module = module
        self._features: Tensor | None = None
        module.get_submodule(head).register_forward_pre_hook(self._capture, with_kwargs=True)

    def _capture(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._features = _first(args, kwargs)

    def forward(self, batch: Tensor) -> tuple[Tensor | None, Any]:
        returned = self.module(batch)
        features, self._features = self._features, None
        return features, returned


def _first(args: Any, kwargs: dict[str, Any]) -> Tensor:
    first: Tensor = next(iter((*args, *kwargs.values())))
    return first


def answer_of(module: Callable[[Tensor], Any], batch: Tensor, name: str) -> Any:
    """Run a module on a batch and turn its errors into a `CasterError`."""
    try:
        returned = module(batch)
        if batch.ndim == 3 and getattr(returned, "ndim", 2) == 1:
            raise ValueError("it returns one row of logits")
        return returned
    except CasterError:
        raise
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        line = error_line(error)
        line = f"{SINGLE_IMAGE} ({line})"[:300] if batch.ndim == 3 else line
        shape, dtype = tuple(batch.shape), str(batch.dtype).removeprefix("torch.")
        raise CasterError(f"{name} cannot take a batch of {dtype} {shape}: {line}") from error


def logits_of(returned: Any, name: str) -> Tensor:
    """Extract the logits from a module's output: a tensor, or an output object of transformers."""
    logits = getattr(returned, "logits", returned)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CasterError(f"{name} must return logits (samples, classes), not {shape}")
    return logits


def as_rows(features: Tensor, head: str) -> Tensor:  # (B, d) or (B, d, 1, 1) -> (B, d)
    """Reshape the input of a head to one row per sample."""
    if features.ndim == 4 and features.shape[2:] == (1, 1):
        features = features.flatten(1)
    if features.ndim != 2:
        raise CasterError(
            f"the input of {head!r} is {tuple(features.shape)}, not (samples, features): "
            "name a layer after the pooling with {argument}",
            argument="head",
        )
    return features


def _last_linear_layers(module: nn.Module) -> str:
    """List the last few Linear layers for a message."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return f"its last Linear layers are {', '.join(names[-3:])}" if names else "it has no Linear"


# --- copying a module: hooks and compiled submodules ---------------------------------------------


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Collect the forward-hook dictionaries of a module and its submodules."""
    parts = module.modules()
    return [hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks)]


def _hook_owners(module: nn.Module) -> list[Any]:
    """Collect the objects that the user's hooks may write to, which a copy must share.

    Layers are excluded: a bound method of a layer is copied together with the layer.
    """
    hooks = [hook for held in _forward_hooks(module) for hook in held.values()]
    owners = [getattr(hook, "__self__", hook) for hook in hooks if not is_from_torch(hook)]
    return [owner for owner in owners if not isinstance(owner, nn.Module | partial)]


def _is_own(hook: Any) -> bool:
    """Whether this Python module registered a hook, for a pass in another thread."""
    return getattr(hook, "__module__", None) == __name__


def is_from_torch(hook: Any) -> bool:
    """Whether torch registered a hook itself to compute weights, as weight_norm and pruning do.

    >>> is_from_torch(torch.nn.utils.weight_norm), is_from_torch(print)
    (True, False)
    """
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).split(".")[0] == "torch"


def _uncompiled(module: nn.Module) -> nn.Module:
    """Replace compiled submodules of a copy by the original modules, in place."""
    module = getattr(module, "_orig_mod", module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(parent, name, child._orig_mod)
    return module


def plain_name(name: str) -> str:
    """Strip the components that torch.compile adds to the name of a layer.

    >>> plain_name("_orig_mod.blocks.0._orig_mod.norm")
    'blocks.0.norm'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# --- digests and checkpoints ---------------------------------------------------------------------


def digest_of(module: nn.Module) -> str:
    """SHA-256 of the layers' reprs, all parameters and all buffers, persistent or not."""
    digest = hashlib.sha256()
    for name, layer in module.named_modules():
        digest.update(f"{name} {type(layer).__name__}({layer.extra_repr()})\n".encode())
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.is_quantized:
            raise CasterError(
                f"torch does not expose the values of `{name}`, which is quantised: export the "
                "model to ONNX"
            )
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta:
            raise CasterError(
                f"`{name}` is on the meta device and has no values: load the weights first"
            )
        if is_lazy(value) or value.layout != torch.strided:
            raise CasterError(f"`{name}` is sparse or not initialised: it has no digest")
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _attributes(module: nn.Module) -> str:
    """List plain attributes that no `extra_repr` shows, one line per layer."""
    lines = []
    for name, layer in module.named_modules():
        has_repr = type(layer).extra_repr is not nn.Module.extra_repr
        if not (has_repr and type(layer).__module__.startswith("torch.")):
            own = {k: v for k, v in vars(layer).items() if k[0] != "_" and k != "training"}
            plain = {key: _plain_repr(own[key]) for key in sorted(own)}
            lines.append(f"{name} {plain}")
    return "\n".join(lines)


def _plain_repr(value: Any) -> str | None:
    """The repr of a plain value, the name of a function, or None for anything else."""
    if isinstance(value, bool | int | float | str | tuple | list | torch.dtype | None):
        return repr(value)
    return getattr(value, "__qualname__", None)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file."""
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
    """Load a state dict; raise ValueError or RuntimeError if names, shapes or dtypes differ."""
    for name, value in module.state_dict().items():
        loaded = weights.get(name, value)
        if value.is_floating_point() and not loaded.is_floating_point():  # torch would cast it
            raise ValueError(f"`{name}` holds {loaded.dtype}, not {value.dtype}")
    module.load_state_dict(weights)
