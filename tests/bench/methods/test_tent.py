"""Tent and BN-adapt against NumPy."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods.gradient_method import cross_entropy, entropy
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.gradients import softmax
from tests.support.problem import accuracy, model, source, stream

LOGITS = hnp.arrays(np.float64, (3, 5), elements=st.floats(-30, 30))


@given(LOGITS)
def test_entropy_and_its_gradient(x):
    p = softmax(x)
    expected = -(p * np.log(p)).sum(axis=1)
    logits = torch.tensor(x, requires_grad=True)
    found = entropy(logits)
    np.testing.assert_allclose(found.detach(), expected, atol=1e-12)
    found.sum().backward()
    np.testing.assert_allclose(logits.grad, -p * (np.log(p) + expected[:, None]), atol=1e-12)


@given(LOGITS, LOGITS)
def test_cross_entropy(x, y):
    expected = -(softmax(y) * np.log(softmax(x))).sum(axis=1)
    np.testing.assert_allclose(cross_entropy(*map(torch.tensor, (x, y))), expected, atol=1e-10)


class Small:
    """Linear, BatchNorm, Linear in torch and in NumPy."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        bn = self.net[1]
        with torch.no_grad():
            for values in (bn.weight, bn.bias, bn.running_mean):
                values.add_(torch.randn(4, dtype=torch.float64))
            bn.running_var.add_(torch.rand(4, dtype=torch.float64))
        self.batch = 2 * np.random.default_rng(seed).normal(size=(16, 3)) + 1

    def logits(self, gamma, beta, prior=0.0):
        first, bn, last = (self.net[i] for i in range(3))
        h = self.batch @ first.weight.detach().numpy().T + first.bias.detach().numpy()
        share = prior / (prior + len(h))
        mean = share * bn.running_mean.numpy() + (1 - share) * h.mean(axis=0)
        var = share * bn.running_var.numpy() + (1 - share) * h.var(axis=0)
        h = (h - mean) / np.sqrt(var + bn.eps) * gamma + beta
        return h @ last.weight.detach().numpy().T + last.bias.detach().numpy()

    def gradient(self, gamma, beta, step=1e-6):
        """Central differences of the mean entropy in all eight parameters."""

        def loss(parameters):
            p = softmax(self.logits(*np.split(parameters, 2)))
            return -(p * np.log(p)).sum(axis=1).mean()

        at = np.concatenate([gamma, beta])
        moves = step * np.eye(8)
        return np.array([(loss(at + move) - loss(at - move)) / (2 * step) for move in moves])


@pytest.mark.parametrize("seed", range(3))
def test_two_steps_of_tent_match_numpy(seed):
    small, lr = Small(seed), 0.1
    tent = create("tent", wrap(small.net), optimizer="sgd", lr=lr)
    bn = small.net[1]
    at = np.concatenate([bn.weight.detach().numpy(), bn.bias.detach().numpy()])
    velocity = np.zeros(8)
    for _ in range(2):
        answer = tent.predict(small.batch).logits
        np.testing.assert_allclose(answer, small.logits(*np.split(at, 2)), rtol=1e-5)  # before
        velocity = 0.9 * velocity + small.gradient(*np.split(at, 2))
        at = at - lr * velocity
        learnt = torch.cat(list(tent.parameters.values())).detach().numpy()
        np.testing.assert_allclose(learnt, at, rtol=1e-6, atol=1e-8)


def test_first_adam_step_has_the_length_of_its_rate():
    small = Small()
    tent = create("tent", wrap(small.net), lr=1e-3)
    before = torch.cat(list(tent.parameters.values())).detach().numpy().copy()
    tent.predict(small.batch)
    moved = torch.cat(list(tent.parameters.values())).detach().numpy() - before
    slope = small.gradient(*np.split(before, 2))
    np.testing.assert_allclose(moved, -1e-3 * np.sign(slope), rtol=1e-3)


@pytest.mark.parametrize("prior", [0.0, 4.0, 16.0, 1e9])
def test_bn_adapt_shrinks_towards_the_source(prior):
    small = Small()
    bn = small.net[1]
    given = create("bn-adapt", wrap(small.net), prior=prior).predict(small.batch)
    gamma, beta = bn.weight.detach().numpy(), bn.bias.detach().numpy()
    np.testing.assert_allclose(given.logits, small.logits(gamma, beta, prior), rtol=1e-5)
    if prior == 1e9:
        np.testing.assert_allclose(given.logits, wrap(small.net)(small.batch).logits, atol=1e-6)


def test_bn_adapt_without_a_prior_is_tent_without_its_update():
    tent = create("tent", model(), lr=0.0)
    bn_adapt = create("bn-adapt", model())
    for batch in (*stream(3), *stream(1, size=1)):
        assert torch.equal(tent.predict(batch).logits, bn_adapt.predict(batch).logits)


def test_single_value_per_channel_uses_source_statistics():
    small = Small()
    frozen = wrap(small.net)
    (row,) = small.batch[:1, None]
    assert torch.equal(create("bn-adapt", frozen).predict(row).logits, frozen(row).logits)
    tent = create("tent", frozen)
    tent.predict(small.batch)
    tent.predict(row)  # learning continues with batch statistics
    gamma, beta = (value.detach().numpy().copy() for value in tent.parameters.values())
    answer = tent.predict(small.batch).logits
    np.testing.assert_allclose(answer, small.logits(gamma, beta), rtol=1e-4)


def test_names_of_learnt_norms():
    kinds = {
        "batch": ["1.weight", "1.bias", "4.weight", "4.bias", "8.weight", "8.bias"],
        "layer": [],
        "group": [],
    }
    for kind, names in kinds.items():
        assert list(create("tent", model(kind), source(kind)).parameters) == names
    for kind in ("layer", "group"):
        assert len(create("tent", model(kind), norms=(kind,)).parameters) == 6
    assert "blocks.0.norm1.weight" in create("tent", model("vit"), norms=("layer",)).parameters
    for norms in ("batch", (), ("instance",)):
        with pytest.raises(CasterError, match="norms of tent must be some of batch, layer, group"):
            create("tent", model(), norms=norms)


@pytest.mark.parametrize("name", ["tent", "bn-adapt", "eata"])
def test_inert_without_anything_to_adapt(name, caplog):
    with caplog.at_level(logging.WARNING, "caster"):
        method = create(name, model("layer"), source("layer"))
    assert f"{name} is inert: Sequential has no BatchNorm" in caplog.text
    for batch in stream(3):
        given = method.predict(batch)
        assert (given.accepted, given.reason) == (False, "inert")
        assert torch.equal(given.logits, model("layer")(batch).logits)


@pytest.mark.parametrize("name", ["tent", "eata"])
def test_an_inert_learner_computes_the_frozen_logits_and_retains_nothing(name):
    [batch] = stream(1)
    method = create(name, model("layer"), source("layer"))
    assert torch.equal(method.forward(batch), model("layer")(batch).logits)
    assert method.retained().total == 0


def test_tent_learns_layer_norm_on_request():
    method = create("tent", model("layer"), norms=("layer",), lr=1e-2)
    batches = stream(4)
    first = [entropy(method.forward(batch)).mean().item() for batch in batches]
    for batch in batches * 5:
        method.predict(batch)
    last = [entropy(method.forward(batch)).mean().item() for batch in batches]
    assert np.mean(last) < 0.9 * np.mean(first)


def test_batch_statistics_gain_and_tent_gains_a_little_more():
    results = {
        name: accuracy(create(name, model(), source()), shift=1.0, n=2560)
        for name in ("frozen", "bn-adapt", "tent")
    }
    assert results["frozen"] + 0.03 < results["bn-adapt"] < results["tent"]


@pytest.mark.parametrize("settings", [{"lr": -1}, {"lr": float("nan")}, {"optimizer": "lbfgs"}])
def test_invalid_settings_are_reported(settings):
    (name,) = settings
    with pytest.raises(CasterError, match=f"{name} of tent must be"):
        create("tent", model(), **settings)


@pytest.mark.parametrize("prior", [-1.0, float("nan")])
def test_invalid_prior_is_reported(prior):
    with pytest.raises(CasterError, match="prior of bn-adapt must be"):
        create("bn-adapt", model(), prior=prior)


def test_only_torch_modules_are_accepted():
    function = wrap(lambda batch: (batch, batch), version="function-1")
    for name in ("tent", "bn-adapt"):
        with pytest.raises(CasterError, match=f"{name} needs a torch module"):
            create(name, function, Source())


@pytest.mark.parametrize("name", ["tent", "eta", "sar", "cotta"])
@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_nothing_is_learnt_from_a_rejected_batch_with_nan(name, kind):
    settings = {"augmentations": 2} if name == "cotta" else {"norms": (kind,)}
    method = create(name, model(kind), source(kind), **settings)
    good, bad = stream(2)
    expected = method.forward(good)
    bad[3, 0, 0, 0] = np.nan
    with pytest.raises(CasterError, match=f"{name} got logits that are not finite"):
        method.predict(bad)
    assert torch.equal(method.forward(good), expected)
    assert torch.isfinite(method.predict(good).logits).all()


class Called(nn.Module):
    """A network that calls its BatchNorm by keyword, optionally without gradients."""

    def __init__(self, gradients=True):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.gradients = gradients

    def forward(self, x):
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            x = self.norm(input=x)
        return self.head(x)


@pytest.mark.parametrize("settings", [{}, {"prior": 4.0}])
def test_layers_may_be_called_by_keyword(settings):
    net = Called().eval()
    batch = 3 * np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) + 1
    given = create("bn-adapt", wrap(net), **settings).predict(batch).logits
    share = settings.get("prior", 0.0) / (settings.get("prior", 0.0) + 8)
    mean, var = (1 - share) * batch.mean(0), share + (1 - share) * batch.var(0)
    h = (batch - mean) / np.sqrt(var + net.norm.eps)
    expected = h @ net.head.weight.detach().numpy().T + net.head.bias.detach().numpy()
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)
    create("tent", wrap(net)).predict(batch)


def test_models_that_cannot_learn_are_reported():
    batch = np.ones((4, 3), np.float32) * np.arange(4, dtype=np.float32)[:, None]
    with pytest.raises(CasterError, match="no gradient reaches"):
        create("tent", wrap(Called(gradients=False).eval())).predict(batch)
    for half in (torch.float16, torch.bfloat16):
        with pytest.raises(CasterError, match=r"tent cannot learn norm\.weight in torch"):
            create("tent", wrap(Called().eval().to(half)))
    with pytest.raises(CasterError, match="Called cannot take a batch of float32"):
        create("tent", wrap(Called().eval())).predict(batch[:, :2])


def test_a_shared_parameter_is_learnt_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[2].weight = net[1].weight
    assert list(create("tent", wrap(net)).parameters) == ["1.weight", "1.bias", "2.bias"]


def test_changed_model_is_not_copied_again():
    frozen = wrap(Called().eval())
    tent = create("tent", frozen)
    with torch.no_grad():
        frozen.module.head.weight.add_(1.0)
    with pytest.raises(CasterError, match="was changed while it was in use"):
        tent.reset()


def test_bn_adapt_rejects_a_batch_with_nan():
    good, bad = stream(2)
    method = create("bn-adapt", model())
    bad[0] = np.nan
    with pytest.raises(CasterError, match="bn-adapt got logits that are not finite"):
        method.predict(bad)
    assert torch.isfinite(method.predict(good).logits).all()
