"""Whether recorded gated cells are what the gate makes of the recorded updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from caster.report.bench.checks.problem import Problem
from caster.report.bench.score import ALWAYS, GATED, LAYERS, Score
from caster.sweeps.spec import Spec, frozen_value

KIND = "a gated cell is not what its gate makes of the update"
_GATE = ("tau", "gated")  # settings of layer transport that ratio and update do not depend on


def transport_of(spec: Spec) -> Spec:
    """The cell that always transports where this one asks its gate."""
    settings = tuple((name, value) for name, value in spec.settings if name != "tau")
    return replace(spec, method=ALWAYS, settings=settings)


def is_open(score: Score) -> bool:
    """Whether a cell of layer transport takes every update, and tells what any gate would see."""
    return score.spec.method == LAYERS and not score.settings["gated"]


def opened(scores: Iterable[Score]) -> dict[Spec, Score]:
    """For gated cells of layer transport the open one beside each, as its gate would see it.

    The ratio of a batch does not depend on what became of those before it if every batch is
    compared, and then the gate follows from the open cell exactly. Cells that may rest are left
    out.
    """
    held = [score for score in scores if score.spec.method == LAYERS and not score.spec.alone]
    found = {_update(score): score for score in held if is_open(score)}
    return {
        gated.spec: as_seen(beside)
        for gated in held
        if not is_open(gated)
        and gated.settings["every"] == 1
        and (beside := found.get(_update(gated))) is not None
    }


def _update(score: Score) -> tuple[Spec, object]:
    """The stream and the settings that the update depends on."""
    settings = {name: value for name, value in score.settings.items() if name not in _GATE}
    return score.spec.stream, frozen_value(settings)


def as_seen(score: Score) -> Score:
    """An open cell with the ratios that a gate would go by: infinite where there is no number."""
    return replace(score, batches=replace(score.batches, ratio=score.batches.opens))


def disagreements(scores: Mapping[Spec, Score]) -> list[Problem]:
    """One for every gated cell whose verdicts or predictions do not follow.

    A batch must have the update's predictions if coverage and ratio of the ungated record pass
    the gate, and the frozen model's otherwise. Left out are cells that ran alone, whose forward
    passes were their own, and those without a head to fall back to.
    """
    pairs = {
        spec: scores[transport_of(spec)]
        for spec in scores
        if spec.method == GATED and not spec.alone and transport_of(spec) in scores
    } | opened(scores.values())
    problems = []
    for spec, always in pairs.items():
        gated = scores[spec]
        place = None if gated.frozen is None else _first_difference(gated, always)
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
