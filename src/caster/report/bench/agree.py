"""Whether recorded gated cells are what the gate makes of the recorded transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from caster.report.bench.checks.problem import Problem
from caster.report.bench.score import ALWAYS, GATED, Score
from caster.sweeps.spec import Spec

KIND = f"a gated cell is not what its gate makes of {ALWAYS}"


def transport_of(spec: Spec) -> Spec:
    """The cell that always transports where this one asks its gate."""
    settings = tuple((name, value) for name, value in spec.settings if name != "tau")
    return replace(spec, method=ALWAYS, settings=settings)


def disagreements(scores: Mapping[Spec, Score]) -> list[Problem]:
    """One for every gated cell whose verdicts or predictions do not follow.

    A batch must have the transport's predictions if coverage and ratio of the transport's own
    record pass the gate, and the frozen model's otherwise. Left out are cells that ran alone,
    whose forward passes were their own, and those without a head to fall back to.
    """
    problems = []
    for spec, gated in scores.items():
        always = scores.get(transport_of(spec))
        if always is None or gated.frozen is None:
            continue
        if spec.method == GATED and not spec.alone:
            place = _first_difference(gated, always)
            if place is not None:
                problems.append(Problem(KIND, f"{spec.full}: batch {place}, tau {gated.tau:g}"))
    return problems


def _first_difference(gated: Score, always: Score) -> int | None:
    taken = always.batches.opens <= gated.tau
    answers = np.where(taken, always.batches.answers, always.batches.fallback)
    if len(taken) != len(gated.batches.accepted):
        return min(len(taken), len(gated.batches.accepted))
    wrong = (taken != gated.batches.accepted) | (answers != np.array(gated.batches.answers))
    places = np.flatnonzero(wrong)
    return int(places[0]) if len(places) else None
