"""A settled stream rests: constant maps, nothing measured, until its outputs change."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import onnx
import pytest
import torch

import caster
from caster import Adapter, CasterError, wrap
from caster.adapt.layer_passes import ImplausibleSamples, Pass
from caster.adapt.layer_transport import LayerTransport
from caster.adapt.output_monitor import OutputMonitor
from caster.core.arrays import to_numpy
from caster.models.torch import TorchModel
from tests.support.answers import PARTS, same_answer, same_state
from tests.support.mixture_problem import (
    N_CLASSES,
    compared,
    make_images,
    model,
    run,
    shuffled,
    source_batches,
)
from tests.support.onnx_export import exported
from tests.support.sampling import first_fast, sampled

SIZE, BATCHES = 64, 45
FULL = 32  # batches that fill the memory of 2,048; a window of four ends there
CHANGE = 40  # a batch in the middle of the first rest
TAIL = 2.0 ** -np.arange(N_CLASSES)


@cache
def fitted(kind="batch") -> Adapter:
    return caster.fit(model(kind), source_batches(2400))


@cache
def labels_of(n=BATCHES * SIZE, tail=False):
    return shuffled(n, 7, TAIL if tail else None)


@cache
def plain_images(tail=False):
    return make_images(labels_of(tail=tail), 8, shift=0.5)


def other_shift():
    x = plain_images().copy()
    x[CHANGE * SIZE :] = make_images(labels_of()[CHANGE * SIZE :], 9, shift=1.0)
    return x


def sorted_classes():
    y = labels_of().copy()
    y[CHANGE * SIZE :] = np.sort(y[CHANGE * SIZE :])
    return make_images(y, 8, shift=0.5)


CHANGES = {"shift": other_shift, "sorted": sorted_classes}
STREAMS = {"plain": plain_images, **CHANGES, "tail": lambda: plain_images(tail=True)}


def batches_of(x, size=SIZE):
    return [x[i : i + size] for i in range(0, len(x), size)]


def is_resting(stream):
    return stream._layers._rest is not None


def answered(stream, batches):
    """The answers, and whether each was given in a rest."""
    pairs = [(stream(batch), is_resting(stream)) for batch in batches]
    return [out for out, _ in pairs], [rests for _, rests in pairs]


@cache
def answers(name, size=SIZE, kind="batch"):
    """Answers to a stream, whether each was given in a rest, and the stream at its end."""
    stream = fitted(kind).new_stream()
    return *answered(stream, batches_of(STREAMS[name](), size)), stream


@cache
def state_before(at, size):
    """The state of a stream one batch before it has met `at` batches of 64."""
    stream = fitted().new_stream()
    for batch in batches_of(plain_images()[: at * SIZE], size)[:-1]:
        stream(batch)
    return stream.state()


def before_change(adapter=None, at=CHANGE, size=SIZE):
    """A stream in a rest: resumed, which continues bit for bit, or of an adapter from its start."""
    batches = batches_of(plain_images()[: at * SIZE], size)
    if adapter is None:
        stream, batches = fitted().resume(state_before(at, size)), batches[-1:]
    else:
        stream = adapter.new_stream()
    for batch in batches:
        stream(batch)
    assert is_resting(stream)
    return stream


class Awake(LayerTransport):
    """A reference: the same stream, which measures every batch."""

    def _rests(self, samples):
        return False


def awake(stream):
    """A copy of a stream that never rests."""
    copy = stream.adapter.resume(stream.state())
    copy._layers.__class__ = Awake
    return copy


def same(one, other):
    same_answer(one, other, (*PARTS, "ids"))


# --- when a stream rests -------------------------------------------------------------------------


@pytest.mark.parametrize("size", first_fast([32, 48, SIZE]))
def test_a_long_shuffled_stream_rests_once_its_memory_is_full(size):
    outs, resting, _ = answers("plain", size)
    window = math.ceil(256 / size)  # in batches
    first = next(i for i in range(0, len(outs), window) if (i + 1) * size >= 2048)
    assert resting == [i >= first for i in range(len(outs))]
    for out, rests in zip(outs, resting, strict=True):
        if rests:
            assert (out.verdict.accepted, out.verdict.reason) == (True, "rest")
            assert math.isnan(out.verdict.ratio)
            assert out.frozen is None
            assert not out.disputed.any()


def test_nothing_is_measured_in_a_rest(monkeypatch):
    stream = before_change(at=FULL + 1)
    past = dict(stream._layers._alignment.target.past)
    alignment = type(stream._layers._alignment)
    monkeypatch.setattr(alignment, "__call__", lambda *args: pytest.fail("a pass was measured"))
    monkeypatch.setattr(type(stream.adapter.model), "__call__", lambda *args: pytest.fail("frozen"))
    for batch in batches_of(plain_images())[FULL + 1 :]:
        stream(batch)
        assert is_resting(stream)
    assert stream._layers._alignment.target.past == past


@cache
def two_rests_images():
    return make_images(shuffled(66 * SIZE, 21), 12, 0.5)


@cache
def two_rests():
    """Answers to a stream that rests twice, and whether each was given in a rest."""
    return answered(fitted().new_stream(), batches_of(two_rests_images()))


def test_a_rest_ends_when_a_comparison_is_due():
    outs, resting = two_rests()
    due = [i for i, out in enumerate(outs) if out.verdict.reason == "accepted"]
    assert due == [*range(FULL), 2 * FULL, 2 * FULL + 1]  # a rest as long as the verdict has stood
    assert resting == [i >= FULL and i not in due for i in range(66)]


@pytest.mark.parametrize("every", first_fast([8, 2, 1]))
def test_every_bounds_a_rest(every):
    adapter = Adapter(model(), fitted().state, every=every)
    outs, resting = answered(adapter.new_stream(), batches_of(plain_images()))
    reasons = [out.verdict.reason for out in outs]
    assert any(resting) == (every > 1)
    assert ("rest" in reasons) == (every > 1)
    runs = "".join("r" if reason == "rest" else " " for reason in reasons).split()
    assert max(map(len, runs), default=0) <= (every - 1) * 256 // SIZE


@pytest.mark.slow
def test_streams_in_runs_never_rest():
    y = np.sort(labels_of())
    stream = fitted().new_stream()
    _, resting = answered(stream, batches_of(make_images(y, 8, shift=0.5)))
    assert stream._layers._classes.labels.chain.is_correlated
    assert not any(resting)


def test_rejected_streams_never_rest():
    adapter = Adapter(model(), fitted().state, tau=1e-6)
    outs, resting = answered(adapter.new_stream(), batches_of(plain_images()))
    assert not any(out.verdict.accepted for out in outs)
    assert not any(resting)


def test_calls_without_a_stream_never_rest():
    adapter = caster.Adapter(model(), fitted().state)
    for batch in batches_of(plain_images(), 2048)[:2]:
        assert adapter(batch).verdict.reason == "accepted"


@pytest.mark.slow
def test_a_stream_that_is_reset_starts_again():
    stream = before_change()
    stream.reset()
    assert not is_resting(stream)
    new = fitted().new_stream()
    for batch in batches_of(plain_images())[:5]:
        same(stream(batch), new(batch))
    same_state(stream.state(), new.state())


@pytest.mark.slow
def test_labels_that_decide_end_a_rest():
    stream = fitted().new_stream(alpha=0.5)
    outs, resting = answered(stream, batches_of(plain_images())[:CHANGE])
    assert resting[-1]
    for out in outs:
        if out.frozen is not None:
            stream.feedback(out.ids, to_numpy(out.frozen).argmax(axis=1))
    assert stream.betting.position == "revoked"
    out = stream(batches_of(plain_images())[CHANGE])
    assert (out.verdict.accepted, out.verdict.reason) == (False, "feedback")
    assert not is_resting(stream)


# --- answers in a rest ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", first_fast(["batch", "layer"]))
def test_answers_in_a_rest_are_those_of_the_same_maps_by_hooks(kind):
    stream = before_change(fitted(kind), at=FULL + 2)
    reference = stream.adapter.resume(stream.state())._layers._alignment
    how = Pass(full=True, past_only=True)
    for batch in batches_of(plain_images())[FULL + 2 : CHANGE]:
        out, expected = stream(batch), reference(batch, how)
        assert is_resting(stream)
        torch.testing.assert_close(out.scores, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_accuracy_is_that_of_comparing_every_batch():
    y, x = labels_of(), plain_images()
    found = run(x, y, SIZE, fitted().new_stream())
    always = run(x, y, SIZE, compared(fitted()).new_stream())
    rest = slice(FULL, None)
    assert abs(found.accuracy(rest) - always.accuracy(rest)) < 0.01
    assert found.accuracy(rest) > found.frozen(rest) + 0.02


@pytest.mark.slow
def test_a_long_tail_rests_with_corrected_scores():
    y, x = labels_of(tail=True), plain_images(tail=True)
    adapter = caster.Adapter(fitted().model, fitted().state, tau=1.1)  # the frozen one is as good
    stream = adapter.new_stream()
    found = run(x[: CHANGE * SIZE], y[: CHANGE * SIZE], SIZE, stream)
    assert is_resting(stream)
    assert all(found.knows[3:FULL])  # from 256 samples on
    labels = stream._layers._classes.labels
    assert labels.kind == "prior"
    reference = stream.adapter.resume(stream.state())._layers._alignment
    how = Pass(mixture=stream._layers._classes.mixture, past_only=True)
    correction = torch.from_numpy(np.log(labels.prior / labels.chain.prior)).float()
    assert correction.max() - correction.min() > 1  # of a prior from 1/2 to 1/64
    batch = x[CHANGE * SIZE : (CHANGE + 1) * SIZE]
    expected = reference(batch, how).logits + correction
    out = stream(batch)
    assert is_resting(stream)
    torch.testing.assert_close(out.scores, expected, rtol=1e-4, atol=1e-4)
    always = run(x[: CHANGE * SIZE], y[: CHANGE * SIZE], SIZE, compared(fitted()).new_stream())
    rest = slice(FULL, CHANGE)
    assert found.accuracy(rest) >= always.accuracy(rest) - 0.01


# --- comparisons between rests -------------------------------------------------------------------


def moments_of(alignment, batch, how):
    outputs = alignment(batch, how)
    found = {
        **alignment.target.pending,
        **{(s, "new"): m for s, m in alignment.target.newest.items()},
    }
    return outputs, found


@pytest.mark.parametrize("kind", first_fast(["batch", "layer"]))
def test_a_batch_in_parts_has_the_answers_and_moments_of_the_whole(kind, monkeypatch):
    """Parts of 24, 24 and 16: moments are of all samples alike, and covariances too."""
    alignment = before_change(fitted(kind), at=FULL + 1)._layers._alignment
    monkeypatch.setattr("caster.adapt.alignment.PART", 24 * 3 * 8 * 8)
    batch, how = batches_of(other_shift())[CHANGE], Pass(full=True, past_only=True)
    (expected, whole), (found, parts) = (
        moments_of(alignment, batch, each) for each in (how, replace(how, in_parts=True))
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.features, expected.features, rtol=1e-5, atol=1e-5)
    assert parts.keys() == whole.keys()
    assert any(moments.covariance is not None for moments in whole.values())
    for key, moments in whole.items():
        assert parts[key].count == moments.count
        for name in ("mean", "variance", "covariance"):
            ours, theirs = getattr(parts[key], name), getattr(moments, name)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_implausible_samples_are_found_in_every_part(monkeypatch):
    alignment = before_change(at=FULL + 1)._layers._alignment
    monkeypatch.setattr("caster.adapt.alignment.PART", 24 * 3 * 8 * 8)
    bad = batches_of(plain_images())[CHANGE].copy()
    bad[[3, 30, 63]] *= 1e6
    with pytest.raises(ImplausibleSamples) as found:
        alignment(bad, Pass(full=True, past_only=True, in_parts=True))
    assert torch.where(~found.value.kept)[0].tolist() == [3, 30, 63]
    assert not alignment.target.pending


@pytest.mark.slow
def test_hooks_of_the_user_see_whole_batches(monkeypatch):
    monkeypatch.setattr("caster.adapt.alignment.PART", 24 * 3 * 8 * 8)
    stream = before_change(at=FULL + 1)
    aligned, how = stream._layers._alignment, Pass(full=True, past_only=True, in_parts=True)
    batch, seen = batches_of(plain_images())[CHANGE], []
    expected = aligned(batch, how).logits
    note = lambda net, args, output: seen.append(len(output))  # noqa: E731
    handle = aligned.model.module.register_forward_hook(note)
    try:
        hooked = aligned.new_stream()
        hooked.target.past = dict(aligned.target.past)
        torch.testing.assert_close(hooked(batch, how).logits, expected, rtol=1e-5, atol=1e-5)
        assert hooked.target.pending.keys() == aligned.target.pending.keys()
    finally:
        handle.remove()
    assert seen == [SIZE]


@pytest.mark.slow
def test_only_comparisons_between_rests_pass_in_parts(monkeypatch):
    """Their answers are those of whole batches, and so is what the stream then knows."""
    expected, resting = two_rests()
    monkeypatch.setattr("caster.adapt.alignment.PART", 16 * 3 * 8 * 8)
    sizes, run_placed = [], TorchModel.run_placed
    monkeypatch.setattr(
        TorchModel,
        "run_placed",
        lambda self, batch: sizes.append(len(batch)) or run_placed(self, batch),
    )
    stream, passes = fitted().new_stream(), []
    for batch, other in zip(batches_of(two_rests_images()), expected, strict=True):
        sizes.clear()
        out = stream(batch)
        passes.append(sizes.copy())
        assert repr(out.verdict) == repr(other.verdict)
        torch.testing.assert_close(out.scores, other.scores, rtol=1e-4, atol=1e-4)
    between = 2 * FULL
    assert not resting[between]
    assert passes[between] == [SIZE, 16, 16, 16, 16]  # frozen, and with aligned layers
    assert passes[between - 1] == [SIZE]
    assert all(16 not in found for found in passes[: FULL - 4])


# --- changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", first_fast(CHANGES))
def test_a_change_ends_the_rest_at_once(change):
    """As if the stream had never rested, and the verdict stood from this batch on."""
    stream = before_change()
    reference = awake(stream)
    reference._layers._schedule._stable = 0
    for batch in batches_of(CHANGES[change]())[CHANGE:]:
        out = stream(batch)
        assert not is_resting(stream)
        same(out, reference(batch))
    same_state(stream.state(), reference.state())
    if change == "sorted":
        assert stream._layers._classes.labels.chain.is_correlated
    else:
        assert stream._layers._alignment.target.samples == 5 * SIZE  # the past is forgotten


def test_without_the_monitor_changes_would_go_unnoticed(monkeypatch):
    monkeypatch.setattr(OutputMonitor, "_is_unchanged", lambda *args: True)
    for change in CHANGES.values():
        stream = before_change()
        _, resting = answered(stream, batches_of(change())[CHANGE:])
        assert all(resting)


def test_images_that_are_not_finite_are_an_error_and_leave_no_trace():
    stream, clean = before_change(), before_change()
    batches = batches_of(plain_images())
    bad = batches[CHANGE].copy()
    bad[3, 0, 0, 0] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        stream(bad)
    same_state(stream.state(), clean.state())
    for batch in batches[CHANGE:]:
        same(stream(batch), clean(batch))
        assert is_resting(stream)


def test_images_that_are_implausible_are_answered_as_frozen():
    stream = before_change()
    reference = awake(stream)
    bad = batches_of(plain_images())[CHANGE].copy()
    bad[:3] *= 1e6
    out = stream(bad)
    assert out.implausible == 3
    same(out, reference(bad))
    assert not is_resting(stream)


def settled_stream():
    """A stream that rests from its next batch on."""
    return fitted().resume(state_before(FULL + 1, SIZE))


def test_implausible_images_may_come_when_a_rest_begins():
    stream = settled_stream()
    bad = batches_of(plain_images())[FULL].copy()
    bad[:3] *= 1e6
    assert stream(bad).implausible == 3


def test_images_that_are_not_finite_may_come_when_a_rest_begins():
    stream = settled_stream()
    reference, batches = awake(stream), batches_of(plain_images())
    bad = batches[FULL].copy()
    bad[3] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        stream(bad)
    same_state(stream.state(), reference.state())
    out, expected = stream(batches[FULL]), reference(batches[FULL])
    assert is_resting(stream)
    torch.testing.assert_close(out.scores, expected.scores, rtol=1e-4, atol=1e-4)


def test_maps_are_folded_into_convolutions():
    folded = before_change(at=FULL + 1)._layers._alignment._folded
    assert all(each._convolution is not None for each in folded._maps.values())


SMALL = 16


@cache
def small_state():
    return before_change(at=FULL + 3, size=SMALL).state()


def resting_on_small_batches():
    stream = fitted().resume(small_state())
    stream(plain_images()[:SMALL])
    assert is_resting(stream)
    stream._layers._monitor.begin()  # a block starts
    return stream


@pytest.mark.slow
def test_small_batches_are_noticed_within_a_block():
    stream = resting_on_small_batches()
    _, resting = answered(stream, batches_of(other_shift()[CHANGE * SIZE :], SMALL)[:8])
    assert resting == [True] * 3 + [False] * 5


@pytest.mark.slow
def test_a_small_batch_that_is_not_finite_is_an_error():
    stream = resting_on_small_batches()
    bad = plain_images()[:SMALL].copy()
    bad[0, 0, 0, 0] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        stream(bad)


@pytest.mark.slow
def test_a_small_batch_that_is_implausible_enters_no_statistics():
    """Nothing is measured in a rest, so it is answered like others: docs/threat-model.md."""
    stream = resting_on_small_batches()
    past = dict(stream._layers._alignment.target.past)
    assert stream(1e6 * plain_images()[:SMALL]).verdict.reason == "rest"
    assert stream._layers._alignment.target.past == past


# --- batches begun ahead -------------------------------------------------------------------------


def begun_ahead(stream, batches):
    """Answers with the next batch begun before each is awaited."""
    outs, finish = [], None
    for batch in batches:
        following = stream.begin(batch)
        if finish is not None:
            outs.append(finish())
        finish = following
    return [*outs, finish()]


@pytest.mark.parametrize(
    ("name", "size"),
    first_fast([*((name, SIZE) for name in STREAMS), ("shift", 24), ("sorted", 256)]),
)
def test_batches_begun_ahead_are_answered_alike(name, size):
    expected, resting, one = answers(name, size)
    assert any(resting)
    other = fitted().new_stream()
    found = begun_ahead(other, batches_of(STREAMS[name](), size))
    for ahead, out in zip(found, expected, strict=True):
        same(ahead, out)
    same_state(other.state(), one.state())


def alarm_at(monkeypatch, batch):
    """A monitor that alarms on one batch of an unchanged stream."""
    judge = OutputMonitor.judge

    def alarming(monitor, features, scores, *numbers):
        usual, alarm = judge(monitor, features, scores, *numbers), len(seen) == batch
        seen.append(scores)
        return lambda: usual() and not alarm

    seen = []
    monkeypatch.setattr(OutputMonitor, "judge", alarming)


def false_alarm(monkeypatch, size):
    """Answers to an unchanged stream with an alarm: one by one, and begun ahead."""
    batches = batches_of(plain_images(), size)
    with monkeypatch.context() as patch:
        alarm_at(patch, 2)
        expected, resting = answered(fitted().new_stream(), batches)
    assert not all(resting[resting.index(True) :])
    with monkeypatch.context() as patch:
        alarm_at(patch, 2)
        return expected, begun_ahead(fitted().new_stream(), batches)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SIZE, 256])
def test_a_false_alarm_is_answered_nearly_alike_with_batches_begun_ahead(monkeypatch, size):
    for one, other in zip(*false_alarm(monkeypatch, size), strict=True):
        assert repr(one.verdict) == repr(other.verdict)
        np.testing.assert_array_equal(one.ids, other.ids)
        assert np.mean(to_numpy(one.labels) == to_numpy(other.labels)) > 0.95


@pytest.mark.slow
def test_a_false_alarm_is_answered_alike_with_batches_begun_ahead(monkeypatch):
    for one, other in zip(*false_alarm(monkeypatch, SIZE), strict=True):
        same(one, other)


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_an_answer_that_is_awaited_twice_is_recorded_once(mechanism):
    stream = Adapter(model(), fitted().state, mechanism=mechanism).new_stream()
    first, second, *_ = batches_of(plain_images())
    finish = stream.begin(first)
    assert finish() is finish()
    assert stream.samples == len(first)
    assert stream(second).ids[0] == len(first)


def test_an_error_is_raised_for_its_own_batch():
    stream, clean = before_change(), before_change()
    batches = batches_of(plain_images())[CHANGE : CHANGE + 3]
    bad = batches[1].copy()
    bad[5] = np.nan
    first, second, third = (stream.begin(batch) for batch in (batches[0], bad, batches[2]))
    same(first(), clean(batches[0]))
    for _ in range(2):
        with pytest.raises(CasterError, match="not finite"):
            second()
    assert third().labels.tolist() == clean(batches[2]).labels.tolist()


# --- saved in a rest -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "change"), first_fast(sampled(product([SIZE, 24], [*CHANGES, None]), 4))
)
def test_a_stream_saved_in_a_rest_continues_bit_for_bit(size, change, tmp_path):
    """With 24 images in a batch, some wait to be judged when it is saved."""
    x = CHANGES[change]() if change else plain_images()
    stream = before_change(fitted(), at=CHANGE - 3)
    batches = batches_of(x[(CHANGE - 3) * SIZE :], size)
    for batch in batches[:4]:
        stream(batch)
    assert is_resting(stream) == (size == 24 or change is None)
    stream.save(tmp_path / "stream")
    others = [
        stream.adapter.resume(stream.state()),
        Adapter(model(), fitted().state).resume(tmp_path / "stream"),
    ]
    for batch in batches[4:]:
        out = stream(batch)
        for other in others:
            same(other(batch), out)
            assert is_resting(other) == is_resting(stream)
    for other in others:
        same_state(other.state(), stream.state())


# --- ONNX ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_graph(tmp_path_factory):
    """Adapters of the same network as an ONNX file."""
    folder = tmp_path_factory.mktemp("rest")

    @cache
    def made(kind):
        path = folder / f"{kind}.onnx"
        onnx.save(exported(model(kind).module, torch.zeros(2, 3, 8, 8)), path)
        return caster.fit(wrap(path), source_batches(2400))

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("batch", "shift"),
        ("layer", "plain"),
        pytest.param("batch", "tail", marks=pytest.mark.whole),
        pytest.param("batch", "sorted", marks=pytest.mark.whole),
    ],
)
def test_torch_and_onnx_rest_alike(of_graph, kind, name):
    expected, resting, _ = answers(name, kind=kind)
    found, alike = answered(of_graph(kind).new_stream(), batches_of(STREAMS[name]()))
    assert any(resting)
    assert resting == alike
    for one, other in zip(found, expected, strict=True):
        assert one.verdict.reason == other.verdict.reason
        scale = float(other.scores.abs().max())
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-4 * scale)


@pytest.mark.slow
def test_an_onnx_stream_saved_in_a_rest_continues_bit_for_bit(of_graph):
    stream = before_change(of_graph("batch"))
    other = stream.adapter.resume(stream.state())
    for batch in batches_of(other_shift())[CHANGE - 2 :]:
        same(other(batch), stream(batch))
    same_state(other.state(), stream.state())
