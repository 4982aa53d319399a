"""Compile a frozen model and its state into one self-adapting ONNX file."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, get_args

from caster._version import __version__
from caster.adapt.adapter import Mechanism
from caster.adapt.layer_passes import LayerSettings, has_full_map
from caster.config import Settings
from caster.errors import CasterError, StateError
from caster.io.files import AnyPath, check_writable, replacing
from caster.models.onnx import OnnxModel
from caster.models.onnx.compiled import NEXT, REASONS, Metadata, StateTensor
from caster.models.protocol import prefix_errors, preprocessing_sha256
from caster.state import file as states
from caster.state.file import State

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_BYTES = 2**31 - 1  # protobuf's limit on the size of a message


def compile_model(
    model: OnnxModel,
    state: State,
    path: AnyPath,
    *,
    mechanism: Mechanism = "auto",
    tau: float | None = None,
    every: int | None = None,
) -> Metadata:
    """Write a graph that adapts `model` batch by batch; return its metadata.

    The inputs of the graph are the images and the state of a stream. Its outputs are the answer,
    the verdict and the next state. A stream starts from zeros, in the shapes that the metadata
    lists under `caster.state`, and feeds every output next.X back as input X of the next batch.
    Nothing is written if the model or the state cannot be compiled.

    Parameters
    ----------
    mechanism : "layers" (`caster.export.layer_graph`) or "features" (`caster.export.features`).
        "auto" chooses layers if the state has them with class moments.
    tau : largest accepted ratio; the mechanism's own by default.
    every : while the verdict is stable, compare with the frozen model in one of `every` windows,
        as `Adapter` does; 1 compares in every batch. Only for layers; their own by default.
    """
    try:
        import spox  # noqa: F401
    except ImportError:
        raise CasterError("compiling a model needs spox: pip install 'caster-tta[onnx]'") from None
    if not isinstance(model, OnnxModel):
        name = getattr(model, "name", type(model).__name__)
        raise CasterError(f"only an ONNX file of a classifier can be compiled, not {name}")
    check_writable(path, model.name)
    model.verify()
    _check_fitted(model, state)
    with prefix_errors(f"cannot compile {model.name}"):
        settings = _settings(mechanism, state, tau, every)
        graph, metadata = compiled(model, state, settings)
    with replacing(path) as temporary:
        temporary.write_bytes(graph.SerializeToString())
    return metadata


def _check_fitted(model: OnnxModel, state: State) -> None:
    """Reject a state that was fitted with another model or preprocessing, without exception."""
    if state.model_sha256 != model.sha256:
        raise StateError(f"the state was fitted with another model: fit again with {model.name}")
    if state.preprocessing_sha256 != preprocessing_sha256(model):
        same = "give the same one with" if state.preprocessing_sha256 else "it had none, leave out"
        raise StateError(
            f"the state was fitted with another preprocessing: {same} {{argument}}",
            argument="preprocessing",
        )


def _settings(
    mechanism: Mechanism, state: State, tau: float | None, every: int | None
) -> LayerSettings | Settings:
    """Choose the mechanism; return its constants, with the user's own."""
    if mechanism not in get_args(Mechanism):
        raise CasterError(f"mechanism is 'auto', 'layers' or 'features', not {mechanism!r}")
    has_layers = state.has_class_moments and state.head is not None
    if mechanism == "layers" or (mechanism == "auto" and has_layers):
        return LayerSettings(
            tau=LayerSettings.tau if tau is None else tau,
            every=LayerSettings.every if every is None else every,
        )
    if every is not None:
        raise CasterError(
            "{argument} is for layers: feature transport always compares", argument="every"
        )
    return state.settings if tau is None else replace(state.settings, tau=tau)


def compiled(
    model: OnnxModel, state: State, settings: LayerSettings | Settings
) -> tuple[ModelProto, Metadata]:
    """Build the graph that adapts a model, and its metadata; the settings imply the mechanism."""
    if isinstance(settings, LayerSettings):
        graph = _with_layers(model, state, settings)
    else:
        from caster.export.features import compile_features  # imports spox

        graph = compile_features(model.exposed(), state, settings)
    metadata = Metadata(
        version=__version__,
        mechanism="layers" if isinstance(settings, LayerSettings) else "features",
        model_sha256=model.sha256,
        preprocessing_sha256=state.preprocessing_sha256 or "",
        state_sha256=states.digest(state),
        settings=asdict(settings),
        classes=state.classes,
        reasons=REASONS,
        state=_state_tensors(graph),
    )
    for key, value in metadata.texts().items():
        graph.metadata_props.add(key=key, value=value)
    if graph.ByteSize() > MAX_BYTES:
        raise CasterError("the compiled graph exceeds 2 GB, the largest size of an ONNX file")
    return graph, metadata


def _with_layers(model: OnnxModel, state: State, settings: LayerSettings) -> ModelProto:
    """Build the graph of mixture transport at the state's sites."""
    from caster.export.embedding import check_operators
    from caster.export.layer_graph import LayerGraph, Source, pieces_of  # imports spox
    from caster.export.plausibility_graph import PlausibilityGraph
    from caster.models.onnx.layers import fixed_sizes
    from caster.models.onnx.resting import Pieces
    from caster.models.onnx.twin import twin_model

    if state.layers is None:
        raise CasterError("the state has no layers: fit again with layers")
    if state.head is None:
        raise CasterError("the state has other classes than the model's logits")
    if not state.has_class_moments:
        raise CasterError("the state has no class moments: fit again")
    found = {each.site: each for each in model.sites}
    for site in state.layers:
        if site not in found:
            raise CasterError(f"it has no tensor at the state's site {site}")
    sites = [found[site] for site in state.layers]
    used = {
        site: moments if has_full_map(moments, settings) else replace(moments, covariance=None)
        for site, moments in state.layers.items()
    }
    layers = list(used.values())
    full = [found[site] for site, moments in used.items() if moments.covariance is not None]
    # If idle copies cannot take an empty batch, every piece would cost each of them a row.
    takes_empty = model.takes_empty_batches()
    shape = (model.input_shape or (None, None))[1:]
    pieces = replace(pieces_of(shape), fixed=fixed_sizes(model)) if takes_empty else Pieces()
    twin = twin_model(*model.graph(), sites, full, pieces)
    check_operators(twin)
    layout = getattr(model.preprocessing, "layout", "NCHW")
    is_plausible = PlausibilityGraph.of(
        twin,
        sites[0],
        layers[0],
        state.input_range if model.preprocessing is None else model.preprocessing.value_range,
        shape,
        2 if layout == "NHWC" else 0,
    )
    return LayerGraph(
        twin=twin,
        source=Source.of(layers, [site.positions for site in sites], state.moments.U.shape[0]),
        columns=state.head,
        settings=settings,
        is_plausible=is_plausible,
        pieces=pieces,
        idle_rows=0 if takes_empty else 1,
    ).compiled()


def _state_tensors(graph: ModelProto) -> tuple[StateTensor, ...]:
    """List the inputs that have a `next.` output."""
    from onnx.helper import tensor_dtype_to_np_dtype

    outputs = {output.name for output in graph.graph.output}
    return tuple(
        StateTensor(
            given.name,
            tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type).name,
            tuple(size.dim_value for size in given.type.tensor_type.shape.dim),
        )
        for given in graph.graph.input
        if f"{NEXT}{given.name}" in outputs
    )
