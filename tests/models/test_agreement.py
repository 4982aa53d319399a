"""A torch module and its ONNX export give the same features, predictions and verdicts."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster import Adapter, StateError, wrap

pytestmark = pytest.mark.slow  # exports a network twice
N_CLASSES = 4


def make_images(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(N_CLASSES, size=n)
    patterns = np.random.default_rng(99).standard_normal((N_CLASSES, 3, 12, 12))
    noise = rng.standard_normal((n, 3, 12, 12))
    return (patterns[labels] + 0.5 * noise).astype(np.float32), labels


SHIFTS = {
    "none": lambda x: x,
    "contrast": lambda x: 0.5 * x + 0.2,
    "brightness": lambda x: x + 1.0,
    "channels": lambda x: x * np.float32([0.4, 1.0, 2.0])[:, None, None],
    "noise": lambda x: x + np.random.default_rng(5).standard_normal(x.shape).astype(np.float32),
    "upside down": lambda x: x[:, :, ::-1].copy(),
    "one class": lambda x: x[:1].repeat(len(x), axis=0),
    "few": lambda x: x[:3],
    "one": lambda x: x[:1],
}


def network():
    """Trained briefly, so that its predictions are meaningful."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96, N_CLASSES),
    )
    images, labels = (torch.as_tensor(array) for array in make_images(256, seed=2))
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(12):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimiser.step()
    return net.eval()


LEGACY = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
DYNAMO = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("N")},)}


@pytest.fixture(scope="module", params=[LEGACY, DYNAMO], ids=["legacy", "dynamo"])
def models(request, tmp_path_factory):
    net = network()
    path = tmp_path_factory.mktemp("agreement") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised inside the exporters
        torch.onnx.export(net, (torch.zeros(2, 3, 12, 12),), path, verbose=False, **request.param)
    return wrap(net), wrap(path)


@pytest.fixture(scope="module")
def adapters(models):
    images, labels = make_images(480, seed=0)
    batches = [(images[i : i + 120], labels[i : i + 120]) for i in range(0, 480, 120)]
    return tuple(caster.fit(model, batches, layers=False) for model in models)


def relative(actual, expected) -> float:
    """Largest difference, in units of the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_features_and_logits_agree(models, shift):
    images = shift(make_images(64, seed=1)[0])
    module, file = (model(images) for model in models)
    assert isinstance(module.features, torch.Tensor)
    assert isinstance(file.features, np.ndarray)
    assert relative(file.features, module.features) < 1e-4
    assert relative(file.logits, module.logits) < 1e-4


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_adapted_predictions_agree(adapters, shift):
    images = shift(make_images(64, seed=1)[0])
    module, file = (adapter(images) for adapter in adapters)
    assert file.labels.tolist() == module.labels.tolist()
    assert file.proposed.tolist() == module.proposed.tolist()
    assert (file.adapted is None) == (module.adapted is None)
    if file.adapted is not None:
        assert relative(file.adapted, module.adapted) < 1e-3
    one, other = module.verdict, file.verdict
    assert (other.accepted, other.reason) == (one.accepted, one.reason)
    assert (other.confident, other.classes) == (one.confident, one.classes)
    assert other.ratio == pytest.approx(one.ratio, rel=1e-2)


def test_the_shifts_cover_accepted_and_rejected_batches(adapters):
    images, _ = make_images(64, seed=1)
    reasons = {adapters[0](shift(images)).verdict.reason for shift in SHIFTS.values()}
    assert {"accepted", "batch_too_small", "min_samples"} <= reasons


def test_accuracy_on_the_source(adapters):
    images, labels = make_images(64, seed=1)
    for adapter in adapters:
        assert np.mean(np.asarray(adapter(images).labels) == labels) > 0.95
        assert np.mean(np.asarray(adapter.model(images).logits).argmax(1) == labels) > 0.95


def test_the_moments_agree(adapters):
    """The sign of a direction is arbitrary, so compare projections and magnitudes."""
    one, other = (adapter.clf.moments_ for adapter in adapters)
    assert np.array_equal(one.counts, other.counts)
    assert relative(other.U @ other.U.T, one.U @ one.U.T) < 1e-2
    assert relative(np.abs(other.means), np.abs(one.means)) < 1e-2


def test_a_state_is_bound_to_its_model(adapters, models):
    for adapter, other in zip(adapters, reversed(models), strict=True):
        with pytest.raises(StateError, match="another model"):
            Adapter(other, adapter.clf._state)
        allowed = Adapter(other, adapter.clf._state, allow_other_model=True)
        images, _ = make_images(64, seed=1)
        expected = adapter(images).labels.tolist()
        assert allowed(images).labels.tolist() == expected
