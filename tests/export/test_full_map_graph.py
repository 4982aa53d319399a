"""Full maps in a graph, against `core.channels`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from caster.core.channels import ChannelMoments, shrunk, to_source_full
from caster.export import full_map_graph
from tests.support.graphs import evaluate

WIDTHS, FULL = (3, 5, 3, 2), (True, False, True, True)
D = sum(WIDTHS)
PRIOR = 16.0


def network(seed, count=300.0, spread=1.0):
    """Moments at every site, with covariances at the full ones."""
    rng = np.random.default_rng(seed)
    found = []
    for width, full in zip(WIDTHS, FULL, strict=True):
        values = rng.normal(size=(200, width)) @ rng.normal(size=(width, width)) ** 3 * spread
        found.append(replace(ChannelMoments.of(values + rng.normal(size=width), 1, full=full)))
    return [replace(each, count=count) for each in found]


def joined(moments, name):
    parts = (getattr(each, name) for each in moments)
    return np.concatenate([np.ravel(part) for part in parts if part is not None])


def maps(source, target, positions=(64,) * 4, count=300.0):
    sites = full_map_graph.full_sites(source, positions)
    own = count / (count + PRIOR)
    means = joined([shrunk(t, s, PRIOR) for t, s in zip(target, source, strict=True)], "mean")
    scales = np.linspace(1, 2, D)

    def function(covariances, means, scales, own, behind):
        A, b = full_map_graph.full_maps(sites, covariances, means, scales, own, behind)
        return [*A, *b]

    inputs = joined(target, "covariance"), means, scales, np.array(own), np.array(count + PRIOR)
    found = evaluate(function, *inputs)
    return found[:3], found[3:]


@pytest.mark.parametrize("spread", [0.05, 1.0, 20.0])
def test_maps_are_those_of_core(spread):
    source, target = network(0), network(1, spread=spread)
    pairs = [(s, t) for s, t in zip(source, target, strict=True) if s.covariance is not None]
    for A, b, (s, t) in zip(*maps(source, target), pairs, strict=True):
        eps = full_map_graph.FULL_MAP_EPS * s.covariance.diagonal().mean()
        expected = to_source_full(shrunk(t, s, PRIOR), s, eps)
        np.testing.assert_allclose(A, expected[0], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(b, expected[1], rtol=1e-5, atol=1e-6)


def test_few_values_give_a_diagonal_map():
    source, target = network(0), network(1)
    # 116 values of two channels are enough, of three they are not.
    (first, second, third), _ = maps(source, target, (None, None, 64, None), count=100.0)
    np.testing.assert_allclose(first, np.diag(np.linspace(1, 2, D)[:3]))
    assert second[0, 1] != 0
    assert third[0, 1] != 0


def test_covariances_merge():
    past, batch = network(0, 90.0), network(1, 30.0)
    sites = full_map_graph.full_sites(past, (64,) * 4)
    step = joined(batch, "mean") - joined(past, "mean")
    found = evaluate(
        lambda *parts: full_map_graph.merged_covariances(sites, *parts),
        joined(past, "covariance"),
        joined(batch, "covariance"),
        step,
        np.array(0.25),
    )
    expected = joined([a + b for a, b in zip(past, batch, strict=True)], "covariance")
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_singular_matrix_has_no_inverse_root():
    singular = np.stack([np.diag([1.0, 2.0, 0.0]), np.diag([1.0, 4.0, 16.0])])
    roots, usable = evaluate(lambda m: full_map_graph.inverse_roots(m, 3), singular)
    assert usable.ravel().tolist() == [False, True]
    np.testing.assert_allclose(roots[1], np.diag([1, 0.5, 0.25]), atol=1e-9)


def test_shifts_of_full_sites_are_replaced():
    sites = full_map_graph.full_sites(network(0), (64,) * 4)
    own = [np.full(site.width, 9.0 + i) for i, site in enumerate(sites)]
    found = evaluate(
        lambda shift, *own: full_map_graph.with_shifts(shift, sites, own),
        np.arange(D, dtype=np.float32),
        *own,
    )
    assert found.tolist() == [9, 9, 9, 3, 4, 5, 6, 7, 10, 10, 10, 11, 11]
