"""EATA and ETA against NumPy loops and central differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from caster import CasterError, wrap
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.gradients import learnt, slope, softmax
from tests.support.problem import N_CLASSES, model, source, stream


def filtered(logits, mean, margin, redundancy):
    """Entropies, rows of the selected samples and the running mean, sample by sample."""
    p = softmax(np.asarray(logits, dtype=np.float64))
    entropies, chosen = [], []
    for i, row in enumerate(p):
        entropies.append(-sum(q * np.log(q) for q in row if q > 0))
        if entropies[i] >= margin * np.log(len(row)):
            continue
        if mean is not None:
            cosine = row @ mean / np.sqrt((row @ row) * (mean @ mean))
            if abs(cosine) >= redundancy:
                continue
        chosen.append(i)
    if chosen:
        new = p[chosen].mean(axis=0)
        mean = new if mean is None else 0.9 * mean + 0.1 * new
    return np.array(entropies), chosen, mean


@pytest.mark.parametrize("strength", [0.0, 500.0])
def test_filters_weights_and_loss_match_the_reference(strength):
    settings = {"margin_e0": 0.3, "redundancy": 0.52, "fisher_strength": strength, "lr": 0.01}
    method = create("eata", model(), source(), **settings)
    losses, descend = [], method.descend
    method.descend = lambda loss: (losses.append(loss.item()), descend(loss))
    start, mean = learnt(method), None
    unreliable = redundant = 0
    for batch in stream(8, shift=1.0):
        at, losses[:] = learnt(method), []
        found = method.selected(method.forward(batch))
        logits = method.predict(batch).logits.numpy()
        entropies, reliable, _ = filtered(logits, None, 0.3, 0.52)
        _, chosen, mean = filtered(logits, mean, 0.3, 0.52)
        assert found.tolist() == chosen
        unreliable += len(batch) - len(reliable)
        redundant += len(reliable) - len(chosen)
        if not chosen:
            assert losses == []
            continue
        e0 = 0.3 * np.log(N_CLASSES)
        loss = np.mean([np.exp(e0 - entropies[i]) * entropies[i] for i in chosen])
        if strength:
            fisher = method.fisher.double().numpy()
            loss += strength * sum(f * d * d for f, d in zip(fisher, at - start, strict=True))
        np.testing.assert_allclose(losses, [loss], rtol=2e-5)
    assert unreliable > 20
    assert redundant > 20
    assert np.abs(learnt(method) - start).max() > 0.01


@given(
    hnp.arrays(np.float64, (6, 5), elements=st.floats(-20, 20)),
    hnp.arrays(np.float64, (6, 5), elements=st.floats(-20, 20)),
    st.floats(0.05, 0.95),
    st.floats(0.05, 0.95),
)
def test_selection_matches_the_reference_for_any_logits(first, second, margin, redundancy):
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).double()
    method = create("eta", wrap(net), margin_e0=margin, redundancy=redundancy, lr=0.0)
    mean = None
    for logits in (first, second):
        p = softmax(logits)
        entropies, chosen, after = filtered(logits, mean, margin, redundancy)
        assume(np.abs(entropies - margin * np.log(5)).min() > 1e-9)  # otherwise rounding decides
        if mean is not None:
            lengths = np.linalg.norm(p, axis=1) * np.linalg.norm(mean)
            assume(np.abs(p @ mean / lengths - redundancy).min() > 1e-9)
        tensor = torch.tensor(logits, requires_grad=True)
        assert method.selected(tensor.detach()).tolist() == chosen
        method.step(tensor, tensor)
        mean = after


class Small:
    """Linear, BatchNorm, Linear in torch and in NumPy."""

    def __init__(self, seed=0, scale=2.0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
            self.net = nn.Sequential(*layers).double()
            with torch.no_grad():
                for part in (self.net[1].weight, self.net[1].bias):
                    part.add_(torch.randn(4, dtype=torch.float64))
                self.net[2].weight.mul_(scale)
        self.start = torch.cat([self.net[1].weight, self.net[1].bias]).detach().numpy().copy()

    def probabilities(self, batch, at):
        first, bn, last = (self.net[i] for i in range(3))
        h = batch @ first.weight.detach().numpy().T + first.bias.detach().numpy()
        h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + bn.eps) * at[:4] + at[4:]
        return softmax(h @ last.weight.detach().numpy().T + last.bias.detach().numpy())


def images(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 3)) + 0.5


def squares(small, blocks):
    """Fisher information as EATA's authors compute it."""
    found = []
    for block in blocks:
        answers = small.probabilities(block, small.start).argmax(axis=1)

        def loss(at, block=block, answers=answers):
            p = small.probabilities(block, at)
            return -np.log(p[np.arange(len(block)), answers]).mean()

        found.append(slope(loss, small.start) ** 2)
    return np.mean(found, axis=0)


@pytest.mark.parametrize(
    ("samples", "cuts"), [(2000, [64, 128, 190]), (100, [64, 100]), (64, [64]), (3, [3])]
)
def test_fisher_information_of_the_first_images(samples, cuts):
    small, given = Small(), images(190, 1)
    sizes = np.split(given, [50, 51, 160])  # batches of 50, 1, 109 and 30, cut into 64s
    labelled = Source(batches=[(batch, np.zeros(len(batch))) for batch in sizes])
    method = create("eata", wrap(small.net), labelled, fisher_samples=samples)
    found = method.fisher.numpy()
    blocks = np.split(given[: cuts[-1]], cuts[:-1])
    np.testing.assert_allclose(found, squares(small, blocks), rtol=1e-5, atol=1e-12)
    assert all(p.grad is None for p in method.network.module.parameters())
    assert not method.fisher.requires_grad


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_steps_by_hand(seed):
    small, lr, strength = Small(seed), 0.02, 30.0
    labelled = Source(batches=[(images(64, 1), np.zeros(64)), (images(64, 2), np.zeros(64))])
    settings = {"margin_e0": 0.8, "redundancy": 0.9, "fisher_strength": strength}
    method = create("eata", wrap(small.net), labelled, optimizer="sgd", lr=lr, **settings)
    fisher = squares(small, [images(64, 1), images(64, 2)])
    at, velocity, mean = small.start, np.zeros(8), None
    for batch in (images(16, 3), images(16, 4), images(16, 5)):
        answer = method.predict(batch).logits.numpy()
        p = small.probabilities(batch, at)
        np.testing.assert_allclose(softmax(answer), p, atol=1e-5)  # before the step
        entropies, chosen, mean = filtered(np.log(p), mean, 0.8, 0.9)
        assert 0 < len(chosen) < len(batch)
        weights = np.exp(0.8 * np.log(3) - entropies[chosen])  # constant for the derivative

        def loss(at, batch=batch, chosen=chosen, weights=weights):
            p = small.probabilities(batch, at)[chosen]
            entropy = -(p * np.log(p)).sum(axis=1)
            return np.mean(weights * entropy) + strength * np.sum(fisher * (at - small.start) ** 2)

        velocity = 0.9 * velocity + slope(loss, at)
        at = at - lr * velocity
        np.testing.assert_allclose(learnt(method), at, rtol=2e-5, atol=1e-6)


def test_eta_is_eata_without_penalty_and_needs_no_source_images():
    eta = create("eta", model(), redundancy=0.6)
    free = create("eata", model(), source(), redundancy=0.6, fisher_strength=0.0)
    held = create("eata", model(), source(), redundancy=0.6, fisher_strength=1e6)
    start = learnt(eta)
    for batch in stream(20):
        expected = eta.predict(batch).logits
        assert torch.equal(expected, free.predict(batch).logits)
        held.predict(batch)
    assert eta.fisher is None
    assert np.linalg.norm(learnt(held) - start) < 0.7 * np.linalg.norm(learnt(eta) - start)
    with pytest.raises(CasterError, match="eata needs source images"):
        create("eata", model())
    empty = Source(batches=[(np.zeros((0, 3, 8, 8), np.float32), [])])
    with pytest.raises(CasterError, match="at least one sample"):
        create("eata", model(), empty)


def test_batch_of_redundant_samples_changes_nothing():
    method = create("eata", model(), source(), redundancy=0.0)
    first, *others = stream(4)
    method.predict(first)  # there is no running mean yet
    before, mean = learnt(method), method._mean.clone()
    assert not np.array_equal(before, torch.cat(list(method.origin.values())).numpy())
    for batch in others:
        method.predict(batch)
    assert np.array_equal(learnt(method), before)
    assert torch.equal(method._mean, mean)


def test_retained():
    method, tent = create("eata", model(), source()), create("tent", model(), optimizer="sgd")
    size = 4 * sum(p.numel() for p in method.parameters.values())
    assert method.retained().statistics == 2 * size  # Fisher information and source values
    for batch in stream(2):
        method.predict(batch)
        tent.predict(batch)
    assert method.retained().total == tent.retained().total + 2 * size + 4 * N_CLASSES


def test_published_settings():
    for name, strength in (("eata", 2000.0), ("eta", 0.0)):
        imagenet = create(name, model(), source(), preset="imagenet")
        assert (imagenet.redundancy, imagenet.fisher_strength) == (0.05, strength)
        assert imagenet._optimizer.defaults["lr"] == 2.5e-4
        vit = create(name, model("vit"), source("vit"), preset="imagenet-vit")
        assert (vit.redundancy, vit.fisher_strength, vit.lr) == (0.05, strength, 1e-3)
        assert "norm.weight" in vit.parameters
        assert create(name, model(), source(), preset="cifar100").redundancy == 0.1


@pytest.mark.parametrize("setting", ["margin_e0", "redundancy", "fisher_strength", "lr"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_invalid_settings_are_reported(setting, value):
    with pytest.raises(CasterError, match=f"{setting} of eata must be a number from 0"):
        create("eata", model(), source(), **{setting: value})


def test_zero_fisher_samples_are_rejected():
    with pytest.raises(CasterError, match="fisher_samples of eata must be 1 or more, not 0"):
        create("eata", model(), source(), fisher_samples=0)
