"""Steps between neighbouring blocks' means, beside what chance gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster.core.steadiness import PAIRS, Steadiness, freedom
from tests.conftest import close


def shown(batches, size):
    steady = Steadiness(size)
    for batch in batches:
        steady = steady.shown(batch)
    return steady


def ratio(steady):
    steps, chance = steady.sums()
    return float(steps / chance)


def by_loops(blocks):
    """Every pair of neighbours: the squared step, and both means' variances, channel by channel."""
    found = []
    for one, other in pairwise(blocks):
        step = sum((one[:, j].mean() - other[:, j].mean()) ** 2 for j in range(one.shape[1]))
        chance = sum(x[:, j].var(ddof=1) / len(x) for x in (one, other) for j in range(x.shape[1]))
        found.append((step, chance))
    return found


@pytest.mark.parametrize("size", [8, 16, 20, 100])
def test_by_loops(kind, size):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(size, 3)) + i for i in range(100 // size * 4)]
    steady = shown([kind.array(batch) for batch in batches], 16)
    joined, blocks = np.concatenate(batches), []
    if size == 100:  # a batch is one block, but for the first, which is two
        blocks = np.split(joined, [50, 100, 200, 300])
    else:
        whole = -(-16 // size) * size
        blocks = [joined[i : i + whole] for i in range(0, len(joined) // whole * whole, whole)]
    expected = by_loops(blocks)[-PAIRS:]
    assert len(steady.pairs) == len(expected)
    for found, (step, chance) in zip(steady.pairs, expected, strict=True):
        close(found[0], step, 20 * kind.tolerance)
        close(found[1], chance, 20 * kind.tolerance)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(0, 99))
def test_small_batches_make_the_blocks_that_whole_ones_would(cuts, seed):
    z = np.random.default_rng(seed).normal(size=(sum(cuts), 2))
    steady = shown(np.split(z, np.cumsum(cuts)[:-1]), 12)
    ends, seen, last = [], 0, 0
    for n in cuts:
        seen += n
        if seen - last >= 12:
            ends.append((last, seen))
            last = seen
    expected = by_loops([z[a:b] for a, b in ends])[-PAIRS:]
    np.testing.assert_allclose(np.reshape(steady.pairs, (-1, 2)), np.reshape(expected, (-1, 2)))


@pytest.mark.parametrize("spreads", [np.ones(9), np.ones(128), np.array([3.0, 2.0, 1.0, 1.0])])
def test_independent_samples_stay_below_the_limit_and_are_one_in_the_mean(spreads):
    rng = np.random.default_rng(0)
    free = freedom(np.diag(spreads**2))
    found, above = [], 0
    for _ in range(400):
        steady = shown(rng.normal(size=(5, 64, len(spreads))) * spreads, 64)
        found.append(ratio(steady))
        above += found[-1] > steady.limit(free)
    assert np.mean(found) == pytest.approx(1.0, abs=4 * np.std(found) / 20)
    assert above <= 12  # 3 %: neighbours share a block, and the tail is that of a chi-square


@pytest.mark.parametrize(("n_classes", "few"), [(10, 1), (100, 5), (1000, 20)])
def test_classes_in_turns_are_seen_among_many(n_classes, few):
    rng = np.random.default_rng(0)
    means, free = 1.5 * rng.normal(size=(n_classes, 32)), freedom(np.eye(32))
    for _ in range(20):
        mixtures = [rng.choice(rng.choice(n_classes, few), 64) for _ in range(5)]
        steady = shown([means[y] + rng.normal(size=(64, 32)) for y in mixtures], 64)
        assert ratio(steady) > steady.limit(free)


@pytest.mark.parametrize("size", [64, 320, 1024])
def test_long_batches_are_held_against_each_other(size):
    rng = np.random.default_rng(0)
    means, free = 1.5 * rng.normal(size=(10, 32)), freedom(np.eye(32))
    mixtures = [rng.choice([2 * i, 2 * i + 1], size) for i in range(5)]
    steady = shown([means[y] + rng.normal(size=(size, 32)) for y in mixtures], 64)
    assert ratio(steady) > 4 * steady.limit(free)


def test_the_order_within_a_batch_does_not_matter():
    """To moments it does not either: batches that hold all classes alike are steady."""
    rng = np.random.default_rng(0)
    means, sorted_within = 3 * rng.normal(size=(10, 9)), np.repeat(np.arange(10), 64)
    batches = [means[sorted_within] + rng.normal(size=(640, 9)) for _ in range(PAIRS + 2)]
    steady = shown(batches, 64)
    assert ratio(steady) < 0.1  # less than chance: the classes of every batch are the same


def test_a_step_is_forgotten_after_some_pairs():
    rng = np.random.default_rng(0)
    far = shown([rng.normal(size=(64, 9)), rng.normal(size=(64, 9)) + 5], 64)
    assert ratio(far) > 100
    steady = far
    for _ in range(PAIRS):
        steady = steady.shown(rng.normal(size=(64, 9)) + 5)
    assert ratio(steady) < 3
    assert len(steady.pairs) == PAIRS
