"""Compiled files in Python: the answers of `Adapter`, streams that continue, and bad files."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import caster
from caster import CasterError
from caster.models.onnx import model_file
from caster.models.onnx.compiled import CompiledModel, Metadata
from tests.support.messages import error_line

MECHANISMS = ("layers", "features")


@pytest.fixture(scope="module")
def made(compiled):
    return compiled


@pytest.fixture(scope="module")
def opened(made):
    return {name: caster.wrap(path) for name, path in made.paths.items()}


def same(found, expected, atol=1e-4):
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=atol)
    assert found.verdict.accepted == expected.verdict.accepted
    assert found.verdict.reason == expected.verdict.reason
    np.testing.assert_allclose(found.verdict.ratio, expected.verdict.ratio, rtol=1e-3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_stream_answers_as_the_adapter(made, opened, mechanism):
    model = opened[mechanism]
    assert isinstance(model, CompiledModel)
    assert model.classes.tolist() == made.names
    adapter = caster.Adapter(made.model, made.adapter.state, mechanism=mechanism, every=1)
    expected = adapter.new_stream()  # a compiled file compares every batch, unless told otherwise
    stream, batches = model.new_stream(), [*made.batches(), *made.batches(2, size=7)]
    for batch in batches:
        same(stream(batch), expected(batch))
    assert stream.samples == expected.samples == sum(map(len, batches))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_call_stands_alone_and_a_stream_does_not(made, opened, mechanism):
    model, batches = opened[mechanism], made.batches(3)
    outs = list(model.stream(batches))
    alone = [model(batch) for batch in batches]
    np.testing.assert_array_equal(alone[0].scores, outs[0].scores)
    carried = not np.array_equal(alone[2].scores, outs[2].scores)
    assert carried == (mechanism == "layers")
    assert outs[0].adapted is None
    assert outs[0].frozen is None
    assert not outs[0].disputed.any()
    np.testing.assert_allclose(np.exp(outs[0].scores).sum(1), 1, atol=1e-5)


def test_batches_come_as_a_loader_yields_them(made, opened):
    (batch,) = made.batches(1)
    labels = np.zeros(len(batch), int)
    expected = opened["layers"](batch).scores
    for given in ((batch, labels), {"images": batch}, batch.astype(np.float64)):
        np.testing.assert_array_equal(opened["layers"](given).scores, expected)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_saved_stream_continues_exactly(made, opened, mechanism, tmp_path):
    model, batches = opened[mechanism], made.batches(4)
    stream = model.new_stream()
    for batch in batches[:2]:
        stream(batch)
    stream.save(tmp_path / "stream")
    resumed = [model.resume(tmp_path / "stream"), model.resume(stream.state())]
    for batch in batches[2:]:
        expected = stream(batch)
        for other in resumed:
            found = other(batch)
            np.testing.assert_array_equal(found.scores, expected.scores)
            np.testing.assert_array_equal(found.ids, expected.ids)


def test_states_of_other_streams_are_rejected(made, opened, tmp_path):
    layers, features = opened["layers"], opened["features"]
    state = layers.new_stream().state()
    assert "another file" in error_line(features.resume, state)
    assert "not the state of a compiled stream" in error_line(layers.resume, {})
    for name, value in (
        ("state.mixture", np.zeros(3)),
        ("state.batches", np.array(0.0)),
        ("samples", np.zeros(2, int)),
        ("samples", np.array(-1)),
    ):
        with pytest.raises(CasterError, match="not the state of a compiled stream"):
            layers.resume({**state, name: value})
    del state["source"]
    assert "not the state of a compiled stream" in error_line(layers.resume, state)
    made.adapter.new_stream().save(tmp_path / "other")
    assert "not a saved compiled stream" in error_line(layers.resume, tmp_path / "other")


def test_a_batch_that_does_not_fit_leaves_the_stream_as_it_was(made, opened):
    stream, (batch,) = opened["layers"].new_stream(), made.batches(1)
    assert "takes" in error_line(stream, batch[0])
    assert "no rows" in error_line(stream, batch[:0])
    assert stream.samples == 0
    np.testing.assert_array_equal(stream(batch).scores, opened["layers"](batch).scores)


def test_a_stream_takes_one_thread_at_a_time(made, opened, monkeypatch):
    stream, (batch,) = opened["layers"].new_stream(), made.batches(1)

    def second_thread(*args):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream, batch).result()

    monkeypatch.setattr(opened["layers"], "run", second_thread)
    with pytest.raises(CasterError, match="two threads called one stream"):
        stream(batch)
    monkeypatch.undo()
    assert len(stream(batch).labels) == len(batch)  # and is free again


def test_a_file_is_read_once(made, monkeypatch):
    read, calls = model_file.read_regular, []
    monkeypatch.setattr(model_file, "read_regular", lambda path: calls.append(path) or read(path))
    caster.wrap(made.paths["layers"])
    caster.wrap(made.model.name)
    assert list(map(str, calls)) == [str(made.paths["layers"]), made.model.name]


def test_it_is_not_a_frozen_model(made, opened):
    (batch,) = made.batches(1)
    for use in (
        lambda model: caster.fit(model, [(batch, np.arange(len(batch)) % 6)]),
        lambda model: caster.Adapter(model, made.adapter.state),
    ):
        with pytest.raises(CasterError, match=r"layers.onnx adapts itself") as caught:
            use(opened["layers"])
        assert "\n" not in str(caught.value)
    with pytest.raises(CasterError, match="an Adapter adapts itself"):
        caster.Adapter(made.adapter, made.adapter.state)
    with pytest.raises(CasterError, match="is compiled and adapts itself"):
        caster.wrap(made.paths["layers"], head="linear")


def test_the_python_of_the_page_runs(made, monkeypatch, tmp_path, capsys):
    page = Path(__file__).parents[2] / "docs" / "compile.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    batches = made.batches(3)
    for path in made.paths.values():
        shutil.copy(path, "adaptive.onnx")
        reasons = [out.verdict.reason for out in caster.wrap("adaptive.onnx").stream(batches)]
        for code in blocks:
            names = {"batches": batches}
            exec(code, names)
            said = capsys.readouterr().out
            at = [said.index(reason) for reason in reasons]
            assert at == sorted(at)
        assert names["reasons"][int(names["out"]["reason"])] == reasons[-1]


def damaged(made, path, change):
    model = onnx.load(made.paths["layers"])
    texts = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, change(texts))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("caster.classes", None),
        ("caster.reasons", "["),
        ("caster.settings", "1"),
        ("caster.state", '[{"name": "batches", "dtype": "float31", "shape": []}]'),
        ("caster.state", '[{"name": "batches", "dtype": "int64", "shape": [-1]}]'),
        ("caster.state", "[" * 100_000),
    ],
)
def test_damaged_metadata_is_one_line(made, tmp_path, key, text):
    def change(texts):
        others = {name: value for name, value in texts.items() if name != key}
        return others if text is None else others | {key: text}

    path = damaged(made, tmp_path / "bad.onnx", change)
    with pytest.raises(CasterError, match=r"bad.onnx: its metadata is damaged"):
        caster.wrap(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[1:], "2 image inputs"),
        (lambda tensors: [{**tensors[0], "shape": [1]}, *tensors[1:]], "state tensor `batches`"),
        (lambda tensors: [{**tensors[0], "dtype": "bool"}, *tensors[1:]], "state tensor `batches`"),
        (lambda tensors: [*tensors, {**tensors[0], "name": "more"}], "state tensor `more`"),
    ],
)
def test_a_state_that_the_graph_does_not_have_is_rejected(made, tmp_path, change, message):
    def changed(texts):
        return texts | {"caster.state": json.dumps(change(json.loads(texts["caster.state"])))}

    with pytest.raises(CasterError, match=message):
        caster.wrap(damaged(made, tmp_path / "bad.onnx", changed))


def test_metadata_survives(opened):
    found = opened["layers"].metadata
    again = Metadata.of(found.texts())
    assert again.texts() == found.texts()
    assert again.state == found.state


def test_weights_in_another_file_are_rejected(opened, tmp_path):
    """Its digest would not cover them."""
    model = onnx.load(opened["layers"].name)
    onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, size_threshold=64)
    with pytest.raises(CasterError, match="keeps weights in another file"):
        caster.wrap(tmp_path / "a.onnx")


def test_a_file_without_an_answer_is_rejected(opened, tmp_path):
    model = onnx.load(opened["layers"].name)
    kept = [output for output in model.graph.output if output.name != "reason"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(CasterError, match="no output `reason`"):
        caster.wrap(tmp_path / "a.onnx")
