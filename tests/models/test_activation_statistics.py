"""Moments of every class at the sites of a network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import caster
from caster.core.channels import ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from caster.io import layer_arrays
from caster.models import site_sums
from caster.models.activation_statistics import ActivationStatistics
from caster.models.site_sums import rounded
from tests.support import problem

CLASSES = problem.N_CLASSES
IMAGES, LABELS = problem.make_images(120, seed=5)
PARTS = "counts", "means", "variances"


def statistics_of(kind="batch", *, past=None, rows=slice(None), batch=50, labels=LABELS):
    statistics = ActivationStatistics(problem.model(kind), past)
    images, targets = IMAGES[rows], labels[rows]
    for start in range(0, len(images), batch):
        some = slice(start, start + batch)
        statistics(images[some], targets[some])
    return statistics


def activations(kind, sites):
    """Values at the sites over all images, in float64."""
    seen = {}
    model = problem.model(kind)
    handles = []
    for site in sites:

        def keep(layer, inputs, output, site=site):
            seen[site] = site.patch_values(inputs[0] if site.side == "in" else output).double()

        handles.append(model.module.get_submodule(site.module).register_forward_hook(keep))
    with torch.no_grad():
        model.module.eval()(torch.from_numpy(IMAGES))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", ["batch", "layer", "vit"])
def test_class_moments_equal_those_of_the_activations(kind):
    sums = statistics_of(kind).sums
    values = activations(kind, sums)
    for site, found in sums.items():
        expected = ClassChannelMoments.of(
            values[site], site.axis, torch.from_numpy(LABELS), CLASSES
        )
        assert found.classes.counts.tolist() == expected.counts.tolist()
        np.testing.assert_allclose(found.classes.means, expected.means, rtol=1e-4, atol=1e-5)
        shares = found.classes.variances / found.variance  # squares are float32
        np.testing.assert_allclose(shares, expected.variances / found.variance, atol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_covariances_are_measured_wherever_a_full_map_could_be(kind):
    """Inputs of BatchNorms included, but not where there is one position."""
    moments = statistics_of(kind).moments()
    values = activations(kind, moments)
    for site, found in moments.items():
        rows = values[site].movedim(site.axis, -1).flatten(0, -2).numpy()
        assert (found.covariance is None) == (values[site].ndim == 2)
        if found.covariance is not None:
            expected = np.cov(rows, rowvar=False, bias=True)
            np.testing.assert_allclose(found.covariance, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["batch", "vit"])
def test_classes_add_up_to_the_pooled_moments(kind):
    """Exactly, up to the float16 that a state stores."""
    for found in statistics_of(kind).moments().values():
        unit = np.sqrt(found.variance)
        pooled = found.classes.pooled()
        assert pooled.count == found.count == len(LABELS)
        np.testing.assert_allclose((pooled.mean - found.mean) / unit, 0, atol=1e-3)
        np.testing.assert_allclose(pooled.variance / found.variance, 1, atol=2e-3)
        exact = found.classes.shrunk(16.0).centred_on(found).pooled()
        np.testing.assert_allclose((exact.mean - found.mean) / unit, 0, atol=1e-9)
        np.testing.assert_allclose(exact.variance / found.variance, 1, rtol=1e-9)


def test_stored_classes_are_precise_to_a_thousandth_of_a_deviation():
    statistics = statistics_of("vit")
    for site, stored in statistics.moments().items():
        unit, exact = np.sqrt(stored.variance), statistics.sums[site].classes
        means, variances = exact.means.numpy(), exact.variances.numpy()
        sizes = np.abs(means - stored.mean) / unit
        assert (np.abs(stored.classes.means - means) / unit <= 2**-11 * sizes + 1e-5).all()
        deviations = np.sqrt(stored.classes.variances / variances)
        np.testing.assert_allclose(deviations, 1, atol=2**-11 + 1e-5)


def test_batches_do_not_matter():
    whole, parts = statistics_of(batch=120).sums, statistics_of(batch=7).sums
    for site, found in whole.items():
        for name in PARTS:
            one, other = getattr(found.classes, name), getattr(parts[site].classes, name)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_measuring_goes_on_from_earlier_sums():
    begun = statistics_of(rows=slice(0, 50)).sums
    resumed, whole = statistics_of(past=begun, rows=slice(50, None)).sums, statistics_of().sums
    for site, found in whole.items():
        for name in PARTS:
            one, other = getattr(found.classes, name), getattr(resumed[site].classes, name)
            assert torch.equal(one, other)


def test_classes_that_are_known_well_are_not_measured_again(monkeypatch):
    """The range of the images is that of all, and a class that comes late is measured."""
    monkeypatch.setattr(site_sums, "SAMPLES_PER_CLASS", 10)
    late = np.where(np.arange(120) < 100, np.arange(120) % 3, 3)
    whole = statistics_of(batch=20, labels=late)
    first = statistics_of(batch=20, labels=late, rows=slice(0, 40))
    for site, found in whole.sums.items():
        assert found.classes.counts.tolist() == [14, 13, 13, 20]
        assert first.sums[site].classes.counts.tolist() == [14, 13, 13]
    assert whole.input_range == (float(IMAGES.min()), float(IMAGES.max()))
    counts = np.bincount(late)
    for site, found in whole.moments(counts=counts).items():
        assert found.count == 120
        assert found.classes.counts.tolist() == counts.tolist()
        mixed = whole.sums[site].classes.mixture(torch.from_numpy(counts / 120))
        np.testing.assert_allclose(found.mean, mixed.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.variance, mixed.variance, rtol=1e-5)
        if found.covariance is not None:
            np.testing.assert_allclose(np.diag(found.covariance), found.variance, rtol=1e-4)


def test_classes_may_come_one_by_one_and_in_any_order():
    order = np.argsort(-LABELS, kind="stable")  # the last class first
    images, labels = IMAGES[order], LABELS[order]
    names = np.array(["d", "b", "a", "c"])
    by_class = [(images[labels == c], names[labels[labels == c]]) for c in range(3, -1, -1)]
    mixed = [(IMAGES, names[LABELS])]
    one, other = (
        caster.fit(problem.model("vit"), batches, classes=names).state
        for batches in (by_class, mixed)
    )
    assert one.classes.tolist() == other.classes.tolist() == ["a", "b", "c", "d"]
    for site, found in one.layers.items():
        assert found.classes.counts.tolist() == one.moments.counts.tolist()
        unit = np.sqrt(found.variance)
        step = (found.classes.means - other.layers[site].classes.means) / unit
        np.testing.assert_allclose(step, 0, atol=2e-3)


def test_the_shallowest_sites_go_without_classes(monkeypatch):
    """As classes come, and whether measured at once or in two runs."""
    widths = {site: len(found.mean) for site, found in statistics_of().sums.items()}
    assert list(widths.values()) == [8, 16, 16]
    room = CLASSES * 4 * (16 + 16)
    late = np.sort(LABELS)
    for extra, expected in ((0, [False, True, True]), (-1, [False, False, True])):
        monkeypatch.setattr(layer_arrays, "CLASS_BYTES", room + extra)
        begun = statistics_of(rows=slice(0, 40), labels=late).sums
        assert begun[next(iter(begun))].classes is not None  # of one class, or two
        resumed = statistics_of(past=begun, rows=slice(40, None), labels=late)
        for statistics in (statistics_of(), statistics_of(labels=late), resumed):
            found = statistics.moments()
            assert [moments.classes is not None for moments in found.values()] == expected


def test_a_first_axis_that_holds_no_samples_has_no_classes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x):  # (n, 3, 6)
            return self.head(self.norm(x.transpose(0, 1)).mean(0))

    statistics = ActivationStatistics(caster.wrap(Net()))
    statistics(torch.randn(5, 3, 6), np.array([0, 1, 0, 1, 1]))
    found = {str(site): moments.classes for site, moments in statistics.moments().items()}
    assert found["norm:in"] is None
    assert found["head:in"] is not None


@pytest.mark.parametrize("noise", [0.0, 1e-17, 1e-13])
def test_constant_channels_have_classes_like_the_whole(noise):
    """Whatever rounding makes of their variance."""
    values = np.full((6, 2), 0.1) * [1.0, 30.0]
    values[:, 1] += np.arange(6) % 2
    y = np.arange(6) % 2
    exact = ClassChannelMoments.of(values, 1, y, 2)
    pooled = ChannelMoments(6.0, *(np.float32(part) for part in ([0.1, 3.5], [noise, 0.25])))
    found = layer_arrays.round_classes(exact, pooled)
    np.testing.assert_allclose(found.means[:, 0], np.float32(0.1))
    np.testing.assert_allclose(found.variances[:, 0], noise)
    np.testing.assert_allclose(found.means[:, 1], [3.0, 4.0])
    np.testing.assert_allclose(found.variances[:, 1], 0, atol=1e-12)


def test_every_image_needs_a_label():
    with pytest.raises(caster.CasterError, match="a batch of 120 images has 119 labels"):
        caster.fit(problem.model("vit"), [(IMAGES, LABELS[1:])])


def test_moments_that_are_not_finite_are_rejected():
    sums = statistics_of("vit").sums
    site = next(iter(sums))
    sums[site].mean[0] = torch.inf
    with pytest.raises(caster.CasterError, match="not finite"):
        rounded(sums)
