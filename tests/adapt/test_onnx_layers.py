"""An ONNX file and the torch module it came from are aligned alike: same answers, same verdicts."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import numpy as np
import onnx
import pytest
import torch

import caster
from caster import CasterError, wrap
from caster.adapt.layer_passes import MIN_SAMPLES_FULL_MAP
from caster.models.onnx.layers import FirstSite
from caster.models.onnx.twin import first_site_model
from tests.support import mixture_problem, problem
from tests.support.mixture_problem import make_images, shuffled
from tests.support.onnx_export import exported
from tests.support.sampling import sampled

pytestmark = pytest.mark.slow  # torch exports networks

KINDS = [("batch", "dynamo"), ("batch", "folded"), ("batch", "unfolded"), ("layer", "folded")]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The path of a network of `mixture_problem` as an ONNX file."""
    folder = tmp_path_factory.mktemp("layers")

    @cache
    def made(kind, exporter):
        path = folder / f"{kind}-{exporter}.onnx"
        example = torch.zeros(2, 3, 8, 8)
        onnx.save(exported(mixture_problem.model(kind).module, example, exporter), path)
        return path

    return made


@pytest.fixture(scope="module")
def pair(file):
    """Adapters of the torch module and of the file, each fitted on its own."""

    @cache
    def made(kind, exporter):
        other = caster.fit(wrap(file(kind, exporter)), mixture_problem.source_batches())
        return mixture_problem.adapter(kind), other

    return made


STREAMS = {
    "shuffled": lambda y: y,
    "sorted": np.sort,
    "turning": lambda y: np.concatenate([y[:256], np.sort(y[256:])]),
}


def images_of(y, kind):
    """A shift that changes half way, if the kind says so."""
    if kind != "changed":
        return make_images(y, 8, shift=0.8)
    half = len(y) // 2
    return np.concatenate([make_images(y[:half], 8, 0.8), make_images(y[half:], 9, -0.6)])


CASES = [(*kind, stream) for kind in KINDS for stream in [*STREAMS, "changed"]]


@pytest.mark.parametrize(("kind", "exporter", "stream"), sampled(CASES, 4))
def test_streams_of_both_agree(pair, kind, exporter, stream):
    y = STREAMS.get(stream, lambda y: y)(shuffled(512, seed=7))
    x = images_of(y, stream)
    one, other = (adapter.new_stream() for adapter in pair(kind, exporter))
    reasons = set()
    for start in range(0, len(x), 32):
        expected, found = (each(x[start : start + 32]) for each in (one, other))
        scale = np.abs(expected.scores.numpy()).max()
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4 * scale)
        assert (found.verdict.accepted, found.verdict.reason) == (
            expected.verdict.accepted,
            expected.verdict.reason,
        )
        ratio = pytest.approx(expected.verdict.ratio, rel=1e-3, nan_ok=True)  # NaN: not compared
        assert found.verdict.ratio == ratio
        reasons.add(found.verdict.reason)
    assert "accepted" in reasons


@pytest.mark.parametrize("size", [1, 7])
def test_small_batches_agree(pair, size):
    x = make_images(shuffled(42 if size == 1 else 84, seed=3), 4, shift=0.8)
    one, other = (adapter.new_stream() for adapter in pair("batch", "folded"))
    for start in range(0, len(x), size):
        expected, found = (each(x[start : start + size]) for each in (one, other))
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
        assert found.verdict.accepted == expected.verdict.accepted


def test_a_transformer_agrees(tmp_path):
    """Its class token is not aligned, and its sites are those of torch."""
    module = problem.model("vit")
    onnx.save(exported(module.module, torch.zeros(2, 3, 8, 8)), tmp_path / "vit.onnx")
    batches = problem.source("vit").batches
    one, other = (caster.fit(m, batches) for m in (module, wrap(tmp_path / "vit.onnx")))
    assert [site.prefix_tokens for site in other.state.layers] == [
        site.prefix_tokens for site in one.state.layers
    ]
    x, _ = problem.make_images(320, seed=5, shift=0.5)
    first, second = one.new_stream(), other.new_stream()
    for batch in np.split(x, 5):
        expected, found = first(batch), second(batch)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
        assert found.verdict.accepted == expected.verdict.accepted


def test_full_maps_are_used_and_agree(pair):
    """A long shuffled stream: from 256 samples on, maps come from the past and are full."""
    one, other = pair("batch", "folded")
    assert one.full_maps == other.full_maps > 0
    x = make_images(shuffled(MIN_SAMPLES_FULL_MAP + 192, seed=11), 12, shift=0.8)
    first, second = one.new_stream(), other.new_stream()
    for batch in np.split(x, 7):
        expected, found = first(batch), second(batch)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    plain = caster.fit(other.model, mixture_problem.source_batches(n=200))
    assert plain.full_maps == 0  # too few samples of the source


def test_a_rejected_batch_is_the_frozen_model_s(file):
    model = wrap(file("batch", "folded"))
    batches = mixture_problem.source_batches()
    adapter = caster.Adapter(model, caster.fit(model, batches).state, tau=1e-9)
    x = make_images(shuffled(64, seed=2), 3, shift=0.8)
    out = adapter.new_stream()(x)
    assert not out.verdict.accepted
    assert np.array_equal(out.scores, model(x).logits)


def test_streams_are_independent_and_resume_bit_for_bit(pair, tmp_path):
    _, adapter = pair("batch", "folded")
    x = make_images(shuffled(384, seed=5), 6, shift=0.8)
    whole, broken = adapter.new_stream(), adapter.new_stream()
    expected = [whole(batch).scores for batch in np.split(x, 12)]
    for batch in np.split(x, 12)[:7]:
        broken(batch)
    broken.save(tmp_path / "stream")
    again = adapter.resume(tmp_path / "stream")
    adapter.new_stream()(-x[:64])  # disturbs no other stream
    for batch, scores in zip(np.split(x, 12)[7:], expected[7:], strict=True):
        assert np.array_equal(again(batch).scores, scores)


@pytest.mark.parametrize("name", ["past", "recent"])
def test_a_past_of_some_sites_is_rejected(pair, name):
    _, adapter = pair("batch", "folded")
    stream = adapter.new_stream()
    stream(make_images(shuffled(64, seed=5), 6, shift=0.8))
    state = stream.state()
    site = next(key for key in state if key.startswith(name)).rpartition(".")[0]
    kept = {key: value for key, value in state.items() if not key.startswith(f"{site}.")}
    assert len(kept) < len(state)
    with pytest.raises(CasterError, match="not the state of a stream"):
        adapter.resume(kept)


def test_the_first_layers_show_the_first_site(file):
    """Without the rest of the network, and as the whole graph measures it."""
    model = wrap(file("batch", "folded"))
    x = make_images(shuffled(8, seed=5), 6)
    first = model.sites[0]
    (expected,) = (
        samples for site, (_, samples) in model.measuring(x)[1].items() if site == first.site
    )
    np.testing.assert_array_equal(FirstSite(model, first)(x), expected)
    whole, head = model.graph()
    part = first_site_model(whole, head, first)
    assert len(part.graph.initializer) < len(whole.graph.initializer)


def test_samples_that_are_no_images_leave_no_trace(pair):
    one, other = pair("batch", "folded")
    x = make_images(shuffled(256, seed=5), 6, shift=0.8)
    bad = x[:64].copy()
    bad[5], bad[9] = 1e6, -1e9
    clean, attacked = other.new_stream(), other.new_stream()
    found = attacked(bad)
    assert found.implausible == one.new_stream()(bad).implausible == 2
    kept = np.ones(64, bool)
    kept[[5, 9]] = False
    expected = clean(x[:64][kept])
    assert np.array_equal(np.asarray(found.scores)[kept], expected.scores)
    assert np.array_equal(attacked(x[64:128]).scores, clean(x[64:128]).scores)


def test_a_file_survives_a_round_trip(pair, file, tmp_path):
    _, adapter = pair("batch", "dynamo")
    adapter.save(tmp_path / "s.caster")
    again = caster.Adapter(wrap(file("batch", "dynamo")), tmp_path / "s.caster")
    x = make_images(shuffled(64, seed=2), 3, shift=0.8)
    assert np.array_equal(again(x).scores, adapter(x).scores)


def test_the_sites_of_another_graph_are_rejected(pair, file):
    _, adapter = pair("batch", "dynamo")
    with pytest.raises(CasterError, match="has no tensor of the state's site"):
        caster.Adapter(wrap(file("batch", "folded")), adapter.state, allow_other_model=True)


def test_the_file_is_not_touched_and_torch_is_not_needed(file, tmp_path):
    """In a process of its own, in which torch cannot be imported."""
    path = file("batch", "folded")
    before = path.read_bytes()
    np.savez(tmp_path / "x.npz", x=make_images(shuffled(300, 1), 1), y=shuffled(300, 1))
    code = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import numpy as np, caster
held = np.load({str(tmp_path / "x.npz")!r})
adapter = caster.fit(caster.wrap({str(path)!r}), [(held["x"], held["y"])])
stream = adapter.new_stream()
print(adapter.mechanism, [stream(batch).verdict.reason for batch in np.split(held["x"], 3)][-1])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["layers", "accepted"]
    assert path.read_bytes() == before
