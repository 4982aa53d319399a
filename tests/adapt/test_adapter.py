"""A frozen model at work with its state: the same as by hand, and bound to what it came from."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caster
from caster import Adapter, Caster, CasterError, StateError, wrap
from caster import state as states
from caster.models.preprocessing import Preprocessing
from tests.conftest import close
from tests.support.messages import error_line
from tests.support.tensor_files import contents, rewrite

N_CLASSES, N_SOURCE, BATCH = 4, 480, 64
HALF = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.5,) * 3, layout="NCHW")


def make_images(n, seed):
    """Images of a class are its pattern under noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(N_CLASSES, size=n)
    patterns = np.random.default_rng(99).standard_normal((N_CLASSES, 3, 4, 4))
    images = patterns[labels] + 0.5 * rng.standard_normal((n, 3, 4, 4))
    return torch.tensor(images, dtype=torch.float32), torch.tensor(labels)


SOURCE, LABELS = make_images(N_SOURCE, seed=0)
IMAGES, TRUTH = make_images(BATCH, seed=1)
SHIFTED = 0.5 * IMAGES + 1.0


def network(seed=0, n_classes=N_CLASSES):
    """A trunk of random weights, and a head that was trained on its features."""
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Flatten())
    trunk = trunk.append(nn.Linear(192, 16)).eval()
    head = nn.Linear(16, n_classes)
    with torch.no_grad():
        features = torch.cat([trunk(SOURCE), torch.ones(N_SOURCE, 1)], dim=1)
        targets = torch.eye(n_classes)[LABELS]
        solved = torch.linalg.lstsq(features, targets).solution
        head.weight.copy_(solved[:-1].T)
        head.bias.copy_(solved[-1])
    return nn.Sequential(OrderedDict(trunk=trunk, drop=nn.Dropout(), head=head)).eval()


def by_hand(net, images):
    with torch.no_grad():
        return net.trunk(images), net(images)


def loader(labels=LABELS, size=100):
    """Batches as a DataLoader gives them, the last one smaller."""
    return [
        (SOURCE[start : start + size], labels[start : start + size])
        for start in range(0, N_SOURCE, size)
    ]


@pytest.fixture(scope="module")
def net():
    return network()


@pytest.fixture(scope="module")
def adapter(net):
    return caster.fit(wrap(net), loader(), layers=False)


def same(out, expected):
    """Bit for bit."""
    assert type(out.labels) is type(expected.labels)
    for name in ("labels", "proposed"):
        assert np.array_equal(np.asarray(getattr(out, name)), np.asarray(getattr(expected, name)))
    if expected.adapted is None:
        assert out.adapted is None
    else:
        assert torch.equal(torch.as_tensor(out.adapted), torch.as_tensor(expected.adapted))
    assert out.verdict == expected.verdict


# --- from a module to adapted predictions ----------------------------------------------------


def test_five_lines(tmp_path, net):
    model = caster.wrap(net)
    caster.fit(model, loader(), safeguards=False).save(tmp_path / "state.caster")
    adapter = caster.Adapter(model, tmp_path / "state.caster", mechanism="features")
    out = adapter(SHIFTED)
    assert out.verdict.accepted
    assert torch.mean((out.labels == TRUTH).float()) > 0.95
    features, logits = by_hand(net, SHIFTED)
    assert torch.mean((logits.argmax(1) == TRUTH).float()) < 0.6  # what the shift does to the head
    source, _ = by_hand(net, SOURCE)
    independent = Caster(safeguards=False).fit(source.numpy(), LABELS.numpy())
    close(adapter.clf.moments_.means, independent.moments_.means, 1e-4)
    expected = independent.adapt(features, logits)
    close(out.adapted, expected.adapted, 1e-3)
    assert torch.equal(out.labels, expected.labels)
    assert out.verdict.reason == expected.verdict.reason
    assert out.verdict.ratio == pytest.approx(expected.verdict.ratio, rel=1e-3)


def test_the_source_check_is_in_the_state(tmp_path, net, adapter):
    features, logits = by_hand(net, SOURCE)
    alone = Caster().fit(features.numpy(), LABELS.numpy(), logits.numpy())
    assert adapter.state.source_check == alone.source_check_
    adapter.save(tmp_path / "s")
    assert Adapter(wrap(net), tmp_path / "s").clf.source_check_ == alone.source_check_


def test_the_same_as_by_hand(tmp_path, net, adapter):
    adapter.save(tmp_path / "s")
    loaded, clf = Adapter(wrap(net), tmp_path / "s"), caster.load(tmp_path / "s")
    in_memory = Adapter(wrap(net), adapter.clf._state)
    for images in (SHIFTED, SHIFTED[:2], IMAGES, -IMAGES, 100 * IMAGES):
        same(loaded(images), clf.adapt(*by_hand(net, images)))
        same(adapter(images), adapter.clf.adapt(*by_hand(net, images)))
        same(in_memory(images), adapter(images))
        close(loaded(images).adapted, adapter(images).adapted, 1e-5)
        assert torch.equal(loaded(images).labels, adapter(images).labels)


def test_numpy_in_torch_out_of_a_torch_module(adapter):
    same(adapter(SHIFTED.numpy()), adapter(SHIFTED))


def collated(samples):
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.stack(labels)}


@pytest.mark.parametrize("collate", [None, collated], ids=["pairs", "dicts"])
def test_data_loaders_go_in_as_they_are(net, adapter, collate):
    source = DataLoader(TensorDataset(SOURCE, LABELS), batch_size=100, collate_fn=collate)
    fitted = caster.fit(wrap(net), source, layers=False)
    assert states.digest(fitted.state) == states.digest(adapter.state)
    expected = [adapter(SHIFTED[:40]), adapter(SHIFTED[40:])]
    targets = [
        DataLoader(TensorDataset(SHIFTED, TRUTH), batch_size=40, collate_fn=collate),
        DataLoader(TensorDataset(SHIFTED), batch_size=40),  # [x]
        [{"image": SHIFTED[:40]}, {"x": SHIFTED[40:], "name": "of a file"}],
        [(SHIFTED[:40], ["a"] * 40, {"path": "b"}), SHIFTED[40:].numpy()],
    ]
    for target in targets:
        for out, other in zip(fitted.stream(target), expected, strict=True):
            same(out, other)


def test_batches_that_lack_a_part(net, adapter):
    with pytest.raises(CasterError, match=r"one of pixel_values, .*: it has input_ids"):
        adapter({"input_ids": SHIFTED})
    for batch in ({"pixel_values": SOURCE}, [SOURCE], SOURCE, SOURCE[:2], (SOURCE, LABELS, 1)):
        with pytest.raises(CasterError, match=r"one of labels|must be a pair"):
            caster.fit(wrap(net), [batch], layers=False)


class Strict(nn.Linear):
    def forward(self, images):
        rows, _, _, _ = images.shape  # a ValueError, as timm's and transformers' ViT raise
        return super().forward(images.reshape(rows, -1))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)),
        nn.Sequential(nn.Conv2d(3, 8, 4), nn.Flatten(0), nn.Linear(8, 4)),  # succeeds, of one axis
        Strict(48, 4),
        network(),
    ],
    ids=["BatchNorm", "one axis", "ViT", "network"],
)
def test_a_single_image_gets_a_clear_line(module):
    with pytest.raises(CasterError, match=r"a single image needs a batch axis, x\[None\]"):
        wrap(module)(SOURCE[0])


def test_a_single_image_for_a_function():
    model = wrap(lambda images: images.mean((2, 3)), preprocessing=HALF)
    with pytest.raises(CasterError, match="a single image needs a batch axis"):
        model(SOURCE[0])


def test_reprs_are_one_line(tmp_path, net, adapter):
    assert repr(adapter.model) == "TorchModel('Sequential', head='head', device='cpu')"
    assert repr(adapter) == f"Adapter({adapter.model!r}, {adapter.state!r}, mechanism='features')"
    assert repr(adapter.state).endswith(f"model {adapter.model.sha256[:12]}…, no layers)")
    assert repr(wrap(len, version="1")) == "FunctionModel('len', version='1')"


def test_functions_answer_in_their_own_kind(net):
    def function(images):
        features, logits = by_hand(net, torch.as_tensor(images))
        return features.numpy(), logits.numpy()

    model = wrap(function, version="1")
    out = caster.fit(model, loader(), layers=False)(SHIFTED)
    assert isinstance(out.labels, np.ndarray)
    expected = caster.fit(wrap(net), loader(), layers=False)(SHIFTED)
    close(out.adapted, expected.adapted, 1e-4)
    assert np.array_equal(out.labels, expected.labels.numpy())


def test_settings_reach_the_estimator(net):
    adapter = caster.fit(wrap(net), loader(), k_max=2, tau=0.5, min_samples=7, layers=False)
    assert (adapter.clf.k_max, adapter.clf.tau, adapter.clf.min_samples) == (2, 0.5, 7)
    assert adapter.clf.moments_.rank == 2
    with pytest.raises(CasterError, match="tau must be"):
        caster.fit(wrap(net), loader(), tau=-1, layers=False)


def test_the_module_is_left_as_it_was(net, adapter):
    before = wrap(net).sha256
    adapter(SHIFTED)
    assert wrap(net).sha256 == before
    adapter.model.verify()


# --- streams ---------------------------------------------------------------------------------


def test_a_stream_is_its_batches_one_by_one(adapter):
    batches = [SHIFTED, IMAGES[:7], SHIFTED[:1], -IMAGES, SHIFTED[:2], SHIFTED]
    streamed = list(adapter.stream(iter(batches)))
    assert len(streamed) == len(batches)
    for out, batch in zip(streamed, batches, strict=True):
        same(out, adapter(batch))


def test_streams_of_nothing_and_of_one(adapter):
    assert list(adapter.stream([])) == []
    assert list(adapter.stream(iter(()))) == []
    (out,) = adapter.stream([SHIFTED])
    same(out, adapter(SHIFTED))


def test_a_stream_reads_one_batch_ahead_at_most(adapter):
    read = []

    def batches():
        for i in range(5):
            read.append(i)
            yield SHIFTED

    outputs = adapter.stream(batches())
    assert read == []
    for i in range(4):
        next(outputs)
        assert len(read) <= i + 2


def test_fitting_reads_a_generator_once(net, adapter):
    once = caster.fit(wrap(net), (pair for pair in loader()), layers=False)
    same(once(SHIFTED), adapter(SHIFTED))


def test_how_the_source_is_cut_does_not_matter(net, adapter):
    for size in (1, 37, N_SOURCE):
        other = caster.fit(wrap(net), loader(size=size), layers=False)
        close(other.clf.moments_.means, adapter.clf.moments_.means, 1e-4)
        assert torch.equal(other(SHIFTED).labels, adapter(SHIFTED).labels)


def test_dataloaders(net, adapter):
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(SOURCE, LABELS), 100)
    same(caster.fit(wrap(net), data, layers=False)(SHIFTED), adapter(SHIFTED))


# --- which logits are which classes ----------------------------------------------------------


def refused(adapter):
    """The same state behind a gate that lets nothing pass: the fallback answers."""
    adapter.clf.set_params(tau=1e-9)
    out = adapter(SHIFTED)
    assert not out.verdict.accepted
    return out.labels


def test_all_classes_in_order(net, adapter):
    assert adapter.head == (0, 1, 2, 3)
    fitted = caster.fit(wrap(net), loader(), layers=False)
    assert torch.equal(refused(fitted), by_hand(net, SHIFTED)[1].argmax(1))


def test_a_subset_of_the_classes(net):
    kept = (LABELS == 1) | (LABELS == 3)
    adapter = caster.fit(wrap(net), [(SOURCE[kept], LABELS[kept])], layers=False)
    assert adapter.head == (1, 3)
    assert adapter.clf.classes_.tolist() == [1, 3]
    expected = by_hand(net, SHIFTED)[1][:, [1, 3]].argmax(1)
    assert torch.equal(refused(adapter), torch.tensor([1, 3])[expected])


def test_more_logits_than_classes_from_the_left(net):
    """Classes 0 to 3 of six: in order, and yet not all there is."""
    wide = network(n_classes=6)
    with torch.no_grad():
        wide.head.bias[4:] = 1e6
    adapter = caster.fit(wrap(wide), loader(), layers=False)
    assert adapter.head == (0, 1, 2, 3)
    expected = by_hand(wide, SHIFTED)[1][:, :4].argmax(1)
    assert torch.equal(refused(adapter), expected)


NAMES = np.array(["owl", "cat", "ape", "dog"])  # of the logits; sorted they are others


def test_text_labels_by_name(net):
    labels = NAMES[LABELS.numpy()]
    adapter = caster.fit(wrap(net), loader(labels), classes=NAMES, safeguards=False, layers=False)
    assert adapter.clf.classes_.tolist() == ["ape", "cat", "dog", "owl"]
    assert adapter.head == (2, 1, 3, 0)
    out = adapter(SHIFTED)
    assert isinstance(out.labels, np.ndarray)
    assert np.mean(out.labels == NAMES[TRUTH.numpy()]) > 0.95
    expected = NAMES[by_hand(net, SHIFTED)[1].argmax(1).numpy()]
    assert refused(adapter).tolist() == expected.tolist()


def test_text_labels_in_their_order(net):
    labels = [f"class {c}" for c in LABELS.tolist()]
    adapter = caster.fit(wrap(net), loader(labels), layers=False)
    assert adapter.head == (0, 1, 2, 3)
    expected = [f"class {c}" for c in by_hand(net, SHIFTED)[1].argmax(1).tolist()]
    assert refused(adapter).tolist() == expected


def test_permuted_numbers(net):
    order = torch.tensor([30, 10, 40, 20])
    adapter = caster.fit(wrap(net), loader(order[LABELS]), classes=order, layers=False)
    assert adapter.head == (1, 3, 0, 2)
    assert torch.equal(refused(adapter), order[by_hand(net, SHIFTED)[1].argmax(1)])


def test_classes_the_model_does_not_know(net):
    with pytest.raises(CasterError, match="labels 10 to 13 are not columns of 4 logits"):
        caster.fit(wrap(net), loader(LABELS + 10), layers=False)
    with pytest.raises(CasterError, match="class 'x' of the data is not one of the model's"):
        caster.fit(wrap(net), loader(["x", "y"] * 240), classes=NAMES, layers=False)
    adapter = caster.fit(wrap(net), loader(LABELS + 10), use_head=False, layers=False)
    assert adapter.head is None
    features, _ = by_hand(net, SHIFTED)
    gda = adapter.clf.source_scores(features).argmax(1) + 10
    assert torch.equal(refused(adapter), gda)


def test_a_model_without_logits(net):
    model = wrap(lambda images: by_hand(net, images)[0], version="1")
    adapter = caster.fit(model, loader(), layers=False)
    assert adapter.head is None
    gda = adapter.clf.source_scores(by_hand(net, SHIFTED)[0]).argmax(1)
    assert torch.equal(refused(adapter), gda)


def test_too_few_logits(net, adapter):
    narrow = wrap(lambda images: (by_hand(net, images)[0], by_hand(net, images)[1][:, :3]))
    silent = wrap(lambda images: by_hand(net, images)[0])
    for model, said in ((narrow, "at least 4 per sample, and there are"), (silent, "no logits")):
        other = Adapter(model, adapter.clf._state, allow_other_model=True)
        with pytest.raises(CasterError, match=said):
            other(SHIFTED)


def test_features_of_another_width(net, adapter):
    model = wrap(lambda images: by_hand(net, images)[::-1])
    other = Adapter(model, adapter.clf._state, allow_other_model=True)
    with pytest.raises(CasterError, match=r"a batch must be \(samples, 16\), not \(64, 4\)"):
        other(SHIFTED)


# --- bound to a model and a preprocessing ----------------------------------------------------


@pytest.fixture
def path(tmp_path, net):
    caster.fit(wrap(net, preprocessing=HALF), loader(), layers=False).save(tmp_path / "s.caster")
    return tmp_path / "s.caster"


refusal = partial(error_line, Adapter, kind=StateError)


def test_the_state_names_its_model(net, path):
    state = states.load(path)
    assert state.model_sha256 == wrap(net).sha256
    assert state.preprocessing_sha256 == HALF.sha256


def test_another_model_is_rejected_unless_allowed_by_name(path):
    other = wrap(network(seed=1), preprocessing=HALF)
    message = refusal(other, path)
    assert "fitted with another model" in message
    assert other.sha256[:12] in message
    refusal(other, path, allow_other_preprocessing=True)
    Adapter(other, path, allow_other_model=True)(SHIFTED)


def test_another_head_is_another_model(net, path):
    assert "another model" in refusal(wrap(net, head="head", preprocessing=HALF), path)


def test_another_preprocessing_is_rejected_unless_allowed_by_name(net, path):
    other = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.25,) * 3, layout="NCHW")
    for stated, problem in ((other, "another preprocessing"), (None, "none is given")):
        model = wrap(net, preprocessing=stated)
        assert problem in refusal(model, path)
        refusal(model, path, allow_other_model=True)
        Adapter(model, path, allow_other_preprocessing=True)(SHIFTED)
    Adapter(wrap(net, preprocessing=HALF), str(path))


def test_a_preprocessing_where_there_was_none(net, adapter):
    assert "records no" in refusal(wrap(net, preprocessing=HALF), adapter.clf._state)


def test_versions_of_functions(tmp_path, net):
    def function(images):
        return by_hand(net, images)

    for version in ("1", None):
        caster.fit(wrap(function, version=version), loader(), layers=False).save(tmp_path / "s")
        Adapter(wrap(function, version=version), tmp_path / "s")(SHIFTED)
        why = "names no model" if version is None else "another model"
        assert why in refusal(wrap(function, version="2"), tmp_path / "s")
        assert why in refusal(wrap(net), tmp_path / "s")


def test_a_state_of_features_alone_belongs_to_no_model(tmp_path, net):
    features, _ = by_hand(net, SOURCE)
    Caster().fit(features.numpy(), LABELS.numpy()).save(tmp_path / "s")
    assert "names no model" in refusal(wrap(net), tmp_path / "s")
    allowed = Adapter(wrap(net), tmp_path / "s", allow_other_model=True)
    assert allowed.head is None


def test_a_stream_of_one_tensor_is_told_to_split_it():
    adapter = caster.fit(wrap(network()), loader(), layers=False)
    with pytest.raises(CasterError, match=r"`stream` takes batches, such as x\.split"):
        next(adapter.stream(SHIFTED))


def test_a_model_changed_after_fitting_is_rejected(tmp_path):
    net = network()
    model = wrap(net)
    caster.fit(model, loader(), layers=False).save(tmp_path / "s")
    with torch.no_grad():
        net.head.bias[0] += 1
    assert "another model" in refusal(wrap(net), tmp_path / "s")
    with pytest.raises(CasterError, match="was changed while it was in use"):
        model.verify()


def test_inputs_of_a_fit_that_are_nan_are_named():
    first, second = list(loader())[:2]
    images = second[0].clone()
    images[3] = torch.nan
    batches = [first, (images, second[1])]
    with pytest.raises(CasterError, match="NaN or infinity for row 3 of batch 1"):
        caster.fit(wrap(network()), batches, layers=False)


def test_a_model_changed_while_fitting_is_rejected():
    net = network()

    def disturbed():
        yield from loader()
        with torch.no_grad():
            net.trunk[1].running_mean += 1e-3

    with pytest.raises(CasterError, match="was changed while it was in use"):
        caster.fit(wrap(net), disturbed(), layers=False)


def test_a_model_put_into_training_mode_is_rejected():
    net = network()
    adapter = caster.fit(wrap(net), loader(), layers=False)
    net.train()
    with pytest.raises(CasterError, match="training mode"):
        adapter(SHIFTED)


# --- small and bad batches -------------------------------------------------------------------


def test_a_batch_of_one_gets_the_heads_answer(net, adapter):
    out = adapter(SHIFTED[:1])
    assert out.verdict.reason == "batch_too_small"
    assert torch.equal(out.labels, by_hand(net, SHIFTED[:1])[1].argmax(1))


def test_empty(net, adapter):
    with pytest.raises(CasterError, match="at least one sample"):
        adapter(SHIFTED[:0])
    for batches in ([], iter(())):
        with pytest.raises(CasterError, match="there are no batches to fit"):
            caster.fit(wrap(net), batches, layers=False)


def test_numbers_that_are_none(adapter):
    bad = SHIFTED.clone()
    bad[3] = float("nan")
    with pytest.raises(CasterError, match="the batch holds NaN or infinity"):
        adapter(bad)
    same(adapter(SHIFTED), adapter(SHIFTED))


def test_labels_that_do_not_fit(net):
    with pytest.raises(CasterError, match="100 rows of features have 99 labels"):
        caster.fit(wrap(net), [(SOURCE[:100], LABELS[:99])], layers=False)
    with pytest.raises(CasterError, match="one-dimensional"):
        caster.fit(wrap(net), [(SOURCE, torch.eye(4)[LABELS])], layers=False)


# --- the file --------------------------------------------------------------------------------


def test_layout_of_version_2(net, path):
    arrays, metadata = contents(path)
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("sketch_")}
    assert shapes == {
        "U": ("float32", (16, 3)),
        "means": ("float32", (4, 3)),
        "covariances": ("float32", (4, 6)),
        "counts": ("int64", (4,)),
    }
    assert arrays["counts"].tolist() == np.bincount(LABELS.numpy()).tolist()
    assert sorted(metadata) == [
        "caster",
        "classes",
        "content_sha256",
        "features",
        "format",
        "head",
        "model_sha256",
        "preprocessing_sha256",
        "samples",
        "settings",
        "source_check",
        "version",
    ]
    assert (metadata["format"], metadata["version"]) == ("caster-state", "1")
    assert json.loads(metadata["head"]) == [0, 1, 2, 3]
    assert metadata["model_sha256"] == wrap(net).sha256
    assert metadata["preprocessing_sha256"] == HALF.sha256
    assert (metadata["features"], metadata["samples"]) == ("16", str(N_SOURCE))


@pytest.mark.parametrize("use_head", [True, False])
def test_the_head_survives_the_file(tmp_path, net, use_head):
    labels = NAMES[LABELS.numpy()]
    fitted = caster.fit(wrap(net), loader(labels), classes=NAMES, use_head=use_head, layers=False)
    head = (2, 1, 3, 0) if use_head else None
    fitted.save(tmp_path / "a")
    assert json.loads(contents(tmp_path / "a")[1]["head"]) == (list(head) if head else None)
    loaded = Adapter(wrap(net), tmp_path / "a")
    assert loaded.head == fitted.head == head
    caster.load(tmp_path / "a").set_params(tau=1e-9).save(tmp_path / "b")
    again = Adapter(wrap(net), tmp_path / "b")
    assert again.head == head
    assert again.clf.tau == 1e-9
    assert again(SHIFTED).labels.tolist() == refused(loaded).tolist()


def test_a_file_of_another_version_is_rejected(net, path):
    rewrite(path, lambda arrays, metadata: metadata.update(version="4"))
    assert "has state format 4, not 1" in refusal(wrap(net, preprocessing=HALF), path)


@pytest.mark.parametrize(
    "head", ["[0, 1, 2]", "[0, 1, 2, -1]", '["a", "b", "c", "d"]', "7", "[", None], ids=str
)
def test_heads_that_do_not_fit_their_classes(net, path, head):
    def change(arrays, metadata):
        metadata.pop("head")
        metadata |= {} if head is None else {"head": head}

    rewrite(path, change)
    assert "not a usable state file" in refusal(wrap(net, preprocessing=HALF), path)
