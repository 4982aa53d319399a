"""Constant maps in a network's weights: what hooks with the same maps would give."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from timm.layers import StdConv2d
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import caster
from caster.adapt import alignment as module
from caster.adapt import folding
from caster.adapt.folding import FoldedModule, foldable_convolutions
from caster.adapt.layer_passes import Pass
from caster.models.sites import find_sites
from caster.models.torch import TorchModel
from tests.support.onnx_export import images, seeded

CLASSES = 4
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8}
SWIN |= {"depths": (1, 2), "num_heads": (1, 2)}


class Convolutional(nn.Module):
    """BatchNorms behind convolutions of several kinds, and behind none."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.plain, self.norm2 = nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8, eps=0.1)
        self.norm3 = nn.BatchNorm2d(8)
        self.wise, self.norm4 = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8)
        self.standard, self.norm5 = StdConv2d(8, 8, 3, bias=True), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.norm1(self.first(x)).relu()
        x = self.norm2(self.plain(x)).relu()
        x = self.norm3(x)  # behind no convolution
        x = x + self.norm4(self.wise(x)).relu()
        x = self.norm5(self.standard(x)).relu()
        return self.head(x.mean((2, 3)))


class ReadTwice(nn.Module):
    """A function reads the output of the convolution too, which no module shows."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.conv(x)
        return self.head((self.norm(x) + 3 * x.tanh()).relu().mean((2, 3)))


class Skipped(nn.Module):
    """A function reads the input of a LayerNorm too, and the first LayerNorm's is the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.LayerNorm(12), nn.LayerNorm(12), nn.Linear(36, 4)

    def forward(self, x):
        x = self.first(x) + x.tanh()
        return self.head((self.norm(x) + x.tanh()).flatten(1))


NETWORKS = {
    "convolutional": (Convolutional, 12),
    "read twice": (ReadTwice, 12),
    "vit": (lambda: VisionTransformer(**VIT, num_classes=CLASSES), 16),
    "registers": (lambda: VisionTransformer(**VIT, num_classes=CLASSES, reg_tokens=2), 16),
    "swin": (lambda: SwinTransformer(**SWIN, num_classes=CLASSES), 16),
}
AGREE = [name for name in NETWORKS if name != "read twice"]
FOLDED = {"norm1:in": "first", "norm2:in": "plain"}  # neither the depthwise nor the standardised


@cache
def network(name) -> TorchModel:
    make, _ = NETWORKS[name]
    return TorchModel(seeded(make).double())


def batch_of(name, count=5):
    return images(NETWORKS[name][1], count).double()


def sites_of(name):
    model, batch = network(name), batch_of(name)
    before = foldable_convolutions(model.twin(), batch)
    return {site: before.get(site) for site in find_sites(model, batch)}


def shapes_of(name):
    """The shape of the values at every site, seen by hooks."""
    found = {}
    run_with(name, lambda site, x: found.update({site: x.shape}))
    return found


def widths_of(name):
    return {site: shape[site.axis] for site, shape in shapes_of(name).items()}


def run_with(name, change):
    """The frozen network with the values at its sites changed by a function, in plain torch."""
    net = copy.deepcopy(network(name).module)

    def hook(site):
        def before(layer, args):
            new = change(site, args[0])
            return None if new is None else (new, *args[1:])

        def after(layer, args, output):
            return change(site, output)

        layer = net.get_submodule(site.module)
        if site.side == "in":
            layer.register_forward_pre_hook(before)
        else:
            layer.register_forward_hook(after)

    for site in sites_of(name):
        hook(site)
    with torch.inference_mode():
        return net(batch_of(name))


def mapped(site, x, scale, shift):
    """Map the channels of image patches, and leave tokens that were added."""
    rows = x.movedim(site.axis, -1)
    rows = (rows @ scale.T if scale.ndim == 2 else rows * scale) + shift
    new = rows.movedim(-1, site.axis)
    return (
        torch.cat([x[:, : site.prefix_tokens], new[:, site.prefix_tokens :]], 1)
        if site.prefix_tokens
        else new
    )


def random_maps(name, kind, seed=0):
    rng = np.random.default_rng(seed)
    maps = {}
    for i, (site, shape) in enumerate(shapes_of(name).items()):
        full = kind == "full" or (kind == "mixed" and i % 2 == seed % 2)
        full, c = full and len(shape) > 2, shape[site.axis]  # a vector has no covariance measured
        A = np.eye(c) + 0.2 * rng.normal(size=(c, c)) if full else rng.uniform(0.5, 1.5, c)
        maps[site] = torch.from_numpy(A), torch.from_numpy(0.3 * rng.normal(size=c))
    return maps


def expected_logits(name, maps):
    return run_with(name, lambda site, x: mapped(site, x, *maps[site])).float()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", AGREE)
@pytest.mark.parametrize("kind", ["diagonal", "full", "mixed"])
def test_folded_maps_are_those_of_hooks(name, kind):
    maps = random_maps(name, kind)
    folded = FoldedModule(network(name), sites_of(name))
    folded.fold(maps)
    frozen = network(name)(batch_of(name)).logits
    expected = expected_logits(name, maps)
    assert (expected - frozen).abs().max() > 0.01
    close(folded(batch_of(name))[1], expected)
    plain = FoldedModule(network(name), dict.fromkeys(maps))  # nothing in a convolution
    plain.fold(maps)
    close(plain(batch_of(name))[1], expected)


def test_features_are_those_behind_the_maps():
    """Logits are a function of them, by the head's weight."""
    maps = random_maps("vit", "full")
    folded = FoldedModule(network("vit"), sites_of("vit"))
    folded.fold(maps)
    (features, logits), head = folded(batch_of("vit")), network("vit").module.head
    close(features @ head.weight.T.float() + head.bias.float(), logits)
    close(logits, expected_logits("vit", maps))


def test_which_convolutions_take_full_maps():
    found = sites_of("convolutional")
    assert {str(site): name for site, name in found.items() if name is not None} == FOLDED


def test_a_convolution_with_hooks_keeps_its_weight():
    """As with weight normalisation of torch, which computes the weight in one."""
    model = copy.deepcopy(network("convolutional").module)
    model.plain.register_forward_pre_hook(lambda layer, args: None)
    found = foldable_convolutions(TorchModel(model), batch_of("convolutional"))
    assert {str(site): name for site, name in found.items()} == {"norm1:in": "first"}


@pytest.mark.parametrize("name", AGREE)
def test_folding_again_overwrites(name):
    """Full and diagonal maps take turns: nothing of the last ones is left."""
    folded = FoldedModule(network(name), sites_of(name))
    for seed, kind in enumerate(["full", "diagonal", "mixed", "mixed", "full", "diagonal"]):
        maps = random_maps(name, kind, seed)
        folded.fold(maps)
        close(folded(batch_of(name))[1], expected_logits(name, maps))


def test_identities_give_the_frozen_answers():
    for name in AGREE:
        maps = {
            site: (torch.ones(c, dtype=torch.float64), torch.zeros(c, dtype=torch.float64))
            for site, c in widths_of(name).items()
        }
        folded = FoldedModule(network(name), sites_of(name))
        folded.fold(random_maps(name, "full"))
        folded.fold(maps)
        close(folded(batch_of(name))[1], network(name)(batch_of(name)).logits)


@pytest.mark.parametrize("name", AGREE)
def test_the_frozen_model_is_not_written_to(name):
    model, batch = network(name), batch_of(name)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    answers = model(batch).logits
    folded = FoldedModule(model, sites_of(name))
    for kind in ("full", "diagonal"):
        folded.fold(random_maps(name, kind))
        folded(batch)
    after = model.module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(model(batch).logits, answers)
    model.verify()


def test_other_weights_are_shared():
    model = network("convolutional")
    folded = FoldedModule(model, sites_of("convolutional"))
    folded.fold(random_maps("convolutional", "full"))
    own = dict(folded._twin.module.named_parameters())
    pairs = [(name, own[name] is part) for name, part in model.module.named_parameters()]
    assert {name for name, same in pairs if not same} == {"first.weight", "plain.weight"}


def test_a_second_reader_needs_hooks():
    """What `Alignment.fold` must notice: folded in the convolution, the reader gets the map too."""
    maps = random_maps("read twice", "full")
    assert [*sites_of("read twice").values()] == ["conv"]  # no module shows the reader
    expected = expected_logits("read twice", maps)
    folded = FoldedModule(network("read twice"), sites_of("read twice"))
    folded.fold(maps)
    assert (folded(batch_of("read twice"))[1] - expected).abs().max() > 0.05
    hooked = FoldedModule(network("read twice"), dict.fromkeys(maps))
    hooked.fold(maps)
    close(hooked(batch_of("read twice"))[1], expected)


# --- in place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "registers", "swin"])
def test_maps_in_place_are_those_of_hooks(name):
    folded, batch = FoldedModule(network(name), sites_of(name)), batch_of(name)
    folded.fold(random_maps(name, "diagonal"))
    assert folded.map_in_place(batch)
    assert torch.equal(batch, batch_of(name))
    for seed, kind in enumerate(["diagonal", "mixed", "diagonal"], start=1):
        maps = random_maps(name, kind, seed)
        folded.fold(maps)
        close(folded(batch)[1], expected_logits(name, maps))
    network(name).verify()


def test_values_with_another_reader_are_not_overwritten():
    """Neither the batch, which is one of them: a function reads it, and so may the caller."""
    model = TorchModel(seeded(Skipped).double())
    rng = np.random.default_rng(0)
    batch = torch.from_numpy(rng.normal(size=(5, 3, 12)))
    sites = find_sites(model, batch)
    assert [str(site) for site in sites] == ["first:in", "norm:in", "head:in"]
    for where in range(2):
        maps = {sites[where]: (torch.full((12,), 1.5).double(), torch.ones(12).double())}
        for given in (batch, torch.inference_mode()(batch.clone)()):
            folded = FoldedModule(model, dict.fromkeys(maps))
            folded.fold(maps)
            expected = folded(batch)[1]
            assert not folded.map_in_place(given)
            assert torch.equal(folded(given)[1], expected)
            assert torch.equal(given, batch)


def test_hooks_of_the_user_see_the_values_of_the_network():
    seen = []
    net = copy.deepcopy(network("vit").module)
    net.blocks[0].register_forward_hook(lambda layer, args, output: seen.append(output))
    model = TorchModel(net)
    folded = FoldedModule(model, sites_of("vit"))
    folded.fold(random_maps("vit", "diagonal"))
    assert not folded.map_in_place(batch_of("vit"))
    seen.clear()
    folded(batch_of("vit"))
    inner = seen[0].clone()
    maps = random_maps("vit", "diagonal")
    after = next(site for site in maps if str(site) == "blocks.0:out")

    def change(site, x):
        return seen.append(x) if site == after else mapped(site, x, *maps[site])

    run_with("vit", change)
    close(inner, seen[-1])


# --- the maps of a stream's past -----------------------------------------------------------------


@cache
def alignment(name):
    """Layers that are aligned with a source of noise, behind a past of brighter noise."""
    generator = torch.Generator().manual_seed(2)
    size = NETWORKS[name][1]
    source = torch.randn(320, 3, size, size, generator=generator)
    labels = np.arange(320) % CLASSES
    model = caster.wrap(seeded(NETWORKS[name][0]))
    batches = zip(source.split(64), np.split(labels, 5), strict=True)
    fitted = caster.fit(model, [*batches])
    assert fitted.full_maps > 0
    found = fitted._layers._alignment
    for part in (1.5 * source + 0.5).split(64):
        found(part)
        found.commit()
    return found


def both(features, logits):
    return features, logits


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_s_maps_are_folded(name):
    aligned, batch = alignment(name).new_stream(), 1.4 * images(NETWORKS[name][1], 7) + 0.6
    aligned.target.past = dict(alignment(name).target.past)
    classes = np.array([0.4, 0.3, 0.2, 0.1])
    frozen = aligned.model(batch).logits
    for how in (
        Pass(full=True, past_only=True),
        Pass(mixture=classes, past_only=True),
        Pass(full=True, past_only=True),
    ):
        expected = aligned(batch, how)
        pending = dict(aligned.target.past)
        aligned.fold(batch, how, 1)
        assert aligned.target.past == pending
        features, logits = aligned.folded(batch, both)
        scale = expected.logits.abs().max()
        assert (expected.logits - frozen).abs().max() > 0.02 * scale
        torch.testing.assert_close(logits / scale, expected.logits / scale, rtol=0, atol=1e-4)
        torch.testing.assert_close(features, expected.features, rtol=1e-3, atol=1e-3)
    aligned.model.verify()


def test_a_fold_that_disagrees_is_made_with_hooks(monkeypatch):
    """Without the comparison, the second reader of the convolution would get the map."""
    batch, how = images(12, 7), Pass(full=True, past_only=True)
    errors = []
    for limit in (module.FOLDING_ERROR, np.inf):
        monkeypatch.setattr(module, "FOLDING_ERROR", limit)
        aligned = alignment("read twice").new_stream()
        aligned.target.past = dict(alignment("read twice").target.past)
        expected = aligned(batch, how).logits
        aligned.fold(batch, how, 1)
        errors.append(float((aligned.folded(batch, both)[1] - expected).abs().max()))
    assert errors[0] < 1e-4 < 0.1 < errors[1]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_long_rest_records_the_network_if_that_helps(recorded, bound, hooked, monkeypatch):
    """Its graph reserves memory, gains only if launches are slow, and skips the user's hooks."""
    given, whole = [], recorded or (bound and not hooked)

    class Runner:
        is_used = True

        def __init__(self, device, multiplies):
            assert multiplies == whole
            self.multiplies = multiplies

        def run(self, first, work, settings):
            inputs = first()
            given.append([tuple(tensor.shape) for tensor in inputs])
            return list(work(*inputs)[0]), None

        def release(self):
            pass

    def is_launch_bound(work, device):
        assert len(work()) == 2
        asked.append(device)
        return bound

    asked = []
    monkeypatch.setattr(folding, "GraphRunner", Runner)
    monkeypatch.setattr(folding, "is_launch_bound", is_launch_bound)
    monkeypatch.setattr(folding, "runs_on_gpu", lambda model: True)
    module, batch = network("convolutional").module, batch_of("convolutional")
    if hooked:
        module.register_forward_hook(lambda module, args, output: None)
    maps = random_maps("convolutional", "diagonal")
    folded = FoldedModule(TorchModel(module, cuda_graph=recorded), sites_of("convolutional"))
    folded.fold(maps, batches=folding.RECORDED)
    features, logits = folded(batch)
    close(logits, expected_logits("convolutional", maps))
    folded(batch)
    outputs = [tuple(features.shape), tuple(logits.shape)]
    assert given == 2 * [[tuple(batch.shape)] if whole else outputs]
    assert len(asked) == (not recorded and not hooked)
    folded.fold(maps, batches=folding.RECORDED - 1)
    close(folded(batch)[1], logits)
    assert len(given) == 2


def test_if_the_network_cannot_be_recorded_what_follows_it_still_is(monkeypatch):
    """A network that synchronises is tried once."""
    tried = []

    class Runner:
        is_used = True

        def __init__(self, device, multiplies):
            self.multiplies = multiplies

        def run(self, first, work, settings):
            tried.append(self.multiplies)
            if self.multiplies:
                raise RuntimeError("operation not permitted when stream is capturing")
            return list(work(*first())[0]), None

        def release(self):
            pass

    monkeypatch.setattr(folding, "GraphRunner", Runner)
    monkeypatch.setattr(folding, "runs_on_gpu", lambda model: True)
    module, batch = network("convolutional").module, batch_of("convolutional")
    maps = random_maps("convolutional", "diagonal")
    folded = FoldedModule(TorchModel(module, cuda_graph=True), sites_of("convolutional"))
    for _ in range(2):
        folded.fold(maps, batches=folding.RECORDED)
        close(folded(batch)[1], expected_logits("convolutional", maps))
    assert tried == [True, False, False]
