"""LinearTCA against a loop that stores the whole stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from caster import CasterError
from caster_bench.methods.registry import create
from tests.support import problem
from tests.support.exact import blobs, entropies, head

SIZES = (2, 1, 1, 20, 64, 3)


def by_loop(model, batches, filter_k, ridge):
    """Answers in float64, recomputed from the whole stream for every batch."""
    answers = []
    for n in range(1, len(batches) + 1):
        seen = np.concatenate(batches[:n])
        logits = model(seen).logits
        classes, certain = logits.argmax(axis=1), entropies(logits)
        chosen = [
            i
            for c in range(len(model.weight))
            for i in sorted(np.flatnonzero(classes == c), key=certain.__getitem__)[:filter_k]
        ]
        pseudo = seen[chosen]
        C_t, C_p = (np.cov(rows.T, bias=True) for rows in (seen, pseudo))
        eye = ridge * np.trace(C_t) / seen.shape[1] * np.eye(seen.shape[1])
        W = np.linalg.inv(np.real(sqrtm(C_t + eye))) @ np.real(sqrtm(C_p + eye))
        aligned = (batches[n - 1] - seen.mean(axis=0)) @ W + pseudo.mean(axis=0)
        answers.append(aligned @ model.weight.T + model.bias)
    return answers


def stream(sizes=SIZES):
    features, _ = blobs(sum(sizes), seed=1, spread=2.0)
    return np.split(1.3 * features + 1, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize(("filter_k", "ridge"), [(1, 1.0), (5, 0.01), (20, 1.0), (1000, 10.0)])
def test_answers_match_a_plain_loop(filter_k, ridge):
    model, batches = head(), stream()
    method = create("linear-tca", model, filter_k=filter_k, ridge=ridge)
    given = [method.predict(batch).logits for batch in batches]
    for one, other in zip(given, by_loop(model, batches, filter_k, ridge), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)


def test_identity_while_all_samples_are_in_the_pseudo_source():
    """The pseudo-source is then the stream itself."""
    method = create("linear-tca", head(), filter_k=1000)
    for batch in stream():
        np.testing.assert_allclose(method.predict(batch).logits, head()(batch).logits, rtol=1e-8)


def test_first_sample_and_its_copies_get_the_frozen_answer():
    method = create("linear-tca", head())
    batch = blobs(1)[0]
    for rows in (batch, batch, np.repeat(batch, 5, axis=0)):
        given = method.predict(rows).logits
        np.testing.assert_allclose(given, head()(rows).logits, rtol=1e-6)


def test_memory_is_bounded():
    method = create("linear-tca", head(), filter_k=2)
    sizes = []
    for batch in stream([50] * 12):
        method.predict(batch)
        sizes.append(method.retained().total)
    assert sizes[-1] == sizes[3]
    assert method.retained().buffers == 2 * (6 + 6 * 6) * 8


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_on_images(kind):
    """Gains a little at any batch size if confident images look more like the source."""
    method = create("linear-tca", problem.model(kind))
    frozen = problem.accuracy(method.frozen, 1.0, 1280)
    for size in (8, 64):
        method.reset()
        assert problem.accuracy(method, 1.0, 1280, size) > frozen + 0.01
    method.reset()
    assert problem.accuracy(method, 0.0) > problem.accuracy(method.frozen, 0.0) - 0.01
    for size in (1, 2):
        assert isinstance(method.predict(problem.stream(1, size)[0]).logits, torch.Tensor)


def test_invalid_input_is_rejected():
    for settings, words in (
        ({"filter_k": 0}, "1 or more, not 0"),
        ({"ridge": 0.0}, r"above 0, not 0\.0"),
    ):
        with pytest.raises(CasterError, match=words):
            create("linear-tca", head(), **settings)
    with pytest.raises(CasterError, match="NaN or infinity"):
        create("linear-tca", head()).predict(np.full((2, 6), np.nan))
