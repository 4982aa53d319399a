"""The sketch of the source: what fit draws, and which sketches a state file rejects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import caster
from caster import Caster, StateError
from caster import state as states
from caster.adapt.fitting import fit_file
from caster.config import Settings
from caster.state.sketch import SAMPLES, Sketch, sketch_size
from tests.conftest import problem
from tests.support.monitored import adapter, draw, head


@pytest.fixture(scope="module")
def state():
    return adapter().state


def same(one: Sketch, other: Sketch) -> bool:
    both = zip(one.arrays().values(), other.arrays().values(), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in both)


def test_a_saved_sketch_is_the_same(tmp_path, state):
    states.save(state, tmp_path / "s.caster")
    assert same(states.load(tmp_path / "s.caster").sketch, state.sketch)


def test_it_holds_random_samples_with_their_answers(state):
    z, p, y = draw(np.random.default_rng(0), 1_500)
    sketch = state.sketch
    assert len(sketch) == SAMPLES
    projected = z @ state.moments.U
    rows = [int(np.abs(projected - kept).sum(axis=1).argmin()) for kept in sketch.features]
    assert len(set(rows)) > 0.99 * SAMPLES  # none twice
    assert np.abs(np.mean(rows) / 1_500 - 0.5) < 0.05  # nor from one end
    assert np.array_equal(sketch.labels, y[rows])
    expected = 1 - p[rows].max(axis=1)
    np.testing.assert_allclose(sketch.uncertainty[:, 0], expected, rtol=1e-5, atol=1e-7)
    assert np.array_equal(sketch.wrong[:, 0], p[rows].argmax(axis=1) != y[rows])
    differences = np.abs(sketch.features - projected[rows])
    assert 1e-4 < np.median(differences) < 0.05  # held out: close, not equal
    assert np.abs(sketch.probabilities - p[rows]).max() < 1e-3
    adapted = sketch.wrong[:, 1].mean()
    assert abs(adapted - (1 - state.source_check.gated)) < 0.05


@pytest.mark.parametrize("sizes", [[1_500], [7, 893, 100, 500]])
def test_chunks_do_not_matter(state, sizes):
    z, _, y = draw(np.random.default_rng(0), 1_500)
    model = caster.wrap(lambda batch: (batch, head(batch)), version="monitored-1")
    ends = np.cumsum(sizes)[:-1]
    fitted = caster.fit(model, zip(np.split(z, ends), np.split(y, ends), strict=True))
    assert np.array_equal(fitted.state.sketch.labels, state.sketch.labels)
    np.testing.assert_allclose(fitted.state.sketch.features, state.sketch.features, atol=1e-4)


def test_without_a_head_source_gda_answers():
    h, y = problem()
    sketch = Caster().fit(h, y, sketch=True).sketch_
    assert sketch.wrong.mean(axis=0).max() < 0.1
    assert len(sketch) == len(y)  # a small source is stored whole


def test_the_smallest_source_has_one():
    clf = Caster().fit([[0.0], [1.0], [4.0], [5.0]], [0, 0, 1, 1], sketch=True)
    assert sorted(clf.sketch_.labels.tolist()) == [0, 0, 1, 1]
    assert np.isfinite(clf.sketch_.uncertainty).all()


def test_infinite_logits_are_left_out():
    h, y = problem()
    logits = np.eye(5)[y]
    logits[:3, 0] = np.inf
    assert len(Caster().fit(h, y, logits, sketch=True).sketch_) == len(y) - 3


def test_it_can_be_left_out(tmp_path):
    assert adapter(sketch=False).state.sketch is None
    h, y = problem()
    np.savez(tmp_path / "source.npz", features=h, labels=y)
    for sketch in (True, False):
        fit_file(tmp_path / "source.npz", tmp_path / "s.caster", Settings(), sketch=sketch)
        assert (states.load(tmp_path / "s.caster").sketch is not None) == sketch


def test_its_size_is_bounded():
    for n_classes in (2, 100, 2_048, 65_536):
        assert 32 <= sketch_size(n_classes) <= SAMPLES
        assert sketch_size(n_classes) * n_classes <= max(2**20, 32 * n_classes)


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: replace(s, labels=s.labels + 1),
        lambda s: replace(s, labels=s.labels[:-1]),
        lambda s: replace(s, wrong=s.wrong + np.uint8(1)),
        lambda s: replace(s, uncertainty=s.uncertainty - 1),
        lambda s: replace(s, uncertainty=s.uncertainty + 1),
        lambda s: replace(s, features=s.features * np.nan),
        lambda s: replace(s, features=s.features.astype(np.float64)),
        lambda s: replace(s, probabilities=2 * s.probabilities),
        lambda s: Sketch(*(np.concatenate([a, a]) for a in s.arrays().values())),
        lambda s: Sketch(*(a[:0] for a in s.arrays().values())),
    ],
)
def test_a_sketch_that_no_fit_produces_is_rejected(tmp_path, state, edit):
    with pytest.raises(StateError, match="cannot write"):
        states.save(replace(state, sketch=edit(state.sketch)), tmp_path / "s.caster")
