"""SAR against NumPy and central differences, and its choice of layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods.network import norm_layers
from caster_bench.methods.registry import create
from caster_bench.methods.sar import before_last_blocks
from tests.support.gradients import learnt, slope, softmax
from tests.support.problem import model, stream

EVERY = ("batch", "layer", "group")


class OneChannel:
    """BatchNorm of one channel and a linear head: two parameters, in torch and in NumPy."""

    def __init__(self):
        self.net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 3)).double()
        self.weight, self.bias = np.array([2.0, -1.0, -2.0]), np.array([0.3, 0.5, -0.2])
        self.start = np.array([1.2, 0.4])
        with torch.no_grad():
            for part, value in zip(self.net[0].parameters(), self.start, strict=True):
                part.fill_(value)
            self.net[1].weight.copy_(torch.tensor(self.weight[:, None]))
            self.net[1].bias.copy_(torch.tensor(self.bias))

    def entropies(self, batch, at):
        h = (batch - batch.mean()) / np.sqrt(batch.var() + self.net[0].eps) * at[0] + at[1]
        p = softmax(h * self.weight + self.bias)
        return -(p * np.log(p)).sum(axis=1)


def batches(n, size=24):
    return list(np.random.default_rng(0).gamma(2.0, size=(n, size, 1)))


def test_steps_match_numpy():
    small, lr, rho, margin = OneChannel(), 0.05, 0.3, 0.7 * math.log(3)
    settings = {"lr": lr, "rho": rho, "margin_e0": 0.7, "recovery": 0.0}
    method = create("sar", wrap(small.net), **settings)
    at, velocity, lost, late = small.start, np.zeros(2), 0, 0
    for batch in batches(4):
        method.predict(batch)
        first = small.entropies(batch, at) < margin
        up = slope(lambda to, b=batch, k=first: small.entropies(b, to)[k].mean(), at)
        worst = at + rho * up / np.linalg.norm(up)
        second = small.entropies(batch, worst) < margin
        both = first & second
        lost += (first & ~second).sum()
        late += (second & ~first).sum()
        down = slope(lambda to, b=batch, k=both: small.entropies(b, to)[k].mean(), worst)
        velocity = 0.9 * velocity + down
        at = at - lr * velocity
        np.testing.assert_allclose(learnt(method), at, rtol=2e-6)
    assert lost > 0  # each filter excluded samples that the other kept
    assert late > 0


def test_answer_is_from_before_the_step():
    method, tent = create("sar", model(), lr=0.1), create("tent", model(), lr=0.0)
    (batch,) = stream(1)
    expected = method.forward(batch)
    assert torch.equal(method.predict(batch).logits, expected)
    assert torch.equal(tent.predict(batch).logits, expected)
    assert not torch.equal(method.forward(batch), expected)


def test_recovery_is_exact_and_triggered_by_the_mean_loss():
    hard, easy = stream(4, shift=1.0), stream(8, shift=0.0)
    watched = create("sar", model(), recovery=0.0)
    losses, watch = [], watched._recover
    watched._recover = lambda loss, least: (losses.append(loss), watch(loss, least))
    for batch in (*hard, *easy):
        watched.predict(batch)
    means = losses[:1]
    for loss in losses[1:]:
        means.append(0.9 * means[-1] + 0.1 * loss)
    due = 9
    threshold = (means[due - 1] + means[due]) / 2
    assert len(means) == 12
    assert min(means[:due]) > threshold > means[due]

    recovery = threshold * math.log(1000) / math.log(4)  # defined for 1,000 classes
    method = create("sar", model(), recovery=recovery)
    start = learnt(method)
    for number, batch in enumerate((*hard, *easy[:6])):
        assert np.array_equal(learnt(method), start) == (number == 0)
        method.predict(batch)
    assert np.array_equal(learnt(method), start)
    assert not method._optimizer.state
    fresh = create("sar", model(), recovery=recovery)
    assert method.retained() == fresh.retained()
    for batch in hard:
        assert torch.equal(method.predict(batch).logits, fresh.predict(batch).logits)
        assert np.array_equal(learnt(method), learnt(fresh))
    assert not np.array_equal(learnt(method), start)


@given(st.lists(st.floats(0.0, 1.0), max_size=12), st.floats(0.1, 0.9))
def test_when_it_recovers(losses, least):
    method, mean = create("sar", wrap(OneChannel().net)), None
    start = learnt(method)
    for loss in losses:
        with torch.no_grad():
            for parameter in method.parameters.values():
                parameter.add_(1.0)
        before = learnt(method)
        method._recover(loss, least)
        mean = loss if mean is None else 0.9 * mean + (1 - 0.9) * loss
        assert np.array_equal(learnt(method), start if mean < least else before)
        mean = None if mean < least else mean


def test_no_reliable_sample_at_the_worst_point_changes_nothing():
    small, batch = OneChannel(), batches(1)[0]
    kept = create("sar", wrap(small.net), rho=0.01, margin_e0=0.5)
    kept.predict(batch)
    assert kept._optimizer.state
    method = create("sar", wrap(small.net), rho=1.3, margin_e0=0.5)
    start = learnt(method)
    up = slope(lambda to: _reliable(small, batch, to).mean(), start)
    worst = start + 1.3 * up / np.linalg.norm(up)
    assert (small.entropies(batch, worst) > 0.5 * math.log(3)).all()
    method.predict(batch)
    assert np.array_equal(learnt(method), start)
    assert not method._optimizer.state
    assert all(parameter.grad is None for parameter in method.parameters.values())


def _reliable(small, batch, at):
    return small.entropies(batch, at)[small.entropies(batch, small.start) < 0.5 * math.log(3)]


def test_error_at_the_worst_point_restores_the_weights():
    method = create("sar", model())
    start, calls = learnt(method), []  # weights of each forward pass

    def fail(module, inputs):
        calls.append(learnt(method))
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    handle = method.network.module.register_forward_pre_hook(fail)
    with pytest.raises(CasterError, match="out of memory"):
        method.predict(stream(1)[0])
    handle.remove()
    assert np.linalg.norm(calls[1] - start) == pytest.approx(0.05, rel=1e-4)
    assert np.array_equal(learnt(method), start)


def left_out(module):
    layers = norm_layers(module, EVERY)
    chosen = before_last_blocks(module, layers)
    assert list(layers)[: len(chosen)] == list(chosen)  # the first, in order
    return [name for name in layers if name not in chosen]


def block(name, *norms):
    return [f"{name}.{norm}" for norm in norms]


LEFT_OUT = {
    "resnet50": [
        *block("layer4.0", "bn1", "bn2", "bn3", "downsample.1"),
        *block("layer4.1", "bn1", "bn2", "bn3"),
        *block("layer4.2", "bn1", "bn2", "bn3"),
    ],
    "vit_base_patch16_224": [
        *(f"blocks.{i}.norm{j}" for i in (9, 10, 11) for j in (1, 2)),
        "norm",
    ],
    "convnext_tiny": [
        "stages.3.downsample.0",
        *(f"stages.3.blocks.{i}.norm" for i in range(3)),
        "head.norm",
    ],
    "swin_tiny_patch4_window7_224": [
        "layers.3.downsample.norm",
        *(f"layers.3.blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)),
        "norm",
    ],
    "efficientnet_lite0": [
        *(f"blocks.5.{i}.bn{j}" for i in range(4) for j in (1, 2, 3)),
        *block("blocks.6.0", "bn1", "bn2", "bn3"),
        "bn2",
    ],
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_last_blocks_of_known_networks(name):
    with torch.device("meta"):
        net = timm.create_model(name, pretrained=False)
    assert left_out(net) == LEFT_OUT[name]
    wrapped = nn.Sequential(nn.Identity(), net)  # for example with its preprocessing
    assert left_out(wrapped) == [f"1.{layer}" for layer in LEFT_OUT[name]]


@given(st.integers(1, 40))
def test_last_quarter_of_a_plain_sequence(n):
    net = nn.Sequential(*(layer for _ in range(n) for layer in (nn.ReLU(), nn.LayerNorm(1))))
    assert len(left_out(net)) == (math.ceil(n / 4) if n > 1 else 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 2))
def test_whole_blocks_and_never_all(norms_in, after):
    def sequence(n):
        return nn.Sequential(nn.ReLU(), *(nn.LayerNorm(1) for _ in range(n)))

    net = nn.ModuleDict({f"stage{i}": sequence(n) for i, n in enumerate(norms_in)})
    net["after"] = sequence(after)
    layers, left = norm_layers(net, EVERY), left_out(net)
    assert len(left) < len(layers) or not layers
    stages = [f"stage{i}" for i, n in enumerate(norms_in) if n]
    if len(stages) > 1 and sum(norms_in) > after:
        last = {*stages[-math.ceil(len(stages) / 4) :], "after"}
        assert left == [name for name in layers if name.split(".")[0] in last]


def test_siblings_with_few_norms_are_not_blocks():
    branch = nn.ModuleDict({f"branch{i}": nn.Sequential(nn.BatchNorm2d(1)) for i in (1, 2)})
    rest = {name: nn.BatchNorm2d(1) for name in "abcdef"}
    assert left_out(nn.ModuleDict({"mixed": branch, **rest})) == ["e", "f"]


def test_layers_to_skip_can_be_named():
    def weights(kind, skip):
        names = list(create("sar", model(kind), skip=skip).parameters)
        assert len(names) == 2 * len({name.rpartition(".")[0] for name in names})
        return [name for name in names if name.endswith("weight")]

    assert weights("batch", None) == ["1.weight", "4.weight"]
    assert weights("batch", ()) == ["1.weight", "4.weight", "8.weight"]
    assert weights("batch", ["1"]) == ["4.weight", "8.weight"]
    assert weights("vit", ["blocks.[1-3]", "norm"]) == [
        "blocks.0.norm1.weight",
        "blocks.0.norm2.weight",
    ]
    assert weights("vit", ["*.norm1", "blocks.3"])[-1] == "norm.weight"
    assert create("sar", model(), skip=["*"]).inert
    with pytest.raises(
        CasterError, match=r"skip of sar matches no layer with 'layer4': there are 1, "
    ):
        create("sar", model(), skip=("layer4",))
    with pytest.raises(CasterError, match="skip of sar must be a list of names, not 'norm'"):
        create("sar", model("vit"), skip="norm")


def test_published_settings():
    assert create("sar", model(), preset="imagenet")._optimizer.defaults["lr"] == 2.5e-4
    vit = create("sar", model("vit"), preset="imagenet-vit")
    assert (vit.lr, vit._optimizer.defaults["momentum"]) == (1e-3, 0.9)


@pytest.mark.parametrize("setting", ["margin_e0", "rho", "recovery", "lr"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_invalid_settings_are_reported(setting, value):
    with pytest.raises(CasterError, match=f"{setting} of sar must be a number from 0"):
        create("sar", model(), **{setting: value})
