"""Optimisers, schedule, averaged weights, mixup and recipes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster.errors import CasterError
from caster_bench.engine.networks import architectures, build
from caster_bench.engine.train.augmentation import Pool
from caster_bench.engine.train.recipe import RECIPES, Recipe
from caster_bench.engine.train.trainer import (
    Muon,
    _numpy_seed,
    learning_rate,
    mixing,
    optimisers,
    orthogonal,
    parameter_groups,
    weight_average,
)
from tests.support.messages import error_line

SHAPES = {"whole": (32, 32), "wide": (32, 128), "tall": (128, 32), "three": (96, 32)}


def parameters(seed: int) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape) / 50) for name, shape in SHAPES.items()}


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_singular_values_go_through_the_polynomial(rows, columns, seed):
    """By the singular value decomposition, in double precision: its vectors stay as they are."""
    torch.manual_seed(seed)
    matrices = torch.randn(2, rows, columns, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    torch.testing.assert_close(orthogonal(matrices), expected)


def test_updates_are_near_to_orthogonal():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(8, 24, 64)))
    assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonal(torch.zeros(1, 3, 2)).any()  # no direction is better than another


def test_steps_are_those_of_torch():
    """torch.optim.Muon computes in bf16, so it differs by a share of the step."""
    ours, theirs = parameters(0), parameters(0)
    thirds = [nn.Parameter(part.clone()) for part in theirs.pop("three").detach().chunk(3)]
    groups = [{"params": [value]} for name, value in ours.items() if name != "three"]
    one = Muon([{"params": [ours["three"]], "parts": 3}, *groups], lr=1e-2, weight_decay=0.1)
    other = torch.optim.Muon(
        [*thirds, *theirs.values()], 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        for value in ours.values():
            value.grad = torch.randn_like(value)
        for name, value in theirs.items():
            value.grad = ours[name].grad.clone()
        for value, gradient in zip(thirds, ours["three"].grad.chunk(3), strict=True):
            value.grad = gradient.clone()
        one.step()
        other.step()
    expected = {**theirs, "three": torch.cat(list(thirds))}
    start = parameters(0)
    for name, value in ours.items():
        moved = (expected[name] - start[name]).norm()
        assert (value - expected[name]).norm() < 0.02 * moved, name


def test_matrices_of_one_shape_are_independent():
    """Equal in one group or in several; without a gradient nothing moves."""
    torch.manual_seed(0)
    start = torch.randn(3, 4, 6)
    gradients = torch.randn(3, 4, 6)
    together, apart = ([nn.Parameter(part.clone()) for part in start] for _ in range(2))
    for values in (together, apart):
        for value, gradient in zip(values[:2], gradients, strict=False):
            value.grad = gradient.clone()
    Muon([{"params": together}], 0.1, 0.01).step()
    Muon([{"params": [value]} for value in apart], 0.1, 0.01).step()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(together[2], start[2])
    assert not torch.equal(together[1], start[1])


def test_a_step_is_as_large_as_one_of_adamw():
    """A learning rate times 0.2, by root mean square, whatever the shape."""
    for name, value in parameters(0).items():
        before = value.detach().clone()
        value.grad = torch.randn_like(value)
        parts = 3 if name == "three" else 1
        Muon([{"params": [value], "parts": parts}], lr=1e-2, weight_decay=0.0).step()
        size = (value - before).square().mean().sqrt()
        assert 0.75 < size / (0.2 * 1e-2) < 1.15, name


@pytest.mark.parametrize("name", ["vit_base", "mini-deit", "mini-swin"])
def test_muon_has_the_matrices_of_blocks_and_adamw_the_rest(name):
    with torch.device("meta"):
        net = build(name, 10)
    recipe = Recipe.of("vit_base")
    muon, adamw = optimisers(net, recipe)
    blocks = [m for m in net.modules() if hasattr(m, "attn") and hasattr(m, "mlp")]
    layers = [part for b in blocks for part in (b.attn.qkv, b.attn.proj, b.mlp.fc1, b.mlp.fc2)]
    groups = {id(value): group for group in muon.param_groups for value in group["params"]}
    assert groups.keys() == {id(layer.weight) for layer in layers}
    for group in muon.param_groups:
        assert len({value.shape for value in group["params"]}) == 1
        assert group["weight_decay"] == recipe.weight_decay
    assert all(groups[id(block.attn.qkv.weight)]["parts"] == 3 for block in blocks)
    assert all(groups[id(block.mlp.fc1.weight)]["parts"] == 1 for block in blocks)
    rest = {id(value) for group in adamw.param_groups for value in group["params"]}
    assert isinstance(adamw, torch.optim.AdamW)
    assert not rest & groups.keys()
    assert rest | groups.keys() == {id(value) for value in net.parameters()}
    assert {id(value) for value in net.get_classifier().parameters()} <= rest


def test_muon_rejects_a_network_without_such_matrices():
    with pytest.raises(CasterError, match="a ResNet has no blocks of matrices for Muon"):
        optimisers(build("mini-resnet", 10), Recipe.of("vit_base"))


def test_muon_minimises():
    """Least squares whose columns differ a hundredfold in scale."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16) * torch.logspace(-1, 1, 16)
    wanted = inputs @ torch.randn(16, 16)
    value = nn.Parameter(torch.zeros(16, 16))
    muon = Muon([{"params": [value]}], lr=0.1, weight_decay=0.0)
    losses = []
    for step in range(300):
        muon.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / 300)) / 2
        loss = (inputs @ value - wanted).square().mean()
        muon.zero_grad()
        loss.backward()
        muon.step()
        losses.append(loss.item())
    assert losses[-1] < 0.001 * losses[0]


# --- mixup ---------------------------------------------------------------------------------


def mixed(recipe: Recipe, seed: int, n: int = 4, n_classes: int = 5):
    """A batch whose image i is filled with i, mixed, and its targets."""
    batch = torch.arange(float(n))[:, None, None, None].repeat(1, 3, 32, 32)
    with _numpy_seed(seed):
        return mixing(recipe, n_classes)(batch, torch.arange(n))


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "neither"])
def test_targets_are_the_shares_of_the_mixed_images(kind):
    """By the pixels: image i is mixed with the one as far from the batch's other end."""
    alphas = {"mixup": 0.0, "cutmix": 0.0} | ({kind: 1.0} if kind != "neither" else {})
    recipe = replace(Recipe.of("deit_base"), mixed=1.0, label_smoothing=0.1, **alphas)
    for seed in range(20):
        images, targets = mixed(recipe, seed)
        share = (images[3].mean() / 3).clamp(0, 1)  # image 3 is mixed with image 0
        expected = torch.full((4, 5), 0.02)
        for i in range(4):
            expected[i, i] += 0.9 * share
            expected[i, 3 - i] += 0.9 * (1 - share)
        torch.testing.assert_close(targets, expected, atol=1e-5, rtol=0)
        if kind == "cutmix":
            assert set(images[3].unique().tolist()) <= {0.0, 3.0}
        if kind == "neither":
            assert share == 1


def test_how_often_batches_are_mixed():
    recipe = Recipe.of("resnet18")  # half of them, by mixup or CutMix
    values = [mixed(recipe, seed)[0][3].unique().tolist() for seed in range(300)]
    assert 0.42 < np.mean([value != [3.0] for value in values]) < 0.58
    assert 0.15 < np.mean([len(value) == 2 for value in values]) < 0.35


def test_mixup_leaves_the_callers_generator_alone():
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    first, _ = mixed(Recipe.of("resnet18"), 7)
    assert np.random.rand() == expected
    assert torch.equal(mixed(Recipe.of("resnet18"), 7)[0], first)


# --- schedule, decay, averages, recipes ------------------------------------------------------


@pytest.mark.parametrize("name", architectures())
def test_only_matrices_and_kernels_decay(name):
    with torch.device("meta"):
        net = build(name, 10)
    decayed, free = parameter_groups(dict(net.named_parameters()), 0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    expected = {id(layer.weight) for layer in layers}
    assert {id(value) for value in decayed["params"]} == expected
    assert len(decayed["params"]) + len(free["params"]) == len(list(net.parameters()))


def test_optimisers():
    net = build("mini-vit", 10)
    (sgd,) = optimisers(net, Recipe.of("resnet18"))
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.9, True)
    (adamw,) = optimisers(net, replace(Recipe.of("resnet18"), optimizer="adamw"))
    assert isinstance(adamw, torch.optim.AdamW)


def test_rates_rise_and_fall():
    recipe = Recipe.of("resnet50")  # 5 of 80 epochs to warm up
    steps = 80 * 10
    rates = [learning_rate(step, steps, recipe) for step in range(steps)]
    assert max(rates) == rates[49] == rates[50] == recipe.lr
    assert rates[0] == recipe.lr / 50
    assert rates[:50] == sorted(rates[:50])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    half = 50 + (steps - 50) // 2
    assert math.isclose(rates[half], recipe.lr / 2)
    assert 0 < rates[-1] < 1e-4 * recipe.lr


def test_a_run_may_be_shorter_than_its_warm_up():
    recipe = Recipe.of("resnet50", epochs=2)  # its own are 5
    rates = [learning_rate(step, 40, recipe) for step in range(40)]
    assert rates[9] == max(rates) == recipe.lr
    assert rates[-1] < 0.01 * recipe.lr


def test_averaged_weights_against_a_loop():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = weight_average(net, decay=0.9)
    expected = {name: value.clone().double() for name, value in net.state_dict().items()}
    for step in range(120):
        with torch.no_grad():
            for value in net.parameters():
                value.normal_()
        net(torch.randn(5, 3))  # moves the running statistics
        average.update(net, step + 2)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value.double()
    averaged = average.module.state_dict()
    for name, value in expected.items():
        if averaged[name].is_floating_point():
            torch.testing.assert_close(averaged[name].double(), value, rtol=1e-5, atol=1e-6)
    assert int(averaged["1.num_batches_tracked"]) == 120
    assert not any(value.requires_grad for value in average.module.parameters())
    assert not average.module.training


def test_recipes():
    assert list(RECIPES) == architectures()
    for name in architectures():
        recipe = Recipe.of(name)
        assert Recipe.from_json(recipe.to_json()) == recipe
        assert recipe.label_smoothing > 0
        assert recipe.mixup > 0
        assert recipe.ema > 0
        assert recipe.operations > 0  # what the documentation promises of every recipe
    assert Recipe.of("deit_base") != Recipe.of("vit_base")
    assert Recipe.of("resnet18", epochs=3).epochs == 3
    assert "not one of this version" in error_line(Recipe.from_json, '{"lr": 1.0}')
    with pytest.raises(CasterError, match="sgd, adamw or muon"):
        Recipe(optimizer="adam", lr=1, weight_decay=0, epochs=1, warmup=0, batch_size=2)
    assert "1 epoch" in error_line(Recipe.of, "resnet18", epochs=0)
    with pytest.raises(CasterError, match=r"a share of patches is from 0 to 1, not 1\.0"):
        replace(Recipe.of("vit_base"), drop_patches=1.0)


def test_a_plain_resnet_has_crops_and_flips_only(digits):
    recipe = Recipe.of("mini-resnet", plain=True)
    usual = Recipe.of("mini-resnet")
    kept = ("optimizer", "lr", "weight_decay", "epochs", "batch_size", "flip", "erase")
    assert {getattr(recipe, name) == getattr(usual, name) for name in kept} == {True}
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.of("resnet18", plain=True).epochs == 30
    with pytest.raises(CasterError, match="only ResNets have a plain recipe, not vit_base"):
        Recipe.of("vit_base", plain=True)
    # Neither mixed nor smoothed:
    for seed in range(20):
        images, targets = mixed(recipe, seed)
        assert torch.equal(images[:, 0, 0, 0], torch.arange(4.0))
        assert torch.equal(targets, torch.eye(4, 5))
    # A batch holds crops of its images, and nothing else:
    pixels, labels = (torch.from_numpy(part[:32]) for part in (digits[0].pixels, digits[0].labels))
    pool = Pool.of(pixels, labels.long(), (0.0,) * 3, (1.0,) * 3)
    (batch, found), *_ = pool.batches(replace(recipe, flip=True), torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(pixels.permute(0, 3, 1, 2), (4, 4, 4, 4))
    crops = padded.unfold(2, 32, 1).unfold(3, 32, 1).permute(0, 2, 3, 1, 4, 5)
    every = {crop.contiguous().numpy().tobytes() for crop in crops.flatten(0, 2)}
    every |= {crop.flip(2).contiguous().numpy().tobytes() for crop in crops.flatten(0, 2)}
    for image in (255 * batch).round().to(torch.uint8):
        assert image.contiguous().numpy().tobytes() in every
    assert sorted(found.tolist()) == sorted(labels.tolist())


def test_without_averaging_the_weights_are_the_last():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = weight_average(net, Recipe.of("resnet18", plain=True).ema)
    for step in range(3):
        with torch.no_grad():
            for value in net.parameters():
                value.normal_(generator=torch.Generator().manual_seed(step))
        net(torch.ones(5, 3) * torch.arange(5.0)[:, None])
        average.update(net, step + 2)
        for name, value in net.state_dict().items():
            assert torch.equal(average.module.state_dict()[name], value), name


def test_the_last_quarter_of_epochs_drops_no_patches():
    for epochs, whole in ((40, 10), (10, 3), (4, 1), (1, 1)):
        recipe = Recipe.of("vit_base", epochs)
        dropped = [recipe.drops(epoch) for epoch in range(1, epochs + 1)]
        assert dropped == [True] * (epochs - whole) + [False] * whole
    assert not Recipe.of("resnet18").drops(1)


# As stored in checkpoints that predate dropped patches.
BEFORE = (
    '{"batch_size": 512, "clip": null, "cutmix": 1.0, "drop_path": 0.0, "ema": 0.999, '
    '"epochs": 80, "erase": 0.0, "flip": true, "label_smoothing": 0.1, "lr": 0.4, '
    '"magnitude": 5.0, "mimetic": false, "mixed": 0.5, "mixup": 0.2, "operations": 1, '
    '"optimizer": "sgd", "warmup": 5, "weight_decay": 0.0005}'
)


def test_an_older_recipe_is_the_same_recipe():
    found = Recipe.from_json(BEFORE)
    assert found == Recipe.of("resnet18")
    assert found.drop_patches == 0
    assert found.to_json() == BEFORE  # so that its checkpoint is still up to date
    values = json.loads(BEFORE)
    for wrong in (
        values | {"unknown": 1},
        {name: value for name, value in values.items() if name != "mimetic"},
        [],
    ):
        with pytest.raises(CasterError, match="not one of this version"):
            Recipe.from_json(json.dumps(wrong))
