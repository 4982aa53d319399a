"""The scores of many classes as one Triton kernel: importing this module needs Triton.

One program per class eliminates its covariance, pivot by pivot, with the samples as more columns:
what is left of those gives the distances, and the pivots the determinant. All of it stays in
registers, while cuSOLVER and cuBLAS read and write the matrices of all classes a dozen times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # samples per program, at most


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
    total = tl.zeros((R,), tl.float32)  # squared distance and log determinant
    for j in range(k):
        # Sums over the first axis: a thread holds a part of it, other sums would need shuffles.
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
    """g_c(z) with covariances Sigma_c + ridge (Eq. 5); NaN where one is not positive definite."""
    (B, k), C = z.shape, len(means)
    # The batch transposed, so that the threads of a warp hold one row of it, as of a covariance.
    inputs = [part.contiguous() for part in (z.T, means, covariances, ridge, priors.log())]
    out = torch.empty((B, C), dtype=z.dtype, device=z.device)
    K, R = max(16, triton.next_power_of_2(k)), max(16, min(ROWS, triton.next_power_of_2(B)))
    warps = 4 if K <= 64 else 8
    _scores[C, triton.cdiv(B, R)](*inputs, out, B, C, k, K=K, R=R, num_warps=warps)
    return out
