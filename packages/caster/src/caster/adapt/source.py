"""What a method may know of the source, and which of a model's logits are its classes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.fitting import pair
from caster.adapt.protocol import Retained
from caster.errors import CasterError
from caster.models.heads import Columns
from caster.models.protocol import FrozenModel, preprocessing_sha256
from caster.state import State

GIVE_BATCHES = "give Source(batches=...), a list of (images, labels) as the model takes them"


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """All that a method learns of the source: nothing else reaches it, target labels least of all.

    `batches` is read as often as a method needs, so a list or another iterable that can be read
    again, not a generator. Labels in it are those of the state, or without a state the numbers of
    the model's logits.

    >>> import numpy as np
    >>> Source(batches=[(np.zeros((2, 3)), [0, 1])]).state is None
    True
    """

    state: State | None = None
    batches: Iterable[Any] | None = field(default=None, repr=False)
    allow_other_model: bool = False  # a state of another model or preprocessing

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise CasterError(
                "source batches are read more than once: give a list, not a generator"
            )

    @classmethod
    def fit(cls, model: FrozenModel, batches: Iterable[Any], **settings: Any) -> Self:
        """The source of labelled batches, with the state `Adapter.fit` makes of them."""
        held = list(batches) if isinstance(batches, Iterator) else batches
        return cls(state=Adapter.fit(model, held, **settings).state, batches=held)

    @classmethod
    def of(cls, given: Source | State | str | os.PathLike[str] | None) -> Source:
        """A source from what `create` is given: a source, a state, or its file."""
        if given is None or isinstance(given, Source):
            return given or Source()
        if isinstance(given, State):
            return Source(state=given)
        if isinstance(given, str | os.PathLike):
            return Source(state=states.load(given))
        raise CasterError(
            f"source is a Source, a State or the path of its file, not {type(given).__name__}: "
            "labelled batches are Source(batches=...)"
        )

    def check(self, model: FrozenModel) -> None:
        """Refuse a state that another model or preprocessing was fitted with."""
        if not hasattr(model, "verify"):
            raise CasterError(f"{type(model).__name__} is no frozen model: give caster.wrap of it")
        model.verify()
        if self.state is not None and not self.allow_other_model:
            self.state.check_model(model.sha256)
            self.state.check_preprocessing(preprocessing_sha256(model))

    def require_state(self, name: str) -> State:
        """The state, which a method cannot do without."""
        if self.state is None:
            raise CasterError(
                f"{name} needs a state: give source=, a file of `caster fit` or a State"
            )
        return self.state

    def labelled(self, name: str) -> Iterator[tuple[Any, Any]]:
        """The batches, which a method cannot do without."""
        empty = True
        for images, labels in map(pair, self.batches or ()):
            empty = False
            yield images, labels
        if empty:
            raise CasterError(f"{name} needs source images: {GIVE_BATCHES}")


def adapter_of(model: FrozenModel, source: Source, name: str) -> Adapter:
    """The model with the source's state, for a method or gate that cannot do without.

    Safeguards are off: a comparison is with the paper's gate, on streams chosen to try it.
    """
    adapter = Adapter(
        model,
        source.require_state(name),
        allow_other_model=source.allow_other_model,
        allow_other_preprocessing=source.allow_other_model,
    )
    adapter.clf.set_params(safeguards=False)
    return adapter


def moments_of(adapter: Adapter) -> Retained:
    """What a method that works with a state's class moments retains: no layers."""
    sizes = dict(states.array_sizes(adapter.state))
    return Retained(statistics=sum(sizes[name] for name in states.ARRAYS))


def columns_of(source: Source, name: str) -> Columns:
    """The model's logits of a source's classes, for a method that works on those logits."""
    if source.state is not None and source.state.head is None:
        raise CasterError(f"{name} works on the model's own classes, and the state's are others")
    return Columns(None if source.state is None else source.state.head)
