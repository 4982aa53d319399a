"""Fast torch implementations of channel moments and of maps to the source's moments.

`caster.core.channels` defines the equations. This module evaluates them at every site of every
pass. On a GPU, kernel launches cost more than the arithmetic, so diagonal maps use torch's fused
BatchNorm kernels, mostly in one launch. Full maps use the whole covariance of a site. They are for
sites with few channels and many positions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from caster.core.channels import FULL_MAP_CHANNELS, FULL_MAP_EPS, ChannelMoments, Site, optimal_map
from caster.core.class_moments import ClassChannelMoments
from caster.core.linalg import identity_like, on_gpu, symmetric_roots
from caster.models.protocol import error_line

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # supported by our Triton kernel
CHUNK = 2**22  # half-precision activations that a full map widens at a time, to save memory

log = logging.getLogger("caster")

_without_kernel: set[torch.device] = set()  # devices on which the Triton kernel failed


def as_tensors(moments: ChannelMoments, like: Tensor | torch.device) -> ChannelMoments:
    """Convert moments to tensors on a device, or to the device and dtype of another tensor.

    Class moments are dropped; `class_tensors` converts those.

    >>> as_tensors(ChannelMoments(2.0, [1.0], [2.0]), torch.zeros(0, dtype=torch.float64)).mean
    tensor([1.], dtype=torch.float64)
    """
    return all_tensors(replace(moments, classes=None), like)


def class_tensors(classes: ClassChannelMoments, like: Tensor | torch.device) -> ClassChannelMoments:
    """Convert class moments to tensors, like `as_tensors`.

    >>> class_tensors(ClassChannelMoments([2.0], [[1.0]], [[3.0]]), torch.device("cpu")).means
    tensor([[1.]])
    """
    return classes.map(lambda part: torch.as_tensor(part).to(like))


def on_device(moments: ChannelMoments, device: torch.device) -> ChannelMoments:
    """Convert moments to tensors for alignment, with class moments left on the host.

    The class moments of a thousand classes take several hundred MiB, and a stream with the source's
    class mixture never reads them. For a GPU they are in single precision.
    """
    found, classes = as_tensors(moments, device), moments.classes
    if classes is not None:
        host = torch.device("cpu")
        classes = class_tensors(classes, host if device.type == "cpu" else torch.empty(0))
    return replace(found, classes=classes)


def all_tensors(moments: ChannelMoments, like: Tensor | torch.device) -> ChannelMoments:
    """Convert moments to tensors, including class moments."""
    return moments.map(lambda part: torch.as_tensor(part).to(like))


# --- moments -------------------------------------------------------------------------------------


def on_grid(site: Site, values: Tensor) -> Tensor:
    """Apply `Site.on_grid` and preserve the memory format."""
    picked: Tensor = site.on_grid(values)
    if picked is values or values.ndim != 4:
        return picked
    last = values.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return picked.contiguous(memory_format=layout)


def measure(values: Tensor, axis: int, samples: int) -> ChannelMoments:
    """Compute `ChannelMoments.of` for this many samples, in float32 or wider.

    >>> found = measure(torch.tensor([[1.0], [3.0]]), 1, samples=2)
    >>> found.mean, found.variance
    (tensor([2.]), tensor([1.]))
    """
    view = channels_second(values, axis)
    # A GPU accumulates half precision in float32. A CPU does so only if it updates float32
    # running statistics.
    half = values.dtype in (torch.float16, torch.bfloat16) and not values.is_cuda
    spare = values.new_zeros(2, view.shape[1], dtype=torch.float32) if half else (None, None)
    mean, variance = torch.batch_norm_update_stats(view, spare[0], spare[1], 0.0)
    return ChannelMoments(float(samples), mean, variance)


def measure_full(values: Tensor, axis: int, samples: int) -> ChannelMoments:
    """Compute `ChannelMoments.of` with the covariance, in float32 or wider.

    >>> found = measure_full(torch.tensor([[[1.0, 3.0], [0.0, 4.0]]]), 1, samples=1)
    >>> found.covariance
    tensor([[1., 2.],
            [2., 4.]])
    """
    found = measure(values, axis, samples)
    view = channels_second(values, axis)
    if view.ndim == 2:
        rows = view.to(found.mean.dtype) - found.mean
        products = rows.T @ rows
    else:  # sample by sample, because moving the channels of all samples innermost is a slow copy
        rows = view.flatten(2).to(found.mean.dtype) - found.mean[:, None]
        products = torch.bmm(rows, rows.mT).sum(0)
    return replace(found, covariance=products / (values.numel() // len(found.mean)))


def sample_moments(
    values: Tensor,  # (n, ...)
    axis: int,
    samples: int,
    origin: Tensor,  # (c,), about the mean of all samples, in float32 or wider
) -> tuple[Tensor, Tensor] | None:  # (n, c), (n, c)
    """Channel means and variances of each sample, for `ClassChannelMoments.of_samples`.

    They are computed from the mean and mean square of x - `origin`, in float64 from there on,
    because torch's own variance of many short rows is several times slower on a CPU. None if the
    size of the first axis is not a multiple of the number of samples. It may hold each sample
    several times, as when images are split into windows.

    >>> sample_moments(torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]]), 1, 2, torch.tensor([3.5]))
    (tensor([[2.],
            [5.]], dtype=torch.float64), tensor([[1.],
            [0.]], dtype=torch.float64))
    """
    if values.shape[0] % samples:
        return None
    parts = values.reshape(samples, -1, *values.shape[1:])
    channels = axis % values.ndim + 1
    others = [i for i in range(1, parts.ndim) if i != channels]
    steps = parts - origin.view([-1 if i == channels else 1 for i in range(parts.ndim)])
    first = steps.mean(others).double()
    second = steps.square_().mean(others).double()
    return origin.double() + first, (second - first**2).clamp(min=0)


def supports_full_map(values: Tensor, axis: int) -> bool:
    """Whether a site can have a full map: few channels, and more than one position."""
    return values.ndim > 2 and values.shape[axis] <= FULL_MAP_CHANNELS


def merged(past: ChannelMoments, batch: ChannelMoments) -> ChannelMoments:
    """Merge the moments of two sets of samples, with a covariance if both have one.

    >>> one, other = (measure(torch.tensor(x)[:, None], 1, len(x)) for x in ([1.0, 3.0], [5.0]))
    >>> both = merged(one, other)
    >>> both.count, both.mean, both.variance * 3
    (3.0, tensor([3.]), tensor([8.]))
    """
    count = past.count + batch.count
    share = batch.count / count
    mean, variance = _interpolated(past, batch, share)
    step, between = batch.mean - past.mean, share * (1 - share)
    variance.addcmul_(step, step, value=between)
    if past.covariance is None or batch.covariance is None:
        return ChannelMoments(count, mean, variance)
    covariance = torch.lerp(past.covariance, batch.covariance, share)
    return ChannelMoments(count, mean, variance, covariance.addr_(step, step, alpha=between))


def blended(target: ChannelMoments, source: ChannelMoments, prior: float) -> ChannelMoments:
    """Shrink the target's moments towards the source's by `prior` samples, as `shrunk` does.

    >>> source = ChannelMoments(9.0, torch.zeros(1), torch.ones(1))
    >>> blended(ChannelMoments(8.0, torch.tensor([4.0]), torch.tensor([3.0])), source, 8.0).mean
    tensor([2.])
    """
    count = prior + target.count
    share = target.count / count
    moments = ChannelMoments(count, *_interpolated(source, target, share))
    if target.covariance is None or source.covariance is None:
        return moments
    return replace(moments, covariance=torch.lerp(source.covariance, target.covariance, share))


def _interpolated(one: ChannelMoments, other: ChannelMoments, share: float) -> tuple[Tensor, ...]:
    ends = [one.mean, one.variance], [other.mean, other.variance]
    return torch._foreach_lerp(*ends, share)


# --- maps ----------------------------------------------------------------------------------------


def mapped_diagonal(
    values: Tensor, target: ChannelMoments, source: ChannelMoments, eps: float | Tensor, axis: int
) -> Tensor:
    """Map each channel from the target's to the source's moments, as `to_source` does.

    This is one BatchNorm kernel, with the target's moments as running statistics and the source's
    as affine weights.

    >>> source = ChannelMoments(9.0, torch.tensor([1.0]), torch.tensor([4.0]))
    >>> target = ChannelMoments(9.0, torch.tensor([5.0]), torch.tensor([1.0]))
    >>> mapped_diagonal(torch.tensor([[5.0], [6.0]]), target, source, 0.0, axis=1)
    tensor([[1.],
            [3.]])
    """
    view = channels_second(values, axis)
    mapped = functional.batch_norm(
        view,
        target.mean,
        target.variance + eps,
        weight=(source.variance + eps).sqrt(),
        bias=source.mean,
        eps=1e-30,  # the variance includes eps already, and batch_norm rejects 0
    )
    return _in_layout_of(values, view, mapped)


def map_channels(
    values: Tensor,
    scale: Tensor,  # (c,)
    shift: Tensor,  # (c,)
    site: Site,
    out: Tensor,  # in the layout of the values; may be `values` itself
) -> None:
    """Write the per-channel affine map scale x + shift to `out`; prefix tokens stay unchanged.

    >>> x = torch.tensor([[[1.0], [2.0]]])
    >>> map_channels(x, torch.tensor([3.0]), torch.tensor([4.0]), Site("0", "out", -1, 1), out=x)
    >>> x
    tensor([[[ 1.],
             [10.]]])
    """
    if _mapped_by_kernel(values, scale, shift, site, out):
        return
    shape = [-1] + [1] * (values.ndim - 2 if site.axis == 1 else 0)
    scale, shift = scale.view(shape), shift.view(shape)
    # addcmul writes half-precision output directly, without a float32 copy.
    if out is values:
        own = site.patch_values(values)
        torch.addcmul(shift, own, scale, out=own)
        return
    torch.addcmul(shift, values, scale, out=out)
    if site.prefix_tokens:
        out[:, : site.prefix_tokens] = values[:, : site.prefix_tokens]


def _mapped_by_kernel(
    values: Tensor, scale: Tensor, shift: Tensor, site: Site, out: Tensor
) -> bool:
    """Run `map_channels` as one kernel; return False, writing nothing, if that is unsupported."""
    if torch.compiler.is_compiling() or not on_gpu(values) or values.device in _without_kernel:
        return False  # torch.compile fuses the map with the preceding layer itself
    nhwc = site.axis == 1 and values.ndim == 4
    layout = torch.channels_last if nhwc else torch.contiguous_format
    known = values.dtype in KERNEL_DTYPES and scale.dtype == torch.float32 and len(scale) % 16 == 0
    innermost = site.axis == -1 or values.ndim in (2, 4)
    if not (known and innermost and values.is_contiguous(memory_format=layout)):
        return False
    try:
        from caster.models.triton_kernels import map_rows

        with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
            map_rows(
                values,
                scale,
                shift,
                values.shape[1] if site.prefix_tokens else 1,
                site.prefix_tokens,
                out,
            )
    except Exception as error:  # the Triton compiler may raise anything
        _without_kernel.add(values.device)
        level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
        log.log(level, "mapping channels with torch: %s", error_line(error))
        return False
    return True


def mapped_full(values: Tensor, A: Tensor, b: Tensor, axis: int) -> Tensor:  # (c, c), (c,)
    """Map the channel vector x of every position to A x + b.

    >>> A, b = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1.0, 0.0])
    >>> mapped_full(torch.tensor([[3.0, 4.0]]), A, b, axis=1)
    tensor([[9., 3.]])
    """
    chunks = math.ceil(values.numel() / CHUNK)
    if values.dtype != A.dtype and min(chunks, len(values)) > 1:
        mapped = torch.empty_like(values)
        for chunk, own in zip(mapped.chunk(chunks), values.chunk(chunks), strict=True):
            chunk.copy_(mapped_full(own, A, b, axis))
        return mapped
    view = channels_second(values, axis)
    rows = view.movedim(1, -1)
    if rows.is_contiguous():
        mapped = torch.addmm(b, rows.view(-1, len(b)).to(A.dtype), A.T).view(rows.shape)
        mapped = mapped.movedim(-1, 1)
    else:
        flat = view.flatten(2).to(A.dtype)
        mapped = torch.baddbmm(b[:, None], A.expand(len(flat), -1, -1), flat).view(view.shape)
    return _in_layout_of(values, view, mapped.to(values.dtype))


class FullToSource:
    """The full map of one site from the target's to the source's moments (`to_source_full`).

    With `unit`, the map is computed for channels scaled by these factors, and channels with factor
    0 are left unchanged.

    >>> source = measure_full(torch.tensor([[[1.0, 3.0, 5.0], [0.0, 4.0, 2.0]]]), 1, samples=1)
    >>> x = torch.tensor([[[1.0, -1.0, 2.0], [3.0, 3.0, 9.0]]])
    >>> mapped = FullToSource(source)(x, measure_full(x, 1, samples=1), axis=1)
    >>> found = measure_full(mapped, 1, samples=1)
    >>> bool((found.covariance - source.covariance).abs().max() < 0.02)  # up to FULL_MAP_EPS
    True
    """

    def __init__(self, source: ChannelMoments, unit: Tensor | None = None) -> None:  # (c,)
        assert source.covariance is not None
        self.source = source
        known = torch.ones_like(source.mean) if unit is None else unit.to(source.mean)
        self._unit = known.double()
        covariance = self._in_units(source.covariance)
        self._eps = FULL_MAP_EPS * covariance.diagonal().mean()
        covariance = _regularised(covariance, self._eps)
        self._variance = covariance.diagonal()
        self._root, _ = symmetric_roots(covariance, 0.0)

    def map(self, target: ChannelMoments) -> tuple[Tensor, Tensor]:  # (c, c), (c,)
        """Find A and b that map the target's moments to the source's."""
        C_t = self._covariance(target)
        return self._of_values(optimal_map(C_t, self._root), C_t, target)

    def _covariance(self, target: ChannelMoments) -> Tensor:  # (c, c)
        assert target.covariance is not None
        return _regularised(self._in_units(target.covariance), self._eps)

    def _of_values(
        self, A: Tensor, C_t: Tensor, target: ChannelMoments
    ) -> tuple[Tensor, Tensor]:  # (c, c), (c,)
        # On a GPU, matrix roots do not synchronise and return NaN on failure: fall back to the
        # diagonal map.
        diagonal = (self._variance / C_t.diagonal()).sqrt().diag()
        A = torch.where(A.isfinite().all(), A, diagonal)
        A = self._in_own_units(A).to(target.mean.dtype)
        return A, self.source.mean - A @ target.mean

    @classmethod
    def maps(
        cls, several: Sequence[tuple[Self, ChannelMoments]]
    ) -> list[tuple[Tensor, Tensor]]:  # (c, c), (c,)
        """Find the maps of several sites; a GPU batches the roots of sites of equal width."""
        widths: dict[int, list[int]] = {}
        for at, (_, target) in enumerate(several):
            alone = -1 - at  # batching does not pay off on a CPU
            widths.setdefault(len(target.mean) if target.mean.is_cuda else alone, []).append(at)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for members in widths.values():
            if len(members) == 1:
                own, target = several[members[0]]
                found[members[0]] = own.map(target)
                continue
            C_t = torch.stack([several[at][0]._covariance(several[at][1]) for at in members])
            A = optimal_map(C_t, torch.stack([several[at][0]._root for at in members]))
            for at, one, covariance in zip(members, A, C_t, strict=True):
                own, target = several[at]
                found[at] = own._of_values(one, covariance, target)
        return [found[at] for at in range(len(several))]

    def __call__(self, values: Tensor, target: ChannelMoments, axis: int) -> Tensor:
        """Map activations with the target's moments to the source's moments."""
        return mapped_full(values, *self.map(target), axis)

    def _in_units(self, covariance: Tensor) -> Tensor:  # (c, c)
        return self._unit[:, None] * covariance * self._unit

    def _in_own_units(self, A: Tensor) -> Tensor:  # (c, c)
        """Undo the scaling by the units: D^-1 A D."""
        dead = self._unit == 0
        A = A * self._unit / torch.where(dead, 1.0, self._unit)[:, None]
        return torch.where(dead[:, None], identity_like(A), A)


def _regularised(covariance: Tensor, eps: Tensor) -> Tensor:
    """Widen a covariance to float64 and add eps to its eigenvalues."""
    wide = covariance.double()
    regularised: Tensor = wide + eps * identity_like(wide)
    return regularised


# --- layouts -------------------------------------------------------------------------------------


def channels_second(values: Tensor, axis: int) -> Tensor:  # (n, ...) -> (m, c) or (n, c, ...)
    """View activations with the channels on the second axis, without copying.

    >>> channels_second(torch.zeros(2, 5, 5, 3), -1).shape
    torch.Size([50, 3])
    """
    if axis % values.ndim == 1:
        return values
    if values.is_contiguous():
        return values.view(-1, values.shape[-1])
    return values.movedim(-1, 1)


def _in_layout_of(values: Tensor, view: Tensor, mapped: Tensor) -> Tensor:
    """Undo `channels_second`: give `mapped`, computed from its `view`, the layout of `values`."""
    if view.ndim < values.ndim:
        return mapped.view(values.shape)
    return mapped if view is values else mapped.movedim(1, -1)
