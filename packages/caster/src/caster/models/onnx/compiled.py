"""Run the self-adapting ONNX files that `caster compile` writes, and read their metadata."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from caster.core.adaptation import Adaptation
from caster.core.threads import SingleThread
from caster.core.verdict import Reason, Verdict
from caster.errors import CasterError
from caster.io import labels, signed_tensors
from caster.io.files import AnyPath
from caster.io.labels import Labels
from caster.models.batches import inputs_of
from caster.models.onnx.model import Input, check_installed, run_session, start_session
from caster.models.onnx.model_file import FileContent, check_model, external_files, read_model
from caster.models.protocol import prefix_errors

if TYPE_CHECKING:
    from onnx import ModelProto

PREFIX = "caster."  # of the keys of metadata properties
ANSWER = ("probabilities", "labels", "accepted", "ratio", "reason")  # outputs besides the state
NEXT = "next."  # prefix of a state tensor among the outputs
REASONS: tuple[Reason, ...] = get_args(Reason)  # the graph outputs an index into this
STREAM_FORMAT = "caster-compiled-stream 1"
DTYPES = {  # ONNX Runtime's names to NumPy's
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
    "tensor(uint8)": "uint8",
}
StreamState = Mapping[str, NDArray[Any]]


# --- metadata ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a stream carries from batch to batch, initially zero."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def zeros(self) -> NDArray[Any]:
        """Allocate the tensor as it is before the first batch."""
        return np.zeros(self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class Metadata:
    """Metadata of a compiled file, stored in properties `caster.NAME`."""

    version: str  # of caster
    mechanism: str  # "layers" or "features"
    model_sha256: str
    preprocessing_sha256: str  # empty if the state is not bound to a preprocessing
    state_sha256: str
    settings: dict[str, Any]  # constants of the mechanism
    classes: Labels
    reasons: tuple[str, ...]  # of verdicts, by their code in the graph
    state: tuple[StateTensor, ...]

    def texts(self) -> dict[str, str]:
        """Format the properties."""
        packed = {
            "settings": json.dumps(self.settings),
            "classes": labels.to_json(self.classes),
            "reasons": json.dumps(self.reasons),
            "state": json.dumps([asdict(tensor) for tensor in self.state]),
        }
        names = (field.name for field in fields(self))
        return {f"{PREFIX}{name}": packed.get(name) or getattr(self, name) for name in names}

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Metadata:
        """Parse the properties; raise if one is missing or damaged."""
        try:
            found: dict[str, Any] = {f.name: texts[f"{PREFIX}{f.name}"] for f in fields(cls)}
            state = [
                StateTensor(str(each["name"]), np.dtype(each["dtype"]).name, _shape(each["shape"]))
                for each in json.loads(found["state"])
            ]
            parsed = {
                "settings": dict(json.loads(found["settings"])),
                "classes": labels.from_json(found["classes"]),
                "reasons": tuple(map(str, json.loads(found["reasons"]))),
                "state": tuple(state),
            }
        except (KeyError, TypeError, ValueError, RecursionError):
            raise CasterError("its metadata is damaged: compile it again") from None
        return cls(**found | parsed)


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("not a shape")
    return tuple(sizes)


def is_compiled(model: ModelProto) -> bool:
    """Whether a model was written by `caster compile`."""
    return any(entry.key == f"{PREFIX}mechanism" for entry in model.metadata_props)


def read_compiled(
    path: AnyPath, content: FileContent | None = None
) -> tuple[ModelProto, str, Metadata]:
    """Read a compiled file: its model, digest and metadata."""
    check_installed(str(path))
    model, sha256 = content or read_model(Path(path))
    if not is_compiled(model):
        raise CasterError(f"{path} is not compiled: `caster compile` makes a model that adapts")
    if external_files(model):  # the digest would not cover them
        raise CasterError(f"{path} keeps weights in another file: compile it again")
    with prefix_errors(str(path)):
        return model, sha256, Metadata.of({each.key: each.value for each in model.metadata_props})


# --- streams -------------------------------------------------------------------------------------


class CompiledModel:
    """A file written by `caster compile`: a model and its state in one, run by ONNX Runtime.

    `caster.wrap("adaptive.onnx")` creates one.

    Attributes
    ----------
    name : path of the file.
    sha256 : digest of the file.
    metadata : `Metadata` of the file.
    classes : labels, in the order of all scores.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        content: FileContent | None = None,  # of the file, if it has been read already
    ) -> None:
        self.name = str(path)
        check_installed(self.name, list(providers))
        model, self.sha256, self.metadata = read_compiled(path, content)
        self.classes = self.metadata.classes
        with prefix_errors(self.name):
            check_model(model)
            self._session = start_session(self.name, model, list(providers))
            self._images = self._declared_images()

    def __repr__(self) -> str:
        mechanism = self.metadata.mechanism
        return f"CompiledModel({self.name!r}, {len(self.classes)} classes, {mechanism=})"

    def __call__(self, batch: Any) -> Adaptation:
        """Adapt to one preprocessed batch, independently of any stream."""
        return self.new_stream()(batch)

    def stream(self, batches: Iterable[Any]) -> Iterator[Adaptation]:
        """Adapt to the batches of one stream, in order."""
        return map(self.new_stream(), batches)

    def new_stream(self) -> CompiledStream:
        """Start an independent stream: one per client, camera or data set."""
        return CompiledStream(self)

    def resume(self, state: StreamState | str | os.PathLike[str]) -> CompiledStream:
        """Continue a stream from its `state()`, or from the file it was saved to."""
        if isinstance(state, str | os.PathLike):
            kind, maker = "a saved compiled stream", "CompiledStream.save"
            state, _ = signed_tensors.read_format(state, kind, maker, STREAM_FORMAT)
        stream = CompiledStream(self)
        stream._restore(state)
        return stream

    def run(self, batch: Any, state: StreamState) -> dict[str, NDArray[Any]]:
        """Run the graph on a batch; return all outputs by name."""
        feeds = {self._images.name: self._images.prepared(batch), **state}
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, run_session(self.name, self._session, names, feeds), strict=True))

    def _declared_images(self) -> Input:
        """Find the input that takes images; all others must be state tensors with a next value."""
        outputs = {each.name for each in self._session.get_outputs()}
        inputs = {
            each.name: StateTensor(each.name, DTYPES.get(each.type, each.type), tuple(each.shape))
            for each in self._session.get_inputs()
        }
        for tensor in self.metadata.state:
            if inputs.pop(tensor.name, None) != tensor or f"{NEXT}{tensor.name}" not in outputs:
                raise CasterError(f"it lacks the state tensor `{tensor.name}` of its metadata")
        missing = [name for name in ANSWER if name not in outputs]
        if missing:
            raise CasterError(f"it has no output `{missing[0]}`")
        if len(inputs) != 1:
            raise CasterError(f"it has {len(inputs)} image inputs instead of one")
        (images,) = inputs.values()
        shape = tuple(size if isinstance(size, int) else None for size in images.shape)
        return Input(images.name, shape, images.dtype)


class CompiledStream:
    """One stream of a `CompiledModel`, for one thread at a time."""

    def __init__(self, model: CompiledModel) -> None:
        self.model = model
        self.samples = 0  # seen so far
        self._state: StreamState = {each.name: each.zeros() for each in model.metadata.state}
        self._guard = SingleThread()

    def __repr__(self) -> str:
        return f"CompiledStream({self.samples:,} samples, {self.model.name!r})"

    def __call__(self, batch: Any) -> Adaptation:
        """Adapt to the next batch, as `Stream` does, but without separate frozen scores."""
        with self._guard:
            found = self.model.run(inputs_of(batch), self._state)
            self._state = {name: found[f"{NEXT}{name}"] for name in self._state}
            ids = np.arange(self.samples, self.samples + len(found["labels"]))
            self.samples += len(ids)
        chosen = self.model.classes[found["labels"]]
        with np.errstate(divide="ignore"):
            scores = np.log(found["probabilities"])
        reason: Any = self.model.metadata.reasons[int(found["reason"])]
        verdict = Verdict(bool(found["accepted"]), reason, float(found["ratio"]))
        return Adaptation(chosen, scores, chosen, None, None, verdict, ids=ids)

    def state(self) -> dict[str, NDArray[Any]]:
        """Export everything the stream remembers as named NumPy arrays, for an exact `resume`."""
        with self._guard:
            return {
                **{f"state.{name}": value for name, value in self._state.items()},
                "samples": np.array(self.samples, np.int64),
                "source": self._source,
            }

    def save(self, path: AnyPath) -> None:
        """Write the state atomically to a file, for `CompiledModel.resume`."""
        signed_tensors.write(self.state(), {"format": STREAM_FORMAT}, path)

    @property
    def _source(self) -> NDArray[np.uint8]:
        return np.frombuffer(bytes.fromhex(self.model.sha256), np.uint8)

    def _restore(self, state: StreamState) -> None:
        source = state.get("source")
        if source is not None and not np.array_equal(source, self._source):
            raise CasterError(f"this stream belongs to another file than {self.model.name}")
        try:
            known = {name: np.asarray(state[f"state.{name}"]) for name in self._state}
            samples = int(np.asarray(state["samples"]).item())
            kinds = [[(a.dtype, a.shape) for a in s.values()] for s in (known, self._state)]
            if source is None or samples < 0 or kinds[0] != kinds[1]:
                raise ValueError("not a state of this graph")
        except (KeyError, TypeError, ValueError):
            raise CasterError("this is not the state of a compiled stream") from None
        self.samples, self._state = samples, known
