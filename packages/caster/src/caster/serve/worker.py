"""The worker, which runs the model and owns streams.

A server has one worker on a thread of its own process, or several on a Ray cluster (`replicas.py`).
The methods of a worker are called one at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from caster.adapt.adapter import Adapter
from caster.core.adaptation import Adaptation, classes_of
from caster.core.arrays import to_numpy
from caster.core.verdict import Verdict
from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import error_line
from caster.serve.batcher import InferAnswer, InferRequest, Outcome
from caster.serve.streams import ServedStream, StreamStore, count_batches, split
from caster.serve.tensors import Failure, RequestError, Tensor, Tensors
from caster.serve.watch import StreamLogs

COUNTED = "counted"  # output of a request with labels
NEXT = "next."  # prefix of state tensors among the outputs, as in compiled graphs
NO_POSITION = -1  # position of samples that are not part of their stream

logger = logging.getLogger(__name__)


class OnAnswer(Protocol):
    """Called after every batch of a stream; `position` is that of its first sample.

    The server treats an OSError or a CasterError raised here like a full disk.
    """

    def __call__(self, stream_id: str, adaptation: Adaptation, position: int) -> None:
        """Process an answer."""


@dataclass(frozen=True)
class BatchReport:
    """A batch, for the metrics."""

    accepted: bool
    reason: str
    samples: int
    seconds: float  # of the model and the adaptation


@dataclass(frozen=True)
class Status:
    """Status of a worker."""

    streams: int = 0  # in memory
    snapshots: int = 0  # written so far
    problem: str | None = None  # why streams cannot be stored


@dataclass(frozen=True)
class Answered:
    """One answer per request, and what the metrics show."""

    outcomes: list[Outcome]
    report: BatchReport | None  # None: no batch went through the model
    status: Status


class Worker:
    """The model, and the streams that this process owns."""

    def __init__(
        self,
        adapter: Adapter,
        store: StreamStore,
        *,
        frozen: bool = False,  # answer with the frozen model only
        logs: StreamLogs | None = None,
        on_answer: OnAnswer | None = None,  # instead of the log
    ) -> None:
        self.adapter, self.store = adapter, store
        self._input_name, self._frozen = input_signature(adapter.model)[0], frozen
        self._logs = logs if on_answer is None else None
        self._on_answer = on_answer if self._logs is None else self._logs.answered
        self._report: BatchReport | None = None

    def status(self) -> Status:
        """Report the current status."""
        return Status(len(self.store), self.store.snapshots, self.store.problem)

    def maintain(self) -> Status:
        """Move idle streams to disk."""
        self.store.unload_idle()
        return self.status()

    def release(self, keeps: Callable[[str], bool]) -> bool:
        """Hand the other streams over to another worker; False if they could not be stored."""
        if self._logs is not None:
            self._logs.release(keeps)
        return self.store.release(keeps)

    def verify(self) -> str | None:
        """Say why the model must no longer be used; None if its weights are unchanged."""
        try:
            self.adapter.model.verify()
        except Exception as error:  # a model that cannot be checked is not used
            logger.error("%s: requests are no longer answered", error)
            return error_line(error)
        return None

    def close(self) -> None:
        """Take a snapshot of every stream; after the last request."""
        self.store.close()

    def answer(self, requests: Sequence[InferRequest]) -> Answered:
        """Answer requests of one stream, or one without a stream."""
        self._report = None
        try:
            outcomes = self._answered(requests)
        except RequestError as error:
            outcomes = [error] * len(requests)
        except CasterError as error:  # the model or the stream rejects the batch
            outcomes = [RequestError(str(error))] * len(requests)
        except Exception as error:  # in the model's libraries: the batch fails, not the server
            logger.exception("a batch failed")
            failed = RequestError(f"the model failed: {error_line(error)}", Failure.INTERNAL)
            outcomes = [failed] * len(requests)
        return Answered(outcomes, self._report, self.status())

    def _answered(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        first = requests[0]
        if first.stream is None:
            return [self._stateless(first)]
        served = None
        if not self._frozen and self.store.can_write():
            if first.images is None and first.stream not in self.store:
                raise RequestError(f"there is no stream {first.stream}", Failure.UNKNOWN)
            with self.store.writing():
                served = self.store.open(first.stream)
        if served is None or self.store.problem is not None:
            if first.images is None:
                raise RequestError("streams cannot be changed now: try again", Failure.UNAVAILABLE)
            return self._unadapted(requests)
        if first.images is None:
            return [self._learn(served, first)]
        return self._in_stream(served, requests)

    def _in_stream(self, served: ServedStream, requests: Sequence[InferRequest]) -> list[Outcome]:
        """Answer consecutive requests as one batch of their stream."""
        outcomes: dict[InferRequest, Outcome] = {}
        at, repeat = served.stream.samples, served.repeat
        accepted: list[InferRequest] = []
        for request in requests:
            position = request.position
            if position is None or position == at:
                accepted.append(request)
                at += request.samples
            elif (known := served.repeated(position, request.samples)) is not None:
                outcomes[request] = InferAnswer(known, self._about(served.id, repeated=True))
            else:
                message = f"stream {served.id} is at position {at}, not {position}"
                if served.repeat:
                    message += f": repeat {count_batches(served.repeat)} from there"
                outcomes[request] = RequestError(message, Failure.CONFLICT)
        if accepted:
            out = self._timed(served.stream, _joined(accepted))
            assert out.ids is not None
            position = int(out.ids[0])
            answer = _outputs(out, position)
            served.repeat = 0
            self.store.answered(served, answer)
            self._notify(self._on_answer, served.id, out, position)
            start = 0
            for request in accepted:
                parameters = self._about(served.id, batch_samples=len(out.labels))
                if repeat:
                    parameters["repeat_batches"] = repeat
                part = split(answer, start, request.samples)
                part["position"] = np.array([position + start])
                outcomes[request] = InferAnswer(part, parameters)
                start += request.samples
        return [outcomes[request] for request in requests]

    def _notify(self, to: Callable[..., None] | None, *about: Any) -> None:
        if to is None:
            return
        try:
            with self.store.writing():
                to(*about)
        except Exception:  # monitoring must not stop the server
            logger.exception("the answer is sent, but could not be logged")

    def _learn(self, served: ServedStream, request: InferRequest) -> InferAnswer:
        ids, labels = request.inputs["ids"], request.inputs["labels"]
        if self.adapter.classes.dtype.kind in "US":
            labels = labels.astype(str)
        counted = served.stream.feedback(ids, labels)
        self.store.changed(served)
        labelled = None if self._logs is None else self._logs.labelled
        self._notify(labelled, served.id, ids, labels, served.stream.betting)
        decision = served.stream.betting.position
        return InferAnswer(
            {COUNTED: np.array([counted])}, self._about(served.id, decision=decision)
        )

    def _stateless(self, request: InferRequest) -> InferAnswer:
        """Answer a request without a stream id; the client may send the stream's state itself."""
        state = {name: a for name, a in request.inputs.items() if name != self._input_name}
        try:
            stream = self.adapter.resume(state) if state else self.adapter.new_stream()
        except CasterError:
            raise
        except Exception as error:  # clients may send arrays of any shape
            raise RequestError(f"not the state of a stream: {error_line(error)}") from None
        position = stream.samples
        out = self._timed(self._frozen_answer if self._frozen else stream, _joined([request]))
        answer = _outputs(out, NO_POSITION if self._frozen else position)
        if state or request.wants_state:
            answer |= {f"{NEXT}{name}": np.asarray(a) for name, a in stream.state().items()}
        return InferAnswer(answer)

    def _unadapted(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        """Answer with the frozen model, without changing the stream."""
        out = self._timed(self._frozen_answer, _joined(requests))
        answer, at, outcomes = _outputs(out, NO_POSITION), 0, list[Outcome]()
        for request in requests:
            part = split(answer, at, request.samples)
            outcomes.append(InferAnswer(part, self._about(str(request.stream))))
            at += request.samples
        return outcomes

    def _about(self, stream: str, **more: str | int | bool) -> dict[str, str | int | bool]:
        """Make the parameters of an answer."""
        problem = self.store.problem
        warning = {} if problem is None else {"warning": f"streams cannot be stored: {problem}"}
        return {"stream": stream, **more, **warning}

    def _timed(self, run: Callable[[Any], Adaptation], batch: Tensor) -> Adaptation:
        start = time.perf_counter()
        out = run(batch)
        seconds = time.perf_counter() - start
        verdict = out.verdict
        self._report = BatchReport(verdict.accepted, verdict.reason, len(out.labels), seconds)
        return out

    def _frozen_answer(self, batch: Tensor) -> Adaptation:
        adapter = self.adapter
        outputs = adapter.model(batch)
        scores = adapter.head_logits(outputs)
        if scores is None:
            scores = adapter.clf.source_scores(outputs.features)
        labels = adapter.classes[classes_of(scores)]
        verdict = Verdict(False, "frozen", math.nan)  # type: ignore[arg-type]
        return Adaptation(labels, scores, labels, None, scores, verdict)


def label_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which labels are sent."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.dtype(kinds.get(dtype.kind, np.object_))


def _joined(requests: Sequence[InferRequest]) -> Tensor:
    parts = [request.images for request in requests if request.images is not None]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _outputs(out: Adaptation, position: int) -> Tensors:
    """Make the tensors of an answer."""
    labels = to_numpy(out.labels)
    return {
        "labels": labels.astype(label_dtype(labels.dtype)),
        "probabilities": to_numpy(out.probabilities).astype(np.float32, copy=False),
        "disputed": out.disputed,
        "accepted": np.array([out.verdict.accepted]),
        "reason": np.array([out.verdict.reason], np.object_),
        "ratio": np.array([out.verdict.ratio], np.float64),
        "position": np.array([position], np.int64),
    }


def input_signature(model: Any) -> tuple[str, tuple[int | None, ...] | None, np.dtype[Any]]:
    """Name, shape and dtype of the model's input; a shape of None means any."""
    if hasattr(model, "input_name"):  # an ONNX graph declares them
        return model.input_name, model.input_shape, np.dtype(model.input_dtype)
    made: Preprocessing | None = model.preprocessing
    if made is None:
        return "images", None, np.dtype(np.float32)
    size = made.crop or (made.resize if isinstance(made.resize, tuple) else (None, None))
    shape = (None, made.depth, *size) if made.layout == "NCHW" else (None, *size, made.depth)
    return "images", shape, np.dtype(made.dtype)
