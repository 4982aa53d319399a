"""Custom Triton kernels. Importing this module requires Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # samples per program of the scoring kernel, at most
VALUES = 2048  # activations per program of the mapping kernel


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    z, means, covariances, ridge, offsets, out, B, C, k, K: tl.constexpr, R: tl.constexpr
):
    c = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    i = tl.arange(0, K)
    inside = i < k
    square = inside[:, None] & inside[None, :]
    at = i[:, None] * k + i[None, :]
    S = tl.load(covariances + c * k * k + at, square, 0.0) + tl.load(ridge + at, square, 0.0)
    known = inside[:, None] & (rows < B)[None, :]
    X = tl.load(z + i[:, None] * B + rows[None, :], known, 0.0)  # (K, R)
    X -= tl.load(means + c * k + i, inside, 0.0)[:, None]
    total = tl.zeros((R,), tl.float32)  # squared distance plus log determinant
    for j in range(k):
        # Sum over the first axis, which is split within threads; other sums would need shuffles.
        row = tl.sum(tl.where(i[:, None] == j, S, 0.0), 0)
        x = tl.sum(tl.where(i[:, None] == j, X, 0.0), 0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        pivot = tl.where(pivot > 0, pivot, float("nan"))  # not positive definite
        total += x * x / pivot + tl.log(pivot)
        step = (row / pivot)[:, None]
        S -= step * row[None, :]
        X -= step * x[None, :]
    tl.store(out + rows * C + c, tl.load(offsets + c) - 0.5 * total, rows < B)


def gaussian_scores(
    z: Tensor,  # (B, k), float32
    means: Tensor,  # (C, k)
    covariances: Tensor,  # (C, k, k)
    ridge: Tensor,  # (k, k), added to every covariance
    priors: Tensor,  # (C,)
) -> Tensor:  # (B, C)
    """g_c(z) with covariances Sigma_c + ridge (Eq. 5); NaN where one is not positive definite.

    One program per class runs Gaussian elimination on its covariance, with the samples as extra
    columns. The pivots give the determinant, and the eliminated samples give the distances.
    Everything stays in registers, whereas cuSOLVER and cuBLAS read and write all matrices a dozen
    times.
    """
    (B, k), C = z.shape, len(means)
    # Transpose the batch, so that the threads of a warp hold one row of it, as of a covariance.
    inputs = [part.contiguous() for part in (z.T, means, covariances, ridge, priors.log())]
    out = torch.empty((B, C), dtype=z.dtype, device=z.device)
    K, R = max(16, triton.next_power_of_2(k)), max(16, min(ROWS, triton.next_power_of_2(B)))
    warps = 4 if K <= 64 else 8
    _scores[C, triton.cdiv(B, R)](*inputs, out, B, C, k, K=K, R=R, num_warps=warps)
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
