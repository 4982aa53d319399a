"""A state file with the moments of layers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import caster
from caster import CasterError, wrap
from caster import state as states
from caster.core.channels import Site
from caster.errors import StateError
from caster.io.layer_arrays import round_classes
from tests.support import problem
from tests.support.tensor_files import contents, rewrite, with_array, with_entry


@cache
def fitted(kind="vit", layers=True):
    images, labels = problem.make_images(200, seed=2)
    batches = [(images[:100], labels[:100]), (images[100:], labels[100:])]
    return caster.fit(problem.model(kind), batches, layers=layers)


@pytest.mark.slow
def test_layers_come_back_exactly(tmp_path):
    adapter = fitted()
    adapter.save(tmp_path / "s.caster")
    loaded = states.load(tmp_path / "s.caster")
    expected = adapter.state.layers
    assert list(loaded.layers) == list(expected)
    assert Site("blocks.0", "in", -1, prefix_tokens=1) in expected
    for site, found in expected.items():
        assert loaded.layers[site].count == found.count == 200
        np.testing.assert_array_equal(loaded.layers[site].mean, found.mean)
        np.testing.assert_array_equal(loaded.layers[site].variance, found.variance)
    assert states.digest(loaded) == states.digest(adapter.state)
    sizes = dict(states.array_sizes(loaded))
    assert sizes["layer_means"] == sizes["layer_variances"] == 6 * 16 * 4
    halves = 4 * 6 * 16 * 2
    assert sizes["layer_class_means"] == sizes["layer_class_deviations"] == halves


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_class_moments_come_back_exactly(tmp_path, kind):
    state = fitted(kind).state
    path = tmp_path / "s.caster"
    for _ in range(2):  # what was loaded is saved as it was
        states.save(state, path)
        loaded = states.load(path)
        for site, found in state.layers.items():
            assert found.classes.counts.tolist() == state.moments.counts.tolist()
            for name in ("counts", "means", "variances"):
                one, other = (getattr(m.classes, name) for m in (found, loaded.layers[site]))
                np.testing.assert_array_equal(one, other)
        assert states.digest(loaded) == states.digest(state)
        state = loaded


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_large_means_round_to_the_same_float16_again(tmp_path, offset):
    """Where a class differs from the whole by less than float32 can tell."""
    state = fitted().state
    moved = {}
    for site, found in state.layers.items():
        pooled = replace(found, mean=(found.mean + offset).astype(np.float32))
        classes = replace(found.classes, means=found.classes.means + offset)
        moved[site] = replace(pooled, classes=round_classes(classes, pooled))
    before = replace(state, layers=moved)
    states.save(before, tmp_path / "s.caster")
    loaded = states.load(tmp_path / "s.caster")
    assert states.digest(loaded) == states.digest(before)
    for site, found in moved.items():
        np.testing.assert_array_equal(loaded.layers[site].classes.means, found.classes.means)


def test_sites_may_lack_classes(tmp_path):
    state = fitted().state
    (first, found), *others = state.layers.items()
    partly = replace(state, layers={first: replace(found, classes=None), **dict(others)})
    none = {site: replace(m, classes=None) for site, m in state.layers.items()}
    for before, expected in (
        (partly, [False] + 5 * [True]),
        (replace(state, layers=none), [False] * 6),
    ):
        states.save(before, tmp_path / "s.caster")
        loaded = states.load(tmp_path / "s.caster")
        assert [m.classes is not None for m in loaded.layers.values()] == expected
        assert states.digest(loaded) == states.digest(before)
    assert "layer_class_means" not in dict(states.array_sizes(loaded))


def changed_classes(state, **parts):
    """The state with other class moments at its first site."""
    (site, found), *others = state.layers.items()
    classes = replace(found.classes, **{k: f(getattr(found.classes, k)) for k, f in parts.items()})
    return replace(state, layers={site: replace(found, classes=classes), **dict(others)})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"counts": lambda n: n + 1}, "blocks.0:in have other counts"),
        ({"means": lambda m: m + 1}, "do not add up"),
        ({"variances": lambda v: 1.1 * v}, "do not add up"),
        ({"means": lambda m: m * np.nan}, "hold NaN"),
    ],
)
def test_classes_that_could_not_be_loaded_are_not_saved(tmp_path, parts, message):
    with pytest.raises(StateError, match=message):
        states.save(changed_classes(fitted().state, **parts), tmp_path / "s.caster")
    assert not (tmp_path / "s.caster").exists()


def without(name):
    """An edit of a file, for `rewritten`, that removes an array."""

    def edit(arrays, metadata):
        del arrays[name]

    return edit


def with_layers(old, new):
    """The same for the list of sites, as text."""

    def edit(arrays, metadata):
        metadata["layers"] = metadata["layers"].replace(old, new)

    return edit


def moved_counts(arrays, metadata):
    arrays["counts"][0] += 40
    arrays["counts"][1] -= 40


MEANS, DEVIATIONS = "layer_class_means", "layer_class_deviations"
CLASS_DAMAGES = {
    "float32": (with_array(MEANS, np.float32), f"{MEANS} is float32"),
    "fewer classes": (with_array(MEANS, lambda a: a[:-1]), f"{MEANS} is"),
    "fewer channels": (with_array(DEVIATIONS, lambda a: a[:, 1:].copy()), f"{DEVIATIONS} is"),
    "not finite": (with_entry(MEANS, (1, 3), np.inf), f"{MEANS} hold NaN or infinity"),
    "negative": (with_entry(DEVIATIONS, (1, 3), -1), f"{DEVIATIONS} hold -1"),
    "another mean": (with_entry(MEANS, (1, 3), 4.0), "do not add up"),
    "another deviation": (with_entry(DEVIATIONS, (1, 3), 3.0), "do not add up"),
    "other counts": (moved_counts, "do not add up"),
    "missing": (without(DEVIATIONS), DEVIATIONS),
    "unmarked": (with_layers(', "classes"', ""), "it holds U"),
    "marks in another order": (
        with_layers('"full", "classes"', '"classes", "full"'),
        "not at valid sites",
    ),
    "fewer samples": (with_layers("200.0", "199.0"), "have other counts"),
}


def test_covariances_come_back_exactly(tmp_path):
    adapter = fitted()
    adapter.save(tmp_path / "s.caster")
    loaded = states.load(tmp_path / "s.caster")
    full = {str(s): m.covariance for s, m in loaded.layers.items() if m.covariance is not None}
    assert [str(site) for site in loaded.layers if str(site) not in full] == ["head:in"]
    for site, found in adapter.state.layers.items():
        if str(site) in full:
            np.testing.assert_array_equal(full[str(site)], found.covariance)
            np.testing.assert_allclose(np.diag(found.covariance), found.variance, rtol=1e-5)
    assert states.digest(loaded) == states.digest(adapter.state)
    assert dict(states.array_sizes(loaded))["layer_covariances"] == 5 * 16 * 17 // 2 * 4


COVARIANCE_DAMAGES = {
    "shorter": (with_array("layer_covariances", lambda a: a[:-1]), "layer_covariances is"),
    "not finite": (with_entry("layer_covariances", 3, np.inf), "layer_covariances hold NaN"),
    "half": (with_layers('"full"', '"half"'), "not at valid sites"),
    "missing": (without("layer_covariances"), "layer_covariances"),
    "unmarked": (with_layers(', "full"', ""), "it holds U"),
}


def test_features_are_the_same_with_layers_or_without():
    images, labels = problem.make_images(200, seed=2)
    plain = caster.fit(
        problem.model("vit"),
        [(images[:100], labels[:100]), (images[100:], labels[100:])],
        layers=False,
    )
    np.testing.assert_array_equal(plain.state.moments.means, fitted().state.moments.means)
    assert plain.state.layers is None


def test_a_file_without_layers_is_unchanged(tmp_path):
    states.save(problem.source().state, tmp_path / "s.caster")
    arrays, metadata = contents(tmp_path / "s.caster")
    assert metadata["version"] == "1"
    assert "layers" not in metadata
    assert sorted(arrays) == ["U", "counts", "covariances", "means"]
    assert states.load(tmp_path / "s.caster").layers is None


def test_a_state_that_predates_excluded_tokens_is_unchanged(tmp_path):
    state = fitted().state
    moved = {replace(site, prefix_tokens=0): found for site, found in state.layers.items()}
    before = replace(state, layers=moved)
    states.save(before, tmp_path / "s.caster")
    _, metadata = contents(tmp_path / "s.caster")
    assert metadata["version"] == "1"
    assert json.loads(metadata["layers"])[0] == ["blocks.0", "in", -1, 16, 200.0, "full", "classes"]
    loaded = states.load(tmp_path / "s.caster")
    assert list(loaded.layers) == list(moved)
    assert states.digest(loaded) == states.digest(before)


def test_batchnorms_are_measured_too():
    """On the source, whatever their running statistics are."""
    layers = fitted("batch").state.layers
    assert [str(site) for site in layers] == ["1:in", "4:in", "8:in"]
    values = torch.from_numpy(problem.make_images(200, seed=2)[0])
    for name, layer in problem.model("batch").module.named_children():
        if isinstance(layer, torch.nn.BatchNorm2d):
            found = layers[Site(name, "in", 1)]
            rows = values.double().movedim(1, -1).flatten(0, -2).numpy()
            np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-4)
            assert not np.allclose(found.mean, layer.running_mean, rtol=1e-3)
        with torch.no_grad():
            values = layer(values)


def test_requested_but_empty_layers_come_back(tmp_path):
    """As for a BatchNorm network whose BatchNorm inputs were not measured."""
    states.save(replace(fitted("batch").state, layers={}), tmp_path / "s.caster")
    assert states.load(tmp_path / "s.caster").layers == {}


def test_only_a_torch_module_has_layers():
    model = wrap(lambda batch: (batch, batch), version="example-1")
    with pytest.raises(CasterError, match="layers need a torch module"):
        caster.fit(model, [(np.eye(2), [0, 1])], layers=True)


def twice(arrays, metadata):
    listed = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps([[*listed[1][:4], 7.0, *listed[1][5:]], *listed[1:]])


def no_name(arrays, metadata):
    listed = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps([[3, *listed[0][1:]], *listed[1:]])


def widths(change):
    """Divide the same number of channels differently."""

    def divide(arrays, metadata):
        listed = json.loads(metadata["layers"])
        for row, width in zip(listed, change, strict=False):
            row[3] = width
        metadata["layers"] = json.dumps(listed)

    return divide


def uncounted(arrays, metadata):
    listed = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps([[*row[:4], 0, *row[5:]] for row in listed])


def tokens(number):
    def change(arrays, metadata):
        listed = json.loads(metadata["layers"])
        metadata["layers"] = json.dumps([[*row[:5], number] for row in listed])

    return change


def all_tokens(arrays, metadata):
    metadata["layers"] = json.dumps([row[:5] for row in json.loads(metadata["layers"])])


def version(number):
    return lambda arrays, metadata: metadata.update(version=number)


def without_layers(arrays, metadata):
    del metadata["layers"]


UNFIT, EMPTY, NAMELESS = "do not fit together", "invalid counts", "not at valid sites"
DAMAGES = {
    "shorter": (with_array("layer_means", lambda a: a[:-1]), UNFIT),
    "not finite": (with_entry("layer_variances", 3, np.nan), "layer_variances hold NaN"),
    "negative": (with_entry("layer_variances", 3, -1.0), "layer_variances hold -1"),
    "missing": (without("layer_variances"), "layer_variances"),
    "side": (with_layers('"out"', '"up"'), NAMELESS),
    "axis": (with_layers("-1, 16", "2, 16"), NAMELESS),
    "no name": (no_name, NAMELESS),
    "twice": (twice, "name a site twice"),
    "uncounted": (uncounted, EMPTY),
    "negative width": (widths([-16, 48]), UNFIT),
    "width 0": (widths([0, 32]), UNFIT),
    "half a width": (widths([15.5, 16.5]), UNFIT),
    "a width that is true": (widths([True, 31]), UNFIT),
    "version 5": (version("5"), "has state format 5, not 1"),
    "fewer than no tokens": (tokens(-1), NAMELESS),
    "half a token": (tokens(0.5), NAMELESS),
    "tokens in words": (tokens("1"), NAMELESS),
    "without layers": (without_layers, "it holds U"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [*DAMAGES.values(), *CLASS_DAMAGES.values(), *COVARIANCE_DAMAGES.values()],
    ids=[*DAMAGES, *(f"classes {each}" for each in CLASS_DAMAGES), *COVARIANCE_DAMAGES],
)
def test_damaged_layers_are_rejected(tmp_path, change, message):
    path = tmp_path / "s.caster"
    fitted().save(path)
    rewrite(path, lambda arrays, metadata: None)
    states.load(path)
    rewrite(path, change)
    with pytest.raises(StateError, match=message):
        states.load(path)


def test_edited_layers_do_not_match_the_digest(tmp_path):
    path = tmp_path / "s.caster"
    fitted().save(path)
    rewrite(path, with_entry("layer_means", 0, 7.0), sealed=False)
    with pytest.raises(StateError, match="does not match its own digest"):
        states.load(path)
