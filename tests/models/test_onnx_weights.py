"""ONNX weights in other files: the digest covers every file a model refers to."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper, parser

from caster import CasterError
from caster.models.onnx import OnnxModel
from tests.support.messages import error_line

HEADER = '<ir_version: 10, opset_import: ["": 21, "f": 1]>'
ROWS = np.ones((2, 3), np.float32)
W = np.arange(15, dtype=np.float32).reshape(3, 5)
NUMBERS = ", ".join(map(str, W.flat))
CONSTANT = f"v = Constant<value = float[3, 5] {{{NUMBERS}}}>()"
BRANCH = f"() => (float[3, 5] v) {{ {CONSTANT} }}"

LOCATIONS = {
    "initializer": f"<float[3, 5] w = {{{NUMBERS}}}> {{ y = MatMul(x, w) }}",
    "constant": f"{{ {CONSTANT} y = MatMul(x, v) }}",
    "function": '{ w = f.weight() y = MatMul(x, w) } <domain: "f", opset_import: ["": 21]> '
    f"weight () => (v) {{ {CONSTANT} }}",
    "function in a function": '{ w = f.outer() y = MatMul(x, w) } <domain: "f", opset_import: '
    '["": 21, "f": 1]> outer () => (v) { v = f.inner() } <domain: "f", opset_import: ["": 21]> '
    f"inner () => (v) {{ {CONSTANT} }}",
    "If": f"<bool yes = {{1}}> {{ w = If(yes)<then_branch = t {BRANCH}, else_branch = e {BRANCH}> "
    "y = MatMul(x, w) }",
    "If in a function": '{ w = f.weight() y = MatMul(x, w) } <domain: "f", opset_import: ["": 21]>'
    " weight () => (w) { yes = Constant<value = bool {1}>() w = If(yes)<then_branch = t "
    f"{BRANCH}, else_branch = e {BRANCH}> }}",
    "initializer of a branch": "<bool yes = {1}> { w = If(yes)<then_branch = t () => (float[3, 5] "
    f"v) <float[3, 5] u = {{{NUMBERS}}}> {{ v = Identity(u) }}, else_branch = e {BRANCH}> "
    "y = MatMul(x, w) }",
    "Loop": "<bool yes = {1}, int64 n = {1}, float z = {0}> { w = Loop(n, yes, z)<body = l "
    f"(int64 i, bool c, float a) => (bool d, float[3, 5] s) {{ d = Identity(c) {CONSTANT} "
    "s = Add(a, v) }> "
    "y = MatMul(x, w) }",
}


def moved(tensor: TensorProto, name: str, offset: int) -> int:
    """Replace a tensor's numbers by a reference to another file; return where they end."""
    length = numpy_helper.to_array(tensor).nbytes
    for field in ("raw_data", "float_data", "int64_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return offset + length


def tensors(message):
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                yield from [each] if isinstance(each, TensorProto) else tensors(each)


def save_with_name(path, text, name):
    """Write a model that refers to this weight file, without writing the file."""
    proto = parser.parse_model(f"{HEADER} g (float[N, 3] x) => (float[N, 5] y) {text}")
    for tensor in tensors(proto):
        if list(tensor.dims) == [3, 5]:
            moved(tensor, name, 4096)
    path.write_bytes(proto.SerializeToString())


def save(path, text, name="weights/first/part.bin"):
    """Write a model whose matrices are in another file, after a page of zeros; return that file."""
    save_with_name(path, text, name)
    weights = path.parent / name
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(bytes(4096) + W.tobytes())
    return weights


def check_binding(path, weights):
    """The runtime reads the file, and another content is another model."""
    model = OnnxModel(path, head="y")
    before = model(ROWS).logits
    np.testing.assert_allclose(before, ROWS @ W)
    waiting = OnnxModel(path, head="y")
    content = weights.read_bytes()
    weights.write_bytes(content[:4096] + (2 * W).tobytes())
    other = OnnxModel(path, head="y")
    np.testing.assert_allclose(other(ROWS).logits, 2 * before)
    assert other.sha256 != model.sha256
    for each in (model.verify, lambda: waiting(ROWS), waiting.verify):
        with pytest.raises(CasterError, match="or its weights changed"):
            each()


@pytest.mark.parametrize("place", LOCATIONS)
def test_the_digest_covers_every_location(tmp_path, place):
    path = tmp_path / "model.onnx"
    check_binding(path, save(path, LOCATIONS[place]))


@pytest.mark.parametrize("part", ["values", "indices"])
@pytest.mark.parametrize("place", ["initializer", "constant"])
def test_sparse_tensors(tmp_path, place, part):
    make = "" if place == "initializer" else "W = Constant()"
    proto = parser.parse_model(
        f"{HEADER} g (float[N, 3] x) => (float[N, 5] y) {{ {make} y = MatMul(x, W) }}"
    )
    sparse = onnx.SparseTensorProto(dims=[3, 5])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([1, 2, 3], np.float32), "W"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0, 6, 12])))
    content = numpy_helper.to_array(getattr(sparse, part)).copy()
    moved(getattr(sparse, part), "sparse.bin", 0)
    if place == "initializer":
        proto.graph.sparse_initializer.append(sparse)
    else:
        proto.graph.node[0].attribute.add(
            name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse
        )
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "sparse.bin").write_bytes(content.tobytes())
    model = OnnxModel(tmp_path / "model.onnx", head="y")
    np.testing.assert_allclose(model(ROWS).logits, [[1, 2, 3, 0, 0]] * 2)
    (tmp_path / "sparse.bin").write_bytes((content + 1).tobytes())
    with pytest.raises(CasterError, match="or its weights changed"):
        model.verify()
    assert OnnxModel(tmp_path / "model.onnx", head="y").sha256 != model.sha256


def test_fields_that_caster_does_not_know(tmp_path):
    """Training graphs are not run, but the digest covers their tensors."""
    path = tmp_path / "model.onnx"
    weights = save(path, LOCATIONS["initializer"])
    proto = onnx.load(path, load_external_data=False)
    tensor = proto.training_info.add().algorithm.initializer.add()
    tensor.CopyFrom(numpy_helper.from_array(W, "g"))
    moved(tensor, "training.bin", 0)
    path.write_bytes(proto.SerializeToString())
    (tmp_path / "training.bin").write_bytes(weights.read_bytes())
    model = OnnxModel(path)
    (tmp_path / "training.bin").write_bytes(b"")
    with pytest.raises(CasterError, match="or its weights changed"):
        model.verify()


def test_weights_swapped_while_the_runtime_reads_them(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    weights = save(path, LOCATIONS["function"])
    model, session = OnnxModel(path, head="y"), onnxruntime.InferenceSession

    def swapping(*arguments, **options):
        weights.write_bytes(bytes(4096) + (2 * W).tobytes())
        return session(*arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", swapping)
    with pytest.raises(CasterError, match="or its weights changed"):
        model(ROWS)


@pytest.mark.parametrize("place", ["initializer", "function", "If"])
def test_weights_must_be_in_the_folder_of_the_model(tmp_path, place):
    home = tmp_path / "home"
    home.mkdir()
    path = home / "model.onnx"
    away = save(path, LOCATIONS[place], "away.bin").rename(tmp_path / "away.bin")
    (home / "link.bin").symlink_to(away)
    (home / "folder").symlink_to(tmp_path)
    for name in ("../away.bin", str(away), "link.bin", "folder/away.bin", "a\0b"):
        save_with_name(path, LOCATIONS[place], name)
        assert "outside its own folder" in error_line(OnnxModel, path)
    (home / "loop.bin").symlink_to("loop.bin")
    save_with_name(path, LOCATIONS[place], "loop.bin")
    assert "cannot read" in error_line(OnnxModel, path, head="y")


@pytest.mark.parametrize("linked", [False, True])
def test_memory_addresses_are_rejected(tmp_path, linked):
    """ONNX Runtime reads its own memory under this name, even if such a file exists."""
    path, mark = tmp_path / "model.onnx", "*/_ORT_MEM_ADDR_/*"
    save(path, LOCATIONS["initializer"], mark)
    if linked:
        (tmp_path / "link.bin").symlink_to(mark)
        save_with_name(path, LOCATIONS["initializer"], "link.bin")
    with pytest.raises(CasterError, match="not a file name"):
        OnnxModel(path)


def test_a_linked_model_with_weights_beside_the_link(tmp_path):
    (tmp_path / "store").mkdir()
    path = tmp_path / "model.onnx"
    weights = save(path, LOCATIONS["function"], "weights.bin")
    path.rename(tmp_path / "store" / "blob")
    path.symlink_to("store/blob")
    check_binding(path, weights)


def test_pipes_are_rejected(tmp_path):
    path = tmp_path / "model.onnx"
    weights = save(path, LOCATIONS["function"])
    weights.unlink()
    os.mkfifo(weights)
    os.mkfifo(tmp_path / "pipe.onnx")
    for each in (path, tmp_path / "pipe.onnx"):
        with pytest.raises(CasterError, match="not a regular file"):
            OnnxModel(each, head="y")
