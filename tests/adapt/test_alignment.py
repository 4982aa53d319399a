"""What aligns a network: what it learns of a batch, when, and of networks of odd shapes."""

from __future__ import annotations

import copy
import logging
from collections import namedtuple
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import timm
import torch
from timm.layers import freeze_batch_norm_2d
from torch import nn
from transformers.utils import ModelOutput

import caster
from caster import CasterError, wrap
from caster.adapt import alignment
from caster.adapt.image_features import activation_statistics_for
from caster.adapt.layer_passes import PLAIN, Pass
from caster.adapt.layer_transport import LayerTransport
from caster.core.channels import ChannelMoments, Site, to_source_full
from caster.models.heads import Columns
from caster.models.torch import TorchModel
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.cpu_runner import run_alignments_on_the_cpu
from tests.support.problem import layered, make_images, model, source, stream
from tests.support.sampling import first_fast, sampled


def ungated(frozen, known=None, **settings):
    """At every site of a network, deep ones too."""
    return create("layer-transport-ungated", frozen, known, **{"depth": 1.0} | settings)


@pytest.mark.parametrize(
    ("kind", "name"),
    first_fast(
        sampled(
            product(["batch", "layer", "vit"], ["layer-transport", "layer-transport-ungated"]), 3
        )
    ),
)
def test_images_that_are_no_numbers_leave_no_trace(name, kind):
    first, bad, second = (batch.copy() for batch in stream(3, size=16))
    bad[3] = np.nan
    method, clean = (create(name, model(kind), layered(kind)) for _ in range(2))
    for batch in (first, second):
        expected = clean.predict(batch)
        given = method.predict(batch)
        assert torch.equal(given.logits, expected.logits)
        assert given.reason == expected.reason
        with pytest.raises(CasterError, match="not finite"):
            method.predict(bad)


class Failing(nn.Module):
    """Fails when told to, in the middle of a pass."""

    fails = False

    def forward(self, x):
        if Failing.fails:
            raise RuntimeError("out of memory")
        return x


def a_net(norm):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), norm(8), Failing(), nn.Conv2d(8, 8, 3), norm(8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c)])
def test_a_pass_that_fails_counts_nothing(norm, monkeypatch):
    frozen = wrap(a_net(norm))
    batches = stream(3, size=16)
    known = Source(batches=[(batches[0], np.zeros(16, int))])
    method, clean = (ungated(frozen, known) for _ in range(2))
    for batch in batches:
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(CasterError, match="out of memory"):
            method.predict(batch)
        monkeypatch.setattr(Failing, "fails", False)
        assert torch.equal(method.predict(batch).logits, clean.predict(batch).logits)
    past = method.transport._alignment.target.past
    counts = {str(site): found.count for site, found in past.items()}
    assert set(counts.values()) == {48}


class Breaking(nn.BatchNorm2d):
    """Fails behind its hooks, when told to."""

    fails = False

    def forward(self, x):
        if Breaking.fails:
            raise RuntimeError("out of memory")
        return super().forward(x)


def test_a_batchnorm_has_its_own_statistics_back_whatever_happens(monkeypatch):
    frozen = wrap(a_net(Breaking))
    method = ungated(frozen)
    twin = method.transport._alignment._twin.module
    own = [
        (layer.running_mean, layer.running_var) for layer in (frozen.module[1], frozen.module[4])
    ]
    method.predict(stream(1)[0])
    monkeypatch.setattr(Breaking, "fails", True)
    with pytest.raises(CasterError, match="out of memory"):
        method.predict(stream(1)[0])
    for layer, (mean, var) in zip((twin[1], twin[4]), own, strict=True):
        assert layer.running_mean is mean
        assert layer.running_var is var
    frozen.verify()


def test_data_parallel_is_rejected():
    frozen = TorchModel(nn.DataParallel(a_net(nn.BatchNorm2d)))
    with pytest.raises(CasterError, match="wrap the module inside it"):
        ungated(frozen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize(
    ("memory", "kind", "inner"), sampled(product([0, 64], ["batch", "vit"], [False, True]), 4)
)
def test_a_compiled_module_is_aligned_as_it_was_before(kind, memory, inner):
    compiled = torch.compile(model(kind).module, backend="eager")
    compiled = Holder(compiled) if inner else compiled
    known = Source(batches=source(kind).batches)
    method = ungated(wrap(compiled), known, memory=memory)
    expected = ungated(model(kind), known, memory=memory)
    for batch in stream(2, size=16):
        given = method.predict(batch).logits
        torch.testing.assert_close(given, expected.predict(batch).logits, rtol=1e-5, atol=1e-5)
    prefix = "net." if inner else ""
    assert [str(s) for s in method.transport.sites] == [
        prefix + str(s) for s in expected.transport.sites
    ]


class Holder(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Shared(nn.Module):
    """One BatchNorm in two places, another in one."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.shared, self.own, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.shared(self.stem(x))
        return self.head(self.own(self.shared(self.conv(x))).mean(dim=(2, 3)))


def test_a_batchnorm_called_twice_is_left_alone(caplog):
    torch.manual_seed(0)
    net = Shared()
    method = ungated(wrap(net), prior=0.0)
    (batch,) = stream(1)
    assert [str(site) for site in method.transport.sites] == ["shared:in", "own:in"]
    with caplog.at_level(logging.WARNING, "caster"):
        given = method.predict(batch).logits
        method.predict(batch)
    assert [r.getMessage() for r in caplog.records] == [
        "shared:in of Shared is called twice: not aligned"
    ]
    assert (
        list(method.transport._alignment.target.past)
        == method.transport.aligned_sites
        == [Site("own", "in", 1)]
    )
    with torch.no_grad():
        x = net.shared(net.conv(net.shared(net.stem(torch.from_numpy(batch)))))
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        expected = net.head(((x - mean) / (var + 1e-5).sqrt()).mean(dim=(2, 3)))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Mixed(nn.Module):
    """A BatchNorm, and blocks with LayerNorm behind it."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.head(self.blocks(self.bn(self.conv(x)).flatten(2).mT).mean(dim=1))


def test_sites_that_a_state_says_nothing_of_are_spoken_of(caplog):
    frozen = wrap(Mixed())
    batches = [make_images(50, seed=4)]
    plain = caster.fit(frozen, batches, layers=False).state
    full = caster.fit(frozen, batches, layers=True).state
    caplog.clear()
    with caplog.at_level(logging.WARNING, "caster"):
        ungated(frozen, full).predict(stream(1)[0])
        assert not caplog.records
        method = ungated(frozen, plain)
        for batch in stream(2):
            method.predict(batch)
    (record,) = caplog.records
    assert "Mixed: 3 sites such as blocks.0:in are not aligned" in record.getMessage()
    assert len(ungated(frozen, full).transport.sites) == 1 + 3


def test_an_inert_method_says_why(caplog):
    with caplog.at_level(logging.WARNING, "caster"):
        ungated(model("vit"), source("vit").state)
    assert "has no site to align: the state has no layers" in caplog.text


def test_a_state_of_other_widths_is_named():
    frozen = model("layer")
    state = caster.fit(frozen, source("layer").batches, layers=True).state
    wider = nn.Sequential(*frozen.module)
    wider[0], wider[1] = nn.Conv2d(3, 12, 3, 1, 1), nn.GroupNorm(2, 12)
    wider[3] = nn.Conv2d(12, 16, 3, 2, 1)
    method = ungated(wrap(wider), Source(state=state, allow_other_model=True))
    with pytest.raises(CasterError, match="8 channels at 1:in, and the model 12"):
        method.predict(stream(1)[0])


def test_a_frozen_batchnorm_is_one():
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=4).eval()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    images = torch.from_numpy(np.concatenate(stream(1)).reshape(-1, 3, 8, 8)).repeat(1, 1, 4, 4)
    expected = ungated(wrap(net)).predict(images).logits
    method = ungated(wrap(freeze_batch_norm_2d(net)))
    assert len(method.transport.sites) == 14
    torch.testing.assert_close(method.predict(images).logits, expected, rtol=1e-3, atol=1e-3)


Pair = namedtuple("Pair", "cls tokens")


@dataclass
class Given(ModelOutput):
    hidden: torch.Tensor | None = None


RETURNS = {
    "tuple": (lambda x: (x, None), lambda y: y[0]),
    "list": (lambda x: [x], lambda y: y[0]),
    "named": (lambda x: Pair(x, 3), lambda y: y.cls),
    "dict": (lambda x: {"n": 1, "x": x}, lambda y: y["x"]),
    "output": (Given, lambda y: y.hidden),
}


class Wrapping(Block):
    kind = "tuple"

    def forward(self, x):
        return RETURNS[self.kind][0](super().forward(x))


class Chain(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Wrapping(), Wrapping()]), nn.Linear(8, 4)
        for block in self.blocks:
            block.kind = kind

    def forward(self, x):
        for block in self.blocks:
            x = RETURNS[block.kind][1](block(x))
        return self.head(x.mean(dim=1))


@pytest.mark.parametrize("kind", RETURNS)
def test_blocks_may_return_their_values_among_others(kind):
    answers = []
    for returned in ("tuple", kind):
        torch.manual_seed(0)
        net = Chain(returned)
        x = torch.randn(32, 5, 8)
        known = Source(batches=[(x, np.zeros(32, int))])
        method = ungated(wrap(net), known)
        assert [str(s) for s in method.transport.sites] == [
            "blocks.0:in",
            "blocks.0:out",
            "blocks.1:out",
            "head:in",
        ]
        answers.append(method.predict(3 * x + 1).logits)
        assert not torch.allclose(answers[-1], wrap(net)(3 * x + 1).logits)
    torch.testing.assert_close(*answers)


def test_a_module_that_gives_no_values_any_more_is_named():
    net = Chain("dict")
    x = torch.randn(32, 5, 8)
    method = ungated(wrap(net), Source(batches=[(x, np.zeros(32, int))]))
    method.transport._alignment._twin.module.blocks[0].forward = lambda x: "nothing"
    with pytest.raises(
        CasterError, match=r"no activations at blocks\.0:out.*: adapt the last features only"
    ):
        method.predict(x)


def test_a_module_that_gives_no_values_any_more_is_not_measured():
    net = Chain("dict")
    gauge = activation_statistics_for(wrap(net))
    x, classes = torch.randn(4, 5, 8), np.array([0, 1, 0, 1])
    gauge(x, classes)
    gauge._twin.module.blocks[0].forward = lambda x: "nothing"
    with pytest.raises(
        CasterError, match=r"no activations at blocks\.0:out.*: fit the last features only"
    ):
        gauge(x, classes)
    assert {found.count for found in gauge.sums.values()} == {4.0}  # of the sound pass alone


def test_other_methods_do_not_retain_a_states_layers():
    with_layers = caster.fit(model("vit"), source("vit").batches, layers=True).state
    for name in ("caster", "source-gda"):
        plain = create(name, model("vit"), source("vit").state).retained()
        assert create(name, model("vit"), with_layers).retained() == plain


@pytest.mark.parametrize("kind", ["batch", "vit"])
@pytest.mark.parametrize("memory", [0, 24])
def test_a_batch_that_rests_on_itself_is_recorded(kind, memory, monkeypatch):
    run_alignments_on_the_cpu(monkeypatch)
    plain = model(kind)
    graph = TorchModel(plain.module, cuda_graph=True)
    known = Source(batches=source(kind).batches)
    one, other = (ungated(frozen, known, memory=memory) for frozen in (graph, plain))
    images, _ = make_images(144, seed=6, shift=0.5)
    for batch in np.split(images, [64, 72, 136]):  # 64, 8, 64 and 8 images
        torch.testing.assert_close(one.predict(batch).logits, other.predict(batch).logits)
    assert len(one.transport._alignment._runner.settings) == (2 if memory else 4)
    pasts = one.transport._alignment.target.past, other.transport._alignment.target.past
    assert [*pasts[0]] == [*pasts[1]]
    for found, expected in zip(*(past.values() for past in pasts), strict=True):
        assert found.count == expected.count
        torch.testing.assert_close(found.mean, expected.mean)


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_a_mixture_is_found_in_a_recorded_pass_too(kind, monkeypatch):
    """Shallow passes are recorded, and whole ones while the mixture is the source's."""
    run_alignments_on_the_cpu(monkeypatch)
    plain = model(kind)
    graph = TorchModel(plain.module, cuda_graph=True)
    known = caster.fit(plain, source(kind).batches).state
    name, settings = "mixture-transport-ungated", {"memory": 64}
    one, other = (create(name, frozen, known, **settings) for frozen in (graph, plain))
    images, labels = make_images(144, seed=6, shift=0.5)
    shuffled = np.split(images, [64, 72, 136])
    for batch in (*shuffled, images[np.argsort(labels)][:64]):
        torch.testing.assert_close(one.predict(batch).logits, other.predict(batch).logits)
    assert 3 <= len(one.transport._alignment._runner.settings) <= 6
    states = one.transport.state(), other.transport.state()
    assert states[0].keys() == states[1].keys()
    for part, expected in states[1].items():
        np.testing.assert_allclose(states[0][part], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["layer-transport", "mixture-transport"])
def test_a_model_that_would_record_on_a_gpu_answers_on_a_cpu(name):
    known = caster.fit(model(), source().batches).state
    one, other = (
        create(name, frozen, known)
        for frozen in (TorchModel(model().module, cuda_graph=True), model())
    )
    for batch in stream(3, size=64):
        assert torch.equal(one.predict(batch).logits, other.predict(batch).logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["batch", "vit"])
@pytest.mark.parametrize("name", ["layer-transport-ungated", "mixture-transport-ungated"])
def test_a_recorded_pass_answers_as_one_that_is_not(name, kind):
    nets = [wrap(model(kind).module, device="cuda", cuda_graph=graph) for graph in (True, False)]
    known = caster.fit(nets[1], source(kind).batches).state
    settings = {"memory": 64, "depth": 1.0}
    one, other = (create(name, frozen, known, **settings) for frozen in nets)
    for batch in stream(5, size=64) + stream(1, size=8) + stream(3, size=64):
        given, expected = (method.predict(batch).logits for method in (one, other))
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("depth", [None, 4])
def test_covariances_are_measured_in_passes_that_are_remembered(depth, monkeypatch):
    method = a_full_pair(prior=0.0, memory=64)
    aligned, measured = method.transport._alignment, []
    measure = alignment.measure_full
    monkeypatch.setattr(alignment, "measure_full", lambda *of: measured.append(of) or measure(*of))
    aligned(stream(1)[0], Pass(depth))
    assert len(measured) == (aligned.full_maps if depth is None else 0)
    aligned.commit()
    kept = [moments for moments in aligned.target.past.values() if moments.covariance is not None]
    assert len(kept) == len(measured)


@pytest.mark.parametrize("depth", [1, 2, 3, None])
def test_a_shallow_pass_aligns_the_first_sites_in_their_order(depth):
    """In whichever order the layers come: here a measured site behind BatchNorms that are not."""
    measured = wrap(copy.deepcopy(model("batch").module))
    images, _ = make_images(64, seed=0)
    head = Site("12", "in", -1)
    layers = {head: ChannelMoments(64.0, np.zeros(16, np.float32), np.ones(16, np.float32))}
    transport = LayerTransport(measured, layers, Columns(None), settings=replace(PLAIN, depth=1.0))
    assert [str(site) for site in transport.sites] == ["1:in", "4:in", "8:in", "12:in"]
    aligned = transport._alignment
    aligned(images, Pass(depth))
    aligned.commit()
    assert list(aligned.target.past) == transport.sites[:depth]
    assert {str(site) for site in aligned.target.recent} == {"1:in"}  # the first quarter


def test_dead_channels_stay_dead():
    """A channel, and at the second norm all of them, that never had a value but zero."""
    net = a_net(lambda c: nn.GroupNorm(2, c))
    with torch.no_grad():
        net[0].weight[3], net[0].bias[3] = 0, 0
        net[3].weight.zero_()
        net[3].bias.zero_()
    frozen = wrap(net)
    method = ungated(frozen, Source(batches=[(stream(1)[0], np.zeros(32, int))]))
    for batch in stream(2, shift=1.0):
        torch.testing.assert_close(method.predict(batch).logits, frozen(batch).logits)
    assert isinstance(method.transport._alignment.target.past[Site("4", "in", 1)], ChannelMoments)


def a_full_pair(**settings):
    """The same network with full maps and by hand, on a source whose covariances are known."""
    known = Source(batches=source("vit").batches)
    return ungated(model("vit"), known, maps="full", **settings)


def test_full_maps_are_those_of_the_batch():
    method = a_full_pair(prior=0.0, memory=0, sites=["blocks.0:in"])
    x = np.concatenate(stream(20, size=32))
    net, seen = method.transport._alignment._twin.module, []
    net.blocks[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    method.predict(x)
    rows = seen[0][:, 1:].double().reshape(-1, 16).numpy()  # the patches'
    (spot,) = method.transport._alignment._mapped
    eps = 1e-3 * float(spot.source.variance.mean())
    moved = np.cov(rows, rowvar=False, bias=True)
    # A (C + eps I) A = C_s + eps I, so the covariance is the source's but for A A eps
    np.testing.assert_allclose(moved, spot.source.covariance, atol=10 * eps)
    np.testing.assert_allclose(rows.mean(axis=0), spot.source.mean, atol=1e-4)
    off = spot.source.covariance - spot.source.covariance.diagonal().diag()
    assert off.abs().max() > 100 * eps  # so a diagonal map would not do


@pytest.mark.parametrize(
    ("size", "memory", "prior", "full"),
    [
        (200, 0, 0.0, (True, True)),
        (199, 0, 0.0, (False, False)),
        (184, 0, 16.0, (True, True)),  # the source's own samples are some of them
        (183, 0, 16.0, (False, False)),
        (100, 200, 0.0, (False, True)),  # with those of the batch before
        (100, 199, 0.0, (False, False)),
        (100, 512, 0.0, (False, True)),
    ],
)
def test_full_maps_need_moments_that_support_them(size, memory, prior, full):
    """Four patches an image and 16 channels: 200 images make 800 values, 50 a channel."""
    images, _ = make_images(2 * size, seed=8, shift=0.5)
    method = a_full_pair(memory=memory, prior=prior)
    known = Source(batches=source("vit").batches)
    plain = ungated(model("vit"), known, memory=memory, prior=prior)
    for batch, expected in zip((images[:size], images[size:]), full, strict=True):
        same = torch.equal(method.predict(batch).logits, plain.predict(batch).logits)
        assert same != expected
        plain.transport._alignment.target.past = dict(method.transport._alignment.target.past)


def test_full_maps_rest_on_the_covariance_of_all_batches():
    images, _ = make_images(96, seed=8, shift=0.5)
    whole, parts = (a_full_pair(memory=512, sites=["blocks.0:in"]) for _ in range(2))
    whole.predict(images)
    for batch in np.split(images, [10, 11, 64]):
        parts.predict(batch)
    (one,), (other,) = (m.transport._alignment.target.past.values() for m in (whole, parts))
    torch.testing.assert_close(one.covariance, other.covariance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.covariance.diagonal(), one.variance, rtol=1e-4, atol=1e-5)
    (recent,) = parts.transport._alignment.target.recent.values()
    assert recent.covariance is None


def test_the_full_map_of_a_batchnorm_is_that_of_its_output():
    """In float64 by hand, where the layer has normalised the values by its own statistics."""
    images = np.concatenate([images for images, _ in source().batches])
    batch, _ = make_images(200, seed=8, shift=0.5)
    settings = {"maps": "full", "prior": 0.0, "memory": 0, "sites": ["1:in"]}
    method = ungated(model(), layered(), **settings)
    assert method.transport.full_maps == 1
    net = copy.deepcopy(model().module).double()
    with torch.no_grad():
        known, values = (net[:2](torch.from_numpy(x).double()) for x in (images, batch))
        moments = [ChannelMoments.of(x, 1, full=True) for x in (values, known)]
        A, b = to_source_full(*moments, 1e-3 * float(moments[1].variance.mean()))
        expected = net[2:](torch.einsum("dc,nchw->ndhw", A, values) + b[:, None, None])
    found = method.predict(batch).logits
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_full_maps_come_back_from_a_file(tmp_path):
    known = source("vit")
    caster.fit(model("vit"), known.batches).save(tmp_path / "s.caster")
    settings = {"maps": "full", "tau": 99.0, "depth": 1.0}
    stored = create("layer-transport", model("vit"), tmp_path / "s.caster", **settings)
    seen = create("layer-transport", model("vit"), known, **settings)
    images, _ = make_images(400, seed=8, shift=0.5)
    for batch in (images[:200], images[200:]):
        assert torch.equal(stored.predict(batch).logits, seen.predict(batch).logits)
    plain = create("layer-transport", model("vit"), tmp_path / "s.caster", depth=1.0).retained()
    assert stored.retained().statistics - plain.statistics == 5 * 16 * 16 * 4


def test_full_maps_are_where_a_covariance_is_known():
    for kind, full in (("batch", 3), ("layer", 3), ("vit", 5)):  # not at a classifier's input
        transport = ungated(model(kind), layered(kind), maps="full").transport
        assert (transport.full_maps, len(transport.sites)) == (full, full + (kind != "batch"))
        assert ungated(model(kind), layered(kind)).transport.full_maps == 0
    assert ungated(model(), maps="full").transport.full_maps == 0  # BatchNorms' own moments
    with pytest.raises(CasterError, match="'diagonal' or 'full', not 'round'"):
        ungated(model("vit"), layered("vit"), maps="round")
    with pytest.raises(CasterError, match="layers are True, False or 'auto'"):
        caster.fit(model("vit"), source("vit").batches, layers="half")


def test_a_network_in_bfloat16_rests_on_moments_in_float32():
    net = a_net(lambda c: nn.GroupNorm(2, c)).to(torch.bfloat16)
    images = torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    method = ungated(wrap(net), Source(batches=[(images, np.zeros(256, int))]))
    method.predict(images)
    found = method.transport._alignment.target.past[Site("1", "in", 1)]
    with torch.no_grad():
        values = net[0](images.to(torch.bfloat16)).double()
    expected = ChannelMoments.of(values, 1)
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.variance.double(), expected.variance, rtol=1e-4, atol=1e-6)
