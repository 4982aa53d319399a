"""The monitor of a rest in a graph, against `OutputMonitor` in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from caster.adapt.output_monitor import OutputMonitor
from caster.export.monitor_graph import MonitorGraph, initial_monitor
from tests.support.graphs import compiled

D, C = 12, 5


def outputs(rng, n, step=0.0, scale=4.0):
    features = (rng.normal(size=(n, D)) + step).astype(np.float32)
    features[:, 0] = 2.0  # which never varies
    return features, (scale * rng.normal(size=(n, C))).astype(np.float32)


@pytest.fixture(scope="module")
def run():
    """A batch that is learnt and one that is judged, by the same monitor before."""
    names = list(initial_monitor(D, C))

    def step(features, scores, *parts):
        known = MonitorGraph(**dict(zip(names, parts, strict=True)))
        learnt, waiting = known.learn(features, scores), known.wait(features, scores)
        return [
            known.is_ready,
            known.is_unchanged(features, scores),
            waiting.pending,
            *learnt.parts().values(),
        ]

    batch = outputs(np.random.default_rng(0), 8)
    return compiled(step, *batch, *initial_monitor(D, C).values(), also_open=[1])


def same_sums(parts, expected):
    found = dict(zip(initial_monitor(D, C), parts, strict=True))
    pending = len(expected.get("monitor.features", ()))
    assert found["pending"] == pending
    for name in ("distances", "repeats", "confidence", "count"):
        if f"monitor.{name}" in expected:
            np.testing.assert_allclose(found[name], expected[f"monitor.{name}"], rtol=1e-4)
    if "monitor.mean" in expected:
        moments = [expected["monitor.mean"], expected["monitor.variance"]]
        np.testing.assert_allclose(found["moments"], moments, rtol=1e-4, atol=1e-6)
    for name in ("features", "scores") if pending else ():
        np.testing.assert_array_equal(found[name][-pending:], expected[f"monitor.{name}"])


@pytest.mark.parametrize("size", [24, 64, 100])
def test_a_monitor_learns_and_judges_as_in_python(run, size):
    rng, theirs, state = np.random.default_rng(1), OutputMonitor(), initial_monitor(D, C).values()
    for _ in range(1600 // size):
        batch = outputs(rng, size)
        ready, _, _, *state = run(*batch, *state)
        assert ready == theirs.is_ready
        theirs.learn(*batch)
        same_sums(state, theirs.state())
    assert theirs.is_ready
    repeated = np.zeros((80, C), np.float32)
    changes = {
        "nothing": outputs(rng, 80),
        "features": outputs(rng, 80, step=0.4),
        "confidence": outputs(rng, 80, scale=1.0),
        "answers": (outputs(rng, 80)[0], outputs(rng, 80)[1] + 9 * np.eye(C, dtype="f4")[0]),
        "no number": (outputs(rng, 80)[0], repeated + np.nan),
        "few": outputs(rng, 8, step=9.0),
        "few, no number": (outputs(rng, 8)[0], repeated[:8] + np.nan),
    }
    for name, batch in changes.items():
        copy = OutputMonitor()
        copy.resume(theirs.state())
        _, usual, pending, *_ = run(*batch, *state)
        assert usual == copy.judge(*batch)(), name
        assert pending == sum(len(each) for each, _ in copy._pending), name
        if not name.startswith("few"):  # whether those fill a block depends on what waits
            assert usual == (name == "nothing"), name


def test_a_batch_that_is_no_number_is_not_learnt(run):
    batch = outputs(np.random.default_rng(2), 64)
    _, _, _, *before = run(*batch, *initial_monitor(D, C).values())
    _, _, _, *after = run(batch[0] + np.nan, batch[1], *before)
    for name, old, new in zip(initial_monitor(D, C), before, after, strict=True):
        if name not in ("features", "scores"):
            np.testing.assert_array_equal(new, old, err_msg=name)
