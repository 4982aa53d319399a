"""PEA: moments after its map, a NumPy oracle of two passes, and the blocks it finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import CasterError, wrap
from caster_bench.engine.networks import build
from caster_bench.methods.network import Network
from caster_bench.methods.pea import (
    RIDGE,
    Running,
    SourceMoments,
    find_blocks,
    in_groups,
    make_views,
    transported,
    updated,
)
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source, class_columns
from tests.support.gradients import softmax
from tests.support.problem import model, source, stream


def skewed(n, c, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, c)) @ rng.normal(size=(c, c)) + 3 * rng.normal(size=c)


def moments(rows):
    return rows.mean(axis=0), np.cov(rows, rowvar=False).reshape(rows.shape[1], -1)


def source_of(rows, group):
    x = in_groups(torch.tensor(rows), group)
    mean = x.mean(dim=0)
    centred = (x - mean).transpose(0, 1)
    return SourceMoments.of(mean, centred.mT @ centred / (len(x) - 1))


@given(st.integers(2, 7), st.integers(1, 9), st.integers(0, 99))
def test_map_gives_the_sources_moments(c, group, seed):
    """Mean and covariance within every group of channels are the source's, up to the ridge."""
    here, there = skewed(200, c, seed), skewed(200, c, seed + 1)
    x = in_groups(torch.tensor(here, dtype=torch.float32), group)
    y = transported(x, updated(None, x, 0.02, 4.0), source_of(there, group))
    y = y.flatten(1)[:, :c].double().numpy()
    (mean, covariance), (mean_s, covariance_s) = moments(y), moments(there)
    size = max(1.0, np.abs(covariance_s).max())
    np.testing.assert_allclose(mean, mean_s, atol=1e-4 * np.sqrt(size))
    least = np.linalg.eigvalsh(moments(here)[1]).min()
    if least > 100 * RIDGE:
        for start in range(0, c, min(group, c)):
            part = slice(start, start + min(group, c))
            np.testing.assert_allclose(
                covariance[part, part], covariance_s[part, part], atol=2e-2 * size
            )


def test_same_moments_give_the_identity():
    rows = skewed(300, 5, 0)
    x = in_groups(torch.tensor(rows, dtype=torch.float32), 5)
    y = transported(x, updated(None, x, 0.02, 4.0), source_of(rows, 5))
    np.testing.assert_allclose(y.flatten(1).numpy(), rows, atol=1e-3)


def test_running_moments_restart_on_a_jump():
    x = in_groups(torch.tensor(skewed(50, 4, 0)), 4)
    first = updated(None, x, 0.02, 4.0)
    settled = Running(first.mean, first.covariance, drift=1.0)
    near = updated(settled, x + 0.1, 0.02, 4.0)
    torch.testing.assert_close(near.mean, first.mean + 0.02 * 0.1)
    assert near.drift == pytest.approx(0.2 * 0.1 + 0.8 * 1.0)
    far = updated(settled, x + 99.0, 0.02, 4.0)  # 99 > 4 (0.2 x 99 + 0.8)
    torch.testing.assert_close(far.mean, first.mean + 99.0)
    # As in the authors' code, a second batch always restarts: nothing is usual yet.
    torch.testing.assert_close(updated(first, x + 0.1, 0.02, 4.0).mean, first.mean + 0.1)


class Residual(nn.Module):
    """x + 0.5 tanh(linear(norm(x))) on tokens."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + 0.5 * torch.tanh(self.linear(self.norm(x)))


class Tokens(nn.Module):
    """Three blocks on 5 tokens of width 4, their mean, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(4) for _ in range(3)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


@pytest.fixture(scope="module")
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tokens().double().eval()


def run_by_numpy(net, x, change=None):
    """Outputs of the blocks and probabilities; `change(number, output)` replaces an output."""
    outputs = []
    for number, block in enumerate(net.blocks):
        h = (x - x.mean(axis=2, keepdims=True)) / np.sqrt(x.var(axis=2, keepdims=True) + 1e-5)
        weight, bias = (p.detach().numpy() for p in block.linear.parameters())
        x = x + 0.5 * np.tanh(h @ weight.T + bias)
        outputs.append(x)
        x = x if change is None else change(number, x)
    weight, bias = (p.detach().numpy() for p in net.head.parameters())
    return outputs, softmax(x.mean(axis=1) @ weight.T + bias)


def power(matrix, exponent):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-5) ** exponent) @ vectors.T


def flat(x):
    return x.reshape(-1, x.shape[-1])


class Oracle:
    """Two passes of float64 NumPy per batch: weights, then alignment with running moments."""

    def __init__(self, net, images, *, momentum=0.5, root=0.5, weighted=True, progressive=True):
        self.net, self.momentum, self.root = net, momentum, root
        self.weighted, self.progressive = weighted, progressive
        self.source = [moments(flat(out)) for out in run_by_numpy(net, images)[0]]
        self.running = {}

    def __call__(self, x):
        plain, _ = run_by_numpy(self.net, x)
        scores = []
        for (mean, cov), out in zip(self.source, plain, strict=True):
            here, spread = moments(flat(out))
            variances = np.linalg.norm(np.diag(spread) - np.diag(cov))
            scores.append(np.linalg.norm(here - mean) + variances)
        weights = (np.array(scores) - min(scores)) / (max(scores) - min(scores))

        def align(number, out):
            w = weights[number] if self.weighted else 1.0
            if w < 1e-3:
                return out
            rows = flat(out if self.progressive else plain[number])
            mean, cov = moments(rows)
            cov = cov + RIDGE * np.eye(len(cov))
            if number in self.running:
                old_mean, old_cov, drift = self.running[number]
                moved = np.abs(mean - old_mean).mean()
                drift = 0.2 * moved + 0.8 * drift
                if moved <= 4 * drift:
                    m = self.momentum
                    mean, cov = (1 - m) * old_mean + m * mean, (1 - m) * old_cov + m * cov
                self.running[number] = mean, cov, drift
            else:
                self.running[number] = mean, cov, 0.0
            mean_s, cov_s = self.source[number]
            root = power(cov_s + RIDGE * np.eye(len(cov_s)), self.root)
            y = (flat(out) - mean) @ power(cov, -0.5) @ root + mean_s
            return out + w * (y.reshape(out.shape) - out)

        return run_by_numpy(self.net, x, align)[1]


def token_stream(shift, n=4, seed=0):
    rng = np.random.default_rng(seed)
    mix = np.eye(4) + shift * rng.normal(size=(4, 4))
    return [rng.normal(size=(12, 5, 4)) @ mix + shift * (1 + 0.1 * i) for i in range(n)]


@pytest.mark.parametrize(
    ("mutation", "same"),
    [
        ({}, True),
        ({"momentum": 0.1}, False),
        ({"root": 0.4}, False),
        ({"weighted": False}, False),
        ({"progressive": False}, False),
    ],
)
def test_answers_match_numpy(small, mutation, same):
    images = token_stream(0.0, n=3, seed=5)
    batches = [(x, np.zeros(len(x), int)) for x in images]
    settings = {"views": 0, "momentum": 0.5, "jump": 99.0}
    method = create("pea", wrap(small), Source(batches=batches), **settings)
    oracle = Oracle(small, np.concatenate(images), **mutation)
    errors = []
    for x in token_stream(0.5, n=6):
        found = softmax(method.predict(x).logits.double().numpy())
        errors.append(np.abs(found - oracle(x)).max())
    assert (max(errors) < 1e-4) == same, errors


def test_a_rise_of_entropy_restarts_all(small):
    batches = [(x, np.zeros(len(x), int)) for x in token_stream(0.0, n=3, seed=5)]
    sure, unsure = (create("pea", wrap(small), Source(batches=batches), views=0) for _ in "ab")
    x = token_stream(0.5)[0]
    for method, before in ((sure, 0.99), (unsure, -5.0)):
        method.predict(x)
        assert method._target
        method._entropy = before
        method.predict(x)
    assert sure._target
    assert not unsure._target
    assert 0 < unsure._entropy < np.log(3)


def test_views_are_the_image_a_crop_and_mirror_images():
    batch = torch.rand(2, 3, 20, 20)
    image, crop, flipped, both = make_views(batch, 3, "pea")
    assert image is batch
    assert torch.equal(flipped, batch.flip(3))
    assert torch.equal(both, crop.flip(3))
    expected = nn.functional.interpolate(batch[:, :, 1:19, 1:19], (20, 20), mode="bilinear")
    torch.testing.assert_close(crop, expected)
    with pytest.raises(CasterError, match="views=0"):
        make_views(torch.rand(2, 5, 4), 1, "pea")


BLOCKS = {
    "mini-resnet": ("layer", 1, False),
    "mini-convnext": ("stages.", 1, False),
    "mini-swin": ("layers.", -1, False),
    "mini-vit": ("blocks.", -1, True),
    "mini-deit": ("blocks.", -1, True),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_every_architecture(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Network(wrap(build(name, 10)), class_columns(Source(), "pea"))
        with torch.no_grad():
            blocks = find_blocks(network, torch.rand(2, 3, 32, 32), "pea")
    prefix, axis, token = BLOCKS[name]
    assert len(blocks) >= 4
    for block in blocks:
        assert block.name.startswith(prefix)
        assert (block.axis, block.class_token) == (axis, token)
        values = torch.rand(2, 5, 4, 3)
        assert torch.equal(block.values(block.rows(values), values), values)


def test_networks_without_blocks_are_rejected():
    with pytest.raises(CasterError, match="pea aligns the outputs of residual blocks, and"):
        create("pea", model("batch"), source("batch"))
    with pytest.raises(CasterError, match="views of pea must be a number from 0 to 3"):
        create("pea", model("vit"), source("vit"), views=4)
    with pytest.raises(CasterError, match="pea needs source images"):
        create("pea", model("vit"))


def test_a_rejected_batch_leaves_no_trace():
    method, (good, bad) = create("pea", model("vit"), source("vit"), views=1), stream(2)
    method.predict(good)
    before = method._target, method._entropy
    bad[0] = np.nan
    with pytest.raises(CasterError, match="pea got logits that are not finite"):
        method.predict(bad)
    assert (method._target, method._entropy) == before
