"""The fast arithmetic of channels does what core says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caster.core.channels import ChannelMoments, shrunk, to_source
from caster.models.torch_channels import ToSource, blended, by_channel, measure, merged

LAYOUTS = {  # every way values lie in memory: how (n, 3, 4, 5) becomes them, and their axis
    "channels first": (lambda x: x, 1),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), 1),
    "a window": (lambda x: torch.nn.functional.pad(x, (1, 1))[..., 1:-1], 1),
    "last axis": (lambda x: x.permute(0, 2, 3, 1).contiguous(), -1),
    "last axis, of a view": (lambda x: x.permute(0, 2, 3, 1), -1),
    "tokens": (lambda x: x.flatten(2).mT.contiguous(), -1),
    "tokens, of a view": (lambda x: x.flatten(2).mT, -1),
    "rows": (lambda x: x[:, :, 0, 0], -1),
}


def make_images(n, seed=0, dtype=torch.float64):
    x = torch.randn(n, 3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.tensor([1.0, 5.0, 0.1])[:, None, None] + 7).to(dtype)


def alike(one, other, rtol=1e-11):
    assert one.count == other.count
    torch.testing.assert_close(
        torch.as_tensor(one.mean), torch.as_tensor(other.mean), rtol=rtol, atol=0
    )
    torch.testing.assert_close(
        torch.as_tensor(one.variance), torch.as_tensor(other.variance), rtol=rtol, atol=rtol
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 33])
def test_measuring_is_cores(layout, n):
    change, axis = LAYOUTS[layout]
    x = change(make_images(n))
    alike(measure(x, axis, n), ChannelMoments.of(x, axis))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied_to_measure(layout):
    change, axis = LAYOUTS[layout]
    x = change(make_images(2))
    assert by_channel(x, axis).data_ptr() == x.data_ptr()
    assert by_channel(x, axis).shape[1] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_adds_up_in_full(layout, dtype):
    """Two thousand halves about 7 cannot be added up in halves: the error would be percents."""
    change, axis = LAYOUTS[layout]
    x = change(make_images(100, dtype=dtype))
    found = measure(x, axis, 100)
    assert found.mean.dtype == found.variance.dtype == torch.float32
    expected = ChannelMoments.of(x.double(), axis)
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance.double(), expected.variance, rtol=1e-4, atol=0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_merging_is_cores(one, other, seed):
    past, batch = (measure(make_images(n, seed + n), 1, n) for n in (one, other))
    alike(merged(past, batch), past + batch)


@given(st.integers(1, 40), st.floats(0, 500))
def test_blending_is_cores(n, prior):
    target, source = measure(make_images(n), 1, n), measure(make_images(50, 1), 1, 50)
    alike(blended(target, source, prior), shrunk(target, source, prior))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moving_is_cores(layout):
    change, axis = LAYOUTS[layout]
    x = change(make_images(9))
    source = ChannelMoments(
        99.0, *torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, 9.0]], dtype=torch.float64)
    )
    target = measure(x, axis, 9)
    scale, shift = to_source(target, source, eps=0.01)
    expected = x.movedim(axis, -1) * scale + shift
    moved = ToSource(source, 0.01)(x, target, axis)
    torch.testing.assert_close(moved.movedim(axis, -1), expected, rtol=1e-11, atol=1e-11)


def test_halves_are_moved_as_they_are():
    x = make_images(9, dtype=torch.bfloat16)
    source = ChannelMoments(9.0, torch.zeros(3), torch.ones(3))
    moved = ToSource(source, 1e-5)(x, measure(x, 1, 9), 1)
    assert moved.dtype == torch.bfloat16
    found = ChannelMoments.of(moved.double(), 1)
    np.testing.assert_allclose(found.mean, 0, atol=0.01)
    np.testing.assert_allclose(found.variance, 1, atol=0.02)
