"""How many labels `Stream.feedback` takes to accept adapted answers, and to revoke them.

    python benchmarks/feedback_labels.py

Labels are simulated: of those that count, the adapted answer wins a share p, and the frozen one the
others. Revocation begins after an acceptance and some more labels of the same benefit; then the
frozen answer wins the share p. Medians over 2,000 streams at alpha = 5 %, with the nine-tenths
quantile in brackets. Takes a minute on one core.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from caster.core.betting import ALPHA, LAMBDAS, log_restarts, log_wealth, share
from measure import machine

STREAMS = 2_000
SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.55)
BENEFITS = (0, 100, 1_000)  # labels between the acceptance and the harm
MOST = {0.6: 1_500, 0.55: 6_000}  # labels simulated; 400 for larger shares

Counts = NDArray[np.int64]  # (STREAMS,)


def outcomes(rng: np.random.Generator, p: float, labels: int) -> NDArray[np.int64]:
    return np.where(rng.random((STREAMS, labels)) < p, 1, -1)


def labels_to_accept(rng: np.random.Generator, p: float, labels: int) -> Counts:
    """Of the first phase; one more than `labels` where there is no decision."""
    wins = (outcomes(rng, p, labels) == 1).cumsum(axis=1)
    found = np.full(STREAMS, labels + 1)
    for t in range(labels, 0, -1):
        accepted = log_wealth(wins[:, t - 1], t - wins[:, t - 1]) >= -math.log(ALPHA * share(1))
        found[accepted] = t
    return found


def labels_to_revoke(rng: np.random.Generator, p: float, benefit: int, labels: int) -> Counts:
    """Of the second phase, from the end of the benefit on; 0 where it was revoked before."""
    W = np.concatenate([outcomes(rng, p, benefit), -outcomes(rng, p, labels)], axis=1)
    log_M = np.full((STREAMS, len(LAMBDAS)), -np.inf)
    found = np.full(STREAMS, labels + 1)
    for t in range(1, benefit + labels + 1):
        log_M = log_restarts(log_M, W[:, t - 1], t)
        evidence = np.log(np.mean(np.exp(np.minimum(log_M, 50)), axis=1))
        revoked = evidence >= -math.log(ALPHA * share(2))
        found[revoked & (found > labels)] = max(0, t - benefit)
    return found


def cell(found: Counts, labels: int) -> str:
    middle, late = np.quantile(found, [0.5, 0.9], method="higher")
    return f"{middle:,} ({f'{late:,}' if late <= labels else f'over {labels:,}'})"


def main() -> None:
    rng = np.random.default_rng(0)
    print(machine())
    heads = "".join(f" | revoke, after {n:,}" for n in BENEFITS)
    print(f"\n| adapted answer right | accept{heads} |\n|--:|--:|" + "--:|" * len(BENEFITS))
    early = []
    for p in SHARES:
        most = MOST.get(p, 400)
        cells = [cell(labels_to_accept(rng, p, most), most)]
        for benefit in BENEFITS:
            found = labels_to_revoke(rng, p, benefit, most)
            early.append(np.mean(found == 0))
            cells.append(cell(found, most))
        print(f"| {100 * p:.0f} % | {' | '.join(cells)} |", flush=True)
    print(f"\nrevoked while the benefit lasted: at most {100 * max(early):.1f} % of the streams")
    wrong = np.mean(labels_to_accept(rng, 0.5, 2_000) <= 2_000)
    print(
        f"accepted within 2,000 labels without a benefit (50 %): {100 * wrong:.1f} % of the streams"
    )


if __name__ == "__main__":
    main()
