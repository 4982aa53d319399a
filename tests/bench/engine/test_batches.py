"""Batches as models take them, models that stay what they are, devices, the digits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster.errors import CasterError
from caster.models.modules import digest_of
from caster.models.preprocessing import Preprocessing
from caster_bench.data.digits import open_data
from caster_bench.data.streams import Condition, StreamSettings, make_stream
from caster_bench.engine.batches import Labelled, Prepared, preparing
from caster_bench.engine.executors.devices import chosen, share_out
from caster_bench.engine.weight_guard import WeightGuard

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(20, 8, 8, 3), dtype=np.uint8)


def module():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    "stated",
    [
        Preprocessing(1.0, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), "NCHW"),
        Preprocessing(255.0, (100.0, 110.0, 120.0), (50.0, 51.0, 52.0), "NCHW", channels="BGR"),
        Preprocessing(255.0, (0.0,) * 3, (1.0,) * 3, "NCHW"),
        Preprocessing(1.0, (0.5,) * 3, (0.5,) * 3, "NCHW", dtype="float16"),
    ],
)
def test_images_are_prepared_to_the_bit_as_elsewhere(stated):
    model = caster.wrap(module(), preprocessing=stated)
    prepared = np.asarray(preparing(model)(PIXELS))
    expected = stated.batch(PIXELS)
    assert prepared.dtype == expected.dtype
    np.testing.assert_array_equal(prepared, expected)


def test_a_model_that_states_no_preprocessing_is_refused():
    with pytest.raises(CasterError, match="does not say how images become batches"):
        preparing(caster.wrap(module()))


@pytest.mark.parametrize("hold", [True, False])
def test_every_row_comes_under_its_own_condition(hold):
    conditions = (Condition("fog", 1), Condition("snow", 2))
    pixels = {condition: np.full_like(PIXELS, i) for i, condition in enumerate(conditions)}
    settings = StreamSettings(batch_size=7, conditions=conditions, schedule="mixed")
    stream = make_stream(np.arange(20) % 4, settings)
    batches = Prepared(stream, pixels, lambda given: given.copy(), hold=hold)
    for _ in range(2):  # held ones too
        for batch, given in zip(batches.plan, batches, strict=True):
            expected = [conditions.index(c) for c in batch.condition]
            np.testing.assert_array_equal(given[:, 0, 0, 0], expected)


def test_source_batches_are_read_again_and_again():
    labelled = Labelled(PIXELS, np.arange(20), lambda given: given)
    for reads in range(2):
        assert labelled.reads == reads
        codes = np.concatenate([codes for _, codes in labelled])
        np.testing.assert_array_equal(codes, np.arange(20))


def sealed():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    net[1].running_mean[0] = torch.nan  # which is itself
    net.to(memory_format=torch.channels_last)
    model = caster.wrap(net)
    return net, model, WeightGuard(model)


def test_a_seal_holds_as_long_as_the_model_is_used_only():
    net, model, seal = sealed()
    before = digest_of(net)
    model(torch.zeros(2, 3, 8, 8))
    copy.deepcopy(net).train()(torch.ones(2, 3, 8, 8))
    seal.verify()
    assert seal.holds()
    assert seal.sha256 == before == digest_of(net)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].weight.data[0, 0, 0].add_(1e-6),
        lambda net: net[1].running_var.mul_(1.001),
        lambda net: net[1].num_batches_tracked.add_(1),
        lambda net: net[1].running_mean[1].neg_(),  # 0 to -0
        lambda net: setattr(net[1], "eps", 1e-3),
        lambda net: net[3].register_buffer("extra", torch.zeros(1)),
        lambda net: net.double(),
        lambda net: setattr(net[3], "extra", torch.nn.Parameter(torch.zeros(1))),
    ],
)
def test_a_seal_breaks_at_whatever_the_digest_is_of(change):
    net, model, seal = sealed()
    change(net)
    assert digest_of(net) != seal.sha256
    assert not seal.holds()
    with pytest.raises(CasterError, match="was changed while it was in use"):
        model.verify()  # the model's own asks the seal


def test_a_model_without_a_module_is_verified_by_itself():
    model = caster.wrap(lambda batch: (batch, batch), version="1")
    seal = WeightGuard(model)
    seal.verify()
    assert seal.holds()
    assert seal.sha256 == model.sha256


def test_digits_are_real_and_split_for_good():
    train, test = open_data("digits:train"), open_data("digits:test")
    assert (len(train), len(test)) == (901, 896)
    assert train.sha256 != test.sha256
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = np.stack([test.read(i)[::4, ::4, 0] for i in range(len(test))])
    known = {
        np.rint(image / 16 * 255).astype(np.uint8).tobytes(): label
        for image, label in zip(bunch.images, bunch.target, strict=True)
    }
    assert [known[image.tobytes()] for image in small] == list(test.labels)
    with pytest.raises(CasterError, match="no split 'val'"):
        open_data("digits:val")


def test_devices():
    assert chosen("cpu") == ["cpu"]
    if not torch.cuda.is_available():
        assert chosen(None) == ["cpu"]
        with pytest.raises(CasterError, match="no device 'cuda'"):
            chosen("cuda")
    workers, helpers = share_out(["cpu"], 1)
    assert workers == 1
    assert helpers >= 0
