"""A linear classifier's weight and bias: with the features they give the model's own logits."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from caster import CasterError, wrap
from caster.models.onnx import OnnxModel
from tests.support import problem

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(7, 3)).astype(np.float32)
W = RNG.normal(size=(3, 5)).astype(np.float32)
NUMBERS = {
    "W": W,
    "V": W.T.copy(),
    "b": RNG.normal(size=5).astype(np.float32),
    "row": RNG.normal(size=(1, 5)).astype(np.float32),
    "two": np.float32(2),
    "one": np.array([1]),
    "Q": RNG.integers(0, 255, size=(3, 5)).astype(np.uint8),
    "s": np.float32(0.02),
    "z": np.uint8(128),
    "M": RNG.normal(size=(5, 4)).astype(np.float32),
    "by_row": RNG.normal(size=(7, 1)).astype(np.float32),
}


def gives_the_logits(model, batch, tolerance=1e-5) -> None:
    outputs = model(batch)
    weight, bias = (np.asarray(part) for part in model.linear_head())
    features, logits = np.asarray(outputs.features, float), np.asarray(outputs.logits)
    assert weight.dtype == bias.dtype == np.float32
    assert bias.shape == weight.shape[:1] == logits.shape[1:]
    np.testing.assert_allclose(features @ weight.T + bias, logits, rtol=tolerance, atol=tolerance)


# torch


@pytest.mark.parametrize("kind", problem.BUILDERS)
def test_of_a_module(kind):
    gives_the_logits(problem.model(kind), problem.stream(1)[0])


def test_a_module_shows_its_head_with_the_first_batch():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 5, bias=False))
    model = wrap(net)
    assert model.linear_head() is None
    gives_the_logits(model, ROWS)
    weight, bias = model.linear_head()
    assert weight.data_ptr() == net[1].weight.data_ptr()  # no copy
    assert not weight.requires_grad
    assert not bias.any()
    assert wrap(net, head="1").linear_head() is not None


def test_half_precision_is_widened():
    model = wrap(nn.Sequential(nn.ReLU(), nn.Linear(3, 5)).bfloat16())
    gives_the_logits(model, ROWS, tolerance=0.05)


def test_another_layer_is_no_linear_head():
    net = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 5, 1), nn.Flatten())
    with pytest.raises(CasterError, match="the head '1' of Sequential is a Conv2d, not a Linear"):
        wrap(net, head="1").linear_head()


# ONNX


@pytest.fixture
def save(tmp_path):
    """Write a model of these nodes between x and y, with the numbers above for weights."""

    def save(nodes, inputs="float[N, 3] x", **options):
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> '
            f"g ({inputs}) => (float[N, k] y) {{ [relu] h = Relu(x) {nodes} }}"
        )
        for name, value in NUMBERS.items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        onnx.save(model, tmp_path / "model.onnx", **options)
        return tmp_path / "model.onnx"

    return save


HEADS = {
    "gemm": "y = Gemm(h, W, b)",
    "gemm without bias": "y = Gemm(h, W)",
    "transposed": "y = Gemm<transB = 1>(h, V, b)",
    "scaled": "y = Gemm<alpha = 0.5, beta = 3.0>(h, W, b)",
    "one bias for all": "y = Gemm(h, W, two)",
    "matmul": "y = MatMul(h, W)",
    "matmul, bias": "m = MatMul(h, W) y = Add(m, b)",
    "bias first": "m = MatMul(h, W) y = Add(b, m)",
    "bias as a row": "m = MatMul(h, W) y = Add(m, row)",
    "bias less": "m = MatMul(h, W) y = Sub(b, m)",
    "less bias": "m = MatMul(h, W) y = Sub(m, b)",
    "temperature": "g = Gemm(h, W, b) y = Div(g, two)",
    "scale a class": "g = Gemm(h, W, b) m = Mul(row, g) y = Add(m, b)",
    "softmax": "g = Gemm(h, W, b) y = Softmax(g)",
    "computed weight": "u = Mul(W, two) t = Transpose(u) y = Gemm<transB = 1>(h, t, b)",
    "double": "d = Cast<to = 11>(h) w = Cast<to = 11>(W) m = MatMul(d, w) y = Cast<to = 1>(m)",
    "shaped": "d = Dropout(h) g = Gemm(d, W, b) u = Unsqueeze(g, one) y = Squeeze(u, one)",
    "shaped as the batch": "g = Gemm(h, W, b) s1 = Shape(g) y = Reshape(g, s1)",
    "constant": "c = Constant<value = float[1] {0.5}>() g = Gemm(h, W, b) y = Mul(g, c)",
}


@pytest.mark.parametrize("nodes", HEADS.values(), ids=HEADS)
def test_of_a_graph(save, nodes):
    gives_the_logits(OnnxModel(save(nodes)), ROWS)


def test_a_weight_from_codes(save):
    """Which the runtime multiplies in its own, coarser way."""
    model = OnnxModel(save("w = DequantizeLinear(Q, s, z) y = Gemm(h, w, b)"))
    gives_the_logits(model, ROWS, tolerance=0.02)
    codes = (NUMBERS["Q"].astype(float) - 128) * 0.02
    np.testing.assert_allclose(model.linear_head()[0], codes.T, rtol=1e-6)


def test_weights_listed_as_inputs_or_in_another_file(save):
    gives_the_logits(OnnxModel(save("y = Gemm(h, W, b)", "float[N,3] x, float[3,5] W")), ROWS)
    outside = {"save_as_external_data": True, "size_threshold": 0}
    gives_the_logits(OnnxModel(save("y = Gemm(h, W, b)", **outside)), ROWS)


def test_as_exported_by_torch(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own making
        torch.onnx.export(net, (torch.zeros(2, 3, 8, 8),), tmp_path / "net.onnx", dynamo=False)
    weight, bias = OnnxModel(tmp_path / "net.onnx").linear_head()
    np.testing.assert_array_equal(weight, net[3].weight.detach())
    np.testing.assert_array_equal(bias, net[3].bias.detach())


def test_a_file_that_changed_is_not_read(save):
    model = OnnxModel(save("y = Gemm(h, W, b)"))
    save("y = MatMul(h, W)")
    with pytest.raises(CasterError, match="changed since it was opened"):
        model.linear_head()


REFUSED = {
    "a layer between": ("relu", "y = Gemm(h, W, b)", "Relu `relu` is between"),
    "two products": (
        "first",
        "[first] m = MatMul(h, W) y = MatMul(m, M)",
        "not one Gemm or MatMul apart",
    ),
    "a scale before": ("scale", "[scale] m = Mul(h, two) y = MatMul(m, W)", "Mul changes the feat"),
    "codes after": (
        None,
        "g = Gemm(h, W, b) c = QuantizeLinear(g, s, z) y = DequantizeLinear(c, s, z)",
        "DequantizeLinear `y` is between",
    ),
    "a number over the data": (
        "fc",
        "[fc] g = Gemm(h, W, b) y = Div(two, g)",
        "Div `y` is between",
    ),
    "a number a row": (None, "g = Gemm(h, W, b) y = Add(g, by_row)", "shape (7, 1) does not fit"),
}


@pytest.mark.parametrize(("head", "nodes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_linear_classifier(save, head, nodes, words):
    model = OnnxModel(save(nodes), head=head)
    model(ROWS)
    with pytest.raises(CasterError) as caught:
        model.linear_head()
    assert words in str(caught.value)
    assert "model.onnx" in str(caught.value)
