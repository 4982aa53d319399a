"""A state file with the moments of layers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from caster import Adapter, CasterError, wrap
from caster import state as states
from caster.core.layers import ChannelMoments, Site
from caster.errors import StateError
from tests.methods import problem


def fitted(kind="vit"):
    images, labels = problem.pictures(200, seed=2)
    batches = [(images[:100], labels[:100]), (images[100:], labels[100:])]
    return Adapter.fit(problem.model(kind), batches, layers=True)


def test_layers_come_back_exactly(tmp_path):
    adapter = fitted()
    adapter.save(tmp_path / "s.caster")
    loaded = states.load(tmp_path / "s.caster")
    expected = adapter.state.layers
    assert list(loaded.layers) == list(expected)
    assert Site("blocks.0", "in", -1) in expected
    for site, found in expected.items():
        assert loaded.layers[site].count == found.count == 200
        np.testing.assert_array_equal(loaded.layers[site].mean, found.mean)
        np.testing.assert_array_equal(loaded.layers[site].variance, found.variance)
    assert states.digest(loaded) == states.digest(adapter.state)
    sizes = dict(states.array_sizes(loaded))
    assert sizes["layer_means"] == sizes["layer_variances"] == 6 * 16 * 4


def test_features_are_the_same_with_layers_or_without():
    images, labels = problem.pictures(200, seed=2)
    plain = Adapter.fit(
        problem.model("vit"), [(images[:100], labels[:100]), (images[100:], labels[100:])]
    )
    np.testing.assert_array_equal(plain.state.moments.means, fitted().state.moments.means)
    assert plain.state.layers is None


def test_a_file_without_layers_is_what_it_was(tmp_path):
    states.save(problem.source().state, tmp_path / "s.caster")
    with safe_open(tmp_path / "s.caster", framework="np") as file:
        assert file.metadata()["version"] == "2"
        assert "layers" not in file.metadata()
        assert sorted(file.keys()) == ["U", "counts", "covariances", "means"]
    assert states.load(tmp_path / "s.caster").layers is None


def test_a_batchnorm_network_needs_no_moments_and_says_it_was_asked(tmp_path):
    adapter = fitted("batch")
    assert adapter.state.layers == {}
    adapter.save(tmp_path / "s.caster")
    assert states.load(tmp_path / "s.caster").layers == {}


def test_only_a_torch_module_has_layers():
    model = wrap(lambda batch: (batch, batch), version="example-1")
    with pytest.raises(CasterError, match="layers are those of a torch module"):
        Adapter.fit(model, [(np.eye(2), [0, 1])], layers=True)


def rewritten(path, change):
    """A file with changed arrays and metadata, and the digest that goes with them."""
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
    change(arrays, metadata)
    metadata["content_sha256"] = states.content_digest(arrays, metadata)
    save_file(arrays, path, metadata)


def shorter(arrays, metadata):
    arrays["layer_means"] = arrays["layer_means"][:-1]


def not_finite(arrays, metadata):
    arrays["layer_variances"][3] = np.nan


def negative(arrays, metadata):
    arrays["layer_variances"][3] = -1.0


def missing(arrays, metadata):
    del arrays["layer_variances"]


def side(arrays, metadata):
    metadata["layers"] = metadata["layers"].replace('"out"', '"up"')


def axis(arrays, metadata):
    metadata["layers"] = metadata["layers"].replace("-1, 16", "2, 16")


def twice(arrays, metadata):
    listed = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps([listed[0], *listed[:-1]])


def uncounted(arrays, metadata):
    listed = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps([[*row[:-1], 0] for row in listed])


def other_version(arrays, metadata):
    metadata["version"] = "2"


@pytest.mark.parametrize(
    "change",
    [shorter, not_finite, negative, missing, side, axis, twice, uncounted, other_version],
    ids=lambda change: change.__name__,
)
def test_damaged_layers_are_refused(tmp_path, change):
    path = tmp_path / "s.caster"
    fitted().save(path)
    rewritten(path, lambda arrays, metadata: None)
    states.load(path)
    rewritten(path, change)
    with pytest.raises(StateError):
        states.load(path)


def test_edited_layers_do_not_match_the_digest(tmp_path):
    path = tmp_path / "s.caster"
    fitted().save(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
    arrays["layer_means"][0] += 1
    save_file(arrays, path, metadata)
    with pytest.raises(StateError, match="does not match its own digest"):
        states.load(path)


def test_moments_of_a_site_are_numbers_of_a_channel_each():
    layers = fitted().state.layers
    assert all(isinstance(found, ChannelMoments) for found in layers.values())
    assert all(found.mean.shape == found.variance.shape == (16,) for found in layers.values())
