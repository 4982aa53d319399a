"""Scores of many classes by one kernel, and by torch's solvers where it does not work."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from caster.core.types import SourceMoments
from caster.models import class_scores

CLASSES, SIZE = 5, 9


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(class_scores, "MIN_CLASSES", 4)
    monkeypatch.setattr(class_scores, "_works", {})


def problem(samples=20, k=SIZE, dtype=torch.float32):
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(CLASSES, k, 3 * k))
    parts = (
        np.eye(k),
        3 * rng.normal(size=(CLASSES, k)),
        roots @ roots.mT / (3 * k),
        3 * rng.normal(size=(samples, k)),
        np.diag(rng.uniform(0.1, 1.0, k)),
    )
    U, means, covariances, z, ridge = (torch.from_numpy(part).to(dtype) for part in parts)
    return z, SourceMoments(U, means, covariances, torch.arange(1, CLASSES + 1)), ridge


def reference(z, moments, ridge):
    """Log densities by NumPy, in float64, plus the constant that scores leave out."""
    z, ridge = z.numpy().astype(float), (ridge + moments.slack).numpy().astype(float)
    columns = []
    for c in range(moments.n_classes):
        S = moments.covariances[c].numpy().astype(float) + ridge
        x = z - moments.means[c].numpy()
        distance = (x * np.linalg.solve(S, x.T).T).sum(axis=1)
        columns.append(
            np.log(float(moments.priors[c])) - 0.5 * (distance + np.linalg.slogdet(S)[1])
        )
    return np.stack(columns, axis=1)


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def with_kernel(monkeypatch, kernel):
    calls = []

    def counted(*args):
        calls.append(args[0].shape)
        return kernel(*args)

    monkeypatch.setattr(class_scores, "_by_kernel", counted)
    return calls


def by_numpy(*args):
    return torch.from_numpy(reference(*args)).float()


def test_a_kernel_that_agrees_answers_alone_from_then_on(monkeypatch):
    calls = with_kernel(monkeypatch, by_numpy)
    args = problem()
    close(class_scores.ridged_scores(*args), reference(*args))
    monkeypatch.setattr(class_scores, "_defined", lambda *args: pytest.fail("solved again"))
    close(class_scores.ridged_scores(*args), reference(*args))
    assert len(calls) == 3  # checked, and used twice


def failing(*args):
    raise RuntimeError("no compiler")


def wrong(*args):
    return by_numpy(*args) + 0.1


def not_noticing(*args):
    return by_numpy(*args).nan_to_num(0.0)


@pytest.mark.parametrize("kernel", [failing, wrong])
def test_a_kernel_that_does_not_work_is_not_used(monkeypatch, kernel):
    calls, args = with_kernel(monkeypatch, kernel), problem()
    for _ in range(2):
        close(class_scores.ridged_scores(*args), reference(*args))
    assert len(calls) == 1


def test_a_covariance_that_is_not_positive_definite_must_be_noticed(monkeypatch):
    z, moments, ridge = problem()
    moments.covariances[2] = -torch.eye(SIZE)
    calls = with_kernel(monkeypatch, not_noticing)
    found = class_scores.ridged_scores(z, moments, ridge)
    assert found[:, 2].isnan().all()
    assert len(calls) == 1


def test_few_classes_many_directions_and_double_precision_use_no_kernel(monkeypatch):
    with_kernel(monkeypatch, lambda *args: pytest.fail("compiled"))
    for args in (problem(dtype=torch.float64), problem(k=129)):
        close(class_scores.ridged_scores(*args), reference(*args))
    monkeypatch.setattr(class_scores, "MIN_CLASSES", CLASSES + 1)
    args = problem()
    close(class_scores.ridged_scores(*args), reference(*args))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("samples", "k"), [(20, 9), (70, 17), (3, 31), (64, 63), (130, 64), (70, 65), (40, 128)]
)
def test_the_kernel_gives_the_reference(monkeypatch, samples, k):
    """On a GPU or, without one, by Triton's interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    z, moments, ridge = problem(samples, k)
    parts = (moments.U, moments.means, moments.covariances, moments.counts)
    placed = SourceMoments(*(part.to(where) for part in parts))
    found = class_scores._by_kernel(z.to(where), placed, ridge.to(where)).cpu()
    close(found, reference(z, moments, ridge))
    z[0] = torch.nan  # affects its own row only
    found = class_scores._by_kernel(z.to(where), placed, ridge.to(where)).cpu()
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()
    z[0] = 0.0
    last = torch.eye(k)
    last[-1, -1] = -2.0  # found in the last panel
    placed.covariances[1] = last
    assert class_scores._by_kernel(z.to(where), placed, ridge.to(where))[:, 1].isnan().all()
    placed.covariances[1] = -torch.eye(k)
    assert class_scores._by_kernel(z.to(where), placed, ridge.to(where))[:, 1].isnan().all()
