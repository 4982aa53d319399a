"""CORAL against SciPy's matrix roots and skada."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from caster import wrap
from caster_bench.methods import coral
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support import problem
from tests.support.exact import Exact, blobs, head
from tests.support.messages import error_line


def by_roots(model, source, batch, ridge):
    """Reference in float64 with full matrices."""
    covariances = [np.cov(rows.T, bias=True) for rows in (source, batch)]
    eye = ridge * np.trace(covariances[0]) / source.shape[1] * np.eye(source.shape[1])
    root, other = (np.real(sqrtm(C + eye)) for C in covariances)
    aligned = (batch - batch.mean(axis=0)) @ np.linalg.inv(other) @ root + source.mean(axis=0)
    return aligned @ model.weight.T + model.bias


def made(model, features, **settings):
    """From a source of unequal batches."""
    parts = np.split(features, [7, 100])
    return create(
        "coral", model, Source(batches=[(part, [0] * len(part)) for part in parts]), **settings
    )


@pytest.mark.parametrize("ridge", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 64])
def test_logits_match_full_matrix_roots(size, ridge):
    """Fewer samples than features, as many, and more."""
    source, _ = blobs(300)
    batch = 1.5 * blobs(size, seed=1)[0] + 2
    given = made(head(), source, ridge=ridge).predict(batch)
    assert given.accepted
    np.testing.assert_allclose(given.logits, by_roots(head(), source, batch, ridge), rtol=1e-8)


@pytest.mark.parametrize("size", [2, 6, 64])
def test_takes_the_root_of_the_smaller_matrix(monkeypatch, size):
    method = made(head(), blobs(300)[0])
    orders = []
    roots = coral.symmetric_roots

    def noted(matrix, lam):
        orders.append(len(matrix))
        return roots(matrix, lam)

    monkeypatch.setattr(coral, "symmetric_roots", noted)
    method.predict(blobs(size)[0])
    assert orders == [min(size, 6)]


def test_matches_skada_without_a_ridge():
    from skada._mapping import CORALAdapter

    source, _ = blobs(300)
    batch = 1.5 * blobs(64, seed=1)[0] + 2
    both = np.concatenate([batch, source])  # skada maps its source: here the batch
    domain = np.concatenate([np.ones(len(batch), int), -2 * np.ones(len(source), int)])
    coral = CORALAdapter(reg=0.0).fit(both, sample_domain=domain)
    W = coral.cov_source_inv_sqrt_ @ coral.cov_target_sqrt_
    aligned = (batch - batch.mean(axis=0)) @ W + source.mean(axis=0)
    identity = Exact(np.eye(6))
    given = made(identity, source, ridge=1e-12).predict(batch).logits
    np.testing.assert_allclose(given, aligned, rtol=1e-6)


def test_aligned_batch_has_the_source_moments():
    source, _ = blobs(300)
    aligned = (
        made(Exact(np.eye(6)), source, ridge=1e-12).predict(3 * blobs(50, seed=1)[0] - 5).logits
    )
    np.testing.assert_allclose(aligned.mean(axis=0), source.mean(axis=0), atol=1e-8)
    np.testing.assert_allclose(np.cov(aligned.T, bias=True), np.cov(source.T, bias=True), atol=1e-6)


@pytest.mark.parametrize("ridge", [0.1, 1.0])
def test_source_is_mapped_to_itself(ridge):
    source, _ = blobs(300)
    given = made(head(), source, ridge=ridge).predict(source).logits
    np.testing.assert_allclose(given, head()(source).logits, rtol=1e-8)


def test_single_sample_gets_the_frozen_answer():
    method = create("coral", problem.model(), problem.source())
    batch = problem.stream(1, 1)[0]
    given = method.predict(batch)
    assert (given.accepted, given.reason) == (False, "batch_too_small")
    assert torch.equal(given.logits, method.frozen.predict(batch).logits)


def test_classes_of_a_state():
    features, labels = blobs(300)
    known = labels != 1
    source = Source.fit(head(), [(features[known], labels[known])])
    batch = blobs(20, seed=1)[0]
    expected = by_roots(head(), features[known], batch, 1.0)[:, [0, 2]]
    given = create("coral", head(), source).predict(batch).logits
    np.testing.assert_allclose(given, expected, rtol=1e-8)


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_on_images(kind):
    """Gains on a darker, noisier stream if batches are large enough to estimate moments."""
    method = create("coral", problem.model(kind), problem.source(kind))
    accuracy = {size: problem.accuracy(method, 1.0, 1280, size) for size in (8, 64)}
    frozen = problem.accuracy(method.frozen, 1.0, 1280)
    assert accuracy[64] > frozen + 0.02
    assert accuracy[8] < accuracy[64]
    assert isinstance(method.predict(problem.stream(1, 2)[0]).logits, torch.Tensor)


def test_retained():
    """Colouring and classifier are stored as one matrix, without a covariance."""
    source, _ = blobs(300)
    assert made(head(), source).retained().total == (6 * 3 + 3) * 8


def test_invalid_input_is_rejected():
    source, labels = blobs(30)
    batches = [(source, labels)]

    def refused(model, batches, **settings):
        return error_line(create, "coral", model, Source(batches=batches), **settings)

    assert "needs source images" in refused(head(), None)
    assert "above 0, not 0" in refused(head(), batches, ridge=0)
    assert "do not vary" in refused(head(), [(np.ones((5, 6)), [0] * 5)])
    assert "NaN or infinity" in refused(head(), [(source * np.nan, labels)])
    function = wrap(lambda batch: (batch, batch), version="example-1")
    assert "which <lambda> does not show" in refused(function, batches)
