from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import caster
from caster.errors import CasterError
from caster_bench import methods
from caster_bench.engine.networks import (
    architectures,
    build,
    drop_patches,
    find,
    mimetic,
    positions,
)
from caster_bench.engine.train.recipe import Recipe
from caster_bench.methods.network import norm_layers
from caster_bench.methods.sar import before_last_blocks
from caster_bench.methods.source import Source
from tests.support.messages import error_line
from tests.support.sampling import sampled

LARGE, MINI = architectures()[:6], architectures()[6:]
VITS = ("vit_base", "deit_base", "mini-vit", "mini-deit")


def count(net: nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


@cache
def on_meta(name: str, size: int = 32, n_classes: int = 10) -> nn.Module:
    """A network without weights, of any size; tests must not change it."""
    with torch.device("meta"):
        return build(name, n_classes, size)


def linear(n_in: int, n_out: int) -> int:
    return n_in * n_out + n_out


def vit_b(n_classes: int) -> int:
    d = 768
    block = linear(d, 3 * d) + linear(d, d) + linear(d, 4 * d) + linear(4 * d, d) + 4 * d
    tokens = (8 * 8 + 1) * d + d
    return linear(4 * 4 * 3, d) + tokens + 12 * block + 2 * d + linear(d, n_classes)


def swin_t(n_classes: int) -> int:
    """The published 28,288,354, with smaller patches, windows and classifier."""
    heads = (2 * 3, 2 * 6, 6 * 12, 2 * 24)  # blocks times heads
    tables = sum(n * (7**2 - 13**2) for n in heads[:3]) + heads[3] * (3**2 - 13**2)
    patches = (2 * 2 - 4 * 4) * 3 * 96
    return 28_288_354 + tables + patches + linear(768, n_classes) - linear(768, 1000)


def convnext_t(n_classes: int) -> int:
    """The published 28,589,128 with smaller patches and classifier."""
    patches = (2 * 2 - 4 * 4) * 3 * 96
    return 28_589_128 + patches + linear(768, n_classes) - linear(768, 1000)


def resnet(published: int, n_features: int, n_classes: int) -> int:
    """A torchvision network, its 7 x 7 stem one of 3 x 3."""
    stem = (3 * 3 - 7 * 7) * 3 * 64
    return published + stem + linear(n_features, n_classes) - linear(n_features, 1000)


@pytest.mark.parametrize("n_classes", [10, 100])
def test_they_have_the_published_number_of_parameters(n_classes):
    expected = {
        "resnet18": resnet(11_689_512, 512, n_classes),
        "resnet50": resnet(25_557_032, 2048, n_classes),
        "convnext_tiny": convnext_t(n_classes),
        "vit_base": vit_b(n_classes),
        "deit_base": vit_b(n_classes),
        "swin_tiny": swin_t(n_classes),
    }
    assert {name: count(on_meta(name, 32, n_classes)) for name in LARGE} == expected


GRIDS = {  # positions a side after the stages, by the modules they come from
    "resnet": {"layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4},
    "convnext": {"stages.0": 16, "stages.1": 8, "stages.2": 4, "stages.3": 2},
    "swin": {"layers.0": 16, "layers.1": 8, "layers.2": 4, "layers.3": 2},
}


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", [name for name in architectures() if name not in VITS])
def test_grids_are_the_same_at_both_sizes(name, size):
    net = on_meta(name, size)
    expected = next(grids for family, grids in GRIDS.items() if family in name)
    sides = {}

    def note(stage):
        def hook(module, inputs, output):
            # Swin's are (B, H, W, C), and after the merging at a stage's beginning.
            sides[stage] = output.shape[1] if "swin" in name else output.shape[2]

        return hook

    hooks = [net.get_submodule(stage).register_forward_hook(note(stage)) for stage in expected]
    assert net(torch.empty(2, 3, size, size, device="meta")).shape == (2, 10)
    assert sides == expected
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(("name", "patches"), [("vit_base", 64), ("mini-vit", 16)])
def test_vits_have_as_many_patches_at_both_sizes(name, patches, size):
    net = on_meta(name, size)
    assert net.pos_embed.shape[1] == patches + 1
    assert net(torch.empty(2, 3, size, size, device="meta")).shape == (2, 10)


def test_swin_has_windows_of_four():
    windows = [block.window_size for layer in on_meta("swin_tiny").layers for block in layer.blocks]
    assert windows == [(4, 4)] * 10 + [(2, 2)] * 2  # the last stage has no more


@pytest.mark.parametrize("name", architectures())
def test_families_are_what_the_layers_say(name):
    kinds = {type(layer) for layer in on_meta(name).modules()}
    batch = any(issubclass(kind, nn.BatchNorm2d) for kind in kinds)
    layer = any(issubclass(kind, nn.LayerNorm) for kind in kinds)
    assert (batch, layer) == (find(name).family == "batch", find(name).family == "layer")


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("resnet18", ("layer4",)),
        ("resnet50", ("layer4",)),
        ("convnext_tiny", ("stages.3", "head.norm")),
        ("vit_base", ("blocks.9", "blocks.10", "blocks.11", "norm")),
        ("swin_tiny", ("layers.3", "norm")),
        ("mini-resnet", ("layer4",)),
        ("mini-convnext", ("stages.3", "head.norm")),
        ("mini-vit", ("blocks.3", "norm")),
        ("mini-swin", ("layers.3", "norm")),
    ],
)
def test_sar_leaves_their_last_stage_alone(name, last):
    net = on_meta(name)
    layers = norm_layers(net, ("batch", "layer"))
    learnt = before_last_blocks(net, layers)
    expected = [
        k for k in layers if not any(k == part or k.startswith(f"{part}.") for part in last)
    ]
    assert list(learnt) == expected
    assert 0 < len(expected) < len(layers)


HEADS = {"resnet18": "fc", "convnext_tiny": "head.fc", "vit_base": "head", "swin_tiny": "head.fc"}


@pytest.mark.parametrize(("name", "head"), sampled(HEADS.items(), 2))
def test_large_ones_are_wrapped(name, head):
    torch.manual_seed(0)
    model = caster.wrap(build(name, 10))
    outputs = model(torch.randn(2, 3, 32, 32))
    weight, bias = model.linear_head()
    assert model.head == head
    torch.testing.assert_close(outputs.features @ weight.T + bias, outputs.logits)


@pytest.mark.parametrize("name", sampled(MINI, 1))
def test_every_method_works_on_them(name):
    torch.manual_seed(0)
    model = caster.wrap(build(name, 4))
    labels = torch.arange(4).repeat(8)
    images = torch.randn(32, 3, 32, 32) + labels[:, None, None, None]
    source = Source.fit(model, [(images, labels)])
    frozen = model(images).logits
    for entry in methods.entries():
        if "transformer" in entry.needs and name not in VITS:
            with pytest.raises(CasterError, match="needs a vision transformer with a class token"):
                methods.create(entry.name, model, source)
            continue
        settings = {"augmentations": 2} if entry.name == "cotta" else {}
        method = methods.create(entry.name, model, source, **settings)
        for _ in range(2):
            assert method.predict(images).logits.shape == (32, 4), entry.name
    torch.testing.assert_close(model(images).logits, frozen, rtol=0, atol=0)
    model.verify()


@pytest.mark.parametrize(
    ("name", "parameters", "features"),
    [("keras_resnet50", 25_557_032, 2048), ("efficientnet_lite0", 4_652_008, 1280)],
)
def test_networks_with_published_weights(name, parameters, features):
    """As torchvision and timm count them; Keras's biases are in the running means."""
    net = on_meta(name, 224, 1000)
    assert count(net) == parameters
    assert net.get_classifier().in_features == features
    assert find(name).family == "batch"
    assert "takes images of 224 pixels per side, not 32" in error_line(build, name, 10)
    assert "not trained here: its checkpoint has published" in error_line(Recipe.of, name)
    assert name not in architectures()


def test_keras_has_its_strides_on_the_first_convolution_of_a_block():
    net = on_meta("keras_resnet50", 224)
    strides = {
        name: (layer.conv1.stride[0], layer.conv2.stride[0])
        for name, layer in net.named_modules()
        if hasattr(layer, "conv3")
    }
    first = {f"layer{stage}.0" for stage in (2, 3, 4)}
    assert strides == {name: (2, 1) if name in first else (1, 1) for name in strides}
    assert len(strides) == 16
    assert {layer.eps for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)} == {1e-3}


def test_deit_is_vit():
    assert find("deit_base").make is find("vit_base").make


def test_unknown_names_and_sizes():
    assert "no architecture 'resnet8': did you mean 'resnet18'" in error_line(build, "resnet8", 10)
    with pytest.raises(CasterError, match="takes images of 32 or 64 pixels per side, not 224"):
        build("vit_base", 10, 224)
    assert "at least 2 classes" in error_line(build, "vit_base", 1)


def test_mimetic_initialisation():
    torch.manual_seed(0)
    net = build("mini-vit", 10)
    mimetic(net)
    eye = torch.eye(48)
    for block in net.blocks:
        query, key, value = block.attn.qkv.weight.detach().chunk(3)
        near_one = query.T @ key
        near_minus = block.attn.proj.weight.detach() @ value
        # Small noise, of standard deviation 0.02, stays.
        assert (near_one - 0.7 * eye).abs().max() < 0.25
        assert (near_minus + 0.4 * eye).abs().max() < 0.25
        assert abs(near_one.diagonal().mean() - 0.7) < 0.05
        assert abs(near_minus.diagonal().mean() + 0.4) < 0.05
    assert torch.equal(net.pos_embed[0, 1:], positions(4, 48))


def test_positions_are_nearer_to_their_neighbours():
    places = positions(8, 64)
    near = places @ places.T
    assert torch.equal(near.argmax(1), torch.arange(64))  # most like themselves
    row = near[0].reshape(8, 8)
    assert row[0, 1] > row[0, 3] > row[0, 6]
    assert torch.allclose(row, row.T, atol=1e-4)  # rows and columns alike


def test_mimetic_rejects_a_network_without_attention():
    with pytest.raises(CasterError, match="has no attention"):
        mimetic(build("mini-resnet", 10))


def test_patches_are_dropped_in_training():
    torch.manual_seed(0)
    net = build("mini-vit", 10)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        whole = net(images)
        drop_patches(net, 0.75)
        assert torch.equal(net(images), whole)  # in eval mode all are there
        tokens = torch.randn(4, 17, 48)
        kept = net.train().patch_drop(tokens)
        assert kept.shape == (4, 1 + 4, 48)
        for before, after in zip(tokens, kept, strict=True):
            places = [(before == token).all(1).nonzero().item() for token in after]
            assert places[0] == 0  # the class token
            assert len(set(places)) == 5
        again = net.patch_drop(tokens)
        assert not torch.equal(again, kept)
        net.patch_drop.eval()
        assert torch.equal(net.patch_drop(tokens), tokens)
    assert build("mini-vit", 10).state_dict().keys() == net.state_dict().keys()


@pytest.mark.parametrize("name", ["mini-resnet", "mini-convnext", "mini-swin"])
def test_drop_patches_rejects_a_network_without_patches(name):
    with pytest.raises(CasterError, match="has no patches that can be left out"):
        drop_patches(build(name, 10), 0.5)
