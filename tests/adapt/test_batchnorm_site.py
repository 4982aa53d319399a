"""A BatchNorm that is lent moments gives what it gives to values that were moved."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import caster
from caster import wrap
from caster.adapt.alignment import BatchNormSite
from caster.adapt.layer_passes import EPS
from caster.core.channels import ChannelMoments, Site
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source

POSITIVE = st.floats(0.05, 20.0)
SHIFT = st.floats(-5.0, 5.0)


def a_batchnorm(mean: float, variance: float, eps: float = 1e-3) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(1, eps=eps).double().eval()
    with torch.no_grad():
        layer.running_mean.fill_(mean)
        layer.running_var.fill_(variance)
        layer.weight.fill_(1.7)
        layer.bias.fill_(-0.3)
    return layer


def moments(mean: float, variance: float) -> ChannelMoments:
    return ChannelMoments(9.0, *(torch.tensor([x], dtype=torch.float64) for x in (mean, variance)))


@given(
    own=st.tuples(SHIFT, POSITIVE),
    source=st.tuples(SHIFT, POSITIVE),
    target=st.tuples(SHIFT, POSITIVE),
)
def test_it_is_lent_what_moves_the_target_to_the_source(own, source, target):
    layer, eps = a_batchnorm(*own), EPS * source[1]
    spot = BatchNormSite(Site("", "in", 1), layer, moments(*source))
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)[:, None]
    scale = ((source[1] + eps) / (target[1] + eps)) ** 0.5
    expected = layer(scale * (x - target[0]) + source[0])
    assert spot.apply(layer, x, moments(*target), spot.source) is None
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)
    spot.restore()
    assert (float(layer.running_mean), float(layer.running_var)) == own


@given(
    own=st.tuples(SHIFT, POSITIVE),
    references=st.lists(st.tuples(SHIFT, POSITIVE), min_size=1, max_size=3),
    target=st.tuples(SHIFT, POSITIVE),
)
def test_it_is_lent_what_moves_the_target_to_any_reference(own, references, target):
    """One after the other, as mixtures of classes change from batch to batch."""
    layer, eps = a_batchnorm(*own), EPS * 3.0
    spot = BatchNormSite(Site("", "in", 1), layer, moments(7.0, 3.0))
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)[:, None]
    for reference in references:
        scale = ((reference[1] + eps) / (target[1] + eps)) ** 0.5
        expected = layer(scale * (x - target[0]) + reference[0])
        spot.apply(layer, x, moments(*target), moments(*reference))
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)
        spot.restore()


def test_a_target_that_is_the_source_leaves_it_alone():
    layer = a_batchnorm(1.0, 4.0)
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)[:, None]
    expected = layer(x)
    spot = BatchNormSite(Site("", "in", 1), layer, moments(3.0, 0.5))
    spot.apply(layer, x, moments(3.0, 0.5), spot.source)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("source", [None, moments(1.0, 4.0)])
def test_without_other_source_moments_it_is_batchnorm_adaptation(source):
    layer = a_batchnorm(1.0, 4.0)
    spot = BatchNormSite(Site("", "in", 1), layer, source)
    spot.apply(layer, torch.zeros(1, 1), moments(5.0, 9.0), spot.source)
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)[:, None]
    expected = 1.7 * (x - 5.0) / (9.0 + 1e-3) ** 0.5 - 0.3
    near = {"rtol": 1e-3, "atol": 1e-3} if source else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(layer(x), expected, **near)


def test_a_stream_like_the_source_is_answered_as_the_frozen_model_does():
    """A BatchNorm whose own moments are far from what the source's images give it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)
    )
    with torch.no_grad():
        net[1].running_mean.fill_(0.4)
        net[1].running_var.fill_(3.0)
    model = wrap(net.eval())
    x = np.random.default_rng(0).normal(size=(2000, 3, 8, 8)).astype(np.float32)
    y = np.arange(2000) % 4
    parts = np.split(np.arange(2000), 8)
    state = caster.fit(model, [(x[p], y[p]) for p in parts], layers=True).state
    assert Site("1", "in", 1) in state.layers
    batch = x[:500]
    frozen = torch.as_tensor(model(batch).logits)
    measured, own = (
        create("layer-transport-ungated", model, source, prior=0.0).predict(batch).logits
        for source in (Source(state=state), Source())
    )
    near = float((measured - frozen).abs().mean())
    assert near < 0.1 * float((own - frozen).abs().mean())
