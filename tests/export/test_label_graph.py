"""The classes of a stream in a graph, against `core` in NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from caster.core import class_prior, label_chain, stream_labels
from caster.export import label_graph
from caster.export.graph_arrays import constant
from tests.support.graphs import compiled, evaluate
from tests.support.label_streams import classifier
from tests.support.sampling import sampled

C = 5
PRIOR = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
CHAIN = ("last", "evidence", "totals", "count")
LABELS = ("recent", "count", "prior", "believed")


def probabilities(n, order="shuffled", seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(C, n, p=PRIOR)
    if order == "tailed":
        labels = np.where(rng.random(n) < 0.85, 1, labels)
    if order == "runs":
        labels = np.repeat(rng.permutation(C), -(-n // C))[:n]
    if order == "one class":
        labels = np.zeros(n, int)
    return classifier(rng, labels, accuracy=0.9, n_classes=C)


def chain_in_graph(prior, parts):
    return label_graph.ChainGraph(constant(prior), *parts)


def chain_parts(chain):
    return [np.asarray(getattr(chain, name)) for name in CHAIN]


def followed(order, n, size=8):
    """The chain after a stream."""
    chain = label_chain.LabelChain.start(PRIOR)
    for start in range(0, n, size):
        p = probabilities(n, order)[start : start + size]
        chain = chain.observe(p).advance(p)
    return chain


def in_chain(method, chain, p, *, gives_chain=False):
    def function(rows, *parts):
        found = getattr(chain_in_graph(PRIOR, parts), method)(rows)
        return [getattr(found, name) for name in CHAIN] if gives_chain else found

    return evaluate(function, p, *chain_parts(chain))


CHAINS = product(["shuffled", "runs", "one class"], [1, 13], [0, 40, 800])


@pytest.mark.parametrize(("order", "n", "past"), sampled(CHAINS, 4))
def test_the_chain_is_that_of_core(order, n, past):
    chain, p = followed(order, past), probabilities(n, order, seed=1)
    seen = chain.observe(p)
    for method in ("observe", "advance"):
        found = in_chain(method, chain, p, gives_chain=True)
        for ours, theirs in zip(found, chain_parts(getattr(chain, method)(p)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(in_chain("posterior", seen, p), seen.posterior(p), atol=1e-12)
    np.testing.assert_allclose(in_chain("mixture", seen, p), seen.mixture(p), atol=1e-12)


def test_streams_of_these_tests_come_in_both_orders():
    orders = {order: followed(order, 40).is_correlated for order in ("shuffled", "runs")}
    assert orders == {"shuffled": False, "runs": True}


@pytest.mark.parametrize("totals", [[900.0, 0, 0, 0, 0], [10.0, 40, 30, 0, 0]])
def test_frequencies_are_shrunk_and_bounded(totals):
    chain = label_chain.LabelChain.start(PRIOR)
    chain = label_chain.replace(chain, totals=np.array(totals), count=float(sum(totals)))
    found = evaluate(lambda *parts: chain_in_graph(PRIOR, parts).frequencies, *chain_parts(chain))
    np.testing.assert_allclose(found, chain.frequencies, atol=1e-15)
    assert found.max() <= label_chain.MOST


@pytest.mark.parametrize("order", ["shuffled", "tailed"])
@pytest.mark.parametrize("n", [1, 63, 64, 301])
def test_a_prior_is_believed_as_in_core(order, n):
    p = probabilities(n, order)
    prior, believed = evaluate(lambda rows: label_graph.believed_prior(rows, constant(PRIOR)), p)
    expected = class_prior.believed_prior(p, PRIOR)
    np.testing.assert_allclose(prior, expected, atol=1e-12)
    assert believed == (expected is not PRIOR)
    assert believed == (order == "tailed" and n >= 64)


STREAMS = product(["shuffled", "runs", "tailed"], [1, 48, 600])


@pytest.mark.parametrize(("order", "size"), sampled(STREAMS, 3))
def test_labels_of_a_stream_are_those_of_core(order, size):
    """The state goes from batch to batch through the graph alone."""
    p = probabilities(max(4 * size, 120) if size < 600 else 1200, order)

    def function(rows, last, evidence, totals, count, recent, m, prior, believed):
        chain = chain_in_graph(PRIOR, (last, evidence, totals, count))
        seen = label_graph.LabelGraph(chain, recent, m, prior, believed).observe(rows)
        moved = seen.advance(rows)
        state = [getattr(moved.chain, name) for name in CHAIN]
        state += [moved.recent, moved.count, moved.prior, moved.believed]
        return [
            seen.mixture(rows),
            seen.answers(rows),
            seen.is_source,
            seen.correction,
            *state,
        ]

    labels = stream_labels.StreamLabels.start(PRIOR)
    state = list(label_graph.initial_labels(PRIOR).values())
    run = compiled(function, p[:size], *state)
    for start in range(0, len(p), size):
        batch = p[start : start + size]
        labels = labels.observe(batch)
        mixture, answers, is_source, correction, *state = run(batch, *state)
        np.testing.assert_allclose(mixture, labels.mixture(batch), atol=1e-9)
        expected = labels.answers(batch)
        assert is_source == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(answers, expected, atol=1e-9)
        if not labels.chain.is_correlated:
            np.testing.assert_allclose(correction, np.log(labels.prior / PRIOR), atol=1e-9)
        labels = labels.advance(batch)
    if order != "shuffled":
        assert not is_source


@pytest.mark.parametrize("step", [0.01, 0.1])
def test_a_mixture_is_the_source_up_to_noise(step):
    mixture = PRIOR + step * np.array([1, -1, 0, 0, 0])
    found = evaluate(label_graph.is_reference, mixture, PRIOR)
    assert found == (stream_labels.as_reference(mixture, PRIOR) is None)


def test_mixtures_merge_like_moments():
    other = np.full(C, 1 / C)
    found = evaluate(label_graph.merged_mixture, PRIOR, np.array(100.0), other, np.array(8.0))
    np.testing.assert_allclose(found, stream_labels.merged_mixture(PRIOR, 100.0, other, 8))
