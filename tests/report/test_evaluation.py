"""One pass over a stream against a recomputation from `adapt`, sample by sample."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.metrics import log_loss

from caster import Caster, CasterError
from caster.core.verdict import Verdict
from caster.report.evaluation import Answers, evaluate
from caster.report.evaluation_results import Batch, ClassScore, Evaluation
from caster.report.intervals import Interval
from caster.report.mechanism import aligned_layers
from caster.state.source_check import SourceCheck
from tests.conftest import problem
from tests.support import reference

NAMES = np.array(["ant", "bee", "cat", "dog", "eel"])
FOUR = ("frozen", "source_gda", "ungated", "gated")


@cache
def stage(spread=0.8):
    """An estimator, and a shifted target with labels and the logits of a linear head."""
    h, y = problem(n=2000, spread=spread)
    clf = Caster().fit(h[:1000], NAMES[y[:1000]])
    means = np.stack([h[:1000][y[:1000] == c].mean(axis=0) for c in range(5)])
    target = 1.4 * h[1000:] + 0.8
    logits = target @ means.T - (means**2).sum(axis=1) / 2
    return clf, target, NAMES[y[1000:]], logits


def cut(target, labels, logits, size):
    for i in range(0, len(target), size):
        head = None if logits is None else logits[i : i + size]
        yield target[i : i + size], labels[i : i + size], head


@pytest.mark.parametrize("size", [40, 64, 1019])  # 64 and 1019 leave a remainder; 1019, one of 1
@pytest.mark.parametrize("headless", [False, True])
def test_every_number_matches_a_recomputation(size, headless):
    clf, target, labels, logits = stage()
    head = None if headless else logits
    found = evaluate(clf, cut(target, labels, head, size))
    assert list(found.scores) == list(FOUR[1:] if headless else FOUR)
    log_p = {name: [] for name in found.scores}
    answers = {name: [] for name in found.scores}
    for features, _, given_logits in cut(target, labels, head, size):
        out = clf.adapt(features, head_logits=given_logits)
        source = clf.source_scores(features)
        fallback = source if headless else given_logits
        moved = fallback if len(features) == 1 else out.adapted
        scores = {"source_gda": source, "ungated": moved, "frozen": given_logits}
        scores["gated"] = moved if out.verdict.accepted else fallback
        for name in found.scores:
            log_p[name] += list(log_softmax(scores[name], axis=1))
            answers[name] += list(clf.classes_[scores[name].argmax(axis=1)])
        assert answers["ungated"][-len(features) :] == out.proposed.tolist()
        assert answers["gated"][-len(features) :] == out.labels.tolist()
    base = np.array(answers["source_gda" if headless else "frozen"]) == labels
    for name, score in found.scores.items():
        right = np.array(answers[name]) == labels
        probabilities = np.exp(log_p[name])
        assert score.accuracy == right.mean()
        assert score.harm == (base & ~right).mean()
        assert score.help == (~base & right).mean()
        assert score.nll == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
        expected = reference.calibration_error(probabilities.max(axis=1), right)
        assert score.calibration_error == pytest.approx(expected, abs=1e-9)
        assert sum(b.count for b in score.reliability) == len(labels)
        if size == 1019:  # two batches
            assert score.interval is found.gain_interval is None
        else:
            assert score.interval.low <= score.accuracy <= score.interval.high
    gated = np.array(answers["gated"]) == labels
    for c in found.classes:
        members = labels == c.label
        assert (c.size, c.baseline, c.gated) == (
            members.sum(),
            base[members].sum(),
            gated[members].sum(),
        )
    assert found.gain == pytest.approx(gated.mean() - base.mean())


def test_batches_keep_their_verdict_size_and_classes():
    clf, target, labels, logits = stage()
    found = evaluate(clf, cut(target, labels, logits, 30), name="a stream", digests={"state": "f"})
    pieces = list(cut(target, labels, logits, 30))
    assert len(found.batches) == len(pieces)
    for batch, (features, truth, head) in zip(found.batches, pieces, strict=True):
        out = clf.adapt(features, head_logits=head)
        assert (batch.size, batch.classes) == (len(truth), len(set(truth)))
        assert batch.verdict == out.verdict
        assert batch.right["gated"] == (out.labels == truth).sum()
        assert batch.accuracy("ungated") == (out.proposed == truth).mean()
    verdicts = [batch.verdict for batch in found.batches]
    assert found.acceptance == np.mean([v.accepted for v in verdicts])
    assert found.ratio == np.median([v.ratio for v in verdicts])
    assert sum(found.reasons.values()) == len(verdicts)
    assert (found.name, found.digests, found.size) == ("a stream", {"state": "f"}, len(labels))
    assert (found.batch_size, found.settings) == (30, clf.settings)


@given(st.randoms(use_true_random=False), st.sampled_from([7, 30, 64]))
def test_the_order_within_a_batch_changes_nothing(random, size):
    clf, target, labels, logits = stage()
    n = 128
    rows = list(range(n))
    for i in range(0, n, size):
        part = rows[i : i + size]
        random.shuffle(part)
        rows[i : i + size] = part
    before = evaluate(clf, cut(target[:n], labels[:n], logits[:n], size))
    after = evaluate(clf, cut(target[rows], labels[rows], logits[rows], size))
    assert after.reasons == before.reasons
    assert [b.right for b in after.batches] == [b.right for b in before.batches]
    assert after.classes == before.classes
    assert after.gain_interval == before.gain_interval
    for name, score in before.scores.items():
        for metric in ("accuracy", "harm", "help", "nll", "calibration_error"):
            now, then = getattr(after.scores[name], metric), getattr(score, metric)
            assert now == pytest.approx(then, rel=1e-6, abs=1e-9)


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 20]), st.booleans())
def test_help_less_harm_is_the_gain_over_the_baseline(seed, size, headless):
    clf, target, labels, logits = stage()
    rows = np.random.default_rng(seed).permutation(len(labels))[:60]
    head = None if headless else logits[rows]
    found = evaluate(clf, cut(target[rows], labels[rows], head, size))
    base = found.scores[found.baseline]
    assert found.baseline == ("source_gda" if headless else "frozen")
    assert base.harm == base.help == 0
    for score in found.scores.values():
        gain = score.accuracy - base.accuracy
        assert score.help - score.harm == pytest.approx(gain, abs=1e-12)
    assert found.gain == pytest.approx(
        sum(c.gated - c.baseline for c in found.classes) / found.size, abs=1e-12
    )


def test_batches_of_one_are_the_fallback_in_every_number():
    clf, target, labels, logits = stage()
    found = evaluate(clf, cut(target[:9], labels[:9], logits[:9], 1))
    assert found.scores["ungated"] == found.scores["gated"] == found.scores["frozen"]
    assert found.reasons == {"batch_too_small": 9}
    assert found.ratio == math.inf
    assert found.warning is None


def test_rejecting_everything_gives_the_baseline():
    _, target, labels, logits = stage()
    strict = Caster(tau=1e-9).fit(*problem())
    y = np.searchsorted(NAMES, labels)
    found = evaluate(strict, cut(target, y, logits, 64))
    assert found.acceptance == 0
    assert found.scores["gated"] == found.scores["frozen"]
    assert found.gain == 0
    assert "rejected every batch" in found.summary


def test_torch_input_gives_the_same_score():
    clf, target, labels, logits = stage()
    pieces = [(torch.tensor(h), y, torch.tensor(g)) for h, y, g in cut(target, labels, logits, 64)]
    assert evaluate(clf, pieces).reasons == evaluate(clf, cut(target, labels, logits, 64)).reasons


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h, y, g: (h, np.array(["yak", *y[1:]]), g), "rows 30 to 59: label 'yak'"),
        (lambda h, y, g: (h, y[:-1], g), "rows 30 to 59: 30 samples have 29 labels"),
        (lambda h, y, g: (h, y, None), "rows 30 to 59: logits must come with every batch"),
        (lambda h, y, g: (h * np.nan, y, g), "rows 30 to 59: the batch holds NaN"),
        (lambda h, y, g: (h, y, g[:, 1:]), "rows 30 to 59: head_logits must be"),
        (lambda h, y, g: (h, y, g * np.inf), "rows 30 to 59: .*no probabilities"),
    ],
)
def test_a_bad_batch_is_located(change, why):
    clf, target, labels, logits = stage()
    first, second, *_ = cut(target, labels, np.abs(logits) + 1, 30)
    with pytest.raises(CasterError, match=why) as caught:
        evaluate(clf, [first, change(*second)])
    assert "\n" not in str(caught.value)


def test_no_batch_is_an_error():
    with pytest.raises(CasterError, match="nothing to evaluate"):
        evaluate(stage()[0], [])


def test_a_masked_class_costs_an_infinite_likelihood_and_json_says_null():
    clf, target, labels, logits = stage()
    masked = np.where(NAMES == "cat", -np.inf, logits)
    found = evaluate(clf, cut(target, labels, masked, 64))
    assert found.scores["frozen"].nll == math.inf
    assert found.to_json()["scores"]["frozen"]["nll"] is None


def test_answers_keep_one_number_per_sample():
    """Not views of the scores, which would keep all of them alive."""
    kept = vars(Answers.of(np.random.default_rng(0).normal(size=(9, 70)), np.arange(9)))
    assert len(kept) == 4
    for values in kept.values():
        assert values.shape == (9,)
        assert values.base is None


# --- words and JSON ---------------------------------------------------------------------------


def of_labels(batches, verdict=None):
    """An evaluation of these true classes, in which every batch was rejected."""
    verdict = verdict or Verdict(False, "ratio", 2.0, 9, 3)
    counted = tuple(Batch(len(b), len(set(b)), {"gated": 0}, verdict) for b in batches)
    labels, counts = np.unique(np.concatenate(batches), return_counts=True)
    classes = tuple(
        ClassScore(label, n, 0, 0)
        for label, n in zip(labels.tolist(), counts.tolist(), strict=True)
    )
    clf, *piece = stage()
    some = evaluate(clf, [tuple(array[:64] for array in piece)])
    return Evaluation("", clf.settings, {}, some.scores, None, counted, classes)


@pytest.mark.parametrize("size", [3, 16, 64, 256])
@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_a_stream_ordered_by_class_is_noticed_and_a_shuffled_one_is_not(n_classes, size):
    labels = np.repeat(np.arange(n_classes), 12 * size)
    ordered = of_labels(np.split(labels, 12 * n_classes)).warning
    assert "ordered by class" in ordered
    assert f"holds 1 of {n_classes} classes" in ordered
    np.random.default_rng(0).shuffle(labels)
    assert of_labels(np.split(labels, 12 * n_classes)).warning is None


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12), st.integers(1, 40))
def test_independent_draws_from_any_distribution_raise_no_alarm(shares, size):
    rng = np.random.default_rng(0)
    shares = np.array(shares) / sum(shares)
    batches = rng.choice(len(shares), (60, size), p=shares)
    assert of_labels(list(batches)).warning is None


def test_a_small_last_batch_does_not_hide_or_make_an_order():
    labels = np.repeat(np.arange(4), 50)
    whole = [labels[i : i + 40] for i in range(0, 200, 40)]
    assert of_labels([*whole, labels[:1]]).warning is not None
    mixed = labels.reshape(4, 50).T.ravel()
    assert of_labels([mixed[:100], mixed[100:], labels[:1]]).warning is None


def test_the_summary_has_the_numbers():
    clf, target, labels, logits = stage()
    found = evaluate(clf, cut(target, labels, logits, 64))
    frozen, ungated, gated = (found.scores[name] for name in ("frozen", "ungated", "gated"))
    assert found.reasons["accepted"] > 0
    for score in (frozen, ungated, gated):
        assert f"{score.accuracy:.1%}" in found.summary
    assert f"{gated.harm:.1%} from right to wrong" in found.summary
    assert f"{gated.help:.1%} of all samples turned from wrong to right" in found.summary
    assert f"accepted {found.reasons['accepted']} of {len(found.batches)}" in found.summary
    assert f"{100 * found.gain_interval.low:+.1f} to" in found.conclusion
    headless = evaluate(clf, cut(target, labels, None, 64))
    assert "Source-GDA takes the frozen head's place" in headless.summary
    assert "Source-GDA takes" not in found.summary


@pytest.mark.parametrize(
    ("right", "low", "high", "opening", "gain"),
    [
        (60, 0.051, 0.073, "Use it here: ", "gains 15.6 points over"),
        (40, -0.073, -0.051, "Do not use it here: ", "loses 15.6 points to"),
        (50, -0.004, 0.006, "It makes no difference here: ", "gains 0.0 points over"),
        (50, 0.0001, 0.006, "It makes no difference here: ", "+0.0 to +0.6"),
        (60, -0.02, 0.15, "It is not clear whether to use it here: ", "-2.0 to +15.0"),
        (
            60,
            None,
            None,
            "One batch cannot tell whether to use it: on this one, ",
            "gains 15.6 points",
        ),
    ],
)
def test_the_conclusion_says_whether_to_use_it(right, low, high, opening, gain):
    found = of_labels([np.arange(64)], Verdict(True, "accepted", 0.5, 9, 3))
    scores = {**found.scores, "frozen": replace(found.scores["frozen"], accuracy=50 / 64)}
    scores["gated"] = replace(found.scores["gated"], accuracy=right / 64)
    interval = None if low is None else Interval(low, high)
    found = replace(found, scores=scores, gain_interval=interval)
    assert found.conclusion.startswith(opening)
    assert gain in found.conclusion
    assert found.to_json()["conclusion"] == found.conclusion


@pytest.mark.parametrize("n", [2, 7, 8])
def test_few_batches_have_no_interval(n):
    """Two of them resample to three values, and two equal ones to a single one."""
    clf, target, labels, logits = stage()
    size = 40
    found = evaluate(clf, cut(target[: n * size], labels[: n * size], logits[: n * size], size))
    few = f"{n} batches cannot tell whether to use it: on these, "
    assert found.conclusion.startswith(few) == (found.gain_interval is None) == (n < 8)


@pytest.mark.parametrize(
    ("right", "reason", "told"),
    [
        (40, "ratio", "The gate is right: adapting anyway would lose 15.6 points."),
        (50, "ratio", "Adapting anyway would change accuracy by 0.0 points."),
        (60, "ratio", "gain 15.6 points: if your other data are like these, try `--tau 1.50`"),
        (60, "min_samples", "gain 15.6 points: if your other data are like these, predict with"),
        (60, "class_order", "gain 15.6 points: a safeguard rejects them (`class_order`)"),
    ],
)
def test_where_every_batch_is_rejected_the_conclusion_says_what_that_costs(right, reason, told):
    found = of_labels([np.arange(64)], Verdict(False, reason, 1.5, 9, 3))
    scores = {**found.scores, "frozen": replace(found.scores["frozen"], accuracy=50 / 64)}
    scores["ungated"] = replace(found.scores["ungated"], accuracy=right / 64)
    found = replace(found, scores=scores)
    assert found.conclusion.startswith("It makes no difference here: the gate rejects every batch")
    assert told in found.conclusion


@pytest.mark.parametrize(
    ("rejected", "right", "told"),
    [
        (9, 60, "rejects 90% of the batches, and adapting to all of them would gain 15.6"),
        (9, 50, None),  # adapting to all would change nothing
        (4, 60, None),  # the gate accepts most
    ],
)
def test_where_most_batches_are_rejected_the_conclusion_says_what_would_accept_them(
    rejected, right, told
):
    found = of_labels([np.arange(64)] * 10, Verdict(True, "accepted", 0.5, 9, 3))
    scores = {name: replace(score, accuracy=50 / 64) for name, score in found.scores.items()}
    scores["ungated"] = replace(scores["ungated"], accuracy=right / 64)
    batches = [
        replace(batch, verdict=Verdict(False, "ratio", 1.2 + i / 1000, 9, 3))
        if i < rejected
        else batch
        for i, batch in enumerate(found.batches)
    ]
    interval = Interval(-0.001, 0.001)
    found = replace(found, scores=scores, batches=tuple(batches), gain_interval=interval)
    assert found.conclusion.startswith("It makes no difference here: ")
    if told is None:
        assert "the gate rejects" not in found.conclusion
    else:
        assert told in found.conclusion
        assert "try `--tau 1.21`, the highest ratio here." in found.conclusion


@pytest.mark.parametrize(
    ("ratio", "tau"),
    [(1.1, "1.10"), (1.201, "1.21"), (np.nextafter(1.21, 2), "1.22"), (9.991, "10.00")],
)
def test_the_suggested_tau_is_not_below_the_highest_ratio(ratio, tau):
    found = of_labels([np.arange(64)], Verdict(False, "ratio", float(ratio), 9, 3))
    scores = {**found.scores, "frozen": replace(found.scores["frozen"], accuracy=50 / 64)}
    scores["ungated"] = replace(found.scores["ungated"], accuracy=60 / 64)
    assert f"try `--tau {tau}`, the highest" in replace(found, scores=scores).conclusion
    verdict = replace(found.batches[0].verdict, ratio=1086.32)
    far = replace(found, scores=scores, batches=[replace(found.batches[0], verdict=verdict)])
    assert "predict with `--no-gate`" in far.conclusion
    assert float(tau) >= ratio


def test_advice_about_order_depends_on_the_mechanism():
    ordered = of_labels(np.split(np.repeat(np.arange(4), 50), 4))
    assert "mix the classes" in ordered.warning
    assert "keep it" in replace(ordered, mechanism=aligned_layers({"mixture": True})).warning


def test_labels_in_another_order_are_warned_of_without_advice_about_the_gate():
    clf, target, labels, logits = stage()
    assert evaluate(clf, cut(target, labels, logits, 64)).warning is None
    found = evaluate(clf, cut(target, labels, logits[:, [0, 2, 1, 3, 4]], 64))
    assert "'bee' to 'cat', 'cat' to 'bee'" in found.warning
    rejected = replace(
        found,
        batches=tuple(replace(b, verdict=Verdict(False, "ratio", 2.0)) for b in found.batches),
    )
    assert found.conclusion == rejected.conclusion
    assert found.conclusion.startswith("Fix the order of the classes first")
    assert "--tau" in replace(rejected, better_names=None).conclusion


@pytest.mark.parametrize("accepted", [True, False])
def test_answers_that_collapsed_are_not_to_be_used(accepted):
    clf, target, labels, logits = stage()
    verdict = Verdict(accepted, "accepted" if accepted else "ratio", 0.1, 9, 3)
    chunks = []
    for features, truth, head in cut(target, labels, logits, 50):
        out = clf.adapt(features, head_logits=head)
        made = replace(out, adapted=np.eye(5)[[2] * len(truth)], verdict=verdict)
        chunks.append((features, truth, head, made))
    found = evaluate(clf, chunks)
    n, cats = len(labels), int(np.sum(labels == "cat"))
    told = f"{n:,} of {n:,} answers are 'cat', but only {cats:,} of the samples"
    assert found.collapse == (told if accepted else None)
    assert found.conclusion.startswith("Do not use it here: 1,0") == accepted


def test_a_collapsed_head_that_the_gate_keeps_is_not_blamed_on_adaptation():
    clf, target, labels, logits = stage()
    chunks = []
    for features, truth, head in cut(target, labels, logits, 50):
        out = clf.adapt(features, head_logits=head)
        head = 9 * np.eye(5)[[2] * len(truth)]
        made = replace(out, frozen=head, verdict=Verdict(False, "ratio", 1.234, 9, 3))
        chunks.append((features, truth, head, made))
    found = evaluate(clf, chunks)
    assert found.scores["ungated"].accuracy > found.scores["gated"].accuracy + 0.5
    assert found.collapse in found.conclusion
    assert "--tau 1.24" in found.conclusion
    assert not found.conclusion.startswith("Do not use it")


def test_a_source_that_turns_transport_off_is_named_unless_forced_or_layers():
    clf, target, labels, logits = stage()
    off = SourceCheck(600, 0.99, 0.5, 0.5, 0.5, 1.0, 0.49, 1.2)
    clf = Caster.from_state(replace(clf._state, source_check=off))
    chunks = list(cut(target, labels, logits, 64))
    found = evaluate(clf, chunks)
    assert "off by default" in found.source_check
    assert found.to_json()["source_check"] == found.source_check
    assert set(found.reasons) == {"source_check"}
    assert evaluate(clf.set_params(safeguards=False), chunks).source_check is None
    clf.set_params(safeguards=True)
    assert evaluate(clf, chunks, mechanism=aligned_layers({"mixture": True})).source_check is None


@pytest.mark.parametrize("size", [1, 64, 1020])
@pytest.mark.parametrize("headless", [False, True])
def test_json_holds_everything_and_survives_a_round_trip(size, headless):
    clf, target, labels, logits = stage()
    found = evaluate(clf, cut(target, labels, None if headless else logits, size))
    packed = found.to_json()
    assert json.loads(json.dumps(packed, allow_nan=False)) == packed
    assert packed["samples"] == sum(b["size"] for b in packed["batches"]) == 1020
    assert packed["baseline"] == found.baseline
    for name, score in found.scores.items():
        assert packed["scores"][name]["accuracy"] == score.accuracy
        assert (packed["scores"][name]["interval"] is None) == (size == 1020)
    assert packed["gain"]["accuracy"] == found.gain
    assert [c["label"] for c in packed["classes"]] == NAMES.tolist()
    assert packed["median_ratio"] == (found.ratio if math.isfinite(found.ratio) else None)
    assert packed["settings"] == vars(clf.settings)


def test_labels_of_any_kind_reach_json():
    h, y = problem()
    kinds = [None, "one", 2, (3, "three"), frozenset({4})]
    clf = Caster(tau=np.float32(0.5), min_samples=np.int64(3)).fit(h, [kinds[c] for c in y])
    packed = evaluate(clf, [(h, [kinds[c] for c in y], None)]).to_json()
    labels = [c["label"] for c in packed["classes"]]
    assert sorted(map(str, labels)) == sorted(
        ["None", "one", "2", "[3, 'three']", "frozenset({4})"]
    )
    assert packed["settings"]["min_samples"] == 3
    json.dumps(packed, allow_nan=False)
