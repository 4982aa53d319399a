"""Adapt: the cost of a batch beside that of its linear algebra by LAPACK.

    python benchmarks/adapt.py [10 | 1000]

A thousand classes against LAPACK's Cholesky factors and triangular solves of the transported
classes alone, and without a head also against the products of Source-GDA, which answers in its
place; ten classes against an empty call of the same Python depth. Times are medians over
alternating rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from caster import Caster
from caster.core import linalg
from caster.core.certificate import centroid_residuals, ratio
from caster.core.discriminant import confidence, source_scores, transported_scores
from caster.core.order import order_evidence
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
    logits = np.random.default_rng(1).standard_normal((BATCH, 1000)).astype(dtype)
    all_z = batch @ clf.moments_.U.astype(dtype)
    placed = clf.transport.placed(batch, clf.moments_.rank)

    def stock() -> None:
        factors = np.linalg.cholesky(covariances)
        scipy.linalg.solve_triangular(factors, columns, lower=True, check_finite=False)

    def solves() -> None:
        with one_blas_thread():
            for c in range(0, 1000, 32):  # as many as a cache holds
                block = slice(c, c + 32)
                linalg.whiten(differences[block], linalg.cholesky(covariances[block]))

    def solves_and_source() -> None:
        solves()
        with one_blas_thread():
            source_scores(all_z, placed, 1.0)

    contenders: dict[str, Callable[[], object]] = {
        "head": lambda: clf.adapt(batch, logits),
        "stock": stock,
        "solves": solves,
        "alone": lambda: clf.adapt(batch),
        "both": solves_and_source,
    }
    times = in_turns(contenders, rounds=15)
    print(f"\nadapt, C = 1,000, k = {k}, B = {BATCH}, {np.dtype(dtype)}")
    for ours, label in (("head", "adapt, with the head's logits"), ("alone", "adapt, without")):
        print(f"  {label:51}{1e3 * times[ours]:7.1f} ms")
        for name, what in {
            "head": {
                "solves": "SciPy's LAPACK and BLAS, one thread",
                "stock": "np.linalg.cholesky + scipy.solve_triangular",
            },
            "alone": {"both": "the same and Source-GDA's products"},
        }[ours].items():
            share = times[ours] / times[name]
            print(f"    {what:49}{1e3 * times[name]:7.1f} ms   adapt takes {share:.2f} of that")


def ten_classes(dtype: type) -> None:
    clf, batch = fitted(10, 64, dtype)
    logits = np.random.default_rng(1).standard_normal((BATCH, 10)).astype(dtype)
    times = in_turns(
        {
            "head": lambda: clf.adapt(batch, logits),
            "alone": lambda: clf.adapt(batch),
            "empty": lambda: empty(DEPTH),
        },
        rounds=15,
        repeats=200,
    )
    print(f"\nadapt, C = 10, k = 9, B = {BATCH}, {np.dtype(dtype)}, beyond an empty call:")
    for name, label in (("head", "with the head's logits"), ("alone", "without: Source-GDA too")):
        print(f"  {label:26}{1e3 * (times[name] - times['empty']):6.3f} ms")
    print("  of which, step by step:")
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
    attempt = clf.transport.attempt(batch, None, clf.settings)
    evidence = attempt.proposal.evidence
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
        "order of the classes": lambda: order_evidence(attempt.chosen, active.priors),
        "verdict (with it) and answer": lambda: clf.transport.conclude(
            batch, attempt, evidence, clf.settings
        ),
        "Source-GDA": lambda: clf.transport.source_scores(batch, clf.settings),
    }


def main() -> None:
    print(machine())
    measures = {"10": ten_classes, "1000": thousand_classes}
    for n_classes in sys.argv[1:] or measures:
        for dtype in (np.float32, np.float64):
            measures[n_classes](dtype)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
