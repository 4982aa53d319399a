"""The user's forward hooks are called once per pass over the data and are part of the model."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster import Adapter, wrap
from caster_bench.methods.registry import create
from tests.support.problem import model, source, stream


class Recorder:
    """Count passes; holds a lock, which cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sizes = []

    def see(self, layer, inputs, output):
        self.sizes.append(len(inputs[0]))

    def __call__(self, layer, inputs):
        self.sizes.append(len(inputs[0]))

    def taken(self):
        sizes, self.sizes = self.sizes, []
        return sizes


def hooked(at, how):
    net = copy.deepcopy(model().module)
    layer, recorder = net if at == "network" else net[0], Recorder()
    if how == "function":
        layer.register_forward_hook(lambda *args: recorder.see(*args))
    elif how == "method":
        layer.register_forward_hook(recorder.see)
    else:
        layer.register_forward_pre_hook(recorder)
    return wrap(net), recorder


@pytest.mark.parametrize(
    ("layers", "at", "how"),  # every pair of values
    [
        (True, "network", "function"),
        (True, "network", "object"),
        (True, "layer", "method"),
        (False, "network", "method"),
        (False, "layer", "function"),
        (False, "layer", "object"),
    ],
)
def test_a_hook_is_called_once_in_every_pass_over_the_data(layers, at, how):
    frozen, recorder = hooked(at, how)
    state = caster.fit(model(), source().batches, layers=layers).state
    adapter = Adapter(frozen, state)
    for _ in range(2):
        adapter(stream(1)[0])
        # shallow layers aligned, all of them, and frozen to compare
        passes = 3 if adapter.mechanism == "layers" else 1
        assert recorder.taken() == [32] * passes
    for name in ("layer-transport", "layer-transport-ungated"):
        method = create(
            name, wrap(frozen.module), state, **({"window": 64} if name[-1] == "t" else {})
        )
        assert recorder.taken() == []
        for batch in stream(8):
            answer = method.predict(batch)
            compared = answer.reason not in ("ungated", "rest")
            assert recorder.taken() == [32] * (1 + compared)  # the frozen pass and the aligned one


def test_fitting_calls_a_hook_for_every_batch_and_twice_to_find_sites():
    """Once for the sites, and once for the convolutions before them."""
    frozen, recorder = hooked("network", "function")
    caster.fit(frozen, source().batches, layers=True)
    assert recorder.taken() == [2, 2] + [50] * 8


@pytest.mark.parametrize("name", ["layer-transport", "layer-transport-ungated"])
def test_a_hook_that_changes_a_layer_is_part_of_the_model(name):
    """The model answers like a network with a layer in place of the hook."""

    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    plain = copy.deepcopy(model().module)
    changed = wrap(nn.Sequential(*plain[:3], Twice(), *plain[3:]))
    net = copy.deepcopy(plain)
    net[2].register_forward_hook(lambda layer, inputs, output: 2 * output)
    answers = []
    for frozen in (wrap(net), changed):
        state = caster.fit(frozen, source().batches, layers=True).state
        method = create(name, frozen, state)
        answers.append([method.predict(batch).logits for batch in stream(4)])
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


class Collecting(nn.Module):
    """A network that reads what its own hook stored."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(8, 3)
        self.seen = {}
        self.norm.register_forward_hook(self.keep)

    def keep(self, layer, inputs, output):
        self.seen["norm"] = output

    def forward(self, x):
        self.norm(x)
        return self.head(torch.cat([x, self.seen.pop("norm")], dim=1))


def test_a_network_that_needs_its_hooks_is_aligned_with_them():
    torch.manual_seed(0)
    net = Collecting()
    images = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    state = caster.fit(wrap(net), [(images, np.arange(64) % 3)], layers=True).state
    found = create("layer-transport-ungated", wrap(net), state).predict(images + 1)
    assert found.accepted
    assert not torch.equal(found.logits, wrap(net)(images + 1).logits)
    assert net.seen == {}


def test_hooks_of_torch_that_compute_weights_are_kept():
    net = copy.deepcopy(model().module)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net[0])
    found = wrap(net)
    (batch,) = stream(1)
    found(batch)  # such a layer can be copied only after a pass without gradients
    for user_hooks in (True, False):
        torch.testing.assert_close(found.twin(user_hooks)(batch).logits, model()(batch).logits)
