"""The fused channel moments and maps compute what `caster.core.channels` defines."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caster.core import linalg
from caster.core.channels import ChannelMoments, Site, shrunk, to_source, to_source_full
from caster.core.class_moments import ClassChannelMoments
from caster.models import torch_channels
from caster.models.torch_channels import (
    FULL_MAP_EPS,
    FullToSource,
    blended,
    channels_second,
    map_channels,
    mapped_diagonal,
    measure,
    measure_full,
    merged,
    sample_moments,
    supports_full_map,
)

LAYOUTS = {  # memory layouts: how to get there from (n, 3, 4, 5), and the channel axis
    "channels first": (lambda x: x, 1),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), 1),
    "a window": (lambda x: torch.nn.functional.pad(x, (1, 1))[..., 1:-1], 1),
    "last axis": (lambda x: x.permute(0, 2, 3, 1).contiguous(), -1),
    "last axis, of a view": (lambda x: x.permute(0, 2, 3, 1), -1),
    "tokens": (lambda x: x.flatten(2).mT.contiguous(), -1),
    "tokens, of a view": (lambda x: x.flatten(2).mT, -1),
    "rows": (lambda x: x[:, :, 0, 0], -1),
}
SPATIAL = [name for name in LAYOUTS if name != "rows"]


def make_images(n, seed=0, dtype=torch.float64):
    x = torch.randn(n, 3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.tensor([1.0, 5.0, 0.1])[:, None, None] + 7).to(dtype)


def assert_same_moments(one, other, rtol=1e-11):
    assert one.count == other.count
    torch.testing.assert_close(
        torch.as_tensor(one.mean), torch.as_tensor(other.mean), rtol=rtol, atol=0
    )
    torch.testing.assert_close(
        torch.as_tensor(one.variance), torch.as_tensor(other.variance), rtol=rtol, atol=rtol
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 33])
def test_measure_agrees_with_core(layout, n):
    change, axis = LAYOUTS[layout]
    x = change(make_images(n))
    assert_same_moments(measure(x, axis, n), ChannelMoments.of(x, axis))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measuring_copies_nothing(layout):
    change, axis = LAYOUTS[layout]
    x = change(make_images(2))
    assert channels_second(x, axis).data_ptr() == x.data_ptr()
    assert channels_second(x, axis).shape[1] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_summed_in_float32(layout, dtype):
    """Summing two thousand values about 7 in half precision would be off by percents."""
    change, axis = LAYOUTS[layout]
    x = change(make_images(100, dtype=dtype))
    found = measure(x, axis, 100)
    assert found.mean.dtype == found.variance.dtype == torch.float32
    expected = ChannelMoments.of(x.double(), axis)
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance.double(), expected.variance, rtol=1e-4, atol=0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_merged_agrees_with_core(one, other, seed):
    past, batch = (measure(make_images(n, seed + n), 1, n) for n in (one, other))
    assert_same_moments(merged(past, batch), past + batch)


@given(st.integers(1, 40), st.floats(0, 500))
def test_blended_agrees_with_core(n, prior):
    target, source = measure(make_images(n), 1, n), measure(make_images(50, 1), 1, 50)
    assert_same_moments(blended(target, source, prior), shrunk(target, source, prior))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diagonal_map_agrees_with_core(layout):
    change, axis = LAYOUTS[layout]
    x = change(make_images(9))
    source = ChannelMoments(
        99.0, *torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, 9.0]], dtype=torch.float64)
    )
    target = measure(x, axis, 9)
    scale, shift = to_source(target, source, eps=0.01)
    expected = x.movedim(axis, -1) * scale + shift
    found = mapped_diagonal(x, target, source, 0.01, axis)
    torch.testing.assert_close(found.movedim(axis, -1), expected, rtol=1e-11, atol=1e-11)


def test_the_diagonal_map_keeps_half_precision():
    x = make_images(9, dtype=torch.bfloat16)
    source = ChannelMoments(9.0, torch.zeros(3), torch.ones(3))
    mapped = mapped_diagonal(x, measure(x, 1, 9), source, 1e-5, 1)
    assert mapped.dtype == torch.bfloat16
    found = ChannelMoments.of(mapped.double(), 1)
    np.testing.assert_allclose(found.mean, 0, atol=0.01)
    np.testing.assert_allclose(found.variance, 1, atol=0.02)


# --- moments of classes ----------------------------------------------------------------------


def measured_classes(x, axis, y, n_classes):
    origin = measure(x, axis, len(y)).mean
    return ClassChannelMoments.of_samples(*sample_moments(x, axis, len(y), origin), y, n_classes)


def assert_same_classes(one, other, rtol=1e-11):
    assert one.counts.tolist() == other.counts.tolist()
    torch.testing.assert_close(one.means, other.means, rtol=rtol, atol=0)
    torch.testing.assert_close(one.variances, other.variances, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 33])
def test_class_moments_agree_with_core(layout, n):
    change, axis = LAYOUTS[layout]
    x, y = change(make_images(n)), torch.arange(n) % 5
    assert_same_classes(measured_classes(x, axis, y, 5), ClassChannelMoments.of(x, axis, y, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_class_moments_in_lower_precision(layout, dtype):
    change, axis = LAYOUTS[layout]
    x, y = change(make_images(100, dtype=dtype)), torch.arange(100) % 5
    found = measured_classes(x, axis, y, 5)
    assert found.means.dtype == found.variances.dtype == torch.float64
    assert_same_classes(found, ClassChannelMoments.of(x.double(), axis, y, 5), rtol=1e-5)


def test_a_large_offset_costs_class_moments_no_digits():
    x, y = make_images(20), torch.arange(20) % 3
    found = measured_classes((x + 4096).float(), 1, y, 3)
    expected = ClassChannelMoments.of((x + 4096).float().double(), 1, y, 3)
    torch.testing.assert_close(found.variances, expected.variances, rtol=1e-5, atol=0)


def test_windows_belong_to_their_images():
    x, y = make_images(6), torch.tensor([0, 1, 0, 1, 1, 1])
    windows = x.unflatten(2, (2, 2)).movedim(2, 1).flatten(0, 1)  # (12, 3, 2, 5), by image
    assert_same_classes(measured_classes(windows, 1, y, 2), ClassChannelMoments.of(x, 1, y, 2))


def test_no_sample_moments_if_the_first_axis_holds_no_samples():
    x = make_images(5)
    assert sample_moments(x, 1, 4, torch.zeros(3)) is None


# --- full maps -------------------------------------------------------------------------------


def mixed(n, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(n, 3, 4, 5, generator=generator, dtype=torch.float64)
    return (torch.einsum("dc,nchw->ndhw", mixing, x) + 7).to(dtype)


@pytest.mark.parametrize("layout", SPATIAL)
def test_measure_full_agrees_with_core(layout):
    change, axis = LAYOUTS[layout]
    x = change(mixed(9, 0))
    expected = ChannelMoments.of(x, axis, full=True)
    found = measure_full(x, axis, 9)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", SPATIAL)
def test_full_map_agrees_with_core(layout):
    change, axis = LAYOUTS[layout]
    x = change(mixed(9, 0))
    source, target = measure_full(mixed(30, 1), 1, 30), measure_full(x, axis, 9)
    A, b = to_source_full(target, source, FULL_MAP_EPS * float(source.variance.mean()))
    mapped = FullToSource(source)(x, target, axis)
    assert mapped.shape == x.shape
    expected = x.movedim(axis, -1) @ A.T + b
    torch.testing.assert_close(mapped.movedim(axis, -1), expected, rtol=1e-9, atol=1e-9)


def test_full_maps_keep_channels_last():
    x = mixed(9, 0).contiguous(memory_format=torch.channels_last)
    moments = measure_full(x, 1, 9)
    mapped = FullToSource(moments)(x, moments, 1)
    assert mapped.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mapped, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_maps_in_lower_precision(dtype):
    x, source = mixed(9, 0, dtype), measure_full(mixed(30, 1, torch.float32), 1, 30)
    mapped = FullToSource(source)(x, measure_full(x, 1, 9), 1)
    assert mapped.dtype == dtype
    wide = measure_full(x.double(), 1, 9)
    expected = FullToSource(measure_full(mixed(30, 1, torch.float32).double(), 1, 30))
    error = (mapped.double() - expected(x.double(), wide, 1)).abs().max() / mapped.abs().max()
    assert error < (1e-4 if dtype == torch.float32 else 0.01)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1, 500))
def test_merged_includes_the_covariance(one, other, memory):
    past, batch = measure_full(mixed(one, 0), 1, one), measure_full(mixed(other, 1), 1, other)
    found, expected = merged(past.at_most(memory), batch), past.at_most(memory) + batch
    assert_same_moments(found, expected)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.covariance.diagonal(), found.variance)


def test_merged_has_a_covariance_only_if_both_have():
    full, plain = measure_full(mixed(9, 0), 1, 9), measure(mixed(5, 1), 1, 5)
    assert merged(full, plain).covariance is merged(plain, full).covariance is None


def test_merging_leaves_the_past_as_it_was():
    """A batch may be rejected after it was merged."""
    past, batch = (measure_full(mixed(9, seed), 1, 9) for seed in range(2))
    parts = past.mean, past.variance, past.covariance
    before = [part.clone() for part in parts]
    merged(past, batch)
    assert all(map(torch.equal, parts, before))


def test_blended_includes_the_covariance():
    target, source = measure_full(mixed(9, 0), 1, 8), measure_full(mixed(30, 1), 1, 30)
    found = blended(target, source, 24.0).covariance
    torch.testing.assert_close(found, 0.25 * target.covariance + 0.75 * source.covariance)
    torch.testing.assert_close(found, shrunk(target, source, 24.0).covariance)


def test_failed_roots_fall_back_to_the_diagonal_map(monkeypatch):
    monkeypatch.setattr(linalg, "on_gpu", lambda array: True)
    monkeypatch.setattr(linalg, "LARGEST_CONDITION", 1.1)  # hardly any matrix passes
    source = measure_full(mixed(30, 1), 1, 30)
    with monkeypatch.context() as patch:
        patch.setattr(linalg, "on_gpu", lambda array: False)
        move = FullToSource(source)
    x = mixed(9, 0)
    target = measure_full(x, 1, 9)
    eps = FULL_MAP_EPS * source.variance.mean()
    scale = ((source.variance + eps) / (target.variance + eps)).sqrt()[:, None, None]
    expected = (x - target.mean[:, None, None]) * scale + source.mean[:, None, None]
    torch.testing.assert_close(move(x, target, 1), expected)


def test_gpu_roots_give_the_same_map_as_an_eigendecomposition(monkeypatch):
    source, x = measure_full(mixed(30, 1), 1, 30), mixed(9, 0)
    target = measure_full(x, 1, 9)
    expected = FullToSource(source)(x, target, 1)
    monkeypatch.setattr(linalg, "on_gpu", lambda array: True)
    torch.testing.assert_close(FullToSource(source)(x, target, 1), expected, rtol=1e-6, atol=1e-6)


def test_which_sites_support_a_full_map():
    assert supports_full_map(torch.zeros(2, 128, 4, 4), 1)
    assert not supports_full_map(torch.zeros(2, 129, 4, 4), 1)
    assert supports_full_map(torch.zeros(2, 9, 128), -1)
    assert not supports_full_map(torch.zeros(2, 16), -1)  # a classifier's input


def test_a_full_map_in_other_units_is_that_of_the_scaled_values():
    """D^-1 A D for values times D; a channel of unit 0 is left alone and moves no other."""
    rng = np.random.default_rng(5)
    source, target = (rng.normal(size=(60, 4, 3)) @ rng.normal(size=(3, 3)) for _ in range(2))
    unit = np.array([2.0, -0.5, 0.0, 1.0])
    live = unit != 0
    measured = [measure_full(torch.from_numpy(x), 1, 60) for x in (source, target)]
    found = FullToSource(measured[0], torch.from_numpy(unit))(
        torch.from_numpy(target), measured[1], axis=1
    )
    scaled = [ChannelMoments.of(unit[:, None] * x, 1, full=True) for x in (target, source)]
    A, b = to_source_full(*scaled, FULL_MAP_EPS * scaled[1].variance.mean())
    expected = np.einsum("dc,ncp->ndp", A, unit[:, None] * target) + b[:, None]
    np.testing.assert_allclose(unit[:, None] * found.numpy(), expected, rtol=1e-6, atol=1e-6)
    shift = (measured[0].mean - measured[1].mean).numpy()[~live]
    np.testing.assert_allclose(found.numpy()[:, ~live], target[:, ~live] + shift, atol=1e-9)


MAPPED = {  # memory layouts of sixteen channels: where they come from, and their site
    "tokens": ((3, 5, 16), Site("0", "out", -1)),
    "added tokens": ((3, 5, 16), Site("0", "out", -1, prefix_tokens=2)),
    "channels last": ((3, 4, 5, 16), Site("0", "out", 1)),
    "rows": ((7, 16), Site("0", "in", -1)),
}
OTHERS = {
    "channels first": ((3, 16, 4, 5), Site("0", "out", 1)),
    "channels before tokens": ((3, 16, 5), Site("0", "out", 1)),
    "nine channels": ((3, 5, 9), Site("0", "out", -1)),
}


def map_problem(layout, dtype=torch.float32):
    shape, site = {**MAPPED, **OTHERS}[layout]
    rng = np.random.default_rng(3)
    values = torch.from_numpy(rng.normal(size=shape)).to(dtype)
    values = values.movedim(-1, 1) if layout == "channels last" else values
    scale, shift = rng.normal(size=(2, values.shape[site.axis])).astype(np.float32)
    x = np.moveaxis(values.double().numpy(), site.axis, -1)
    expected = np.moveaxis(x * scale + shift, -1, site.axis).copy()
    expected[:, : site.prefix_tokens] = values.double().numpy()[:, : site.prefix_tokens]
    return values, torch.from_numpy(scale), torch.from_numpy(shift), site, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [*MAPPED, *OTHERS])
def test_maps_of_channels_in_place_and_beside(layout, dtype):
    *problem, expected = map_problem(layout, dtype)
    values = problem[0]
    out = torch.empty_like(values)
    map_channels(*problem, out=out)
    map_channels(*problem, out=values)
    assert torch.equal(out, values)
    close = 1e-6 if dtype == torch.float32 else 0.02
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=close, atol=close)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("layout", [*MAPPED, *OTHERS])
def test_the_kernel_maps_channels(monkeypatch, layout):
    """On a GPU or, without one, by Triton's interpreter."""
    *problem, expected = map_problem(layout)
    if torch.cuda.is_available():
        problem = [part if isinstance(part, Site) else part.cuda() for part in problem]
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(torch_channels, "on_gpu", lambda values: True)
    if layout in MAPPED:
        monkeypatch.setattr(torch, "addcmul", lambda *_, **__: pytest.fail("mapped by torch"))
    out = torch.empty_like(problem[0])
    map_channels(*problem, out=out)
    map_channels(*problem, out=problem[0])
    assert torch.equal(out, problem[0])
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert not torch_channels._without_kernel


def test_a_kernel_that_cannot_be_compiled_is_tried_once(monkeypatch, caplog):
    def failing(*args):
        calls.append(args)
        raise RuntimeError("no compiler")

    calls = []
    kernels = SimpleNamespace(map_rows=failing)
    monkeypatch.setitem(sys.modules, "caster.models.triton_kernels", kernels)
    monkeypatch.setattr(torch_channels, "on_gpu", lambda values: True)
    monkeypatch.setattr(torch_channels, "_without_kernel", set())
    *problem, expected = map_problem("added tokens")
    for _ in range(2):
        out = torch.empty_like(problem[0])
        map_channels(*problem, out=out)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert len(calls) == 1
    assert "no compiler" in caplog.text
