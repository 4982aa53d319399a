"""Fit: N = 50,000, d = 2,048, C = 100, against scikit-learn's LDA (eigen) followed by QDA.

    python benchmarks/fit.py

Both compute class means and covariances in a discriminative subspace; ours are held out, so they
differ a little. Each runs in its own process, so that peak memory is measured separately.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis

from caster import Caster
from measure import machine

N, D, C = 50_000, 2_048, 100
Statistics = tuple[NDArray[Any], NDArray[Any]]  # (C, k), (C, k, k)


def data() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Gaussian classes, created in place: a temporary would hide the fit's memory peak."""
    rng = np.random.default_rng(0)
    y = rng.integers(C, size=N)
    means = 0.3 * rng.standard_normal((C, D), dtype=np.float32)
    h = rng.standard_normal((N, D), dtype=np.float32)
    for start in range(0, N, 1000):
        h[start : start + 1000] += means[y[start : start + 1000]]
    return h, y


def with_caster(h: NDArray[np.float32], y: NDArray[np.int64]) -> Statistics:
    moments = Caster().fit(h, y).moments_
    return moments.means, moments.covariances


def with_scikit_learn(h: NDArray[np.float32], y: NDArray[np.int64]) -> Statistics:
    lda = LinearDiscriminantAnalysis(solver="eigen", n_components=C - 1).fit(h, y)
    qda = QuadraticDiscriminantAnalysis(store_covariance=True).fit(lda.transform(h), y)
    return qda.means_, np.stack(qda.covariance_)


def measure(name: str) -> tuple[float, float, Statistics]:
    """Seconds, peak extra gigabytes and statistics of one contender."""
    h, y = data()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    statistics = {"caster": with_caster, "scikit-learn": with_scikit_learn}[name](h, y)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, (after - before) * 1024 / 1e9, statistics


def disagreement(a: Statistics, b: Statistics) -> float:
    """Largest difference of covariances, relative to unit variance and up to the signs of U."""
    signs = np.sign(np.sum(a[0] * b[0], axis=0))
    return float(np.abs(a[1] - signs[:, None] * b[1] * signs).max())


def main() -> None:
    print(machine())
    print(f"fit, N = {N:,}, d = {D:,}, C = {C}, float32\n")
    results = {}
    for name in ("caster", "scikit-learn"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(measure, (name,))
        seconds, memory, _ = results[name]
        print(f"{name:14}{seconds:8.2f} s{memory:8.2f} GB beyond the data", flush=True)
    ratio = results["scikit-learn"][0] / results["caster"][0]
    print(f"\ncaster is {ratio:.1f} times as fast")
    apart = disagreement(*(statistics for _, _, statistics in results.values()))
    print(f"covariances, held out and not, differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
