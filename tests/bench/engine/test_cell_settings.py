"""A cell's identity holds the settings its method uses; wrong settings fail before a run."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from caster.errors import CasterError
from caster_bench.engine.cell_settings import settings_of
from caster_bench.engine.plan import make_plan
from caster_bench.engine.record import commit, identity_of
from caster_bench.engine.run_context import RunContext
from caster_bench.methods import registry as catalogue
from caster_bench.methods.knn import REVISION
from caster_bench.methods.registry import entries
from caster_bench.methods.tent import Tent
from caster_bench.records.digest import key_of
from caster_bench.records.schema import Admission
from caster_bench.sweeps import Spec, read
from caster_bench.sweeps.spec import REPORTED, SPARE
from tests.support.inline import SMALL, sweep_of
from tests.support.miniature import SWEEP

HERE = Path(__file__).parent

ADMISSION = Admission("r", "d", "ab", "cd", 0.9, 10, 0.8, True, None)


def defaults(maker):
    parameters = inspect.signature(maker).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "name"}


def test_all_defaults_are_in_the_identity():
    known = identity_of(Spec("r", "d", "tent", (("lr", 0.5),)), ADMISSION)["settings"]
    assert known == json.loads(json.dumps(defaults(Tent) | {"lr": 0.5}))


def test_a_preset_and_a_gate_are_resolved():
    (preset,) = catalogue._IMAGENET
    spec = Spec("r", "d", "tent+referee", (("lr", 0.5), ("preset", preset)))
    wanted = defaults(Tent) | catalogue._IMAGENET[preset] | {"lr": 0.5}
    assert settings_of(spec) == json.loads(json.dumps(wanted)) | {"gate": {"agreement": 0.97}}
    own = Spec("r", "d", "tent+referee", (("gate", (("agreement", 0.5),)),))
    assert settings_of(own)["gate"] == {"agreement": 0.5}


def test_a_method_that_draws_has_the_seed_of_its_stream():
    drawing = [entry.name for entry in entries() if "seed" in entry.options()]
    assert drawing
    for name in drawing:
        assert settings_of(Spec("r", "d", name, seed=7))["seed"] == 7
        assert settings_of(Spec("r", "d", name, (("seed", 3),), seed=7))["seed"] == 3


def test_every_method_has_a_key_and_another_default_another(monkeypatch):
    for entry in entries():
        key_of(identity_of(Spec("r", "d", entry.name), ADMISSION))
    spec = Spec("r", "d", "tent")
    before = key_of(identity_of(spec, ADMISSION))
    monkeypatch.setattr("caster_bench.engine.cell_settings._options", lambda method: {"lr": 0.123})
    assert key_of(identity_of(spec, ADMISSION)) != before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"tent"',
            '{method = "tent", rl = 3}',
            "no setting of tent called 'rl': choose from .*, lr$",
        ),
        ('"tent"', '{method = "tent", optimiser = "sgd"}', "did you mean 'optimizer'"),
        ('"tent"', '{method = "tnet"}', "no method 'tnet': did you mean 'tent'"),
        ('"tent"', '{method = "tent", preset = "imagent"}', "did you mean 'imagenet'"),
        ('"tent"', '{method = "tent", gate = {tau = 1.0}}', "tent has no gate to set"),
        (
            '"tent"',
            '{method = "tent+referee", gate = {agreemnt = 0.8}}',
            "setting of the referee called 'agreemnt': did you mean 'agreement'",
        ),
        ("batch_sizes", 'orders = ["long-tailed"]\nbatch_sizes', "needs an imbalance"),
        (
            "batch_sizes",
            'orders = [{order = "dirichlet", concentration = -1}]\nbatch_sizes',
            "concentration must be a number above 0",
        ),
    ],
)
def test_wrong_settings_fail_before_anything_runs(tmp_path, old, new, message):
    sweep = sweep_of(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(CasterError, match=message) as raised:
        make_plan(sweep, RunContext.of(sweep, tmp_path / "out"))
    assert str(raised.value).startswith(f"{tmp_path / 'sweep.toml'}: grid 1: ")


SWEEPS = sorted(path for path in SWEEP.parent.glob("*.toml") if path.stem != "claims")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_of_the_project_can_be_planned(path, tmp_path):
    sweep = read(path)
    assert sweep.name == path.stem
    plan = make_plan(sweep, RunContext.of(sweep, tmp_path))
    assert len(plan.missing) == len(sweep.cells)
    assert len(plan.undecided) == len(dict.fromkeys((s.backbone, s.data) for s in sweep.cells))


def test_mixture_transport_meets_every_kind_of_stream():
    sweep = read(SWEEP.with_name("mixture.toml"))
    own = {"frozen", "mixture-transport", "mixture-transport-ungated"}
    methods = defaultdict(set)
    for spec in sweep.cells:
        assert not {name for name, _ in spec.conditions} & set(SPARE)  # constants are chosen there
        methods[spec.stream].add(spec.method)
    assert all(met >= own for met in methods.values())
    layers = {"layer-transport", "layer-transport-ungated"}  # not run on the ViT-B
    for stream, met in methods.items():
        if sweep.backbones[stream.backbone].family != "layer":
            assert met >= layers, stream
    assert {spec.batch_size for spec in methods} == {8, 64}
    for data in ("cifar10", "cifar100"):
        streams = [spec for spec in methods if spec.data == data]
        assert {spec.backbone for spec in streams} == {
            name for name in sweep.backbones if name.endswith(f"-{data}")
        }
        orders = {(spec.order, *dict(spec.order_settings).values()) for spec in streams}
        assert orders == {
            *((order,) for order in ("shuffled", "by-class", "runs", "turning")),
            *(("dirichlet", 0.1), ("dirichlet", 1.0), ("long-tailed", 20)),
        }
        assert {spec.schedule_name for spec in streams} == {"each", "mixed", "recurring"}


def test_all_rivals_meet_the_published_protocol():
    """All images, fifteen corruptions at severity 5, with a reset before each."""
    sweep = read(SWEEP.with_name("field.toml"))
    for data in sweep.data.values():
        assert data.source_limit is data.target_limit is None
    met, rivals = defaultdict(set), defaultdict(set)
    for spec in sweep.of("corruption"):
        assert (spec.batch_size, spec.schedule, spec.order) == (200, "each", "shuffled")
        met[spec.backbone, spec.method, spec.settings].update(spec.conditions)
        rivals[spec.backbone].add(spec.method)
    assert all(conditions == {(name, 5) for name in REPORTED} for conditions in met.values())
    everyone = {"frozen", "caster", "mixture-transport", "tent", "eata", "sar", "lame", "t3a"}
    assert all(methods >= everyone for methods in rivals.values())
    for name, methods in rivals.items():
        if sweep.backbones[name].family != "layer":
            assert methods >= {"layer-transport", "pea"}, name


def test_a_record_names_the_commit(monkeypatch, tmp_path):
    monkeypatch.delenv("CASTER_COMMIT", raising=False)
    commit.cache_clear()
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE)
    expected = git.stdout.strip() if git.returncode == 0 else "absent"
    assert commit().removesuffix("-dirty") == expected
    monkeypatch.setenv("CASTER_COMMIT", "0123abc")
    commit.cache_clear()
    assert commit() == "0123abc"
    monkeypatch.delenv("CASTER_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    commit.cache_clear()
    assert commit() == "absent"
    commit.cache_clear()


def test_a_revision_is_part_of_the_identity_unless_it_is_the_first(monkeypatch):
    first, later = (identity_of(Spec("r", "d", name), ADMISSION) for name in ("tent", "knn"))
    assert "revision" not in first  # the keys of records from before stay as they were
    assert later["revision"] == REVISION
    monkeypatch.setattr("caster_bench.methods.tent.REVISION", 3)
    assert identity_of(Spec("r", "d", "tent"), ADMISSION) == first | {"revision": 3}
