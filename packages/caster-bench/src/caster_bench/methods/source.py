"""What a method may know about the source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.fitting import fit
from caster.adapt.source_moments import pair
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import FrozenModel, preprocessing_sha256
from caster.state import State


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """Everything a method learns about the source; target labels never reach it.

    `batches` may be read several times: pass a list or another re-iterable, not a generator. Its
    labels are those of the state or, without a state, column numbers of the model's logits.

    >>> import numpy as np
    >>> Source(batches=[(np.zeros((2, 3)), [0, 1])]).state is None
    True
    """

    state: State | None = None
    batches: Iterable[Any] | None = field(default=None, repr=False)
    allow_other_model: bool = False  # accept a state of another model or preprocessing

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise CasterError(
                "source batches are read more than once: pass a list, not a generator"
            )

    @classmethod
    def fit(cls, model: FrozenModel, batches: Iterable[Any], **settings: Any) -> Self:
        """Fit a state to labelled batches with `caster.fit`, and keep both."""
        stored = list(batches) if isinstance(batches, Iterator) else batches
        return cls(
            state=fit(model, stored, **{"layers": False, "sketch": False} | settings).state,
            batches=stored,
        )

    @classmethod
    def of(cls, source: Source | State | str | os.PathLike[str] | None) -> Source:
        """Convert what `create` accepts: a source, a state, or the path of a state file."""
        if source is None or isinstance(source, Source):
            return source or Source()
        if isinstance(source, State):
            return Source(state=source)
        if isinstance(source, str | os.PathLike):
            return Source(state=states.load(source))
        raise CasterError(
            f"source must be a Source, a State or the path of its file, not "
            f"{type(source).__name__}: pass labelled batches as Source(batches=...)"
        )

    def check(self, model: FrozenModel) -> None:
        """Reject a state fitted with another model or preprocessing."""
        if not hasattr(model, "verify"):
            raise CasterError(
                f"{type(model).__name__} is not a frozen model: wrap it with caster.wrap"
            )
        model.verify()
        if self.state is not None and not self.allow_other_model:
            self.state.check_model(model.sha256)
            self.state.check_preprocessing(preprocessing_sha256(model))

    def require_state(self, name: str) -> State:
        """Return the state, or explain that method `name` needs one."""
        if self.state is None:
            raise CasterError(
                f"{name} needs a state: pass a file of `caster fit` or a State as {{argument}}",
                argument="source",
            )
        return self.state

    def labelled(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield the labelled batches, or explain that method `name` needs some."""
        empty = True
        for images, labels in map(pair, self.batches or ()):
            empty = False
            yield images, labels
        if empty:
            raise CasterError(
                f"{name} needs source images: pass Source(batches=...), a list of (images, labels) "
                "preprocessed for the model"
            )


def unguarded_adapter(model: FrozenModel, source: Source, name: str) -> Adapter:
    """The model with the source's state, for a method or gate that needs one.

    Safeguards are off: the comparison is with the paper's gate, on streams chosen to test it.
    """
    return Adapter(
        model,
        source.require_state(name),
        mechanism="features",
        safeguards=False,
        allow_other_model=source.allow_other_model,
        allow_other_preprocessing=source.allow_other_model,
    )


def moment_bytes(adapter: Adapter) -> int:
    """Bytes of a state's class moments, without its layer statistics."""
    sizes = dict(states.array_sizes(adapter.state))
    return sum(sizes[name] for name in states.ARRAYS)


def class_columns(source: Source, name: str) -> Columns:
    """Select the logits of the source's classes, for a method that works on the model's logits."""
    if source.state is not None and source.state.head is None:
        raise CasterError(f"{name} works on the model's own classes, but the state has others")
    return Columns(None if source.state is None else source.state.head)
