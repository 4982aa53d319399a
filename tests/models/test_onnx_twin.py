"""The twin of an ONNX graph: a frozen copy, an aligned copy, and what is measured in it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from onnxruntime.quantization import QuantFormat, quantize_static
from timm.models.convnext import ConvNeXt
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from caster import CasterError
from caster.core.channels import ChannelMoments, shrunk, to_source
from caster.models.activation_statistics import ActivationStatistics
from caster.models.onnx.folded import folded_model
from caster.models.onnx.graph import find_head
from caster.models.onnx.graph_sites import find_onnx_sites
from caster.models.onnx.layers import supports_full_map
from caster.models.onnx.twin import measuring_model, twin_model
from caster.models.torch import TorchModel
from tests.support.onnx_export import Calibration, exported, images, seeded, session, values_at

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "num_classes": 4}
SWIN |= {"depths": (1, 2), "num_heads": (1, 2)}
PRIOR = 16.0


def residual():
    """Two BatchNorms, a residual connection, and an activation behind one of them."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
            self.conv, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            x = self.norm1(self.stem(x)).relu()
            x = (x + self.norm2(self.conv(x))).relu()
            return self.head(x.mean((2, 3)))

    return Residual()


NETWORKS = {
    "resnet": (residual, 10),
    "convnext": (lambda: ConvNeXt(depths=(1, 2, 1, 1), dims=(8,) * 4, num_classes=4), 64),
    "vit": (lambda: VisionTransformer(**VIT, reg_tokens=1), 16),
    "swin": (lambda: SwinTransformer(**SWIN), 16),
}


class Twin:
    """A network's twin with its inputs, which leave the aligned copy as it is."""

    def __init__(self, model, batch, full=lambda site: site.rank > 2):
        self.model, self.head = model, find_head(model, None)
        self.sites = find_onnx_sites(model, self.head)
        self.full = [site for site in self.sites if full(site)]
        before = model.SerializeToString()
        self.proto = twin_model(model, self.head, self.sites, self.full)
        assert model.SerializeToString() == before
        self.session = session(self.proto)
        self.D = sum(site.width for site in self.sites)
        squares = sum(site.width**2 for site in self.full)
        self.feeds = {
            self.session.get_inputs()[0].name: batch.numpy(),
            "caster.images": batch.numpy(),
            "caster.given": np.array([[1.0], [0.0]]) * np.ones(self.D),
            "caster.measured": np.zeros(len(self.sites), bool),
            "caster.past": np.zeros((2, self.D)),
            "caster.reference": np.ones((3, self.D)),
            "caster.shares": np.ones(2),
            "caster.full": np.array(False),
            "caster.matrices": np.zeros(squares),
        }

    def run(self, **changes):
        feeds = self.feeds | {f"caster.{name}": value for name, value in changes.items()}
        feeds = {k: np.float32(v) if v.dtype == np.float64 else v for k, v in feeds.items()}
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        return [outputs.pop(names[0]), outputs.pop(names[1])], {
            name.removeprefix("caster."): value for name, value in outputs.items()
        }

    def slices(self):
        ends = np.cumsum([0, *(site.width for site in self.sites)])
        return [slice(*pair) for pair in pairwise(ends)]

    def values(self, batch):
        """Values of the frozen network at each site, as (n, positions, c) in float64."""
        tapped = values_at(self.model, [site.site.module for site in self.sites], batch)
        return [rows(site, x) for site, x in zip(self.sites, tapped, strict=True)]


def rows(site, values):
    values = np.moveaxis(site.site.patch_values(values).astype(np.float64), site.site.axis, -1)
    return values.reshape(len(values), -1, site.width)


def moments_of(values):
    flat = values.reshape(-1, values.shape[-1])
    return np.stack([flat.mean(0), flat.var(0)])


@pytest.fixture(params=NETWORKS, scope="module")
def twin(request):
    make, size = NETWORKS[request.param]
    batch = images(size, 5)
    return Twin(exported(seeded(make), batch), batch), batch


def test_frozen_copy_is_the_model_bit_for_bit(twin):
    """Whatever the aligned copy is given."""
    twin, batch = twin
    expected = values_at(twin.model, [twin.head.features, twin.head.logits], batch)
    frozen, _ = twin.run(given=np.full((2, twin.D), 7.0))
    for one, other in zip(frozen, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("full", [False, True])
def test_the_identity_changes_nothing(twin, full):
    twin, _ = twin
    identity = [np.eye(site.width).ravel() for site in twin.full]
    (features, logits), aligned = twin.run(full=np.array(full), matrices=np.concatenate(identity))
    np.testing.assert_allclose(aligned["features"], features, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(aligned["logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("full", [False, True])
def test_constant_maps_are_those_of_the_twin(twin, full):
    """In a convolution's weights or as nodes of their own, with and without full maps."""
    twin, batch = twin
    rng = np.random.default_rng(0)
    given = np.stack([rng.uniform(0.5, 1.5, twin.D), rng.normal(size=twin.D)])
    A = {s: np.eye(s.width) + 0.1 * rng.normal(size=(s.width,) * 2) for s in twin.full if full}
    packed = np.concatenate([np.zeros(0), *(each.ravel() for each in A.values())])
    changes = {"given": given, "full": np.array(full)} | ({"matrices": packed} if full else {})
    _, expected = twin.run(**changes)
    ends = np.cumsum([0, *(s.width for s in twin.sites)])
    maps = {
        s.site: (A.get(s, given[0, a:b]), given[1, a:b])
        for s, a, b in zip(twin.sites, ends[:-1], ends[1:], strict=True)
    }
    folded = session(folded_model(twin.model, twin.head, twin.sites, maps))
    found = folded.run(None, {folded.get_inputs()[0].name: batch.numpy()})
    for one, name in zip(found, ("features", "logits"), strict=True):
        np.testing.assert_allclose(one, expected[name], rtol=1e-4, atol=1e-4)


def test_moments_and_covariances(twin):
    twin, batch = twin
    _, aligned = twin.run()
    values = twin.values(batch)
    expected = np.concatenate([moments_of(x) for x in values], axis=1)
    np.testing.assert_allclose(aligned["moments"], expected, rtol=1e-4, atol=1e-5)
    pairs = zip(twin.sites, values, strict=True)
    expected = [np.cov(x.reshape(-1, s.width).T, bias=True) for s, x in pairs if s in twin.full]
    flat = np.concatenate([found.ravel() for found in expected])
    np.testing.assert_allclose(aligned["covariances"], flat, rtol=1e-4, atol=1e-4)


def test_measured_maps(twin):
    """At the first site alone, where the values are those of the frozen network."""
    twin, batch = twin
    rng = np.random.default_rng(0)
    past, reference = rng.uniform(0.5, 2, (2, twin.D)), rng.uniform(0.5, 2, (3, twin.D))
    n, kept = len(batch), 7.0
    shares = np.array([n / (kept + n), (kept + n) / (PRIOR + kept + n)])
    one = np.arange(len(twin.sites)) == 0
    changes = {"past": past, "reference": reference, "shares": shares}
    _, aligned = twin.run(measured=one, **changes)

    at = twin.slices()[0]
    source = ChannelMoments(1e4, *reference[:2, at])
    batch_moments = ChannelMoments(float(n), *moments_of(twin.values(batch)[0]))
    merged = ChannelMoments(kept, *past[:, at]) + batch_moments
    scale, shift = to_source(shrunk(merged, source, PRIOR), source, reference[2, at])
    given = np.array([[1.0], [0.0]]) * np.ones(twin.D)
    given[:, at] = scale, shift
    _, expected = twin.run(given=given, **changes)
    assert np.abs(aligned["logits"] - twin.run()[1]["logits"]).max() > 0.01
    np.testing.assert_allclose(aligned["logits"], expected["logits"], rtol=1e-4, atol=1e-4)


def test_aligned_moments_are_the_references():
    """Loop over the sites: given the maps so far, the moments at the next site show its map."""
    batch = images(10, 6)
    twin = Twin(exported(seeded(residual), batch), batch)
    rng = np.random.default_rng(1)
    reference = rng.uniform(0.5, 2, (3, twin.D))
    reference[2] = 1e-5
    given = np.array([[1.0], [0.0]]) * np.ones(twin.D)
    for at in twin.slices():
        mean, variance = twin.run(given=given)[1]["moments"][:, at].astype(np.float64)
        given[0, at] = np.sqrt((reference[1, at] + 1e-5) / (variance + 1e-5))
        given[1, at] = reference[0, at] - given[0, at] * mean
    measured = np.ones(len(twin.sites), bool)
    _, actual = twin.run(measured=measured, reference=reference)
    _, expected = twin.run(given=given)
    for name in ("logits", "features", "moments"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-4)


def test_full_maps(twin):
    """A random matrix at one full site: the same as a network with that product in it."""
    twin, batch = twin
    rng = np.random.default_rng(0)
    site = twin.full[-1]
    A = np.eye(site.width) + 0.1 * rng.standard_normal((site.width, site.width))
    shift = rng.standard_normal(site.width)
    given = np.array([[1.0], [0.0]]) * np.ones(twin.D)
    given[1, twin.slices()[twin.sites.index(site)]] = shift
    matrices = [np.eye(each.width) if each is not site else A for each in twin.full]
    flat = np.concatenate([matrix.ravel() for matrix in matrices])
    _, aligned = twin.run(given=given, full=np.array(True), matrices=flat)

    # Cut the model at the site, change its values in NumPy, and run the rest.
    (values,) = values_at(twin.model, [site.site.module], batch)
    moved = np.moveaxis(values, site.site.axis, -1).astype(np.float64)
    mapped = moved.copy()
    mapped[:, site.site.prefix_tokens :] = moved[:, site.site.prefix_tokens :] @ A.T + shift
    changed = np.moveaxis(mapped, -1, site.site.axis).astype(np.float32)
    rest = onnx.ModelProto()
    rest.CopyFrom(twin.model)
    for node in rest.graph.node:
        node.input[:] = ["changed" if name == site.site.module else name for name in node.input]
    rest.graph.initializer.append(numpy_helper.from_array(changed, "changed"))
    (expected,) = values_at(rest, [twin.head.logits], batch)
    np.testing.assert_allclose(aligned["logits"], expected, rtol=1e-3, atol=1e-4)


def test_each_copy_has_its_own_images(twin):
    """As many as there are, and any other number of them."""
    twin, batch = twin
    name = twin.session.get_inputs()[0].name
    one = twin.feeds | {name: batch[:1].numpy()}
    whole = twin.run()[1]["logits"]
    twin.feeds, before = one, twin.feeds
    frozen, aligned = twin.run(images=batch[1:].numpy())
    twin.feeds = before
    assert len(frozen[1]) == 1
    np.testing.assert_allclose(aligned["logits"], whole[1:], rtol=1e-4, atol=1e-4)


def test_measuring(twin):
    """Means and variances of every sample, and covariances of all."""
    twin, batch = twin
    model = measuring_model(twin.model, twin.head, twin.sites, twin.full)
    runs = session(model)
    features, logits, means, variances, covariances = runs.run(
        None, {runs.get_inputs()[0].name: batch.numpy()}
    )
    expected = values_at(twin.model, [twin.head.features, twin.head.logits], batch)
    np.testing.assert_allclose(features, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits, expected[1], rtol=1e-5, atol=1e-5)
    values = twin.values(batch)
    for actual, find in ((means, np.mean), (variances, np.var)):
        found = np.concatenate([find(x, axis=1) for x in values], axis=1)
        np.testing.assert_allclose(actual, found, rtol=1e-4, atol=1e-5)
    _, aligned = twin.run()
    np.testing.assert_allclose(covariances, aligned["covariances"], rtol=1e-4, atol=1e-5)


def test_a_channel_far_from_zero():
    """Whose variance suffers if it is the difference of two numbers in float32."""
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *pooled(4)))
    net[1].bias.data.fill_(5.0)
    batch = images(64, 8)
    twin = Twin(exported(net, batch), batch)
    _, aligned = twin.run()
    (values,) = values_at(twin.model, [twin.sites[0].site.module], batch)
    on_grid = rows(twin.sites[0], values[:, :, ::4, ::4])  # 64 // 14
    np.testing.assert_allclose(aligned["moments"], moments_of(on_grid), rtol=2e-4)


@pytest.mark.parametrize("exporter", ["folded", "unfolded"])
def test_sites_behind_a_grouped_convolution(exporter):
    """They get no full map, which the weight of the convolution could not take."""
    net = seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)),
            *pooled(4),
        )
    )
    model = exported(net, images(10), exporter)
    sites = find_onnx_sites(model, find_head(model, None))
    assert [site.grouped for site in sites] == [False, True, True]
    assert [supports_full_map(site) for site in sites] == [True, False, False]


# --- the grid of positions that are measured -----------------------------------------------------


def two_resolutions():
    """Sites of the size of the images, and of half of it."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        *pooled(6),
    )


GRIDS = [(32, 32, (2, 2), (1, 1)), (56, 28, (4, 2), (2, 1)), (59, 33, (4, 2), (2, 1))]


@pytest.mark.parametrize(("height", "width", "first", "second"), GRIDS)
@pytest.mark.parametrize("open_sizes", [False, True])
def test_moments_on_the_grid(height, width, first, second, open_sizes):
    """Steps are those of torch, also if the graph learns its sizes from the batch."""
    batch = torch.randn(5, 3, height, width, generator=torch.Generator().manual_seed(1))
    net = seeded(two_resolutions)
    axes = {0: "rows"} | ({2: "height", 3: "width"} if open_sizes else {})
    twin = Twin(exported(net, batch, dynamic_axes={"x": axes}), batch)
    tapped = values_at(twin.model, [each.site.module for each in twin.sites], batch)
    steps = dict(zip(twin.sites, (first, second), strict=True))
    picked = [
        rows(site, values[:, :, ::down, ::right])
        for (site, (down, right)), values in zip(steps.items(), tapped, strict=True)
    ]
    expected = np.concatenate([moments_of(x) for x in picked], axis=1)
    covariances = [np.cov(x.reshape(-1, x.shape[-1]).T, bias=True).ravel() for x in picked]
    _, aligned = twin.run()
    np.testing.assert_allclose(aligned["moments"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        aligned["covariances"], np.concatenate(covariances), rtol=1e-4, atol=1e-5
    )
    runs = session(measuring_model(twin.model, twin.head, twin.sites, twin.full))
    feeds = {runs.get_inputs()[0].name: batch.numpy()}
    _, _, means, variances, measured = runs.run(None, feeds)
    for actual, find in ((means, np.mean), (variances, np.var)):
        found = np.concatenate([find(x, axis=1) for x in picked], axis=1)
        np.testing.assert_allclose(actual, found, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(measured, aligned["covariances"], rtol=1e-4, atol=1e-5)

    # Torch's sites are before its BatchNorms, and those of the graph are behind them.
    statistics = ActivationStatistics(TorchModel(net))
    statistics(batch, np.zeros(len(batch), np.int64))
    norms = [layer for layer in net if isinstance(layer, nn.BatchNorm2d)]
    behind = []
    for norm, found in zip(norms, statistics.moments().values(), strict=True):
        scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().numpy()
        mean = scale * (found.mean - norm.running_mean.numpy()) + norm.bias.detach().numpy()
        behind.append(np.stack([mean, scale**2 * found.variance]))
    np.testing.assert_allclose(np.concatenate(behind, axis=1), expected, rtol=1e-4, atol=1e-5)


def pooled(channels):
    return nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)


def test_early_opsets_are_converted():
    batch = images(10)
    model = exported(seeded(residual), batch, opset_version=12)
    twin = Twin(model, batch)
    assert twin.proto.opset_import[0].version == 18
    expected = values_at(model, [twin.head.logits], batch)
    np.testing.assert_allclose(twin.run()[0][1], expected[0], rtol=1e-5, atol=1e-5)


def test_an_opset_that_cannot_be_converted():
    model = parser.parse_model("""
        <ir_version: 4, opset_import: ["": 8]>
        g (float[N, 3, 4, 4] x) => (float[N, 2] y) <float[48, 2] W>
        { u = Upsample<scales = [1.0, 1.0, 1.0, 1.0]>(x)  h = Flatten(u)  y = MatMul(h, W) }""")
    with pytest.raises(CasterError, match="opset 8 and cannot be converted") as caught:
        find_onnx_sites(model, find_head(model, None))
    assert "\n" not in str(caught.value)


def test_a_copy_without_images():
    """Costs nothing where a runtime takes no rows, as for convolutions without full sites."""
    batch = images(10)
    twin = Twin(exported(seeded(residual), batch), batch, full=lambda site: False)
    whole = twin.run()[0][1]
    frozen, aligned = twin.run(images=batch[:0].numpy())
    assert aligned["logits"].shape == (0, 4)
    np.testing.assert_array_equal(frozen[1], whole)


def test_a_fixed_batch_size_is_relaxed():
    batch = images(10)
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *pooled(4)))
    model = exported(net, batch[:1], dynamic_axes={})
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    twin = Twin(model, batch)
    with torch.inference_mode():
        expected = net(batch).numpy()
    np.testing.assert_allclose(twin.run()[1]["logits"], expected, rtol=1e-4, atol=1e-5)


def test_a_fixed_batch_size_that_matters():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3)).reshape(2, 4))

    model = exported(seeded(Rows), images(10, 2), dynamic_axes={})
    with pytest.raises(CasterError, match=r"2 images at a time .* dynamic batch size"):
        find_onnx_sites(model, find_head(model, None))


def test_quantised_graphs(tmp_path):
    batch = images(10)
    paths = [str(tmp_path / name) for name in ("float.onnx", "quantised.onnx")]
    onnx.save(exported(seeded(residual), batch), paths[0])
    quantize_static(*paths, Calibration(batch), quant_format=QuantFormat.QDQ)
    twin = Twin(onnx.load(paths[1]), batch)
    (features, logits), aligned = twin.run()
    expected = values_at(twin.model, [twin.head.features, twin.head.logits], batch)
    np.testing.assert_array_equal(features, expected[0])
    np.testing.assert_array_equal(logits, expected[1])
    np.testing.assert_allclose(aligned["logits"], logits, atol=0.02 * np.abs(logits).max())


def test_half_precision():
    """Moments and maps are in float32, the network stays as it is."""
    batch = images(10)
    model = exported(seeded(residual).half(), batch.half())
    twin = Twin(model, batch.half())
    (_, logits), aligned = twin.run()
    assert logits.dtype == np.float16
    assert aligned["logits"].dtype == aligned["moments"].dtype == np.float32
    np.testing.assert_allclose(aligned["logits"], logits, rtol=1e-2, atol=1e-2)


def test_external_weights(tmp_path):
    """Stay in their file."""
    batch = images(10)
    model = exported(seeded(residual), batch)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    outside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    head = find_head(outside, None)
    twin = twin_model(outside, head, find_onnx_sites(outside, head), ())
    external = {t.name for t in outside.graph.initializer if t.data_location}
    assert external
    assert {t.name for t in twin.graph.initializer if t.data_location} == external


def test_nodes_without_names():
    """As in graphs that were written by hand or by some converters."""
    make, size = NETWORKS[next(iter(NETWORKS))]
    batch = images(size, 2)
    model = exported(seeded(make), batch)
    for node in model.graph.node:
        node.name = ""
    twin = Twin(model, batch)
    frozen, aligned = twin.run()
    np.testing.assert_allclose(aligned["logits"], frozen[1], rtol=1e-4, atol=1e-5)
