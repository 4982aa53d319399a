"""A torch module as a frozen model: its classifier found, its input captured, nothing changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing
from caster.frozen.protocol import Outputs

_TRAINING = attrgetter("training")


class TorchModel:
    """An `nn.Module` in eval mode, without gradients, and never written to.

    The classifier is the Linear layer whose output the module returns, found on the first batch;
    `head` names another layer. Its input, whatever the architecture, are the features. With
    `cuda_graph` an `Adapter` on a GPU records the module together with its own work, and replays
    both: for modules that do the same on every batch, whose launches keep the GPU waiting.

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
        self.module = _moved(module.eval(), device, channels_last)
        self.name = name or type(module).__name__
        self.head = head
        self.preprocessing = preprocessing
        self.bf16 = bf16
        self.channels_last = channels_last
        self.cuda_graph = cuda_graph
        self._named_head = head
        self._parts = tuple(module.modules())  # walked once: there are hundreds
        self._weight = next(module.parameters(), None)
        if head is not None and head not in dict(module.named_modules()):
            raise CasterError(f"{self.name} has no layer {head!r}: {_linear_layers(module)}")
        if preprocessing is not None and preprocessing.layout != "NCHW":
            raise CasterError(f"{self.name} is a torch module, and takes the layout NCHW")
        # Of every parameter and buffer, of the layers, and of a head named by hand.
        self.sha256 = _digest(self.module, head)

    def verify(self) -> None:
        """Raise if a parameter, a buffer or a layer is not what it was when wrapped."""
        if _digest(self.module, self._named_head) != self.sha256:
            raise CasterError(f"{self.name} was changed while it was in use: it is not frozen")

    def __call__(self, batch: Any) -> Outputs:
        """Features and logits of a batch, on the module's device, in float32."""
        features, logits = self.run(batch)
        return Outputs(features.float(), logits.float())

    def run(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Features and logits as the module gives them, in bf16 if it computes in that."""
        batch = self.placed(batch)
        # A recording must not read copies of weights that autocast keeps, and then lets go.
        autocast = torch.autocast(
            self.device.type, torch.bfloat16, self.bf16, cache_enabled=not self.cuda_graph
        )
        with torch.inference_mode(), autocast:
            if self.head is None:
                self.head = _find_head(self.module, batch, self.name)
            with _input_of(self.module.get_submodule(self.head)) as inputs:
                logits = _logits(self.module(batch), self.name)
            if not inputs:
                raise CasterError(f"{self.name} answered without using its layer {self.head!r}")
            return _rows(inputs[-1], self.head), logits

    def placed(self, batch: Any) -> Tensor:
        """A batch as the module takes it, beside the module, which must be in eval mode."""
        if any(map(_TRAINING, self._parts)):
            raise CasterError(f"{self.name} was put into training mode: call eval() on it")
        if isinstance(batch, np.ndarray) and not batch.flags.writeable:
            batch = batch.copy()  # torch warns of memory it may not write to
        given = torch.as_tensor(batch)
        if given.ndim == 0 or len(given) == 0:
            raise CasterError(f"a batch for {self.name} must hold at least one sample")
        # Pinned memory would let this copy overlap; arrays from elsewhere are not pinned.
        placed = given.to(self.device, non_blocking=True)
        if self.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed

    def values(self) -> list[Tensor]:
        """Every parameter and buffer, where it is now."""
        return [value.detach() for value in (*self.module.parameters(), *self.module.buffers())]

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return torch.device("cpu") if self._weight is None else self._weight.device


def _moved(module: nn.Module, device: str | None, channels_last: bool) -> nn.Module:
    try:
        module = module if device is None else module.to(device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise CasterError(f"the model cannot be moved to {device!r}: {line}") from None
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


@contextmanager
def _input_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What a layer is given while the block runs."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def _find_head(module: nn.Module, batch: Tensor, name: str) -> str:
    """Name of the Linear layer that yields the logits of a batch."""
    outputs: list[tuple[str, Tensor]] = []
    with ExitStack() as hooks:
        for layer_name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                handle = layer.register_forward_hook(_noting(outputs, layer_name))
                hooks.callback(handle.remove)
        logits = _logits(module(batch), name)
    for layer_name, output in reversed(outputs):
        if output.shape == logits.shape and torch.equal(output, logits):
            return layer_name
    raise CasterError(
        f"{name} does not return the output of a Linear layer as it is: name its classifier "
        f"with head=; {_linear_layers(module)}"
    )


def _noting(outputs: list[tuple[str, Tensor]], name: str) -> Any:
    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append((name, output))

    return note


def _linear_layers(module: nn.Module) -> str:
    """The last few Linear layers in words, for a message."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return f"its last Linear layers are {', '.join(names[-3:])}" if names else "it has no Linear"


def _logits(returned: Any, name: str) -> Tensor:
    """The logits a module returns: a tensor, or what transformers wraps them in."""
    logits = getattr(returned, "logits", returned)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CasterError(f"{name} must return logits (samples, classes), not {shape}")
    return logits


def _rows(features: Tensor, head: str) -> Tensor:  # (B, d) or (B, d, 1, 1) -> (B, d)
    if features.ndim == 4 and features.shape[2:] == (1, 1):
        features = features.flatten(1)
    if features.ndim != 2:
        raise CasterError(
            f"the input of {head!r} is {tuple(features.shape)}, not (samples, features): "
            "name a layer after the pooling with head="
        )
    return features


def _digest(module: nn.Module, head: str | None) -> str:
    """SHA-256 over layers and their settings, parameters, and buffers, stored ones or not."""
    digest = hashlib.sha256(f"head {head}".encode())
    for name, layer in module.named_modules():
        digest.update(f"{name} {type(layer).__name__}({layer.extra_repr()})\n".encode())
    for values in (module.named_parameters(), module.named_buffers()):
        for name, value in values:
            plain = value.detach().cpu().contiguous()
            digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
