"""Modules compiled by torch.compile: the plain module's answers, and no compilation per batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from caster.adapt.folding import FoldedModule
from caster.models.sites import find_sites
from caster.models.torch import TorchModel

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo does not know")
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 5),
            nn.Dropout(0.5),
            nn.Linear(5, 4),
        ).eval()
        net[0][1].running_mean.normal_()
        net[0][1].running_var.uniform_(0.5, 2)
    return net


def whole(backend):
    return torch.compile(plain(), backend=backend)


def in_place(backend):
    net = plain()
    net.compile(backend=backend)
    return net


def inner(backend):
    net = plain()
    net[0] = torch.compile(net[0], backend=backend)
    return net


def inner_in_place(backend):
    net = plain()
    net[0].compile(backend=backend)
    return net


KINDS = {each.__name__: each for each in (whole, in_place, inner, inner_in_place)}


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that were compiled, by the user's backend and by the default of torch.compile.

    The default is replaced, because inductor takes a C++ compiler and many seconds.
    """
    torch._dynamo.reset()
    found = {"user": [], "default": [], "runs": 0}

    def backend(name):
        def compile_graph(graph, example_inputs):
            def run(*inputs):
                found["runs"] += 1
                return graph.forward(*inputs)

            found[name].append(graph)
            return run

        return compile_graph

    original = torch.compile

    def patched(module, **options):
        return original(module, **({"backend": backend("default")} | options))

    monkeypatch.setattr(torch, "compile", patched)
    found["backend"] = backend("user")
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_plain_module(compiled, kind):
    model = TorchModel(KINDS[kind](compiled["backend"]))
    assert model.compiles
    reference = TorchModel(plain())
    assert not reference.compiles
    for batch in (IMAGES, IMAGES[:1], 2 * IMAGES[:5]):
        found, expected = model(batch), reference(batch)
        torch.testing.assert_close(found.features, expected.features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert model.head.replace("_orig_mod.", "") == reference.head == "5"
    assert model.linear_head()[0].shape == (4, 5)
    model.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_compiled_once_and_not_for_every_batch(compiled, kind):
    model = TorchModel(KINDS[kind](compiled["backend"]))
    for scale in range(5):
        model(scale * IMAGES)
    assert len(compiled["default"]) == 1  # features and logits are outputs of one graph
    assert compiled["runs"] == 5
    assert compiled["user"] == []  # no hook has touched the user's own module
    assert not any(part._forward_pre_hooks for part in model.module.modules())


def test_hooks_that_come_and_go_would_leave_the_graph(compiled):
    """A mutant: the same model without its compiled copy runs eagerly, or compiles again."""
    model = TorchModel(whole(compiled["backend"]))
    model(IMAGES)
    model.compiles, compiled["runs"] = False, 0
    for _ in range(4):
        model(IMAGES)
    assert compiled["runs"] != 4 or len(compiled["user"]) != 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_head(compiled, kind):
    module = KINDS[kind](compiled["backend"])
    name = "_orig_mod.3" if kind == "whole" else "3"
    model = TorchModel(module, head=name)
    found, expected = model(IMAGES), TorchModel(plain(), head="3")(IMAGES)
    torch.testing.assert_close(found.features, expected.features, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_twins_are_not_compiled(compiled):
    """They take hooks: a pass with other ones would compile again."""
    twin = TorchModel(whole(compiled["backend"])).twin()
    assert not twin.compiles
    twin(IMAGES)
    assert compiled["user"] == compiled["default"] == []


def folded_in_turn(compiled, kind, full):
    """Errors of folded maps in a compiled module, and the graphs compiled so far, map by map."""
    model, reference = TorchModel(KINDS[kind](compiled["backend"])), TorchModel(plain())
    (site,) = find_sites(reference, IMAGES)
    folded = [FoldedModule(each, {site: "0.0"}) for each in (model, reference)]
    errors, graphs = [], []
    for step, is_full in enumerate(full):
        A = torch.eye(6) + 0.1 * torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
        for each in folded:
            each.fold({site: (A if is_full else A.diagonal(), torch.full((6,), 0.1 * step))})
        found, expected = (each(IMAGES)[1] for each in folded)
        errors.append(float((found - expected).abs().max()))
        graphs.append(len(compiled["default"]))
    return errors, graphs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full", [(False,) * 3, (True,) * 3, (True, False, True)], ids=str)
def test_folded_maps_follow_without_compiling_again(compiled, kind, full):
    errors, graphs = folded_in_turn(compiled, kind, full)
    assert max(errors) < 1e-5
    assert graphs[-1] == graphs[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_map_follows_a_diagonal_one(compiled, kind):
    errors, _ = folded_in_turn(compiled, kind, (False, True))
    assert max(errors) < 1e-5


def test_a_copy_of_a_compiled_module_is_a_module_of_its_own(compiled):
    model = TorchModel(in_place(compiled["backend"]))
    expected = model(IMAGES).logits
    other = TorchModel(copy.deepcopy(model.module))
    torch.testing.assert_close(other(IMAGES).logits, expected, rtol=1e-5, atol=1e-5)
