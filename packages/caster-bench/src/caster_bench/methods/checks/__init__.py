"""Checks that every test-time adaptation method must pass, ours and yours.

They take a function that makes your method, and a few batches without labels. `check_method` runs
all of them; `ALL` has them by name, for one test each.

>>> import numpy as np
>>> from caster import wrap
>>> from caster_bench.methods import Frozen, OnFeatures, Prediction, Source, checks

>>> class Centred(OnFeatures):
...     '''The model's logits minus their batch mean.'''
...     def __init__(self, model, source, *, name="centred"):
...         super().__init__(model)
...         self.name, self.frozen = name, Frozen(model, source)
...     def answer(self, outputs):
...         logits = self.frozen.logits(outputs)
...         return Prediction(logits - logits.mean(axis=0))

>>> model = wrap(lambda images: (images, 2 * images), version="example-1")
>>> batches = list(np.random.default_rng(0).normal(size=(6, 16, 3)))
>>> def make():
...     return Centred(model, Source())
>>> checks.check_method(make, batches)

As tests, in a file that pytest collects:

>>> import pytest
>>> @pytest.mark.parametrize("check", checks.ALL.values(), ids=checks.ALL)
... def test_centred(check):
...     check(make, batches)

A faulty method fails with one line that says where:

>>> class Drifting(Centred):
...     def answer(self, outputs):
...         self.seen = getattr(self, "seen", 0) + 1
...         return super().answer(outputs)
>>> checks.check_method(lambda: Drifting(model, Source(), name="drifting"), batches)
Traceback (most recent call last):
    ...
caster_bench.methods.checks.contract.CheckFailed: drifting fails reset_exact:
after a reset it is not as constructed at .seen
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caster_bench.methods.checks.contract import ALL, Check, CheckFailed, Make

__all__ = ["ALL", "Check", "CheckFailed", "Make", "check_method"]


def check_method(make: Make, batches: Sequence[Any]) -> None:
    """Run every check on a method; the first failure raises `CheckFailed`.

    `make` returns a new method each time, on an existing model. `batches` are four or more, with
    at least 64 images in total, preprocessed for the model.
    """
    batches = list(batches)  # a generator would last for one check only
    for check in ALL.values():
        check(make, batches)
