"""Full maps at work on a module's values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster.core import linalg
from caster.core.channels import ChannelMoments, shrunk, to_source_full
from caster.models import full_maps
from caster.models.full_maps import FullToSource, has_full_map, measure_full
from caster.models.torch_channels import blended
from tests.models.test_channels import LAYOUTS

SPATIAL = [name for name in LAYOUTS if name != "rows"]


def mixed(n, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(n, 3, 4, 5, generator=generator, dtype=torch.float64)
    return (torch.einsum("dc,nchw->ndhw", turn, x) + 7).to(dtype)


@pytest.mark.parametrize("layout", SPATIAL)
def test_measuring_is_cores(layout):
    change, axis = LAYOUTS[layout]
    x = change(mixed(9, 0))
    expected = ChannelMoments.of(x, axis, full=True)
    found = measure_full(x, axis, 9)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", SPATIAL)
def test_moving_is_cores(layout):
    change, axis = LAYOUTS[layout]
    x = change(mixed(9, 0))
    source, target = measure_full(mixed(30, 1), 1, 30), measure_full(x, axis, 9)
    A, b = to_source_full(target, source, full_maps.EPS * float(source.variance.mean()))
    moved = FullToSource(source)(x, target, axis)
    assert moved.shape == x.shape
    expected = x.movedim(axis, -1) @ A.T + b
    torch.testing.assert_close(moved.movedim(axis, -1), expected, rtol=1e-9, atol=1e-9)


def test_channels_last_stay_so():
    x = mixed(9, 0).contiguous(memory_format=torch.channels_last)
    moments = measure_full(x, 1, 9)
    moved = FullToSource(moments)(x, moments, 1)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(moved, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    x, source = mixed(9, 0, dtype), measure_full(mixed(30, 1, torch.float32), 1, 30)
    moved = FullToSource(source)(x, measure_full(x, 1, 9), 1)
    assert moved.dtype == dtype
    wide = measure_full(x.double(), 1, 9)
    expected = FullToSource(measure_full(mixed(30, 1, torch.float32).double(), 1, 30))
    apart = (moved.double() - expected(x.double(), wide, 1)).abs().max() / moved.abs().max()
    assert apart < (1e-4 if dtype == torch.float32 else 0.01)


def test_blending_takes_the_covariance_along():
    target, source = measure_full(mixed(9, 0), 1, 8), measure_full(mixed(30, 1), 1, 30)
    found = blended(target, source, 24.0).covariance
    torch.testing.assert_close(found, 0.25 * target.covariance + 0.75 * source.covariance)
    torch.testing.assert_close(found, shrunk(target, source, 24.0).covariance)


def test_roots_that_are_not_to_be_had_give_the_diagonal_map(monkeypatch):
    monkeypatch.setattr(linalg, "on_gpu", lambda array: True)
    monkeypatch.setattr(linalg, "LARGEST_CONDITION", 1.1)  # which hardly a matrix has
    source = measure_full(mixed(30, 1), 1, 30)
    with monkeypatch.context() as patch:
        patch.setattr(linalg, "on_gpu", lambda array: False)
        move = FullToSource(source)
    x = mixed(9, 0)
    target = measure_full(x, 1, 9)
    eps = full_maps.EPS * source.variance.mean()
    scale = ((source.variance + eps) / (target.variance + eps)).sqrt()[:, None, None]
    expected = (x - target.mean[:, None, None]) * scale + source.mean[:, None, None]
    torch.testing.assert_close(move(x, target, 1), expected)


def test_products_find_the_same_map_as_an_eigendecomposition(monkeypatch):
    source, x = measure_full(mixed(30, 1), 1, 30), mixed(9, 0)
    target = measure_full(x, 1, 9)
    expected = FullToSource(source)(x, target, 1)
    monkeypatch.setattr(linalg, "on_gpu", lambda array: True)
    torch.testing.assert_close(FullToSource(source)(x, target, 1), expected, rtol=1e-6, atol=1e-6)


def test_which_sites_have_one():
    assert has_full_map(torch.zeros(2, 128, 4, 4), 1)
    assert not has_full_map(torch.zeros(2, 129, 4, 4), 1)
    assert has_full_map(torch.zeros(2, 9, 128), -1)
    assert not has_full_map(torch.zeros(2, 16), -1)  # a classifier's input
    assert np.isfinite(full_maps.ROWS)
