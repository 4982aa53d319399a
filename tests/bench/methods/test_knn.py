"""k-NN against scikit-learn with DINO's weights and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from caster import CasterError, wrap
from caster_bench.methods import knn
from caster_bench.methods.knn import KNN, most_similar
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support import problem
from tests.support.exact import blobs
from tests.support.messages import error_line


def by_loop(bank, queries, k):
    """Rows by product in float64; ties go to the first."""
    bank, queries = np.asarray(bank, float), np.asarray(queries, float)
    return [sorted(range(len(bank)), key=lambda i: (-(bank[i] @ q), i))[:k] for q in queries]


def found(bank, queries, k):
    return most_similar(torch.as_tensor(bank), torch.as_tensor(queries), k)[1].tolist()


@st.composite
def problems(draw):
    """Small integers: many equal rows and tied distances, exact arithmetic."""
    d, n = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    row = st.lists(st.integers(-3, 3), min_size=d, max_size=d)
    bank = np.array(draw(st.lists(row, min_size=n, max_size=n)), np.float32)
    queries = np.array(draw(st.lists(row, min_size=1, max_size=5)), np.float32)
    return bank, queries, draw(st.integers(1, n))


@given(problems())
def test_neighbours_match_a_plain_loop(drawn):
    bank, queries, k = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "SPARE", len(bank))  # all rows may tie
        assert found(bank, queries, k) == by_loop(bank, queries, k)


def unit(rows):
    """Rows of length 1; a row of zeros stays."""
    rows = np.asarray(rows, float)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def dino(k, temperature=0.07):
    """scikit-learn's classifier on unit vectors, where |a - b|² = 2 - 2 ab."""
    return KNeighborsClassifier(
        k, algorithm="brute", weights=lambda d: np.exp((1 - d**2 / 2) / temperature)
    )


@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from([0.07, 1.0]))
def test_shares_match_scikit_learn(drawn, seed, temperature):
    """Except for ties at the k-th place, which scikit-learn breaks arbitrarily."""
    bank, queries, k = drawn
    bank, queries = bank[bank.any(axis=1)], queries[queries.any(axis=1)]  # which have a direction
    if not len(bank) or not len(queries):
        return
    k = min(k, len(bank))
    labels = np.random.default_rng(seed).integers(3, size=len(bank))
    labels[0] = 2  # three classes, the middle one may be empty
    similarity = -np.sort(-(unit(bank) @ unit(queries).T), axis=0)
    clear = similarity[k - 1] > similarity[k] + 1e-6 if k < len(bank) else np.full(len(queries), 1)
    clear = clear.astype(bool)
    model = wrap(lambda batch: (batch, np.zeros((len(batch), 3))), version="example-1")
    method = KNN(model, Source(batches=[(bank, labels)]), k=k, temperature=temperature)
    shares = method.predict(queries).logits
    expected = np.zeros((len(queries), 3))
    judge = dino(k, temperature).fit(unit(bank), labels)
    expected[:, judge.classes_] = judge.predict_proba(unit(queries))
    np.testing.assert_allclose(shares[clear], expected[clear], atol=1e-4)


def test_equal_votes_and_lengths_would_be_noticed():
    bank, labels = blobs(300)
    queries, _ = blobs(40, seed=1)
    model = wrap(lambda batch: (batch, np.zeros((len(batch), 3))), version="example-1")
    shares = KNN(model, Source(batches=[(bank, labels)])).predict(queries).logits
    wide = KNeighborsClassifier(20, algorithm="brute").fit(bank, labels)
    even = KNeighborsClassifier(20, algorithm="brute").fit(unit(bank), labels)
    assert np.abs(shares - wide.predict_proba(queries)).max() > 0.05
    assert np.abs(shares - even.predict_proba(unit(queries))).max() > 0.01


def test_rows_that_float32_misorders():
    rng = np.random.default_rng(0)
    rows = unit(1 + 1e-3 * rng.normal(size=(320, 64))).astype(np.float32)
    bank, queries = rows[:300], rows[300:]
    expected = by_loop(bank, queries, 5)
    assert np.argsort(-queries @ bank.T, axis=1)[:, :5].tolist() != expected
    assert found(bank, queries, 5) == expected


@pytest.mark.parametrize("chunk", [1, 100, 3000])
def test_chunk_size_changes_nothing(monkeypatch, chunk):
    bank, _ = blobs(200, 5)
    queries, _ = blobs(23, 5, seed=1)
    monkeypatch.setattr(knn, "CHUNK", chunk)
    assert found(bank, queries, 9) == by_loop(bank, queries, 9)


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_matches_scikit_learn_on_images(kind):
    model, source = problem.model(kind), problem.source(kind)
    method = create("knn", model, source)
    bank = np.concatenate([model(images).features.numpy() for images, _ in source.batches])
    judge = dino(20).fit(unit(bank), np.concatenate([labels for _, labels in source.batches]))
    for batch in (*problem.stream(2, 64), problem.stream(1, 1)[0], problem.stream(1, 2)[0]):
        given = method.predict(batch)
        features = model(batch).features.double().numpy()
        assert given.accepted
        expected = judge.predict_proba(unit(features))
        np.testing.assert_allclose(given.logits.numpy(), expected, atol=1e-4)
    assert problem.accuracy(method, shift=0.0) > 0.95
    assert problem.accuracy(method) > problem.accuracy(method.frozen) - 0.05


def test_columns_are_the_states_classes():
    features, classes = blobs(300)
    names = np.array(["cat", "dog", "bird"])[classes]
    batches = [(features[:200], names[:200]), (features[200:], names[200:])]
    model = wrap(lambda batch: batch, version="example-1")  # no classes of its own
    source = Source.fit(model, batches)
    assert source.state.classes.tolist() == ["bird", "cat", "dog"]
    answers = create("knn", model, source, k=3).predict(features).logits
    right = source.state.classes[answers.argmax(1)] == names
    assert right.mean() > 0.95
    with pytest.raises(CasterError, match=r"needs a state: .* has no classes of its own"):
        create("knn", model, Source(batches=batches))


def test_answers_have_the_type_of_the_features():
    features, classes = blobs(100)
    for make, kind in ((torch.tensor, torch.Tensor), (np.asarray, np.ndarray)):
        model = wrap(lambda batch, make=make: (make(batch), make(batch)[:, :3]), version="1")
        answer = create("knn", model, Source(batches=[(features, classes)])).predict(features[:4])
        assert isinstance(answer.logits, kind)
        assert answer.logits.dtype == make(features).dtype


def test_retained():
    method = create("knn", problem.model(), problem.source())
    assert method.retained().total == 400 * (16 * 4 + 8)
    assert method.retained().features == method.retained().total


def test_invalid_input_is_rejected():
    features, classes = blobs(10)
    model = wrap(lambda batch: (batch, batch[:, :3]), version="example-1")

    def refused(source, **settings):
        batch = np.full((1, 6), np.nan)
        return error_line(lambda: create("knn", model, source, **settings).predict(batch))

    assert "needs source images" in refused(Source())
    assert "20 neighbours, the source has 10" in refused(Source(batches=[(features, classes)]))
    assert "1 or more, not 0" in refused(Source(batches=[(features, classes)]), k=0)
    assert "NaN or infinity" in refused(Source(batches=[(features, classes)]), k=1)
    assert "10 source images have 9 labels" in refused(Source(batches=[(features, classes[:9])]))
    assert "is not one of the" in refused(Source(batches=[(features, classes + 7)]))
