"""A frozen model beside a copy of its weights: whether anything has changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caster.errors import CasterError
from caster.models.protocol import FrozenModel
from caster_bench.engine.describe import weights_digest

if TYPE_CHECKING:
    from torch import Tensor


class WeightGuard:
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
            self._values = [value.clone() for value in _values(self._module)]
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
        return _words(self._module) == self._words and _same_bits(
            _values(self._module), self._values
        )


def _words(module: Any) -> list[tuple[Any, ...]]:
    """What the layers say of themselves, and of what kind their values are."""
    layers = module.named_modules()
    values = (*module.named_parameters(), *module.named_buffers())
    return [
        *((name, type(layer).__name__, layer.extra_repr()) for name, layer in layers),
        *((name, value.dtype, value.shape, value.device) for name, value in values),
    ]


def _values(module: Any) -> list[Tensor]:
    return [value.detach() for value in (*module.parameters(), *module.buffers())]


def _same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether tensors of the same kinds are the same: a NaN is itself, and -0 is not 0.

    The device is waited for once, not for each of hundreds of small tensors.
    """
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    differ = []
    for one, other in zip(ours, theirs, strict=True):
        kind = whole.get(one.element_size(), one.dtype)
        differ.append((one.view(kind) != other.view(kind)).any())
    return not any(torch.stack(differ).tolist()) if differ else True
