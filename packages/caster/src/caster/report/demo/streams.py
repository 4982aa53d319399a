"""The streams of the demo: what is sent through the frozen network, and the score it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.estimator import Caster
from caster.report.demo import digits
from caster.report.demo.digits import SEED, SEVERITIES, SHIFTS, Digits, Network
from caster.report.demo.results import Batch, Plan, Results, Stream

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next

BATCH_SIZE = 64
TOO_SMALL = 4  # of ten classes: the batch's moments say who came, not how they shifted

PLANS: tuple[Plan, ...] = (
    Plan("clean", 0, BATCH_SIZE, "shuffled"),
    *(Plan(shift, severity, BATCH_SIZE, "shuffled") for shift in SHIFTS for severity in SEVERITIES),
    Plan("clean", 0, BATCH_SIZE, "sorted by class"),
    Plan("clean", 0, TOO_SMALL, "shuffled"),
)


def run(progress: Progress | None = None) -> Results:
    """Train, fit once, and stream every plan; `progress` hears of each step before it starts.

    Nothing is tuned to the target: the estimator is `Caster()` with its defaults, and labels of
    the target are used to keep the score only.
    """
    tell = progress or (lambda done, total, text: None)
    total = len(PLANS) + 1
    tell(0, total, "training a network")
    data = digits.load()
    network = digits.train(data.source, data.source_labels)
    clf = Caster().fit(network(data.source)[0], data.source_labels)
    streams = []
    for done, plan in enumerate(PLANS, start=1):
        tell(done, total, plan.words)
        streams.append(stream(plan, data, network, clf))
    tell(total, total, "done")
    return Results(SEED, clf.settings, tuple(streams))


def stream(plan: Plan, data: Digits, network: Network, clf: Caster) -> Stream:
    """Every target digit once, as planned."""
    images = data.target
    if plan.severity:
        images = digits.shifted(images, plan.shift, plan.severity)
    features, logits = network(images)
    batches = tuple(
        _score(clf, features[rows], logits[rows], data.target_labels[rows])
        for rows in batch_rows(plan, data.target_labels)
    )
    return Stream(**vars(plan), batches=batches)


def batch_rows(plan: Plan, labels: NDArray[Any]) -> Iterator[NDArray[np.intp]]:
    """Row numbers of every batch of a plan."""
    if plan.order == "sorted by class":
        rows = np.argsort(labels, kind="stable")
    else:
        rng = digits.generator(plan.shift, plan.severity, plan.batch_size)
        rows = rng.permutation(len(labels))
    for start in range(0, len(rows), plan.batch_size):
        yield rows[start : start + plan.batch_size]


def _score(
    clf: Caster,
    features: NDArray[Any],  # (B, d)
    logits: NDArray[Any],  # (B, C)
    labels: NDArray[Any],  # (B,)
) -> Batch:
    def right(predictions: NDArray[Any]) -> int:
        return int(np.count_nonzero(predictions == labels))

    out = clf.adapt(features, head_logits=logits)
    return Batch(
        size=len(labels),
        frozen=right(clf.classes_[logits.argmax(axis=1)]),
        source_gda=right(clf.classes_[clf.source_scores(features).argmax(axis=1)]),
        ungated=right(out.proposed),
        gated=right(out.predictions),
        verdict=out.verdict,
    )
