from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from caster.errors import CasterError
from caster_bench.engine.networks import architectures, build
from caster_bench.engine.train.average import Average
from caster_bench.engine.train.optimiser import optimisers, parameter_groups, rate
from caster_bench.engine.train.recipe import RECIPES, Recipe


@pytest.mark.parametrize("name", architectures())
def test_matrices_and_kernels_decay_and_nothing_else(name):
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
    rates = [rate(step, steps, recipe) for step in range(steps)]
    assert max(rates) == rates[49] == rates[50] == recipe.lr
    assert rates[0] == recipe.lr / 50
    assert rates[:50] == sorted(rates[:50])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    half = 50 + (steps - 50) // 2
    assert math.isclose(rates[half], recipe.lr / 2)
    assert 0 < rates[-1] < 1e-4 * recipe.lr


def test_a_run_may_be_shorter_than_its_warm_up():
    recipe = Recipe.of("resnet50", epochs=2)  # its own are 5
    rates = [rate(step, 40, recipe) for step in range(40)]
    assert rates[9] == max(rates) == recipe.lr
    assert rates[-1] < 0.01 * recipe.lr


def test_average_against_a_loop():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = Average(net, decay=0.9)
    expected = {name: value.clone().double() for name, value in net.state_dict().items()}
    for step in range(120):
        with torch.no_grad():
            for value in net.parameters():
                value.normal_()
        net(torch.randn(5, 3))  # moves the running statistics
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value.double()
    held = average.net.state_dict()
    for name, value in expected.items():
        if held[name].is_floating_point():
            torch.testing.assert_close(held[name].double(), value, rtol=1e-5, atol=1e-6)
    assert int(held["1.num_batches_tracked"]) == 120
    assert not any(value.requires_grad for value in average.net.parameters())
    assert not average.net.training


def test_recipes():
    assert list(RECIPES) == architectures()
    for name in architectures():
        recipe = Recipe.of(name)
        assert Recipe.from_json(recipe.to_json()) == recipe
        assert recipe.label_smoothing > 0
        assert recipe.mixup > 0
        assert recipe.ema > 0
        assert recipe.operations > 0  # all that the benchmark promises of a recipe
    assert Recipe.of("deit_base") != Recipe.of("vit_base")
    assert Recipe.of("resnet18", epochs=3).epochs == 3
    with pytest.raises(CasterError, match="not one of this version"):
        Recipe.from_json('{"lr": 1.0}')
    with pytest.raises(CasterError, match="sgd, adamw or muon"):
        Recipe(optimizer="adam", lr=1, weight_decay=0, epochs=1, warmup=0, batch_size=2)
    with pytest.raises(CasterError, match="1 epoch"):
        Recipe.of("resnet18", epochs=0)
    with pytest.raises(CasterError, match=r"a share of patches is from 0 to 1, not 1\.0"):
        replace(Recipe.of("vit_base"), drop_patches=1.0)


def test_the_last_quarter_of_epochs_leaves_no_patch_out():
    for epochs, whole in ((40, 10), (10, 3), (4, 1), (1, 1)):
        recipe = Recipe.of("vit_base", epochs)
        dropped = [recipe.drops(epoch) for epoch in range(1, epochs + 1)]
        assert dropped == [True] * (epochs - whole) + [False] * whole
    assert not Recipe.of("resnet18").drops(1)


# As checkpoints hold it that were trained before patches could be left out.
BEFORE = (
    '{"batch_size": 512, "clip": null, "cutmix": 1.0, "drop_path": 0.0, "ema": 0.999, '
    '"epochs": 80, "erase": 0.0, "flip": true, "label_smoothing": 0.1, "lr": 0.4, '
    '"magnitude": 5.0, "mimetic": false, "mixed": 0.5, "mixup": 0.2, "operations": 1, '
    '"optimizer": "sgd", "warmup": 5, "weight_decay": 0.0005}'
)


def test_a_recipe_from_before_is_the_same_recipe():
    found = Recipe.from_json(BEFORE)
    assert found == Recipe.of("resnet18")
    assert found.drop_patches == 0
    assert found.to_json() == BEFORE  # so that a checkpoint of it is still the one to be made
    values = json.loads(BEFORE)
    for wrong in (
        values | {"unknown": 1},
        {name: value for name, value in values.items() if name != "mimetic"},
        [],
    ):
        with pytest.raises(CasterError, match="not one of this version"):
            Recipe.from_json(json.dumps(wrong))
