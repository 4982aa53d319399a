"""Fit, predict and evaluate on images, against the same work done by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

import caster
from caster import Adapter, Caster, CasterError, wrap
from caster import state as states
from caster.adapt.fitting import fit_images
from caster.adapt.prediction import predict_images
from caster.config import Settings
from caster.io.images import open_images
from caster.models.onnx import OnnxModel
from caster.report.evaluation import evaluate_images
from tests.support.colours import CAST, NAMES, TOML, by_hand, patches, write_folder, write_model
from tests.support.messages import error_line
from tests.support.tables import read_table as rows_of

PIXELS, TRUTH = patches(40)
SHIFTED, TARGET = patches(16, seed=1, cast=CAST)
LABELS = np.array(NAMES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Source and target images, the model, and a state fitted from its features by hand."""
    folder = tmp_path_factory.mktemp("made")
    write_folder(folder / "source", PIXELS, TRUTH)
    write_folder(folder / "target", SHIFTED, TARGET)
    write_model(folder / "colours.onnx")
    (folder / "p.toml").write_text(TOML)
    model = wrap(folder / "colours.onnx", preprocessing=folder / "p.toml")
    fit_images(
        model,
        open_images(folder / "source"),
        folder / "s.caster",
        Settings(),
        store=folder / "cache",
        batch_size=64,
        layers=False,
    )
    return folder


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Drawing takes a second; one test looks at the page."""
    monkeypatch.setattr(
        "caster.report.evaluation.write_page", lambda found, path: path.write_text(found.name)
    )


def model_of(made, name="colours.onnx"):
    return wrap(made / name, preprocessing=made / "p.toml")


def decoded(paths):
    """Batches as the model takes them, by Pillow and hand."""
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32).transpose(0, 3, 1, 2)


def fit(made, tmp_path, source="source", **options):
    out = tmp_path / "s.caster"
    images = source if hasattr(source, "read") else open_images(made / source, labelled=True)
    arguments = {"store": tmp_path / "cache", "batch_size": 64} | options
    model = arguments.pop("model", None) or model_of(made)
    settings = arguments.pop("settings", Settings())
    unreadable = fit_images(model, images, out, settings, **arguments).unreadable
    return states.load(out), unreadable


def adapter_of(made, arguments):
    """The adapter given, or one with what of the arguments is its."""
    own = {name: arguments.pop(name) for name in ("tau", "safeguards") if name in arguments}
    return arguments.pop("adapter", None) or Adapter(model_of(made), made / "s.caster", **own)


def predict(made, tmp_path, source="target", out="out.csv", **options):
    images = source if hasattr(source, "read") else open_images(made / source)
    arguments = {"batch_size": 64} | options
    adapter = adapter_of(made, arguments)
    summary = predict_images(adapter, images, tmp_path / out, **arguments)
    return summary, rows_of(tmp_path / out)


def evaluate(made, tmp_path, source="target", **options):
    images = source if hasattr(source, "read") else open_images(made / source)
    arguments = {"store": tmp_path / "cache", "batch_size": 32, "seed": 3} | options
    adapter = adapter_of(made, arguments)
    _, unreadable = evaluate_images(adapter, images, tmp_path / "page.html", **arguments)
    return json.loads((tmp_path / "page.json").read_text()), unreadable


class Counting:
    """Images, and how often they were read."""

    def __init__(self, images):
        self.images, self.reads = images, []

    def __getattr__(self, name):
        return getattr(self.images, name)

    def __len__(self):
        return len(self.images)

    def read(self, index):
        self.reads.append(index)
        return self.images.read(index)


class Unread(Counting):
    """Images that nobody may read."""

    def read(self, index):
        raise AssertionError(f"image {index} was read")


def spoil(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"no image")


def same(moments, expected, tolerance=1e-4):
    for name in ("means", "covariances", "counts"):
        np.testing.assert_allclose(
            getattr(moments, name), getattr(expected, name), rtol=tolerance, atol=tolerance
        )


# fit


def test_a_state_is_what_the_same_features_give_by_hand(made):
    features, _ = by_hand(PIXELS)
    expected = Caster().fit(features.astype(np.float32), LABELS[TRUTH])
    held = states.load(made / "s.caster")
    same(held.moments, expected.moments_)
    assert held.classes.tolist() == NAMES
    assert held.head == tuple(range(8))
    assert held.model_sha256 == OnnxModel(made / "colours.onnx").sha256
    assert held.preprocessing_sha256 == model_of(made).preprocessing.sha256


def test_a_second_fit_reads_no_image(made, tmp_path):
    images = Counting(open_images(made / "source"))
    first, _ = fit(made, tmp_path, images)
    assert sorted(images.reads) == list(range(320))
    second, _ = fit(made, tmp_path, Unread(images), settings=Settings(k_max=2))
    assert (first.moments.rank, second.moments.rank) == (3, 2)
    features, _ = by_hand(PIXELS)
    expected = Caster(k_max=2).fit(features.astype(np.float32), LABELS[TRUTH])
    same(second.moments, expected.moments_)


def test_another_batch_size_gives_the_same_state(made, tmp_path):
    first, _ = fit(made, tmp_path)
    second, _ = fit(made, tmp_path, store=tmp_path / "other", batch_size=7)
    same(first.moments, second.moments)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_give_what_files_give(made, tmp_path, save):
    order = np.random.default_rng(0).permutation(320)
    save(made / "source.npz", images=PIXELS[order], labels=LABELS[TRUTH[order]])
    held, _ = fit(made, tmp_path, "source.npz")
    same(held.moments, states.load(made / "s.caster").moments)
    assert held.head == tuple(range(8))


def test_numbers_as_labels_are_columns(made, tmp_path):
    some = TRUTH >= 4
    np.savez(made / "numbers.npz", images=PIXELS[some], labels=TRUTH[some])
    held, _ = fit(made, tmp_path, "numbers.npz")
    assert held.classes.tolist() == [4, 5, 6, 7]
    assert held.head == (4, 5, 6, 7)


def test_outputs_in_another_order_and_of_more_classes(made, tmp_path):
    order = [5, 0, 7, 2, 4, 6, 1, 3]
    write_model(made / "mixed.onnx", order)
    named = [NAMES[c] for c in order]
    some = np.isin(TRUTH, [1, 4, 6])
    folder = write_folder(tmp_path / "some", PIXELS[some], TRUTH[some])
    held, _ = fit(made, tmp_path, folder, model=model_of(made, "mixed.onnx"), named_classes=named)
    assert held.classes.tolist() == ["brown", "ebony", "green"]
    assert held.head == (6, 4, 5)
    adapter = Adapter(model_of(made, "mixed.onnx"), tmp_path / "s.caster")
    _, rows = predict(made, tmp_path, folder, adapter=adapter, tau=1e-9)
    assert [row["frozen"] for row in rows] == LABELS[TRUTH[some]].tolist()
    assert [row["prediction"] for row in rows] == [row["frozen"] for row in rows]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (None, "the model has 8 logits and the data has 3 classes"),
        (NAMES[:7], "7 classes are named, and the model has 8 logits"),
        (["ivory", *NAMES[1:]], None),
        ([*NAMES[:4], "ivory", *NAMES[5:]], "class 'ebony' of the data is not one of"),
        ([*NAMES[:7], "azure"], "'azure' is named twice"),
    ],
)
def test_classes_that_do_not_fit_are_reported_after_one_batch(made, tmp_path, named, why):
    some = np.isin(TRUTH, [1, 4, 6])
    folder = write_folder(tmp_path / "some", PIXELS[some], TRUTH[some])
    images = Counting(open_images(folder))
    if why is None:
        assert fit(made, tmp_path, images, named_classes=named)[0].head == (1, 4, 6)
        return
    with pytest.raises(CasterError, match=why):
        fit(made, tmp_path, images, named_classes=named, batch_size=8)
    assert set(images.reads) <= set(range(16))
    assert not (tmp_path / "s.caster").exists()


def test_a_model_of_other_classes(made, tmp_path):
    some = np.isin(TRUTH, [1, 4, 6])
    folder = write_folder(tmp_path / "some", PIXELS[some], TRUTH[some])
    held, _ = fit(made, tmp_path, folder, use_head=False)
    assert held.head is None
    adapter = Adapter(model_of(made), tmp_path / "s.caster")
    summary, rows = predict(made, tmp_path, folder, adapter=adapter, tau=1e-9)
    assert summary.changed is None
    assert "frozen" not in rows[0]
    features, _ = by_hand(PIXELS[some])
    clf = caster.load(tmp_path / "s.caster")
    gda = clf.classes_[clf.source_scores(features.astype(np.float32)).argmax(axis=1)]
    assert [row["prediction"] for row in rows] == gda.tolist()
    found, _ = evaluate(made, tmp_path, folder, adapter=adapter)
    assert found["baseline"] == "source_gda"
    assert "frozen" not in found["scores"]


def test_what_cannot_be_fitted_is_reported_before_an_image_is_read(made, tmp_path):
    lonely = TRUTH.copy()
    lonely[1:40] = 1
    folder = write_folder(tmp_path / "lonely", PIXELS, lonely)
    with pytest.raises(CasterError, match=r"class 'azure' of .*lonely has 1 image"):
        fit(made, tmp_path, Unread(open_images(folder)))
    classes = np.array([*NAMES, "ivory"])
    np.savez(tmp_path / "more.npz", images=PIXELS, labels=TRUTH, classes=classes)
    with pytest.raises(CasterError, match=r"class 'ivory' of .* has no image"):
        fit(made, tmp_path, Unread(open_images(tmp_path / "more.npz")))
    np.savez(tmp_path / "one.npz", images=PIXELS, labels=np.zeros(320, dtype=int))
    with pytest.raises(CasterError, match="at least 2 classes are needed"):
        fit(made, tmp_path, Unread(open_images(tmp_path / "one.npz")))
    np.savez(tmp_path / "bare.npz", images=PIXELS)
    with pytest.raises(CasterError, match="has no labels"):
        fit(made, tmp_path, Unread(open_images(tmp_path / "bare.npz")))
    assert not (tmp_path / "s.caster").exists()
    assert not (tmp_path / "cache").exists()


def test_skipped_images_are_no_samples(made, tmp_path):
    folder = write_folder(tmp_path / "source", PIXELS, TRUTH)
    spoil(folder, "azure/000.png", "honey/319.png")
    with pytest.raises(CasterError, match=r"cannot read .*azure/000\.png.*skip_unreadable="):
        fit(made, tmp_path, folder)
    assert not (tmp_path / "s.caster").exists()
    held, unreadable = fit(made, tmp_path, folder, skip_unreadable=True)
    assert held.moments.counts.tolist() == [39, *[40] * 6, 39]
    assert [re.search(r"\w+/\d+\.png", line).group() for line in unreadable] == [
        "azure/000.png",
        "honey/319.png",
    ]
    features, _ = by_hand(PIXELS[1:-1])
    expected = Caster().fit(features.astype(np.float32), LABELS[TRUTH[1:-1]])
    same(held.moments, expected.moments_)


def test_images_of_any_size_for_a_model_that_resizes_itself(made, tmp_path):
    """Every other image is taller; their mean colour is all that counts."""
    write_model(tmp_path / "any.onnx", size="?")
    tall = [np.repeat(p, 1 + i % 2, axis=0) for i, p in enumerate(PIXELS)]
    folder = write_folder(tmp_path / "tall", tall, TRUTH)
    model = wrap(tmp_path / "any.onnx", preprocessing="in-graph")
    held, _ = fit(made, tmp_path, folder, model=model)
    means = PIXELS.mean(axis=(1, 2))
    expected = Caster().fit(means.astype(np.float32), LABELS[TRUTH])
    same(held.moments, expected.moments_, 1e-3)


# predict


def expected_batches(made, paths, batch_size, **settings):
    """Adaptations to files in this order, by Pillow, ONNX Runtime and the estimator."""
    model, clf = OnnxModel(made / "colours.onnx"), caster.load(made / "s.caster")
    clf.set_params(**settings)
    for start in range(0, len(paths), batch_size):
        some = paths[start : start + batch_size]
        outputs = model(decoded(some))
        frozen = LABELS[outputs.logits.argmax(axis=1)].tolist()
        yield some, clf.adapt(outputs.features, outputs.logits), frozen


def check_rows(rows, made, paths, batch_size, **settings):
    at = 0
    for i, (some, out, frozen) in enumerate(expected_batches(made, paths, batch_size, **settings)):
        part = rows[at : at + len(some)]
        assert [row["prediction"] for row in part] == out.labels.tolist()
        assert [row["frozen"] for row in part] == frozen
        assert {int(row["batch"]) for row in part} == {i}
        assert {row["verdict"] for row in part} == {
            "accepted" if out.verdict.accepted else "rejected"
        }
        assert {row["reason"] for row in part} == {out.verdict.reason}
        for row in part:
            assert float(row["ratio"]) == pytest.approx(out.verdict.ratio, rel=1e-3)
        at += len(some)
    assert at == len(rows)


def target_paths(made):
    return [made / "target" / NAMES[c] / f"{i:03}.png" for i, c in enumerate(TARGET)]


@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
@pytest.mark.parametrize("batch_size", [64, 50, 200])
def test_predictions_are_those_of_the_same_work_by_hand(made, tmp_path, out, batch_size):
    summary, rows = predict(made, tmp_path, out=out, batch_size=batch_size)
    check_rows(rows, made, target_paths(made), batch_size)
    assert list(rows[0]) == [
        *("row", "image", "batch", "prediction", "confidence", "frozen", "verdict"),
        *("ratio", "reason", "method"),
    ]
    assert {(row["verdict"], row["method"]) for row in rows} <= {
        *(("accepted", "caster"), ("rejected", "frozen"))
    }
    assert [int(row["row"]) for row in rows] == list(range(128))
    assert [row["image"] for row in rows] == [
        f"{NAMES[c]}/{i:03}.png" for i, c in enumerate(TARGET)
    ]
    changed = sum(row["prediction"] != row["frozen"] for row in rows)
    assert (summary.rows, summary.changed) == (128, changed)


def test_by_default_layers_are_aligned_as_by_hand(made, tmp_path):
    """Interrupted and continued, the table is that of the same stream in one piece."""
    held, _ = fit(made, tmp_path)
    assert list(map(len, (found.mean for found in held.layers.values()))) == [3]
    adapter = Adapter(model_of(made), held)
    images = Counting(open_images(made / "target"))
    with pytest.raises(KeyboardInterrupt, match=r"64 of 128 images are answered in .*\.partial"):
        predict(made, tmp_path, images, adapter=adapter, progress=interrupted("adapting", 64))
    images.reads.clear()
    summary, rows = predict(made, tmp_path, images, adapter=adapter)
    assert sorted(images.reads) == list(range(64, 128))
    assert (summary.method, summary.sites, summary.resumed) == ("mixture-transport", 1, 64)
    accepted = {row["batch"] for row in rows if row["verdict"] == "accepted"}
    assert (summary.accepted, summary.batches) == (len(accepted), 2)
    stream, paths = adapter.new_stream(), target_paths(made)
    for start in (0, 64):
        out, part = stream(decoded(paths[start : start + 64])), rows[start : start + 64]
        assert [row["prediction"] for row in part] == out.labels.tolist()
        assert {row["reason"] for row in part} == {out.verdict.reason}
        for row in part:
            assert float(row["ratio"]) == pytest.approx(out.verdict.ratio, rel=1e-3)
    _, logits = by_hand(SHIFTED)
    assert [row["frozen"] for row in rows] == LABELS[logits.argmax(axis=1)].tolist()
    found, _ = evaluate(made, tmp_path, adapter=adapter, batch_size=64, seed=None)
    right = np.mean(
        [row["prediction"] == label for row, label in zip(rows, LABELS[TARGET], strict=True)]
    )
    assert found["scores"]["gated"]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("seed", [0, 7])
def test_shuffled_images_keep_their_rows(made, tmp_path, seed):
    summary, rows = predict(made, tmp_path, shuffle=seed, safeguards=False)
    order = np.random.default_rng(seed).permutation(128)
    assert [int(row["row"]) for row in rows] == order.tolist()
    paths = target_paths(made)
    check_rows(rows, made, [paths[i] for i in order], 64, safeguards=False)
    truth = LABELS[TARGET[order]].tolist()
    right = np.mean([row["prediction"] == label for row, label in zip(rows, truth, strict=True)])
    frozen = np.mean([row["frozen"] == label for row, label in zip(rows, truth, strict=True)])
    assert summary.reasons == {"accepted": 2}
    assert right > 0.95  # mixed, the cast can be undone
    assert frozen < 0.4


def test_flat_folders_lists_files_and_arrays(made, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    order = np.random.default_rng(1).permutation(128)
    for i, j in enumerate(order):
        Image.fromarray(SHIFTED[j]).save(flat / f"{i:03}.png")
    paths = [flat / f"{i:03}.png" for i in range(128)]
    (tmp_path / "list.txt").write_text("".join(f"flat/{path.name}\n" for path in paths))
    np.savez(tmp_path / "shots.npz", images=SHIFTED[order])
    names = {
        "flat": [path.name for path in paths],
        "list.txt": [f"flat/{path.name}" for path in paths],
        "shots.npz": [f"shots.npz[{i}]" for i in range(128)],
    }
    sources = {name: open_images(tmp_path / name) for name in names}
    sources["files"], names["files"] = open_images(paths), [str(path) for path in paths]
    for name, images in sources.items():
        _, rows = predict(made, tmp_path, images)
        check_rows(rows, made, paths, 64)
        assert [row["image"] for row in rows] == names[name]


def test_tau_and_the_gate(made, tmp_path):
    refused, rows = predict(made, tmp_path, shuffle=0, tau=1e-6, safeguards=False)
    assert refused.reasons == {"ratio": 2}
    assert refused.changed == 0
    assert [row["prediction"] for row in rows] == [row["frozen"] for row in rows]
    ungated, rows = predict(made, tmp_path, shuffle=0, tau=1e-6, gate=False, safeguards=False)
    assert ungated.reasons == {"ratio": 2}
    truth = LABELS[TARGET[np.random.default_rng(0).permutation(128)]]
    assert np.mean([r["prediction"] == t for r, t in zip(rows, truth, strict=True)]) > 0.95


def test_skipped_images_have_no_row_and_leave_no_gap(made, tmp_path):
    folder = write_folder(tmp_path / "target", SHIFTED, TARGET)
    gone = [0, 3, 70]
    spoil(folder, *(f"{NAMES[TARGET[i]]}/{i:03}.png" for i in gone))
    (tmp_path / "out.csv").write_text("precious")
    with pytest.raises(CasterError, match=r"azure/000\.png"):
        predict(made, tmp_path, folder)
    assert (tmp_path / "out.csv").read_text() == "precious"
    summary, rows = predict(made, tmp_path, folder, skip_unreadable=True, batch_size=50)
    kept = [i for i in range(128) if i not in gone]
    assert [int(row["row"]) for row in rows] == kept
    assert [row["batch"] for row in rows] == [str(i // 50) for i in kept]
    assert [len(line.split("target/")) for line in summary.unreadable] == [2, 2, 2]


def test_predictions_cache_nothing_and_read_every_image_once(made, tmp_path):
    images = Counting(open_images(made / "target"))
    _, rows = predict(made, tmp_path, images)
    check_rows(rows, made, target_paths(made), 64)
    assert sorted(images.reads) == list(range(128))
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_parquet_is_not_continued(made, tmp_path):
    with pytest.raises(KeyboardInterrupt, match="output can be continued"):
        predict(made, tmp_path, out="out.parquet", progress=interrupted("adapting", 64))
    assert list(tmp_path.iterdir()) == []


def interrupted(stage, done):
    def stop(now, reached, total):
        if (now, reached) == (stage, done):
            raise KeyboardInterrupt

    return stop


def test_large_batches_go_through_the_model_in_pieces(made, tmp_path):
    adapter = Adapter(model_of(made), made / "s.caster")
    sizes, model = [], adapter.model

    class Noting:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, batch):
            sizes.append(len(batch))
            return model(batch)

    adapter.model = Noting()
    predict(made, tmp_path, adapter=adapter, batch_size=128)
    assert sizes == [64, 64]


def test_a_state_too_narrow_for_the_model_is_reported_after_one_batch(made, tmp_path):
    wide = write_model(tmp_path / "wide.onnx")
    rng = np.random.default_rng(0)
    Caster().fit(rng.normal(size=(80, 5)) + 9 * np.eye(8, 5)[TRUTH[::4]], TRUTH[::4]).save(
        tmp_path / "five.caster"
    )
    adapter = Adapter(
        wrap(wide, preprocessing=made / "p.toml"),
        tmp_path / "five.caster",
        allow_other_model=True,
        allow_other_preprocessing=True,
    )
    for job in (predict, evaluate):
        np.savez(tmp_path / "t.npz", images=SHIFTED, labels=TARGET)
        images = Counting(open_images(tmp_path / "t.npz"))
        with pytest.raises(CasterError, match=r"fitted to 5 features, and .*wide\.onnx gives 3"):
            job(made, tmp_path, images, adapter=adapter, batch_size=16)
        assert set(images.reads) <= set(range(32))
    assert not (tmp_path / "out.csv").exists()


def test_ctrl_c_leaves_no_page(made, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluate(made, tmp_path, progress=interrupted("adapting", 32))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    evaluate(made, tmp_path)
    assert len(list(tmp_path.iterdir())) > 1


def test_outputs_are_rejected_before_the_work(made, tmp_path):
    unread = Unread(open_images(made / "target"))
    for out, why in (("out.txt", "csv or .parquet"), ("no/out.csv", "no folder")):
        with pytest.raises(CasterError, match=why):
            predict(made, tmp_path, unread, out=out)
    adapter = Adapter(model_of(made), made / "s.caster")
    with pytest.raises(CasterError, match=r"must end in \.html"):
        evaluate_images(
            adapter, unread, tmp_path / "page.txt", store=tmp_path, batch_size=9, seed=0
        )
    for job in (predict, evaluate):
        with pytest.raises(CasterError, match="batch size must be at least 1"):
            job(made, tmp_path, unread, batch_size=0)
        with pytest.raises(CasterError, match=r"^tau must be"):
            job(made, tmp_path, unread, tau=-1.0)
    assert list(tmp_path.iterdir()) == []


# evaluate


def scores_by_hand(made, batch_size, seed):
    """Log-probabilities of four classifiers on the shuffled target, and the verdicts."""
    clf = caster.load(made / "s.caster").set_params(safeguards=False)
    features, logits = by_hand(SHIFTED)
    order = np.random.default_rng(seed).permutation(128)
    found = {name: np.empty((128, 8)) for name in ("frozen", "source_gda", "ungated", "gated")}
    verdicts = []
    for start in range(0, 128, batch_size):
        rows = order[start : start + batch_size]
        out = clf.adapt(features[rows].astype(np.float32), logits[rows])
        found["frozen"][rows] = logits[rows]
        found["source_gda"][rows] = clf.source_scores(features[rows].astype(np.float32))
        found["ungated"][rows] = out.adapted
        found["gated"][rows] = out.adapted if out.verdict.accepted else logits[rows]
        verdicts.append(out.verdict)
    for scores in found.values():
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return found, verdicts


def test_the_numbers_are_those_by_hand(made, tmp_path):
    found, unreadable = evaluate(made, tmp_path, batch_size=32, seed=3, safeguards=False)
    scores, verdicts = scores_by_hand(made, 32, 3)
    assert unreadable == []
    frozen = scores["frozen"].argmax(axis=1) == TARGET
    for name, log_probabilities in scores.items():
        right = log_probabilities.argmax(axis=1) == TARGET
        score = found["scores"][name]
        assert score["accuracy"] == pytest.approx(right.mean())
        assert score["harm"] == pytest.approx((frozen & ~right).mean())
        assert score["help"] == pytest.approx((~frozen & right).mean())
        nll = -log_probabilities[np.arange(128), TARGET].mean()
        assert score["nll"] == pytest.approx(nll, rel=1e-3)
        confidence = np.exp(log_probabilities.max(axis=1))
        bins = np.minimum((confidence * 15).astype(int), 14)
        error = sum(
            abs(np.sum(confidence[bins == b]) - np.sum(right[bins == b])) for b in range(15)
        )
        assert score["calibration_error"] == pytest.approx(error / 128, abs=1e-3)
    assert found["scores"]["frozen"]["accuracy"] < 0.4
    assert found["scores"]["gated"]["accuracy"] > 0.95
    accepted = [verdict.accepted for verdict in verdicts]
    assert found["acceptance"] == pytest.approx(np.mean(accepted))
    assert [batch["verdict"]["accepted"] for batch in found["batches"]] == accepted
    ratios = [verdict.ratio for verdict in verdicts]
    assert [batch["verdict"]["ratio"] for batch in found["batches"]] == pytest.approx(
        ratios, rel=1e-3
    )
    assert (found["samples"], found["batch_size"]) == (128, 32)


@pytest.mark.slow
def test_what_took_part_is_written_down(made, tmp_path, monkeypatch):
    monkeypatch.undo()  # with all the figures
    images = open_images(made / "target")
    found, _ = evaluate(made, tmp_path)
    model = model_of(made)
    assert found["digests"] == {
        "state": states.digest(states.load(made / "s.caster")),
        "model": model.sha256,
        "preprocessing": model.preprocessing.sha256,
        "images": images.sha256,
    }
    page = (tmp_path / "page.html").read_text()
    assert model.sha256 in page
    assert str(made / "target") in page


def test_evaluated_batches_are_the_predicted_ones(made, tmp_path):
    found, _ = evaluate(made, tmp_path, batch_size=48, seed=11)
    _, rows = predict(made, tmp_path, batch_size=48, shuffle=11)
    ratios = [next(float(r["ratio"]) for r in rows if int(r["batch"]) == i) for i in range(3)]
    assert [batch["verdict"]["ratio"] for batch in found["batches"]] == pytest.approx(ratios)
    truth = LABELS[TARGET[[int(row["row"]) for row in rows]]]
    right = np.mean([r["prediction"] == t for r, t in zip(rows, truth, strict=True)])
    assert found["scores"]["gated"]["accuracy"] == pytest.approx(right)


def test_labels_the_state_does_not_know_are_reported_before_an_image_is_read(made, tmp_path):
    folder = write_folder(tmp_path / "t", SHIFTED, TARGET, [*NAMES[:3], "ivory", *NAMES[4:]])
    assert error_line(evaluate, made, tmp_path, Unread(open_images(folder))) == (
        f"the state does not know the class 'ivory' of {folder}: it was fitted to 8 classes "
        "('azure', 'brown', 'coral', 'denim', 'ebony', ...); skip such samples with "
        "--known-classes-only"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    with pytest.raises(CasterError, match="has no labels"):
        evaluate(made, tmp_path, Unread(open_images(folder / "azure")))


def test_some_of_the_classes_will_do(made, tmp_path):
    some = np.isin(TARGET, [0, 1, 2, 3, 4, 5])
    folder = write_folder(tmp_path / "some", SHIFTED[some], TARGET[some])
    found, _ = evaluate(made, tmp_path, folder)
    assert [c["label"] for c in found["classes"]] == NAMES[:6]
    assert found["samples"] == 96


def test_skipped_images_are_not_scored(made, tmp_path):
    folder = write_folder(tmp_path / "t", SHIFTED, TARGET)
    spoil(folder, "azure/001.png")
    with pytest.raises(CasterError, match=r"azure/001\.png"):
        evaluate(made, tmp_path, folder)
    assert not (tmp_path / "page.html").exists()
    found, unreadable = evaluate(made, tmp_path, folder, skip_unreadable=True)
    assert found["samples"] == 127
    assert len(unreadable) == 1
    counts = {c["label"]: c["samples"] for c in found["classes"]}
    assert counts == {name: 15 if name == "azure" else 16 for name in NAMES}


def test_page_and_numbers_come_together_or_not_at_all(made, tmp_path, monkeypatch):
    (tmp_path / "page.json").write_text("old")
    (tmp_path / "page.html").write_text("old")

    def interrupted(found, path):
        raise KeyboardInterrupt

    monkeypatch.setattr("caster.report.evaluation.write_page", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(made, tmp_path)
    assert (tmp_path / "page.json").read_text() == "old"
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "page.html", "page.json"]


def test_a_model_file_that_changes_meanwhile(made, tmp_path):
    path = write_model(tmp_path / "m.onnx")
    model = wrap(path, preprocessing=made / "p.toml")

    def change(stage, done, total):
        if done == 64:
            write_model(path, bias=1.0)

    with pytest.raises(CasterError, match="changed since it was opened"):
        fit(made, tmp_path, model=model, progress=change)
    assert not (tmp_path / "s.caster").exists()
    assert list((tmp_path / "cache").iterdir()) == []
