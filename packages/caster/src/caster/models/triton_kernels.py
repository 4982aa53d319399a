"""Custom Triton kernels. Importing this module requires Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PANELS = 4  # of a covariance's columns: `_scores` is written out for exactly four
VALUES = 2048  # activations per program of the mapping kernel


@triton.jit  # type: ignore[untyped-decorator]
def _tile(z, means, covariances, ridge, c, B, k, panel, K: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """A panel of columns of the class's covariance, over the same columns of centred samples."""
    row, column = tl.arange(0, 2 * K)[:, None], panel * P + tl.arange(0, P)[None, :]
    at = row * k + column
    square = (row < k) & (column < k)
    S = tl.load(covariances + c * k * k + at, square, 0.0) + tl.load(ridge + at, square, 0.0)
    S = tl.where((row == column) & (column >= k), 1.0, S)  # pad with an identity
    sample = tl.program_id(1) * K + row - K
    x = tl.load(z + sample * k + column, (row >= K) & (sample < B) & (column < k), 0.0)
    x -= tl.load(means + c * k + column, column < k, 0.0)
    return tl.where(row < K, S, x)


@triton.jit  # type: ignore[untyped-decorator]
def _diagonal_rows(tile, panel, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The P rows of a tile that meet the diagonal in this panel."""
    N: tl.constexpr = tile.shape[0] // P
    parts = tl.reshape(tile, (N, P, P))
    return tl.sum(tl.where(tl.arange(0, N)[:, None, None] == panel, parts, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _without_panel(tile, factor, panel, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subtract the part of a tile that an earlier panel of the factor explains."""
    rows = tl.trans(_diagonal_rows(factor, panel, P))
    return tile - tl.dot(factor, rows, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def _factor_panel(tile, panel, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn a tile into a panel of the factor: also its squared rows plus the log determinant."""
    i = tl.arange(0, P)
    D = _diagonal_rows(tile, panel, P)
    E = tl.where(i[:, None] == i[None, :], 1.0, 0.0)  # becomes the inverse of D's unit factor
    pivots = tl.zeros((P,), tl.float32)
    for j in range(P):
        row = tl.sum(tl.where(i[:, None] == j, D, 0.0), 0)
        unit = tl.sum(tl.where(i[:, None] == j, E, 0.0), 0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        pivot = tl.where(pivot > 0, pivot, float("nan"))  # not positive definite
        below = tl.sum(tl.where(i[None, :] == j, D, 0.0), 1)
        step = tl.where(i > j, below / pivot, 0.0)[:, None]
        D -= step * row[None, :]
        E -= step * unit[None, :]
        pivots = tl.where(i == j, pivot, pivots)
    E /= tl.sqrt(pivots)[:, None]
    factor = tl.dot(tile, tl.trans(E), input_precision="tf32x3")
    return factor, tl.sum(factor * factor, 1) + tl.sum(tl.log(pivots), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    z,
    means,
    covariances,
    ridge,
    offsets,
    out,
    B,
    C,
    k,
    K: tl.constexpr,
    P: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    tile = _tile(z, means, covariances, ridge, c, B, k, 0, K, P)
    first, total = _factor_panel(tile, 0, P)
    tile = _tile(z, means, covariances, ridge, c, B, k, 1, K, P)
    tile = _without_panel(tile, first, 1, P)
    second, more = _factor_panel(tile, 1, P)
    total += more
    tile = _tile(z, means, covariances, ridge, c, B, k, 2, K, P)
    tile = _without_panel(_without_panel(tile, first, 2, P), second, 2, P)
    third, more = _factor_panel(tile, 2, P)
    total += more
    tile = _tile(z, means, covariances, ridge, c, B, k, 3, K, P)
    tile = _without_panel(_without_panel(tile, first, 3, P), second, 3, P)
    tile = _without_panel(tile, third, 3, P)
    total += _factor_panel(tile, 3, P)[1]
    row = tl.arange(0, 2 * K)
    sample = tl.program_id(1) * K + row - K
    score = tl.load(offsets + c) - 0.5 * total
    tl.store(out + sample * C + c, score, (row >= K) & (sample < B))


def gaussian_scores(
    z: Tensor,  # (B, k), float32
    means: Tensor,  # (C, k)
    covariances: Tensor,  # (C, k, k)
    ridge: Tensor,  # (k, k), added to every covariance
    priors: Tensor,  # (C,)
) -> Tensor:  # (B, C)
    """g_c(z) with covariances Sigma_c + ridge (Eq. 5); NaN where one is not positive definite.

    One program per class and K samples runs a Cholesky factorization of the class's covariance,
    with the centred samples as extra rows, which become whitened samples. It goes panel by panel: a
    panel's diagonal block is inverted column by column, and matrix products do the rest, which
    triangular solves would do one column after the other. Up to 64 directions everything stays in
    registers, whereas cuSOLVER and cuBLAS read and write all matrices a dozen times. Products are
    3xTF32: with plain TF32 scores were off by 2e-3 of the largest.
    """
    (B, k), C = z.shape, len(means)
    inputs = [part.contiguous() for part in (z, means, covariances, ridge, priors.log())]
    out = torch.empty((B, C), dtype=z.dtype, device=z.device)
    K = max(16 * PANELS, triton.next_power_of_2(k))
    _scores[C, triton.cdiv(B, K)](*inputs, out, B, C, k, K=K, P=K // PANELS, num_warps=K // 16)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _mapped(  # type: ignore[no-untyped-def]
    values,
    scale,
    shift,
    out,
    rows,
    tokens,
    added,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    channel = tl.program_id(1) * K + tl.arange(0, K)
    at = row.to(tl.int64)[:, None] * C + channel[None, :]
    known = (row < rows)[:, None]
    x = tl.load(values + at, known).to(tl.float32)
    mapped = x * tl.load(scale + channel)[None, :] + tl.load(shift + channel)[None, :]
    mapped = tl.where((row % tokens >= added)[:, None], mapped, x)
    tl.store(out + at, mapped.to(out.dtype.element_ty), known)


def map_rows(
    values: Tensor,  # (n, ...), with channels innermost in memory
    scale: Tensor,  # (c,), float32; c is a multiple of 16
    shift: Tensor,  # (c,)
    tokens: int,  # rows of channels per sample; the first `added` of them are copied unchanged
    added: int,
    out: Tensor,  # (n, ...), in the same layout; may be `values` itself
) -> None:
    """Write the per-channel affine map scale x + shift to `out`.

    Torch broadcasts scale and shift element by element and computes an address for each. A program
    here loads them once, and loads the activations with full-width memory accesses.
    """
    rows, c = values.numel() // len(scale), len(scale)
    K = min(256, c & -c)  # the largest power of two that divides the channels
    R = VALUES // K
    grid = triton.cdiv(rows, R), c // K
    _mapped[grid](values, scale, shift, out, rows, tokens, added, C=c, K=K, R=R)
