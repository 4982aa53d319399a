"""Samples that no image could have given: out of a stream's statistics, and still answered."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster import CasterError, wrap
from caster.adapt import alignment, plausibility
from caster.adapt.alignment import energies
from caster.adapt.plausibility import extremes
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import Outputs
from caster.models.torch import TorchModel
from caster.state import load, save
from caster_bench.data.corruptions import corrupt
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.answers import beside
from tests.support.cpu_runner import run_alignments_on_the_cpu
from tests.support.problem import layered, make_images, model, source, stream
from tests.support.sampling import first_fast, sampled

NAMES = ("layer-transport", "layer-transport-ungated")
ATTACKS = {
    "constant": lambda batch: np.full_like(batch, -300.0),
    "scaled": lambda batch: -1e9 * batch,
}


def state(kind="batch"):
    return caster.fit(model(kind), source(kind).batches, layers=True).state


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("kind", first_fast(["batch", "layer", "vit"]))
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_an_attacker_change_nothing_for_others(name, kind, attack):
    attacked, alone = (create(name, model(kind), layered(kind)) for _ in range(2))
    reasons = set()
    for batch in stream(8, size=8):
        found = attacked.predict(attack(batch))
        reasons.add(found.reason)
        if found.reason != "rest":  # when the frozen model answers unasked
            assert (found.accepted, found.implausible, found.ratio) == (False, 8, math.inf)
        assert torch.equal(found.logits, model(kind)(attack(batch)).logits)
        given, expected = attacked.predict(batch), alone.predict(batch)
        assert torch.equal(given.logits, expected.logits)
        assert (given.reason, given.ratio) == (expected.reason, expected.ratio)
    assert "implausible" in reasons


@pytest.mark.parametrize(
    ("kind", "known"),
    first_fast(sampled(product(["batch", "layer", "vit"], ["images", "state", "moments"]), 5)),
)
def test_samples_of_an_attacker_change_nothing_for_others_of_the_batch(kind, known):
    """Whether the range of the input is known or not."""
    of = {"images": source(kind), "state": state(kind)}
    of["moments"] = replace(of["state"], input_range=None)
    attacked, alone = (create(NAMES[1], model(kind), of[known]) for _ in range(2))
    rows = np.arange(12) % 3 != 1
    for batch in stream(3, size=12):
        mixed = batch.copy()
        mixed[~rows] *= 1000
        given = attacked.predict(mixed)
        assert (given.implausible, given.accepted) == (4, True)
        assert torch.equal(given.logits[rows], alone.predict(batch[rows]).logits)
        frozen = model(kind)(mixed[~rows]).logits
        assert torch.equal(given.logits[~rows], frozen)


def test_answers_beside_known_frozen_ones_leave_such_samples_to_the_frozen_model():
    attacked, alone = (create(NAMES[0], model(), state(), every=1) for _ in range(2))
    (batch,) = stream(1, size=8)
    mixed = batch.copy()
    mixed[:3] = 1e4
    before = Outputs(*(part.numpy() for part in (model()(mixed).features, model()(mixed).logits)))
    scores, answer = beside(attacked, mixed, before)
    others = Outputs(before.features[3:], before.logits[3:])
    expected, verdict = beside(alone, batch[3:], others)
    assert (answer.implausible, answer.ratio) == (3, verdict.ratio)
    assert torch.equal(scores[3:], expected)
    np.testing.assert_array_equal(scores[:3], before.logits[:3])
    scores, answer = beside(attacked, mixed[:3], Outputs(before.features[:3], before.logits[:3]))
    assert (answer.reason, answer.accepted, answer.ratio) == ("implausible", False, math.inf)
    np.testing.assert_array_equal(scores, before.logits[:3])


@pytest.mark.parametrize(
    ("name", "kind"), first_fast(sampled(product(NAMES, ["batch", "layer", "group", "vit"]), 4))
)
def test_without_such_samples_nothing_is_different(name, kind, monkeypatch):
    """Bit for bit, in batches smaller and larger than the memory."""
    batches = [batch for size in (1, 8, 70) for batch in stream(4, size=size, shift=1.0)]
    watching = create(name, model(kind), layered(kind))
    found = [watching.predict(batch) for batch in batches]
    everything = lambda found, limits: torch.ones(len(found), dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(alignment, "plausible", everything)
    blind = create(name, model(kind), layered(kind))
    for batch, given in zip(batches, found, strict=True):
        expected = blind.predict(batch)
        assert torch.equal(given.logits, expected.logits)
        assert (given.reason, given.ratio, given.implausible) == (
            expected.reason,
            expected.ratio,
            0,
        )


def test_the_whole_pass_is_one_pass(monkeypatch):
    method = create(NAMES[1], model(), layered())
    passes = []
    run = TorchModel.run_placed
    counted = lambda model, batch: passes.append(len(batch)) or run(model, batch)  # noqa: E731
    method.predict(stream(1)[0])  # what a first batch shows of a network
    monkeypatch.setattr(TorchModel, "run_placed", counted)
    for batch in stream(4):
        method.predict(batch)
    assert passes == [32] * 4


@pytest.mark.parametrize("corruption", ["fog", "contrast", "gaussian_noise", "saturate"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda width: nn.GroupNorm(1, width)])
def test_the_worst_corruptions_are_images(corruption, norm):
    how = Preprocessing(range=1.0, mean=(0.5,) * 3, std=(0.25,) * 3, layout="NCHW")
    rng = np.random.default_rng(0)
    small = rng.integers(256, size=(64, 4, 4, 3), dtype=np.uint8)
    images = small.repeat(8, 1).repeat(8, 2)
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 8, 3), norm(8), nn.AdaptiveAvgPool2d(1))
    net = wrap(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)), preprocessing=how)
    known = Source(batches=[(how.batch(images[:32]), np.arange(32) % 4)])
    method = create(NAMES[1], net, known)
    shifted = how.batch(corrupt(images[32:], corruption, 5, seed=0))
    assert method.predict(shifted).implausible == 0
    assert method.predict(how.batch(255 * (images > 127).astype(np.uint8))).implausible == 0
    assert (
        method.predict(2 * how.value_range[1] - how.value_range[0] + 2 * shifted).implausible == 32
    )


def test_what_is_in_the_range_is_an_image_whatever_its_energy(monkeypatch):
    """As a flat image that a LayerNorm before the first site blows up."""
    nothing = lambda found, limits: torch.zeros(len(found), dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(alignment, "plausible", nothing)
    method = create(NAMES[1], model(), layered())
    images = source().batches[0][0]
    assert method.predict(images).implausible == 0
    assert method.predict(np.concatenate([images, 10 * images])).implausible > 30


def test_a_stated_preprocessing_has_the_range():
    how = Preprocessing(255.0, (0.0, 10.0, 20.0), (1.0, 2.0, 4.0), "NCHW")
    low, high = how.value_range
    assert low.ravel().tolist() == [0.0, -5.0, -5.0]
    assert high.ravel().tolist() == [255.0, 122.5, 58.75]
    found = extremes(how.value_range, (3, 8, 8))
    assert found.min((0, 2, 3)).tolist() == [0.0, -5.0, -5.0]
    assert found.max((0, 2, 3)).tolist() == [255.0, 122.5, 58.75]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_extreme_images_have_any_number_of_channels(count):
    found = extremes((-1.0, 1.0), (count, 8, 6))
    assert found.shape[1:] == (count, 8, 6)
    assert (found.min(), found.max()) == (-1.0, 1.0)
    flat = {tuple(image[:, 0, 0]) for image in found if np.ptp(image, axis=(1, 2)).max() == 0}
    corners = set(product((-1.0, 1.0), repeat=count))
    assert corners <= flat or count > 3
    last = extremes((-1.0, 1.0), (8, 6, count), channels=2)
    assert last.shape == (len(found), 8, 6, count)


def test_the_range_is_in_the_state_and_its_file(tmp_path):
    images = np.concatenate([images for images, _ in source().batches])
    fitted = state()
    assert fitted.input_range == (float(images.min()), float(images.max()))
    save(fitted, tmp_path / "state.caster")
    assert load(tmp_path / "state.caster").input_range == fitted.input_range
    assert caster.fit(model(), source().batches, layers=False).state.input_range is None


@pytest.mark.parametrize(
    "ends", [(1.0, 0.0), (0.0, math.inf), (0.0, math.nan), (0.0,), (0.0, 1.0, 2.0)]
)
def test_a_range_that_is_none_is_rejected(ends, tmp_path):
    def stored():
        save(replace(state(), input_range=ends), tmp_path / "state.caster")
        return load(tmp_path / "state.caster")

    with pytest.raises(CasterError, match=r"input range|unpack"):
        stored()


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("windows", [1, 3])
def test_energies_are_of_every_sample_and_channel(axis, windows):
    values = torch.randn(4 * windows, 5, 6, 7)
    mean = torch.randn(values.shape[axis])
    found = energies(values, axis, 4, mean)
    last = values.movedim(axis, -1).reshape(4, -1, len(mean))
    torch.testing.assert_close(found, ((last - mean) ** 2).mean(1))
    assert energies(values[:-1], axis, 4, mean) is None


def test_a_recorded_pass_finds_them(monkeypatch):
    run_alignments_on_the_cpu(monkeypatch)
    graph = TorchModel(model().module, cuda_graph=True)
    known = Source(batches=source().batches)
    attacked, alone = (create(NAMES[1], graph, known, memory=24) for _ in range(2))
    for batch in stream(3):
        mixed = np.concatenate([batch, 1000 * batch[:8]])
        given = attacked.predict(mixed)
        assert given.implausible == 8
        assert torch.equal(given.logits[:32], alone.predict(batch).logits)


def test_a_network_that_takes_no_extreme_images_goes_by_the_sources_moments(monkeypatch):
    def fail(*given):
        raise CasterError("no")

    monkeypatch.setattr(alignment, "sharp_limits", fail)
    method = create(NAMES[1], model(), layered())
    (batch,) = stream(1)
    assert method.predict(batch).implausible == 0
    assert method.predict(1000 * batch).implausible == 32
    assert plausibility.UNKNOWN_RANGE > plausibility.MARGIN


def test_large_numbers_that_overflow_change_nothing_for_others_of_the_batch():
    attacked, alone = (create(NAMES[1], model(), state()) for _ in range(2))
    batch = make_images(8, seed=1)[0]
    mixed = np.concatenate([batch, np.full_like(batch[:1], 3e38)])
    given = attacked.predict(mixed)
    assert given.implausible == 1
    assert torch.equal(given.logits[:8], alone.predict(batch).logits)
    assert given.logits[8].isfinite().all()


def test_what_is_no_number_is_an_error_still():
    method = create(NAMES[0], model(), layered())
    batch = make_images(8, seed=1)[0]
    batch[2] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        method.predict(batch)
