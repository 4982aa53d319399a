"""Compiled mixture transport against the stream in Python, on the torch network it came from."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from caster.adapt.layer_passes import LayerSettings
from caster.adapt.layer_transport import LayerTransport
from caster.export.layer_graph import REASONS, Source, compile_layers
from caster.models.heads import Columns
from caster.models.onnx.graph import find_head
from caster.models.onnx.sites import find_onnx_sites
from caster.models.onnx.twin import twin_model
from caster.state import file as states
from tests.support import mixture_problem as problem
from tests.support.compiled_stream import CompiledStream, at_outputs, exported

C = problem.N_CLASSES


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def fitted(files):
    """The moments of a state as its file has them."""
    problem.adapter().save(files / "model.caster")
    return states.load(files / "model.caster").layers


@pytest.fixture(scope="module")
def network(files):
    """A graph, and where its classifier is."""
    graph = exported(problem.model().module.eval(), (3, 8, 8), files / "model.onnx")
    return graph, find_head(graph, None)


@pytest.fixture(scope="module")
def compiled(network, fitted):
    graph, head = network
    layers = at_outputs(problem.model().module, fitted, graph, head)
    twin = twin_model(graph, head, find_onnx_sites(graph, head))

    @cache
    def make(**changed):
        settings = LayerSettings(maps="diagonal", **changed)
        source = Source.of(list(layers.values()))
        return compile_layers(twin, source, range(C), settings).SerializeToString()

    return make


def in_python(layers, **changed):
    settings = LayerSettings(maps="diagonal", **changed)
    return LayerTransport(problem.model(), layers, Columns(None), settings=settings)


def in_batches(images, size):
    return [images[i : i + size] for i in range(0, len(images), size)]


def stream_of(kind, n):
    labels = problem.shuffled(n, seed=5)
    if kind == "sorted":
        labels = np.sort(labels)
    if kind == "turning":
        labels[n // 2 :] = np.sort(labels[n // 2 :])
    if kind == "tailed":
        labels = problem.shuffled(n, seed=7, weights=[30, 1, 1, 1, 1, 1])
    if kind == "changing":
        parts = (labels[: n // 2], 0.3), (labels[n // 2 :], 1.2)
        return np.concatenate([problem.make_images(part, 9, shift) for part, shift in parts])
    return problem.make_images(labels, seed=9, shift=0.0 if kind == "clean" else 0.6)


def same_streams(batches, ours, theirs):
    """Answers agree batch by batch; return the reasons."""
    reasons = []
    for batch in batches:
        found, expected = ours(batch), theirs(batch)
        verdict = expected.verdict
        assert (found.accepted, found.reason) == (verdict.accepted, verdict.reason)
        np.testing.assert_allclose(found.ratio, verdict.ratio, rtol=1e-3)
        p = torch.softmax(torch.as_tensor(expected.scores).double(), dim=1).numpy()
        np.testing.assert_allclose(found.probabilities, p, atol=1e-4)
        np.testing.assert_array_equal(found.labels, found.probabilities.argmax(1))
        reasons.append((verdict.reason, verdict.accepted))
    return reasons


KINDS = ("shuffled", "sorted", "turning", "tailed", "changing", "clean")
STREAMS = [
    *((kind, size, n) for kind in KINDS for size, n in ((8, 48), (64, 20))),
    *((kind, 1, 280) for kind in ("shuffled", "sorted")),
]


@pytest.mark.parametrize(("kind", "size", "batches"), STREAMS)
def test_streams_are_those_of_python(compiled, fitted, kind, size, batches):
    theirs = in_python(fitted)
    reasons = same_streams(
        in_batches(stream_of(kind, size * batches), size), CompiledStream(compiled()), theirs
    )
    assert len(reasons) == batches


@pytest.mark.parametrize("kind", ["shuffled", "turning", "changing", "clean"])
def test_comparisons_are_skipped_as_in_python(compiled, fitted, kind):
    changed = {"every": 8, "window": 64}
    theirs = in_python(fitted, **changed)
    reasons = same_streams(
        in_batches(stream_of(kind, 40 * 16), 16), CompiledStream(compiled(**changed)), theirs
    )
    assert {reason for reason, _ in reasons} >= {"rest"}


def test_a_verdict_of_rejection_rests_and_starts_again(compiled, fitted):
    """Nothing is ever accepted: the frozen copy answers alone, then both are compared."""
    changed = {"every": 4, "window": 32, "tau": 1e-6}
    theirs = in_python(fitted, **changed)
    reasons = same_streams(
        in_batches(stream_of("shuffled", 30 * 16), 16), CompiledStream(compiled(**changed)), theirs
    )
    assert {("ratio", False), ("rest", False)} == set(reasons)


def test_a_rejected_batch_is_the_frozen_answer_bit_for_bit(compiled, network):
    graph, _ = network
    frozen = onnx.ModelProto()
    frozen.CopyFrom(graph)
    (logits,) = frozen.graph.output
    frozen.graph.node.append(onnx.helper.make_node("Softmax", [logits.name], ["p"], axis=-1))
    frozen.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, ["n", C]))
    session = onnxruntime.InferenceSession(frozen.SerializeToString())
    stream = CompiledStream(compiled(tau=1e-6))
    for batch in in_batches(stream_of("shuffled", 48), 16):
        found = stream(batch)
        assert not found.accepted
        expected = session.run(["p"], {"images": batch})[0]
        np.testing.assert_array_equal(found.probabilities, expected)


def test_logits_that_are_not_finite_leave_no_trace(compiled):
    stream, broken = CompiledStream(compiled()), stream_of("shuffled", 16)
    other = CompiledStream(compiled())
    stream(broken), other(broken)
    broken = broken.copy()
    broken[3] = np.inf
    before = stream.state
    found = stream(broken)
    assert (found.accepted, found.reason, found.ratio) == (False, "numerical", np.inf)
    for name, value in stream.state.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_streams_start_from_the_initial_state_of_the_file(compiled):
    """Initializers are the inputs' own values, so that a first run needs images only."""
    model = onnx.load_model_from_string(compiled())
    initial = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    inputs = [value.name for value in model.graph.input]
    assert inputs == ["images", *initial]
    batch = stream_of("shuffled", 8)
    told, untold = CompiledStream(compiled()), CompiledStream(compiled())
    told.state = initial
    for _ in range(2):
        np.testing.assert_array_equal(told(batch).probabilities, untold(batch).probabilities)


def test_weights_are_once_in_the_file_inside_the_loop(compiled, network):
    """ONNX Runtime optimises a network only where its weights are in the same graph."""
    graph, _ = network
    model = onnx.load_model_from_string(compiled())
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    weights = [onnx.numpy_helper.to_array(t).tobytes() for t in graph.graph.initializer]
    weights = [weight for weight in weights if len(weight) > 256]
    assert weights
    inside = [t.raw_data for t in loop.attribute[0].g.initializer]
    content = model.SerializeToString()
    for weight in weights:
        assert inside.count(weight) == 1
        assert content.count(weight) == 1


def test_only_standard_operators_are_used(compiled):
    model = onnx.load_model_from_string(compiled())
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 18)]
    onnx.checker.check_model(model)


def test_reasons_have_fixed_numbers():
    assert REASONS[:2] == ("accepted", "ratio")
    assert {REASONS.index(r): r for r in ("numerical", "implausible", "rest")} == {
        6: "numerical",
        7: "implausible",
        10: "rest",
    }
