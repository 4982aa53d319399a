"""Compiled mixture transport against the stream in Python, on the same ONNX file."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import caster
from caster.adapt import layer_transport
from caster.adapt.layer_passes import LayerSettings
from caster.adapt.layer_transport import LayerTransport
from caster.export import compiler as compiling
from caster.export import label_graph, layer_graph
from caster.export.layer_graph import Source, initial_state
from caster.models.heads import Columns
from caster.models.onnx.compiled import REASONS
from caster.models.onnx.graph import all_graphs
from caster.state import file as states
from tests.support import mixture_problem as problem
from tests.support import sampling
from tests.support.answers import same_state
from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_export import exported
from tests.support.sampling import sampled

C = problem.N_CLASSES


def test_every_pass_has_a_successor_whatever_occurs():
    """The rows of a phase are together, and the last one holds if no event occurred."""
    rows = layer_graph.TRANSITIONS
    passes = [phase for phase in layer_graph.Phase if phase < layer_graph.Phase.RESTED]
    assert list(dict.fromkeys(phase for phase, *_ in rows)) == passes
    last = {phase: (event, at) for at, (phase, event, _) in enumerate(rows)}
    assert {event for event, _ in last.values()} == {"otherwise"}
    assert [at for _, at in last.values()] == sorted(at for _, at in last.values())
    assert len({(phase, event) for phase, event, _ in rows}) == len(rows)
    reached = {following for *_, following in rows}
    assert reached | {layer_graph.Phase.REST, layer_graph.Phase.CHECK} == {*layer_graph.Phase}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """An ONNX model and its state, and compiled files by their settings."""
    folder = tmp_path_factory.mktemp("compiled")
    graph = exported(problem.model().module, torch.zeros(2, 3, 8, 8), opset_version=18)
    onnx.save(graph, folder / "model.onnx")
    model = caster.wrap(str(folder / "model.onnx"))
    caster.fit(model, problem.source_batches()).save(folder / "model.caster")
    state = states.load(folder / "model.caster")

    def path(**changed):
        return compiled(LayerSettings(**changed))

    @cache
    def compiled(settings):
        found = folder / f"{len(list(folder.iterdir()))}.onnx"
        graph, _ = compiling.compiled(model, state, settings)
        found.write_bytes(graph.SerializeToString())
        return found

    @cache
    def transport(**changed):
        given = Columns(state.head), state.input_range, LayerSettings(**changed)
        return LayerTransport(model, state.layers, *given)

    return SimpleNamespace(model=model, state=state, path=path, transport=transport)


def in_python(fitted, **changed):
    return fitted.transport(**changed).new_stream()


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
    """Answers, schedules and memories agree batch by batch; return the reasons."""
    reasons = []
    for batch in batches:
        found, expected = ours(batch), theirs(batch)
        verdict = expected.verdict
        assert (found.accepted, found.reason) == (verdict.accepted, verdict.reason)
        np.testing.assert_allclose(found.ratio, verdict.ratio, rtol=1e-3)
        p = torch.softmax(torch.as_tensor(expected.scores).double(), dim=1).numpy()
        np.testing.assert_allclose(found.probabilities, p, atol=1e-4)
        np.testing.assert_array_equal(found.labels, found.probabilities.argmax(1))
        np.testing.assert_array_equal(ours.state["schedule"], theirs._schedule.state())
        assert label_graph.KINDS[ours.state["labels.kind"]] == theirs._classes.labels.kind
        assert float(ours.state["past.count"]) == pytest.approx(theirs._alignment.target.samples)
        reasons.append((verdict.reason, verdict.accepted))
    return reasons


KINDS = ("shuffled", "sorted", "turning", "tailed", "changing", "clean")
STREAMS = [
    *((kind, 1, 280 if sampling.whole else 96) for kind in ("shuffled", "sorted")),
    *((kind, size, n) for kind in KINDS for size, n in ((8, 48), (64, 20))),
]


@pytest.mark.parametrize(("kind", "size", "batches"), sampled(STREAMS, 5))
def test_streams_are_those_of_python(fitted, kind, size, batches):
    theirs = in_python(fitted)
    reasons = same_streams(
        in_batches(stream_of(kind, size * batches), size), CompiledStream(fitted.path()), theirs
    )
    assert len(reasons) == batches


@pytest.mark.parametrize(
    ("before", "after", "sort"),
    [(-0.6, 1.2, False), (0.3, -1.2, False), (0.3, 0.5, True), (0.3, 0.3, True)],
)
def test_new_runs_are_confirmed_as_in_python(fitted, tmp_path, monkeypatch, before, after, sort):
    """By the batch alone: maps of another shift suggest those of the first two streams."""
    if not sort:
        monkeypatch.setattr(layer_transport, "CHANGED", 1e9)
    batches, _ = problem.changing(before, after, sort)
    ours, theirs = CompiledStream(cut(fitted, tmp_path)), in_python(fitted)
    same_streams(batches, ours, theirs)
    assert (theirs._classes.labels.kind == "runs") == sort
    assert (theirs._alignment.target.samples == 12 * 64) == sort


def test_small_batches_are_not_asked_as_in_python(fitted):
    """Each batch alone would deny the runs that this tail resembles, and the memory restart."""
    labels = problem.shuffled(128, 40), problem.shuffled(96, 39, weights=[1, 1, 7, 1, 1, 1])
    images = problem.make_images(np.concatenate(labels), 39)
    ours, theirs = CompiledStream(fitted.path()), in_python(fitted)
    same_streams(in_batches(images, 24), ours, theirs)
    assert theirs._classes.labels.kind == "runs"
    assert theirs._alignment.target.samples == 224


@pytest.mark.parametrize(("before", "after", "stays"), [(0.3, 0.5, True), (0.0, 1.2, False)])
def test_doubt_after_a_change_of_shift_is_confirmed_as_in_python(
    fitted, tmp_path, monkeypatch, before, after, stays
):
    """Under the first shift the batch alone is in doubt too; under the second, the past is why."""
    monkeypatch.setattr(layer_transport, "CHANGED", 1e9)
    labels = problem.shuffled(512, 5), problem.shuffled(256, 7, weights=[30, 4, 2, 1, 1, 1])
    parts = zip(labels, (9, 10), (before, after), strict=True)
    images = np.concatenate([problem.make_images(*part) for part in parts])
    ours, theirs = CompiledStream(cut(fitted, tmp_path)), in_python(fitted)
    same_streams(in_batches(images, 64), ours, theirs)
    assert theirs._classes.labels.kind == "doubted"
    assert (theirs._alignment.target.samples == 12 * 64) == stays


def test_runs_that_end_a_doubt_are_confirmed_as_in_python(fitted):
    """The batch alone is asked, because the shift changes too, and the memory starts afresh."""
    tail = problem.shuffled(128, seed=5, weights=[30, 4, 2, 1, 1, 1])
    parts = (tail, 0.6), (np.sort(problem.shuffled(256, seed=5)), 0.8)
    images = np.concatenate([problem.make_images(part, 9, shift) for part, shift in parts])
    ours, theirs, kinds = CompiledStream(fitted.path()), in_python(fitted), []
    for batch in in_batches(images, 64):
        same_streams([batch], ours, theirs)
        kinds.append(theirs._classes.labels.kind)
    assert kinds == ["doubted"] * 2 + ["runs"] * 4
    assert theirs._alignment.target.samples == 4 * 64


@pytest.mark.parametrize("maps", ["diagonal", "full"])
def test_maps_of_a_settled_stream_are_those_of_python(fitted, maps):
    theirs, ours = in_python(fitted, maps=maps), CompiledStream(fitted.path(maps=maps))
    same_streams(in_batches(stream_of("shuffled", 15 * 32), 32), ours, theirs)
    assert ("past.covariances" in ours.state) == (maps == "full") == (theirs.full_maps > 0)


def test_doubt_begins_and_ends_as_in_python(fitted):
    """Then the memory starts afresh, with one batch of known classes."""
    tail = problem.shuffled(640, seed=5, weights=[30, 4, 2, 1, 1, 1])
    labels = np.concatenate([tail, np.sort(problem.shuffled(640, seed=5))])
    ours, theirs, found = CompiledStream(fitted.path()), in_python(fitted), []
    for batch in in_batches(problem.make_images(labels, seed=9, shift=0.6), 64):
        same_streams([batch], ours, theirs)
        found.append(
            (label_graph.KINDS[ours.state["labels.kind"]], float(ours.state["past.count"]))
        )
        assert found[-1] == (theirs._classes.labels.kind, theirs._alignment.target.samples)
    assert found[:4] == [("doubted", 64), ("doubted", 128), ("doubted", 192), ("prior", 64)]
    assert found[-1][0] == "runs"


# --- rests ---------------------------------------------------------------------------------------

RESTS = {"memory": 1024, "window": 128}  # so that a stream rests after some 1,100 samples


def resting_stream(kind, n=1600, at=1400):
    """Shuffled and of one shift until a sample by which a stream rests."""
    tail = [30, 4, 2, 1, 1, 1] if kind == "tailed" else None
    labels = problem.shuffled(n, seed=5, weights=tail)
    if kind == "sorted":
        labels[at:] = np.sort(labels[at:])
    images = problem.make_images(labels, seed=9, shift=0.6)
    if kind == "changing":
        images[at:] = problem.make_images(labels[at:], seed=9, shift=1.2)
    if kind == "odd":
        images[at::7] = 60.0  # no images; a rest does not single them out, what follows does
    if kind == "broken":
        images[at] = np.nan
    return images


def cut(fitted, folder, **changed):
    """A file whose passes take five images at a time, the last piece fewer."""
    path = folder / "pieces.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_graph, "AT_ONCE", 5 * 3 * 8 * 8)
        graph, _ = compiling.compiled(fitted.model, fitted.state, LayerSettings(**changed))
    path.write_bytes(graph.SerializeToString())
    return path


@pytest.fixture(scope="module")
def in_pieces(fitted, tmp_path_factory):
    return cut(fitted, tmp_path_factory.mktemp("pieces"), **RESTS)


@pytest.mark.parametrize("kind", ["shuffled", "tailed", "changing", "sorted", "odd"])
def test_rests_are_those_of_python(fitted, in_pieces, kind):
    """They begin and end with the same batches, in pieces of them, with the same answers."""
    batches = in_batches(resting_stream(kind), 64)
    theirs = in_python(fitted, **RESTS)
    reasons = same_streams(batches, CompiledStream(in_pieces), theirs)
    rests = [reason == "rest" for reason, _ in reasons]
    assert sum(rests[:22]) > 1
    assert all(rests[22:]) == (kind in ("shuffled", "tailed"))


def test_diagonal_maps_of_a_rest_are_those_of_python(fitted, tmp_path):
    changed = {**RESTS, "maps": "diagonal"}
    ours = CompiledStream(cut(fitted, tmp_path, **changed))
    batches = in_batches(resting_stream("shuffled"), 64)
    reasons = same_streams(batches, ours, in_python(fitted, **changed))
    assert reasons[-1] == ("rest", True)


@pytest.mark.parametrize("size", sampled([24, 80, 300], 1))
def test_rests_in_other_batches_are_those_of_python(fitted, size):
    """Samples wait until they fill a block."""
    at = max(1400, 10 * size)
    batches = in_batches(resting_stream("changing", at + 2 * max(200, size), at), size)
    theirs, ours = in_python(fitted, **RESTS), CompiledStream(fitted.path(**RESTS))
    reasons = [reason for reason, _ in same_streams(batches, ours, theirs)]
    assert "rest" in reasons[: at // size]
    assert "rest" not in reasons[-1]


def test_a_rest_ends_when_a_comparison_is_due(fitted):
    changed = {**RESTS, "every": 3}
    batches = in_batches(resting_stream("shuffled", 2048), 64)
    theirs, ours = in_python(fitted, **changed), CompiledStream(fitted.path(**changed))
    reasons = [reason for reason, _ in same_streams(batches, ours, theirs)]
    assert "-".join(reasons[-9:]).count("rest-accepted-accepted-rest") >= 1


def test_a_stream_that_compares_every_batch_never_rests(fitted):
    changed = {**RESTS, "every": 1}
    batches = in_batches(resting_stream("shuffled", 1280), 64)
    stream = CompiledStream(fitted.path(**changed))
    assert {stream(batch).reason for batch in batches} == {"accepted"}


def test_outputs_that_are_not_finite_end_a_rest(fitted, in_pieces):
    """The batch is then answered as any other; only its own samples are singled out."""
    stream = CompiledStream(in_pieces)
    *batches, last = in_batches(resting_stream("broken", 1408), 64)
    assert [stream(batch).reason for batch in batches][-1] == "rest"
    found = stream(last)
    assert (found.reason, found.accepted) == ("accepted", True)
    assert np.isfinite(found.probabilities).all()
    np.testing.assert_allclose(found.probabilities[1400 % 64], 1 / C)


@pytest.mark.parametrize("kind", sampled(["shuffled", "changing"], 1))
def test_rejected_streams_are_those_of_python(fitted, kind):
    """A past of rejected answers is not trusted, and never rests."""
    changed = {"window": 32, "tau": 1e-6}
    theirs, ours = in_python(fitted, **changed), CompiledStream(fitted.path(**changed))
    found = same_streams(in_batches(stream_of(kind, 22 * 16), 16), ours, theirs)
    assert set(found) == {("ratio", False)}


def test_a_rejected_batch_is_the_frozen_answer_bit_for_bit(fitted):
    frozen, _ = fitted.model.graph()
    (logits,) = frozen.graph.output
    frozen.graph.node.append(onnx.helper.make_node("Softmax", [logits.name], ["p"], axis=-1))
    frozen.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, ["n", C]))
    session = onnxruntime.InferenceSession(frozen.SerializeToString())
    stream = CompiledStream(fitted.path(every=1, window=32, tau=1e-6))
    for batch in in_batches(stream_of("shuffled", 48), 16):
        found = stream(batch)
        assert not found.accepted
        expected = session.run(["p"], {"x": batch})[0]
        np.testing.assert_array_equal(found.probabilities, expected)


@pytest.mark.parametrize("batches", [1, 17])
def test_logits_that_are_not_finite_leave_no_trace(fitted, batches):
    """Neither in a new stream nor in a settled one."""
    stream, batch = CompiledStream(fitted.path()), stream_of("shuffled", 16)
    for _ in range(batches):
        stream(batch)
    stream.state["past"] = np.full_like(stream.state["past"], np.nan)
    before = stream.state
    found = stream(batch)
    assert (found.accepted, found.reason, found.ratio) == (False, "numerical", np.inf)
    assert np.isfinite(found.probabilities).all()
    same_state(stream.state, one_batch_later(before))


def one_batch_later(state):
    """A state that did not learn from a batch."""
    return {**state, "batches": np.asarray(state["batches"] + 1)}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9, 60.0])
def test_samples_that_are_no_images_are_answered_as_frozen(fitted, value):
    """The others are answered, and remembered by a settled stream, as if they had come alone."""
    images = stream_of("shuffled", 64)
    mixed = np.insert(images, [0, 3, 9, 40, 64], value, axis=0).astype(np.float32)
    odd = np.isin(np.arange(69), [0, 4, 11, 43, 68])
    np.testing.assert_array_equal(mixed[~odd], images)
    theirs, alone = in_python(fitted), CompiledStream(fitted.path())
    stream = CompiledStream(fitted.path())
    for _ in range(6):
        found, expected = stream(mixed), alone(images)
        np.testing.assert_array_equal(found.probabilities[~odd], expected.probabilities)
        assert (found.accepted, found.reason, found.ratio) == (
            expected.accepted,
            expected.reason,
            expected.ratio,
        )
        same_state(stream.state, alone.state)
        if np.isfinite(value):
            answer = theirs(mixed)
            assert answer.implausible == 5
            p = torch.softmax(torch.as_tensor(answer.scores).double(), dim=1).numpy()
            np.testing.assert_allclose(found.probabilities, p, atol=1e-4)
        else:
            np.testing.assert_allclose(found.probabilities[odd], 1 / C)


def test_a_batch_without_any_image_is_rejected(fitted):
    stream, images = CompiledStream(fitted.path()), stream_of("shuffled", 16)
    stream(images)
    before = stream.state
    found = stream(images + 1e6)
    assert (found.accepted, found.reason, found.ratio) == (False, "implausible", np.inf)
    theirs = in_python(fitted)
    expected = torch.softmax(torch.as_tensor(theirs(images + 1e6).scores).double(), dim=1)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-4)
    same_state(stream.state, one_batch_later(before))


def test_zeros_stand_for_the_initial_state(fitted):
    """After the first batch, zeros are zeros."""
    settings, sites = LayerSettings(), fitted.model.sites
    source = Source.of(
        list(fitted.state.layers.values()),
        [site.positions for site in sites],
        fitted.state.moments.U.shape[0],
    )
    initial = initial_state(source, settings.window)
    told, started = CompiledStream(fitted.path()), CompiledStream(fitted.path())
    assert {name: (each.dtype, each.shape) for name, each in initial.items()} == {
        name: (each.dtype, each.shape) for name, each in started.state.items()
    }
    assert not any(each.any() for each in started.state.values())
    told.state = one_batch_later(initial)
    for batch in in_batches(stream_of("turning", 64), 16):
        np.testing.assert_array_equal(told(batch).probabilities, started(batch).probabilities)
        same_state(told.state, one_batch_later(started.state))


def test_inputs_are_required_and_their_open_sizes_named(fitted):
    """onnxruntime-web takes no value for an input with an initializer."""
    model = onnx.load(fitted.path())
    inputs = {value.name for value in model.graph.input}
    assert inputs.isdisjoint(each.name for each in model.graph.initializer)
    assert {open_sizes(value) for value in (*model.graph.input, *model.graph.output)} == {
        (),
        ("n",),
    }


def open_sizes(value):
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_param for size in sizes if not size.HasField("dim_value"))


@pytest.mark.parametrize("maps", ["diagonal", "full"])
def test_onnx_runtime_loads_a_file_without_warnings(fitted, maps, capfd):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2
    onnxruntime.InferenceSession(fitted.path(maps=maps), options)
    assert capfd.readouterr().err == ""


def test_weights_are_once_in_the_file_inside_the_loop(fitted):
    """ONNX Runtime optimises a network only where its weights are in the same graph."""
    graph, _ = fitted.model.graph()
    model = onnx.load(fitted.path())
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    weights = [onnx.numpy_helper.to_array(t).tobytes() for t in graph.graph.initializer]
    weights = [weight for weight in weights if len(weight) > 256]
    assert weights
    inside = [t.raw_data for t in loop.attribute[0].g.initializer]
    content = model.SerializeToString()
    for weight in weights:
        assert inside.count(weight) == 1
        assert content.count(weight) == 1


def test_moments_of_classes_are_once_in_the_file(fitted):
    """They are all of it that is float16, and nearly all of a state with many classes."""
    graphs = all_graphs(onnx.load(fitted.path(maps="full")).graph)
    tensors = [
        tensor
        for graph in graphs
        for tensor in (*graph.initializer, *(a.t for node in graph.node for a in node.attribute))
        if tensor.data_type == onnx.TensorProto.FLOAT16
    ]
    channels = sum(len(m.mean) for m in fitted.state.layers.values() if m.classes is not None)
    assert sum(np.prod(tensor.dims) for tensor in tensors) == 2 * C * channels


def test_only_standard_operators_are_used(fitted):
    model = onnx.load(fitted.path())
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 18)]
    onnx.checker.check_model(model)


def test_reasons_have_fixed_numbers():
    assert REASONS[:2] == ("accepted", "ratio")
    assert {REASONS.index(r): r for r in ("numerical", "implausible", "rest")} == {
        6: "numerical",
        7: "implausible",
        10: "rest",
    }
