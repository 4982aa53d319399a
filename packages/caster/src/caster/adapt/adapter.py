"""Adapter: answer batches and streams with a frozen model, adapted and with a verdict.

A batch takes one of two ways. With aligned layers, `LayerTransport` runs the model and judges the
result. With transported features, the model runs first and `Caster` adapts its features; on a GPU,
`begin` only launches that work, so that the next batch can overlap with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster import state as states
from caster.adapt.estimator import Caster
from caster.adapt.feature_transport import PendingAdaptation
from caster.adapt.feedback import Feedback
from caster.adapt.layer_passes import PLAIN, LayerSettings
from caster.core.adaptation import Adaptation
from caster.core.arrays import as_real_array
from caster.core.betting import ALPHA, BettingTest
from caster.core.linalg import Array, on_gpu
from caster.core.notebook import html_table
from caster.errors import CasterError
from caster.io import signed_tensors
from caster.io.signed_tensors import Key
from caster.models.batches import inputs_of
from caster.models.heads import Columns
from caster.models.protocol import (
    FrozenModel,
    Outputs,
    TorchLike,
    has_layers,
    preprocessing_sha256,
    runs_on_gpu,
)
from caster.state import State

if TYPE_CHECKING:
    from caster.adapt.layer_transport import LayerAnswer, LayerTransport
    from caster.models.cuda import GraphRunner

Mechanism = Literal["auto", "layers", "features"]
STREAM_FORMAT = "caster-stream 2"
HOST_WORK = 2**14  # C k^2 multiplications per sample, about two microseconds on a CPU

Recordable = tuple[Sequence[Array], object]  # outputs of recorded work, and the tensors it reads
StreamState = Mapping[str, NDArray[Any]]


class Adapter:
    """A frozen model that adapts to batches and returns a verdict with every answer.

    The state must have been fitted with this model and preprocessing: their digests are compared.
    `allow_other_model` and `allow_other_preprocessing` skip these checks.
    With a `key`, bytes or the path of a key file, the state file must be signed with it.

    Parameters
    ----------
    mechanism : "layers" aligns the layers inside the network, "features" transports the last
        features, as the paper does. "auto" aligns layers if the state has them and the model
        exposes them, and transports features otherwise.
    tau : largest accepted ratio; by default the mechanism's own.
    safeguards : False gates feature transport by the paper's certificate alone; see
        `Caster`.
    every : while the verdict is stable, compare with the frozen model in at least one of this many
        windows of 256 samples. In between, "layers" costs little more than the frozen model; such
        batches have the reason "rest" and no ratio. 1 compares every batch.

    Attributes
    ----------
    model : the frozen model.
    state : the source statistics fitted with it.
    mechanism : "layers" or "features".
    classes : the labels, in the order of the columns of all scores.
    head : column of the model's logits for every class; None if the model has other classes.
    clf : the fitted `Caster`, which adapts features.

    Examples
    --------
    >>> import numpy as np
    >>> import caster
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=600)
    >>> images = rng.normal(size=(600, 8)) + 6 * np.eye(3, 8)[labels]
    >>> model = caster.wrap(lambda batch: (batch, batch[:, :3]), version="example-1")
    >>> adapter = caster.fit(model, [(images, labels)])
    >>> out = adapter(1.5 * images[:64] + 2.0)
    >>> out.verdict.reason, bool(np.all(out.labels == labels[:64]))
    ('accepted', True)
    """

    def __init__(
        self,
        model: FrozenModel,
        state: State | str | os.PathLike[str],
        *,
        mechanism: Mechanism = "auto",
        tau: float | None = None,
        safeguards: bool = True,
        every: int = LayerSettings.every,
        allow_other_model: bool = False,
        allow_other_preprocessing: bool = False,
        key: Key | None = None,
    ) -> None:
        if not isinstance(state, State | str | os.PathLike):
            raise CasterError(
                f"the state must be a path or a State, not {type(state).__name__}: the model comes "
                "first, then its state"
            )
        if not isinstance(state, State):
            state = states.load(state, key)
        elif key is not None:
            raise CasterError("key verifies a state file, but this state is already in memory")
        check_frozen(model)
        model.verify()  # that the weights have not changed since the model was wrapped
        if not allow_other_model:
            state.check_model(model.sha256)
        if not allow_other_preprocessing:
            state.check_preprocessing(preprocessing_sha256(model))
        self.model, self.state = model, state
        self.classes, self.head = state.classes, state.head
        if not isinstance(every, int) or every < 1:
            raise CasterError(f"every must be 1 or more, not {every!r}")
        self.mechanism = _choose_mechanism(mechanism, model, state)
        feature_tau = tau if self.mechanism == "features" else None
        self.clf = configured(Caster.from_state(state), feature_tau, safeguards)
        self._columns = Columns(state.head)
        self._runners: dict[tuple[str, Any], GraphRunner] = {}  # model and adaptation, per GPU
        self._layers: LayerTransport | None = None
        if self.mechanism == "layers":
            self._layers = self._layer_transport(tau, every)
        self._lock = Lock()
        digest = bytes.fromhex(states.digest(state))  # a stream resumes only with the same state
        self._source_digest = np.frombuffer(digest, np.uint8)

    def _layer_transport(self, tau: float | None, every: int) -> LayerTransport:
        from caster.adapt.layer_transport import LayerTransport

        settings = LayerSettings() if self.state.has_class_moments else PLAIN
        settings = replace(settings, tau=settings.tau if tau is None else tau, every=every)
        model: Any = self.model
        found = LayerTransport(
            model, self.state.layers, self._columns, self.state.input_range, settings
        )
        if not found.sites:
            raise CasterError(
                f"{model.name} has none of the state's sites: set {{argument}} to features",
                argument="mechanism",
            )
        return found

    def __call__(self, batch: Any) -> Adaptation:
        """Adapt to one batch, independently of earlier ones.

        The batch must be preprocessed for the model. It may have the form that a DataLoader yields,
        `[x]`, `(x, y)` or `{"pixel_values": x}`; only the inputs are used.
        """
        if self._layers is None:
            return self._begin(inputs_of(batch))()
        with self._lock:  # serialise calls from several threads
            self._layers.reset()
            return self._labelled(self._layers(inputs_of(batch)))

    def stream(self, batches: Iterable[Any]) -> Iterator[Adaptation]:
        """Adapt to the batches of one stream, in order.

        On a GPU, the next batch is launched before the verdict of the previous one is read.

        >>> import caster
        >>> model = caster.wrap(lambda batch: batch, version="example-2")
        >>> adapter = caster.fit(model, [(np.array([[0.0], [1.0], [4.0], [5.0]]), [0, 0, 1, 1])])
        >>> batches = np.array([[0.5], [4.5]]), np.array([[3.9]])
        >>> [out.labels.tolist() for out in adapter.stream(batches)]
        [[0, 1], [1]]
        """
        stream = self.new_stream()
        if not runs_on_gpu(self.model):
            yield from map(stream, batches)
            return
        finish: Callable[[], Adaptation] | None = None
        for batch in batches:
            try:
                following = stream.begin(batch)
            except CasterError:
                if finish is not None:  # the previous batch still gets its answer
                    yield finish()
                raise
            if finish is not None:
                yield finish()
            finish = following
        if finish is not None:
            yield finish()

    def adapt(self, outputs: Outputs) -> Adaptation:
        """Adapt to outputs of the model by transporting their features."""
        if not isinstance(outputs, Outputs):
            raise CasterError(
                f"adapt takes Outputs of the model, not a {type(outputs).__name__}: for a "
                "batch of inputs, call the adapter or one of its streams"
            )
        return self._begin_from(outputs)()

    # --- feature transport: launched, then awaited -------------------------------------------

    def _begin(self, batch: Any) -> Callable[[], Adaptation]:
        """Launch a batch; the returned function waits for its answer."""
        model = self.model
        if not runs_on_gpu(model):
            return self._begin_from(model(batch))
        placed = model.placed(batch)
        if self._adapts_on_host:
            return self._begin_projected(self._run_on_gpu(model, placed, self._projected))
        return self._begin_on_gpu(model.device, lambda: self._run_on_gpu(model, placed))

    def _begin_from(self, outputs: Outputs) -> Callable[[], Adaptation]:
        if on_gpu(outputs.features):  # outputs of a function, which may use any CUDA stream
            made = (outputs.features, outputs.logits)[: 1 if outputs.logits is None else 2]
            if self._adapts_on_host:
                return self._begin_projected(self._projected(*made)[0])
            return self._begin_on_gpu(outputs.features.device, lambda: made)
        answer = self.clf.adapt(outputs.features, self.head_logits(outputs))
        return lambda: answer

    def _begin_on_gpu(
        self, device: Any, outputs: Callable[[], Sequence[Array]]
    ) -> Callable[[], Adaptation]:
        """Launch a model and the adaptation, which overlaps with the caller's next batch."""
        settings = self.clf.settings
        runner = self._runner("adaptation", device)
        (batch, *arrays), fetch = runner.run(outputs, self._work, settings, overlap=True)
        if batch.shape[0] == 1:
            fetch(batch)()
            answer = self.clf.adapt(batch, *arrays)
            return lambda: answer
        attempt = PendingAdaptation.of(arrays)
        evidence = fetch(attempt.proposal.evidence)
        return lambda: self.clf.transport.conclude(batch, attempt, evidence(), settings)

    def _work(self, features: Array, *rest: Array) -> tuple[list[Array], object]:
        """Adapt features and logits on the GPU; also return the tensors that this reads."""
        transport, settings = self.clf.transport, self.clf.settings
        batch = transport.checked(features)
        logits = self.head_logits(Outputs(batch, rest[0] if rest else None))
        if batch.shape[0] == 1:
            return [batch, *([] if logits is None else [logits])], ()
        attempt = transport.attempt(batch, logits, settings)
        active = transport.active(batch)
        return [batch, *attempt.arrays()], (active, active.roots(settings.lam))

    def _begin_projected(self, outputs: Sequence[Array]) -> Callable[[], Adaptation]:
        """Copy the outputs of `_projected` to the host; the returned function adapts there."""
        from caster.models import cuda

        batch, logits, numbers = outputs
        transport, settings = self.clf.transport, self.clf.settings
        if len(batch) == 1:  # too small for a map
            return lambda: self.clf.adapt(batch, logits)
        fetched = cuda.fetch(numbers)

        def finish() -> Adaptation:
            z, head = np.split(fetched(), [-len(self.classes)], axis=1)
            found = transport.attempt_projected(z.copy(), head.copy(), settings)
            evidence, scores, assigned, A, b, inverse, _, chosen = found.arrays()
            scores, A, b, inverse = cuda.send([scores, A, b, inverse], batch.device)
            assigned, chosen = cuda.send([assigned, chosen], batch.device)
            placed = PendingAdaptation.of(
                [evidence, scores, assigned, A, b, inverse, logits, chosen]
            )
            return transport.conclude(batch, placed, evidence, settings)

        return finish

    def _projected(self, features: Array, logits: Array | None = None) -> Recordable:
        """Compute features, logits, and what the host needs of them; also return the moments."""
        from caster.models.cuda import full_precision

        transport = self.clf.transport

        def project() -> list[Array]:
            batch = transport.checked(features)
            head = transport.checked_logits(self.head_logits(Outputs(batch, logits)), batch)
            z = transport.in_active_directions(batch)
            return [batch, head, array_namespace(z).concat([z, head], axis=1)]

        outputs = full_precision(project)()
        return outputs, transport.active(outputs[0])

    @property
    def _adapts_on_host(self) -> bool:
        """Whether the host adapts the features of a model on a GPU.

        Adaptation takes a GPU two hundred kernel launches, which delay the next batch of the
        network. With few classes, the otherwise idle host is faster.
        """
        per_sample = len(self.classes) * self.clf.transport.moments.rank**2
        return self.head is not None and per_sample <= HOST_WORK

    def _run_on_gpu(
        self,
        model: TorchLike,
        placed: Array,
        after: Callable[..., Recordable] | None = None,  # applied to features and logits
    ) -> Sequence[Array]:
        """Run a model on a GPU, in a CUDA graph if the model uses one."""

        def work(batch: Array) -> Recordable:
            outputs = model.run(batch)
            made, read = (outputs, None) if after is None else after(*outputs)
            return made, (model.values(), read)

        if not model.cuda_graph:
            outputs = model.run(placed)
            return outputs if after is None else after(*outputs)[0]
        runner = self._runner("model", model.device)
        return runner.run(lambda: (placed,), work, ("model", after))[0]

    def _runner(self, kind: str, device: Any) -> GraphRunner:
        from caster.models.cuda import GraphRunner

        found = self._runners.get((kind, device))
        if found is None:
            made = GraphRunner(device, first=kind == "model")
            found = self._runners.setdefault((kind, device), made)
        return found

    def head_logits(self, outputs: Outputs) -> Array | None:  # (B, C)
        """Select the logits of the state's classes, in their order; None without a head."""
        if self.head is None:
            return None
        if outputs.logits is None:
            raise CasterError(f"{self.model.name} gives no logits, and the state needs them")
        return self._columns(outputs.logits)

    # --- aligned layers --------------------------------------------------------------------------

    def _labelled(self, answer: LayerAnswer) -> Adaptation:
        """Convert the scores of aligned layers to labels."""
        labels = proposed = self._labels(answer.scores)
        if answer.adapted is not None and answer.adapted is not answer.scores:
            proposed = self._labels(answer.adapted)
        return Adaptation(
            labels,
            answer.scores,
            proposed,
            answer.adapted,
            answer.frozen,
            answer.verdict,
            mixture=answer.mixture,
            implausible=answer.implausible,
            features=answer.frozen_features,
        )

    def _labels(self, scores: Array) -> Array:
        scores = as_real_array(scores)
        return self.clf.transport.labels(array_namespace(scores).argmax(scores, axis=1))

    # --- streams, the state file, properties -----------------------------------------------------

    def new_stream(self, *, alpha: float = ALPHA) -> Stream:
        """Start an independent stream: one per client, camera or data set.

        `alpha` is the error rate of decisions by feedback; see `Stream.feedback`.
        """
        return Stream(self, alpha)

    def resume(self, state: StreamState | str | os.PathLike[str]) -> Stream:
        """Continue a stream from its `state()`, or from a file of `Stream.save`."""
        if isinstance(state, str | os.PathLike):
            kind, maker = "a saved stream", "Stream.save"
            state, _ = signed_tensors.read_format(state, kind, maker, STREAM_FORMAT)
        stream = Stream(self)
        stream._restore(state)
        return stream

    def save(self, path: str | os.PathLike[str], *, key: Key | None = None) -> None:
        """Write the state, bound to the model and its preprocessing; signed if a key is given."""
        states.save(self.state, path, key)

    @property
    def full_maps(self) -> int:
        """Number of sites with full maps, where there are enough samples for them."""
        return 0 if self._layers is None else self._layers.full_maps

    @property
    def method(self) -> str:
        """Name of the method that runs on this state, as listed by `caster methods`."""
        if self._layers is None:
            return "caster"
        return "mixture-transport" if self.settings.mixture else "layer-transport"

    @property
    def settings(self) -> Any:
        """The constants of the mechanism."""
        return self.clf.settings if self._layers is None else self._layers.settings

    def __repr__(self) -> str:
        return f"Adapter({self.model!r}, {self.state!r}, mechanism={self.mechanism!r})"

    def _repr_html_(self) -> str:
        rows = {"model": self.model.name, "mechanism": self.mechanism, **self.state.summary()}
        return html_table("Adapter", rows)


class Stream:
    """One stream of an `Adapter`, with running statistics of its own.

    `adapter.new_stream()` starts one. Only one thread at a time may use it.

    >>> import caster
    >>> model = caster.wrap(lambda batch: batch, version="example-2")
    >>> adapter = caster.fit(model, [(np.array([[0.0], [1.0], [4.0], [5.0]]), [0, 0, 1, 1])])
    >>> stream = adapter.new_stream()
    >>> stream(np.array([[0.5], [4.5]])).labels, stream.samples
    (array([0, 1]), 2)
    >>> adapter.resume(stream.state()).samples
    2
    """

    def __init__(self, adapter: Adapter, alpha: float = ALPHA) -> None:
        self.adapter = adapter
        self.samples = 0  # so far
        self._feedback = Feedback(alpha)
        layers = adapter._layers
        self._layers = None if layers is None else layers.new_stream()

    def __call__(self, batch: Any, outputs: Outputs | None = None) -> Adaptation:
        """Adapt to the next batch; pass the frozen model's `outputs` if already known.

        Feature transport then needs no batch: it may be None.
        """
        return self.begin(batch, outputs)()

    def begin(self, batch: Any, outputs: Outputs | None = None) -> Callable[[], Adaptation]:
        """Launch the next batch; the returned function waits for its answer.

        Call the returned functions in the order of the batches; called again, they return the same
        answer. On a GPU, launch a batch before you wait for the previous one, as `Adapter.stream`
        does.
        """
        adapter = self.adapter
        if self._layers is not None:
            aligned = self._layers.begin(inputs_of(batch), outputs)
            return cache(lambda: self._recorded(adapter._labelled(aligned())))
        if outputs is None:
            transported = adapter._begin(inputs_of(batch))
        else:
            transported = adapter._begin_from(outputs)
        return cache(lambda: self._recorded(transported()))

    def _recorded(self, out: Adaptation) -> Adaptation:
        """Number the samples of an answer, store it for feedback, and apply past feedback."""
        self._feedback.remember(out, self.samples)
        ids = np.arange(self.samples, self.samples + len(out.labels))
        self.samples += len(ids)
        return replace(self._apply_feedback(out), ids=ids)

    def _apply_feedback(self, out: Adaptation) -> Adaptation:
        """Choose the adapted or frozen answer by feedback, if the batch has both."""
        position = self.betting.position
        if position == "open" or out.adapted is None or out.frozen is None:
            return out
        accepted = position == "accepted"
        scores = out.adapted if accepted else out.frozen
        labels = out.proposed if accepted else self.adapter._labels(scores)
        verdict = replace(out.verdict, accepted=accepted, reason="feedback")
        return replace(out, labels=labels, scores=scores, verdict=verdict)

    def feedback(self, ids: Any, labels: Any) -> int:
        """Test with true labels, as they arrive, whether adapted answers beat frozen ones.

        `ids` are positions in the stream, as in `out.ids`, among the last 65,536 samples. A label
        counts if adapted and frozen answers differ and one of them is right: `out.disputed` marks
        the samples worth labelling. Once the labels show a benefit, adapted answers are used
        whatever the certificate says; once they show harm, frozen ones. The verdict's reason is
        then "feedback", and every batch is compared. Over the whole stream, either decision is
        wrong with probability at most `alpha`; docs/feedback.md states the conditions.

        Returns the number of labels that counted. Second labels of a sample are ignored, and so are
        labels of batches with the reason "rest": an adapter with `every=1` has none. An unknown id
        or label raises an error, and none of the labels counts.

        >>> import caster
        >>> x, y = np.array([[0.0], [1.0], [4.0], [5.0]]), [0, 0, 1, 1]
        >>> model = caster.wrap(lambda batch: batch, version="example-2")
        >>> stream = caster.fit(model, [(x, y)]).new_stream()
        >>> out = stream(np.array([[8.0], [9.0], [12.0], [13.0]]))  # shifted by 8
        >>> out.labels, out.ids[out.disputed]
        (array([1, 1, 1, 1]), array([0, 1]))
        >>> stream.feedback([0, 1], [0, 0]), stream.betting.wins
        (2, 2)
        """
        before = self.betting.position
        classes = self.adapter.classes
        informative = self._feedback.learn(ids, labels, classes, self.samples)
        if before == "open" != self.betting.position:
            self._schedule_comparisons()
        return informative

    @property
    def betting(self) -> BettingTest:
        """State of the test on labels: its position, wins and losses."""
        return self._feedback.test

    def _schedule_comparisons(self) -> None:
        """Compare every batch once feedback has decided, so that later labels can revoke it."""
        if self._layers is not None:
            every = self._layers.settings.every if self.betting.position == "open" else 1
            self._layers.compare_every(every)

    def reset(self) -> None:
        """Forget every batch and every label."""
        if self._layers is not None:
            self._layers.reset()  # first, because it raises if another thread uses the stream
        self.samples = 0
        self._feedback = Feedback(self.betting.alpha)
        self._schedule_comparisons()

    def state(self) -> dict[str, NDArray[Any]]:
        """The stream's memory as named NumPy arrays, to `resume` it exactly."""
        running = {} if self._layers is None else self._layers.state()
        return {
            **running,
            **self._feedback.state(),
            "samples": np.array(self.samples, np.int64),
            "source": self.adapter._source_digest,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, atomically, for `Adapter.resume`."""
        signed_tensors.write(self.state(), {"format": STREAM_FORMAT}, path)

    def _restore(self, state: StreamState) -> None:
        mechanism = self.adapter.mechanism
        problem = CasterError(f"this is not the state of a stream with mechanism={mechanism!r}")
        if "source" not in state or (self._layers is None) == ("certificate" in state):
            raise problem
        if not np.array_equal(state["source"], self.adapter._source_digest):
            raise CasterError("this stream belongs to another state: start a new one")
        try:
            self.samples = int(np.asarray(state["samples"]).item())
            if self.samples < 0:
                raise ValueError("negative number of samples")
            self._feedback.resume(state, self.samples, len(self.adapter.classes))
            self._schedule_comparisons()
            if self._layers is not None:
                self._layers.resume(state)
        except (KeyError, TypeError, ValueError):
            raise problem from None

    @property
    def sites(self) -> int | None:
        """Number of aligned sites, final after the first batch; None with mechanism "features"."""
        return None if self._layers is None else len(self._layers.aligned_sites)

    def __repr__(self) -> str:
        return f"Stream({self.samples:,} samples, mechanism={self.adapter.mechanism!r})"

    def _repr_html_(self) -> str:
        rows = {
            "samples so far": f"{self.samples:,}",
            "mechanism": self.adapter.mechanism,
            "decided by labels": "no" if self.betting.position == "open" else self.betting.position,
        }
        return html_table("Stream", rows)


def check_frozen(model: Any) -> None:
    """Raise an error unless this is a frozen model."""
    if hasattr(model, "new_stream"):
        name = getattr(model, "name", "an Adapter")
        raise CasterError(f"{name} adapts itself: call it, or pass the original model")
    if not hasattr(model, "verify"):
        raise CasterError(f"{type(model).__name__} is not a frozen model: use caster.wrap first")


def configured(clf: Caster, tau: float | None, safeguards: bool) -> Caster:
    """Copy the estimator with another threshold, or without safeguards, if requested."""
    changed = ({} if tau is None else {"tau": tau}) | ({} if safeguards else {"safeguards": False})
    if changed:
        clf = copy(clf).set_params(**changed)
    _ = clf.settings  # rejects a bad tau now
    return clf


def _choose_mechanism(
    mechanism: Mechanism, model: FrozenModel, state: State
) -> Literal["layers", "features"]:
    """Choose the mechanism; raise an error if the requested one is not available."""
    if mechanism not in ("auto", "layers", "features"):
        raise CasterError(f"mechanism is 'auto', 'layers' or 'features', not {mechanism!r}")
    problem = None
    if not has_layers(model):
        problem = (
            f"only the layers of a torch module or an ONNX file can be aligned, not {model.name}'s"
        )
    elif state.layers is None:
        problem = "the state has no layers: fit again with layers"
    elif state.head is None:
        problem = "aligned layers predict the model's own classes, and the state has others"
    if mechanism == "auto":
        return "layers" if problem is None else "features"
    if mechanism == "layers" and problem is not None:
        raise CasterError(problem)
    return mechanism
