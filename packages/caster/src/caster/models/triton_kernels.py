"""Custom Triton kernels. Importing this module requires Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PANEL = 16  # columns of a covariance that are factored together, the least that products take
SAMPLES = 64  # per program of the scoring kernel
VALUES = 2048  # activations per program of the mapping kernel


@triton.jit  # type: ignore[untyped-decorator]
def _block(values, index, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The P rows of (K, P) values that begin at row `index` P."""
    N: tl.constexpr = values.shape[0] // P
    blocks = tl.reshape(values, (N, P, P))
    return tl.sum(tl.where(tl.arange(0, N)[:, None, None] == index, blocks, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_factor(D, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inverse of the Cholesky factor of D, and the log determinant of D."""
    i = tl.arange(0, P)
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
    return E / tl.sqrt(pivots)[:, None], tl.sum(tl.log(pivots), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _factor(covariances, ridge, factors, determinants, k, K: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factor the covariance of a class: panels below the diagonal, and inverses of its blocks."""
    c = tl.program_id(0).to(tl.int64)
    i, row = tl.arange(0, P), tl.arange(0, K)[:, None]
    block, tall = i[:, None] * P + i[None, :], row * P + i[None, :]  # places in a panel
    panels = factors + c * K * K
    determinant = 0.0
    for p in range(K // P):
        column = p * P + i[None, :]
        at, known = row * k + column, (row < k) & (column < k)
        tile = tl.load(covariances + c * k * k + at, known, 0.0) + tl.load(ridge + at, known, 0.0)
        tile = tl.where((row == column) & (column >= k), 1.0, tile)  # pad with an identity
        for q in range(p):
            earlier = panels + q * K * P
            L = tl.load(earlier + tall, row >= p * P, 0.0)
            own = tl.load(earlier + p * P * P + block)
            tile -= tl.dot(L, tl.trans(own), input_precision="tf32x3")
        E, more = _inverse_factor(_block(tile, p, P), P)
        determinant += more
        panel = tl.dot(tile, tl.trans(E), input_precision="tf32x3")
        tl.store(panels + p * K * P + tall, panel, row >= (p + 1) * P)
        tl.store(panels + p * K * P + p * P * P + block, E)
        tl.debug_barrier()  # the next panel reads this one
    tl.store(determinants + c, determinant)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    z,
    means,
    factors,
    determinants,
    offsets,
    out,
    B,
    C,
    k,
    K: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
):
    """Whiten R samples with the factor of a class, and score them."""
    c = tl.program_id(0).to(tl.int64)
    N: tl.constexpr = K // P
    i, direction = tl.arange(0, P), tl.arange(0, K)
    sample = tl.program_id(1) * R + tl.arange(0, R)
    known = (sample < B)[:, None] & (direction < k)[None, :]
    x = tl.load(z + sample[:, None] * k + direction[None, :], known, 0.0)
    x -= tl.load(means + c * k + direction, direction < k, 0.0)[None, :]
    total = tl.load(determinants + c) + tl.zeros((R,), tl.float32)
    for p in range(N):
        panel = factors + (c * N + p) * K * P
        E = tl.load(panel + p * P * P + i[:, None] * P + i[None, :])
        parts = tl.reshape(x, (R, N, P))
        own = tl.sum(tl.where(tl.arange(0, N)[None, :, None] == p, parts, 0.0), 1)
        whitened = tl.dot(own, tl.trans(E), input_precision="tf32x3")
        total += tl.sum(whitened * whitened, 1)
        below = (direction >= (p + 1) * P)[:, None]
        L = tl.load(panel + direction[:, None] * P + i[None, :], below, 0.0)
        x -= tl.dot(whitened, tl.trans(L), input_precision="tf32x3")
    tl.store(out + sample * C + c, tl.load(offsets + c) - 0.5 * total, sample < B)


def gaussian_scores(
    z: Tensor,  # (B, k), float32
    means: Tensor,  # (C, k)
    covariances: Tensor,  # (C, k, k)
    ridge: Tensor,  # (k, k), added to every covariance
    priors: Tensor,  # (C,)
) -> Tensor:  # (B, C)
    """g_c(z) with covariances Sigma_c + ridge (Eq. 5); NaN where one is not positive definite.

    The first kernel factors one covariance per warp (two above 64 directions), panel by panel: a
    panel's diagonal block is inverted column by column, where more warps would wait for each other
    at every column, and matrix products do the rest. The second whitens the samples by products
    with those blocks. By contrast, cuSOLVER and cuBLAS read and write all matrices a dozen times.
    Products are 3xTF32: with plain TF32 scores were off by 2e-3 of the largest.
    """
    (B, k), C = z.shape, len(means)
    K = 64 if k <= 64 else 128  # no other sizes have run on a GPU
    factors = torch.empty((C, K, K), dtype=z.dtype, device=z.device)
    determinants = torch.empty(C, dtype=z.dtype, device=z.device)  # their logarithms
    inputs = [part.contiguous() for part in (covariances, ridge)]
    _factor[C,](*inputs, factors, determinants, k, K=K, P=PANEL, num_warps=K // 64)
    out = torch.empty((B, C), dtype=z.dtype, device=z.device)
    inputs = [z.contiguous(), means.contiguous(), factors, determinants, priors.log()]
    sizes = {"K": K, "P": PANEL, "R": SAMPLES}
    _scores[C, triton.cdiv(B, SAMPLES)](*inputs, out, B, C, k, **sizes, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _mapped(  # type: ignore[no-untyped-def]
    values,
    scale,
    shift,
    out,
    rows,
    tokens,
    prefix,
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
    mapped = tl.where((row % tokens >= prefix)[:, None], mapped, x)
    tl.store(out + at, mapped.to(out.dtype.element_ty), known)


def map_rows(
    values: Tensor,  # (n, ...), with channels innermost in memory
    scale: Tensor,  # (c,), float32; c is a multiple of 16
    shift: Tensor,  # (c,)
    tokens: int,  # rows of channels per sample; the first `prefix` of them are copied unchanged
    prefix: int,
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
    _mapped[grid](values, scale, shift, out, rows, tokens, prefix, C=c, K=K, R=R)
