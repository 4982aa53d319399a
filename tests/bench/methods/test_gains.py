"""Every method that learns is more accurate than the frozen model on a shifted stream."""

from __future__ import annotations

import pytest

from caster_bench.methods import create
from tests.support.problem import accuracy, model, source


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
