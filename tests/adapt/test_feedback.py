"""Labels that trickle in: they decide for a stream, and are remembered with it."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import caster
from caster import Adapter, CasterError
from caster.adapt import feedback
from caster.core.arrays import to_numpy
from caster.core.betting import BettingTest
from tests.support.answers import same_answer
from tests.support.problem import N_CLASSES, make_images, model, source
from tests.support.sampling import sampled

MECHANISMS = ("layers", "features")
NEVER, ALWAYS = 1e-6, 1e6  # tau: the certificate rejects or accepts every batch


@pytest.fixture(scope="module")
def fitted():
    return caster.fit(model("batch"), source("batch").batches)


@pytest.fixture(scope="module")
def shifted():
    """Batches on which adapted answers are right more often, and their labels."""
    images, labels = make_images(1280, seed=5, shift=0.6)
    return np.split(images, 20), np.split(labels, 20)


def make(fitted, mechanism, tau=NEVER, every=1, **options):
    """An adapter that compares every batch: labels count where both answers are known."""
    options |= {"mechanism": mechanism, "tau": tau, "every": every}
    return Adapter(fitted.model, fitted.state, **options)


def judge(out, labels):
    """W of every sample, one by one."""
    adapted, frozen = (to_numpy(scores).argmax(axis=1) for scores in (out.adapted, out.frozen))
    rows = zip(adapted, frozen, labels, strict=True)
    return [int(a == y) - int(f == y) for a, f, y in rows]


def worst(out, frozen_is_right=True):
    """Labels with which the adapted or the frozen answer is wrong wherever the two differ."""
    return to_numpy(out.frozen if frozen_is_right else out.adapted).argmax(axis=1)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_labels_overturn_a_wrong_rejection(fitted, shifted, mechanism):
    stream = make(fitted, mechanism).new_stream()
    expected, counted, decided = BettingTest(), 0, []
    for batch, labels in zip(*shifted, strict=True):
        out = stream(batch)
        if stream.betting.position == "accepted":
            decided.append((out, labels))
            assert (out.verdict.accepted, out.verdict.reason) == (True, "feedback")
            assert out.scores is out.adapted
            assert out.labels is out.proposed
        else:
            assert not out.verdict.accepted
            assert out.verdict.reason != "feedback"
        Ws = judge(out, labels)
        counted += stream.feedback(out.ids, labels)
        for W in Ws:
            expected = expected.after(W)
        assert stream.betting == expected
    assert stream.betting.position == "accepted"
    assert decided
    gained = [sum(judge(out, labels)) for out, labels in decided]
    assert sum(gained) >= 0
    assert 8 <= counted < 100


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_labels_revoke_a_wrong_acceptance(fitted, shifted, mechanism):
    stream = make(fitted, mechanism, ALWAYS, safeguards=False).new_stream()
    for batch in shifted[0]:
        out = stream(batch)
        if stream.betting.position == "revoked":
            assert (out.verdict.accepted, out.verdict.reason) == (False, "feedback")
            assert np.array_equal(out.scores, fitted.model(batch).logits)
            assert np.array_equal(out.labels, to_numpy(out.frozen).argmax(axis=1))
        stream.feedback(out.ids, worst(out))
    assert stream.betting.position == "revoked"
    assert out.verdict.reason == "feedback"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_acceptance_by_labels_is_revoked_by_labels(fitted, shifted, mechanism):
    stream = make(fitted, mechanism).new_stream()
    seen = []
    for pass_ in range(6):
        for batch in shifted[0]:
            out = stream(batch)
            stream.feedback(out.ids, worst(out, frozen_is_right=bool(pass_)))
            seen.append(stream.betting.position)
    assert list(dict.fromkeys(seen)) == ["open", "accepted", "revoked"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("tau", [NEVER, None])
def test_without_labels_the_certificate_decides(fitted, shifted, mechanism, tau):
    adapter = make(fitted, mechanism, tau)
    stream, first = adapter.new_stream(), 0
    for batch, expected in zip(shifted[0][:4], adapter.stream(shifted[0][:4]), strict=True):
        out = stream(batch)
        same_answer(out, expected)
        assert out.ids.tolist() == list(range(first, first + len(batch)))
        first = stream.samples
        stream.feedback([], [])
    assert stream.betting == BettingTest()


def test_disputed_samples_are_those_a_label_can_decide(fitted, shifted):
    stream = make(fitted, "layers").new_stream()
    outs = [stream(batch) for batch in shifted[0]]
    assert 0 < sum(out.disputed.sum() for out in outs) < 200
    for out, labels in zip(outs, shifted[1], strict=True):
        assert all(out.disputed[i] for i, W in enumerate(judge(out, labels)) if W)
        agreed = ~out.disputed
        before = stream.betting
        assert stream.feedback(out.ids[agreed], labels[agreed]) == 0
        assert stream.betting == before
        decided = sum(map(abs, judge(out, labels)))
        assert stream.feedback(out.ids[out.disputed], labels[out.disputed]) == decided
    assert fitted(shifted[0][0]).ids is None  # no stream


@given(st.lists(st.integers(0, 255), max_size=6), st.randoms())
def test_chunks_of_labels_and_repeated_ones_are_one_call(fitted, shifted, cuts, order):
    batches, labels = shifted[0][:4], np.concatenate(shifted[1][:4])
    one, other = (make(fitted, "features").new_stream() for _ in range(2))
    for batch in batches:
        one(batch)
        other(batch)
    ids = np.arange(256)
    whole = one.feedback(ids, labels)
    parts = np.split(ids, sorted(cuts))
    assert sum(other.feedback(part, labels[part]) for part in parts) == whole
    again = order.choice(parts)
    assert other.feedback(again, (labels[again] + 1) % 4) == 0  # the first label counts
    assert one.betting == other.betting


@pytest.mark.parametrize(
    ("position", "to_file", "mechanism"),
    sampled(product(["open", "accepted", "revoked"], [False, True], MECHANISMS), 4),
)
def test_a_stream_with_labels_resumes_exactly(
    fitted, shifted, mechanism, to_file, position, tmp_path
):
    adapter = make(fitted, mechanism, None, every=4)
    stream = adapter.new_stream(alpha=0.3)
    outs = [stream(batch) for batch in shifted[0][:8]]
    for out in outs[:6] if position != "open" else outs[:0]:
        if out.frozen is not None and out.adapted is not None:
            stream.feedback(out.ids, worst(out, frozen_is_right=position == "revoked"))
    assert stream.betting.position == position
    saved = stream.state()
    if to_file:
        stream.save(tmp_path / "stream.caster")
        saved = tmp_path / "stream.caster"
    resumed = make(fitted, mechanism, None, every=4).resume(saved)
    assert resumed.betting == stream.betting
    for batch, labels in zip(shifted[0][8:], shifted[1][8:], strict=True):
        one, other = stream(batch), resumed(batch)
        assert one.verdict == other.verdict or np.isnan(one.verdict.ratio)
        assert np.array_equal(one.scores, other.scores)
        ids = [*one.ids, *outs[7].ids, *outs[0].ids]
        given_labels = [*labels, *shifted[1][7], *shifted[1][0]]
        assert stream.feedback(ids, given_labels) == resumed.feedback(ids, given_labels)
        assert resumed.betting == stream.betting
    for name, value in stream.state().items():
        assert value.tobytes() == resumed.state()[name].tobytes(), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feedback", np.array([7, 1, 0, 0])),
        ("feedback", np.array([0, 0, 0, 0])),
        ("feedback", np.array([0, 1, -1, 0])),
        ("feedback", np.array([1, 2, 0, 0])),  # accepted, without bets
        ("feedback.alpha", np.array(1.5)),
        ("feedback.restarts", np.zeros(16)),  # bets, while open
        ("feedback.disputed", np.zeros((2, 2), np.int64)),
        ("feedback.disputed", np.zeros(3, np.int64)),
        ("feedback.disputed", np.array([[0.0, 0.0, 1.0]])),
        ("feedback.disputed", np.array([[-1, 0, 1]])),
        ("feedback.disputed", np.array([[64, 0, 1]])),  # not answered yet
        ("feedback.disputed", np.array([[3, 0, 1], [2, 0, 1]])),
        ("feedback.disputed", np.array([[3, -1, 1]])),
        ("feedback.disputed", np.array([[3, 0, N_CLASSES]])),
        ("samples", np.array(-1)),
        ("feedback.disputed", None),
    ],
)
def test_a_damaged_state_is_rejected(fitted, name, value):
    adapter = make(fitted, "features")
    state = adapter.new_stream().state()
    state |= {"samples": np.array(64), "feedback.disputed": np.array([[2, 0, 1], [3, 1, 0]])}
    assert adapter.resume(state).samples == 64
    if value is None:
        del state[name]
    else:
        state[name] = value
    with pytest.raises(CasterError, match="not the state of a stream"):
        adapter.resume(state)


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([3, 64], [0, 0], "no sample has id 64: the stream has answered 64"),
        ([3, -1], [0, 0], "no sample has id -1"),
        ([3, 4], [0], "2 ids need as many labels, not 1"),
        ([3, 4], [0, 9], r"label 9 is not one of the \d classes \(0, 1, 2"),
        ([3, 4], [0, np.nan], "labels are missing"),
        ([3.0], [0], "ids are a sequence of integers"),
        ([[3]], [0], "ids are a sequence of integers"),
        ([[3], [3, 4]], [0, 0], "cannot be read as an array"),
        (3, 0, "ids are a sequence of integers"),
        ([True], [0], "ids are a sequence of integers"),
    ],
)
def test_bad_labels_count_for_nothing(fitted, shifted, ids, labels, message):
    stream = make(fitted, "features").new_stream()
    out = stream(shifted[0][0])
    before = {name: value.tobytes() for name, value in stream.state().items()}
    with pytest.raises(CasterError, match=message):
        stream.feedback(ids, labels)
    assert {name: value.tobytes() for name, value in stream.state().items()} == before
    assert stream.feedback(torch.from_numpy(out.ids), torch.from_numpy(shifted[1][0])) >= 0


def test_memory_is_bounded_and_a_forgotten_sample_is_named(fitted, shifted, monkeypatch):
    monkeypatch.setattr(feedback, "MEMORY", 100)
    stream = make(fitted, "features").new_stream()
    for batch in shifted[0]:
        stream(batch)
    kept = stream.state()["feedback.disputed"]
    assert len(kept) > 0
    assert kept[:, 0].min() >= 1280 - 100
    assert stream.feedback([1279, 1180], [0, 0]) in (0, 1, 2)
    with pytest.raises(CasterError, match="sample 1179 is too old: only the last 100"):
        stream.feedback([1279, 1179], [0, 0])


def test_batches_that_were_not_compared_learn_nothing_until_labels_decide(fitted, shifted):
    stream = make(fitted, "layers", ALWAYS, every=8).new_stream()
    outs = [stream(batch) for batch in shifted[0] * 3]
    resting = [out for out in outs if out.verdict.reason == "rest"]
    assert resting
    for out in resting:
        assert not out.disputed.any()
        assert stream.feedback(out.ids, np.zeros(64, int)) == 0
    for out in outs:
        if out.frozen is not None:
            stream.feedback(out.ids, worst(out))
    assert stream.betting.position == "revoked"
    for batch in shifted[0]:
        out = stream(batch)
        assert out.verdict.reason == "feedback"
        assert np.array_equal(out.scores, fitted.model(batch).logits)
    stream.reset()
    assert stream.betting == BettingTest()
    again = [stream(batch) for batch in shifted[0] * 3]
    assert [out.verdict.reason for out in again] == [out.verdict.reason for out in outs]


def test_a_batch_without_an_adapted_answer_keeps_its_reason(fitted, shifted):
    stream = make(fitted, "features").new_stream()
    for batch in shifted[0]:
        out = stream(batch)
        stream.feedback(out.ids, worst(out, frozen_is_right=False))
    assert stream.betting.position == "accepted"
    assert stream(shifted[0][0][:1]).verdict.reason == "batch_too_small"
    layers = make(fitted, "layers").new_stream()
    for batch in shifted[0]:
        out = layers(batch)
        layers.feedback(out.ids, worst(out, frozen_is_right=False))
    assert layers.betting.position == "accepted"
    assert layers(np.full_like(shifted[0][0], 1e6)).verdict.reason == "implausible"


def test_labels_may_be_text():
    images, labels = make_images(400, seed=2)
    names = np.array(["ant", "bee", "cow", "dog"])
    function = caster.wrap(lambda batch: batch.reshape(len(batch), -1)[:, :24], version="1")
    adapter = caster.fit(function, [(images, names[labels])])
    stream = adapter.new_stream()
    target, truth = make_images(64, seed=3, shift=0.3)
    out = stream(target)
    counted = stream.feedback(list(out.ids), names[truth].tolist())
    assert counted == sum(map(abs, judge(out, truth)))
    assert counted > 0


def test_the_document_s_lines_run(fitted, shifted, capsys):
    text = (Path(__file__).parents[2] / "docs/feedback.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    truth = np.concatenate(shifted[1])
    names = {
        "adapter": make(fitted, "layers"),
        "batches": shifted[0],
        "inspect": lambda ids: truth[ids],
    }
    exec(code, names)
    assert "BettingTest(alpha=0.05, position='accepted'" in capsys.readouterr().out
    assert names["out"].verdict.reason == "feedback"


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_is_an_error_rate(fitted, alpha):
    with pytest.raises(CasterError, match="alpha is an error rate"):
        fitted.new_stream(alpha=alpha)
