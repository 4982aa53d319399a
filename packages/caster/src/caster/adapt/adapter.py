"""Adapter: a frozen model and the state fitted with it, at work on batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from caster import state as states
from caster.adapt.adaptation import Adaptation, Attempt
from caster.adapt.estimator import Caster
from caster.adapt.fitting import inputs_of, pair
from caster.core.arrays import to_numpy
from caster.core.linalg import Array, on_gpu
from caster.errors import CasterError
from caster.io.labels import as_labels, unique_labels
from caster.io.sealed import Key
from caster.models.heads import Columns, head_columns, of_classes
from caster.models.protocol import (
    FrozenModel,
    Outputs,
    TorchLike,
    preprocessing_sha256,
    runs_on_gpu,
)
from caster.state import Layers, State

if TYPE_CHECKING:
    from caster.models.activation_statistics import ActivationStatistics


class Adapter:
    """A frozen model that answers with a verdict.

    The state must have been fitted with this very model and preprocessing: their digests are
    compared, and `allow_other_model` or `allow_other_preprocessing` say that you know better.
    With a `key`, bytes or the path of a key file, the state file must be signed with it.

    Attributes
    ----------
    model : the frozen model.
    state : what was fitted with it.
    clf : the fitted `Caster`.
    head : for every class the column of the model's logits; None if the model does not know
        these classes, and a refused batch gets Source-GDA's answer.

    Examples
    --------
    >>> import numpy as np
    >>> from caster import Adapter, wrap
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=600)
    >>> images = rng.normal(size=(600, 8)) + 6 * np.eye(3, 8)[labels]
    >>> model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> adapter = Adapter.fit(model, [(images, labels)])
    >>> adapter(1.5 * images[:64] + 2.0).verdict.reason
    'accepted'
    """

    def __init__(
        self,
        model: FrozenModel,
        state: State | str | os.PathLike[str],
        *,
        allow_other_model: bool = False,
        allow_other_preprocessing: bool = False,
        key: Key | None = None,
    ) -> None:
        if isinstance(state, State) and key is not None:
            raise CasterError("key verifies a state file, and this state is in memory already")
        held = state if isinstance(state, State) else states.load(state, key)
        model.verify()  # its digest was taken when it was wrapped
        if not allow_other_model:
            held.check_model(model.sha256)
        if not allow_other_preprocessing:
            held.check_preprocessing(preprocessing_sha256(model))
        self.model = model
        self.state = held
        self.clf = Caster.from_state(held)
        self.head = held.head
        self._columns = Columns(held.head)
        self._lanes: dict[Any, Any] = {}  # one a GPU

    def __repr__(self) -> str:
        return f"Adapter({self.model!r}, {self.state!r})"

    @classmethod
    def fit(
        cls,
        model: FrozenModel,
        batches: Iterable[Any],
        *,
        classes: Any = None,
        use_head: bool = True,
        layers: bool | Literal["full"] = False,
        **settings: Any,
    ) -> Self:
        """Fit source statistics from batches of (images, labels), each seen by the model once.

        A batch may also be a dict with "pixel_values" and "labels", as transformers has it.
        `classes` names the model's outputs in their order, where labels are neither their column
        numbers nor, sorted, as many as the columns. `use_head=False` says the model's outputs are
        other classes altogether. The features stay in memory while it fits; `caster fit --model`
        keeps them on disk. With `layers` the state also gets the moments of every site of a torch
        module, for layer transport; `layers="full"` adds the covariances of sites with few
        channels, for its full maps. `settings` are those of `Caster`.
        """
        chunks, columns = [], None
        if layers not in (False, True, "full"):
            raise CasterError(f"layers are True, False or 'full', not {layers!r}")
        statistics = activation_statistics_for(model, full=layers == "full") if layers else None
        for images, labels in map(pair, batches):
            outputs = (statistics or model)(images)
            logits = None if outputs.logits is None else to_numpy(outputs.logits)
            chunks.append((to_numpy(outputs.features), as_labels(labels), logits))
            columns = None if logits is None else int(logits.shape[1])
        if not chunks:
            raise CasterError("there are no batches to fit")
        known = unique_labels(as_labels(np.concatenate([labels for _, labels, _ in chunks])))
        head = head_columns(known, columns, classes) if use_head else None
        given = [
            (features, labels, *([] if head is None else [of_classes(logits, head)]))
            for features, labels, logits in chunks
        ]
        clf = Caster(**settings).fit_stream(given, known)
        if statistics is None:
            return cls(model, bound_state(clf, model, head))
        # A stated preprocessing says which values images have.
        ends = statistics.input_range if model.preprocessing is None else None
        return cls(model, bound_state(clf, model, head, statistics.moments(), ends))

    def __call__(self, batch: Any) -> Adaptation:
        """Adapt to one batch, prepared as the model takes it.

        It may come as a DataLoader yields it, `[x]`, `(x, y)` or `{"pixel_values": x}`: what is
        beside the inputs is ignored.
        """
        return self._start(batch)()

    def adapt(self, outputs: Outputs) -> Adaptation:
        """Adapt to a batch that the model has answered already."""
        return self._start_from(outputs)()

    def stream(self, batches: Iterable[Any]) -> Iterator[Adaptation]:
        """Adapt to batch after batch; on a GPU one batch's verdict is read during the next.

        >>> from caster import wrap
        >>> model = wrap(lambda batch: batch, version="example-2")
        >>> source = np.array([[0.0], [1.0], [4.0], [5.0]]), [0, 0, 1, 1]
        >>> adapter = Adapter.fit(model, [source])
        >>> batches = np.array([[0.5], [4.5]]), np.array([[3.9]])
        >>> [out.predictions.tolist() for out in adapter.stream(batches)]
        [[0, 1], [1]]
        """
        if not runs_on_gpu(self.model):  # nothing to overlap: no answer waits for the next batch
            yield from map(self, batches)
            return
        pending: list[Callable[[], Adaptation]] = []
        try:
            for batch in batches:
                pending.append(self._start(batch))
                if len(pending) > 1:
                    yield pending.pop(0)()
        except CasterError:  # of the later batch: the earlier one has its answer all the same
            yield from (finish() for finish in pending)
            raise
        yield from (finish() for finish in pending)

    def save(self, path: str | os.PathLike[str], *, key: Key | None = None) -> None:
        """Write the state, bound to the model and its preprocessing, and signed with a key."""
        self.clf.save(path, key=key)

    def head_logits(self, outputs: Outputs) -> Array | None:  # (B, C)
        """The model's logits of the state's classes, in their order; None without a head."""
        if self.head is None:
            return None
        if outputs.logits is None:
            raise CasterError(f"{self.model.name} gives no logits, and the state needs them")
        return self._columns(outputs.logits)

    def _start(self, batch: Any) -> Callable[[], Adaptation]:
        """Send a batch on its way; the function returned waits for its answer."""
        model, batch = self.model, inputs_of(batch)
        if not runs_on_gpu(model):
            return self._start_from(model(batch))
        if model.cuda_graph:
            work = partial(self._work_with, model)
            return self._start_on_gpu(model.device, lambda: (model.placed(batch),), work)
        return self._start_on_gpu(model.device, lambda: model.run(batch), self._work)

    def _start_from(self, outputs: Outputs) -> Callable[[], Adaptation]:
        if on_gpu(outputs.features):  # of a function, which may work on whatever stream it likes
            made = (outputs.features, outputs.logits)[: 1 if outputs.logits is None else 2]
            return self._start_on_gpu(outputs.features.device, lambda: made, self._work)
        answer = self.clf.adapt(outputs.features, self.head_logits(outputs))
        return lambda: answer

    def _start_on_gpu(
        self,
        device: Any,
        first: Callable[[], tuple[Array, ...]],  # what is not recorded; gives what `work` takes
        work: Callable[..., tuple[list[Array], object]],
    ) -> Callable[[], Adaptation]:
        from caster.models.cuda import Lane

        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes.setdefault(device, Lane(device))
        settings = self.clf.settings
        (batch, *arrays), fetch = lane.run(first, work, settings)
        if batch.shape[0] == 1:
            answer = self.clf.adapt(batch, *arrays)
            return lambda: answer
        attempt = Attempt.of(arrays)
        evidence = fetch(attempt.proposal.evidence)
        numeric = self.clf.classes_.dtype.kind in "biuf"  # labels that can stay on the device
        chosen = None if numeric else _fetch_choices(attempt, fetch)

        def finish() -> Adaptation:
            found = attempt if chosen is None else chosen()
            return self.clf.transporter.conclude(batch, found, evidence(), settings)

        return finish

    def _work(self, features: Array, *rest: Array) -> tuple[list[Array], object]:
        """What is recorded: from features and logits on; and what it reads."""
        transporter, settings = self.clf.transporter, self.clf.settings
        batch = transporter.checked(features)
        logits = self.head_logits(Outputs(batch, rest[0] if rest else None))
        if batch.shape[0] == 1:
            return [batch, *([] if logits is None else [logits])], ()
        attempt = transporter.attempt(batch, logits, settings)
        active = transporter.active(batch)
        return [batch, *attempt.arrays()], (active, active.roots(settings.lam))

    def _work_with(self, model: TorchLike, batch: Array) -> tuple[list[Array], object]:
        """What is recorded of a model that is recorded itself; it reads its weights too."""
        arrays, read_from = self._work(*model.run(batch))
        return arrays, (model.values(), read_from)


def _fetch_choices(attempt: Attempt, fetch: Callable[[Array], Any]) -> Callable[[], Attempt]:
    """Begin to copy class indices to the host, where labels that are no numbers are looked up."""
    assigned, chosen = fetch(attempt.proposal.assigned), fetch(attempt.chosen)

    def wait() -> Attempt:
        proposal = replace(attempt.proposal, assigned=assigned())
        return replace(attempt, proposal=proposal, chosen=chosen())

    return wait


def activation_statistics_for(
    model: FrozenModel, past: Layers | None = None, full: bool = False
) -> ActivationStatistics:
    """What measures a model's layers while it answers; `past` is what another one found before."""
    if not hasattr(model, "twin"):  # before torch, which may not be there
        raise CasterError(
            f"layers need a torch module, and {model.name} is not one: fit without {{argument}}",
            argument="layers",
        )
    from caster.models.activation_statistics import activation_statistics_of

    return activation_statistics_of(model, past, full)


def bound_state(
    clf: Caster,
    model: FrozenModel,
    head: tuple[int, ...] | None,
    layers: Layers | None = None,
    input_range: tuple[float, float] | None = None,
) -> State:
    """What an estimator was fitted to, bound to the model that made its features."""
    return State(
        clf.moments_,
        clf.classes_,
        clf.settings,
        model_sha256=model.sha256,
        preprocessing_sha256=preprocessing_sha256(model),
        head=head,
        layers=layers,
        input_range=input_range,
        source_check=clf.source_check_,
    )
