"""What every frozen model is to the rest of caster: images in, features and logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from caster.core.linalg import Array
from caster.models.preprocessing import Preprocessing

SINGLE_IMAGE = "a single image needs a batch axis, x[None]"


@dataclass(frozen=True, eq=False)
class Outputs:
    """One batch through a frozen model: the input of its classifier layer, and its answer."""

    features: Array  # (B, d)
    logits: Array | None  # (B, n); None from a model without a classifier


class FrozenModel(Protocol):
    """A model that answers and never changes."""

    name: str  # for people: a path, a timm name, a class
    preprocessing: Preprocessing | None  # images to batches; None: the caller's own business

    @property
    def sha256(self) -> str | None:
        """Digest of weights and graph; None where a model cannot be told from another one."""
        ...

    def __call__(self, batch: Any) -> Outputs:
        """Answer a batch that is prepared as the model takes it."""
        ...

    def verify(self) -> None:
        """Raise unless the model still is what it was when it was wrapped."""
        ...


@runtime_checkable
class ShowsHead(Protocol):
    """A model whose classifier can be looked at."""

    def linear_head(self) -> tuple[Array, Array] | None:  # (n, d), (n,)
        """Weight and bias, so that logits = features @ weight.T + bias, or an error if it has none.

        None while the model does not know which of its layers the classifier is.
        """
        ...


class TorchLike(FrozenModel, Protocol):
    """A torch module, whose work can be put on a stream and recorded."""

    cuda_graph: bool

    @property
    def device(self) -> Any:
        """Where it is now."""
        ...

    def placed(self, batch: Any) -> Array:
        """A batch as the module takes it, beside the module."""
        ...

    def run(self, batch: Any) -> tuple[Array, Array]:
        """Features and logits in the precision they come in."""
        ...

    def values(self) -> list[Array]:
        """Every parameter and buffer."""
        ...


def runs_on_gpu(model: FrozenModel) -> TypeGuard[TorchLike]:
    """Whether a model is a torch module on a GPU."""
    return getattr(getattr(model, "device", None), "type", None) == "cuda"


def preprocessing_sha256(model: FrozenModel) -> str | None:
    """Digest of a model's preprocessing; None if it has none of its own."""
    return None if model.preprocessing is None else model.preprocessing.sha256
