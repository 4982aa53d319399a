"""A published network on photographs, in torch and as an ONNX file.

Run where CASTER_DATA has `imagenet-val5k`, one folder per class, and `checkpoints`, written by
benchmarks/real/published.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import caster
from caster.io.images import open_images
from caster_bench.engine.train.checkpoint import model_of

ROOT = Path(os.environ.get("CASTER_DATA", "absent"))
BATCH, BATCHES = 64, 6

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "real"))


@pytest.fixture
def models(tmp_path):
    """EfficientNet-Lite0 in torch, and its ONNX export."""
    checkpoint = ROOT / "checkpoints" / "efficientnet_lite0.safetensors"
    if not checkpoint.exists():
        pytest.skip(f"CASTER_DATA has no checkpoints/{checkpoint.name}")
    from export import main as export

    path = Path(shutil.copy(checkpoint, tmp_path))
    export(path)
    exported, preprocessing = path.with_suffix(".onnx"), path.with_suffix(".toml")
    return model_of(path), caster.wrap(exported, preprocessing=preprocessing)


def batches(model, images, rows):
    how = model.preprocessing
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        yield how.batch([how.resize_and_crop(images.read(int(i))) for i in part]), part


def darkened(batch):
    return batch * 0.5 - 0.5


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_torch_and_onnx_agree(models, mechanism):
    images = open_images(ROOT / "imagenet-val5k", labelled=True)
    labels = np.asarray(images.labels)
    rank = np.arange(len(labels)) - np.searchsorted(labels, labels)  # within its class
    source = np.flatnonzero(rank < 2)  # the fewest that a covariance takes
    target = np.random.default_rng(0).permutation(np.flatnonzero(rank >= 2))[: BATCH * BATCHES]
    adapters = []
    for model in models:
        labelled = ((batch, labels[rows]) for batch, rows in batches(model, images, source))
        state = caster.fit(model, labelled).state
        adapters.append(caster.Adapter(model, state, mechanism=mechanism))
    streams = [adapter.new_stream() for adapter in adapters]
    right = 0
    for batch, rows in batches(models[0], images, target):
        frozen = [np.asarray(model(darkened(batch)).logits) for model in models]
        np.testing.assert_allclose(*frozen, rtol=0, atol=1e-4 * np.abs(frozen[0]).max())
        one, other = (stream(darkened(batch)) for stream in streams)
        assert one.verdict.reason == other.verdict.reason
        np.testing.assert_allclose(one.verdict.ratio, other.verdict.ratio, rtol=1e-3)
        np.testing.assert_allclose(
            np.asarray(one.probabilities), np.asarray(other.probabilities), rtol=0, atol=1e-3
        )
        right += np.sum(np.asarray(one.labels) == labels[rows])
    assert right / len(target) > 0.5
    for model in models:
        model.verify()
