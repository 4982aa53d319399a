"""Every check can fail: a method with one fault fails only the check for it."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from caster import wrap
from caster_bench.methods import checks
from caster_bench.methods.network import to_device
from caster_bench.methods.protocol import Frozen, Prediction, Retained, nbytes
from caster_bench.methods.source import Source
from tests.support.method_examples import PIXELS, Centred, Learning, batches, layers


def failed(method) -> dict[str, str]:
    """Messages of the checks that a method fails, by name."""
    said = {}
    for name, check in checks.ALL.items():
        try:
            check(maker(method), batches())
        except checks.CheckFailed as failure:
            said[name] = str(failure)
    return said


def maker(method):
    """Make a method on its own model, which some faults change."""
    model = PIXELS if issubclass(method, Centred) else wrap(layers())
    return lambda: method(model)


# --- sound_answers


class Squeezing(Centred):
    """A batch of one loses its dimension."""

    def answer(self, outputs):
        given = super().answer(outputs)
        return replace(given, logits=given.logits[0]) if len(given.logits) == 1 else given


class Overflowing(Centred):
    def answer(self, outputs):
        given = super().answer(outputs)
        return replace(given, logits=given.logits / 0.0) if len(given.logits) == 1 else given


class Undecided(Centred):
    """The ratio of a batch of one is NaN."""

    def answer(self, outputs):
        return replace(super().answer(outputs), ratio=math.nan if len(outputs.logits) == 1 else 0.5)


class Silent(Centred):
    def answer(self, outputs):
        return replace(super().answer(outputs), reason="")


class Truthy(Centred):
    def answer(self, outputs):
        return replace(super().answer(outputs), accepted=np.True_)


class InNumPy(Learning):
    def learn(self, batch):
        given = super().learn(batch)
        return replace(given, logits=given.logits.numpy())


# --- frozen_unchanged


class Hooking(Learning):
    """Leaves a hook on the frozen module."""

    def __init__(self, model):
        super().__init__(model)
        model.module[0].register_forward_hook(lambda *_: None)


class Asking(Learning):
    """Changes requires_grad of the frozen module."""

    def predict(self, images):
        self.model.module[0].bias.requires_grad_(False)
        return super().predict(images)


class Gradients(Learning):
    """Leaves gradients on the frozen module."""

    def predict(self, images):
        self.model.module[0].bias.grad = torch.ones_like(self.model.module[0].bias)
        return super().predict(images)


class Noting(Learning):
    """Stores its state on the frozen model."""

    def predict(self, images):
        self.model.seen = getattr(self.model, "seen", 0) + 1
        return super().predict(images)


# --- rejected_is_frozen


class Refusing(Centred):
    """Claims that the frozen model answered, and answers itself."""

    def answer(self, outputs):
        return replace(super().answer(outputs), accepted=False, reason="ratio")


class NotInert(Centred):
    inert = True


class InertCounting(Centred):
    inert, forward = True, None

    def start(self):
        super().start()
        self.seen = 0

    def answer(self, outputs):
        self.seen += 1
        return replace(self.frozen.answer(outputs), reason="inert")


# --- reset_exact


class Forgetful(Centred):
    def reset(self):
        pass


class OldOptimizer(Learning):
    """Its reset does not clear Adam's state."""

    def reset(self):
        self.module.load_state_dict(self.model.module.state_dict())


class OldClosure(Centred):
    """A closure outlives a reset."""

    def __init__(self, model):
        super().__init__(model)
        seen = 0

        def count():
            nonlocal seen
            seen += 1

        self.count = count

    def answer(self, outputs):
        self.count()
        return super().answer(outputs)


class OldGenerator(Centred):
    """Its reset does not reseed its generator."""

    def __init__(self, model):
        super().__init__(model)
        self.random = np.random.default_rng(0)

    def answer(self, outputs):
        self.random.normal()
        return super().answer(outputs)


# --- seeded_runs_repeat


class Drawing(Centred):
    """Draws from NumPy's global generator, and ignores it."""

    def answer(self, outputs):
        np.random.normal()
        return super().answer(outputs)


class DrawingTensors(Centred):
    def answer(self, outputs):
        torch.rand(1)
        return super().answer(outputs)


class Peeping(Centred):
    """Reads NumPy's global generator without drawing."""

    def scores(self, outputs):
        return super().scores(outputs) + np.float32(np.random.get_state()[1][0])


# --- forward_before_update


class Late(Centred):
    """Answers after the update, unlike its forward."""

    def answer(self, outputs):
        self.update(outputs)
        return Prediction(self.scores(outputs))


class LearningAhead(Centred):
    """Its forward learns."""

    def forward(self, images):
        return self.answer(self.model(images)).logits


# --- answers_stay


class OneBuffer(Centred):
    """Every answer shares one buffer."""

    def start(self):
        super().start()
        self.buffer = np.zeros((64, 3), dtype=np.float32)

    def answer(self, outputs):
        given = super().answer(outputs)
        self.buffer[: len(given.logits)] = given.logits
        return replace(given, logits=self.buffer[: len(given.logits)])

    def retained(self):
        return Retained(buffers=nbytes(self.mean, self.buffer))


# --- labels_unseen


class Peeking(Centred):
    """Reads labels, and hides the error."""

    def predict(self, images):
        with suppress(Exception):
            np.sum(images.labels)
        return super().predict(images)


# --- batches_left_alone


class Writing(Centred):
    """Writes to pixels that the model ignores."""

    def predict(self, images):
        if images.flags.writeable:
            images[:, 0] = 0
        return super().predict(images)


class WritingTensors(Learning):
    """Writes to a tensor that shares memory with NumPy."""

    def learn(self, batch):
        batch[:, 0] = 0
        return super().learn(batch)


class Unlocking(Centred):
    """Fails on a read-only array."""

    def predict(self, images):
        images[:, 0] += 0
        return super().predict(images)


# --- any_grad_mode


class CallersMode(Learning):
    """Learns only if the caller enables gradients."""

    def predict(self, images):
        return self.learn(to_device(self.model, images))


class ResetInMode(Learning):
    """Copies modules in the caller's mode."""

    def start(self):
        self.module = copy.deepcopy(self.model.module).requires_grad_(True)
        self.optimizer = torch.optim.Adam(self.module.parameters(), 1e-2)


class Mode(Learning):
    """Leaves gradients enabled."""

    def predict(self, images):
        given = super().predict(images)
        torch.set_grad_enabled(True)
        return given


class Graph(Learning):
    """Returns logits with their graph."""

    def learn(self, batch):
        return replace(super().learn(batch), logits=self.module(batch))


# --- rejected_by_gate


class Overhearing(Centred):
    """Learns whenever the frozen model answers."""

    def __init__(self, model):
        super().__init__(model)
        owner = self

        class Spy(Frozen):
            def answer(self, outputs):
                owner.update(outputs)
                return super().answer(outputs)

        self.frozen = Spy(model, Source())


class TwoWays(Centred):
    """Learns in predict, but not in answer."""

    def predict(self, images):
        outputs = self.model(images)
        given = self.answer(outputs)
        self.update(outputs)
        return given

    def answer(self, outputs):
        return Prediction(self.scores(outputs))


# --- bounded_memory


class Hoarding(Centred):
    """Stores every batch, and states so."""

    def start(self):
        super().start()
        self.bank = []

    def update(self, outputs):
        super().update(outputs)
        self.bank.append(outputs.logits.mean(axis=0))

    def retained(self):
        return Retained(buffers=nbytes(self.mean), features=nbytes(*self.bank))


class Listing(Centred):
    """Stores a number per image."""

    def start(self):
        super().start()
        self.log = []

    def update(self, outputs):
        super().update(outputs)
        self.log += outputs.logits[:, 0].tolist()


class Caching(Centred):
    """Never empties a cache that is not part of its state."""

    def __init__(self, model):
        self.cache = {}
        super().__init__(model)

    def update(self, outputs):
        super().update(outputs)
        self.cache[len(self.cache)] = np.array(outputs.logits)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}


class Chaining(Learning):
    """A running loss that keeps the graph of every batch."""

    def start(self):
        super().start()
        self.running = torch.zeros(())

    def learn(self, batch):
        given = super().learn(batch)
        self.running = 0.9 * self.running + self.loss(self.module(batch))
        return given


# --- retained_is_true


class Modest(Learning):
    def retained(self):
        return replace(super().retained(), optimizer=0, parameters=0)

    def start(self):
        super().start()
        self.bank = np.zeros(1000)


class Boasting(Centred):
    def retained(self):
        return Retained(statistics=10_000)


FAULTS = {
    "frozen_unchanged": [Hooking, Asking, Gradients, Noting],
    "sound_answers": [Squeezing, Overflowing, Undecided, Silent, Truthy, InNumPy],
    "rejected_is_frozen": [Refusing, NotInert, InertCounting],
    "reset_exact": [Forgetful, OldOptimizer, OldClosure, OldGenerator],
    "seeded_runs_repeat": [Drawing, DrawingTensors, Peeping],
    "forward_before_update": [Late, LearningAhead],
    "answers_stay": [OneBuffer],
    "labels_unseen": [Peeking],
    "batches_left_alone": [Writing, WritingTensors, Unlocking],
    "any_grad_mode": [CallersMode, ResetInMode, Mode, Graph],
    "rejected_by_gate": [Overhearing, TwoWays],
    "bounded_memory": [Hoarding, Listing, Caching, Chaining],
    "retained_is_true": [Modest, Boasting],
}
PAIRS = [(check, method) for check, found in FAULTS.items() for method in found]


def test_every_check_has_a_fault():
    assert list(FAULTS) == list(checks.ALL)


@pytest.mark.parametrize("method", [Centred, Learning])
def test_correct_methods_pass(method):
    checks.check_method(maker(method), batches())


@pytest.mark.parametrize(("check", "method"), PAIRS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_fault_fails_only_its_check(check, method):
    said = failed(method)
    assert list(said) == [check], said
    assert said[check].startswith(f"{method.__name__} fails {check}: ")
    assert "\n" not in said[check]
