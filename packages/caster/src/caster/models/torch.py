"""A torch module as a frozen model: its classifier found, its input captured, nothing changed."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from operator import attrgetter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from caster.errors import CasterError
from caster.models.modules import (
    HOOKS,
    answer_of,
    as_rows,
    digest_of,
    drop_hooks,
    find_head,
    forward_hooks,
    input_of,
    is_captured,
    is_from_torch,
    linear_layers,
    logits_of,
    plain_name,
    settings_of,
    uncompiled,
)
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import Outputs

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
        self._parts = tuple(module.modules())  # walked once: there are hundreds
        self._weight = next(module.parameters(), None)
        if head is not None and head not in dict(module.named_modules()):
            raise CasterError(f"{self.name} has no layer {head!r}: {linear_layers(module)}")
        if preprocessing is not None and preprocessing.layout != "NCHW":
            raise CasterError(f"{self.name} is a torch module, and takes the layout NCHW")
        self._content = digest_of(self.module)
        # With attributes that a module may change as it works, so not what `verify` looks at.
        identity = f"head {head}\n{settings_of(self.module)}\n{self._content}"
        self.sha256 = hashlib.sha256(identity.encode()).hexdigest()

    def __repr__(self) -> str:
        head = "not found yet" if self.head is None else repr(self.head)
        return f"TorchModel({self.name!r}, head={head}, device={str(self.device)!r})"

    def verify(self) -> None:
        """Raise if a parameter, a buffer or a layer is not what it was when wrapped."""
        if digest_of(self.module) != self._content:
            raise CasterError(f"{self.name} was changed while it was in use: it is not frozen")

    def __call__(self, batch: Any) -> Outputs:
        """Features and logits of a batch, on the module's device, in float32."""
        features, logits = self.run(batch)
        return Outputs(features.float(), logits.float())

    def run(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Features and logits as the module gives them, in bf16 if it computes in that."""
        return self.run_placed(self.placed(batch))

    def run_placed(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a batch that is placed."""
        # A recording must not read copies of weights that autocast keeps, and then lets go.
        autocast = torch.autocast(
            self.device.type, torch.bfloat16, self.bf16, cache_enabled=not self.cuda_graph
        )
        with torch.inference_mode(), autocast:
            if self.head is None:
                self.head, given, logits = find_head(self.module, self._answer, batch, self.name)
                return as_rows(given, self.head), logits
            with input_of(self.module.get_submodule(self.head)) as inputs:
                logits = logits_of(self._answer(batch), self.name)
            if not inputs:
                raise CasterError(f"{self.name} answered without using its layer {self.head!r}")
            return as_rows(inputs[-1], self.head), logits

    def placed(self, batch: Any) -> Tensor:
        """A batch as the module takes it, beside the module, which must be in eval mode."""
        if any(map(_TRAINING, self._parts)):
            raise CasterError(f"{self.name} was put into training mode: call eval() on it")
        if isinstance(batch, np.ndarray) and not batch.flags.writeable:
            batch = batch.copy()  # torch warns of memory it may not write to
        try:
            given = torch.as_tensor(batch)
        except (TypeError, ValueError, RuntimeError) as error:  # no array, or of an odd kind
            raise CasterError(f"a batch for {self.name} must be an array: {error}") from None
        if given.ndim == 0 or len(given) == 0:
            raise CasterError(f"a batch for {self.name} must hold at least one sample")
        # Pinned memory would let this copy overlap; arrays from elsewhere are not pinned.
        placed = given.to(self.device, self._dtype_for(given), non_blocking=True)
        if self.channels_last and placed.ndim == 4:
            placed = placed.contiguous(memory_format=torch.channels_last)
        return placed

    def _dtype_for(self, given: Tensor) -> torch.dtype:
        """NumPy's float64 is nobody's wish, and torch refuses it to float32 weights."""
        weight = self._weight
        both_real = weight is not None and given.is_floating_point() and weight.is_floating_point()
        return weight.dtype if weight is not None and both_real else given.dtype

    def _answer(self, batch: Tensor) -> Any:
        return answer_of(self.module, batch, self.name)

    def linear_head(self) -> tuple[Tensor, Tensor] | None:  # (n, d), (n,)
        """Weight and bias of the classifier, in float32; None before the first batch found it."""
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
        """The same model with a module of its own, for hooks: every weight is shared, none copied.

        What torch.compile has wrapped is not compiled in it, and has its plain name. Forward hooks
        that the user registered are part of the model, since they may change what it answers: the
        twin calls them too, unless `user_hooks` is False, for a pass that is not over the data.

        >>> model = TorchModel(nn.Linear(2, 2))
        >>> other = model.twin()
        >>> other.module is model.module, other.module.weight is model.module.weight
        (False, True)
        """
        if any(isinstance(part, nn.DataParallel) for part in self._parts):
            raise CasterError(
                f"{self.name} is an nn.DataParallel, whose copies see a part of a batch each: wrap "
                "the module inside it"
            )
        shared: list[Any] = [*self.module.parameters(), *self.module.buffers()]
        try:
            with HOOKS:
                shared += _observers(self.module)
                module = copy.deepcopy(self.module, {id(value): value for value in shared})
        except (RuntimeError, TypeError, NotImplementedError) as error:
            line = str(error).splitlines()[0]
            raise CasterError(f"{self.name} cannot be copied: {line}") from error
        drop_hooks(
            module, lambda hook: is_captured(hook) or not (user_hooks or is_from_torch(hook))
        )
        twin = copy.copy(self)
        twin.module = uncompiled(module)
        twin._parts = tuple(twin.module.modules())
        twin.head = None if self.head is None else plain_name(self.head)
        return twin

    def values(self) -> list[Tensor]:
        """Every parameter and buffer, where it is now."""
        return [value.detach() for value in (*self.module.parameters(), *self.module.buffers())]

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return torch.device("cpu") if self._weight is None else self._weight.device


def _observers(module: nn.Module) -> list[Any]:
    """Return what a user's hooks write to: a recorder outside the module, which no copy replaces.

    A method of a layer is no such thing: its copy belongs to the copy of the layer.
    """
    hooks = [hook for hook in forward_hooks(module) if not is_from_torch(hook)]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return [owner for owner in owners if not isinstance(owner, nn.Module | partial)]


def _moved(module: nn.Module, device: str | None, channels_last: bool) -> nn.Module:
    try:
        module = module if device is None else module.to(device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise CasterError(f"the model cannot be moved to {device!r}: {line}") from None
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module
