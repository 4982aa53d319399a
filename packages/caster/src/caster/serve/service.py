"""What the server does with a request, whatever protocol it came by.

A request is checked on the event loop and queued. The worker thread runs the model and owns the
streams; it answers the requests of a batch together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from caster.adapt.adapter import Adapter
from caster.core.adaptation import Adaptation, classes_of
from caster.core.arrays import to_numpy
from caster.core.betting import BettingTest
from caster.core.verdict import FROZEN, Verdict
from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import error_line
from caster.serve.batcher import Batcher, InferAnswer, InferRequest, Outcome, Waiting
from caster.serve.server_metrics import Metrics
from caster.serve.streams import ServedStream, StreamStore, count_batches, split
from caster.serve.tensors import Failure, RequestError, Tensor, Tensors, datatype_of

NEXT = "next."  # of a state tensor among the outputs, as in compiled graphs
FEEDBACK = {"ids", "labels"}  # inputs of a request that brings labels
NO_POSITION = -1  # of samples that are not part of their stream

logger = logging.getLogger(__name__)


class OnAnswer(Protocol):
    """Called on the worker thread after every batch of a stream; `position` is of its first sample.

    If it raises an OSError or a CasterError, the server treats it like a full disk.
    """

    def __call__(self, stream_id: str, adaptation: Adaptation, position: int) -> None:
        """Take the answer."""


# Called on the worker thread after labels have come: stream, ids, labels, and the test on them.
OnFeedback = Callable[[str, Any, Any, BettingTest], None]


class Service:
    """One model with its streams, behind a queue."""

    def __init__(
        self,
        adapter: Adapter,
        store: StreamStore,
        *,
        name: str,
        batch: int,  # samples up to which requests of a stream are joined
        wait: float,  # seconds that a request may wait for others to join it
        queue: int,  # requests that may wait
        verify_seconds: float,  # between checks of the weights
        frozen: bool = False,  # answer with the frozen model only
        on_answer: OnAnswer | None = None,
        on_feedback: OnFeedback | None = None,
    ) -> None:
        self.adapter, self.name, self.metrics = adapter, name, Metrics()
        self.input_name, self.input_shape, self.input_dtype = _signature(adapter.model)
        self.label_datatype = datatype_of(_label_dtype(adapter.classes.dtype))
        self.broken: str | None = None  # why the model cannot be used
        self._store, self._frozen = store, frozen
        self._on_answer, self._on_feedback = on_answer, on_feedback
        self._verify_seconds = verify_seconds
        self._batcher = batcher = Batcher(self._run, batch=batch, wait=wait, limit=queue)
        self.metrics.watch(
            streams_in_memory=lambda: len(store),
            queued_requests=lambda: batcher.waiting,
            ready=lambda: self.broken is None,
            degraded=lambda: store.problem is not None,
            snapshots=lambda: store.snapshots,
        )

    def signature(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Inputs and outputs, as the protocol describes them."""
        outputs = [
            ("labels", self.label_datatype, [-1]),
            ("probabilities", "FP32", [-1, len(self.adapter.classes)]),
            ("disputed", "BOOL", [-1]),
            ("accepted", "BOOL", [1]),
            ("reason", "BYTES", [1]),
            ("ratio", "FP64", [1]),
            ("position", "INT64", [1]),
        ]
        shape = [-1 if size is None else size for size in self.input_shape or (None,)]
        images = self.input_name, datatype_of(self.input_dtype), [-1, *shape[1:]]
        keys = "name", "datatype", "shape"
        described = [dict(zip(keys, each, strict=True)) for each in (images, *outputs)]
        return described[:1], described[1:]

    def check_name(self, name: str, version: str = "") -> None:
        """Raise if there is no such model."""
        if name != self.name or version not in ("", "1"):
            raise RequestError(f"there is no model {name!r} version {version or '1'!r}",
                               Failure.UNKNOWN)  # fmt: skip

    # --- on the event loop ---

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answer a request, or learn from the labels that it brings."""
        if self.broken is not None:
            raise RequestError(self.broken, Failure.UNAVAILABLE)
        images = None if request.inputs.keys() == FEEDBACK else self._images(request)
        if images is None and request.stream is None:
            raise RequestError("labels belong to a stream: name it")
        return await self._batcher.submit(request, images)

    def _images(self, request: InferRequest) -> Tensor:
        """The batch of a request, checked: nothing else may reach a stream."""
        images = request.inputs.get(self.input_name)
        if images is None:
            raise RequestError(f"there is no input {self.input_name!r}")
        others = request.inputs.keys() - {self.input_name}
        if others and request.stream is not None:
            raise RequestError(f"a stream has its own state: leave out {sorted(others)[0]!r}")
        if images.dtype != self.input_dtype:
            expected, got = datatype_of(self.input_dtype), datatype_of(images.dtype)
            raise RequestError(f"input {self.input_name!r} is {expected}, not {got}")
        declared = self.input_shape or (None,) * max(2, images.ndim)
        fits = len(declared) == images.ndim and all(
            size in (None, got) for size, got in zip(declared[1:], images.shape[1:], strict=True)
        )
        if not fits or not images.size:
            shape = [-1 if size is None else size for size in declared]
            raise RequestError(
                f"input {self.input_name!r} has shape {[-1, *shape[1:]]}, not {list(images.shape)}"
            )
        # A sum is faster than a look at every value, and large numbers may make it infinite.
        if images.dtype.kind == "f":
            with np.errstate(over="ignore", invalid="ignore"):
                suspect = not math.isfinite(float(images.sum()))
            if suspect and not np.isfinite(images).all():
                raise RequestError(f"input {self.input_name!r} has values that are not finite")
        return images

    async def look_after(self) -> None:
        """Put idle streams away, and check the weights on a schedule; until it is cancelled."""
        verified = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._verify_seconds))
            try:
                await self._batcher.call(self._store.put_idle_away)
            except Exception:  # the server must go on, and tries again
                logger.exception("idle streams could not be stored")
            if time.monotonic() - verified >= self._verify_seconds:
                await self._batcher.call(self._verify)
                verified = time.monotonic()

    async def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        await self._batcher.call(self._store.close)
        self._batcher.close()

    # --- on the worker thread ---

    def _verify(self) -> None:
        try:
            self.adapter.model.verify()
        except Exception as error:  # a model that cannot be checked is not used either
            self.broken = error_line(error)
            logger.error("%s: no request is answered any more", error)

    def _run(self, taken: Sequence[Waiting]) -> list[Outcome]:
        """Answer requests of one stream, or one without a stream."""
        try:
            return self._answered(taken)
        except RequestError as error:
            return [error] * len(taken)
        except CasterError as error:  # the model or the stream takes no such batch
            return [RequestError(str(error))] * len(taken)
        except Exception as error:  # of the model's libraries: one batch fails, not the server
            logger.exception("a batch failed")
            failed = RequestError(f"the model failed: {error_line(error)}", Failure.INTERNAL)
            return [failed] * len(taken)

    def _answered(self, taken: Sequence[Waiting]) -> list[Outcome]:
        request, images = taken[0].request, taken[0].images
        if request.stream is None:
            assert images is not None
            return [self._stateless(request, images)]
        served = None
        if not self._frozen and self._store.can_write():
            if images is None and request.stream not in self._store:
                raise RequestError(f"there is no stream {request.stream}", Failure.UNKNOWN)
            with self._store.writing():
                served = self._store.open(request.stream)
        if served is None or self._store.problem is not None:
            if images is None:
                raise RequestError("streams cannot change now: try again", Failure.UNAVAILABLE)
            return self._unadapted(taken)
        if images is None:
            return [self._learn(served, request)]
        return self._in_stream(served, taken)

    def _in_stream(self, served: ServedStream, taken: Sequence[Waiting]) -> list[Outcome]:
        """Answer the requests that follow on each other as one batch of their stream."""
        outcomes: dict[Waiting, Outcome] = {}
        at, repeat = served.stream.samples, served.repeat
        accepted: list[Waiting] = []
        for waiting in taken:
            position = waiting.request.position
            if position is None or position == at:
                accepted.append(waiting)
                at += waiting.samples
            elif (known := served.repeated(position, waiting.samples)) is not None:
                outcomes[waiting] = InferAnswer(known, self._about(served.id, repeated=True))
            else:
                message = f"stream {served.id} is at position {at}, not {position}"
                if served.repeat:
                    message += f": repeat {count_batches(served.repeat)} from there"
                outcomes[waiting] = RequestError(message, Failure.CONFLICT)
        if accepted:
            out = self._timed(served.stream, _joined(accepted))
            assert out.ids is not None
            position = int(out.ids[0])
            answer = _outputs(out, position)
            served.repeat = 0
            self._store.answered(served, answer)
            self._report(self._on_answer, served.id, out, position)
            start = 0
            for waiting in accepted:
                parameters = self._about(served.id, batch_samples=len(out.labels))
                if repeat:
                    parameters["repeat_batches"] = repeat
                part = split(answer, start, waiting.samples)
                part["position"] = np.array([position + start])
                outcomes[waiting] = InferAnswer(part, parameters)
                start += waiting.samples
        return [outcomes[waiting] for waiting in taken]

    def _report(self, to: Callable[..., None] | None, *about: Any) -> None:
        if to is None:
            return
        try:
            with self._store.writing():
                to(*about)
        except Exception:  # whatever watches the server must not stop it
            logger.exception("the answer is sent, but could not be reported")

    def _learn(self, served: ServedStream, request: InferRequest) -> InferAnswer:
        ids, labels = request.inputs["ids"], request.inputs["labels"]
        if self.adapter.classes.dtype.kind in "US":
            labels = labels.astype(str)
        counted = served.stream.feedback(ids, labels)
        self.metrics.labels.inc(len(ids))
        self._store.changed(served)
        self._report(self._on_feedback, served.id, ids, labels, served.stream.betting)
        decision = served.stream.betting.position
        return InferAnswer(
            {"counted": np.array([counted])}, self._about(served.id, decision=decision)
        )

    def _stateless(self, request: InferRequest, images: Tensor) -> InferAnswer:
        """A batch of a stream that the client carries itself, if it carries one."""
        state = {name: a for name, a in request.inputs.items() if name != self.input_name}
        try:
            stream = self.adapter.resume(state) if state else self.adapter.new_stream()
        except CasterError:
            raise
        except Exception as error:  # arrays of any shape may come
            raise RequestError(f"not the state of a stream: {error_line(error)}") from None
        position = stream.samples
        out = self._timed(self._frozen_answer if self._frozen else stream, images)
        answer = _outputs(out, NO_POSITION if self._frozen else position)
        if state or request.wants_state:
            answer |= {f"{NEXT}{name}": np.asarray(a) for name, a in stream.state().items()}
        return InferAnswer(answer)

    def _unadapted(self, taken: Sequence[Waiting]) -> list[Outcome]:
        """Answers of the frozen model, which leave their stream alone."""
        out = self._timed(self._frozen_answer, _joined(taken))
        answer, at, outcomes = _outputs(out, NO_POSITION), 0, list[Outcome]()
        for waiting in taken:
            part = split(answer, at, waiting.samples)
            outcomes.append(InferAnswer(part, self._about(str(waiting.request.stream))))
            at += waiting.samples
        return outcomes

    def _about(self, stream: str, **more: str | int | bool) -> dict[str, str | int | bool]:
        """Parameters of an answer."""
        problem = self._store.problem
        warning = {} if problem is None else {"warning": f"streams cannot be stored: {problem}"}
        return {"stream": stream, **more, **warning}

    def _timed(self, run: Callable[[Any], Adaptation], batch: Tensor) -> Adaptation:
        start = time.perf_counter()
        out = run(batch)
        self.metrics.batch(out, time.perf_counter() - start)
        return out

    def _frozen_answer(self, batch: Tensor) -> Adaptation:
        adapter = self.adapter
        outputs = adapter.model(batch)
        scores = adapter.head_logits(outputs)
        if scores is None:
            scores = adapter.clf.source_scores(outputs.features)
        labels = adapter.classes[classes_of(scores)]
        verdict = Verdict(False, FROZEN, math.nan)  # type: ignore[arg-type]
        return Adaptation(labels, scores, labels, None, scores, verdict)


def _joined(taken: Sequence[Waiting]) -> Tensor:
    parts = [waiting.images for waiting in taken if waiting.images is not None]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _label_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that labels are sent in."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.dtype(kinds.get(dtype.kind, np.object_))


def _outputs(out: Adaptation, position: int) -> Tensors:
    """The tensors of an answer."""
    labels = to_numpy(out.labels)
    return {
        "labels": labels.astype(_label_dtype(labels.dtype)),
        "probabilities": to_numpy(out.probabilities).astype(np.float32, copy=False),
        "disputed": out.disputed,
        "accepted": np.array([out.verdict.accepted]),
        "reason": np.array([out.verdict.reason], np.object_),
        "ratio": np.array([out.verdict.ratio], np.float64),
        "position": np.array([position], np.int64),
    }


def _signature(model: Any) -> tuple[str, tuple[int | None, ...] | None, np.dtype[Any]]:
    """Name, shape and dtype of the model's input; no shape: any."""
    if hasattr(model, "input_name"):  # an ONNX graph declares them
        return model.input_name, model.input_shape, np.dtype(model.input_dtype)
    made: Preprocessing | None = model.preprocessing
    if made is None:
        return "images", None, np.dtype(np.float32)
    size = made.crop or (made.resize if isinstance(made.resize, tuple) else (None, None))
    shape = (None, 3, *size) if made.layout == "NCHW" else (None, *size, 3)
    return "images", shape, np.dtype(made.dtype)
