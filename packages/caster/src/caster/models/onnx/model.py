"""Run an ONNX file as a frozen model with ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.io.files import AnyPath
from caster.models.onnx.graph import (
    Head,
    affine_path,
    cast_outputs,
    constants_of,
    find_head,
    fold,
    keep_constants,
    listed,
    runtime_inputs,
    set_outputs,
    set_row_outputs,
)
from caster.models.onnx.model_file import (
    FileContent,
    WeightGuard,
    check_model,
    follow_links,
    read_model,
)
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import SINGLE_IMAGE, Outputs, error_line, prefix_errors

if TYPE_CHECKING:
    from onnx import ModelProto

    from caster.models.onnx.graph_sites import OnnxSite
    from caster.models.onnx.layers import MeasuringGraph

STOP_SPINNING = "session.force_spinning_stop"
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")
DTYPES = {"FLOAT": "float32", "FLOAT16": "float16", "DOUBLE": "float64", "UINT8": "uint8"}
AXES = {"NCHW": (1, 2, 3), "NHWC": (3, 1, 2)}  # axes of channels, height and width
GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider")  # of onnxruntime-gpu
Run = Callable[[list[str] | None, dict[str, NDArray[Any]]], list[NDArray[Any]]]
STATE_IT = "state the preprocessing in a TOML file with {argument}"


class OnnxModel:
    """An ONNX classifier that returns the input of its last linear layer along with the logits.

    The logits are the output of that layer including its bias, before any softmax. If a graph has
    several outputs or ends in another layer, `head` names the output with the logits, or the node
    whose input is the features (see `find_head`).

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
    input_shape: tuple[int | None, ...] | None  # as the graph declares it; None for a dynamic size

    def __init__(
        self,
        path: AnyPath,
        *,
        head: str | None = None,
        preprocessing: Preprocessing | Literal["in-graph"] | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        content: FileContent | None = None,  # of the file, if it has been read already
    ) -> None:
        self.name = str(path)
        self._path, self._providers = Path(path), list(providers)
        self._named_head = head
        check_installed(self.name, self._providers)
        model, sha256 = content or read_model(self._path)
        with prefix_errors(self.name):
            check_model(model)
            self._input = declared_input(model)
            self._head = find_head(model, head)
            if preprocessing == "in-graph":
                preprocessing = self._input.in_graph_preprocessing()
            elif preprocessing is not None:
                self._input.check(preprocessing)
        self.preprocessing = preprocessing
        self.input_shape = self._input.shape
        self._guard = WeightGuard(self._path, model, sha256, head)

    def __repr__(self) -> str:
        return f"OnnxModel({self.name!r}, input={_shape_text(self.input_shape or ())})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and options only, since a session cannot leave its process."""
        again = partial(
            type(self),
            self._path.absolute(),
            head=self._named_head,
            preprocessing=self.preprocessing,
            providers=self._providers,
        )
        return again, ()

    @property
    def sha256(self) -> str:
        """Digest of the file, its external weights, and the head if the user named it."""
        return self._guard.sha256

    def __call__(self, batch: Any) -> Outputs:
        """Compute features and logits in NumPy; a fixed batch size takes several runs."""
        rows = self._input.prepared(batch)
        size = self._input.batch_size or len(rows)
        runs = [self._run(rows[at : at + size], size) for at in range(0, len(rows), size)]
        if len(runs) == 1:
            return runs[0]
        return Outputs(
            np.concatenate([run.features for run in runs]),
            np.concatenate([run.logits for run in runs]),
        )

    @property
    def file_bytes(self) -> int:
        """Size of the file and its external weights."""
        return self._guard.file_bytes

    def verify(self) -> None:
        """Raise if any file has changed since the model was wrapped."""
        self._guard.verify()

    # --- layers ---

    @property
    def input_name(self) -> str:
        """Name of the graph input that takes the images."""
        return self._input.name

    @property
    def input_dtype(self) -> str:
        """NumPy dtype name of that input."""
        return self._input.dtype

    def placed(self, batch: Any) -> NDArray[Any]:
        """Convert a batch to the dtype of the graph input and check its shape."""
        return self._input.prepared(batch)

    @cached_property
    def sites(self) -> list[OnnxSite]:
        """Tensors that can be measured and aligned, in topological order."""
        from caster.models.onnx.graph_sites import find_onnx_sites

        model = self._guard.read()
        with prefix_errors(self.name):
            return find_onnx_sites(model, self._head)

    @cached_property
    def measuring(self) -> MeasuringGraph:
        """The frozen graph with its sites measured sample by sample."""
        from caster.models.onnx.layers import MeasuringGraph

        return MeasuringGraph(self)

    def session(self, rewrite: Callable[[ModelProto, Head], ModelProto]) -> Run:
        """Start a session of the rewritten graph, as a function of output names and inputs."""
        model, weights = self._read()
        with prefix_errors(self.name):
            rewritten = rewrite(model, self._head)
        return partial(run_session, self.name, self._start(rewritten, weights))

    def outputs(self, features: NDArray[Any], logits: NDArray[Any], count: int) -> Outputs:
        """Convert the features and logits of `count` images to rows of float32."""
        rows = self._as_rows("features", features, count), self._as_rows("logits", logits, count)
        return Outputs(*rows)

    def takes_empty_batches(self) -> bool:
        """Whether the graph accepts an empty batch; some Reshape nodes do not."""
        shape = self.input_shape
        if shape is None or None in shape[1:] or self._input.batch_size is not None:
            return False
        empty = np.zeros((0, *(size or 0 for size in shape[1:])), self._input.dtype)
        try:
            found = run_session(self.name, self._session, None, {self._input.name: empty})
        except CasterError:
            return False
        return all(len(each) == 0 for each in found)

    def exposed(self) -> ModelProto:
        """The model with its weights and two outputs: features and logits as rows of float32."""
        model, head = self.graph()
        widths: dict[str, int | None] = {}
        found = self._session.get_outputs()
        for tensor, output in zip((head.features, head.logits), found, strict=True):
            inner = output.shape[1:]
            is_known = inner and all(isinstance(size, int) for size in inner)
            widths[tensor] = math.prod(inner) if is_known else None
        set_row_outputs(model, widths)
        return model

    def linear_head(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # (n, d), (n,)
        """Weight and bias of the classifier, evaluated from the constants of the graph."""
        model, weights = self._read()
        with prefix_errors(self.name):
            path = affine_path(model, self._head)
            names = constants_of(path)
            keep_constants(model, names)
            values = self._start(model, weights).run(None, {})
            return fold(path, dict(zip(names, values, strict=True)))

    def graph(self) -> tuple[ModelProto, Head]:
        """Read the graph again, with its weights, and return it with its head."""
        import onnx

        model, weights = self._read()
        onnx.load_external_data_for_model(model, str(weights))
        self.verify()  # after the weights were read
        return model, self._head

    def _read(self) -> tuple[ModelProto, Path]:
        """Read the graph again, without its external weights, and locate their folder."""
        model = self._guard.read()
        return model, follow_links(model, self._path)

    def _run(
        self,
        rows: NDArray[Any],  # (at most size, ...)
        size: int,
    ) -> Outputs:
        count = len(rows)
        if count < size:
            # Pad with copies of a row, not zeros: dynamic quantisation takes its range from all.
            rows = np.concatenate([rows, np.repeat(rows[-1:], size - count, axis=0)])
        feeds = {self._input.name: rows}
        features, logits = run_session(self.name, self._session, None, feeds)
        return Outputs(
            self._as_rows("features", features, size)[:count],
            self._as_rows("logits", logits, size)[:count],
        )

    def _as_rows(self, what: str, array: NDArray[Any], count: int) -> NDArray[np.float32]:
        """Convert to (B, d) in float32, dropping the axes of length 1 that pooling leaves."""
        inner = array.shape[1:]
        if not inner or len(array) != count or math.prod(inner) != max(inner):
            raise CasterError(
                f"{self.name}: the {what} `{getattr(self._head, what)}` of {count} images have "
                f"shape {_shape_text(array.shape)}, not one row per image: name another layer with "
                "{argument}",
                argument="head",
            )
        return array.reshape(count, -1).astype(np.float32, copy=False)

    @cached_property
    def _session(self) -> Any:
        model, weights = self._read()
        set_outputs(model, (self._head.features, self._head.logits))
        session = self._start(model, weights)
        types = [output.type for output in session.get_outputs()]
        for what, kind in zip(("features", "logits"), types, strict=True):
            if kind not in FLOATS:
                raise CasterError(
                    f"{self.name}: the {what} `{getattr(self._head, what)}` are {kind}, not "
                    "floats: name another layer with {argument}",
                    argument="head",
                )
        if "tensor(bfloat16)" in types:  # NumPy has no bfloat16
            cast_outputs(model)
            session = self._start(model, weights)
        return session

    def _start(self, model: ModelProto, weights: Path) -> Any:
        try:
            return start_session(self.name, model, self._providers, weights)
        finally:
            self.verify()  # the weights that the runtime has just read must match the digest


def start_session(
    name: str,  # for messages
    model: ModelProto,
    providers: list[str],
    weights: Path | None = None,  # folder of external weights
) -> Any:
    """Start an ONNX Runtime session on exactly these providers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, so do not log them as well
    # A model has several sessions. Idle threads of one must not spin while another runs.
    options.add_session_config_entry(STOP_SPINNING, "1")
    if weights is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=providers,
            enable_fallback=0,  # never switch providers silently
        )
    except Exception as error:  # onnxruntime's errors have no other common base
        raise CasterError(f"cannot run {name}: {error_line(error)}") from None
    dropped = [each for each in providers if each not in session.get_providers()]
    if dropped:  # onnxruntime would silently run without it
        raise CasterError(f"{dropped[0]} does not work on this machine")
    return session


def run_session(
    name: str,  # of the model
    session: Any,
    outputs: list[str] | None,  # None: all
    feeds: dict[str, NDArray[Any]],
) -> list[NDArray[Any]]:
    """Run a session on one batch; nodes that these outputs do not need are skipped."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = outputs is not None
    try:
        found: list[NDArray[Any]] = session.run(outputs, feeds, options)
    except Exception as error:  # onnxruntime's errors have no other common base
        raise CasterError(f"{name} failed on a batch: {error_line(error)}") from None
    return found


def check_installed(path: str, providers: Sequence[str] | None = None) -> None:
    """Raise if onnx, onnxruntime or one of these providers is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError:
        raise CasterError(
            f"reading {path} needs onnx and onnxruntime: pip install 'caster-tta[onnx]'"
        ) from None
    if providers is None:
        return
    available = onnxruntime.get_available_providers()
    unknown = [name for name in providers if name not in available]
    if unknown or not providers:
        name = unknown[0] if unknown else "none"
        on_gpu = name in GPU_PROVIDERS
        remedy = "; install onnxruntime-gpu in place of onnxruntime" if on_gpu else ""
        raise CasterError(
            f"no provider {name}: onnxruntime here has {', '.join(available)}{remedy}"
        )


# --- graph input ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """The graph input that takes the images."""

    name: str
    shape: tuple[int | None, ...] | None  # None for a dynamic size, or if no shape is declared
    dtype: str  # NumPy name

    @property
    def batch_size(self) -> int | None:
        """Fixed batch size of the graph; None if it is dynamic."""
        return self.shape[0] if self.shape else None

    def prepared(self, batch: Any) -> NDArray[Any]:
        """Convert a batch to a contiguous array of the graph's dtype, copying only if needed."""
        try:
            rows = np.asarray(batch)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a GPU, with gradients
            raise CasterError(f"the batch is not an array: {error_line(error)}") from None
        declared = (None,) * max(rows.ndim, 1) if self.shape is None else self.shape
        if len(declared) != rows.ndim or not _fits(rows.shape[1:], declared[1:]):
            raise CasterError(
                f"the model takes {_shape_text(declared)}, not {_shape_text(rows.shape)}"
                f"{_shape_remedy(declared, rows.shape)}"
            )
        if len(rows) == 0:
            raise CasterError("the batch has no rows")
        converts = self.dtype != "uint8" and (rows.dtype.kind == "f" or rows.dtype == np.uint8)
        if rows.dtype != self.dtype and not converts:
            raise CasterError(f"the model takes {self.dtype}, not {rows.dtype}")
        return np.ascontiguousarray(rows, dtype=self.dtype)

    def in_graph_preprocessing(self) -> Preprocessing:
        """Preprocessing that leaves pixels unchanged, for a graph that normalises them itself."""
        shape = self.shape or ()
        layouts = [
            (layout, channels)
            for layout, (axis, *_) in AXES.items()
            for channels, depth in (("RGB", 3), ("grey", 1))
            if len(shape) == 4 and shape[axis] == depth
        ]
        if len(layouts) != 1:
            raise CasterError(
                f"the input {_shape_text(shape)} could be NCHW or NHWC images: {STATE_IT}",
                argument="preprocessing",
            )
        if self.dtype == "float64":
            raise CasterError(
                f"in-graph preprocessing does not support float64 inputs: {STATE_IT}",
                argument="preprocessing",
            )
        ((layout, channels),) = layouts
        return Preprocessing.in_graph(layout, self.dtype, channels)

    def check(self, preprocessing: Preprocessing) -> None:
        """Reject a preprocessing whose batches do not fit the graph."""
        made = preprocessing.dtype
        dtype = "float32" if self.dtype == "float64" else self.dtype  # converted by `prepared`
        if made != dtype:
            raise CasterError(
                f"the model takes {dtype}, the preprocessing makes {made}: set `dtype` to "
                f'"{dtype}" in {{argument}}',
                argument="preprocessing",
            )
        shape = _batch_shape(preprocessing)
        if self.shape is not None and not _fits(shape, self.shape):
            raise CasterError(
                f"the model takes {_shape_text(self.shape)}, the preprocessing makes "
                f"{_shape_text(shape)} ({preprocessing.layout}){self._remedy(preprocessing)}",
                argument="preprocessing",
            )

    def _remedy(self, preprocessing: Preprocessing) -> str:
        """Say what to change in a preprocessing whose batches do not fit the graph."""
        if self.shape is None or len(self.shape) != 4:
            return ""
        depths = {layout: self.shape[axis] for layout, (axis, *_) in AXES.items()}
        layouts = [layout for layout, depth in depths.items() if depth in (1, 3, None)]
        if not layouts:
            return ""
        # A declared number of channels shows the layout; a dynamic axis may be anything.
        layout = min(layouts, key=lambda x: (depths[x] is None, x != preprocessing.layout))
        depth, *size = (self.shape[axis] for axis in AXES[layout])
        made = _image_size(preprocessing)
        changes = []
        if layout != preprocessing.layout:
            changes.append(f'`layout` to "{layout}"')
        if depth not in (None, preprocessing.depth):
            changes.append('`channels` to "grey"' if depth == 1 else '`channels` to "RGB" or "BGR"')
        if not _fits(made, size):
            key = "resize" if preprocessing.crop is None else "crop"
            changes.append(f"`{key}` to {[a or b for a, b in zip(size, made, strict=True)]}")
        return f": set {' and '.join(changes)} in {{argument}}"


def _shape_remedy(declared: Sequence[int | None], shape: tuple[int, ...]) -> str:
    """Say what to do about a batch that has no batch axis or images of another size."""
    if (len(shape), len(declared)) == (3, 4):
        return f": {SINGLE_IMAGE}"
    if len(shape) == len(declared) == 4:
        for channels, *axes in AXES.values():
            size = [declared[axis] for axis in axes]
            if None not in size and declared[channels] == shape[channels] in (1, 3):
                return (
                    f": add `resize = {size}` and an `interpolation` to the preprocessing and fit "
                    "again, or resize the images of your batches"
                )
    return ""


def declared_input(model: ModelProto) -> Input:
    """Read the declaration of a graph's only input."""
    from onnx import TensorProto

    values = runtime_inputs(model.graph)
    if len(values) != 1:
        names = listed(value.name for value in values) or "none"
        raise CasterError(f"a model must have exactly one input, the images; it has {names}")
    name, tensor = values[0].name, values[0].type.tensor_type
    kinds = {number: kind for kind, number in TensorProto.DataType.items()}
    kind = kinds.get(tensor.elem_type, "of an unknown type")
    if kind not in DTYPES:
        raise CasterError(f"the input `{name}` is {kind.lower()}; caster feeds floats and uint8")
    # A dynamic size is a name, missing or -1.
    shape = tuple(size.dim_value if size.dim_value > 0 else None for size in tensor.shape.dim)
    return Input(name, shape if tensor.HasField("shape") else None, DTYPES[kind])


def _batch_shape(preprocessing: Preprocessing) -> list[int | None]:  # of 4 axes
    """Shape of the batches that a preprocessing makes; None for a size that varies."""
    shape: list[int | None] = [None] * 4
    lengths = (preprocessing.depth, *_image_size(preprocessing))
    for axis, length in zip(AXES[preprocessing.layout], lengths, strict=True):
        shape[axis] = length
    return shape


def _image_size(preprocessing: Preprocessing) -> tuple[int | None, int | None]:
    """Height and width after resizing and cropping; None if they vary."""
    resize = preprocessing.resize
    return preprocessing.crop or (resize if isinstance(resize, tuple) else (None, None))


def _shape_text(shape: Sequence[int | None]) -> str:
    """Format a shape for a message: (any, 3, 224, 224)."""
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def _fits(have: Sequence[int | None], want: Sequence[int | None]) -> bool:
    """Whether two shapes agree wherever both are known."""
    return len(have) == len(want) and all(
        a is None or b is None or a == b for a, b in zip(have, want, strict=True)
    )
