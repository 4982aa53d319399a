"""Features as tensors, and the frozen model's linear classifier on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from caster.core.arrays import to_numpy
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.network import gradients
from caster_bench.methods.protocol import nbytes
from caster_bench.methods.source import Source, class_columns

HEAD_TOLERANCE = 0.05  # of the largest logit: far above bf16 rounding, far below another layer


def as_tensor(array: Any) -> Tensor:
    """Convert an array to a tensor on its device, without a copy if torch can read it.

    >>> as_tensor(np.zeros(2, np.float32)).dtype
    torch.float32
    """
    if isinstance(array, Tensor):
        return array.detach()
    return torch.from_numpy(np.require(to_numpy(array), requirements=["C", "W"]))


def finite_features(outputs: Outputs, name: str) -> Tensor:  # (B, d)
    """A batch's features; non-finite ones are rejected, since some methods would store them."""
    features = as_tensor(outputs.features)
    if not bool(features.isfinite().all()):
        raise CasterError(f"{name} got features with NaN or infinity")
    return features


@contextmanager
def full_precision(features: Tensor) -> Iterator[None]:
    """Compute in the features' own precision without gradients, regardless of the caller's mode."""
    with gradients(False), torch.autocast(features.device.type, enabled=False):
        yield


@runtime_checkable
class HasLinearHead(Protocol):
    """A model with a readable linear classifier."""

    def linear_head(self) -> tuple[Array, Array] | None:  # (n, d), (n,)
        """Weight and bias such that logits = features @ weight.T + bias.

        None until the head has been found. Raises if the head is not linear.
        """
        ...


class LinearHead:
    """Weight and bias of the frozen classifier, on the device and in the dtype of the features.

    A torch module shows its classifier only after the first batch, so they are read on the first
    call. They are then checked against that batch's logits, since a layer named by the user need
    not be the last one.

    >>> from caster import wrap
    >>> model = wrap(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2)))
    >>> weight, bias = LinearHead(model, Source(), "example")(model(torch.ones(1, 3)))
    >>> weight.shape, bias.shape
    (torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(self, model: FrozenModel, source: Source, name: str) -> None:
        if not isinstance(model, HasLinearHead):
            raise CasterError(
                f"{name} needs the weights of a linear classifier, which {model.name} does not show"
            )
        self.columns = class_columns(source, name)
        self._model: Any = model
        self._name = name
        self._cache: dict[Any, tuple[Tensor, Tensor]] = {}
        model.linear_head()  # fail early

    def __call__(self, outputs: Outputs) -> tuple[Tensor, Tensor]:  # (C, d), (C,)
        """Weight and bias that gave these outputs."""
        features = as_tensor(outputs.features)
        key = features.device, features.dtype
        if key not in self._cache:
            self._cache[key] = self._read(outputs, features)
        return self._cache[key]

    def logits(self, outputs: Outputs) -> Tensor:  # (B, C)
        """The model's own logits of the state's classes."""
        if outputs.logits is None:
            raise CasterError(f"{self._name} needs the logits of {self._model.name}")
        return as_tensor(self.columns(outputs.logits))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache out of pickles."""
        return vars(self) | {"_cache": {}}

    def nbytes(self) -> int:
        """Bytes of copies: the weights of a torch module are usually shared with it."""
        shared = {value.data_ptr() for value in getattr(self._model, "values", tuple)()}
        parts = (part for pair in self._cache.values() for part in pair)
        return nbytes(*(part for part in parts if part.data_ptr() not in shared))

    def _read(self, outputs: Outputs, features: Tensor) -> tuple[Tensor, Tensor]:
        head = self._model.linear_head()
        if head is None:
            raise CasterError(
                f"{self._model.name} has not shown its classifier yet: run a batch through it, "
                "or name it with {argument}",
                argument="head",
            )
        weight, bias = (as_tensor(part).to(features) for part in head)
        logits = self.logits(outputs).to(features)
        weight, bias = self.columns(weight.T).T, self.columns(bias[None])[0]
        error = (features @ weight.T + bias - logits).abs().max()
        if bool(error > HEAD_TOLERANCE * logits.abs().max()):
            raise CasterError(
                f"{self._name} needs the classifier's own output as logits, and those of "
                f"{self._model.name} differ from it: name its last layer with {{argument}}",
                argument="head",
            )
        return weight, bias
