"""Preprocessed batches, devices, and the digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster_bench.data import open_data
from caster_bench.data.streams import Condition, StreamSettings, make_stream
from caster_bench.engine.batches import LabelledBatches, StreamBatches, preprocessor
from caster_bench.engine.executors.local import allocate_cores, select_devices

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
def test_batches_equal_those_of_preprocessing_bit_for_bit(stated):
    model = caster.wrap(module(), preprocessing=stated)
    prepared = np.asarray(preprocessor(model)(PIXELS))
    expected = stated.batch(PIXELS)
    assert prepared.dtype == expected.dtype
    np.testing.assert_array_equal(prepared, expected)


def test_a_model_without_preprocessing_is_rejected():
    with pytest.raises(CasterError, match="does not say how images become batches"):
        preprocessor(caster.wrap(module()))


@pytest.mark.parametrize("cache", [True, False])
def test_every_row_comes_under_its_own_condition(cache):
    conditions = (Condition("fog", 1), Condition("snow", 2))
    pixels = {condition: np.full_like(PIXELS, i) for i, condition in enumerate(conditions)}
    settings = StreamSettings(batch_size=7, conditions=conditions, schedule="mixed")
    stream = make_stream(np.arange(20) % 4, settings)
    batches = StreamBatches(stream, pixels, np.copy, cache=cache)
    for _ in range(2):  # cached ones too
        for batch, images in zip(batches.plan, batches, strict=True):
            expected = [conditions.index(c) for c in batch.condition]
            np.testing.assert_array_equal(images[:, 0, 0, 0], expected)


def test_source_batches_are_read_again_and_again():
    labelled = LabelledBatches(PIXELS, np.arange(20), np.copy)
    for reads in range(2):
        assert labelled.reads == reads
        labels = np.concatenate([labels for _, labels in labelled])
        np.testing.assert_array_equal(labels, np.arange(20))


def test_digits_are_scikit_learns_in_a_fixed_split():
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
    assert select_devices("cpu") == ["cpu"]
    if not torch.cuda.is_available():
        assert select_devices(None) == ["cpu"]
        with pytest.raises(CasterError, match="no device 'cuda'"):
            select_devices("cuda")
    workers, helpers = allocate_cores(["cpu"], 1)
    assert workers == 1
    assert helpers >= 0
