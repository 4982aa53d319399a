"""The interface of every frozen model: a batch in, features and logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from caster.core.linalg import Array
from caster.models.preprocessing import Preprocessing

SINGLE_IMAGE = "a single image needs a batch axis, x[None]"


@dataclass(frozen=True, eq=False)
class Outputs:
    """Output of a frozen model for one batch: the input of its classifier layer, and logits."""

    features: Array  # (B, d)
    logits: Array | None  # (B, n); None if the model has no classifier

    @property
    def columns(self) -> int | None:
        """Number n of the classifier's outputs."""
        return None if self.logits is None else int(self.logits.shape[1])


class FrozenModel(Protocol):
    """A model that is only ever run, never changed."""

    name: str  # for messages: a path, a timm name, a class
    preprocessing: Preprocessing | None  # None: the caller prepares the batches

    @property
    def sha256(self) -> str | None:
        """Digest of weights and graph; None if the model cannot be identified."""
        ...

    def __call__(self, batch: Any) -> Outputs:
        """Run the model on a preprocessed batch."""
        ...

    def verify(self) -> None:
        """Raise if the model has changed since it was wrapped."""
        ...


@runtime_checkable
class HasLinearHead(Protocol):
    """A model whose classifier weights can be read."""

    def linear_head(self) -> tuple[Array, Array] | None:  # (n, d), (n,)
        """Weight and bias with logits = features @ weight.T + bias; None until the head is found.

        Raises if the head is not linear.
        """
        ...


class TorchLike(FrozenModel, Protocol):
    """A torch module whose work can run on a CUDA stream and be recorded in a CUDA graph."""

    cuda_graph: bool

    @property
    def device(self) -> Any:
        """Current device of the module."""
        ...

    def placed(self, batch: Any) -> Array:
        """Convert a batch to the module's dtype, memory format and device."""
        ...

    def run(self, batch: Any) -> tuple[Array, Array]:
        """Features and logits in the precision the module computes in."""
        ...

    def values(self) -> list[Array]:
        """All parameters and buffers."""
        ...


def runs_on_gpu(model: FrozenModel) -> TypeGuard[TorchLike]:
    """Whether a model is a torch module on a GPU."""
    return getattr(getattr(model, "device", None), "type", None) == "cuda"


def preprocessing_sha256(model: FrozenModel) -> str | None:
    """Digest of a model's preprocessing; None if it has none."""
    return None if model.preprocessing is None else model.preprocessing.sha256


def error_line(error: BaseException, limit: int = 300) -> str:
    """The message of another library's error, on one line of limited length.

    >>> error_line(ValueError("two\\n  lines"))
    'two lines'
    """
    return " ".join(str(error).split())[:limit]


def has_layers(model: FrozenModel) -> bool:
    """Whether a model shows its layers: a torch module or an ONNX graph."""
    return hasattr(model, "twin") or hasattr(model, "session")
