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
            self._words, self._bits = _words(self._module), _bits(self._module)
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
        if _words(self._module) != self._words:
            return False
        import torch

        return all(map(torch.equal, _bits(self._module), self._bits))


def _words(module: Any) -> list[tuple[Any, ...]]:
    """What the layers say of themselves, and of what kind their values are."""
    layers = module.named_modules()
    values = (*module.named_parameters(), *module.named_buffers())
    return [
        *((name, type(layer).__name__, layer.extra_repr()) for name, layer in layers),
        *((name, value.dtype, value.shape, value.device) for name, value in values),
    ]


def _bits(module: Any) -> list[Tensor]:
    """Parameters and buffers end to end, as whole numbers: a NaN is itself, and -0 is not 0.

    Hundreds of small tensors would each be waited for.
    """
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found: dict[tuple[Any, Any], list[Tensor]] = {}
    for value in (*module.parameters(), *module.buffers()):
        kind = whole.get(value.element_size(), value.dtype)
        flat = value.detach().reshape(-1).view(kind)
        found.setdefault((kind, value.device), []).append(flat)
    return [torch.cat(values) for values in found.values()]
