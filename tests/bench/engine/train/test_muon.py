from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster.errors import CasterError
from caster_bench.engine.networks import build
from caster_bench.engine.train.muon import Muon, orthogonal
from caster_bench.engine.train.optimiser import optimisers
from caster_bench.engine.train.recipe import Recipe

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
    """torch's takes a matrix at a time, in bf16: so it differs by a share of the step."""
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


def test_matrices_of_one_shape_learn_apart():
    """Together in a group or each in its own: the same, and none without a gradient moves."""
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
    held = {id(value): group for group in muon.param_groups for value in group["params"]}
    assert held.keys() == {id(layer.weight) for layer in layers}
    for group in muon.param_groups:
        assert len({value.shape for value in group["params"]}) == 1
        assert group["weight_decay"] == recipe.weight_decay
    assert all(held[id(block.attn.qkv.weight)]["parts"] == 3 for block in blocks)
    assert all(held[id(block.mlp.fc1.weight)]["parts"] == 1 for block in blocks)
    rest = {id(value) for group in adamw.param_groups for value in group["params"]}
    assert isinstance(adamw, torch.optim.AdamW)
    assert not rest & held.keys()
    assert rest | held.keys() == {id(value) for value in net.parameters()}
    assert {id(value) for value in net.get_classifier().parameters()} <= rest


def test_a_network_without_such_matrices_is_refused():
    with pytest.raises(CasterError, match="a ResNet has no blocks of matrices for Muon"):
        optimisers(build("mini-resnet", 10), Recipe.of("vit_base"))


def test_it_goes_downhill():
    """Least squares whose columns differ a hundredfold in scale: where it is made for."""
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
