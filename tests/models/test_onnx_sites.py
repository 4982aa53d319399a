"""Sites of ONNX graphs are those that torch has for the same network."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import onnx
import pytest
import timm
from onnx import helper, numpy_helper, parser
from onnxruntime.quantization import QuantFormat, quantize_static
from timm.models.convnext import ConvNeXt
from timm.models.metaformer import (
    Attention,
    LayerNorm2dNoBias,
    LayerNormNoBias,
    MetaFormer,
    Pooling,
    SepConv,
)
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from caster.models.onnx.graph import find_head
from caster.models.onnx.graph_sites import find_onnx_sites
from tests.support.messages import error_line
from tests.support.onnx_export import (
    EXPORTERS,
    Calibration,
    exported,
    images,
    seeded,
    torch_sites,
    values_at,
)
from tests.support.sampling import sampled

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "num_classes": 4}
SWIN |= {"depths": (1, 2), "num_heads": (1, 2)}
COATNET = {"img_size": 64, "embed_dim": (8, 8, 16, 16), "depths": (1, 1, 2, 1), "stem_width": 8}
COATNET |= {"transformer_dim_head": 8}
CAIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
METAFORMER = {"depths": (1, 2, 1, 1), "dims": (8, 16, 32, 64), "num_classes": 4}
METAFORMER |= {"token_mixers": [SepConv, Pooling, Attention, Attention]}
METAFORMER |= {"norm_layers": [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2}
FASTVIT = {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}
RNG = np.random.default_rng(0)


def small_resnet(**more):
    return ResNet(BasicBlock, (2, 1, 1, 1), num_classes=4, channels=(8, 8, 16, 16), **more)


def group_norm(channels, **_):
    return nn.GroupNorm(2, channels)


def multilayer():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4))


NETWORKS = {
    "resnet": (small_resnet, 32),
    "resnet with GroupNorm": (
        lambda: ResNet(BasicBlock, (2, 2, 1, 1), num_classes=4, norm_layer=group_norm),
        32,
    ),
    "resnet18": (lambda: timm.create_model("resnet18"), 32),
    "convnext": (lambda: ConvNeXt(depths=(1, 2, 1, 1), dims=(8,) * 4, num_classes=4), 64),
    "convnext_atto": (lambda: timm.create_model("convnext_atto"), 64),
    "vit": (lambda: VisionTransformer(**VIT), 16),
    "vit with registers": (lambda: VisionTransformer(**VIT, reg_tokens=2, qk_norm=True), 16),
    "vit without a class token": (
        lambda: VisionTransformer(**VIT, class_token=False, global_pool="avg"),
        16,
    ),
    "swin": (lambda: SwinTransformer(**SWIN), 16),
    "mixer": (lambda: MlpMixer(img_size=16, patch_size=8, embed_dim=16, num_blocks=2), 16),
    "efficientnet_lite0": (lambda: timm.create_model("efficientnet_lite0"), 64),
    "mobilenetv3": (lambda: timm.create_model("mobilenetv3_small_050"), 64),
    "densenet": (lambda: timm.models.densenet.DenseNet(block_config=(2, 2)), 32),
    "multilayer perceptron": (multilayer, 4),
}
HYBRIDS = {  # of convolutions and attention; torch.export takes long
    "coatnet": (lambda: timm.create_model("coatnet_nano_rw_224", **COATNET), 64),
    "cait": (lambda: timm.create_model("cait_xxs24_224", **CAIT), 16),
    "metaformer": (lambda: MetaFormer(**METAFORMER), 64),
}
CASES = sampled([(name, "folded") for name in NETWORKS | HYBRIDS], 12)
CASES += sampled(product(NETWORKS, [e for e in EXPORTERS if e != "folded"]), 2)


def found(model):
    return find_onnx_sites(model, find_head(model, None))


def same_as_torch(model, net, batch):
    """Sites of a model, in the order and with the values that torch's sites have."""
    sites, expected = found(model), torch_sites(net, batch)
    assert len(sites) == len(expected)
    actual = values_at(model, [each.site.module for each in sites], batch)
    for each, values, (site, torch_values) in zip(sites, actual, expected, strict=True):
        assert (each.width, each.rank) == (values.shape[each.site.axis], values.ndim)
        assert each.site.prefix_tokens == site.prefix_tokens
        if torch_values.ndim > 2:
            assert each.site.axis == site.axis
        values = values.reshape(torch_values.shape)  # a Swin block returns rows and columns
        np.testing.assert_allclose(values, torch_values, rtol=1e-3, atol=1e-4)
    return sites


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_torch_networks(name, exporter):
    make, size = (NETWORKS | HYBRIDS)[name]
    net, batch = seeded(make), images(size)
    same_as_torch(exported(net, batch, exporter), net, batch)


@pytest.mark.parametrize("exporter", sampled(["folded", "unfolded"], 1))
def test_branches_that_run_in_another_order_than_their_modules(exporter):
    """And convolutions with a bias of their own, between those that BatchNorm was folded into."""
    net, batch = seeded(lambda: timm.create_model("fastvit_t8", **FASTVIT)), images(64)
    model = exported(net, batch, exporter)
    expected = [values for _, values in torch_sites(net, batch)]
    for values in values_at(model, [each.site.module for each in found(model)], batch):
        same = [np.allclose(values, v, 1e-3, 1e-4) for v in expected if v.shape == values.shape]
        assert any(same)
    assert len(found(model)) == len(expected)


@pytest.mark.parametrize(
    ("opset", "name"),
    sampled(product([14, 16], ["resnet", "vit", "convnext", "resnet with GroupNorm"]), 4),
)
def test_early_opsets(name, opset):
    """Which have no LayerNormalization."""
    make, size = NETWORKS[name]
    net, batch = seeded(make), images(size)
    model = exported(net, batch, opset_version=opset)
    assert "LayerNormalization" not in {node.op_type for node in model.graph.node}
    same_as_torch(model, net, batch)


def test_local_functions():
    """Sites are found inside them."""
    net, batch = seeded(small_resnet), images(32)
    model = exported(net, batch, export_modules_as_functions={nn.BatchNorm2d})
    assert len(found(model)) == len(torch_sites(net, batch))


def keras_style(**more):
    """Images with their channels last, and Transposes around the layers, as tf2onnx writes."""

    def weights(name, *shape):
        return numpy_helper.from_array(RNG.random(shape, np.float32) + 0.5, name)

    nodes = [
        helper.make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["first", "w1"], ["c1"], "conv1", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c1", *"gbmv"], ["n1"], "bn1"),
        helper.make_node("Transpose", ["n1"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Relu", ["last"], ["r1"]),
        helper.make_node("Transpose", ["r1"], ["again"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["again", "w2", "b2"], ["c2"], "conv2"),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Conv", ["p", "w3", "b3"], ["squeezed"], "squeeze"),
        helper.make_node("Sigmoid", ["squeezed"], ["gate"]),
        helper.make_node("Mul", ["c2", "gate"], ["gated"]),
        helper.make_node("ReduceMean", ["gated", "axes"], ["h"], keepdims=0),
        helper.make_node("MatMul", ["h", "W"], ["y"], "dense"),
    ]
    shapes = {"w1": (4, 3, 3, 3), "w2": (6, 4, 1, 1), "b2": (6,), "w3": (6, 6, 1, 1), "b3": (6,)}
    shapes |= dict.fromkeys("gbmv", (4,)) | {"W": (6, 5)}
    constants = [weights(name, *shape) for name, shape in shapes.items()]
    constants.append(numpy_helper.from_array(np.array([2, 3]), "axes"))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["unk__1", 8, 8, 3])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["unk__1", 5])
    graph = helper.make_graph(nodes, "keras", [x], [y], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def test_channels_last_with_transposes():
    """Squeeze-and-excitation is no site."""
    sites = found(keras_style())
    assert [(str(each.site), each.site.axis, each.width) for each in sites] == [
        ("n1:out", 1, 4),
        ("c2:out", 1, 6),
    ]


def test_batchnorm_as_a_product_and_a_sum():
    """As tf2onnx writes MobileNetV2: the images themselves are scaled in the same way."""
    shapes = {"std": (1, 3, 1, 1), "mean": (1, 3, 1, 1), "w1": (4, 3, 3, 3), "b1": (4,)}
    shapes |= {"w2": (4, 1, 3, 3), "scale": (1, 4, 1, 1), "offset": (1, 4, 1, 1), "W": (4, 5)}
    model = parsed(
        "first = Transpose<perm = [0, 3, 1, 2]>(x) scaled = Mul(first, std) "
        "images = Add(scaled, mean) c1 = Conv<strides = [2, 2]>(images, w1, b1) r1 = Relu(c1) "
        "c2 = Conv<group = 4, pads = [1, 1, 1, 1]>(r1, w2) n2 = Mul(c2, scale) "
        "a2 = Add(n2, offset) r2 = Relu(a2) p = GlobalAveragePool(r2) h = Squeeze(p, axes) "
        "z = MatMul(h, W) y = Softmax(z)",
        "float[N, 9, 9, 3] x",
        [
            ("axes", np.array([2, 3])),
            *((n, RNG.random(shape, np.float32) + 0.5) for n, shape in shapes.items()),
        ],
    )
    assert [str(each.site) for each in found(model)] == ["c1:out", "a2:out"]


def test_quantised_graphs(tmp_path):
    """Sites are behind the DequantizeLinear of each layer's output, where values are floats."""
    net = seeded(lambda: nn.Sequential(*convolutions(), nn.Flatten(), nn.Linear(6, 3)))
    batch = images(8)
    paths = [str(tmp_path / name) for name in ("float.onnx", "quantised.onnx")]
    onnx.save(exported(net, batch), paths[0])
    quantize_static(*paths, Calibration(batch), quant_format=QuantFormat.QDQ)
    model = onnx.load(paths[1])
    sites = found(model)
    assert len(sites) == 2
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    assert producers[sites[1].site.module] == "DequantizeLinear"  # no activation follows it
    actual = values_at(model, [each.site.module for each in sites], batch)
    expected = [values for _, values in torch_sites(net, batch)]
    expected[0] = np.maximum(expected[0], 0)  # quantisation clips as the activation did
    for values, torch_values in zip(actual, expected, strict=True):
        assert values.dtype == np.float32
        assert np.abs(values - torch_values).max() < 0.05 * np.abs(torch_values).max()


def convolutions():
    first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return (*first, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1))


def parsed(nodes, x="float[N, 3, 4, 4] x", weights=()):
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({x}) => (float[N, k] y) {{ {nodes} }}'
    )
    for name, value in weights:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


W = np.ones((3, 5), np.float32)


rejection = partial(error_line, found)


def test_what_cannot_be_aligned_is_named():
    scale = ("s", np.ones(3, np.float32))
    open_width = parsed(
        "[norm] n = LayerNormalization<axis = -1>(x, s, s) [pool] h = ReduceMax<keepdims = 0>(n, a)"
        " y = MatMul(h, W)",
        "float[N, 4, k] x",
        [scale, ("a", np.array([1])), ("W", W)],
    )
    assert "`x`, from the input" in rejection(open_width)
    unknown = parsed(
        "[odd] a = Softplus(x) [norm] n = LayerNormalization<axis = 2>(a, s, s) "
        "[pool] h = ReduceMax<keepdims = 0>(n, b) y = MatMul(h, W)",
        "float[N, 3, 4, 4] x",
        [("s", np.ones((4, 4), np.float32)), ("b", np.array([2, 3])), ("W", W)],
    )
    assert "Softplus `odd`" in rejection(unknown)


def test_features_alone_are_no_error():
    """As in torch, a linear classifier of pooled images has its input as its one site."""
    model = parsed(
        "h = ReduceMax<keepdims = 0>(x, a) y = MatMul(h, W)",
        weights=[("a", np.array([2, 3])), ("W", W)],
    )
    assert [str(each.site) for each in found(model)] == ["h:out"]
