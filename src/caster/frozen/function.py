"""A Python function as a frozen model: an embedding service, say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from caster.errors import CasterError
from caster.frozen.preprocessing import Preprocessing
from caster.frozen.protocol import Outputs


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
        returned = self.function(batch)
        if isinstance(returned, Outputs):
            return returned
        features, logits = returned if isinstance(returned, tuple) else (returned, None)
        for what, array in (("features", features), ("logits", logits)):
            if array is not None and getattr(array, "shape", (None,))[0] != len(batch):
                shape = getattr(array, "shape", type(array).__name__)
                raise CasterError(
                    f"{self.name} must give {what} ({len(batch)}, width), an array, not {shape}"
                )
        return Outputs(features, logits)
