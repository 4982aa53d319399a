"""The monitor of a resting stream: few false alarms, and each kind of change noticed at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caster.adapt.output_monitor import BLOCK, MEMORY, MIN_BLOCKS, OutputMonitor
from tests.support.answers import same_state

C, D = 10, 32
LEARNT = 28  # blocks that a stream with the memory of 2,048 samples learns before it rests
BLOCKS = 400


class Outputs:
    """Stationary features and scores of one kind."""

    def __init__(self, kind="classes", seed=0):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.directions, self.weights = self.rng.normal(size=(2, D)), self.rng.normal(size=(D, C))

    def __call__(self, n=BLOCK):  # (n, d), (n, C)
        rng = self.rng
        if self.kind == "classes":
            h = rng.normal(size=(n, D)) + 4 * np.eye(C, D)[rng.integers(C, size=n)]
            return h, 3 * h[:, :C]
        h = {
            "normal": lambda: rng.normal(size=(n, D)),
            "sparse": lambda: np.maximum(0, rng.normal(size=(n, D)) - 1),
            "heavy tails": lambda: rng.standard_t(3, size=(n, D)),
            "skewed": lambda: rng.lognormal(0, 1.5, size=(n, D)),
            "correlated": lambda: (
                rng.normal(size=(n, 2)) @ self.directions + 0.1 * rng.normal(size=(n, D))
            ),
            "one direction": lambda: rng.normal(size=(n, 1)) @ self.directions[:1],
        }[self.kind]()
        return h, h @ self.weights


KINDS = {  # with the blocks in 400 that may be false alarms
    "classes": 6,
    "normal": 6,
    "sparse": 6,
    "correlated": 8,
    "one direction": 12,
    "heavy tails": 16,
    "skewed": 24,
}


def taught(draw, monitor=None, blocks=LEARNT):
    monitor = monitor or OutputMonitor()
    for _ in range(blocks):
        monitor.learn(*draw())
    assert monitor.is_ready
    return monitor


# --- stationary streams --------------------------------------------------------------------------


def false_alarms(kind, seed, scale=1.0, offset=0.0):
    draw = Outputs(kind, seed)
    monitor, alarms = taught(draw), 0
    for _ in range(BLOCKS):
        features, scores = draw()
        if not monitor.judge(scale * features + offset, scores)():
            alarms += 1
            monitor.begin()
            monitor.learn(features, scores)  # as a stream does that has looked at the batch
    return alarms


@pytest.mark.parametrize("kind", KINDS)
def test_stationary_streams_seldom_alarm(kind):
    for seed in range(2):
        assert false_alarms(kind, seed) <= KINDS[kind]


def test_the_same_streams_alarm_once_the_features_have_moved():
    """A mutant of the bound above: a monitor that never alarms would pass it."""
    assert false_alarms("normal", 0, offset=0.5) > BLOCKS / 10


@given(st.sampled_from([*KINDS]), st.integers(0, 99), st.floats(-3, 3), st.floats(-50, 50))
def test_units_and_origins_of_features_do_not_matter(kind, seed, log_scale, offset):
    draw, scale = Outputs(kind, seed), 10.0**log_scale
    plain, other = OutputMonitor(), OutputMonitor()
    for _ in range(16):
        h, scores = draw()
        plain.learn(h, scores)
        other.learn(scale * (h + offset), scores)
    for _ in range(8):
        h, scores = draw()
        expected = plain.numbers(h, scores)
        found = other.numbers(scale * (h + offset), scores)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def to_list(array):
    return np.asarray(array).tolist()


def test_the_distance_is_one_on_average():
    """Whatever the distribution: E |mean - reference|^2 = variance (1/n + 1/N)."""
    for kind in ("normal", "correlated", "sparse"):
        found = []
        for seed in range(20):
            monitor = taught(Outputs(kind, seed), blocks=40)
            blocks, total, _ = monitor._distances
            found.append(total / blocks)
        assert np.mean(found) == pytest.approx(1, abs=0.15)


def test_a_feature_that_never_varied_says_nothing():
    draw = Outputs("normal")
    monitor = OutputMonitor()
    for _ in range(LEARNT):
        h, scores = draw()
        h[:, 0] = 7.0
        monitor.learn(h, scores)
    h, scores = draw()
    h[:, 0] = 7.0
    expected = to_list(monitor.numbers(h, scores))
    h[:, 0] = 8.0
    assert to_list(monitor.numbers(h, scores)) == expected


# --- changes, each noticed by its own part -------------------------------------------------------


def moved(h, scores):
    return h + 1.0, scores


def less_sure(h, scores):
    return h, 0.2 * scores


def in_order(h, scores):
    order = np.argsort(scores.argmax(axis=1), kind="stable")
    return h[order], scores[order]


def broken_features(h, scores):
    h = h.copy()
    h[3, 1] = np.nan
    return h, scores


def infinite_features(h, scores):
    h = h.copy()
    h[3, 1] = np.inf
    return h, scores


def broken_scores(h, scores):
    scores = scores.copy()
    scores[3, 1] = np.nan
    return h, scores


CHANGES = {
    "distance": [moved, broken_features, infinite_features],
    "confidence": [less_sure, broken_scores],
    "repeats": [in_order],
}


class Without(OutputMonitor):
    """A mutant that ignores one of its three parts."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def _is_unchanged(self, n, total, repeats, distance):
        if self.part == "confidence":
            total = n * self._confidence.mean
        repeats = 0.0 if self.part == "repeats" else repeats
        distance = 0.0 if self.part == "distance" else distance
        return super()._is_unchanged(n, total, repeats, distance)


@pytest.mark.parametrize(
    ("part", "change"), [(part, change) for part, all_ in CHANGES.items() for change in all_]
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_change_is_noticed_within_a_block_by_its_own_part(part, change):
    draw = Outputs()
    monitors = {name: taught(draw, Without(name)) for name in (None, *CHANGES)}
    for _ in range(5):
        plain = draw()
        assert all(monitor.judge(*plain)() for monitor in monitors.values())
        found = {name: monitor.judge(*change(*plain))() for name, monitor in monitors.items()}
        assert found == {name: name == part for name in monitors}


@given(st.sampled_from(["classes", "normal", "sparse", "correlated"]), st.integers(0, 99))
def test_a_large_step_is_noticed_whatever_the_features(kind, seed):
    draw = Outputs(kind, seed)
    monitor = taught(draw)
    h, scores = draw()
    assert not monitor.judge(h + 3 * h.std(axis=0), scores)()
    assert not monitor.judge(h, 0 * scores)()


def test_surer_answers_are_no_alarm():
    draw = Outputs()
    monitor = taught(draw)
    h, scores = draw()
    assert monitor.judge(h, 5 * scores)()


# --- blocks --------------------------------------------------------------------------------------


def test_small_batches_are_judged_together():
    draw = Outputs()
    monitor, whole = taught(draw), taught(Outputs())
    for change in (moved, less_sure, in_order):
        h, scores = change(*draw())
        pieces = [slice(i, i + 16) for i in range(0, BLOCK, 16)]
        found = [monitor.judge(h[part], scores[part])() for part in pieces]
        assert found == [True, True, True, whole.judge(h, scores)()]
        assert found[-1] is False


def test_samples_that_wait_are_forgotten_on_request():
    draw = Outputs()
    monitor = taught(draw)
    h, scores = moved(*draw())
    assert monitor.judge(h[:48], scores[:48])()
    monitor.begin()
    assert monitor.judge(h[48:], scores[48:])()


@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.integers(0, 99))
def test_batches_of_any_size_are_learnt_in_blocks(sizes, seed):
    """As if the batches of a block had come as one."""
    draw, one, other, waiting = Outputs(seed=seed), OutputMonitor(), OutputMonitor(), []
    for size in sizes:
        batch = draw(size)
        one.learn(*batch)
        waiting.append(batch)
        if sum(len(h) for h, _ in waiting) >= BLOCK:
            other.learn(*map(np.concatenate, zip(*waiting, strict=True)))
            waiting = []
    one.begin()
    same_state(one.state(), other.state())


def test_a_monitor_is_ready_after_a_few_known_blocks():
    """The variation between blocks is known from those that came behind half of the memory."""
    draw, monitor = Outputs(), OutputMonitor()
    ready = []
    for _ in range(MEMORY // 2 // BLOCK + MIN_BLOCKS):
        ready.append(monitor.is_ready)
        monitor.learn(*draw())
    assert not any(ready)
    assert monitor.is_ready
    monitor.reset()
    assert not monitor.is_ready


def test_blocks_that_are_not_finite_are_not_learnt():
    draw = Outputs()
    monitor = taught(draw)
    before = monitor.state()
    with np.errstate(invalid="ignore"):
        monitor.learn(*broken_features(*draw()))
        monitor.learn(*broken_scores(*draw()))
        monitor.learn(*infinite_features(*draw()))
    same_state(monitor.state(), before)


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@given(st.lists(st.integers(20, 100), min_size=1, max_size=30), st.integers(0, 99))
def test_a_resumed_monitor_continues_exactly(make, sizes, seed):
    draw, monitor = Outputs(seed=seed), OutputMonitor()

    def batch(size):
        return [make(part.astype(np.float32)) for part in draw(size)]

    for size in sizes:
        monitor.learn(*batch(size))
    other = OutputMonitor()
    other.resume(monitor.state())
    same_state(other.state(), monitor.state())
    for size in (30, 50, 64, 200, 10):
        new = batch(size)
        for each in (monitor, other):
            each.learn(*new)
        same_state(other.state(), monitor.state())
    if monitor.is_ready:
        for size in (30, 64, 200):
            new = batch(size)
            assert monitor.judge(*new)() == other.judge(*new)()
            shifted = [new[0] + 1.0, new[1]]
            assert monitor.judge(*shifted)() == other.judge(*shifted)()


def test_a_state_is_not_changed_by_what_comes_later():
    draw = Outputs()
    monitor = taught(draw)
    monitor.learn(*draw(10))
    state = monitor.state()
    copies = {name: part.copy() for name, part in state.items()}
    monitor.learn(*draw())
    other = OutputMonitor()
    other.resume(state)
    other.learn(*draw())
    same_state(state, copies)


def waiting_state():
    draw = Outputs()
    monitor = taught(draw)
    monitor.learn(*draw(10))
    return monitor.state()


@pytest.mark.parametrize("name", [*waiting_state()])
def test_numbers_of_a_state_are_finite(name):
    for value in (np.nan, np.inf):
        state = waiting_state()
        damaged = np.array(state[name])
        damaged.flat[0] = value
        with pytest.raises(ValueError, match="impossible"):
            OutputMonitor().resume(state | {name: damaged})


DAMAGED = {
    "other sums": ("monitor.distances", lambda a: a[:2]),
    "other pairs": ("monitor.repeats", lambda a: np.append(a, 1.0)),
    "negative variance": ("monitor.variance", lambda a: -a),
    "fewer means": ("monitor.mean", lambda a: a[:-1]),
    "means of two axes": ("monitor.mean", lambda a: a[None]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_states_are_rejected(case):
    name, damage = DAMAGED[case]
    state = waiting_state()
    with pytest.raises(ValueError, match=r"impossible|reshape"):
        OutputMonitor().resume(state | {name: damage(state[name])})


@pytest.mark.parametrize("name", waiting_state())
def test_a_state_without_a_part_is_rejected(name):
    state = {key: part for key, part in waiting_state().items() if key != name}
    with pytest.raises((KeyError, ValueError)):
        OutputMonitor().resume(state)
