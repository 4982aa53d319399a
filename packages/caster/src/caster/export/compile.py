"""One ONNX file that adapts itself: a frozen model and its state, compiled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, get_args

from caster._version import __version__
from caster.adapt.layer_passes import LayerSettings, has_full_map
from caster.core.verdict import Reason
from caster.errors import CasterError
from caster.io import labels
from caster.io.files import AnyPath, check_writable, replacing
from caster.models.onnx import OnnxModel
from caster.models.protocol import preprocessing_sha256
from caster.state import file as states
from caster.state.file import State

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

MAX_BYTES = 2**31 - 1  # of one protobuf file


def compile_model(
    model: OnnxModel,
    state: State,
    path: AnyPath,
    *,
    tau: float = LayerSettings.tau,
    every: int = LayerSettings.every,
) -> None:
    """Write a graph that adapts `model` by mixture transport, batch by batch.

    The file's inputs are the images and a stream's state, its outputs the answer, the verdict and
    the next state: see `caster.export.layer_graph`. A stream starts from zeros of the shapes under
    `caster.state` in the metadata, and every output next.X is the input X of the next batch.
    Nothing is written if the model or the state cannot be compiled.
    """
    check_writable(path, model.name)
    _check_installed()
    model.verify()
    state.check_model(model.sha256)
    state.check_preprocessing(preprocessing_sha256(model))
    settings = LayerSettings(tau=tau, every=every)
    try:
        found = compiled(model, state, settings)
    except CasterError as error:
        raise CasterError(f"cannot compile {model.name}: {error}") from None
    with replacing(path) as temporary:
        temporary.write_bytes(found.SerializeToString())


def _check_installed() -> None:
    try:
        import spox  # noqa: F401
    except ImportError:
        raise CasterError("compiling a model needs spox: pip install 'caster-tta[onnx]'") from None


def compiled(model: OnnxModel, state: State, settings: LayerSettings) -> ModelProto:
    """The graph that adapts a model, with its metadata."""
    from caster.export.embedding import in_opset
    from caster.export.layer_graph import Source, compile_layers  # with spox
    from caster.export.plausibility_graph import PlausibilityGraph
    from caster.models.onnx.twin import twin_model

    if state.layers is None:
        raise CasterError("the state has no layers: fit again with layers")
    if state.head is None:
        raise CasterError("the state has other classes than the model's logits")
    if not any(found.classes for found in state.layers.values()):
        raise CasterError("the state has no moments of classes: fit again")
    found = {each.site: each for each in model.sites}
    for site in state.layers:
        if site not in found:
            raise CasterError(f"it has no tensor of the state's site {site}")
    sites = [found[site] for site in state.layers]
    used = {
        site: moments if has_full_map(moments, settings) else replace(moments, covariance=None)
        for site, moments in state.layers.items()
    }
    layers = list(used.values())
    full = [found[site] for site, moments in used.items() if moments.covariance is not None]
    twin = in_opset(twin_model(*model.graph(), sites, full))
    layout = getattr(model.preprocessing, "layout", "NCHW")
    is_plausible = PlausibilityGraph.of(
        twin,
        sites[0],
        layers[0],
        state.input_range if model.preprocessing is None else model.preprocessing.value_range,
        (model.input_shape or (None, None))[1:],
        2 if layout == "NHWC" else 0,
    )
    source = Source.of(layers, [site.positions for site in sites])
    graph = compile_layers(twin, source, state.head, settings, is_plausible)
    for name, text in metadata(model, state, settings, graph.graph.input[1:]).items():
        entry = graph.metadata_props.add()
        entry.key, entry.value = f"caster.{name}", text
    if graph.ByteSize() > MAX_BYTES:
        raise CasterError("the compiled graph is larger than 2 GB, the most that one file holds")
    return graph


def metadata(
    model: OnnxModel,
    state: State,
    settings: LayerSettings,
    tensors: Sequence[ValueInfoProto],  # that a stream carries on
) -> dict[str, str]:
    """What the file says about itself, under `caster.`."""
    return {
        "version": __version__,
        "mechanism": "layers",
        "model_sha256": model.sha256,
        "preprocessing_sha256": state.preprocessing_sha256 or "",
        "state_sha256": states.digest(state),
        "classes": labels.to_json(state.classes),
        "settings": json.dumps(asdict(settings)),
        "reasons": json.dumps(get_args(Reason)),
        "state": json.dumps([_described(tensor) for tensor in tensors]),
    }


def _described(tensor: ValueInfoProto) -> dict[str, Any]:
    """What a host needs to make the zeros that a stream starts from."""
    from onnx import helper

    kind = tensor.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    shape = [size.dim_value for size in kind.shape.dim]
    return {"name": tensor.name, "dtype": str(dtype), "shape": shape}
