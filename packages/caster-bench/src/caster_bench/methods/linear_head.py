"""The weights of a frozen model's linear classifier, for methods that work with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from caster.adapt.protocol import nbytes
from caster.adapt.source import Source, columns_of
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs, ShowsHead
from caster_bench.methods.tensors import as_tensor

AGREEMENT = 0.05  # of the largest logit: far above what bf16 rounds, far below another layer


class LinearHead:
    """Weight and bias of the classes at hand, beside a batch's features.

    A torch module shows its classifier with the first batch only: so these are read on the first
    call. They are then held against that batch's logits, once, since a layer named by hand need
    not be the last one.

    >>> import torch
    >>> from caster import wrap
    >>> model = wrap(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2)))
    >>> weight, bias = LinearHead(model, Source(), "example")(model(torch.ones(1, 3)))
    >>> weight.shape, bias.shape
    (torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(self, model: FrozenModel, source: Source, name: str) -> None:
        if not isinstance(model, ShowsHead):
            raise CasterError(
                f"{name} needs the weights of a linear classifier, and {model.name} shows none"
            )
        self.columns = columns_of(source, name)
        self._model: Any = model
        self._name = name
        self._placed: dict[Any, tuple[Tensor, Tensor]] = {}
        model.linear_head()  # what can be refused is refused now

    def __call__(self, outputs: Outputs) -> tuple[Tensor, Tensor]:  # (C, d), (C,)
        """The head that gave these outputs."""
        features = as_tensor(outputs.features)
        place = features.device, features.dtype
        if place not in self._placed:
            self._placed[place] = self._read(outputs, features)
        return self._placed[place]

    def logits(self, outputs: Outputs) -> Tensor:  # (B, C)
        """The model's own logits of the classes at hand."""
        if outputs.logits is None:
            raise CasterError(f"{self._name} needs the logits of {self._model.name}")
        return as_tensor(self.columns(outputs.logits))

    def __getstate__(self) -> dict[str, Any]:
        """Pickles leave out what the model shows again."""
        return vars(self) | {"_placed": {}}

    def nbytes(self) -> int:
        """Bytes of copies: the weights of a torch module are usually its own."""
        own = {value.data_ptr() for value in getattr(self._model, "values", tuple)()}
        parts = (part for placed in self._placed.values() for part in placed)
        return nbytes(*(part for part in parts if part.data_ptr() not in own))

    def _read(self, outputs: Outputs, features: Tensor) -> tuple[Tensor, Tensor]:
        shown = self._model.linear_head()
        if shown is None:
            raise CasterError(
                f"{self._model.name} has not shown its classifier yet: run a batch through it, "
                "or name it with {argument}",
                argument="head",
            )
        weight, bias = (as_tensor(part).to(features) for part in shown)
        given = self.logits(outputs).to(features)
        weight, bias = self.columns(weight.T).T, self.columns(bias[None])[0]
        off = (features @ weight.T + bias - given).abs().max()
        if bool(off > AGREEMENT * given.abs().max()):
            raise CasterError(
                f"{self._name} needs logits that are the classifier's output as it is, and "
                f"those of {self._model.name} are not: name its last layer with {{argument}}",
                argument="head",
            )
        return weight, bias
