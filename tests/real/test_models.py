"""Real networks on real images; run where CASTER_DATA names them (see benchmarks/real)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from caster import Adapter, Caster, wrap
from caster.adapt.fitting import bound_state
from caster.io.images import open_images
from caster.io.labels import encode

ROOT = Path(os.environ.get("CASTER_DATA", "absent"))
NETWORKS = {"efficientnet_lite0": 0.65, "resnet50": 0.65, "cifar10": 0.88}  # accuracy to exceed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "real"))


def images_for(name):
    return open_images("cifar10:test" if name == "cifar10" else ROOT / "imagenet-val5k", ROOT)


@pytest.fixture(params=NETWORKS)
def network(request, tmp_path_factory):
    """A network in torch and in ONNX, and 192 prepared images with their class indices."""
    name = request.param
    if not (ROOT / "models" / f"{name}.safetensors").exists():
        pytest.skip(f"CASTER_DATA has no models/{name}.safetensors")
    import models

    small = name == "cifar10"
    preprocessing = models.RAW_32 if small else models.RAW_224
    folder = tmp_path_factory.mktemp(name)
    (folder / f"{name}.safetensors").symlink_to(ROOT / "models" / f"{name}.safetensors")
    exported = models.exported(name, folder, 32 if small else 224)
    images = images_for(name)
    rows = np.random.default_rng(0).permutation(len(images))[:192]
    batch = preprocessing.batch([preprocessing.resize_and_crop(images.read(int(i))) for i in rows])
    truth = encode(images.labels, images.classes)[rows]
    both = [
        wrap(model, preprocessing=preprocessing) for model in (models.load(name, folder), exported)
    ]
    return name, both, batch, truth


def test_torch_and_onnx_agree_and_both_are_right(network):
    name, (in_torch, in_onnx), batch, truth = network
    outs = [[model(part) for part in np.split(batch, 3)] for model in (in_torch, in_onnx)]
    arrays = {}
    for what in ("features", "logits"):
        a, b = (np.concatenate([np.asarray(getattr(o, what)) for o in out]) for out in outs)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(a).max())
        arrays[what] = a
    assert np.mean(arrays["logits"].argmax(1) == truth) > NETWORKS[name]
    # Two classes that both occur often enough: what counts here is that both paths say the same.
    answers = arrays["logits"].argmax(1) % 2
    clf = Caster(min_classes=2).fit(arrays["features"], answers)
    adapters = [Adapter(m, bound_state(clf, m, None)) for m in (in_torch, in_onnx)]
    for part in np.split(batch, 3):
        first, second = (adapter(part) for adapter in adapters)
        assert first.verdict.reason == second.verdict.reason
        assert np.array_equal(np.asarray(first.proposed), np.asarray(second.proposed))
    for model in (in_torch, in_onnx):
        model.verify()
