"""Channel moments in a graph, against `core` on NumPy arrays."""

from __future__ import annotations

import numpy as np

from caster.core import channels
from caster.core.channels import ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from caster.export import moment_graph
from tests.support.graphs import evaluate

WIDTHS = (3, 5, 2)
D = sum(WIDTHS)


def moments(seed, count=9.0):
    rng = np.random.default_rng(seed)
    return ChannelMoments(
        count, rng.normal(size=D).astype("f4"), rng.gamma(2.0, size=D).astype("f4")
    )


def rows(found):
    return np.stack([found.mean, found.variance])


def test_moments_merge():
    past, batch = moments(0, 30.0), moments(1, 10.0)
    found = evaluate(moment_graph.merged, rows(past), rows(batch), np.float32(0.25))
    np.testing.assert_allclose(found, rows(past + batch), rtol=1e-5)


def test_moments_without_a_past_are_the_batchs():
    batch = rows(moments(1))
    found = evaluate(moment_graph.merged, np.zeros_like(batch), batch, np.float32(1))
    np.testing.assert_array_equal(found, batch)


def test_moments_are_mapped_to_the_source():
    target, source, eps = moments(0, 12.0), moments(1), np.float32(0.1)
    found = channels.shrunk(target, source, prior=4.0)
    scale, shift = channels.to_source(found, source, eps)

    def function(target, reference, own):
        return moment_graph.to_source(moment_graph.blended(target, reference[:2], own), reference)

    reference = np.concatenate([rows(source), np.full((1, D), eps)])
    found = evaluate(function, rows(target), reference, np.float32(0.75))
    np.testing.assert_allclose(found, [scale, shift], rtol=1e-5)


def test_classes_mix_as_shrunk_and_centred():
    rng = np.random.default_rng(0)
    counts = np.array([40.0, 3.0, 9.0, 20.0])
    sites = []
    for width in WIDTHS:
        values = rng.normal(size=(72, width, 4)) * 3 + 5
        values[:, 0] = 2.0  # a dead channel
        labels = np.repeat(np.arange(4), counts.astype(int))
        found = ClassChannelMoments.of(values + labels[:, None, None], 1, labels, 4)
        sites.append(rounded(found))
    pi = rng.dirichlet(np.ones(4))
    table = moment_graph.ClassTable.of(sites, few=8.0)
    found = evaluate(table.mixture, pi)
    expected = [site.classes.shrunk(8.0).centred_on(site).mixture(pi) for site in sites]
    np.testing.assert_allclose(found, np.concatenate([rows(e) for e in expected], 1), rtol=1e-5)


def rounded(classes):
    """Moments whose classes are as a state file rounds them."""
    pooled = classes.pooled()
    unit = np.sqrt(pooled.variance)
    z = ((classes.means - pooled.mean) / unit).astype(np.float16).astype(float)
    s = (np.sqrt(classes.variances) / unit).astype(np.float16).astype(float)
    kept = ClassChannelMoments(classes.counts, pooled.mean + unit * z, (unit * s) ** 2)
    return ChannelMoments(pooled.count, pooled.mean, pooled.variance, classes=kept)


def test_change_is_the_mean_of_the_sites():
    recent, past = moments(0), moments(1)
    past.variance[4] = 0
    each = np.split(channels.divergence(recent, past), np.cumsum(WIDTHS)[:-1])
    found = evaluate(lambda a, b: moment_graph.change(a, b, WIDTHS), rows(recent), rows(past))
    np.testing.assert_allclose(found, np.mean([site.mean() for site in each]), rtol=1e-5)
