"""ONNX files: find the features, reject what cannot work, never change the file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser

from caster import CasterError
from caster.models.onnx import OnnxModel
from caster.models.onnx.model import Input
from caster.models.preprocessing import Preprocessing
from tests.support.messages import error_line, flipped_bits

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((7, 3, 4, 4)).astype(np.float32)
W = RNG.standard_normal((3, 5)).astype(np.float32)
b = RNG.standard_normal(5).astype(np.float32)
FEATURES = np.maximum(IMAGES, 0).mean((2, 3))
LOGITS = FEATURES @ W + b

BODY = "[relu] r = Relu(x)  [pool] p = GlobalAveragePool(r)  [flat] h = Flatten(p)"
HALF = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")
GREY = {"channels": "grey", "mean": (0.5,), "std": (0.5,)}  # in place of HALF's


@pytest.fixture
def save(tmp_path):
    """Write a model: its input, its nodes as text, its outputs and its weights."""

    def save(nodes, outputs="float[N, k] y", inputs="float[N, 3, 4, 4] x", weights=(), **options):
        opsets = '["": 21, "com.microsoft": 1, "other": 1]'
        model = parser.parse_model(
            f"<ir_version: 10, opset_import: {opsets}> g ({inputs}) => ({outputs}) {{ {nodes} }}"
        )
        for name, value in {"W": W, "b": b, **dict(weights)}.items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        onnx.save(model, tmp_path / "model.onnx", **options)
        return tmp_path / "model.onnx"

    return save


@pytest.fixture
def gemm(save):
    return save(f"{BODY}  [fc] y = Gemm(h, W, b)")


def close(outputs, features=FEATURES, logits=LOGITS, tolerance=1e-5):
    for actual, expected in ((outputs.features, features), (outputs.logits, logits)):
        assert type(actual) is np.ndarray
        assert actual.dtype == np.float32
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def rejection(path, batch=IMAGES, **options) -> str:
    return error_line(lambda: OnnxModel(path, **options)(batch))


HEADS = {
    "gemm": "y = Gemm(h, W, b)",
    "gemm, transposed weight": "t = Transpose(W) y = Gemm<transB = 1>(h, t, b)",
    "matmul": "m = MatMul(h, W) y = Add(m, b)",
    "bias first": "m = MatMul(h, W) y = Add(b, m)",
    "softmax": "g = Gemm(h, W, b) y = Softmax(g)",
    "bias, then softmax": "m = MatMul(h, W) a = Add(m, b) y = Softmax(a)",
    "log-softmax": "g = Gemm(h, W, b) s = LogSoftmax(g) y = Identity(s)",
    "reshaped": "s = Constant<value = int64[2] {-1, 5}>() g = Gemm(h, W, b) y = Reshape(g, s)",
    "reshaped as the batch is": "s = Shape(h) g = Gemm(h, W, b) f = Flatten(g) t = Slice(s, i0, i1)"
    " k = Concat<axis = 0>(t, minus) y = Reshape(f, k)",
    "squeezed": "g = Gemm(h, W, b) u = Unsqueeze(g, one) y = Squeeze(u, one)",
    "dropout": "d = Dropout(h) g = Gemm(d, W, b) y = Dropout(g)",
    "an optional output left out": "d, = Dropout(h) y = Gemm(d, W, b)",
    "constant weight": "w = Identity(W) y = Gemm(h, w, b)",
    "computed weight": "u = Mul(W, two) w = Div(u, two) y = Gemm(h, w, b)",
    "double": "d = Cast<to = 11>(h) w = Cast<to = 11>(W) m = MatMul(d, w) c = Cast<to = 11>(b)"
    " y = Add(m, c)",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_head_is_found(save, head):
    numbers = {"two": np.float32(2), "one": [1], "i0": [0], "i1": [1], "minus": [-1]}
    close(OnnxModel(save(f"{BODY} {head}", weights=numbers))(IMAGES))


def test_temperature_is_part_of_the_logits(save):
    path = save(
        f"{BODY} g = Gemm(h, W, b) d = Div(g, two) y = Softmax(d)", weights={"two": np.float32(2)}
    )
    close(OnnxModel(path)(IMAGES), logits=LOGITS / 2)


def test_weights_listed_as_inputs(save):
    close(
        OnnxModel(save(f"{BODY} y = Gemm(h, W, b)", inputs="float[N,3,4,4] x, float[3,5] W"))(
            IMAGES
        )
    )


def test_logits_equal_those_of_the_plain_runtime(gemm):
    session = onnxruntime.InferenceSession(gemm, providers=["CPUExecutionProvider"])
    assert np.array_equal(OnnxModel(gemm)(IMAGES).logits, session.run(["y"], {"x": IMAGES})[0])


def test_inputs_of_a_branch_count_as_inputs_of_the_node(save):
    """The weight is the output of an If with a constant condition that reads the data."""
    then = "t () => (float[3, 5] v) { s = ReduceMean<keepdims = 0>(x) v = Mul(W, s) }"
    both = f"then_branch = {then}, else_branch = {then}"
    path = save(f"{BODY} w = If(yes)<{both}> y = MatMul(h, w)", weights={"yes": np.bool_(True)})
    assert "comes from MatMul `y`" in rejection(path)


# several outputs, and heads named by hand

TWO = f"{BODY} [fc] y = Gemm(h, W, b) [aux] z = MatMul(h, W) [prob] s = Softmax(y)"


def test_several_outputs_need_a_name(save):
    path = save(TWO, "float[N, k] y, float[N, k] z, float[N, k] s")
    assert rejection(path).endswith("with head=: `y`, `z`, `s`")
    for head in ("y", "s", "fc"):
        close(OnnxModel(path, head=head)(IMAGES))
    for head in ("z", "aux"):
        close(OnnxModel(path, head=head)(IMAGES), logits=FEATURES @ W)
    assert "`y`, `z` all come from 'flat'" in rejection(path, head="flat")


def test_a_node_or_a_tensor_by_name(save):
    path = save(f"{BODY} [neg] u = Neg(h) [fc] g = Gemm(u, W, b) [prob] y = Softmax(g)")
    logits = b - FEATURES @ W
    for head in (None, "y", "fc", "g"):
        close(OnnxModel(path, head=head)(IMAGES), -FEATURES, logits)
    for head in ("neg", "u", "flat", "h"):  # (B, d, 1, 1) goes into `flat`
        close(OnnxModel(path, head=head)(IMAGES), FEATURES, logits)
    assert "features `r` of 7 images have shape (7, 3, 4, 4)" in rejection(path, head="pool")
    assert "does not lead to the logits" in rejection(path, head="prob")


def test_head_names_that_are_rejected(save):
    path = save(f"{BODY} [dead] n = Neg(h) [two] w = Neg(W) [two] y = Gemm(h, w, b)")
    assert "no output, node or tensor is named 'nope'; the outputs are `y`" in rejection(
        path, head="nope"
    )
    assert "no output, node or tensor is named ''" in rejection(path, head="")
    assert "2 nodes are named 'two'" in rejection(path, head="two")
    assert "'dead' does not lead to the logits" in rejection(path, head="dead")
    assert "'w' does not depend on the input" in rejection(path, head="w")


def test_convolution_as_the_head(save):
    path = save(
        "r = Relu(x) [pool] p = GlobalAveragePool(r) [conv] c = Conv(p, K, b) y = Flatten(c)",
        weights={"K": W.T[:, :, None, None]},
    )
    message = rejection(path)
    assert "`y` comes from Conv `conv`" in message
    assert message.endswith("with head=, such as `conv`")
    close(OnnxModel(path, head="conv")(IMAGES))


def test_a_graph_without_a_linear_layer_at_the_end(save):
    path = save(
        "[conv] c = Conv(x, K, b) [pool] p = GlobalAveragePool(c) y = Flatten(p)",
        weights={"K": W.T[:, :, None, None]},
    )
    assert "no layer takes one row of floats" in rejection(path)
    assert "features `x` of 7 images have shape (7, 3, 4, 4)" in rejection(path, head="conv")


@pytest.mark.parametrize("head", ["MatMul(h, t)", "Gemm<transA = 1>(t, W)", "MatMul(V, t)"])
def test_other_products_are_not_heads(save, head):
    path = save(f"{BODY} t = Transpose(h) y = {head}", weights={"V": W.T})
    assert "not from a Gemm or MatMul with constants" in rejection(path)


def test_unknown_operators_are_not_heads(save):
    assert "comes from other.Gemm `y`" in rejection(save(f"{BODY} y = other.Gemm(h, W, b)"))


# quantised and half-precision graphs


def test_qdq_quantisation(save):
    """Features are the dequantised values, logits come after the last pair."""
    scales = {"s": np.float32(0.01), "t": np.float32(0.02), "z": np.uint8(128)}
    scales |= {"V": np.clip(np.rint(W / 0.02) + 128, 0, 255).astype(np.uint8)}
    path = save(
        f"{BODY} q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z)"
        " w = DequantizeLinear(V, t, z) g = Gemm(d, w, b)"
        " c = QuantizeLinear(g, t, z) y = DequantizeLinear(c, t, z)",
        weights=scales,
    )
    features = np.clip(np.rint(FEATURES / 0.01), -128, 127) * 0.01
    weight = np.clip(np.rint(W / 0.02), -128, 127) * 0.02
    logits = np.clip(np.rint((features @ weight + b) / 0.02), -128, 127) * 0.02
    outputs = OnnxModel(path)(IMAGES)
    np.testing.assert_allclose(outputs.features, features, atol=1e-6)
    np.testing.assert_allclose(outputs.logits, logits, atol=0.0201)  # a tie may fall either way
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert np.array_equal(outputs.logits, session.run(["y"], {"x": IMAGES})[0])


def test_a_final_quantisation_is_not_part_of_the_logits(save):
    path = save(
        f"{BODY} g = Gemm(h, W, b) y = QuantizeLinear(g, s, z)",
        "uint8[N, k] y",
        weights={"s": np.float32(0.1), "z": np.uint8(128)},
    )
    close(OnnxModel(path)(IMAGES))


def test_dynamically_quantised(gemm, tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(gemm, tmp_path / "dynamic.onnx", op_types_to_quantize=["MatMul"])
    message = rejection(tmp_path / "dynamic.onnx")
    assert "the last layer is quantised (MatMulInteger)" in message
    head = message.split("such as `")[1].rstrip("`")
    model = OnnxModel(tmp_path / "dynamic.onnx", head=head)
    session = onnxruntime.InferenceSession(model.name, providers=["CPUExecutionProvider"])
    close(model(IMAGES), logits=session.run(["y"], {"x": IMAGES})[0])
    assert "tensor(uint8), not floats" in rejection(
        tmp_path / "dynamic.onnx", head="fc_MatMul_quant"
    )


def test_quantised_without_floats(save):
    path = save(
        "q = QuantizeLinear(x, s, z) f = Flatten(q) m = MatMulInteger(f, V) y = Cast<to = 1>(m)",
        weights={"V": np.ones((48, 5), np.uint8), "s": np.float32(1), "z": np.uint8(0)},
    )
    assert "QDQ format" in rejection(path)


def test_weights_of_four_bits(save):
    """The layer itself can be named, because its input is still a float."""
    bits = "K = 3, N = 5, bits = 4, block_size = 16"
    weights = {
        "V": np.full((5, 1, 8), 0x99, np.uint8),
        "s": np.ones(5, np.float32),
    }  # all ones: 9 less 8
    path = save(f"{BODY} [fc] y = com.microsoft.MatMulNBits<{bits}>(h, V, s)", weights=weights)
    message = rejection(path)
    assert "quantised (MatMulNBits)" in message
    assert message.endswith("such as `fc`")
    summed = np.repeat(FEATURES.sum(1, keepdims=True), 5, axis=1)
    close(OnnxModel(path, head="fc")(IMAGES), logits=summed, tolerance=1e-3)


def test_half_precision(save):
    half = {"W": W.astype(np.float16), "b": b.astype(np.float16)}
    path = save(
        f"{BODY} y = Gemm(h, W, b)", "float16[N, k] y", "float16[N, 3, 4, 4] x", weights=half
    )
    model = OnnxModel(path)
    for batch in (IMAGES, IMAGES.astype(np.float16), IMAGES.astype(np.float64)):
        close(model(batch), tolerance=0.02)


def test_bfloat16_features_are_cast_to_float32(save):
    path = save(f"{BODY} n = Cast<to = 16>(h) [back] c = Cast<to = 1>(n) y = Gemm(c, W, b)")
    rounded = torch.tensor(FEATURES).bfloat16().float().numpy()
    close(OnnxModel(path, head="back")(IMAGES), rounded, rounded @ W + b)


# what goes in


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_fixed_batch_sizes_run_in_pieces(save, size):
    path = save(f"{BODY} y = Gemm(h, W, b)", f"float[{size}, 5] y", f"float[{size}, 3, 4, 4] x")
    model = OnnxModel(path)
    assert model.input_shape == (size, 3, 4, 4)
    close(model(IMAGES))
    close(model(IMAGES[:1]), FEATURES[:1], LOGITS[:1])


def test_padding_does_not_change_the_other_rows(save):
    """The graph subtracts the maximum of the whole batch, as dynamic scales would."""
    path = save(
        f"{BODY} m = ReduceMax(h) c = Sub(h, m) y = MatMul(c, W)",
        "float[4, 5] y",
        "float[4, 3, 4, 4] x",
    )
    features = np.concatenate([part - part.max() for part in (FEATURES[:4], FEATURES[4:])])
    close(OnnxModel(path)(IMAGES), features, features @ W)


def test_open_sizes(save):
    model = OnnxModel(save(f"{BODY} y = Gemm(h, W, b)", inputs="float[N, 3, rows, ?] x"))
    assert model.input_shape == (None, 3, None, None)
    close(model(IMAGES))


def test_minus_one_is_an_open_size_and_no_shape_is_any(gemm):
    proto = onnx.load(gemm)
    declared = proto.graph.input[0].type.tensor_type
    declared.shape.dim[0].dim_value = -1
    onnx.save(proto, gemm)
    assert OnnxModel(gemm).input_shape == (None, 3, 4, 4)
    close(OnnxModel(gemm)(IMAGES))
    declared.ClearField("shape")
    onnx.save(proto, gemm)
    assert OnnxModel(gemm).input_shape is None
    close(OnnxModel(gemm)(IMAGES))
    assert "takes (any), not ()" in rejection(gemm, 1.0)


def test_anything_numpy_converts(gemm):
    model = OnnxModel(gemm)
    close(model(IMAGES.tolist()))
    close(model(torch.tensor(IMAGES)))
    close(model(np.asfortranarray(IMAGES)))
    close(model(IMAGES.astype(">f4")))
    close(model(IMAGES.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)))


def test_pixels_for_a_graph_of_floats(gemm):
    pixels = RNG.integers(0, 256, IMAGES.shape, dtype=np.uint8)
    features = pixels.mean((2, 3))
    close(OnnxModel(gemm)(pixels), features, features @ W + b)


def test_a_batch_that_fits_is_not_copied():
    rows = np.zeros((4, 2), np.float32)
    assert Input("x", (None, 2), "float32").prepared(rows) is rows


def test_batches_that_do_not_fit(gemm):
    assert "the batch has no rows" in rejection(gemm, IMAGES[:0])
    assert "takes (any, 3, 4, 4), not (7, 3, 4)" in rejection(gemm, IMAGES[..., 0])
    assert "takes (any, 3, 4, 4), not (7, 3, 4, 2)" in rejection(gemm, IMAGES[..., :2])
    assert "takes (any, 3, 4, 4), not ()" in rejection(gemm, 1.0)
    assert "not an array" in rejection(gemm, [[1.0], [1.0, 2.0]])
    assert "not an array" in rejection(gemm, torch.tensor(IMAGES, requires_grad=True))
    assert "takes float32, not int64" in rejection(gemm, IMAGES.astype(int))
    assert "takes float32, not <U1" in rejection(gemm, np.full(IMAGES.shape, "a"))


def test_graphs_with_other_inputs_are_rejected(save):
    many = save(f"{BODY} a = Add(h, u) y = Gemm(a, W, b)", inputs="float[N,3,4,4] x, float[N,3] u")
    assert "it has `x`, `u`" in rejection(many)
    tokens = save("e = Gather(W, x) f = Flatten(e) y = MatMul(f, b)", inputs="int64[N, 3] x")
    assert "the input `x` is int64" in rejection(tokens)


def test_outputs_without_one_row_per_image(save):
    tokens = {"to": [0, 3, 16], "V": RNG.standard_normal((16, 5)).astype("f"), "one": [1]}
    path = save(
        "f = Reshape(x, to) t = MatMul(f, V) y = ReduceMean<keepdims = 0>(t, one)", weights=tokens
    )
    assert "comes from ReduceMean `y`" in rejection(path)
    assert "features `f` of 7 images have shape (7, 3, 16)" in rejection(path, head="t")
    path = save(f"{BODY} m = Reshape(h, to) y = MatMul(m, U)", weights={"to": [-1, 1], "U": W[:1]})
    assert "features `m` of 7 images have shape (21, 1)" in rejection(path)
    path = save(f"{BODY} g = Gemm(h, W, b) y = Reshape(g, to)", weights={"to": [-1]})
    assert "logits `y` of 7 images have shape (35)" in rejection(path)


def test_runtime_errors_are_one_line(save):
    path = save(f"{BODY} s = Reshape(h, to) y = MatMul(s, W)", weights={"to": [2, 3]})
    assert "failed on a batch" in rejection(path)
    close(OnnxModel(path)(IMAGES[:2]), FEATURES[:2], FEATURES[:2] @ W)
    unknown = save(f"{BODY} o = other.Op(h) y = Gemm(o, W, b)")
    assert "cannot run" in rejection(unknown)


# preprocessing


def test_in_graph_preprocessing(save):
    pixels = RNG.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    features = pixels.mean((1, 2)).astype(np.float32)
    for dtype, layout, shape in (
        ("uint8", "NHWC", "N, 4, 4, 3"),
        ("uint8", "NCHW", "N, 3, 4, 4"),
        ("float", "NHWC", "N, h, w, 3"),
        ("float16", "NCHW", "N, 3, h, w"),
    ):
        axes = "1, 2" if layout == "NHWC" else "2, 3"
        path = save(
            f"a = Constant<value = int64[2] {{{axes}}}>() f = Cast<to = 1>(x)"
            " h = ReduceMean<keepdims = 0>(f, a) y = Gemm(h, W, b)",
            inputs=f"{dtype}[{shape}] x",
        )
        model = OnnxModel(path, preprocessing="in-graph")
        assert model.preprocessing == Preprocessing.in_graph(
            layout, "float32" if dtype == "float" else dtype
        )
        close(model(model.preprocessing.batch(pixels)), features, features @ W + b, 1e-4)
        if dtype == "uint8":
            assert "takes uint8, not float64" in rejection(
                path, model.preprocessing.batch(pixels) / 1
            )


@pytest.mark.parametrize(("layout", "shape"), [("NCHW", "N, 1, 4, 6"), ("NHWC", "N, 4, 6, 1")])
def test_preprocessing_of_one_channel(save, layout, shape):
    V = np.ones((24, 5), np.float32)
    path = save("h = Flatten(x) y = MatMul(h, V)", inputs=f"float[{shape}] x", weights={"V": V})
    grey = Preprocessing.in_graph(layout, "float32", "grey")
    assert OnnxModel(path, preprocessing="in-graph").preprocessing == grey
    coloured = Preprocessing.in_graph(layout, "float32")
    assert 'set `channels` to "grey"' in rejection(path, preprocessing=coloured)


@pytest.mark.parametrize(
    "inputs",
    ["float[N, c, h, w] x", "float[N, 3, 4, 3] x", "float[N, 3] x", "double[N, 3, 4, 4] x"],
)
def test_in_graph_preprocessing_of_an_unknown_layout(save, inputs):
    path = save("h = Flatten(x) y = MatMul(h, W)", inputs=inputs)
    assert "state the preprocessing in a TOML file" in rejection(path, preprocessing="in-graph")


def test_a_preprocessing_that_fits(gemm, save):
    assert OnnxModel(gemm).preprocessing is None
    assert OnnxModel(gemm, preprocessing=HALF).preprocessing is HALF
    body = BODY.replace("Relu(x)", "Relu(f)")
    double = save(f"f = Cast<to = 1>(x) {body} y = Gemm(h, W, b)", inputs="double[N, 3, 4, 4] x")
    pixels = RNG.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    features = np.maximum(pixels / 127.5 - 1, 0).mean((1, 2))
    close(OnnxModel(double, preprocessing=HALF)(HALF.batch(pixels)), features, features @ W + b)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NHWC"}, "takes (any, 3, 4, 4), the preprocessing makes (any, any, any, 3)"),
        ({"layout": "NHWC"}, ' (NHWC): set `layout` to "NCHW" in preprocessing='),
        ({"dtype": "float16"}, "takes float32, the preprocessing makes float16: set `dtype`"),
        ({"crop": (4, 5)}, "makes (any, 3, 4, 5) (NCHW): set `crop` to [4, 4]"),
        ({"resize": (5, 5), "interpolation": "box"}, "3, 5, 5) (NCHW): set `resize` to [4, 4]"),
        (GREY | {"crop": (5, 5)}, ': set `channels` to "RGB" or "BGR" and `crop` to [4, 4] in'),
    ],
)
def test_a_preprocessing_that_does_not_fit(gemm, changes, reason):
    assert reason in rejection(gemm, preprocessing=replace(HALF, **changes))


@pytest.mark.parametrize(
    ("shape", "changes", "remedy"),
    [
        ("224, 224, 3", {"crop": (256, 256)}, '`layout` to "NHWC" and `crop` to [224, 224] in'),
        ("224, 224, 1", {"crop": (224, 224)}, '`layout` to "NHWC" and `channels` to "grey" in'),
        ("3, h, w", GREY, '`channels` to "RGB" or "BGR" in'),
        ("h, w, 3", {"crop": (224, 224)}, '`layout` to "NHWC" in'),
        ("3, 224, w", {"crop": (256, 256)}, "`crop` to [224, 256] in"),
        ("c, 224, 224", {"crop": (256, 256)}, "`crop` to [224, 224] in"),
        ("c, 224, 224", {"layout": "NHWC", "crop": (224, 224)}, '`layout` to "NCHW" in'),
    ],
)
def test_the_remedy_for_a_preprocessing_that_does_not_fit(save, shape, changes, remedy):
    path = save("h = Flatten(x) y = MatMul(h, W)", inputs=f"float[N, {shape}] x")
    assert f": set {remedy}" in rejection(path, preprocessing=replace(HALF, **changes))


def test_no_remedy_where_no_axis_can_be_channels(save):
    path = save("h = Flatten(x) y = MatMul(h, W)", inputs="float[N, 4, 4, 4] x")
    assert rejection(path, preprocessing=HALF).endswith("makes (any, 3, any, any) (NCHW)")


# the file


def test_digest_is_that_of_the_file(gemm, monkeypatch):
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)  # no session for a digest
    before = gemm.read_bytes()
    model = OnnxModel(gemm)
    assert model.name == str(gemm)
    assert model.sha256 == hashlib.sha256(before).hexdigest()
    digests = {OnnxModel(gemm, head=head).sha256 for head in (None, "fc", "y")}
    assert len(digests) == 3
    assert OnnxModel(gemm, head="fc").sha256 in digests
    model.verify()
    assert gemm.read_bytes() == before


def test_a_file_that_changed(gemm, save):
    running, waiting = OnnxModel(gemm), OnnxModel(gemm)
    running(IMAGES)
    save(f"{BODY} [fc] y = MatMul(h, W)")
    assert "changed since it was opened" in error_line(running.verify)
    assert "changed since it was opened" in error_line(waiting, IMAGES)
    gemm.unlink()
    assert "cannot read" in error_line(running.verify)


@pytest.fixture
def external(save):
    return save(
        f"{BODY} [fc] y = Gemm(h, W, b)",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )


def test_weights_in_another_file(external, monkeypatch):
    weights = external.parent / "weights.bin"
    assert weights.stat().st_size >= W.nbytes + b.nbytes
    model = OnnxModel(external)
    close(model(IMAGES))
    monkeypatch.chdir(external.parent)
    close(OnnxModel("model.onnx")(IMAGES))
    assert OnnxModel("model.onnx").sha256 == model.sha256
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    weights.write_bytes(content)
    assert OnnxModel(external).sha256 != model.sha256
    with pytest.raises(CasterError, match="or its weights changed"):
        model.verify()
    weights.unlink()
    assert f"cannot read {weights}: No such file" in rejection(external)


def test_links_in_a_hugging_face_cache_are_followed(external, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("model.onnx", "weights.bin"):
        (tmp_path / name).rename(blobs / f"{name}-digest")
        (snapshot / name).symlink_to(f"../../blobs/{name}-digest")
    close(OnnxModel(snapshot / "model.onnx")(IMAGES))


def test_links_to_other_folders_are_rejected(external, tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "weights.bin").rename(tmp_path / "away" / "weights.bin")
    (tmp_path / "away" / "weights.bin").chmod(0o600)
    (tmp_path / "here").mkdir()
    external = external.rename(tmp_path / "here" / "model.onnx")
    (tmp_path / "here" / "weights.bin").symlink_to(tmp_path / "away" / "weights.bin")
    assert "stores weights outside its own folder" in rejection(external)


@pytest.mark.parametrize("location", ["../weights.bin", "/weights.bin"])
def test_weights_in_other_folders_are_rejected(external, location):
    proto = onnx.load(external, load_external_data=False)
    for tensor in proto.graph.initializer:
        next(each for each in tensor.external_data if each.key == "location").value = location
    external.write_bytes(proto.SerializeToString())
    assert "stores weights outside its own folder" in rejection(external)


def test_files_that_are_not_models(gemm, tmp_path):
    content = gemm.read_bytes()
    for damaged in (b"", b"hello", content[: len(content) // 2], content[:-3]):
        gemm.write_bytes(damaged)
        assert "not an ONNX file" in rejection(gemm)
    assert "No such file" in rejection(tmp_path / "none.onnx")
    assert "Is a directory" in rejection(tmp_path)


def test_an_opset_of_the_future(gemm):
    model = onnx.load(gemm)
    model.opset_import[0].version = 99
    onnx.save(model, gemm)
    assert "has opset 99, newer than onnx knows: export it with" in rejection(gemm)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(gemm):
    gemm.chmod(0)
    assert "Permission denied" in rejection(gemm)


def test_flipped_bits_are_read_or_rejected_in_one_line(gemm):
    assert len(flipped_bits(gemm, OnnxModel, n=200)) > 20


# libraries and providers


@pytest.mark.parametrize("library", ["onnx", "onnxruntime"])
def test_without_the_libraries(monkeypatch, gemm, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert rejection(gemm) == (
        f"reading {gemm} needs onnx and onnxruntime: pip install 'caster-tta[onnx]'"
    )


def test_importing_loads_neither_library():
    code = (
        "import caster.models.onnx, sys; sys.exit(bool({'onnx', 'onnxruntime'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_providers(gemm, monkeypatch):
    offered = ", ".join(onnxruntime.get_available_providers())
    message = f"no provider NoExecutionProvider: onnxruntime here has {offered}"
    assert rejection(gemm, providers=["NoExecutionProvider"]) == message
    assert "no provider none" in rejection(gemm, providers=[])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    message = rejection(gemm, providers=["CUDAExecutionProvider"])
    assert message.endswith("; install onnxruntime-gpu in place of onnxruntime")
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnxruntime warns about the missing provider
        assert (
            rejection(gemm, providers=both) == "CUDAExecutionProvider does not work on this machine"
        )


# real exporters


def exported(module, images, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised inside the exporters
        torch.onnx.export(module.eval(), (images,), path, verbose=False, **options)
    return OnnxModel(path)


LEGACY = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
DYNAMO = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("N")},)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [LEGACY, DYNAMO], ids=["legacy", "dynamo"])
def test_torch(tmp_path, options):
    torch.manual_seed(0)
    layers = torch.nn
    trunk = layers.Sequential(
        layers.Conv2d(3, 8, 3, 2), layers.BatchNorm2d(8), layers.ReLU(), layers.AdaptiveAvgPool2d(1)
    )
    net = layers.Sequential(trunk, layers.Flatten(), layers.Dropout(), layers.Linear(8, 4))
    images = torch.randn(5, 3, 16, 16)
    model = exported(net, images, tmp_path / "net.onnx", **options)
    assert model.input_shape == (None, 3, 16, 16)
    for count in (1, 5):
        with torch.no_grad():
            features, logits = net[:-1](images[:count]), net(images[:count])
        close(model(images[:count]), features.numpy(), logits.numpy(), 1e-4)


@pytest.mark.slow
def test_timm(tmp_path):
    import timm

    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=10).eval()
    images = torch.randn(3, 3, 64, 64)
    model = exported(net, images, tmp_path / "net.onnx", **LEGACY)
    with torch.no_grad():
        features = net.forward_head(net.forward_features(images), pre_logits=True)
        close(model(images), features.numpy(), net(images).numpy(), 1e-4)
