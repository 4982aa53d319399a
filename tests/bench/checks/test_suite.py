"""The checks as users run them."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from caster import CasterError, wrap
from caster_bench.methods import checks
from caster_bench.methods.protocol import Retained, nbytes
from tests.support.method_examples import PIXELS, Centred, Learning, batches, layers


class Broken(Centred):
    def answer(self, outputs):
        raise RuntimeError("no answer\nat all")


class WithLabels(Centred):
    def predict(self, images, labels):
        return super().predict(images)


class Growing(Centred):
    """Stores every batch."""

    def start(self):
        super().start()
        self.bank = []

    def update(self, outputs):
        super().update(outputs)
        self.bank.append(np.array(outputs.logits))

    def retained(self):
        return Retained(buffers=nbytes(self.mean), features=nbytes(*self.bank))


class Unbounded(Growing):
    unbounded = True


def test_first_failure_is_raised_as_one_line():
    with pytest.raises(checks.CheckFailed) as caught:
        checks.check_method(lambda: Broken(PIXELS), batches())
    said = "Broken fails frozen_unchanged: RuntimeError: no answer at all"
    assert str(caught.value) == said
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value.__cause__, RuntimeError)  # the cause is kept


def test_a_method_that_cannot_be_made_fails():
    def make():
        raise ValueError("no such thing")

    with pytest.raises(checks.CheckFailed, match=r"the method fails .*ValueError: no such thing"):
        checks.check_method(make, batches())


def test_predict_takes_only_images():
    with pytest.raises(checks.CheckFailed, match=r"predict needs \['images', 'labels'\]"):
        checks.ALL["labels_unseen"](lambda: WithLabels(PIXELS), batches())


def test_unbounded_method_may_grow():
    checks.check_method(lambda: Unbounded(PIXELS), batches())
    with pytest.raises(checks.CheckFailed, match="keeps 6240 bytes more after 260 batches"):
        checks.ALL["bounded_memory"](lambda: Growing(PIXELS), batches())


@pytest.mark.parametrize("given", [batches()[:3], [batch[:8] for batch in batches()], []])
def test_too_few_batches_are_rejected(given):
    with pytest.raises(CasterError, match="checks need 4 batches and 64 images or more"):
        checks.check_method(lambda: Centred(PIXELS), given)


def test_batches_may_be_tensors_and_of_unequal_sizes():
    model = wrap(layers())
    tensors = [torch.from_numpy(batch) for batch in batches()]
    checks.check_method(lambda: Learning(model), [*tensors, tensors[0][:3]])


def test_labels_on_a_tensor_are_watched_too():
    class Peeking(Learning):
        def predict(self, images):
            getattr(images, "target", None)
            return super().predict(images)

    model = wrap(layers())
    tensors = [torch.from_numpy(batch) for batch in batches()]
    with pytest.raises(checks.CheckFailed, match="Peeking fails labels_unseen: it reads target"):
        checks.check_method(lambda: Peeking(model), tensors)


def test_callers_generators_are_restored():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    checks.ALL["seeded_runs_repeat"](lambda: Centred(PIXELS), batches())
    assert states() == before


def test_a_method_without_torch_is_checked_without_torch():
    code = """
import sys
import numpy as np
from caster import wrap
from caster_bench import methods
from caster_bench.methods import checks
model = wrap(lambda images: (images, images), version="example-1")
batches = list(np.random.default_rng(0).normal(size=(4, 16, 3)))
checks.check_method(lambda: methods.create("frozen", model), batches)
print([name for name in ("torch", "cma") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
