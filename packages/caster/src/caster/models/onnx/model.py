"""ONNX files as frozen models, run by ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import AnyPath
from caster.models.onnx.check import check_model
from caster.models.onnx.file import WeightGuard, follow_links, read_model
from caster.models.onnx.graph import expose, widen
from caster.models.onnx.head import find_head
from caster.models.onnx.input import declared_input, sizes
from caster.models.onnx.linear import affine_path, constants_of, fold, keep_constants
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import Outputs

if TYPE_CHECKING:
    from onnx import ModelProto

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")


class OnnxModel:
    """An ONNX classifier that hands out what its last linear layer takes, beside the logits.

    The logits are what that layer yields with its bias, before a softmax. Where a graph has
    several outputs or ends in another layer, `head` names the output with the logits, or the
    node to take for the head: its input is the features (see `find_head`).

    >>> import onnx, tempfile
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["": 20]>
    ...     classifier (float[N, 2] x) => (float[N, 2] y) <float[2, 2] W = {1, 2, 3, 4}>
    ...     { h = Relu(x)  y = MatMul(h, W) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(model, f"{folder}/model.onnx")
    ...     outputs = OnnxModel(f"{folder}/model.onnx")([[-1.0, 1.0]])
    >>> outputs.features, outputs.logits
    (array([[0., 1.]], dtype=float32), array([[3., 4.]], dtype=float32))
    """

    name: str
    preprocessing: Preprocessing | None
    input_shape: tuple[int | None, ...] | None  # as the graph declares it, None for an open size

    def __init__(
        self,
        path: AnyPath,
        *,
        head: str | None = None,
        preprocessing: Preprocessing | Literal["in-graph"] | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self.name = str(path)
        self._path, self._providers = Path(path), list(providers)
        _check_installed(self.name, self._providers)
        model, sha256 = read_model(self._path)
        try:
            check_model(model)
            self._input = declared_input(model)
            self._head = find_head(model, head)
            if preprocessing == "in-graph":
                preprocessing = self._input.images()
            elif preprocessing is not None:
                self._input.check(preprocessing)
        except CasterError as error:
            raise CasterError(f"{path}: {_one_line(error)}") from None
        self.preprocessing = preprocessing
        self.input_shape = self._input.shape
        self._seal = WeightGuard(self._path, model, sha256, head)

    def __repr__(self) -> str:
        return f"OnnxModel({self.name!r}, input={sizes(self.input_shape or ())})"

    @property
    def sha256(self) -> str:
        """Digest of the file, of those its weights are in, and of a head named by hand."""
        return self._seal.sha256

    def __call__(self, batch: Any) -> Outputs:
        """Features and logits in NumPy; a graph of fixed batch size gets pieces of that size."""
        rows = self._input.prepared(batch)
        size = self._input.batch_size or len(rows)
        pieces = [self._run(rows[at : at + size], size) for at in range(0, len(rows), size)]
        if len(pieces) == 1:
            return Outputs(*pieces[0])
        features, logits = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return Outputs(features, logits)

    def verify(self) -> None:
        """Raise unless every file holds what it held when the model was wrapped."""
        self._seal.verify()

    def linear_head(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # (n, d), (n,)
        """Weight and bias of the classifier, as the graph computes them from its constants."""
        model = self._seal.read()
        weights = follow_links(model, self._path)
        try:
            path = affine_path(model, self._head)
            names = constants_of(path)
            keep_constants(model, names)
            values = self._start(model, weights).run(None, {})
            return fold(path, dict(zip(names, values, strict=True)))
        except CasterError as error:
            raise CasterError(f"{self.name}: {error}") from None

    def _run(
        self,
        piece: NDArray[Any],  # (at most size, ...)
        size: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        count = len(piece)
        if count < size:
            # by copies of a row, not zeros: dynamic quantisation takes its scale from all rows
            piece = np.concatenate([piece, np.repeat(piece[-1:], size - count, axis=0)])
        session = self._session
        try:
            features, logits = session.run(None, {self._input.name: piece})
        except Exception as error:  # onnxruntime's errors have no other base in common
            raise CasterError(f"{self.name} failed on a batch: {_one_line(error)}") from None
        return (
            self._as_rows("features", features, size)[:count],
            self._as_rows("logits", logits, size)[:count],
        )

    def _as_rows(self, what: str, array: NDArray[Any], count: int) -> NDArray[np.float32]:
        """(B, d) in float32, without the axes of 1 that pooling leaves."""
        inner = array.shape[1:]
        if not inner or len(array) != count or math.prod(inner) != max(inner):
            raise CasterError(
                f"{self.name}: the {what} `{getattr(self._head, what)}` of {count} rows are "
                f"{sizes(array.shape)}, not one row of numbers each: name another layer with "
                "{argument}",
                argument="head",
            )
        return array.reshape(count, -1).astype(np.float32, copy=False)

    @cached_property
    def _session(self) -> Any:
        model = self._seal.read()
        weights = follow_links(model, self._path)
        expose(model, (self._head.features, self._head.logits))
        session = self._start(model, weights)
        types = [output.type for output in session.get_outputs()]
        for what, kind in zip(("features", "logits"), types, strict=True):
            if kind not in FLOATS:
                raise CasterError(
                    f"{self.name}: the {what} `{getattr(self._head, what)}` are {kind}, no floats: "
                    "name another layer with {argument}",
                    argument="head",
                )
        if "tensor(bfloat16)" in types:  # which NumPy lacks
            widen(model)
            session = self._start(model, weights)
        return session

    def _start(self, model: ModelProto, weights: Path) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised; once is enough
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=self._providers,
                enable_fallback=0,  # to other providers, behind the user's back
            )
        except Exception as error:  # onnxruntime's errors have no other base in common
            raise CasterError(f"cannot run {self.name}: {_one_line(error)}") from None
        finally:
            self.verify()  # after the runtime read the weights: they were those of the digest
        dropped = [name for name in self._providers if name not in session.get_providers()]
        if dropped:  # onnxruntime itself would go on without it
            raise CasterError(f"{dropped[0]} does not work on this machine")
        return session


def _check_installed(path: str, providers: list[str]) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError:
        raise CasterError(
            f"reading {path} needs onnx and onnxruntime: pip install 'caster-tta[onnx]'"
        ) from None
    available = onnxruntime.get_available_providers()
    unknown = [name for name in providers if name not in available]
    if unknown or not providers:
        name = unknown[0] if unknown else "none"
        raise CasterError(f"no provider {name}: onnxruntime here has {', '.join(available)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
