"""DeYO against NumPy: patches, selection, and steps by central differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods.deyo import shuffle_patches
from caster_bench.methods.registry import create
from tests.support.gradients import learnt, slope, softmax
from tests.support.problem import model, stream


def patches_of(image, count):
    """All patches of an image (C, H, W) as bytes, row by row."""
    h, w = image.shape[1] // count, image.shape[2] // count
    return [
        np.ascontiguousarray(image[:, i * h : (i + 1) * h, j * w : (j + 1) * w]).tobytes()
        for i in range(count)
        for j in range(count)
    ]


@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_patches_are_permuted_in_every_image_in_its_own_way(size):
    images = np.random.default_rng(0).normal(size=(6, 3, *size))
    found = shuffle_patches(torch.tensor(images), 4, torch.Generator().manual_seed(0)).numpy()
    orders = set()
    for image, shuffled in zip(images, found, strict=True):
        before, after = patches_of(image, 4), patches_of(shuffled, 4)
        assert sorted(before) == sorted(after)
        orders.add(tuple(before.index(patch) for patch in after))
    assert len(orders) == 6
    assert tuple(range(16)) not in orders


def test_sides_that_do_not_divide_are_resized():
    images = torch.rand(2, 3, 10, 9)
    found = shuffle_patches(images, 4, torch.Generator().manual_seed(0))
    assert found.shape == images.shape
    assert not torch.equal(found, images)
    same = torch.full((1, 1, 10, 9), 0.3)
    torch.testing.assert_close(shuffle_patches(same, 4, torch.Generator()), same)


class Small:
    """BatchNorm of one channel over 2 x 2 pixels, and a linear head on all of them."""

    def __init__(self):
        self.net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)).double()
        rng = np.random.default_rng(0)
        self.weight, self.bias = rng.normal(size=(3, 4)) * 2, rng.normal(size=3)
        self.start = np.array([1.2, 0.4])
        with torch.no_grad():
            for part, value in zip(self.net[0].parameters(), self.start, strict=True):
                part.fill_(value)
            self.net[2].weight.copy_(torch.tensor(self.weight))
            self.net[2].bias.copy_(torch.tensor(self.bias))

    def probabilities(self, x, at):
        h = (x - x.mean()) / np.sqrt(x.var() + self.net[0].eps) * at[0] + at[1]
        return softmax(h.reshape(len(x), -1) @ self.weight.T + self.bias)


def selected(small, x, at, generator, margin, drop):
    """Rows that are certain, those of them that lose enough, and how much all certain ones lose."""
    p = small.probabilities(x, at)
    entropies = -(p * np.log(p)).sum(axis=1)
    certain = [i for i in range(len(x)) if entropies[i] < margin * math.log(3)]
    shuffled = shuffle_patches(torch.tensor(x[certain]), 2, generator).numpy()
    q = small.probabilities(shuffled, at)
    lost = {i: p[i].max() - q[place][p[i].argmax()] for place, i in enumerate(certain)}
    return certain, [i for i in certain if lost[i] > drop], lost


@pytest.mark.parametrize("mutant", [None, "no entropy weight", "no margin", "no drop"])
def test_steps_match_numpy(mutant):
    small, lr, margin, e0, drop = Small(), 0.05, 0.8, 0.4, 0.1
    settings = {"margin": margin, "margin_e0": e0, "drop": drop, "patches": 2, "lr": lr}
    settings |= {"no margin": {"margin": 99.0}, "no drop": {"drop": -1.0}}.get(mutant, {})
    settings |= {"margin_e0": 0.0} if mutant == "no entropy weight" else {}
    method = create("deyo", wrap(small.net), optimizer="sgd", **settings)
    generator = torch.Generator().manual_seed(0)
    at, velocity, same = small.start, np.zeros(2), True
    for step in (1, 2, 3):
        x = np.random.default_rng(step).normal(size=(16, 1, 2, 2))
        found = method.predict(x).logits.numpy()
        same &= np.allclose(softmax(found), small.probabilities(x, at), rtol=1e-4)
        certain, chosen, lost = selected(small, x, at, generator, margin, drop)
        assert 0 < len(chosen) < len(certain) < len(x)
        p = small.probabilities(x, at)
        entropies = -(p * np.log(p)).sum(axis=1)
        weights = {i: math.exp(e0 * math.log(3) - entropies[i]) + math.exp(lost[i]) for i in chosen}

        def loss(to, x=x, weights=weights):
            p = small.probabilities(x, to)
            return np.mean([-w * (p[i] * np.log(p[i])).sum() for i, w in weights.items()])

        velocity = 0.9 * velocity + slope(loss, at)
        at = at - lr * velocity
        same &= np.allclose(learnt(method), at, rtol=1e-5)
    assert same == (mutant is None)


def test_parameters_and_presets_are_the_authors():
    assert list(create("deyo", model()).parameters) == list(create("sar", model()).parameters)
    resnet = create("deyo", model(), preset="imagenet")
    assert (resnet.lr, resnet.drop, type(resnet._optimizer).__name__) == (2.5e-4, 0.3, "SGD")
    vit = create("deyo", model("vit"), preset="imagenet-vit")
    assert (vit.lr, vit.drop, type(vit._optimizer).__name__) == (1e-3, 0.2, "SGD")


def test_errors():
    with pytest.raises(CasterError, match="deyo shuffles 9 x 9 patches of images"):
        create("deyo", model(), patches=9).predict(stream(1)[0])
    with pytest.raises(CasterError, match="drop of deyo must be a number from -1 to 1"):
        create("deyo", model(), drop=2.0)
