"""What methods that learn have in common: they gain, and learn nothing from nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster_bench.methods import create
from tests.support.gradients import learnt
from tests.support.problem import accuracy, model, source, stream


@pytest.mark.parametrize(
    ("name", "kind", "shift", "least", "settings"),
    [
        # One-hot to uniform over 4 classes: cosine 0.5.
        ("eata", "batch", 1.0, 0.0, {"redundancy": 0.4}),
        ("eata", "batch", 1.0, 0.0, {"redundancy": 0.6}),
        ("eata", "layer", 1.0, 0.0, {"norms": ("layer",), "redundancy": 0.6}),
        ("eata", "vit", 0.5, 0.0, {"norms": ("layer",), "redundancy": 0.6}),
        ("sar", "batch", 1.0, 0.0, {}),
        ("sar", "layer", 0.5, 0.0, {}),
        ("sar", "group", 1.0, 0.0, {}),
        ("foa", "vit", 1.0, 0.02, {"population": 8}),
        ("note", "batch", 1.0, 0.0, {}),
        ("rotta", "batch", 1.0, 0.0, {"momentum": 0.2}),
        ("deyo", "batch", 1.0, 0.0, {}),
        ("roid", "batch", 1.0, 0.0, {}),
        ("pea", "vit", 1.0, 0.0, {"views": 0}),  # mirrored patterns mean nothing
    ],
)
def test_more_accurate_than_the_frozen_model(name, kind, shift, least, settings):
    method = create(name, model(kind), source(kind), **settings)
    assert accuracy(method, shift, n=2560) > accuracy(method.frozen, shift, n=2560) + least


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sar", {"margin_e0": 0.0}),
        ("eata", {"margin_e0": 0.0}),
        ("deyo", {"margin": 0.0}),
        ("deyo", {"drop": 1.0}),
    ],
)
def test_a_batch_without_selected_samples_changes_nothing(name, settings):
    method, statistics = create(name, model(), source(), **settings), create("bn-adapt", model())
    start = learnt(method)
    for batch in stream(3):
        assert torch.equal(method.predict(batch).logits, statistics.predict(batch).logits)
    assert np.array_equal(learnt(method), start)
    assert not method._optimizer.state


EATA = {"redundancy": 1.1, "preset": "adam"}


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("eata", "batch", EATA),
        *(("eata", kind, EATA | {"norms": ("layer",)}) for kind in ("layer", "vit")),
        ("eata", "group", EATA | {"norms": ("group",)}),
        *(("sar", k, {"recovery": 0.0, "lr": 0.05}) for k in ("batch", "layer", "group", "vit")),
        *(("roid", kind, {}) for kind in ("batch", "layer", "vit")),
    ],
)
def test_every_norm_and_batch_size(name, kind, settings):
    method = create(name, model(kind), source(kind), **settings)
    start = learnt(method)
    for size in (1, 2, 64):
        (batch,) = stream(1, size=size, shift=0.0)
        assert torch.equal(method.forward(batch), method.predict(batch).logits)
    assert np.isfinite(learnt(method)).all()
    assert not np.array_equal(learnt(method), start)
    model(kind).verify()
