"""A Python function as a frozen model: an embedding service, say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from caster.core.arrays import as_real_array
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import SINGLE_IMAGE, Outputs


class FunctionModel:
    """A function that gives features, features and logits, or `Outputs`, for a batch.

    Nobody can look inside it: `version` is what the provider calls the model, and what binds a
    state to it.

    >>> import numpy as np
    >>> model = FunctionModel(lambda batch: batch.mean(axis=(2, 3)), version="embeddings-3")
    >>> model(np.ones((2, 3, 4, 4))).features.shape
    (2, 3)
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        version: str | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.version = version
        self.preprocessing = preprocessing

    def __repr__(self) -> str:
        return f"FunctionModel({self.name!r}, version={self.version!r})"

    @property
    def sha256(self) -> str | None:
        """Digest of the stated version; None if none was stated."""
        if self.version is None:
            return None
        return hashlib.sha256(f"version {self.version}".encode()).hexdigest()

    def verify(self) -> None:
        """Nothing: a function's insides are its own."""

    def __call__(self, batch: Any) -> Outputs:
        """What the function makes of a batch."""
        if self.preprocessing is not None and getattr(batch, "ndim", 4) == 3:
            raise CasterError(f"{self.name} takes images in batches: {SINGLE_IMAGE}")
        returned = self.function(batch)
        if isinstance(returned, Outputs):
            returned = (returned.features, returned.logits)
        pair = isinstance(returned, tuple) and len(returned) == 2
        features, logits = returned if pair else (returned, None)
        rows = len(batch)
        return Outputs(
            self._checked("features", features, rows),
            None if logits is None else self._checked("logits", logits, rows),
        )

    def _checked(self, what: str, array: Any, rows: int) -> Array:  # (B, width)
        shape = getattr(array, "shape", type(array).__name__)
        if len(shape) != 2 or shape[0] != rows:
            raise CasterError(
                f"{self.name} must give {what} as an array ({rows}, width), not {shape}"
            )
        return as_real_array(array)
