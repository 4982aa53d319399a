"""Checks that every method of test-time adaptation must pass, ours and yours.

Give them a function that makes your method, and a few batches without labels. `check_method` runs
them all; `ALL` has them by name, for one test each.

>>> import numpy as np
>>> from caster import checks, wrap
>>> from caster_bench.methods import Frozen, OnFeatures, Prediction, Source

>>> class Centred(OnFeatures):
...     '''The model's logits, less their mean over the batch.'''
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

The same as tests, in a file of yours that pytest finds:

>>> import pytest
>>> @pytest.mark.parametrize("check", checks.ALL.values(), ids=checks.ALL)
... def test_centred(check):
...     check(make, batches)

A method that is wrong fails with one line that says where:

>>> class Drifting(Centred):
...     def answer(self, outputs):
...         self.seen = getattr(self, "seen", 0) + 1
...         return super().answer(outputs)
>>> checks.check_method(lambda: Drifting(model, Source(), name="drifting"), batches)
Traceback (most recent call last):
    ...
caster_bench.methods.checks.suite.CheckFailed: drifting fails reset_exact:
after a reset it is not as constructed at .seen
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caster_bench.methods.checks.answers import answers_stay, forward_before_update, sound_answers
from caster_bench.methods.checks.caller import any_grad_mode, batches_left_alone, labels_unseen
from caster_bench.methods.checks.fingerprint import fingerprint
from caster_bench.methods.checks.gate import refused_gate
from caster_bench.methods.checks.memory import bounded_memory, retained_is_true
from caster_bench.methods.checks.reference import frozen_unchanged, refused_is_frozen
from caster_bench.methods.checks.repetition import reset_exact, seeded_runs_repeat
from caster_bench.methods.checks.size import reachable_bytes
from caster_bench.methods.checks.suite import Check, CheckFailed, Make

__all__ = ["ALL", "Check", "CheckFailed", "Make", "check_method", "fingerprint", "reachable_bytes"]

ALL: dict[str, Check] = {
    check.__name__: check
    for check in (
        frozen_unchanged,  # first, before the others have done to the model what it looks for
        sound_answers,
        refused_is_frozen,
        reset_exact,
        seeded_runs_repeat,
        forward_before_update,
        answers_stay,
        labels_unseen,
        batches_left_alone,
        any_grad_mode,
        refused_gate,
        bounded_memory,
        retained_is_true,
    )
}


def check_method(make: Make, batches: Sequence[Any]) -> None:
    """Run every check on a method; the first that fails raises `CheckFailed`.

    `make` gives a new method each time, on a model that is there already. `batches` are four or
    more with 64 images together, prepared as the model takes them.
    """
    held = list(batches)  # a generator would last for one check
    for check in ALL.values():
        check(make, held)
