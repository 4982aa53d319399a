"""Compiled feature transport: the same answers as `Adapter`, from one ONNX file."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser
from scipy.stats import multivariate_normal

from caster import Adapter, Caster, CasterError, SourceMoments, wrap
from caster.adapt.fitting import bound_state
from caster.export import features as exported
from caster.export.features import (
    Source,
    class_scores,
    compile_features,
    inverse_root,
    transport,
)
from caster.export.graph_arrays import constant
from caster.models.onnx import OnnxModel
from caster.models.onnx.compiled import REASONS
from tests.support.graphs import compiled
from tests.support.sampling import sampled

PERMUTED = (2, 0, 5, 1, 4, 3)


class Problem:
    """A classifier of normally distributed inputs: its features are their linear map."""

    def __init__(self, path, n_classes, width, scale, head="own", opset=18, **constants) -> None:
        rng = np.random.default_rng(n_classes)
        self.means = scale * rng.standard_normal((n_classes, width)) / np.sqrt(2)
        mixing = np.eye(width) + 0.2 * rng.standard_normal((width, width)) / np.sqrt(width)
        means = self.means @ mixing
        weights = {"M": mixing, "W": means.T, "b": -0.5 * np.sum(means**2, axis=1)}
        graph = parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": {opset}]>
            g (float[N, {width}] images) => (float[N, {n_classes}] y)
            {{ m = MatMul(images, M)  features = Identity(m)  y = Gemm(features, W, b) }}"""
        )
        for name, value in weights.items():
            tensor = numpy_helper.from_array(value.astype(np.float32), name)
            graph.graph.initializer.append(tensor)
        onnx.save(graph, path / "model.onnx")
        self.model = wrap(path / "model.onnx")
        assert isinstance(self.model, OnnxModel)
        images, y = self.batch(max(600, 30 * n_classes), seed=1)
        outputs = self.model(images)
        columns = {"own": tuple(range(n_classes)), "none": None}.get(head, head)
        logits = None if columns is None else outputs.logits[:, list(columns)]
        y = y if columns is None else np.argsort(columns)[y]
        fitted = Caster(**constants).fit(outputs.features, y, logits)
        self.state = bound_state(fitted, self.model, columns)

    def batch(self, n, seed, spread=1.0):
        """Shuffled images and classes."""
        rng = np.random.default_rng(seed)
        y = rng.permutation(np.arange(n) % len(self.means))
        noise = spread * rng.standard_normal((n, self.means.shape[1]))
        return (self.means[y] + noise).astype(np.float32), y

    def compiled(self, **changes):
        """The compiled session, and the adapter it must agree with."""
        state = replace(self.state, settings=replace(self.state.settings, **changes))
        adapter = Adapter(
            self.model, state, mechanism="features", safeguards=state.settings.safeguards
        )
        model = compile_features(self.model.exposed(), state)
        onnx.checker.check_model(model, full_check=True)
        return session_of(model), adapter


def session_of(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Problems by name, each made once."""

    @cache
    def make(*args, **constants):
        return Problem(tmp_path_factory.mktemp("problem"), *args, **constants)

    return make


@pytest.fixture(scope="module")
def six(problem):
    """Six classes in five directions: full maps from ten samples on."""
    return problem(6, 8, 6.0)


@pytest.fixture(scope="module")
def six_compiled(six):
    return six.compiled()


def agrees(session, adapter, images, reason=None, tolerance=1e-6):
    """Compare a compiled answer with that of `Adapter`; return the latter."""
    expected = adapter(images)
    p, labels, accepted, ratio, code = session.run(None, {"images": images})
    verdict = expected.verdict
    assert REASONS[code] == verdict.reason
    assert reason in (None, verdict.reason)
    assert bool(accepted) is verdict.accepted
    np.testing.assert_allclose(ratio, verdict.ratio, rtol=1e-4)
    assert p.dtype == np.float32
    np.testing.assert_allclose(p, expected.probabilities, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(adapter.classes[labels], expected.labels)
    return expected


# --- the same answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 9, 10, 11, 64])
def test_batches_of_any_size(six_compiled, six, size):
    agrees(*six_compiled, 1.3 * six.batch(size, seed=size)[0] + 0.5)


def test_full_and_diagonal_maps_are_accepted(six_compiled, six):
    for size, diagonal in ((9, True), (60, False)):
        images, y = six.batch(size, seed=0, spread=0.5)
        out = agrees(*six_compiled, 1.2 * images + 0.3, "accepted")
        assert out.map.diagonal is diagonal
        assert np.mean(out.labels == y) > 0.9


def test_many_classes(problem):
    """Diagonal maps in some of 39 directions, and in all of them; then full maps."""
    hundred = problem(100, 40, 5.0, k_max=39, tau=3.0)
    compiled_hundred = hundred.compiled()
    reasons = set()
    for size in (8, 17, 33, 40, 41, 64, 78, 200):
        images, _ = hundred.batch(size, seed=size, spread=0.7)
        out = agrees(*compiled_hundred, 0.8 * images + 0.5, tolerance=1e-4)
        reasons.add((out.verdict.reason, out.map.diagonal))
    assert {("accepted", True), ("accepted", False)} <= reasons


def test_inverses_in_float32(six, monkeypatch):
    monkeypatch.setattr(exported, "WIDE_ENTRIES", 0)
    answered = six.compiled()
    agrees(*answered, 1.2 * six.batch(60, seed=0)[0] + 0.3, "accepted", tolerance=1e-4)
    agrees(*answered, six.batch(7, seed=0)[0], tolerance=1e-4)


@pytest.mark.parametrize("opset", sampled([13, 18, 21], 1))
def test_models_of_other_opsets(tmp_path, opset):
    answered = Problem(tmp_path, 3, 6, 6.0, opset=opset, min_samples=2)
    agrees(*answered.compiled(), answered.batch(40, seed=0)[0], "accepted")


@pytest.mark.parametrize("head", ["none", PERMUTED], ids=["other classes", "permuted"])
def test_heads(problem, head):
    other = problem(6, 8, 6.0, head)
    session, adapter = other.compiled(tau=0.02)
    for seed, reason in ((0, "ratio"), (1, "ratio")):
        agrees(session, adapter, other.batch(40, seed=seed, spread=1.4)[0], reason)
    agrees(session, adapter, other.batch(1, seed=0)[0], "batch_too_small")
    assert session.get_outputs()[0].name == "probabilities"


@given(
    size=st.integers(2, 80),
    scale=st.floats(-3, 3).map(np.exp),
    offset=st.floats(-20, 20),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_float64_answers(six, ungated, size, scale, offset, seed):
    """Any batch: against NumPy in float64, whose confident samples are the same."""
    session, adapter = ungated
    images = (scale * six.batch(size, seed=seed)[0] + offset).astype(np.float32)
    outputs = six.model(images)
    expected = adapter.clf.adapt(
        outputs.features.astype(np.float64), outputs.logits.astype(np.float64)
    )
    p, _, accepted, ratio, code = session.run(None, {"images": images})
    assert (REASONS[code], bool(accepted)) == (expected.verdict.reason, expected.verdict.accepted)
    np.testing.assert_allclose(ratio, expected.verdict.ratio, rtol=1e-5)
    np.testing.assert_allclose(p, expected.probabilities, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def ungated(six):
    return six.compiled(tau=50.0, safeguards=False, min_samples=1, min_classes=1)


# --- rejections ----------------------------------------------------------------------------------


def test_every_reason(six, six_compiled):
    mixed = six.batch(64, seed=0)[0]
    agrees(*six_compiled, mixed, "accepted")
    agrees(*six.compiled(tau=0.01), mixed, "ratio")
    agrees(*six.compiled(min_samples=65), mixed, "min_samples")
    images, y = six.batch(120, seed=0)
    agrees(*six.compiled(safeguards=False), images[y < 2], "min_classes")
    agrees(*six.compiled(confidence=1 - 1e-12), six.batch(2, seed=0)[0], "no_confident_class")
    agrees(*six_compiled, mixed[:1], "batch_too_small")
    agrees(*six_compiled, mixed * np.float32(1e25), "numerical")
    agrees(*six_compiled, images[np.argsort(y)], "class_order")
    agrees(*six_compiled, images[y == 0], "class_order")


def test_a_state_whose_source_check_fails(six):
    check = replace(six.state.source_check, loss=0.5)
    state = replace(six.state, source_check=check)
    model = compile_features(six.model.exposed(), state)
    adapter = Adapter(six.model, state, mechanism="features")
    images = six.batch(64, seed=0)[0]
    agrees(session_of(model), adapter, images, "source_check")
    ratio = adapter(images).verdict.ratio
    assert np.isfinite(ratio)
    allowed = compile_features(
        six.model.exposed(), state, replace(state.settings, safeguards=False)
    )
    assert session_of(allowed).run(["accepted"], {"images": images})[0]


def test_rejected_batches_get_the_frozen_answer_bit_for_bit(six):
    session, _ = six.compiled(tau=1e-6)
    images = six.batch(64, seed=0)[0]
    p, labels, accepted = session.run(None, {"images": images})[:3]
    frozen = six.model.exposed()
    logits = frozen.graph.output[1].name
    frozen.graph.node.append(onnx.helper.make_node("Softmax", [logits], ["p"], axis=-1))
    frozen.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, [None, 6]))
    _, scores, expected = session_of(frozen).run(None, {"images": images})
    assert not accepted
    np.testing.assert_array_equal(p, expected)
    np.testing.assert_array_equal(labels, scores.argmax(axis=1))
    np.testing.assert_array_equal(scores, six.model(images).logits)


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(six_compiled, six, size, value):
    session, adapter = six_compiled
    images = six.batch(size, seed=0)[0]
    images[-1, 0] = value
    with pytest.raises(CasterError):
        adapter(images)
    p, labels, accepted, ratio, code = session.run(None, {"images": images})
    assert (REASONS[code], bool(accepted), ratio) == ("numerical", False, np.inf)
    sound = adapter(images[:-1]) if size > 1 else None
    if sound is not None:  # other images keep their frozen answer
        frozen = sound.frozen.argmax(axis=1)
        np.testing.assert_array_equal(labels[:-1], frozen)
        assert np.all(np.isfinite(p[:-1]))


def test_logits_that_are_nan(six):
    features, logits = six.model(six.batch(64, seed=0)[0]).features, np.zeros((64, 6), np.float32)
    function = compiled(
        lambda f, z: list(transport(f, z, six.state, six.state.settings)),
        features,
        logits,
        also_open=(1,),
    )
    logits[:, :] = np.eye(6)[np.random.default_rng(0).permutation(64) % 6]
    assert REASONS[function(features, logits)[4]] == "accepted"
    logits[3, 2] = np.nan
    assert REASONS[function(features, logits)[4]] == "numerical"


# --- the file ------------------------------------------------------------------------------------


def test_the_file(six):
    model = compile_features(six.model.exposed(), six.state)
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 18)]
    assert [each.name for each in model.graph.input] == ["images"]
    names = ["probabilities", "labels", "accepted", "ratio", "reason"]
    assert [each.name for each in model.graph.output] == names
    weight = numpy_helper.to_array(six.model.exposed().graph.initializer[1])
    stored = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    assert sum(np.array_equal(weight, each) for each in stored) == 1


def test_exposed_outputs(six):
    images = six.batch(5, seed=0)[0]
    outputs = six.model(images)
    features, logits = session_of(six.model.exposed()).run(None, {"images": images})
    np.testing.assert_array_equal(features, outputs.features)
    np.testing.assert_array_equal(logits, outputs.logits)


def test_widths_that_the_graph_does_not_declare(tmp_path):
    """A shape computed in the graph: ONNX cannot infer what it makes."""
    open_widths = Problem(tmp_path, 3, 6, 6.0, min_samples=2)
    model = onnx.load(tmp_path / "model.onnx")
    (identity,) = (node for node in model.graph.node if node.op_type == "Identity")
    identity.op_type = "Reshape"
    identity.input.append("shape")
    shape = [onnx.helper.make_node("Shape", ["m"], ["s"])]
    shape.append(onnx.helper.make_node("NonZero", ["s"], ["at"]))  # data-dependent
    shape.append(onnx.helper.make_node("GatherND", ["s", "where"], ["shape"]))
    shape.insert(2, onnx.helper.make_node("Transpose", ["at"], ["where"]))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[0], *shape, *nodes[1:]])
    model.graph.output[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    onnx.save(model, tmp_path / "open.onnx")
    open_widths.model = wrap(tmp_path / "open.onnx")
    open_widths.state = replace(open_widths.state, model_sha256=open_widths.model.sha256)
    exposed = open_widths.model.exposed().graph.output[0].type.tensor_type
    assert not exposed.shape.dim[1].dim_value
    agrees(*open_widths.compiled(), open_widths.batch(40, seed=0)[0], "accepted")


def test_models_that_cannot_be_compiled(six, problem):
    model = six.model.exposed()
    with pytest.raises(CasterError, match="the model has 8 features, and the state 6"):
        compile_features(model, problem(3, 6, 6.0).state)
    with pytest.raises(CasterError, match="has 6 logits, and the state needs 8"):
        compile_features(model, replace(six.state, head=(0, 1, 2, 3, 4, 7)))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(CasterError, match="takes 1 image at a time"):
        compile_features(model, six.state)


# --- its parts -----------------------------------------------------------------------------------


def random_source(n_classes=5, k=19, seed=0):
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((n_classes, k, 2 * k)) / np.sqrt(k)
    covariances = (roots @ roots.transpose(0, 2, 1)).astype(np.float32)
    means = 3 * rng.standard_normal((n_classes, k)).astype(np.float32)
    counts = rng.integers(20, 60, size=n_classes)
    return SourceMoments(np.eye(k, dtype=np.float32), means, covariances, counts)


SCORES = product([True, False], [1, 8, 9, 16, 17, 19])


@pytest.mark.parametrize(("full", "k"), sampled(SCORES, 3))
def test_class_scores(full, k):
    """Log densities of SciPy's normal distribution, less their common constant."""
    moments = random_source()
    source = Source.of(moments)
    rng = np.random.default_rng(k)
    x = np.zeros((6, source.room))
    x[:, :k] = 3 * rng.standard_normal((6, k))
    root = rng.standard_normal((k, k))
    ridge = root @ root.T if full else np.diag(rng.uniform(0.1, 2, size=k))
    padded = exported.DECOUPLED * np.eye(source.room)
    padded[:k, :k] = ridge
    padded = padded if full else np.diag(padded)
    active = np.arange(source.room) < k
    depth = None if full else constant(k)
    scores = compiled(lambda x, r, a: class_scores(x, source, r, a, depth), x, padded, active)(
        x, padded, active
    )
    centred = source.means[:, :k]
    for c, prior in enumerate(source.moments.priors):
        covariance = source.moments.covariances[c, :k, :k] + ridge
        density = multivariate_normal(centred[c], covariance).logpdf(x[:, :k])
        expected = density + np.log(prior) + 0.5 * k * np.log(2 * np.pi)
        np.testing.assert_allclose(scores[:, c], expected, rtol=1e-10)


def test_a_covariance_that_is_not_positive_definite_gives_nan():
    moments = random_source(n_classes=2, k=3)
    moments.covariances[1] -= 100 * np.eye(3, dtype=np.float32)
    source = Source.of(moments)
    x, ridge, active = np.ones((4, 8)), np.full(8, exported.DECOUPLED), np.arange(8) < 3
    ridge[:3] = 0.0
    scores = compiled(lambda x, r, a: class_scores(x, source, r, a), x, ridge, active)
    assert np.isnan(scores(x, ridge, active)).tolist() == [[False, True]] * 4


def test_inverse_root():
    rng = np.random.default_rng(0)
    root = compiled(lambda C: inverse_root(C, 0.5), np.eye(7))
    for spread in (0.0, 1.0, 4.0):
        V = scipy.linalg.qr(rng.standard_normal((7, 7)))[0]
        C = (V * 10 ** np.linspace(0, spread, 7)) @ V.T
        expected = scipy.linalg.inv(scipy.linalg.sqrtm(C + 0.5 * np.eye(7)))
        np.testing.assert_allclose(root(C), expected, rtol=0, atol=1e-9)
    assert np.all(np.isnan(root(np.diag([1e12, *[0.0] * 6]))))


def test_margins_and_slacks_of_fewer_directions():
    moments = random_source()
    source = Source.of(moments)
    for k in range(1, moments.rank + 1):
        some = moments.restrict(k)
        np.testing.assert_allclose(source.margins[k - 1], some.margin, rtol=1e-5)
        np.testing.assert_allclose(source.slacks[k - 1], some.slack[0, 0], rtol=1e-6)
        metric = source.moments.restrict(k).metric
        np.testing.assert_allclose(source.whitener[:k, :k] @ metric, np.eye(k), atol=1e-9)
