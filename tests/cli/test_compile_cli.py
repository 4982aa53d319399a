"""`caster compile` and `caster inspect` of what it writes: real files, and clear rejections."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import caster
from caster import CasterError
from caster.models.onnx.compiled import read_compiled
from tests.support import mixture_problem as problem
from tests.support.command_line import cli, refusal

TOML = 'layout = "NCHW"\nrange = 1.0\nmean = 0.0\nstd = 1.0\n'


@pytest.fixture(scope="module")
def made(compiled):
    return compiled


run = partial(cli, columns=200)


@pytest.fixture
def rejected(tmp_path):
    """Run a command that must fail in one line and write nothing."""

    def reject(*args):
        line = refusal(run(*args))
        assert not (tmp_path / "out.onnx").exists()
        return line

    return reject


def compile_args(made, output, **changed):
    paths = {"model": made.folder / "model.onnx", "state": made.folder / "model.caster"} | changed
    return "compile", paths["model"], paths["state"], "-o", output


def fitted(model, made, **options):
    batches = [(x, [made.names[i] for i in y]) for x, y in problem.source_batches()]
    return caster.fit(model, batches, classes=made.names, **options)


def test_compiles_layers_and_says_how_to_use_them(made, tmp_path):
    path = tmp_path / "out.onnx"
    result = run(*compile_args(made, path), "--every", 8, "--tau", 0.9)
    assert result.exit_code == 0, result.output
    _, _, found = read_compiled(path)
    assert (found.mechanism, found.settings["every"], found.settings["tau"]) == ("layers", 8, 0.9)
    said = result.stdout
    assert f"{len(made.adapter.state.layers)} sites" in said
    assert f"{len(found.state)} tensors" in said
    assert str(path) in said


def test_the_printed_python_runs(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = run(*compile_args(made, "out.onnx"), "--mechanism", "features").stdout
    (line,) = (line for line in said.splitlines() if line.startswith("In Python: "))
    batches = made.batches(2)
    outs = eval(line.removeprefix("In Python: "), {"caster": caster, "batches": batches})
    assert [len(out.labels) for out in outs] == [64, 64]


def test_inspect_explains_a_compiled_file(made):
    for mechanism, path in made.paths.items():
        result = run("inspect", path, "--classes")
        assert result.exit_code == 0, result.output
        _, sha256, found = read_compiled(path)
        unwrapped = "".join(result.stdout.split())  # a narrow terminal wraps digests
        for text in (sha256, found.model_sha256, found.state_sha256, "0accepted,1ratio"):
            assert text in unwrapped
        assert all(name in result.stdout for name in made.names)
        assert all(tensor.name in result.stdout for tensor in found.state)
        assert ("certificate.rows" in result.stdout) == (mechanism == "layers")
        assert f"tau {found.settings['tau']}" in result.stdout


def test_inspect_says_that_another_file_is_not_compiled(made, rejected):
    assert "is not compiled" in rejected("inspect", made.folder / "model.onnx")
    assert "--key" in rejected("inspect", made.paths["layers"], "--key", made.folder / "model.onnx")


def test_inputs_are_never_overwritten(made, rejected):
    for name in ("model.onnx", "model.caster"):
        before = (made.folder / name).read_bytes()
        output = made.folder / name
        assert rejected(*compile_args(made, output))
        assert output.read_bytes() == before
    assert "is an input" in rejected(*compile_args(made, made.folder / "model.onnx"))


def test_a_state_of_another_model_is_rejected(made, rejected, tmp_path):
    other = onnx.load(made.folder / "model.onnx")
    other.producer_name = "another"
    onnx.save(other, tmp_path / "other.onnx")
    args = compile_args(made, tmp_path / "out.onnx", model=tmp_path / "other.onnx")
    assert "another model" in rejected(*args)


def test_another_preprocessing_is_rejected(made, rejected, tmp_path):
    (tmp_path / "other.toml").write_text(TOML)
    args = compile_args(made, tmp_path / "out.onnx")
    said = rejected(*args, "--preprocessing", tmp_path / "other.toml")
    assert "it had none, leave out --preprocessing" in said
    model = caster.wrap(made.folder / "model.onnx", preprocessing=tmp_path / "other.toml")
    fitted(model, made).save(tmp_path / "prepared.caster")
    args = compile_args(made, tmp_path / "out.onnx", state=tmp_path / "prepared.caster")
    assert "give the same one with --preprocessing" in rejected(*args)
    given = "--preprocessing", tmp_path / "other.toml", "--mechanism", "features"
    assert run(*args, *given).exit_code == 0


def test_a_state_without_layers_has_none_to_align(made, rejected, tmp_path):
    adapter = fitted(made.model, made, layers=False)
    adapter.save(tmp_path / "plain.caster")
    args = compile_args(made, tmp_path / "out.onnx", state=tmp_path / "plain.caster")
    assert "no layers" in rejected(*args, "--mechanism", "layers")


def test_models_that_cannot_be_compiled_are_rejected(made, rejected, tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]>'
        "g (float[N, 6] x) => (float[N, 6] y) { h = Relu(x)  y = Softplus(h) }"
    )
    onnx.save(model, tmp_path / "bad.onnx")
    args = compile_args(made, tmp_path / "out.onnx", model=tmp_path / "bad.onnx")
    assert "not from a Gemm or MatMul" in rejected(*args)
    args = compile_args(made, tmp_path / "out.onnx", model=made.paths["layers"])
    assert "only an ONNX file of a classifier" in rejected(*args)
    args = compile_args(made, tmp_path / "out.onnx", model=made.folder / "model.caster")
    assert "is not an ONNX file" in rejected(*args)


def with_gelu(made, path, at):
    """The model with an operator of ONNX Runtime's own instead of one of its Relus."""
    graph = onnx.load(made.folder / "model.onnx")
    node = [node for node in graph.graph.node if node.op_type == "Relu"][at]
    gelu = onnx.helper.make_node("Gelu", node.input, node.output, domain="com.microsoft")
    node.CopyFrom(gelu)
    graph.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(graph, path)
    return caster.wrap(path)


def test_shapes_after_a_custom_operator_are_not_known(made, tmp_path):
    with pytest.raises(CasterError, match="cannot infer the channel axis"):
        _ = with_gelu(made, tmp_path / "custom.onnx", at=0).sites


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_custom_operators_are_rejected(made, rejected, tmp_path, mechanism):
    model = with_gelu(made, tmp_path / "custom.onnx", at=-1)
    fitted(model, made).save(tmp_path / "custom.caster")
    changed = {"model": tmp_path / "custom.onnx", "state": tmp_path / "custom.caster"}
    args = compile_args(made, tmp_path / "out.onnx", **changed)
    said = rejected(*args, "--mechanism", mechanism)
    assert "com.microsoft Gelu: only standard operators" in said


def test_without_spox_it_says_what_to_install(made, rejected, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "spox", None)
    said = rejected(*compile_args(made, tmp_path / "out.onnx"))
    assert "pip install 'caster-tta[onnx]'" in said


def test_a_signed_state_is_checked(made, rejected, tmp_path):
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)
    made.adapter.save(tmp_path / "signed.caster", key=key)
    args = compile_args(made, tmp_path / "out.onnx", state=tmp_path / "signed.caster")
    assert "sign" in rejected(*args, "--key", other)
    assert run(*args, "--key", key, "--mechanism", "features").exit_code == 0


@pytest.mark.parametrize("command", ["predict", "evaluate", "fit"])
def test_other_commands_say_that_it_adapts_itself(made, rejected, tmp_path, command):
    np.savez(tmp_path / "images.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=np.arange(4))
    state = [] if command == "fit" else [made.folder / "model.caster"]
    output = [] if command == "evaluate" else ["-o", tmp_path / "out.csv"]
    args = command, "--model", made.paths["layers"], *state, tmp_path / "images.npz", *output
    assert "adapts itself" in rejected(*args)
    assert [Path(each).name for each in tmp_path.iterdir()] == ["images.npz"]
