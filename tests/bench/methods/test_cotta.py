"""CoTTA, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from caster import CasterError, wrap
from caster.models.preprocessing import Preprocessing
from caster_bench.methods.gradient.augment import Augmentation
from caster_bench.methods.registry import create
from tests.support.problem import model, source, stream

KINDS = ["batch", "layer", "group", "vit"]


def cotta(kind="batch", augmentations=2, **settings):
    return create("cotta", model(kind), source(kind), augmentations=augmentations, **settings)


def values(parameters):
    return {name: value.detach().clone().numpy() for name, value in parameters.items()}


def student_and_teacher(method):
    return values(method.parameters), values(dict(method.teacher.module.named_parameters()))


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Linear:
    """A linear classifier of images, whose teacher says something else: torch and NumPy."""

    def __init__(self, **settings):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        self.method = create(
            "cotta", wrap(net), optimizer="sgd", lr=0.1, restore=0.0, threshold=0.0, **settings
        )
        self.batch = np.random.default_rng(0).normal(size=(5, 3, 2, 2)).astype(np.float32)
        teacher = self.method.teacher.module[1]
        with torch.no_grad():
            teacher.weight.add_(torch.randn_like(teacher.weight))
        self.rows = self.batch.reshape(5, 12).astype(np.float64)
        self.taught = self.rows @ teacher.weight.double().numpy().T + teacher.bias.double().numpy()
        self.weight, self.bias = (v.double().detach().numpy() for v in net[1].parameters())

    def loss(self, weight):
        said = softmax(self.rows @ weight.T + self.bias)
        taught = softmax(self.taught)
        loss = -(taught * np.log(said)).sum(axis=1).mean()
        if self.method.symmetric:
            loss = (loss - (said * np.log(taught)).sum(axis=1).mean()) / 2
        return loss

    def slope(self, step=1e-6):
        found = np.zeros_like(self.weight)
        for place in np.ndindex(*found.shape):
            up, down = self.weight.copy(), self.weight.copy()
            up[place] += step
            down[place] -= step
            found[place] = (self.loss(up) - self.loss(down)) / (2 * step)
        return found


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_step_is_down_the_cross_entropy_under_the_teacher(symmetric):
    problem = Linear(symmetric=symmetric)
    logits = problem.method.predict(problem.batch).logits
    np.testing.assert_allclose(logits, problem.taught, atol=1e-5)
    found = problem.method.network.module[1].weight.detach()
    np.testing.assert_allclose(found, problem.weight - 0.1 * problem.slope(), atol=1e-6)


@pytest.mark.parametrize("ema", [0.999, 0.9, 0.0])
def test_the_teacher_is_the_students_average(ema):
    method = cotta(ema=ema, restore=0.0, threshold=1.0, lr=0.01)
    _, expected = student_and_teacher(method)
    for batch in stream(3):
        method.predict(batch)
        student, teacher = student_and_teacher(method)
        for name, value in student.items():
            mean = ema * expected[name].astype(np.float64) + (1 - ema) * value
            np.testing.assert_allclose(teacher[name], mean, rtol=1e-5, atol=1e-7)
        expected = teacher
    assert any((student[name] != teacher[name]).any() for name in student) == (ema > 0)


def test_restoration_comes_last_and_takes_a_share_of_the_entries():
    (batch,) = stream(1)
    share = 0.3
    kept, restored = (cotta(threshold=1.0, restore=p) for p in (0.0, share))
    for method in (kept, restored):
        method.predict(batch)
    learnt, teacher = student_and_teacher(kept)
    found, other_teacher = student_and_teacher(restored)
    origin = values(kept.origin)
    places = 0
    for name, value in found.items():
        np.testing.assert_array_equal(teacher[name], other_teacher[name])  # it followed before
        back = value != learnt[name]
        np.testing.assert_array_equal(value[back], origin[name][back])
        places += back.sum()
    moved = sum((learnt[name] != origin[name]).sum() for name in learnt)
    assert moved > 3000
    deviation = np.sqrt(moved * share * (1 - share))
    assert abs(places - moved * share) < 4 * deviation


def test_every_batch_restores_others():
    method = cotta(threshold=1.0, restore=0.5)
    back = []
    for batch in stream(2):
        method.predict(batch)
        back.append(method.parameters["3.weight"].detach() == method.origin["3.weight"])
    both = (back[0] & back[1]).float().mean()
    assert 0.2 < both < 0.3  # independent halves share a quarter


def test_restoring_all_leaves_the_source():
    method = cotta(threshold=1.0, restore=1.0)
    method.predict(stream(1)[0])
    for name, value in method.parameters.items():
        assert torch.equal(value, method.origin[name])


def test_where_the_source_is_sure_the_teacher_answers_plainly():
    (batch,) = stream(1)
    plain = create("bn-adapt", model(), source()).predict(batch).logits
    sure = softmax(plain.double().numpy()).max(axis=1).mean()
    assert torch.equal(cotta(threshold=sure - 1e-4).predict(batch).logits, plain)
    averaged = cotta(threshold=sure + 1e-4).predict(batch).logits
    assert not torch.allclose(averaged, plain, atol=1e-2)


def test_the_source_decides_whether_a_batch_is_a_hard_one():
    method = create("cotta", model(), source(), threshold=0.5, augmentations=2)
    (batch,) = stream(1, shift=0.0)
    placed = torch.from_numpy(batch)
    sure = method.anchor(placed).softmax(1).amax(1).mean()
    assert sure > 0.5
    with torch.no_grad():
        for value in method.teacher.module[-1].parameters():
            value.zero_()  # it is sure of nothing, and is not asked
    state = method._generator.get_state()
    method.taught(placed)
    assert torch.equal(state, method._generator.get_state())  # nothing was drawn
    with torch.no_grad():
        for value in method.anchor.module[-1].parameters():
            value.zero_()
    method.taught(placed)
    assert not torch.equal(state, method._generator.get_state())  # augmentations were


def test_the_anchor_stays_the_source():
    method = cotta(threshold=1.0, lr=0.05, ema=0.0)
    (batch,) = stream(1)
    before = method.anchor(torch.from_numpy(batch))
    for other in stream(3, seed=9):
        method.predict(other)
    assert torch.equal(before, method.anchor(torch.from_numpy(batch)))
    assert not torch.allclose(before, method.teacher(torch.from_numpy(batch)), atol=1e-2)


@pytest.mark.parametrize("stated", [None, (0.1, 0.4)])
def test_logits_are_averaged_over_augmented_copies(stated):
    (batch,) = stream(1, size=6)
    known = {} if stated is None else {"mean": stated[0], "std": stated[1]}
    found = cotta(threshold=1.0, augmentations=4, seed=7, **known).predict(batch).logits
    teacher = create("bn-adapt", model(), source())
    low, high = (batch.min(), batch.max()) if stated is None else (-0.25, 2.25)
    random = torch.Generator().manual_seed(7)
    answers = []
    for _ in range(4):
        drawn = Augmentation.draw(random, 8, 8)
        pixels = torch.from_numpy((np.clip(batch, low, high) - low) / (high - low))
        copies = drawn(pixels).numpy() * (high - low) + low
        answers.append(teacher.predict(copies).logits.numpy())
    np.testing.assert_allclose(found, np.mean(answers, axis=0), atol=1e-4)


def test_a_stated_preprocessing_is_used():
    net = model().module
    how = Preprocessing(1.0, (0.5,) * 3, (0.2, 0.3, 0.4), "NCHW")
    (batch,) = stream(1, size=6)
    settings = {"threshold": 1.0, "augmentations": 2}
    by_model = create("cotta", wrap(net, preprocessing=how), **settings)
    by_hand = create("cotta", wrap(net), mean=0.5, std=(0.2, 0.3, 0.4), **settings)
    by_batch = create("cotta", wrap(net), **settings)
    assert torch.equal(by_model.predict(batch).logits, by_hand.predict(batch).logits)
    assert not torch.allclose(by_hand.forward(batch), by_batch.forward(batch), atol=1e-2)
    with pytest.raises(CasterError, match="states its preprocessing: give cotta no mean and std"):
        create("cotta", wrap(net, preprocessing=how), mean=0.5, std=0.2)


def test_a_student_comes_to_say_what_a_fixed_teacher_says():
    (batch,) = stream(1)
    method = cotta(threshold=1.0, augmentations=4, ema=1.0, restore=0.0, lr=5e-3)
    taught = method.forward(batch).double().numpy()

    def distance():
        said = softmax(method.network(torch.from_numpy(batch)).detach().double().numpy())
        return (softmax(taught) * np.log(softmax(taught) / said)).sum(axis=1).mean()

    before = distance()
    for _ in range(15):
        method.predict(batch)
    assert distance() < 0.7 * before


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_whatever_the_normalisation(kind):
    method = cotta(kind, threshold=1.0, restore=0.0)
    assert not method.inert
    assert list(method.parameters) == [n for n, _ in model(kind).module.named_parameters()]
    for batch in stream(2):
        method.predict(batch)
    moved = [not torch.equal(v, method.origin[k]) for k, v in method.parameters.items()]
    assert sum(moved) >= 0.9 * len(moved)
    model(kind).verify()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 64])
def test_any_batch_can_be_answered(kind, size):
    method = cotta(kind, threshold=1.0)
    for batch in stream(2, size=size):
        prediction = method.predict(batch)
        assert prediction.logits.shape == (size, 4)
        assert torch.isfinite(prediction.logits).all()
        assert not prediction.logits.requires_grad
        assert (prediction.accepted, prediction.reason) == (True, "ungated")


def test_forward_is_what_predict_will_say_and_changes_nothing():
    method, other = cotta(threshold=1.0), cotta(threshold=1.0)
    for batch in stream(3):
        said = [method.forward(batch) for _ in range(2)]
        answer = method.predict(batch).logits  # from before its update
        assert torch.equal(said[0], answer)
        assert torch.equal(said[1], answer)
        assert torch.equal(other.predict(batch).logits, answer)


def test_reset_and_seed():
    batches = stream(3)
    method = cotta(threshold=1.0)
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1]
    first = [method.predict(batch).logits for batch in batches]
    method.reset()
    again = [method.predict(batch).logits for batch in batches]
    assert all(map(torch.equal, first, again))
    other = cotta(threshold=1.0, seed=1)
    assert not torch.equal(other.predict(batches[0]).logits, first[0])
    assert torch.equal(torch_state, torch.random.get_rng_state())
    np.testing.assert_array_equal(numpy_state, np.random.get_state()[1])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_callers_modes_do_not_matter(mode):
    batches = stream(2)
    expected = [cotta(threshold=1.0).predict(batches[0]).logits]
    with mode():
        method = cotta(threshold=1.0)
        found = [method.predict(torch.from_numpy(batch)).logits for batch in batches]
        method.reset()
        assert torch.equal(method.forward(batches[0]), expected[0])
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(method.forward(batches[1]), found[1])  # the second had learnt


def test_bf16():
    method = create("cotta", wrap(model().module, bf16=True), threshold=1.0, augmentations=2)
    plain = cotta(threshold=1.0)
    for batch in stream(2):
        found, expected = method.predict(batch).logits, plain.predict(batch).logits
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0.1)


def test_three_networks_and_the_optimizer_are_retained():
    method = cotta()
    one = method.network.retained()
    held = method.retained()
    assert (held.parameters, held.buffers) == (3 * one.parameters, 3 * one.buffers)
    assert held.optimizer == 0
    method.predict(stream(1)[0])
    steps = 4 * len(method.parameters)
    assert method.retained().optimizer == 2 * one.parameters + steps


def test_a_module_without_parameters_is_inert(caplog):
    frozen = wrap(nn.Sequential(nn.Flatten(), nn.Softmax(dim=1)), head="1")
    method = create("cotta", frozen)
    assert "cotta is inert" in caplog.text
    batch = np.ones((2, 3, 1, 1), dtype=np.float32)
    assert method.predict(batch).reason == "inert"
    assert torch.equal(method.predict(batch).logits, frozen(batch).logits)
    assert torch.equal(method.forward(batch), frozen(batch).logits)
    assert method.retained().total == 0


def test_what_cannot_be_augmented_is_refused():
    method = create("cotta", wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))))
    for use in (method.predict, method.forward):
        with pytest.raises(CasterError, match=r"augments images.*given float32 \(3, 4\)"):
            use(np.ones((3, 4), dtype=np.float32))
    with pytest.raises(CasterError, match=r"given uint8 \(3, 1, 2, 2\)"):
        method.predict(np.ones((3, 1, 2, 2), dtype=np.uint8))
    with pytest.raises(CasterError, match="mean and std of cotta are not for 3 channels"):
        cotta(mean=(0.5, 0.5), std=(1, 1)).predict(stream(1)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.1}, "threshold of cotta is a number from 0 to 1, not 1.1"),
        ({"ema": -0.1}, "ema of cotta is a number from 0 to 1"),
        ({"restore": float("nan")}, "restore of cotta is a number from 0 to 1, not nan"),
        ({"augmentations": 0}, "augmentations of cotta must be 1 or more, not 0"),
        ({"augmentations": 1.5}, "augmentations of cotta must be 1 or more"),
        ({"lr": -1.0}, "lr of cotta is a number from 0 up"),
        ({"mean": 0.5}, "cotta needs both mean and std, or neither"),
        ({"mean": 0.5, "std": 0.0}, "std of cotta must be above 0"),
        ({"mean": 0.5, "std": (0.1, -1, 1)}, "std of cotta must be above 0"),
        ({"mean": (0.5, 0.5), "std": (1, 1, 1)}, "mean and std of cotta are of one length"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(CasterError, match=message):
        create("cotta", model(), source(), **settings)


def test_presets():
    assert cotta(preset="cifar10").threshold == 0.92
    assert cotta(preset="cifar100").threshold == 0.72
    method = cotta(preset="imagenet")
    assert (method.threshold, method.restore, method.lr) == (0.1, 0.001, 0.01)
    assert method.symmetric
    assert isinstance(method.optimizer, torch.optim.SGD)
