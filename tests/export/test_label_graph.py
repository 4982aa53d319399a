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
LEANING = np.array([0.1, 0.1, 0.1, 0.1, 0.6])  # a preference of the network
CHAIN = stream_labels.STORED


def probabilities(n, order="shuffled", seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice(C, n, p=PRIOR)
    if order == "tailed":
        labels = np.where(rng.random(n) < 0.6, 4, labels)
    if order == "runs":
        labels = np.repeat(rng.permutation(C), -(-n // C))[:n]
    if order == "one class":
        labels = np.zeros(n, int)
    p = classifier(rng, labels, accuracy=0.9, n_classes=C, lowest=0.7)
    return class_prior.apply_prior(p, LEANING, PRIOR) if order == "leaning" else p


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


def in_chain(function, chain, p):
    """What a function of chain and samples gives in a graph."""
    return evaluate(
        lambda rows, *parts: function(chain_in_graph(PRIOR, parts), rows), p, *chain_parts(chain)
    )


def observed(chain, p):
    seen, mixture = chain.observe(p)
    return [*(getattr(seen, name) for name in CHAIN), mixture]


def advanced(chain, p):
    return [getattr(chain.advance(p), name) for name in CHAIN]


CHAINS = product(["shuffled", "runs", "one class"], [1, 13], [0, 40, 800])


@pytest.mark.parametrize(("order", "n", "past"), sampled(CHAINS, 4))
def test_the_chain_is_that_of_core(order, n, past):
    chain, p = followed(order, past), probabilities(n, order, seed=1)
    seen = chain.observe(p)
    mixture = seen.mixture if seen.is_evident else PRIOR
    for function, expected in (
        (observed, [*chain_parts(seen), mixture]),
        (advanced, chain_parts(chain.advance(p))),
    ):
        for ours, theirs in zip(in_chain(function, chain, p), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    found = in_chain(label_graph.ChainGraph.posterior, seen, p)
    np.testing.assert_allclose(found, seen.smooth(p)[0], atol=1e-12)


def test_streams_of_these_tests_come_in_both_orders():
    orders = {order: followed(order, 40).is_correlated for order in ("shuffled", "runs")}
    assert orders == {"shuffled": False, "runs": True}


@pytest.mark.parametrize("totals", [[900.0, 0, 0, 0, 0], [10.0, 40, 30, 0, 0]])
def test_frequencies_are_shrunk_and_bounded(totals):
    chain = label_chain.LabelChain.start(PRIOR)
    chain = label_chain.replace(chain, totals=np.array(totals), count=float(sum(totals)))
    found = evaluate(lambda *parts: chain_in_graph(PRIOR, parts).frequencies, *chain_parts(chain))
    np.testing.assert_allclose(found, chain.frequencies, atol=1e-15)
    assert found.max() <= label_chain.MAX_FREQUENCY


@pytest.mark.parametrize("order", ["shuffled", "tailed"])
@pytest.mark.parametrize("n", [1, 63, 64, 301])
def test_a_prior_is_believed_as_in_core(order, n):
    p = probabilities(n, order)
    found = evaluate(lambda rows: label_graph.select_prior(rows, constant(PRIOR)), p)
    prior, kind = found[0], label_graph.KINDS[found[1]]
    expected = class_prior.select_prior(p, PRIOR)
    np.testing.assert_allclose(prior, PRIOR if expected is None else expected, atol=1e-12)
    assert (kind == "doubted") == (expected is None)
    assert (kind == "source") == (expected is PRIOR)
    kinds = {64: "doubted", 301: "prior"} if order == "tailed" else {}
    assert kind == kinds.get(n, "source")


STREAMS = product(["shuffled", "runs", "tailed", "leaning"], [1, 48, 600])
EXPECTED = {"shuffled": "source", "runs": "runs", "tailed": "prior", "leaning": "doubted"}  # last


@pytest.mark.parametrize(("order", "size"), sampled(STREAMS, 3))
def test_labels_of_a_stream_are_those_of_core(order, size):
    """The state goes from batch to batch through the graph alone."""
    p = probabilities(max(2 * size, 300), order)

    def function(rows, *parts):
        seen, mixture = label_graph.LabelGraph.of(constant(PRIOR), parts).observe(rows)
        found = [mixture, seen.answers(rows), seen.correction]
        return [*found, *seen.advance(rows).parts()]

    labels, kinds = stream_labels.StreamLabels.start(PRIOR), []
    state = list(label_graph.initial_labels(PRIOR).values())
    run = compiled(function, p[:size], *state)
    for start in range(0, len(p), size):
        batch = p[start : start + size]
        labels = labels.observe(batch)
        mixture, answers, correction, *state = run(batch, *state)
        np.testing.assert_allclose(mixture, labels.mixture, atol=1e-9)
        expected, after = labels.answer(batch)
        kinds.append(label_graph.KINDS[state[-1]])
        assert kinds[-1] == labels.kind
        if expected is not None:
            np.testing.assert_allclose(answers, expected, atol=1e-9)
        np.testing.assert_allclose(correction, labels.correction, atol=1e-9)
        labels = after
    assert kinds[-1] == EXPECTED[order]


@pytest.mark.parametrize("accuracy", [0.4, 0.75])
def test_runs_of_many_classes_are_confirmed_as_in_core(accuracy):
    """In batches of 40: until there is about one sample per class, and after that."""
    n_classes, rng = 160, np.random.default_rng(1)
    prior, y = np.full(n_classes, 1 / n_classes), np.repeat(rng.permutation(n_classes), 8)[:160]
    said = np.where(rng.random(160) < accuracy, y, rng.integers(0, n_classes, 160))
    p = 0.6 * np.eye(n_classes)[said] + 0.4 / n_classes

    def function(rows, *parts):
        seen, mixture = label_graph.LabelGraph.of(constant(prior), parts).observe(rows)
        return [mixture, *seen.advance(rows).parts()]

    labels, kinds = stream_labels.StreamLabels.start(prior), []
    state = list(label_graph.initial_labels(prior).values())
    run = compiled(function, p[:40], *state)
    for start in range(0, len(p), 40):
        batch = p[start : start + 40]
        labels = labels.observe(batch)
        mixture, *state = run(batch, *state)
        kinds.append(label_graph.KINDS[state[-1]])
        assert kinds[-1] == labels.kind
        np.testing.assert_allclose(mixture, labels.mixture, atol=1e-9)
        labels = labels.advance(batch)
    assert kinds == (["doubted"] * 2 if accuracy < 0.5 else ["runs"] * 2) + ["runs"] * 2


@pytest.mark.parametrize("step", [0.01, 0.1])
def test_a_mixture_is_the_source_up_to_noise(step):
    mixture = PRIOR + step * np.array([1, -1, 0, 0, 0])
    found = evaluate(label_graph.is_reference, mixture, PRIOR)
    assert found == (stream_labels.as_reference(mixture, PRIOR) is None)


def test_mixtures_merge_like_moments():
    other = np.full(C, 1 / C)
    found = evaluate(label_graph.merged_mixture, PRIOR, np.array(100.0), other, np.array(8.0))
    np.testing.assert_allclose(found, stream_labels.merged_mixture(PRIOR, 100.0, other, 8))
