"""Compile a model and its state into a file, or say why not and write nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

import caster
from caster import CasterError
from caster.adapt.layer_passes import LayerSettings
from caster.config import Settings
from caster.export import compile_model, compiler
from caster.models.onnx.compiled import Metadata
from caster.state import file as states
from tests.support import mixture_problem as problem
from tests.support.compiled_stream import CompiledStream
from tests.support.messages import error_line
from tests.support.onnx_export import exported
from tests.support.sampling import sampled


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    graph = exported(problem.model().module, torch.zeros(2, 3, 8, 8), "dynamo")
    onnx.save(graph, folder / "model.onnx")
    model = caster.wrap(str(folder / "model.onnx"))
    caster.fit(model, problem.source_batches()).save(folder / "model.caster")
    state = states.load(folder / "model.caster")
    compile_model(model, state, folder / "adaptive.onnx")
    return SimpleNamespace(folder=folder, model=model, state=state)


def test_the_file_adapts_itself(made):
    labels = problem.shuffled(640, seed=5)
    images = problem.make_images(labels, seed=9, shift=0.8)
    stream = CompiledStream(made.folder / "adaptive.onnx")
    found = [stream(images[i : i + 64]).labels for i in range(0, 640, 64)]
    adapted = (np.concatenate(found) == labels).mean()
    frozen = (made.model(images).logits.argmax(1) == labels).mean()
    assert adapted > frozen + 0.1


def test_the_file_says_what_it_is(made):
    model = onnx.load(made.folder / "adaptive.onnx")
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert said["caster.model_sha256"] == made.model.sha256
    assert said["caster.state_sha256"] == states.digest(made.state)
    assert json.loads(said["caster.reasons"])[:2] == ["accepted", "ratio"]
    assert json.loads(said["caster.settings"])["tau"] == 1.0
    tensors = json.loads(said["caster.state"])
    names = [tensor["name"] for tensor in tensors]
    assert [value.name for value in model.graph.input][1:] == names
    assert tensors[0] == {"name": "batches", "dtype": "int64", "shape": []}
    C = problem.N_CLASSES
    assert {"name": "certificate.rows", "dtype": "float32", "shape": [2, 256, C]} in tensors
    outputs = [value.name for value in model.graph.output]
    assert outputs[5:] == [f"next.{name}" for name in names]


def test_both_mechanisms_say_the_same_things(made, tmp_path):
    path = tmp_path / "features.onnx"
    returned = compile_model(made.model, made.state, path, mechanism="features", tau=0.5)
    texts = [
        {entry.key: entry.value for entry in onnx.load(file).metadata_props}
        for file in (made.folder / "adaptive.onnx", path)
    ]
    assert list(texts[0]) == list(texts[1]) == list(returned.texts())
    alike = [key for key in texts[0] if texts[0][key] == texts[1][key]]
    assert texts[0].keys() - alike == {"caster.mechanism", "caster.settings", "caster.state"}
    assert texts[1]["caster.mechanism"] == "features"
    assert json.loads(texts[1]["caster.settings"])["tau"] == 0.5
    assert texts[1]["caster.state"] == "[]"
    assert Metadata.of(texts[1]).texts() == texts[1]


def test_states_without_layers_or_classes_are_compiled_with_features(made, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "compiled", lambda *given: (onnx.ModelProto(), given[-1]))
    plain = without_classes(made.state.layers)
    for change in ({"layers": None}, {"layers": plain}, {"head": None}):
        state = replace(made.state, **change)
        assert isinstance(compile_model(made.model, state, tmp_path / "out.onnx"), Settings)
    whole = compile_model(made.model, made.state, tmp_path / "out.onnx")
    assert isinstance(whole, LayerSettings)


def test_the_file_is_hardly_larger_than_model_and_state(made):
    """Beside them it has the graph itself, which no network makes larger."""
    sizes = {name: (made.folder / name).stat().st_size for name in ("adaptive.onnx", "model.onnx")}
    rest = sizes["adaptive.onnx"] - sizes["model.onnx"]
    assert rest < (made.folder / "model.caster").stat().st_size + 970_000


def without_classes(layers):
    return {site: replace(found, classes=None) for site, found in layers.items()}


def at_other_sites(layers):
    return {replace(site, module="?"): found for site, found in layers.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: replace(state, head=None), "other classes"),
        (lambda state: replace(state, layers=without_classes(state.layers)), "class moments"),
        (lambda state: replace(state, layers=at_other_sites(state.layers)), "the state's site"),
    ],
)
def test_a_state_that_does_not_fit_writes_nothing(made, tmp_path, change, message):
    out = tmp_path / "out.onnx"
    line = error_line(compile_model, made.model, change(made.state), out, mechanism="layers")
    assert line.startswith("cannot compile ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "both"}, "mechanism is"),
        ({"tau": 0.0}, "tau must be"),
        ({"every": 0}, "every must be"),
        ({"mechanism": "features", "tau": -1.0}, "tau must be"),
        ({"mechanism": "features", "every": 8}, "every= is for layers"),
    ],
)
def test_options_that_make_no_sense_write_nothing(made, tmp_path, options, message):
    with pytest.raises(CasterError, match=message):
        compile_model(made.model, made.state, tmp_path / "out.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", sampled([13, 17, 20], 1))
def test_models_of_other_opsets_compile(made, tmp_path, opset):
    graph = exported(problem.model().module, torch.zeros(2, 3, 8, 8), opset_version=opset)
    one = compiled_alike(made, graph, tmp_path)
    other = CompiledStream(made.folder / "adaptive.onnx")
    images = problem.make_images(problem.shuffled(48, seed=5), seed=9, shift=0.6)
    for _ in range(3):
        found, expected = one(images).probabilities, other(images).probabilities
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_with_a_fixed_batch_takes_any(made, tmp_path):
    graph = exported(problem.model().module, torch.zeros(8, 3, 8, 8), dynamic_axes={})
    one = compiled_alike(made, graph, tmp_path)
    other = CompiledStream(made.folder / "adaptive.onnx")
    images = problem.make_images(problem.shuffled(25, seed=5), seed=9, shift=0.6)
    for batch in (images[:8], images[8:24], images[24:]):
        found, expected = one(batch).probabilities, other(batch).probabilities
        np.testing.assert_allclose(found, expected, atol=1e-5)


def compiled_alike(made, graph, folder):
    """A stream through another export of the same network."""
    onnx.save(graph, folder / "model.onnx")
    model = caster.wrap(str(folder / "model.onnx"))
    sites = (each.site for each in model.sites)
    layers = dict(zip(sites, made.state.layers.values(), strict=True))
    state = replace(made.state, layers=layers, model_sha256=model.sha256)
    compile_model(model, state, folder / "adaptive.onnx")
    return CompiledStream(folder / "adaptive.onnx")
