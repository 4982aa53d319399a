"""The front door: one Adapter for both mechanisms, its streams, saved and resumed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import caster
from caster import Adapter, CasterError
from caster_bench.methods.registry import create
from tests.support.answers import same_answer
from tests.support.problem import make_images, model, source

SIZES = (8, 32, 64, 100)


@pytest.fixture(scope="module")
def fitted():
    return caster.fit(model("batch"), source("batch").batches)


@pytest.fixture(scope="module")
def batches():
    images, _ = make_images(sum(SIZES), seed=11, shift=0.6)
    return np.split(images, np.cumsum(SIZES)[:-1])


def test_a_torch_module_is_adapted_by_its_layers(fitted):
    assert fitted.mechanism == "layers"
    assert Adapter(fitted.model, fitted.state, mechanism="features").mechanism == "features"


def test_it_answers_as_the_benchmark_s_method_does(fitted, batches):
    method = create("mixture-transport", fitted.model, fitted.state, every=1)
    for out, batch in zip(fitted.stream(batches), batches, strict=True):
        expected = method.predict(batch)
        assert torch.equal(out.scores, expected.logits)
        assert (out.verdict.accepted, out.verdict.ratio) == (expected.accepted, expected.ratio)
        np.testing.assert_array_equal(out.labels, expected.logits.argmax(1))


def test_a_rejected_batch_gets_the_frozen_answer_bit_for_bit(fitted, batches):
    strict = Adapter(fitted.model, fitted.state, tau=1e-6)
    for batch, out in zip(batches, strict.stream(batches), strict=True):
        assert not out.verdict.accepted
        assert torch.equal(out.scores, fitted.model(batch).logits)
        assert not torch.equal(out.adapted, out.scores)


def test_logits_must_come_with_every_batch():
    rng, logits = np.random.default_rng(0), iter([None, np.eye(3)[np.arange(30) % 3]])
    net = caster.wrap(lambda batch: caster.Outputs(batch, next(logits)))
    chunks = [(rng.normal(size=(30, 4)), np.arange(30) % 3) for _ in range(2)]
    with pytest.raises(CasterError, match="logits must come with every batch"):
        caster.fit(net, chunks)


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_a_call_is_a_stream_of_one_batch(fitted, batches, mechanism):
    adapter = Adapter(fitted.model, fitted.state, mechanism=mechanism)
    for batch in batches:
        same_answer(adapter(batch), adapter.new_stream()(batch))


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_streams_do_not_meet(fitted, batches, mechanism):
    adapter = Adapter(fitted.model, fitted.state, mechanism=mechanism)
    alone = list(adapter.stream(batches))
    one, other = adapter.new_stream(), adapter.new_stream()
    for batch, expected in zip(batches, alone, strict=True):
        other(batch * 3.0)
        same_answer(one(batch), expected)


@pytest.mark.parametrize("to_file", [False, True])
@pytest.mark.parametrize("mechanism", ["layers", "features"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_stream_resumes_exactly(fitted, batches, mechanism, to_file, every, tmp_path):
    adapter = Adapter(fitted.model, fitted.state, mechanism=mechanism, every=every)
    stream = adapter.new_stream()
    for batch in batches[:3]:
        stream(batch)
    saved = stream.state()
    if to_file:
        stream.save(tmp_path / "stream.caster")
        saved = tmp_path / "stream.caster"
    resumed = Adapter(fitted.model, fitted.state, mechanism=mechanism, every=every).resume(saved)
    assert resumed.samples == stream.samples == sum(SIZES[:3])
    for batch in (batches[3], batches[0], batches[1]):
        same_answer(resumed(batch), stream(batch))


def test_a_state_does_not_follow_its_stream(fitted, batches):
    stream = fitted.new_stream()
    stream(batches[0])
    saved = stream.state()
    before = {name: value.copy() for name, value in saved.items()}
    stream(batches[1])
    for name, value in before.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)


def test_a_reset_stream_is_a_new_one(fitted, batches):
    stream = fitted.new_stream()
    first = stream(batches[0])
    stream(batches[1])
    stream.reset()
    assert stream.samples == 0
    same_answer(stream(batches[0]), first)


def test_streams_of_something_else_are_rejected(fitted, batches, tmp_path):
    stream = fitted.new_stream()
    stream(batches[0])
    stream.save(tmp_path / "stream.caster")
    other = caster.fit(model("layer"), source("layer").batches)
    with pytest.raises(CasterError, match="another state"):
        other.resume(tmp_path / "stream.caster")
    with pytest.raises(CasterError, match="another state"):
        other.resume(stream.state())
    with pytest.raises(CasterError, match="not the state of a stream"):
        fitted.resume({"samples": np.array(3)})
    features = Adapter(fitted.model, fitted.state, mechanism="features")
    with pytest.raises(CasterError, match="mechanism='features'"):
        features.resume(stream.state())
    with pytest.raises(CasterError, match="mechanism='layers'"):
        fitted.resume(features.new_stream().state())
    fitted.save(tmp_path / "state.caster")
    with pytest.raises(CasterError, match="not a saved stream"):
        fitted.resume(tmp_path / "state.caster")
    old = tmp_path / "old.caster"
    old.write_bytes((tmp_path / "stream.caster").read_bytes().replace(b"stream 2", b"stream 1"))
    with pytest.raises(CasterError, match="saved by another version of caster: start a new stream"):
        fitted.resume(old)


REMEMBERED = [
    *(f"{which}.1:in.{part}" for which in ("past", "recent") for part in ("mean", "variance")),
    *("past.1:in.covariance", "labels.last", "labels.evidence", "labels.totals", "labels.recent"),
    *("mixture", "certificate.rows"),
]


@pytest.mark.parametrize("name", REMEMBERED)
@pytest.mark.parametrize("change", ["narrow", "not finite", "missing"])
def test_a_damaged_state_is_rejected_at_once(fitted, batches, name, change):
    stream = fitted.new_stream()
    stream(batches[0])
    state = stream.state()
    if change == "narrow":
        state[name] = state[name][..., 0]
    elif change == "not finite":
        state[name] = np.full_like(state[name], np.nan)
    else:
        del state[name]
    with pytest.raises(CasterError, match="not the state of a stream"):
        fitted.resume(state)


@pytest.mark.parametrize("name", ["past.elsewhere:in", "past.1:in", "recent.1:in", "labels"])
def test_a_count_of_nothing_is_rejected(fitted, batches, name):
    stream = fitted.new_stream()
    stream(batches[0])
    with pytest.raises(CasterError, match="not the state of a stream"):
        fitted.resume(stream.state() | {f"{name}.count": np.array(np.nan)})


def test_what_an_adapter_was_told_is_not_saved(fitted, tmp_path):
    changed = Adapter(fitted.model, fitted.state, tau=1.7, safeguards=False)
    changed.save(tmp_path / "s.caster")
    assert caster.load(tmp_path / "s.caster").settings == fitted.state.settings


def test_the_state_cannot_come_before_the_model(fitted):
    with pytest.raises(CasterError, match="not TorchModel: the model comes first"):
        Adapter("s.caster", fitted.model)


def test_a_head_that_is_seldom_right_is_warned_of(caplog):
    rng = np.random.default_rng(0)
    batches = [(images, rng.permutation(labels)) for images, labels in source("batch").batches]
    caster.fit(model("batch"), batches)
    (message,) = (line for line in caplog.messages if "the model's head is right on only" in line)
    assert "--" not in message  # Python has no such options


def test_a_head_whose_outputs_are_mixed_up_is_warned_of(caplog):
    batches = [(images, (labels + 1) % 4) for images, labels in source("batch").batches]
    caster.fit(model("batch"), batches)
    assert "renamed: 0 to 1, " in caplog.text
    caplog.clear()
    state = caster.fit(model("batch"), batches, classes=[1, 2, 3, 0]).state
    assert state.head == (3, 0, 1, 2)
    assert "renamed" not in caplog.text


def test_classes_that_the_source_lacks_are_warned_of(caplog):
    batches = [(x[y < 3], y[y < 3]) for x, y in source("batch").batches]
    caster.fit(model("batch"), batches)
    assert "the source has 3 of the model's 4 classes" in caplog.text
    caplog.clear()
    caster.fit(model("batch"), source("batch").batches)
    assert not caplog.text


def test_adapt_takes_outputs(fitted, batches):
    with pytest.raises(CasterError, match="adapt takes Outputs of the model, not a ndarray"):
        fitted.adapt(batches[0])


def test_a_stream_too_short_to_rest_compares_every_batch(fitted, batches):
    adapter = Adapter(fitted.model, fitted.state, every=8, tau=1e6)
    for out in adapter.stream([*batches, *batches, *batches]):
        assert out.verdict.reason == "accepted"
        assert out.frozen is not None


def test_calls_from_several_threads_are_answered_as_alone(fitted, batches):
    expected = [fitted(batch) for batch in batches]
    found = [None] * len(batches)

    def call(i):
        found[i] = fitted(batches[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        same_answer(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "magic"}, "mechanism is 'auto', 'layers' or 'features', not 'magic'"),
        ({"tau": -1.0}, "tau must be"),
        ({"every": 0}, "every must be 1 or more"),
    ],
)
def test_bad_arguments(fitted, changes, message):
    with pytest.raises(CasterError, match=message):
        Adapter(fitted.model, fitted.state, **changes)


def test_layers_that_cannot_be_had():
    images, labels = next(iter(source("batch").batches))
    function = caster.wrap(lambda batch: (batch.mean((2, 3)), batch.mean((2, 3))), version="1")
    with pytest.raises(CasterError, match="layers need a torch module"):
        caster.fit(function, [(images, labels)], layers=True)
    with pytest.raises(CasterError, match="own classes"):
        caster.fit(model("batch"), source("batch").batches, layers=True, use_head=False)
    features = caster.fit(model("batch"), source("batch").batches, layers=False)
    assert features.mechanism == "features"
    with pytest.raises(CasterError, match="the state has no layers"):
        Adapter(features.model, features.state, mechanism="layers")
    with pytest.raises(CasterError, match=r"caster\.wrap"):
        Adapter(features.model.module, features.state)
    with pytest.raises(CasterError, match=r"caster\.wrap"):
        caster.fit(features.model.module, [])
