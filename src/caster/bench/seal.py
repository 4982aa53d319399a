"""A frozen model beside a copy of its weights: whether anything has changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caster.bench.describe import weights_digest
from caster.errors import CasterError
from caster.frozen.protocol import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor


class Seal:
    """What a model was when it was sealed; from then on its own `verify` asks the seal.

    SHA-256 of the weights takes longer than many a method on a whole stream, and methods ask for
    it whenever they begin anew. It is taken once. After that, everything it is taken of is
    compared bit by bit with a copy on the same device.
    """

    def __init__(self, model: FrozenModel) -> None:
        self.name = model.name
        self.sha256 = weights_digest(model)
        self._module: Any = getattr(model, "module", None)
        self._verify = model.verify
        if self._module is not None:
            self._words = _words(self._module)
            self._values = {name: value.clone() for name, value in _values(self._module).items()}
            model.verify = self.verify  # type: ignore[method-assign]

    def verify(self) -> None:
        """Raise unless the model still is what was sealed."""
        if self._module is None:
            self._verify()
        elif not self.holds():
            raise CasterError(f"{self.name} was changed while it was in use: it is not frozen")

    def holds(self) -> bool:
        """Whether layers, parameters and buffers are what they were; of a file, `verify` tells."""
        if self._module is None:
            return True
        now = _values(self._module)
        return (
            _words(self._module) == self._words
            and list(now) == list(self._values)
            and all(_same_bits(value, self._values[name]) for name, value in now.items())
        )


def _words(module: Any) -> list[tuple[str, str, str]]:
    """What the layers say of themselves."""
    layers = module.named_modules()
    return [(name, type(layer).__name__, layer.extra_repr()) for name, layer in layers]


def _values(module: Any) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in named}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, in which a NaN is itself and -0 is not 0."""
    import torch

    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = whole.get(one.element_size(), one.dtype)
    return torch.equal(one.view(kind), other.view(kind))
