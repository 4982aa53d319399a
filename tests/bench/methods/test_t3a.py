"""T3A against a loop that stores and sorts every sample for every batch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from caster import CasterError, wrap
from caster.models.protocol import Outputs
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from caster_bench.methods.t3a import Supports
from tests.support import problem
from tests.support.exact import Exact, blobs, entropies, head
from tests.support.messages import error_line

SIZES = (1, 2, 64, 3, 1, 30)


def by_loop(model, batches, filter_k):
    """Answers in float64, with supports selected from all samples for every batch."""
    rows = list(model.weight)
    own = model.weight @ model.weight.T + model.bias
    classes, certain = list(own.argmax(axis=1)), list(entropies(own))
    answers = []
    for batch in batches:
        logits = model(batch).logits
        rows += list(batch)
        classes += list(logits.argmax(axis=1))
        certain += list(entropies(logits))
        prototypes = np.zeros_like(model.weight)
        for c in range(len(model.weight)):
            members = sorted(
                (i for i in range(len(rows)) if classes[i] == c), key=certain.__getitem__
            )
            members = members if filter_k == -1 else members[:filter_k]
            total = sum(
                (rows[i] / np.linalg.norm(rows[i]) for i in members), np.zeros(batch.shape[1])
            )
            length = np.linalg.norm(total)
            prototypes[c] = total / length if length else total
        answers.append(batch @ prototypes.T)
    return answers


def stream(sizes=SIZES, seed=1, spread=2.0, **options):
    features, _ = blobs(sum(sizes), seed=seed, spread=spread, **options)
    return np.split(features, np.cumsum(sizes)[:-1])


def insist_equal(given, expected):
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("filter_k", [1, 2, 5, 100, -1])
def test_answers_match_a_plain_loop(filter_k):
    model, batches = head(), stream()
    method = create("t3a", model, filter_k=filter_k)
    given = [method.predict(batch).logits for batch in batches]
    insist_equal(given, by_loop(model, batches, filter_k))
    assert any(
        (a.argmax(1) != model(x).logits.argmax(1)).any()
        for a, x in zip(given, batches, strict=True)
    )


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_dropped_samples_are_never_needed_again(sizes, filter_k, seed):
    """Including copies: among equal entropies the first stays."""
    rng = np.random.default_rng(seed)
    model = Exact(rng.normal(size=(3, 4)), rng.normal(size=3))
    some = rng.normal(size=(5, 4)) * 3
    batches = [some[rng.integers(5, size=n)] for n in sizes]
    method = create("t3a", model, filter_k=filter_k)
    given = [method.predict(batch).logits for batch in batches]
    insist_equal(given, by_loop(model, batches, filter_k))


def test_large_filter_equals_no_filter():
    batches = stream()
    every, most = (create("t3a", head(), filter_k=k) for k in (-1, 1000))
    insist_equal(
        [every.predict(x).logits for x in batches], [most.predict(x).logits for x in batches]
    )


def test_memory_is_bounded():
    """By filter_k per class; without a filter only sums are stored."""
    bounded, sums = (create("t3a", head(), filter_k=k) for k in (4, -1))
    sizes = []
    for batch in stream([50] * 20):
        bounded.predict(batch)
        sums.predict(batch)
        sizes.append(bounded.retained().total)
    assert sizes[-1] == sizes[5]
    assert bounded.retained().features < 2 * 3 * 4 * (6 * 8 + 24)
    assert sums.retained().features == 0
    assert sums.retained().buffers == 3 * 6 * 8


def test_removed_rows_are_overwritten_in_place():
    """The stored rows are those a sort would select."""
    rng = np.random.default_rng(0)
    bank, rows, labels, values = Supports(3), [], [], []
    for n in (4, 1, 20, 7, 7):
        new = rng.normal(size=(n, 2)), rng.integers(2, size=n), rng.integers(6, size=n) / 4
        bank.add(*map(torch.tensor, new))
        for held, batch in zip((rows, labels, values), new, strict=True):
            held.extend(batch)
        chosen = [
            i for c in (0, 1)
            for i in sorted(np.flatnonzero(np.array(labels) == c), key=values.__getitem__)[:3]
        ]  # fmt: skip
        order = bank._slots
        assert sorted(order.tolist()) == list(range(len(chosen)))
        expected = np.array(rows)[sorted(chosen)]
        np.testing.assert_array_equal(bank._rows[order], expected)  # in order of arrival


def test_classes_of_a_state():
    """A state with some of the classes limits the answer to those."""
    features, labels = blobs(400, n_classes=3)
    known = labels != 1
    model = head()
    source = Source.fit(model, [(features[known], labels[known])])
    assert source.state.head == (0, 2)
    method = create("t3a", model, source, filter_k=5)
    batches = stream()
    chosen = Exact(model.weight[[0, 2]], model.bias[[0, 2]])
    insist_equal([method.predict(x).logits for x in batches], by_loop(chosen, batches, 5))


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_on_images(kind):
    model = problem.model(kind)
    method = create("t3a", model, filter_k=5)
    images = problem.stream(4, 32) + problem.stream(1, 1) + problem.stream(1, 2)
    given = [method.predict(batch).logits for batch in images]
    layer = model.module.get_submodule(model.head)
    plain = Exact(layer.weight.detach().double(), layer.bias.detach().double())
    features = [model(batch).features.double().numpy() for batch in images]
    for one, other in zip(given, by_loop(plain, features, 5), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert problem.accuracy(create("t3a", model)) > problem.accuracy(method.frozen) - 0.05


def test_gate_and_method_share_one_pass():
    model, source = problem.model(), problem.source()
    calls = []
    gated = create("t3a+certificate", model, source)
    run = type(model).__call__

    class Counted(type(model)):
        def __call__(self, batch):
            calls.append(len(batch))
            return run(self, batch)

    model.__class__ = Counted
    try:
        gated.predict(problem.stream(1, 64)[0])
    finally:
        model.__class__ = Counted.__mro__[1]
    assert calls == [64]


def test_callers_autocast_changes_nothing():
    model = problem.model()
    outputs = model(problem.stream(1, 64)[0])
    plain, cast = create("t3a", model), create("t3a", model)
    expected = plain.answer(outputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cast.answer(outputs).logits, expected)


@pytest.mark.parametrize("name", ["knn", "t3a", "coral", "linear-tca"])
def test_onnx_file_answers_as_its_module(tmp_path, name):
    """For all methods on features, with the head read from the graph."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    features, labels = blobs(120)
    images = features.astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the exporter
        torch.onnx.export(
            net, (torch.zeros(2, 6),), tmp_path / "net.onnx", dynamo=False,
            input_names=["x"], dynamic_axes={"x": {0: "N"}},
        )  # fmt: skip
    module, file = wrap(net), wrap(tmp_path / "net.onnx")
    source = Source(batches=[(images[:60], labels[:60])])
    one, other = create(name, module, source), create(name, file, source)
    for batch in (images[60:61], images[61:63], images[63:]):
        given = other.predict(batch).logits
        assert type(given) is np.ndarray
        assert given.dtype == np.float32
        np.testing.assert_allclose(given, one.predict(batch).logits, rtol=1e-3, atol=1e-4)


def test_invalid_input_is_rejected():
    def refused(model, batch, **settings):
        return error_line(lambda: create("t3a", model, **settings).predict(batch))

    batch = torch.randn(4, 6)
    function = wrap(lambda batch: (batch, batch), version="example-1")
    assert "needs the weights of a linear classifier" in refused(function, batch)
    assert "filter_k of t3a must be 1 or more, not 0" in refused(head(), batch, filter_k=0)
    assert "NaN or infinity" in refused(head(), batch * float("nan"))
    scaled = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1))
    assert "name its last layer with head=" in refused(wrap(scaled, head="0"), batch)
    linear = wrap(nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    with pytest.raises(CasterError, match="has not shown its classifier yet"):
        create("t3a", linear).answer(Outputs(batch, torch.zeros(4, 3)))
    with pytest.raises(CasterError, match="needs the logits"):
        create("t3a", head()).answer(Outputs(batch.double(), None))
