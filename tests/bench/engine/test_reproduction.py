"""The sweep of the reproduction has the studies, backbones and corruptions it promises."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from caster_bench.engine.cell_settings import check_settings
from caster_bench.engine.networks import find
from caster_bench.sweeps import STUDIES, read
from caster_bench.sweeps.spec import GROUPS

ROOT = Path(__file__).parents[3]
NINETEEN = GROUPS["all"]


@pytest.fixture(scope="module")
def sweep():
    return read(ROOT / "reproduction" / "sweeps" / "reproduction.toml")


def streams(sweep, study):
    """Methods by backbone and stream."""
    found = defaultdict(lambda: defaultdict(set))
    for spec in sweep.of(study):
        found[spec.backbone, spec.data][spec.stream].add(spec.method)
    return found


def conditions(*severities):
    return {((name, severity),) for name in NINETEEN for severity in severities}


def test_every_setting_is_one_that_there_is(sweep):
    check_settings(sweep)
    for study in STUDIES:
        assert sweep.of(study) or study in ("layers", "tuning"), study


def test_backbones_are_what_they_say(sweep):
    for backbone in sweep.backbones.values():
        assert find(backbone.architecture).family == backbone.family
    groups = {backbone.group for backbone in sweep.backbones.values()}
    assert len(groups) == len(sweep.backbones) == 6 * 2 + 2


def test_every_backbone_meets_ninety_five_corruptions(sweep):
    found = streams(sweep, "corruption")
    assert len(found) == 6 * 2
    for (backbone, data), met in found.items():
        assert backbone.split("-")[1] == data
        assert {stream.conditions for stream in met} == conditions(1, 2, 3, 4, 5)
        (methods,) = {frozenset(methods) for methods in met.values()}
        assert methods >= {"frozen", "source-gda", "t3a", "bn-adapt", "tent", "eata", "sar"}
        assert methods >= {"caster-ungated", "caster"}


def test_fifty_seven_cells_of_specificity(sweep):
    ((pair, met),) = streams(sweep, "specificity").items()
    assert pair == ("resnet50-cifar10-0", "cifar10")
    assert {stream.conditions for stream in met} == conditions(1, 3, 5)
    assert len(met) == 57
    for methods in met.values():
        wanted = {f"{name}{gate}" for name in ("tent", "eata") for gate in ("", "+certificate")}
        assert methods >= wanted | {"tent+referee", "eata+referee", "caster", "caster-ungated"}


def test_the_other_studies(sweep):
    estimators = streams(sweep, "estimators")
    assert len(estimators) == 14 * 5
    assert all(sweep.data[data].threshold is None for _, data in estimators)
    certificate = streams(sweep, "certificate")
    sizes = {s.batch_size for met in certificate.values() for s in met if s.order == "shuffled"}
    assert sizes == {16, 32, 64, 128, 256, 512}
    orders = {s.order for met in certificate.values() for s in met}
    assert orders == {"shuffled", "by-class", "dirichlet"}
    coverage = streams(sweep, "coverage")
    assert {stream.batch_size for stream in coverage["keras_resnet50", "imagenet"]} == {64}
    assert {stream.batch_size for stream in coverage["resnet50-cifar100-0", "cifar100"]} == {16, 64}
    assert {s.condition for s in sweep.of("cost")} == {"fog-3"}
    assert all(spec.alone for spec in sweep.of("cost"))
