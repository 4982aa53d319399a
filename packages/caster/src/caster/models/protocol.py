"""The interface that every frozen model implements: a batch in, features and logits out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing

SINGLE_IMAGE = (
    "a single image needs a batch axis, x[None]; `stream` takes batches, such as x.split(64)"
)


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of a frozen model for one batch: the input of its classifier layer and the logits."""

    features: Array  # (B, d)
    logits: Array | None  # (B, n); None if the model has no classifier

    @property
    def columns(self) -> int | None:
        """Number of logits n, or None if the model has no classifier."""
        return None if self.logits is None else int(self.logits.shape[1])


class FrozenModel(Protocol):
    """A model that is run but never modified."""

    name: str  # shown in messages: a path, a timm name or a class name
    preprocessing: Preprocessing | None  # None if the caller prepares the batches

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


class TorchLike(FrozenModel, Protocol):
    """A torch module that can run on its own CUDA stream and be captured in a CUDA graph."""

    cuda_graph: bool

    @property
    def device(self) -> Any:
        """Current device of the module."""
        ...

    def placed(self, batch: Any) -> Array:
        """Convert a batch to the module's dtype, memory format and device."""
        ...

    def run(self, batch: Any) -> tuple[Array, Array]:
        """Compute features and logits in the module's own precision."""
        ...

    def values(self) -> list[Array]:
        """List all parameters and buffers."""
        ...


def runs_on_gpu(model: FrozenModel) -> TypeGuard[TorchLike]:
    """Whether a model is a torch module on a GPU."""
    return getattr(getattr(model, "device", None), "type", None) == "cuda"


def preprocessing_sha256(model: FrozenModel) -> str | None:
    """Digest of a model's preprocessing; None if it has none."""
    return None if model.preprocessing is None else model.preprocessing.sha256


def error_line(error: BaseException, limit: int = 300) -> str:
    """Format an error of another library as one line of limited length.

    >>> error_line(ValueError("two\\n  lines"))
    'two lines'
    """
    return " ".join(str(error).split())[:limit]


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Prefix the messages of errors in the `with` block with the name of a model."""
    try:
        yield
    except CasterError as error:
        raise error.within(name) from None


def is_torch(model: object) -> bool:
    """Whether a model is a torch module."""
    return hasattr(model, "twin")


def has_layers(model: FrozenModel) -> bool:
    """Whether a model exposes its layers, as torch modules and ONNX graphs do."""
    return is_torch(model) or hasattr(model, "session")
