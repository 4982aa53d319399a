"""Sites of many kinds of network, and the statistics measured there."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from caster import CasterError, wrap
from caster.adapt.layer_passes import selected
from caster.core.channels import Site
from caster.models.activation_statistics import ActivationStatistics
from caster.models.sites import convolutions_before, find_sites
from tests.support import problem

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8}
SWIN |= {"depths": (1, 2), "num_heads": (1, 2)}


def found(net, size=16):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return find_sites(wrap(net.eval()), torch.randn(3, 3, size, size))


def named(net, size=16):
    return {str(site): site.axis for site in found(net, size)}


def test_resnet():
    sites = named(timm.create_model("resnet10t"), 32)
    assert len(sites) == sum(isinstance(m, nn.BatchNorm2d) for m in timm_modules("resnet10t"))
    assert set(sites.values()) == {1}
    assert "layer4.0.downsample.2:in" in sites


def timm_modules(name):
    return timm.create_model(name).modules()


def test_convnext():
    net = timm.models.convnext.ConvNeXt(depths=(1, 2, 1, 1), dims=(8,) * 4, num_classes=4)
    sites = named(net, 64)
    assert list(sites)[:5] == [
        "stages.0.blocks.0:in",
        "stages.0.blocks.0:out",
        "stages.1.blocks.0:in",
        "stages.1.blocks.0:out",
        "stages.1.blocks.1:out",
    ]
    assert sites.pop("head.fc:in") == -1
    assert set(sites.values()) == {1}
    assert len(sites) == 9


@pytest.mark.parametrize("more", [{}, {"class_token": False, "global_pool": "avg"}])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_vision_transformer(more, qk_norm):
    net = timm.models.vision_transformer.VisionTransformer(**VIT, qk_norm=qk_norm, **more)
    expected = ["blocks.0:in", "blocks.0:out", "blocks.1:out", "head:in"]
    assert list(named(net)) == expected
    assert set(named(net).values()) == {-1}


@pytest.mark.parametrize(
    ("more", "added"),
    [
        ({}, 1),
        ({"reg_tokens": 2}, 3),
        ({"class_token": False, "global_pool": "avg"}, 0),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, 2),
        ({"pre_norm": True}, 1),
    ],
)
@pytest.mark.parametrize("images", [torch.zeros(3, 3, 16, 16), torch.ones(1, 3, 16, 16)])
def test_added_tokens_are_not_part_of_a_site(more, added, images):
    """For any images, also constant ones and a single one."""
    net = timm.models.vision_transformer.VisionTransformer(**VIT, **more)
    sites = find_sites(wrap(net.eval()), images)
    assert [site.prefix_tokens for site in sites] == [added] * 3 + [0]


def test_networks_without_added_tokens():
    mixer = timm.models.mlp_mixer.MlpMixer(img_size=16, patch_size=8, embed_dim=16, num_blocks=2)
    assert {site.prefix_tokens for site in found(mixer)} == {0}
    swin = timm.models.swin_transformer.SwinTransformer(**SWIN, num_classes=4)
    assert {site.prefix_tokens for site in found(swin)} == {0}


def test_a_token_added_halfway():
    """It counts from there on only."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.mix(self.norm(x)).mean(dim=1, keepdim=True)

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.early = nn.ModuleList([Block(), Block()])
            self.late = nn.ModuleList([Block(), Block()])
            self.token, self.head = nn.Parameter(torch.ones(1, 1, 8)), nn.Linear(8, 2)

        def forward(self, x):
            for block in self.early:
                x = block(x)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
            for block in self.late:
                x = block(x)
            return self.head(x[:, 0])

    sites = find_sites(wrap(Late()), torch.randn(2, 5, 8))
    added = {str(site): site.prefix_tokens for site in sites}
    assert added == {
        **{"early.0:in": 0, "early.0:out": 0, "early.1:out": 0},
        **{"late.0:in": 1, "late.0:out": 1, "late.1:out": 1, "head:in": 0},
    }


def test_added_tokens_of_a_network_with_integer_input():
    """Whose leading values are often the same in all images."""

    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = timm.models.vision_transformer.VisionTransformer(**VIT)

        def forward(self, pixels):
            return self.net(pixels.float() / 255)

    pixels = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    pixels[:, :, 8:] = torch.arange(3, dtype=torch.uint8)[:, None, None, None]
    sites = find_sites(wrap(Bytes().eval(), head="net.head"), pixels)
    assert [site.prefix_tokens for site in sites] == [1, 1, 1, 0]


def test_added_tokens_of_a_pooling_transformer():
    net = timm.create_model("pit_ti_224", img_size=64).eval()
    sites = find_sites(wrap(net), torch.zeros(2, 3, 64, 64))
    tokens = [site for site in sites if "blocks" in site.module]
    assert len(tokens) > 12
    assert {site.prefix_tokens for site in tokens} == {1}


def test_images_are_not_a_site_in_any_memory_format():
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )
    batch = torch.rand(2, 3, 16, 16)
    plain, last = (find_sites(wrap(net, channels_last=how), batch) for how in (False, True))
    assert [str(site) for site in plain] == [str(site) for site in last] == ["2:in", "6:in"]


def test_finding_sites_leaves_the_random_state_alone():
    net = timm.models.vision_transformer.VisionTransformer(**VIT)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    find_sites(wrap(net.eval()), torch.zeros(2, 3, 16, 16))
    assert torch.equal(torch.rand(4), expected)


def test_swin_is_channels_last():
    net = timm.models.swin_transformer.SwinTransformer(**SWIN, num_classes=4)
    sites = named(net)
    assert "layers.0.blocks.0:in" in sites
    assert "layers.1.blocks.0:in" in sites  # after patch merging
    assert "layers.1.blocks.1:out" in sites
    assert set(sites.values()) == {-1}


def test_vision_transformer_of_transformers():
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16)
    config.patch_size, config.intermediate_size = 8, 32
    net = ViTForImageClassification(config)
    names = list(named(net))
    assert len(names) == 4
    assert [name.rpartition(":")[2] for name in names] == ["in", "out", "out", "in"]
    assert names[-1] == "classifier:in"


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_plain_network_has_sites_at_its_norms(kind):
    sites = find_sites(problem.model(kind), problem.stream(1)[0])
    assert [(str(site), site.axis) for site in sites] == [
        ("1:in", 1),
        ("4:in", 1),
        ("8:in", 1),
        ("12:in", -1),
    ]


class Last(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)


class First(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Square(nn.Module):
    """Values with equally long axes."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(x * 1).mean(dim=(1, 2)))


@pytest.mark.parametrize(("norm", "axis"), [(Last, -1), (First, 1), (nn.RMSNorm, -1)])
def test_the_axis_follows_from_the_behaviour_of_a_norm(norm, axis):
    x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert find_sites(wrap(Square(norm)), x)[0] == Site("norm", "in", axis)


class Neither(nn.LayerNorm):
    def forward(self, x):
        return x / x.norm()


def test_an_ambiguous_axis_is_rejected():
    with pytest.raises(CasterError, match="channel axis of"):
        find_sites(wrap(Square(Neither)), torch.zeros(2, 4, 4, 4))


def test_as_many_tokens_as_channels():
    net = timm.models.vision_transformer.VisionTransformer(
        **{**VIT, "patch_size": 4}, class_token=False, global_pool="avg"
    )
    assert set(named(net).values()) == {-1}


def test_values_of_two_axes():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    net = nn.Sequential(nn.Flatten(), Residual(), Residual(), nn.Linear(8, 2))
    sites = find_sites(wrap(net), torch.randn(2, 8, 1))
    assert [str(site) for site in sites] == ["1:in", "1:out", "2:out", "3:in"]
    assert {site.axis for site in sites} == {-1}


def test_blocks_without_a_norm():
    net = timm.models.mlp_mixer.MlpMixer(
        img_size=16, patch_size=4, num_blocks=2, embed_dim=8, mlp_ratio=4.0, num_classes=3,
        block_layer=timm.models.mlp_mixer.ResBlock, norm_layer=timm.models.mlp_mixer.Affine,
    )  # fmt: skip
    sites = named(net)
    assert list(sites) == ["blocks.0:in", "blocks.0:out", "blocks.1:out", "head:in"]
    assert set(sites.values()) == {-1}


def test_a_network_without_norms_or_blocks_has_sites_at_its_weights():
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)]
    assert named(nn.Sequential(*layers, *head)) == {"2:in": 1, "6:in": -1, "8:in": -1}


def test_a_warning_if_the_classifier_is_the_only_site(caplog):
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with caplog.at_level("WARNING", "caster"):
        moments = problem.site_moments(wrap(net), [torch.randn(4, 3, 2, 2)])
    assert [str(site) for site in moments] == ["1:in"]
    assert "its only site is the classifier's input" in caplog.text


def test_a_batchnorm_called_twice_is_not_a_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.own, self.head = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.own(self.bn(self.bn(x) + 1)))

    assert [str(site) for site in find_sites(wrap(Net()), torch.randn(2, 4))] == ["own:in"]


def test_patterns_select():
    sites = found(timm.models.vision_transformer.VisionTransformer(**VIT))
    assert [str(s) for s in selected(sites, ["*:in"], "x")] == ["blocks.0:in", "head:in"]
    with pytest.raises(CasterError, match=r"no site 'stage\*': there are blocks.0:in"):
        selected(sites, ["stage*"], "x")
    with pytest.raises(CasterError, match="a list of patterns"):
        selected(sites, "blocks*", "x")


def test_moments_equal_those_of_the_activations():
    model = problem.model("vit")
    images, _ = problem.make_images(70, seed=5)
    moments = problem.site_moments(model, [images[:50], images[50:]])
    seen = {}

    def note(name):
        return lambda layer, inputs, output: seen.__setitem__(name, output)

    net = model.module
    handles = [net.blocks[i].register_forward_hook(note(f"blocks.{i}:out")) for i in range(4)]
    with torch.no_grad():
        net(torch.from_numpy(images))
    for handle in handles:
        handle.remove()
    by_name = {str(site): found for site, found in moments.items()}
    assert set(seen) < set(by_name)
    for name, values in seen.items():
        rows = (
            values[:, 1:].double().reshape(-1, values.shape[-1]).numpy()
        )  # without the class token
        assert by_name[name].count == 70
        np.testing.assert_allclose(by_name[name].mean, rows.mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(by_name[name].variance, rows.var(axis=0), rtol=1e-4)


class Convolutions(nn.Module):
    """BatchNorms behind convolutions of several kinds, and behind none."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.wise, self.norm2 = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)
        self.norm3 = nn.BatchNorm2d(4)  # behind another one
        self.read, self.norm4 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.reader = nn.Conv2d(4, 4, 1)  # of what the convolution before gives
        self.twice, self.norm5 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)  # a pass calls it twice
        self.stage, self.head = (
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        x = self.norm3(self.norm2(self.wise(self.norm1(self.first(x)))))
        x = self.read(x)
        x = self.norm4(x) + self.reader(x)
        x = self.norm5(self.twice(self.twice(x)))
        return self.head(self.stage(x).mean((2, 3)))


def convolutions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Convolutions().eval()


def test_convolutions_before_batchnorms():
    found = convolutions_before(wrap(convolutions()).twin(), torch.zeros(2, 3, 12, 12))
    by_name = {str(site): name for site, name in found.items()}
    assert by_name == {"norm1:in": "first", "norm2:in": "wise", "stage.1:in": "stage.0"}


def test_no_covariance_behind_a_grouped_convolution():
    """A full map between its channels could not be folded into its weight."""
    statistics = ActivationStatistics(wrap(convolutions()))
    statistics(torch.randn(4, 3, 12, 12), np.zeros(4, np.int64))
    known = {str(site): m.covariance is not None for site, m in statistics.moments().items()}
    assert {name for name, has in known.items() if not has} == {"norm2:in"}
    assert len(known) == 6


def test_measuring_leaves_no_hooks_on_the_module():
    model = problem.model("layer")
    before = {name: len(m._forward_hooks) for name, m in model.module.named_modules()}
    problem.site_moments(model, problem.stream(2))
    assert before == {name: len(m._forward_hooks) for name, m in model.module.named_modules()}
    assert not any(m._forward_pre_hooks for m in model.module.modules())
    model.verify()


def test_a_failed_pass_is_not_measured():
    model = problem.model("vit")
    one, other = problem.stream(2)
    statistics, classes = ActivationStatistics(model), np.zeros(32, dtype=np.int64)
    statistics(one, classes)
    last = statistics._twin.module.blocks[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last, "forward", lambda x: x @ torch.zeros(3, 3))
        with pytest.raises(CasterError, match="cannot take a batch"):
            statistics(other, classes)
    statistics(other, classes)
    expected = problem.site_moments(model, [one, other])
    for site, found in statistics.moments().items():
        assert found.count == found.classes.counts == 64
        np.testing.assert_array_equal(found.mean, expected[site].mean)


def test_values_that_are_not_finite_are_rejected():
    model = problem.model("layer")
    bad = problem.stream(1)[0].copy()
    bad[0] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        problem.site_moments(model, [bad])


def test_a_twin_shares_every_weight_and_no_module():
    model = problem.model("batch")
    twin = model.twin()
    for one, other in zip(model.module.modules(), twin.module.modules(), strict=True):
        assert one is not other
    pairs = zip(model.values(), twin.values(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    (batch,) = problem.stream(1)
    assert torch.equal(model(batch).logits, twin(batch).logits)
