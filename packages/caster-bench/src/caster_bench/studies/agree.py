"""Cells that always adapt beside those that ask a gate."""

from __future__ import annotations

from dataclasses import replace

from caster_bench.studies.method_names import ALWAYS, LAYERS
from caster_bench.studies.score import Score
from caster_bench.sweeps.spec import Spec


def transport_of(spec: Spec) -> Spec:
    """The cell that always transports where this one asks its gate."""
    settings = tuple((name, value) for name, value in spec.settings if name != "tau")
    return replace(spec, method=ALWAYS, settings=settings)


def is_open(score: Score) -> bool:
    """Whether a cell of layer transport takes every update, and tells what any gate would see."""
    return score.spec.method == LAYERS and not score.settings["gated"]


def as_seen(score: Score) -> Score:
    """An open cell with the ratios that a gate would go by: infinite where there is no number."""
    return replace(score, batches=replace(score.batches, ratio=score.batches.opens))
