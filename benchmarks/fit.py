"""Fit: N = 50,000, d = 2,048, C = 100, against scikit-learn's LDA (eigen) followed by QDA.

    python benchmarks/fit.py [N D C]

Both compute class means and covariances in a discriminative subspace; ours are held out, so they
differ a little. The limit of ours is the two products that a held-out fit cannot avoid: the Gram
matrix, and all samples times a triangular matrix, N d^2 operations each, in float32. Each runs in
its own process, so that peak memory is measured separately.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis

from caster import Caster
from caster.core.linalg import triangular_squares
from caster.core.threads import parallel_map
from measure import machine

PIECE = 8192  # rows of a product
FACTORS = 32  # that features share, as much of their variance as their own noise has
Sizes = tuple[int, int, int]
Statistics = tuple[NDArray[Any], NDArray[Any]]  # (C, k), (C, k, k)


def data(N: int, D: int, C: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Gaussian classes with correlated features, as a network's are.

    Created in place: a temporary would hide the fit's memory peak.
    """
    rng = np.random.default_rng(0)
    y = rng.integers(C, size=N)
    means = 0.3 * rng.standard_normal((C, D), dtype=np.float32)
    loadings = rng.standard_normal((FACTORS, D), dtype=np.float32) / np.sqrt(np.float32(FACTORS))
    h = rng.standard_normal((N, D), dtype=np.float32)
    for start in range(0, N, 1000):
        rows = slice(start, start + 1000)
        factors = rng.standard_normal((len(y[rows]), FACTORS), dtype=np.float32)
        h[rows] += means[y[rows]] + factors @ loadings
    return h, y


def with_caster(h: NDArray[np.float32], y: NDArray[np.int64]) -> Statistics:
    moments = Caster().fit(h, y).moments_
    return moments.means, moments.covariances


def with_scikit_learn(h: NDArray[np.float32], y: NDArray[np.int64]) -> Statistics:
    lda = LinearDiscriminantAnalysis(solver="eigen", n_components=int(y.max())).fit(h, y)
    qda = QuadraticDiscriminantAnalysis(store_covariance=True).fit(lda.transform(h), y)
    return qda.means_, np.stack(qda.covariance_)


def products_alone(h: NDArray[np.float32], y: NDArray[np.int64]) -> None:
    pieces = [h[start : start + PIECE] for start in range(0, len(h), PIECE)]
    upper = np.triu(np.ones((h.shape[1],) * 2, np.float32))
    for _ in parallel_map(lambda piece: piece.T @ piece, pieces):
        pass
    for _ in parallel_map(lambda piece: triangular_squares(piece, upper), pieces):
        pass


CONTENDERS = {
    "caster": with_caster,
    "scikit-learn": with_scikit_learn,
    "products alone": products_alone,
}


def measure(name: str, sizes: Sizes) -> tuple[float, float, float, Statistics | None]:
    """Wall and processor seconds, peak extra gigabytes and statistics of one contender."""
    h, y = data(*sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = time.perf_counter(), time.process_time()
    statistics = CONTENDERS[name](h, y)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, busy, (after - before) * 1024 / 1e9, statistics


def disagreement(a: Statistics, b: Statistics) -> float:
    """Largest difference of covariances, relative to unit variance and up to the signs of U."""
    signs = np.sign(np.sum(a[0] * b[0], axis=0))
    return float(np.abs(a[1] - signs[:, None] * b[1] * signs).max())


def main() -> None:
    sizes = N, D, C = tuple(map(int, sys.argv[1:])) or (50_000, 2_048, 100)
    print(machine())
    print(f"fit, N = {N:,}, d = {D:,}, C = {C}, float32\n")
    results = {}
    for name in CONTENDERS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(measure, (name, sizes))
        seconds, busy, memory, _ = results[name]
        spent = f"{seconds:8.2f} s{busy:8.2f} s of processor time"
        print(f"{name:14}{spent}{memory:8.2f} GB beyond the data", flush=True)
    caster, theirs, limit = (results[name][0] for name in CONTENDERS)
    print(f"\ncaster is {theirs / caster:.1f} times as fast as scikit-learn")
    rate = 2 * N * D**2 / limit / 1e9
    print(f"and takes {caster / limit:.2f} times as long as its products ({rate:.0f} GFLOP/s)")
    ours, other = (results[name][3] for name in ("caster", "scikit-learn"))
    apart = disagreement(ours, other)
    print(f"covariances, held out and not, differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
