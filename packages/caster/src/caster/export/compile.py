"""One ONNX file that adapts itself: a frozen model and its state, compiled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from caster._version import __version__
from caster.adapt.layer_passes import LayerSettings
from caster.errors import CasterError
from caster.io import labels
from caster.io.files import AnyPath, check_writable, replacing
from caster.models.onnx import OnnxModel
from caster.models.protocol import preprocessing_sha256
from caster.state import file as states
from caster.state.file import State

if TYPE_CHECKING:
    from onnx import ModelProto

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
    the next state: see `caster.export.layer_graph`. Nothing is written if the model or the state
    cannot be compiled.
    """
    check_writable(path, model.name)
    model.verify()
    state.check_model(model.sha256)
    state.check_preprocessing(preprocessing_sha256(model))
    settings = LayerSettings(maps="diagonal", tau=tau, every=every)
    try:
        compiled = _compiled(model, state, settings)
    except CasterError as error:
        raise CasterError(f"cannot compile {model.name}: {error}") from None
    with replacing(path) as temporary:
        temporary.write_bytes(compiled.SerializeToString())


def _compiled(model: OnnxModel, state: State, settings: LayerSettings) -> ModelProto:
    from caster.export.layer_graph import Source, compile_layers  # with spox
    from caster.models.onnx.sites import find_onnx_sites
    from caster.models.onnx.twin import twin_model

    if state.layers is None:
        raise CasterError("the state has no layers: fit again with layers")
    if state.head is None:
        raise CasterError("the state has other classes than the model's logits")
    if not any(found.classes for found in state.layers.values()):
        raise CasterError("the state has no moments of classes: fit again")
    graph, head = model.graph()
    found = {each.site: each for each in find_onnx_sites(graph, head)}
    for site in state.layers:
        if site not in found:
            raise CasterError(f"it has no tensor of the state's site {site}")
    sites = [found[site] for site in state.layers]
    source = Source.of(list(state.layers.values()))
    compiled = compile_layers(twin_model(graph, head, sites), source, state.head, settings)
    for name, text in metadata(model, state, settings).items():
        entry = compiled.metadata_props.add()
        entry.key, entry.value = f"caster.{name}", text
    if compiled.ByteSize() > MAX_BYTES:
        raise CasterError("the compiled graph is larger than 2 GB, the most that one file holds")
    return compiled


def metadata(model: OnnxModel, state: State, settings: LayerSettings) -> dict[str, str]:
    """What the file says about itself, under `caster.`."""
    return {
        "version": __version__,
        "mechanism": "layers",
        "model_sha256": model.sha256,
        "preprocessing_sha256": state.preprocessing_sha256 or "",
        "state_sha256": states.digest(state),
        "classes": labels.to_json(state.classes),
        "settings": json.dumps(asdict(settings)),
    }
