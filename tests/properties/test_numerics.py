"""A numerical failure is a verdict with its own reason, never an exception or NaN."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone

from caster import Adapter, Caster, CasterError, wrap
from caster.adapt import adapter as adapters
from caster.adapt import feature_transport
from caster.adapt.fitting import bound_state
from caster.core import linalg
from caster.models.torch import TorchModel
from caster.report.evaluation import evaluate
from caster_bench.methods.gates import make_gate
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.conftest import problem
from tests.support.cpu_runner import run_graphs_on_the_cpu
from tests.support.sampling import sampled

NAMESPACES = {"numpy": np, "torch": torch, "strict": array_api_strict}
SCALES = [1e-300, 1e-30, 1e-12, 1.0, 1e6, 1e12, 1e19, 1e30, 1e37, 1e200]


@cache
def few(n_classes=10, d=512, each=20):
    """Distant classes with fewer samples than features: their maps are ill-conditioned."""
    rng = np.random.default_rng(2)
    y = np.repeat(np.arange(n_classes), each)
    h = 10 * rng.standard_normal((n_classes, d))[y] + rng.standard_normal((len(y), d))
    return h.astype(np.float32), y, Caster().fit(h.astype(np.float32), y)


def pairs():
    """Every batch of 20 rows of two classes."""
    h, y, _ = few()
    for a, b in combinations(range(10), 2):
        yield np.concatenate([h[y == a][:10], h[y == b][:10]])


def scaled(values, scale, dtype):
    """A scaled array in its dtype, kept finite: other values are invalid input."""
    largest = np.finfo(dtype).max
    with np.errstate(over="ignore"):
        return np.clip(values.astype(np.float64) * scale, -largest, largest).astype(dtype)


def check(clf, batch, xp, n_classes):
    """Check the laws of an answer, with and without head logits."""
    head = np.random.default_rng(3).integers(n_classes, size=len(batch))
    given = xp.asarray(batch)
    clf = clone(clf).set_params(safeguards=False)._adopt(clf._state)  # they would reject first
    out = clf.adapt(given, xp.asarray(np.eye(n_classes)[head]))
    if out.verdict.accepted:
        assert np.isfinite(out.verdict.ratio)
        assert np.isfinite(np.asarray(out.adapted)).all()
    else:
        assert np.array_equal(np.asarray(out.labels), clf.classes_[head])
    if out.verdict.reason == "numerical":
        assert out.verdict.ratio == np.inf
        assert np.array_equal(np.asarray(out.proposed), clf.classes_[head])
    assert out.adapted is None or not np.isnan(np.asarray(out.adapted)).any()
    assert not np.isnan(out.verdict.ratio)
    scores = np.asarray(clf.source_scores(given))
    assert not np.isnan(scores).any()
    alone = clf.adapt(given)
    assert alone.verdict == out.verdict
    if not alone.verdict.accepted:
        assert np.array_equal(np.asarray(alone.labels), clf.classes_[scores.argmax(axis=1)])
    return out.verdict


@pytest.mark.parametrize("name", NAMESPACES)
def test_batches_of_two_classes_of_few_samples(name):
    h, _, clf = few()
    reasons = Counter(check(clf, batch, NAMESPACES[name], 10).reason for batch in pairs())
    assert reasons.total() == 45
    for scale in SCALES:
        for batch in (h[:20], np.ones((20, 512)), np.repeat(h[:1], 20, axis=0)):
            check(clf, scaled(batch, scale, np.float32), NAMESPACES[name], 10)


@given(
    name=st.sampled_from(list(NAMESPACES)),
    dtype=st.sampled_from([np.float32, np.float64]),
    rows=st.sampled_from(["constant", "repeated", "two classes", "normal", "one far away"]),
    size=st.sampled_from([1, 2, 7, 20, 40]),
    scale=st.sampled_from(SCALES),
    offset=st.sampled_from([0.0, 1.0, 1e10]),
    settings=st.sampled_from([{}, {"lam": 1e-12, "beta": 1e-12}, {"lam": 1e30}, {"beta": 1e30}]),
)
def test_any_finite_batch_is_answered(name, dtype, rows, size, scale, offset, settings):
    h, y, fitted = few()
    clf = Caster(**settings, min_classes=2, min_samples=1)._adopt(fitted._state)
    rng = np.random.default_rng(size)
    batch = {
        "constant": np.ones((size, 512)),
        "repeated": np.repeat(h[:1], size, axis=0),
        "two classes": h[y < 2][:size],
        "normal": rng.standard_normal((size, 512)),
        "one far away": np.concatenate([h[: size - 1], np.float32(1e15) * h[:1]]),
    }[rows]
    check(clf, scaled(batch + offset, scale, dtype), NAMESPACES[name], 10)


@given(
    name=st.sampled_from(list(NAMESPACES)),
    dtype=st.sampled_from([np.float32, np.float64]),
    scale=st.sampled_from(SCALES),
    columns=st.sampled_from(["all", "one"]),
    offset=st.sampled_from([0.0, 1e6]),
    target=st.sampled_from(SCALES),
)
def test_a_fit_of_any_scale_works_or_says_why(name, dtype, scale, columns, offset, target):
    h, y = problem(n=60, d=6, n_classes=3)
    factor = scale if columns == "all" else np.array([scale, 1, 1, 1, 1, 1])
    source = scaled(h + offset, factor, dtype)
    batch = scaled(source[:30], target, dtype)
    try:
        clf = Caster().fit(NAMESPACES[name].asarray(source), y)
    except CasterError:
        return
    check(clf, batch, np, 3)


def test_unscorable_samples_get_the_class_of_the_largest_prior():
    h, y = problem(n_classes=3)
    clf = Caster().fit(h, y)
    largest = np.argmax(np.bincount(y))
    assert set(clf.predict(1e200 * h[:40]).tolist()) == {largest}
    mixed = np.concatenate([h[:5], 1e200 * h[:1]])  # the others keep Source-GDA's answer
    expected = [*clf.source_scores(h[:5]).argmax(axis=1), largest]
    assert clf.source_scores(mixed).argmax(axis=1).tolist() == expected


@pytest.mark.whole
def test_a_source_that_cannot_be_factored():
    """A state may hold covariances that no fit produces: batches are rejected without an error."""
    h, y = problem(dtype=np.float32)
    clf = Caster().fit(h, y)
    clf.moments_.covariances[1] = -100 * np.eye(4)
    for xp in (*NAMESPACES.values(), jax.numpy):
        assert check(Caster.from_state(clf._state), h[:64], xp, 5).reason == "numerical"


@pytest.mark.parametrize("scale", sampled(SCALES, 4))
def test_jax(scale):
    """JAX compiles every shape: reuse those of other tests."""
    h, y = problem()
    verdict = check(Caster().fit(h, y), scaled(h[:64], scale, np.float32), jax.numpy, 5)
    assert verdict.reason == "numerical" or scale < 1e19


# --- a GPU, where nothing raises and nothing waits -------------------------------------------


@pytest.fixture
def as_on_gpu(monkeypatch):
    for module in (linalg, feature_transport):
        monkeypatch.setattr(module, "on_gpu", lambda array: isinstance(array, torch.Tensor))
    run_graphs_on_the_cpu(monkeypatch)


def test_the_gpu_path_rejects_as_well(as_on_gpu):
    h, _, clf = few()
    batches = [*pairs(), np.ones((40, 512), np.float32), 1e30 * h[:40], h[:1] * 1e30]
    reasons = Counter(check(clf, batch, torch, 10).reason for batch in batches)
    assert reasons["numerical"] > 0
    assert reasons["accepted"] == 0


@pytest.mark.parametrize("by_host", [False, True])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("head", [tuple(range(10)), None])
def test_an_adapter_goes_on_after_a_batch_that_fails(as_on_gpu, monkeypatch, head, text, by_host):
    monkeypatch.setattr(adapters, "HOST_WORK", adapters.HOST_WORK if by_host else 0)
    h, y, _ = few()
    clf = Caster().fit(h, np.array(list("abcdefghij"))[y] if text else y)
    torch.manual_seed(0)
    model = TorchModel(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(512, 10)))
    adapter = Adapter(model, bound_state(clf, model, head))
    batches = [torch.asarray(b) for b in (h[::4], 1e30 * h[::4], h[::4])]
    good, bad, again = adapter.stream(batches)
    assert bad.verdict.reason == "numerical"
    assert good.verdict == again.verdict
    columns = model(batches[1]).logits if head else clf.source_scores(batches[1])
    assert bad.labels.tolist() == clf.classes_[columns.argmax(dim=1).numpy()].tolist()


# --- who uses verdicts -----------------------------------------------------------------------

METHODS = ["caster", "caster-ungated", "caster-no-transport", "caster-mixed-metric", "coral"]


@pytest.mark.parametrize("name", [*METHODS, "linear-tca"])
def test_methods_keep_the_frozen_answer(name, monkeypatch):
    h, y = problem(dtype=np.float32)
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(12, 5))
    torch.nn.init.zeros_(net[1].weight)  # or the head's logits are not finite either
    model = wrap(net)
    method = create(name, model, Source.fit(model, [(torch.asarray(h), torch.asarray(y))]))
    batch = torch.asarray(np.float32(1e36) * h[:40])
    if name == "linear-tca":  # it has the range of float64
        failed = torch.full((12, 12), torch.nan)
        monkeypatch.setattr(f"{type(method).__module__}.symmetric_roots", lambda *_: (failed,) * 2)
    answer = method.predict(batch)
    assert (answer.accepted, answer.reason) == (False, "numerical")
    assert torch.equal(answer.logits, method.frozen.predict(batch).logits)


@pytest.mark.parametrize("gate", ["certificate", "referee"])
def test_gates_reject_what_cannot_be_computed(gate):
    h, y = problem()
    model = wrap(lambda batch: (batch, 0 * batch[:, :5]), version="example-1")
    judge = make_gate(gate, model, Source.fit(model, [(h, y)])).judge
    assert not judge(model(1e200 * h[:40])).accepted


def test_an_evaluation_counts_numerical_failures():
    h, y, clf = few()
    chunks = [(scale * h[::4], y[::4], np.eye(10)[y[::4]]) for scale in (np.float32(1e30), 1.0)]
    found = evaluate(clf, chunks)
    assert found.reasons["numerical"] == 1
    assert found.batches[0].right["ungated"] == found.batches[0].right["frozen"] == 50
