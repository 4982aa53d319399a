"""Mixture transport as a whole: its laws, the streams it meets, its certificates and its state."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import caster
from caster import CasterError
from caster.adapt.alignment import Alignment
from caster.adapt.layer_passes import PLAIN, LayerSettings, Pass
from caster.adapt.layer_transport import CHANGED, LayerTransport
from caster.core.channels import ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from caster.core.stream_labels import merged_mixture
from caster.io import layer_arrays
from caster.models.heads import Columns
from caster.models.sites import batchnorm_sites
from caster.models.torch_channels import as_tensors, class_tensors
from tests.support.mixture_problem import (
    N_CLASSES,
    adapter,
    make_images,
    model,
    run,
    shuffled,
    source_batches,
)
from tests.support.sampling import first_fast, sampled

TAIL = 2.0 ** -np.arange(N_CLASSES)
KINDS = ["batch", "layer"]


def layer_transport(kind="batch", own=None, **changed):
    fitted = adapter(kind)
    given = own or replace(LayerSettings(), **changed)
    return LayerTransport(fitted.model, fitted.state.layers, Columns(fitted.head), settings=given)


# --- the source's mixture ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", first_fast([1.0, 0.5]))
def test_with_the_mixture_of_the_source_it_is_layer_transport(kind, depth):
    y = shuffled(320, seed=7)
    x = make_images(y, 8, shift=0.5)
    plain = replace(PLAIN, depth=depth)
    ours, theirs = (layer_transport(kind, one) for one in (replace(plain, mixture=True), plain))
    for batch in np.split(x, 10):
        one, other = ours(batch), theirs(batch)
        assert one.mixture is None
        assert torch.equal(one.adapted, other.adapted)
        assert torch.equal(one.features, other.features)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_the_sources_mixture_are_the_sources(kind):
    """To rounding: the reference comes from the classes here, and from all samples there."""
    fitted = adapter(kind)
    layers = fitted.state.layers
    settings = LayerSettings(prior=4.0, memory=64, maps="diagonal")
    alignment = Alignment.of(fitted.model, layers, settings, None)
    batch = make_images(shuffled(32, seed=7), 8, shift=0.5)
    pi_s = next(iter(layers.values())).classes.counts.astype(np.float64)
    mixed = alignment(batch, Pass(mixture=pi_s / pi_s.sum())).logits
    torch.testing.assert_close(mixed, alignment(batch).logits, rtol=1e-4, atol=1e-4)


# --- affine shifts -------------------------------------------------------------------------------

CLASSES, EACH, CHANNELS = 3, 12, 4


def class_values(seed):
    """(3, 12, 4, 5, 1): samples of classes whose channels differ in mean and spread."""
    rng = np.random.default_rng(seed)
    means = 2 * rng.normal(size=(CLASSES, 1, CHANNELS, 1, 1))
    spread = rng.uniform(0.5, 2.0, size=(CLASSES, 1, CHANNELS, 1, 1))
    noise = rng.normal(size=(CLASSES, EACH, CHANNELS, 5, 1))
    return (means + spread * noise).astype(np.float32)


class Recalled(nn.Module):
    """A single site, whose values are the input, and logits that show them all."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.flat = norm, nn.Flatten()
        self.head = nn.Linear(5 * CHANNELS, 5 * CHANNELS, bias=False)
        nn.init.eye_(self.head.weight)

    def forward(self, x):
        return self.head(self.flat(self.norm(x)))


@cache
def recalled(kind):
    norm = nn.BatchNorm2d(CHANNELS) if kind == "batch" else nn.GroupNorm(1, CHANNELS, affine=False)
    return caster.wrap(Recalled(norm).eval())


def sole_alignment(kind, values, memory):
    """Aligned at the normalisation layer alone, with moments of the classes as measured."""
    frozen = recalled(kind)
    together = values.reshape(-1, *values.shape[2:])
    targets = np.repeat(np.arange(CLASSES), EACH)
    site = batchnorm_sites(recalled("batch").module)[0]
    classes = ClassChannelMoments.of(together.astype(np.float64), 1, targets, CLASSES)
    moments = as_tensors(classes.pooled(), torch.device("cpu"))
    layers = {site: replace(moments, classes=class_tensors(classes, torch.device("cpu")))}
    return Alignment(frozen, [site], layers, prior=0.0, memory=memory)


counts = st.lists(st.integers(0, 3), min_size=CLASSES, max_size=CLASSES).filter(any)


@settings(max_examples=20)
@given(st.integers(0, 9), st.lists(counts, min_size=1, max_size=4), st.sampled_from([0, 80, 4096]))
@pytest.mark.parametrize("kind", KINDS)
def test_an_affine_shift_is_undone_under_any_mixture(kind, seed, repeats, memory):
    """Also by moments merged over batches of other mixtures, and where the memory forgets."""
    values, rng = class_values(seed), np.random.default_rng(seed + 100)
    scale, shift = rng.uniform(0.4, 2.5, (CHANNELS, 1, 1)), rng.normal(size=(CHANNELS, 1, 1)) * 3
    alignment = sole_alignment(kind, values, memory)
    mixture, kept = np.full(CLASSES, 1 / CLASSES), 0.0
    for times in repeats:
        batch = np.concatenate([values[c] for c in range(CLASSES) for _ in range(times[c])])
        kept = min(alignment.target.samples, max(0.0, memory - len(batch)))
        mixture = merged_mixture(mixture, kept, np.array(times) / sum(times), len(batch))
        shifted = (scale * batch + shift).astype(np.float32)
        found = alignment(shifted, Pass(mixture=mixture)).logits
        alignment.commit()
        expected = recalled(kind)(batch).logits
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_an_affine_shift_is_not_undone_with_another_mixture():
    values = class_values(0)
    alignment = sole_alignment("batch", values, 64)
    found = alignment(values[0] * 2 + 1, Pass(mixture=np.array([0.0, 1.0, 0.0]))).logits
    assert (found - recalled("batch")(values[0]).logits).abs().max() > 0.5


# --- the order of the classes --------------------------------------------------------------------


@pytest.mark.parametrize("order", first_fast(["shuffled", "sorted", "tail"]))
def test_the_order_of_the_classes_does_not_matter(order):
    to = np.array([3, 0, 5, 1, 4, 2])  # class c becomes to[c]
    net = copy.deepcopy(model("layer").module)
    with torch.no_grad():
        net[-1].weight[to], net[-1].bias[to] = net[-1].weight.clone(), net[-1].bias.clone()
    renamed = caster.fit(caster.wrap(net), [(x, to[y]) for x, y in source_batches()])
    y = shuffled(320, 7, TAIL if order == "tail" else None)
    y = np.sort(y) if order == "sorted" else y
    x = make_images(y, 8, shift=0.5)
    one, other = (run(x, y, stream=own.new_stream()) for own in (adapter("layer"), renamed))
    assert one.knows == other.knows
    for ours, theirs in zip(one.outs, other.outs, strict=True):
        assert ours.verdict.accepted == theirs.verdict.accepted
        found = torch.softmax(theirs.adapted, 1)[:, to]
        torch.testing.assert_close(found, torch.softmax(ours.adapted, 1), rtol=1e-3, atol=1e-3)
        if ours.mixture is not None:
            np.testing.assert_allclose(theirs.mixture[to], ours.mixture, atol=1e-3)


# --- streams -------------------------------------------------------------------------------------


def true_mixture(labels):
    return np.bincount(labels, minlength=N_CLASSES) / len(labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", first_fast([1.0, 0.0]))
def test_a_shuffled_stream_is_answered_by_the_aligned_logits(kind, shift):
    y = shuffled(512, seed=7)
    x = make_images(y, 8, shift)
    found = run(x, y, stream=adapter(kind).new_stream())
    assert not any(found.knows)
    assert found.accepted == 1
    assert found.accuracy() >= found.frozen() + (0.05 if shift else -0.01)
    alignment = layer_transport(kind)._alignment
    first = found.outs[0]
    assert torch.equal(
        first.scores, alignment(x[:64], Pass()).logits
    )  # neither prior nor neighbours


@pytest.mark.parametrize("kind", KINDS)
def test_a_sorted_stream_is_known_from_the_first_batch_on(kind):
    y = np.sort(shuffled(512, seed=7))
    found = run(make_images(y, 8, shift=1.0), y, stream=adapter(kind).new_stream())
    assert all(found.knows)
    pairs = zip(found.outs, np.split(y, 8), strict=True)
    errors = [0.5 * np.abs(out.mixture - true_mixture(batch)).sum() for out, batch in pairs]
    assert np.mean(errors) < 0.15
    assert max(errors) < 0.3
    assert found.accuracy() > found.frozen() + 0.2
    assert found.accuracy() > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", pytest.param("sorted", marks=pytest.mark.whole)])
def test_batches_of_any_size_gain_nearly_alike(order):
    y = shuffled(384, seed=7)
    y = np.sort(y) if order == "sorted" else y
    x = make_images(y, 8, shift=1.0)
    found = {B: run(x, y, B) for B in (1, 8, 64)}
    gains = [one.accuracy() - one.frozen() for one in found.values()]
    assert min(gains) > 0.08
    assert max(gains) - min(gains) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_a_stream_may_turn_from_shuffled_to_sorted_and_back(size):
    y = np.concatenate([shuffled(512, 7), np.sort(shuffled(384, 8)), shuffled(768, 9)])
    found = run(make_images(y, 8, shift=0.5), y, size)
    parts = [slice(0, 512 // size), slice(512 // size, 896 // size), slice(1408 // size, None)]
    assert not any(found.knows[parts[0]])
    assert all(found.knows[parts[1]][128 // size :])
    assert not any(found.knows[parts[2]])  # evidence fades over 256 samples
    assert found.accuracy(parts[1]) > found.frozen(parts[1]) + 0.03
    for part in (parts[0], parts[2]):
        assert found.accuracy(part) > found.frozen(part)


@pytest.mark.slow
def test_a_long_tail_is_a_prior_and_not_runs():
    y = shuffled(768, 7, TAIL)
    found = run(make_images(y, 8, shift=0.5), y)
    assert all(found.knows[3:])  # 256 samples
    assert 0.5 * np.abs(found.outs[-1].mixture - TAIL / TAIL.sum()).sum() < 0.08
    assert found.always() > found.frozen() - 0.01
    stream = adapter().new_stream()
    run(make_images(y, 8, shift=0.5), y, stream=stream)
    assert not stream._layers._classes.labels.chain.is_correlated


@pytest.mark.parametrize("size", first_fast([64, 8]))
def test_a_stream_of_one_class(size):
    y = np.full(256, 4)
    found = run(make_images(y, 8, shift=1.0), y, size)
    assert found.accuracy() > 0.98 > found.frozen() + 0.1
    assert found.outs[-1].mixture[4] > 0.8


@pytest.mark.slow
def test_another_shift_drops_the_memory():
    stream = adapter().new_stream()
    alignment = stream._layers._alignment
    y = shuffled(640, 7)
    for shift, seed in ((1.0, 8), (-1.0, 9), (0.0, 10)):
        found = run(make_images(y, seed, shift), y, stream=stream)
        assert alignment.target.samples == len(y)  # each shift from nothing on
        assert found.accuracy(slice(1)) > found.accuracy() - 0.12  # within one batch
        assert found.accuracy() >= found.frozen() - 0.01


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_change_tells_another_shift_from_other_classes(order):
    y = shuffled(640, 7)
    y = np.sort(y) if order == "sorted" else y
    x = make_images(y, 8, shift=0.5)
    alignment = layer_transport()._alignment
    for batch in np.split(x, 10):
        alignment(batch)
        assert alignment.target.change() < CHANGED
        alignment.commit()
    alignment(make_images(y[:64], 9, shift=1.0))
    assert alignment.target.change() > CHANGED


@pytest.mark.slow
def test_recurring_and_mixed_shifts():
    y = shuffled(1024, 7)
    clean, shifted = make_images(y, 8), make_images(y, 8, shift=1.0)
    recurring = np.where(np.arange(1024)[:, None, None, None] // 256 % 2, shifted, clean)
    found = run(recurring, y)
    assert found.accuracy() > found.frozen() + 0.03
    mixed = np.where(np.arange(1024)[:, None, None, None] % 2, shifted, clean)
    found = run(mixed, y)
    assert found.accuracy() > found.frozen() - 0.01


# --- certificates --------------------------------------------------------------------------------


def collapsing(kind="batch", every=LayerSettings.every):
    """An adapter whose last site is aligned with moments under which all answers are class 2."""
    fitted = adapter(kind)
    layers = dict(fitted.state.layers)
    site = list(layers)[-1]
    known = layers[site]
    mean = known.classes.means[2].astype(np.float32)
    variance = (0.01 * known.variance).astype(np.float32)
    each = (np.tile(part, (N_CLASSES, 1)).astype(np.float64) for part in (mean, variance))
    classes = ClassChannelMoments(known.classes.counts, *each)
    layers[site] = ChannelMoments(known.count, mean, variance, classes=classes)
    return caster.Adapter(fitted.model, replace(fitted.state, layers=layers), every=every)


@pytest.mark.parametrize(
    ("kind", "size"), first_fast([("batch", 64), ("layer", 64), ("batch", 16)])
)
def test_a_collapse_on_a_shuffled_stream_is_rejected(kind, size):
    """Also once the past would do for one pass, whose answers look like a run of one class."""
    y = shuffled(640, 7)
    x = make_images(y, 8, shift=0.5)
    found = run(x, y, size, collapsing(kind, every=1).new_stream())
    assert found.always() < 0.3
    assert found.accepted == 0
    assert found.accuracy() == found.frozen()
    found = run(x, y, size, collapsing(kind).new_stream())  # which is not always proposed
    assert found.accepted == 0
    assert found.accuracy() == found.frozen()


def test_a_collapse_of_a_trusted_alignment_does_not_look_like_a_run():
    """Deep layers alone change once the stream is settled: shallow ones still see all classes."""
    y = shuffled(768, 7)
    x = make_images(y, 8, shift=0.5)
    stream, bad = adapter().new_stream(), collapsing().new_stream()
    assert run(x[:384], y[:384], stream=stream).accepted == 1
    bad._layers._alignment.resume(stream._layers._alignment.target.state())
    stream._layers._alignment = bad._layers._alignment
    found = run(x[384:], y[384:], stream=stream)
    assert not any(found.knows)
    assert found.accuracy(slice(3, None)) == found.frozen(slice(3, None))


@pytest.mark.parametrize(
    ("kind", "size"), first_fast([("batch", 64), ("layer", 64), ("batch", 16)])
)
@pytest.mark.parametrize("order", ["shuffled", "sorted", "tail"])
def test_nothing_is_lost_on_source_like_streams(kind, order, size):
    y = shuffled(512, 7, TAIL if order == "tail" else None)
    y = np.sort(y) if order == "sorted" else y
    found = run(make_images(y, 8), y, size, adapter(kind).new_stream())
    assert found.accuracy() >= found.frozen() - 0.01


# --- state ---------------------------------------------------------------------------------------

MODES = {
    "nothing": (0, 0.5),
    "shuffled": (128, 0.5),
    "settled": (448, 0.5),
    "sorted": (256, 1.0),
    "tail": (320, 0.5),
    "changed": (320, 1.0),
    "rejected": (320, 0.5),
}


@pytest.mark.parametrize(("kind", "mode"), first_fast(sampled(product(KINDS, MODES), 4)))
def test_a_resumed_stream_continues_bit_for_bit(kind, mode, tmp_path):
    seen, shift = MODES[mode]
    fitted = collapsing(kind) if mode == "rejected" else adapter(kind)
    y = shuffled(seen + 192, 7, TAIL if mode == "tail" else None)
    y = np.sort(y) if mode == "sorted" else y
    x = make_images(y, 8, shift)
    if mode == "changed":
        x[: seen - 32] = make_images(y[: seen - 32], 8, 0.0)
    stream = fitted.new_stream()
    for i in range(0, seen, 64):
        stream(x[i : i + 64])
    stream.save(tmp_path / "stream")
    others = [fitted.resume(stream.state()), fitted.resume(tmp_path / "stream")]
    for i in range(seen, len(y), 32):
        out = stream(x[i : i + 32])
        for other in others:
            again = other(x[i : i + 32])
            assert torch.equal(again.scores, out.scores)
            assert repr(again.verdict) == repr(out.verdict)
            np.testing.assert_array_equal(again.mixture, out.mixture)
    for name, value in stream.state().items():
        np.testing.assert_array_equal(others[0].state()[name], value, err_msg=name)


@cache
def stream_state():
    y = shuffled(128, 7)
    stream = adapter().new_stream()
    run(make_images(y, 8), y, stream=stream)
    return stream.state()


def test_a_state_with_impossible_numbers_is_rejected():
    known = stream_state()
    names = [name for name, value in known.items() if value.dtype.kind == "f"]
    for name in names:
        if name in ("certificate", "feedback.restarts"):  # NaN: nothing yet; -inf: no bets
            continue
        for bad in (np.nan, -np.inf):
            with pytest.raises(CasterError, match="not the state of a stream"):
                adapter().resume({**known, name: np.full_like(known[name], bad)})
                pytest.fail(f"{name} = {bad}")


@pytest.mark.parametrize("scale", [0.0, 0.99, 1.01])
def test_a_mixture_that_does_not_sum_to_one_is_rejected(scale):
    known = stream_state()
    adapter().resume(known)
    with pytest.raises(CasterError, match="not the state of a stream"):
        adapter().resume({**known, "mixture": scale * known["mixture"]})


LABELS = ["labels.last", "labels.totals", "labels.recent", "mixture", "certificate.rows"]


@pytest.mark.parametrize("name", LABELS)
def test_a_state_of_other_classes_is_rejected(name):
    known = stream_state()
    for bad in (known[name][..., :-1], known[name][..., None], np.zeros(0)):
        with pytest.raises(CasterError, match="not the state of a stream"):
            adapter().resume({**known, name: bad})
    missing = {other: value for other, value in known.items() if other != name}
    with pytest.raises(CasterError, match="not the state of a stream"):
        adapter().resume(missing)


# --- sources -------------------------------------------------------------------------------------


def fitted_to_few(kind, classes, each=3):
    """Fitted to so many samples of some classes, and to all of the others."""
    images, labels = (np.concatenate(part) for part in zip(*source_batches(), strict=True))
    kept = np.ones(len(labels), np.bool_)
    for c in classes:
        kept &= (labels != c) | (np.cumsum(labels == c) <= each)
    return caster.fit(model(kind), [(images[kept], labels[kept])])


@pytest.mark.parametrize("kind", KINDS)
def test_three_samples_of_every_class(kind):
    fitted = fitted_to_few(kind, range(N_CLASSES))
    for y in (shuffled(320, seed=7), np.sort(shuffled(320, seed=7))):
        found = run(make_images(y, 8, shift=1.0), y, stream=fitted.new_stream())
        assert found.accuracy() > found.frozen() + 0.05


@pytest.mark.parametrize("kind", first_fast(KINDS))
def test_three_samples_of_one_class(kind):
    fitted = fitted_to_few(kind, [5])
    shuffled_alike = shuffled(320, 7, [100, 100, 100, 100, 100, 3])
    for y in (shuffled_alike, np.sort(shuffled_alike), np.full(128, 5)):
        found = run(make_images(y, 8, shift=0.5), y, stream=fitted.new_stream())
        assert found.accuracy() >= found.frozen() - 0.01


@pytest.mark.parametrize("kind", first_fast(KINDS))
def test_classes_at_deep_sites_alone(kind, monkeypatch):
    widths = {site: len(found.mean) for site, found in adapter(kind).state.layers.items()}
    room = sum(list(widths.values())[-2:]) * N_CLASSES * 4
    monkeypatch.setattr(layer_arrays, "CLASS_BYTES", room)
    fitted = caster.fit(model(kind), source_batches())
    known = [found.classes is not None for found in fitted.state.layers.values()]
    assert known == [False] * (len(known) - 2) + [True] * 2
    for y in (shuffled(384, seed=7), np.sort(shuffled(384, seed=7))):
        found = run(make_images(y, 8, shift=1.0), y, stream=fitted.new_stream())
        assert found.accuracy() > found.frozen() + 0.05


@pytest.mark.slow
def test_without_room_for_classes_it_is_layer_transport(monkeypatch):
    monkeypatch.setattr(layer_arrays, "CLASS_BYTES", 0)
    fitted = caster.fit(model(), source_batches())
    assert fitted.settings == PLAIN
    with pytest.raises(CasterError, match="no class moments"):
        LayerTransport(fitted.model, fitted.state.layers, Columns(fitted.head))
