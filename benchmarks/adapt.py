"""Adapt: the cost of a batch beyond the necessary linear algebra.

    python benchmarks/adapt.py

A thousand classes against batched Cholesky factors and triangular solves alone, ten classes
against an empty call of the same Python depth. Times are medians over alternating rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from caster import Caster
from caster.core import linalg
from caster.core.certificate import centroid_residuals, ratio
from caster.core.discriminant import confidence, transported_scores
from caster.core.threads import one_blas_thread
from caster.core.transport import estimate, pull
from measure import in_turns, machine

BATCH = 64
DEPTH = 8  # adapt (2), try_transport, propose, *_scores (3), whiten


def fitted(n_classes: int, width: int, dtype: type) -> tuple[Caster, NDArray[Any]]:
    """A fitted estimator and a shifted batch."""
    rng = np.random.default_rng(0)
    y = np.arange(max(4000, 20 * n_classes)) % n_classes
    means = 2 * rng.standard_normal((n_classes, width))
    h = (rng.standard_normal((len(y), width)) + means[y]).astype(dtype)
    batch = 1.1 * h[rng.choice(len(y), BATCH, replace=False)]
    return Caster().fit(h, y), batch.astype(dtype)


def empty(depth: int) -> None:
    """An empty call of a given depth."""
    if depth > 1:
        empty(depth - 1)


def thousand_classes(dtype: type) -> None:
    clf, batch = fitted(1000, 128, dtype)
    k = BATCH - 1
    active = clf.moments_.restrict(k)
    covariances = active.covariances.astype(dtype) + np.eye(k, dtype=dtype)
    differences = (batch @ clf.moments_.U.astype(dtype))[:, :k] - active.means[:, None, :]
    differences = differences.astype(dtype)
    columns = np.ascontiguousarray(differences.transpose(0, 2, 1))

    def stock() -> None:
        factors = np.linalg.cholesky(covariances)
        scipy.linalg.solve_triangular(factors, columns, lower=True, check_finite=False)

    def ours() -> None:
        with one_blas_thread():
            linalg.whiten(differences, linalg.cholesky(covariances))

    def threaded() -> None:
        with mock.patch("caster.adapt.feature_transport.threads_for", return_value=nullcontext()):
            clf.adapt(batch)

    contenders: dict[str, Callable[[], object]] = {
        "adapt": lambda: clf.adapt(batch), "stock": stock, "ours": ours, "threaded": threaded,
    }  # fmt: skip
    times = in_turns(contenders, rounds=15)
    print(f"\nadapt, C = 1,000, k = {k}, B = {BATCH}, {np.dtype(dtype)}")
    print(f"  adapt                                       {1e3 * times['adapt']:7.1f} ms")
    for name, label in (
        ("stock", "np.linalg.cholesky + scipy.solve_triangular"),
        ("ours", "caster.core.linalg, one BLAS thread"),
        ("threaded", "adapt with all BLAS threads"),
    ):
        share = times["adapt"] / times[name]
        print(f"  {label:44}{1e3 * times[name]:7.1f} ms   adapt takes {share:.2f} times that")


def ten_classes(dtype: type) -> None:
    clf, batch = fitted(10, 64, dtype)
    times = in_turns(
        {"adapt": lambda: clf.adapt(batch), "empty": lambda: empty(DEPTH)}, rounds=15, repeats=200
    )
    beyond = times["adapt"] - times["empty"]
    print(f"\nadapt, C = 10, k = 9, B = {BATCH}, {np.dtype(dtype)}")
    print(f"  adapt {1e3 * times['adapt']:.3f} ms, {1e3 * beyond:.3f} ms more than an empty call")
    print("  the rest, step by step:")
    steps = in_turns(parts(clf, batch), rounds=15, repeats=200)
    for name, seconds in steps.items():
        print(f"    {name:34}{1e6 * seconds:6.0f} µs")


def parts(clf: Caster, batch: NDArray[Any]) -> dict[str, Callable[[], object]]:
    """The steps of one call of adapt, timed separately."""
    z, active = clf.transport.projected(batch)
    fitted_map = estimate(z, active, 1.0)
    pulled = pull(fitted_map, z)
    scores = transported_scores(pulled, fitted_map, active, 1.0)
    kept, assigned = confidence(scores) > 0.9, scores.argmax(axis=1)
    residuals, _ = centroid_residuals(pulled, assigned, kept, active.means)
    return {
        "checks, projection, settings": lambda: (clf.transport.projected(batch), clf.settings),
        "map (batch moments, one eigh)": lambda: estimate(z, active, 1.0),
        "pull": lambda: pull(fitted_map, z),
        "scores (10 factors, 10 solves)": lambda: transported_scores(
            pulled, fitted_map, active, 1.0
        ),
        "confidence": lambda: confidence(scores),
        "residuals": lambda: centroid_residuals(pulled, assigned, kept, active.means),
        "ratio": lambda: ratio(residuals, active.metric, active.margin, 1e-12),
    }


def main() -> None:
    print(machine())
    for dtype in (np.float32, np.float64):
        thousand_classes(dtype)
    for dtype in (np.float32, np.float64):
        ten_classes(dtype)


if __name__ == "__main__":
    main()
