"""Files in, files out: fitting, predicting and diagnosing without the command line."""

from __future__ import annotations

import math
import os
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

import caster
from caster import Caster, CasterError
from caster import state as states
from caster.adapt.fitting import fit_file
from caster.adapt.prediction import Summary, predict_file
from caster.config import Settings
from caster.report.doctor import BATCH_SIZES, diagnose
from caster.state.source_check import SourceCheck
from tests.conftest import few_samples, problem
from tests.support import problem as small_network
from tests.support.tables import read_table as rows_of

NAMES = np.array(["ant", "bee", "cat", "dog", "eel"])


@pytest.fixture(scope="module")
def source():
    return problem(n=900)


@pytest.fixture
def files(tmp_path, source):
    h, y = source
    np.savez(tmp_path / "source.npz", features=h, labels=NAMES[y])
    target = 1.3 * h[:150] + 1.0
    np.savez(tmp_path / "target.npz", features=target, logits=5.0 * np.eye(5)[(y[:150] + 1) % 5])
    np.savez(tmp_path / "bare.npz", features=target)
    fit_file(tmp_path / "source.npz", tmp_path / "s.caster", Settings())
    return tmp_path


def test_a_file_gives_what_its_arrays_give(files, source):
    h, y = source
    expected = Caster().fit(h, NAMES[y])
    loaded = caster.load(files / "s.caster")
    assert np.array_equal(loaded.moments_.covariances, expected.moments_.covariances)
    assert loaded.classes_.tolist() == NAMES.tolist()


def test_fitting_tells_how_far_it_is(files):
    heard = []
    fit_file(files / "source.npz", files / "s.caster", Settings(), lambda *step: heard.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in heard))
    assert len(stages) == 2
    for stage in stages:
        done = [d for s, d, total in heard if s == stage and total == 920]
        assert done[0] == 0
        assert done[-1] == 920
        assert done == sorted(done)


@pytest.mark.slow
def test_fitting_holds_a_fraction_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("caster.adapt.fitting.CHUNK_ELEMENTS", 2**17)
    h, y = problem(n=20_000, d=256, dtype=np.float32)
    np.savez(tmp_path / "source.npz", features=h, labels=y)
    tracemalloc.start()
    fit_file(tmp_path / "source.npz", tmp_path / "s.caster", Settings())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < h.nbytes / 2


@pytest.mark.parametrize(("columns", "compared"), [(5, True), (9, False)])
def test_logits_of_these_classes_are_held_against_transport(tmp_path, caplog, columns, compared):
    h, y = problem()
    np.savez(tmp_path / "s.npz", features=h, labels=y, logits=np.eye(columns)[y])
    clf = fit_file(tmp_path / "s.npz", tmp_path / "s.caster", Settings())
    assert (clf.source_check_.head is not None) is compared
    assert ("there are 9 per sample, and the labels name 5 classes" in caplog.text) is not compared


def test_a_failed_fit_writes_nothing_and_keeps_the_old_state(files, source):
    h, y = source[0].copy(), source[1]
    h[800, 2] = np.nan
    np.savez(files / "bad.npz", features=h, labels=y)
    before = (files / "s.caster").read_bytes()
    with pytest.raises(CasterError, match="row 800, column 2"):
        fit_file(files / "bad.npz", files / "s.caster", Settings())
    assert (files / "s.caster").read_bytes() == before
    assert not list(files.glob(".*"))


def test_ctrl_c_while_fitting_leaves_nothing(files):
    def interrupt(stage, done, total):
        if stage.startswith("pass 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_file(files / "source.npz", files / "new.caster", Settings(), interrupt)
    assert not (files / "new.caster").exists()
    assert not list(files.glob(".*"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predictions_are_those_of_the_estimator(files, source, suffix):
    out = files / f"out.{suffix}"
    summary = predict_file(files / "s.caster", files / "target.npz", out, batch_size=64)
    rows = rows_of(out)
    clf = caster.load(files / "s.caster")
    target = np.load(files / "target.npz")
    assert [int(row["row"]) for row in rows] == list(range(150))
    assert [int(row["batch"]) for row in rows] == [i // 64 for i in range(150)]
    for batch, start in enumerate(range(0, 150, 64)):
        stop = start + 64
        expected = clf.adapt(target["features"][start:stop], target["logits"][start:stop])
        got = rows[start:stop]
        assert [row["prediction"] for row in got] == expected.labels.tolist()
        assert {row["reason"] for row in got} == {expected.verdict.reason}
        assert {row["verdict"] == "accepted" for row in got} == {expected.verdict.accepted}
        assert {float(row["ratio"]) for row in got} == {expected.verdict.ratio}
        assert batch == int(got[0]["batch"])
    assert (summary.rows, summary.batches) == (150, 3)
    assert summary.reasons.total() == 3
    head = NAMES[(source[1][:150] + 1) % 5]
    assert summary.changed == sum(r["prediction"] != h for r, h in zip(rows, head, strict=True))


def test_tau_and_the_gate(files, source):
    out, head = files / "out.csv", NAMES[(source[1][:150] + 1) % 5].tolist()
    arguments = (files / "s.caster", files / "target.npz", out)
    refused = predict_file(*arguments, batch_size=50, tau=1e-6)
    assert refused.reasons == {"ratio": 3}
    assert [row["prediction"] for row in rows_of(out)] == head
    assert refused.changed == 0
    ungated = predict_file(*arguments, batch_size=50, tau=1e-6, gate=False)
    assert ungated.reasons == {"ratio": 3}
    truth = NAMES[source[1][:150]]
    assert np.mean([r["prediction"] == t for r, t in zip(rows_of(out), truth, strict=True)]) > 0.9


def test_without_logits_source_gda_answers(files):
    out = files / "out.csv"
    summary = predict_file(files / "s.caster", files / "bare.npz", out, batch_size=50, tau=1e-6)
    assert summary.changed is None
    clf, target = caster.load(files / "s.caster"), np.load(files / "bare.npz")["features"]
    expected = clf.classes_[clf.source_scores(target).argmax(axis=1)]
    assert [row["prediction"] for row in rows_of(out)] == expected.tolist()


def test_a_last_batch_of_one(files):
    summary = predict_file(
        files / "s.caster", files / "target.npz", files / "out.csv", batch_size=149, gate=False
    )
    assert summary.reasons["batch_too_small"] == 1
    assert rows_of(files / "out.csv")[-1]["ratio"] == "inf"


@pytest.mark.parametrize("gate", [True, False])
def test_a_batch_that_cannot_be_computed_keeps_the_frozen_answer(files, source, gate):
    whole = np.load(files / "target.npz")
    target = whole["features"].astype(np.float64)
    target[50:100] *= 1e200
    np.savez(files / "far.npz", features=target, logits=whole["logits"])
    out = files / "out.csv"
    summary = predict_file(files / "s.caster", files / "far.npz", out, batch_size=50, gate=gate)
    assert summary.reasons == {"accepted": 2, "numerical": 1}
    assert summary.accepted == 2
    failed = rows_of(out)[50:100]
    assert [row["prediction"] for row in failed] == [row["frozen"] for row in failed]
    assert {(row["ratio"], row["method"]) for row in failed} == {("inf", "frozen")}


def test_bad_rows_are_located_and_nothing_is_written(files):
    target = np.load(files / "bare.npz")["features"].copy()
    target[120, 0] = np.inf
    np.savez(files / "bad.npz", features=target)
    (files / "out.csv").write_text("precious")
    with pytest.raises(CasterError, match=r"rows 64 to 127 of .*bad\.npz: the batch holds NaN"):
        predict_file(files / "s.caster", files / "bad.npz", files / "out.csv", batch_size=64)
    assert (files / "out.csv").read_text() == "precious"
    assert not list(files.glob(".*"))


def test_outputs_are_rejected_before_the_work(files):
    for out, why in (("out.txt", ".csv or .parquet"), ("no/out.csv", "no folder")):
        with pytest.raises(CasterError, match=why):
            predict_file(files / "none.caster", files / "none.npz", files / out, batch_size=64)


def test_labels_of_no_common_kind_are_written_as_text(tmp_path, source):
    h, y = source
    Caster().fit(h, [[None, "one", 2, 3.5, (4, 4)][c] for c in y]).save(tmp_path / "s.caster")
    np.savez(tmp_path / "target.npz", features=h[:64])
    out = tmp_path / "out.parquet"
    predict_file(tmp_path / "s.caster", tmp_path / "target.npz", out, batch_size=64)
    assert {row["prediction"] for row in rows_of(out)} <= {"None", "one", "2", "3.5", "(4, 4)"}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("case", ["caster", "frozen", "source-gda"])
def test_probabilities_are_those_of_the_scores_that_gave_the_answer(files, suffix, case):
    out, target = files / f"out.{suffix}", "bare.npz" if case == "source-gda" else "target.npz"
    tau = None if case == "caster" else 1e-6
    arguments = (files / "s.caster", files / target, out)
    predict_file(*arguments, batch_size=50, tau=tau, probabilities=True)
    clf, given = caster.load(files / "s.caster"), np.load(files / target)
    rows = rows_of(out)
    for start in range(0, 150, 50):
        features = given["features"][start : start + 50]
        scores = {
            "caster": lambda features=features: clf.adapt(features).adapted,
            "frozen": lambda start=start: given["logits"][start : start + 50],
            "source-gda": lambda features=features: clf.source_scores(features),
        }[case]()
        expected = softmax(scores.astype(float), axis=1)
        part = rows[start : start + 50]
        assert {row["method"] for row in part} == {case}
        got = np.array([[float(row[f"p:{name}"]) for name in clf.classes_] for row in part])
        np.testing.assert_allclose(got, expected, atol=1e-6)
        sure = [float(row["confidence"]) for row in part]
        assert sure == [float(row[f"p:{row['prediction']}"]) for row in part]
        np.testing.assert_allclose(sure, expected.max(axis=1), atol=1e-6)
    assert list(rows[0])[-5:] == [f"p:{name}" for name in clf.classes_]


def test_infinite_logits_have_no_probability(files):
    whole = np.load(files / "target.npz")
    logits = whole["logits"].astype(float)
    logits[0], logits[1, 2] = -np.inf, np.inf
    np.savez(files / "inf.npz", features=whole["features"], logits=logits)
    out = files / "out.csv"
    predict_file(files / "s.caster", files / "inf.npz", out, batch_size=50, tau=1e-6)
    sure = [float(row["confidence"]) for row in rows_of(out)]
    assert np.isnan(sure[:2]).all()
    assert np.isfinite(sure[2:]).all()


def test_labels_that_print_alike_keep_columns_of_their_own(tmp_path, source):
    h, y = source
    labels = [1, "1", "one \udce9", 2, None]
    Caster().fit(h, [labels[c] for c in y]).save(tmp_path / "s.caster")
    np.savez(tmp_path / "target.npz", features=h[:64])
    for out in (tmp_path / "out.parquet", tmp_path / "out.csv"):
        arguments = (tmp_path / "s.caster", tmp_path / "target.npz", out)
        predict_file(*arguments, batch_size=64, probabilities=True)
        names = [name for name in rows_of(out)[0] if name.startswith("p:")]
        assert len(names) == 5
        assert {"p:1", "p:'1'"} <= set(names)


@pytest.mark.parametrize(
    ("changed", "head", "many"),
    [(31, None, True), (30, None, False), (31, 0.99, True), (31, 0.8, False), (41, 0.8, True)],
)
def test_changes_are_too_many_beyond_what_the_head_errs_on_the_source(changed, head, many):
    check = SourceCheck(600, head, 0.9, 0.9, 0.9, 1.0, None, 9.0)
    summary = Summary(rows=200, adapted=100, changed=changed, source_check=check)
    assert summary.changed_share == changed / 100
    assert summary.changed_too_many == many


def test_no_share_of_changes_without_adapted_rows_or_a_head():
    assert Summary(rows=9, changed=0).changed_share is None
    assert not Summary(rows=9, adapted=9).changed_too_many


@pytest.mark.parametrize(("adapted", "many"), [(63, False), (64, True)])
def test_changes_in_few_rows_are_not_too_many(adapted, many):
    assert Summary(rows=adapted, adapted=adapted, changed=adapted).changed_too_many == many


@pytest.mark.parametrize(
    ("answers", "source", "found"),
    [
        ({"cat": 61, "dog": 39}, {"cat": 0.1, "dog": 0.9}, ("cat", 0.61)),
        ({"cat": 60, "dog": 40}, {"cat": 0.1, "dog": 0.9}, None),
        ({"cat": 99, "dog": 1}, {"cat": 0.5, "dog": 0.5}, None),  # most of the source are cats
        ({"cat": 63}, {"cat": 0.1, "dog": 0.9}, None),  # too few rows
        ({}, {}, None),
    ],
)
def test_answers_of_one_class_are_noticed_unless_the_source_has_as_many(answers, source, found):
    rows = sum(answers.values())
    assert Summary(rows=rows, answers=Counter(answers), source_shares=source).lopsided == found


# --- the doctor ------------------------------------------------------------------------------


def test_the_doctor_counts_right(files):
    found = diagnose(files / "s.caster", 20)
    moments = states.load(files / "s.caster").moments
    assert (found.k, found.k0, found.n_classes) == (4, 4, 5)
    assert not found.diagonal
    assert found.reasons.total() == 32
    assert found.state_bytes == (files / "s.caster").stat().st_size
    assert found.bank_bytes == 920 * 12 * 4
    rng = np.random.default_rng(0)
    drawn = [len(set(rng.choice(5, 20, p=moments.counts / 920))) for _ in range(4000)]
    assert found.expected_classes == pytest.approx(np.mean(drawn), abs=0.05)


def test_the_doctor_repeats_itself(files):
    assert diagnose(files / "s.caster", 32) == diagnose(files / "s.caster", 32)


@pytest.mark.parametrize("batch_size", [12, 16, 24, 48])
def test_the_doctor_foresees_held_out_batches(tmp_path, batch_size):
    """On fresh data like the source, the gate does what the simulation said."""
    h, y = problem(n=20_000)
    Caster().fit(h[:10_000], y[:10_000]).save(tmp_path / "s.caster")
    clf = caster.load(tmp_path / "s.caster")
    held_out = np.split(h[10_000 : 10_000 + 200 * batch_size], 200)
    accepted = np.mean([clf.adapt(batch).verdict.accepted for batch in held_out])
    foreseen = diagnose(tmp_path / "s.caster", batch_size).acceptance
    assert foreseen == pytest.approx(accepted, abs=0.15)  # 32 trials have an error of 0.09


@pytest.mark.parametrize("safeguards", [True, False])
def test_the_doctor_knows_what_becomes_of_streams_sorted_by_class(tmp_path, safeguards):
    """With few classes, batches of one class pass the paper's gate: the doctor must say so."""
    h, y = problem(n=4000, n_classes=2)
    Caster(safeguards=safeguards).fit(h, y).save(tmp_path / "s.caster")
    clf = caster.load(tmp_path / "s.caster")
    alone = [h[y == c][i : i + 64] for c in (0, 1) for i in range(0, 960, 64)]
    accepted = np.mean([clf.adapt(batch).verdict.accepted for batch in alone])
    found = diagnose(tmp_path / "s.caster", 64)
    assert found.one_class_acceptance == pytest.approx(accepted, abs=0.2)
    assert accepted == 0 if safeguards else accepted > 0.5
    warned = "keep a stream's classes mixed" in "\n".join(found.sentences())
    assert warned is not safeguards


def test_the_doctor_says_that_the_source_turns_transport_off(files):
    state = states.load(files / "s.caster")
    off = SourceCheck(600, 0.99, 0.5, 0.5, 0.5, 1.0, 0.49, 1.2)
    states.save(replace(state, source_check=off), files / "off.caster")
    found = diagnose(files / "off.caster", 64)
    assert found.acceptance == 0
    text = "\n".join(found.sentences())
    assert off.sentences()[0] in text
    assert "Every batch gets the frozen model's answer" in text
    assert "simulated batches" not in text
    assert "Layers still adapt" not in text  # the state has none
    assert "simulated batches" not in "\n".join(diagnose(files / "off.caster", 1).sentences())
    assert "N = 920 source samples, d = 12 features, C = 5 classes: N/d = 76.7, enough" in text
    forced = replace(state, source_check=off, settings=replace(state.settings, safeguards=False))
    states.save(forced, files / "forced.caster")
    found = diagnose(files / "forced.caster", 64)
    assert found.acceptance > 0.9
    assert "simulated batches" in "\n".join(found.sentences())


def test_the_doctor_says_when_there_are_few_samples_a_feature(tmp_path):
    h, y = problem(n=100, d=80)
    Caster().fit(h, y).save(tmp_path / "s.caster")
    assert "at least 4 is recommended" in diagnose(tmp_path / "s.caster", 64).sentences()[0]


def test_the_doctor_takes_classes_of_few_samples(tmp_path):
    few_samples().save(tmp_path / "s.caster")
    assert diagnose(tmp_path / "s.caster", 64).reasons.total() == 32


def test_the_smallest_batch_does_and_smaller_ones_do_not(files):
    found = diagnose(files / "s.caster", 64)
    assert found.smallest_batch in BATCH_SIZES
    assert diagnose(files / "s.caster", found.smallest_batch).acceptance >= 0.9
    for size in BATCH_SIZES[: BATCH_SIZES.index(found.smallest_batch)]:
        assert diagnose(files / "s.caster", size).acceptance < 0.9


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [
        (1, ["batch of one", "batch_too_small", "0%"]),
        (4, ["3 of 4 directions", "diagonal map", "4 < 2k = 6", "min_samples"]),
        (400, ["4 of 4 directions", "full map", "400 >= 2k = 8", "can be supported"]),
    ],
)
def test_the_doctor_speaks_plainly(files, batch_size, words):
    text = "\n".join(diagnose(files / "s.caster", batch_size).sentences())
    for word in (*words, "k-NN bank"):
        assert word in text


@pytest.mark.parametrize(("smallest", "accepted"), [(6, 27), (6, 32), (12, 27)])
def test_the_doctor_says_why_a_smaller_batch_suffices(files, smallest, accepted):
    found = replace(
        diagnose(files / "s.caster", 64),
        smallest_batch=smallest,
        reasons=Counter(accepted=accepted, ratio=32 - accepted),
    )
    text = "\n".join(found.sentences())
    told = f"has about {smallest} samples and a diagonal map; from 8 samples on the map is full"
    assert (told in text) == (smallest < 2 * found.k0 and accepted < 0.9 * 32)


def test_the_doctor_says_when_nothing_would_do(tmp_path, source):
    Caster(min_samples=10**6).fit(*source).save(tmp_path / "s.caster")
    found = diagnose(tmp_path / "s.caster", 64)
    assert found.smallest_batch is None
    assert f"No batch size up to {BATCH_SIZES[-1]:,}" in "\n".join(found.sentences())
    assert not math.isnan(found.median_ratio)


def test_outputs_never_replace_inputs_links_or_devices(files):
    state, target = files / "s.caster", files / "target.npz"
    np.savez(files / "t.parquet.npz", features=np.zeros((3, 12)))
    before = {path: path.read_bytes() for path in files.iterdir()}
    with pytest.raises(CasterError, match="is an input"):
        fit_file(files / "source.npz", files / "source.npz", Settings())
    (files / "same.csv").symlink_to(state)
    with pytest.raises(CasterError, match="is an input"):
        predict_file(state, target, files / "same.csv", batch_size=64)
    with pytest.raises(CasterError, match="not a regular file"):
        fit_file(files / "source.npz", Path(os.devnull), Settings())
    assert all(path.read_bytes() == content for path, content in before.items())
    (files / "link.caster").symlink_to(state)
    fit_file(files / "source.npz", files / "link.caster", Settings(k_max=2))
    assert (files / "link.caster").is_symlink()
    assert caster.load(state).moments_.rank == 2


def test_a_bad_tau_is_not_blamed_on_the_rows(files):
    with pytest.raises(CasterError, match=r"^tau must be"):
        predict_file(
            files / "s.caster", files / "target.npz", files / "o.csv", batch_size=9, tau=math.nan
        )


def test_a_full_disk_is_one_line(files, monkeypatch):
    def full(self, columns):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("caster.io.prediction_table.CsvTable.write", full)
    with pytest.raises(CasterError, match=r"cannot write .*o\.csv: No space left"):
        predict_file(files / "s.caster", files / "target.npz", files / "o.csv", batch_size=64)
    assert not list(files.glob(".*"))


def test_logits_of_a_bound_state_are_the_models(files, source, tmp_path):
    """A file holds them as the model gave them, whatever order the state has its classes in."""
    h, y = source
    order = [3, 1, 4, 0, 2]  # the model's outputs, by class index
    head = tuple(order.index(c) for c in range(5))
    held = states.load(files / "s.caster")
    states.save(replace(held, head=head, model_sha256="0" * 64), tmp_path / "bound.caster")
    logits = np.ascontiguousarray(5.0 * np.eye(5)[y[:150]][:, order])
    np.savez(tmp_path / "t.npz", features=h[:150], logits=logits, labels=NAMES[y[:150]])
    summary = predict_file(
        tmp_path / "bound.caster", tmp_path / "t.npz", tmp_path / "o.csv", batch_size=50
    )
    frozen = [row["frozen"] for row in rows_of(tmp_path / "o.csv")]
    assert frozen == NAMES[y[:150]].tolist()
    assert summary.rows == 150


def test_the_doctor_tells_of_layers(tmp_path):
    images, labels = small_network.make_images(240, seed=2)
    batches = zip(np.split(images, 4), np.split(labels, 4), strict=True)
    adapter = caster.fit(small_network.model(), batches)
    adapter.save(tmp_path / "s.caster")
    found = diagnose(tmp_path / "s.caster", 64)
    sites, channels, counts = found.layers.sites, found.layers.channels, np.bincount(labels)
    assert sites == len(adapter.state.layers)
    assert channels == sum(len(site.mean) for site in adapter.state.layers.values())
    assert found.layers.images == tuple(counts)
    words = found.layers.sentences()
    assert words[0].startswith(f"Sites: {sites}, with {channels} channels")
    images = f"{counts.min()} to {counts.max()} images each at {sites} of {sites} sites"
    assert words[1].startswith(f"Classes: {len(counts)}, measured on {images}")
    assert not any("Few images" in line for line in words)
    few = replace(found.layers, images=(3, 9, 4, 20), by_class=sites - 1)
    assert "the others have the source's moments only" in few.sentences()[1]
    assert few.sentences()[2].startswith("Few images: 2 of the classes have fewer than 5")
    assert "no site has moments per class" in replace(few, images=()).sentences()[1]
    assert "BatchNorm inputs" in replace(few, sites=0, images=()).sentences()[0]
