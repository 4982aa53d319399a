"""A Python function, such as a call to an embedding service, as a frozen model."""

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
    """A function that returns features, (features, logits) or `Outputs` for a batch.

    Its weights cannot be read, so a state is bound to `version`, the provider's name for the model.

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
        """Digest of the version, or None if no version was given."""
        if self.version is None:
            return None
        return hashlib.sha256(f"version {self.version}".encode()).hexdigest()

    def verify(self) -> None:
        """Do nothing: a function cannot be checked."""

    def __call__(self, batch: Any) -> Outputs:
        """Call the function on a batch."""
        if self.preprocessing is not None and getattr(batch, "ndim", 4) == 3:
            raise CasterError(f"{self.name} takes batches of images: {SINGLE_IMAGE}")
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
                f"{self.name} must return {what} as an array ({rows}, width), not {shape}"
            )
        return as_real_array(array)
