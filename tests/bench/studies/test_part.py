"""Reports of the part of a sweep that is recorded in full: of one study, or of some backbones."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack, Records, scan, sources_of
from caster_bench.studies import report as reporting
from caster_bench.studies.results import load, restrict
from caster_bench.sweeps import Spec, read, select
from tests.bench.studies.conftest import REJECTED
from tests.support.command_line import cli
from tests.support.consistent_records import SWEEP, Consistent, sweep_of
from tests.support.report_files import files

pytestmark = pytest.mark.usefixtures("listed_figures")

WANTED = ["--only", "corruption", "--backbone", "r50", "--backbone", "vit"]
HEAD, FIRST, *_ = SWEEP.split("[[grid]]")
ALONE = (  # a sweep of that part and nothing else, as somebody would write it
    f"{HEAD}[[grid]]{FIRST}".replace(
        'study = ["corruption", "certificate", "gate"]',
        'study = "corruption"\nbackbones = ["r50", "vit"]',
    )
)


def invoke(command: str, sweep: Path, where: Records, *words: object):
    place = ["--records", where.folder] if isinstance(where, Pack) else ["--out", where]
    done = cli("bench", command, sweep, *place, *words)
    return done.exit_code, " ".join(done.output.split())


def spec_at(folder: Path) -> Spec:
    return Spec.of(json.loads((folder / "cell.json").read_text())["identity"]["spec"])


def is_wanted(spec: Spec) -> bool:
    """By the words of the sweep's first grid."""
    streams = spec.data == "cifar10" and spec.condition in ("fog-5", "saturate-5")
    methods = ("frozen", "source-gda", "tent", "caster", "caster-ungated")
    return streams and spec.method in methods and spec.backbone in ("r50", "vit")


@pytest.fixture(scope="module")
def partly(run, tmp_path_factory) -> tuple[Path, Path]:
    """A sweep's file, and a run of it that was stopped.

    It has the part that is wanted, one cell of another study, all that is to be said of a backbone
    that was refused, and one that was admitted and has no cell yet.
    """
    sweep, out = run
    copy = tmp_path_factory.mktemp("partly") / "run"
    shutil.copytree(out, copy)
    other = next(s for s in sweep.of("coverage") if s.method == "sar")
    for folder in scan(copy).cells:
        spec = spec_at(folder)
        if not (is_wanted(spec) or spec == other or spec.backbone == "swin"):
            shutil.rmtree(folder)
    for path in sources_of(copy).iterdir():
        if path.stem in ("r18-a--cifar10", "vit--pets", "r50--pets"):
            path.unlink()
    return out.parent / "every.toml", copy


@pytest.fixture(scope="module", params=["run", "pack"])
def where(partly, request, tmp_path_factory) -> Records:
    if request.param == "run":
        return partly[1]
    packed = Pack(tmp_path_factory.mktemp("packed") / "records")
    assert pack(read(partly[0]), partly[1], packed)[1] == []
    return packed


def test_the_report_is_that_of_a_sweep_of_this_part_alone(partly, where, tmp_path):
    code, told = invoke("report", partly[0], where, *WANTED, "-o", tmp_path / "part")
    assert code == 0, told
    (tmp_path / "alone").mkdir()
    alone = sweep_of(tmp_path / "alone", ALONE)
    results, problems = load(alone, Consistent(alone).make(tmp_path / "run"))
    assert problems == []
    reporting.write_report(results, tmp_path / "other")
    part, other = files(tmp_path / "part"), files(tmp_path / "other")
    assert [name for name in part if part[name] != other.get(name)] == ["index.html", "report.md"]
    assert part.keys() == other.keys()
    assert any(name.startswith("tables/corruption") for name in part)
    said = "Of the sweep's 171 cells: study corruption of r50, vit. "
    text = (tmp_path / "part" / "report.md").read_text()
    assert said in text
    assert re.findall(r"^\| .* \| (\d+) \|$", text, re.MULTILINE)[-2:] == ["40", "40"]
    expected = (tmp_path / "other" / "report.md").read_text()
    expected = expected.replace(alone.sha256, read(partly[0]).sha256)
    assert text.replace(said, "") == expected
    assert "swin" not in text
    assert said in (tmp_path / "part" / "index.html").read_text().replace("&#x27;", "'")


def test_the_command_verifies_a_part_and_the_sweep_is_not_whole(partly, where):
    code, told = invoke("verify", partly[0], where, *WANTED)
    assert (code, told) == (
        0,
        "40 cells verified, 0 of 2 checkpoint files compared: no problems found. "
        "Of the sweep's 171 cells: study corruption of r50, vit.",
    )
    code, told = invoke("verify", partly[0], where)
    assert code == 1
    assert "missing (110)" in told


def test_a_cell_that_is_missing_of_the_part_is_listed(partly, where, tmp_path):
    words = ["--only", "corruption", "--backbone", "r50", "--backbone", "r18-b"]
    code, told = invoke("report", partly[0], where, *words, "-o", tmp_path / "r")
    assert code == 1
    assert "missing (20) r18-b on cifar10, fog-5" in told
    assert "not of this sweep" not in told
    assert not (tmp_path / "r").exists()


def test_what_is_no_part_of_it_must_verify_too(partly, tmp_path):
    sweep, out = partly
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    folder = next(path for path in scan(copy).cells if spec_at(path).method == "sar")
    (folder / "samples.parquet").write_bytes(b"nothing")
    code, told = invoke("report", sweep, copy, *WANTED, "-o", tmp_path / "r")
    assert code == 1
    assert "changed or damaged (1)" in told
    shutil.rmtree(folder)
    (sources_of(copy) / "r18-b--cifar10.json").write_text("{}")  # of which there is no cell
    code, told = invoke("report", sweep, copy, *WANTED, "-o", tmp_path / "r")
    assert code == 1
    assert "admission changed or damaged (1)" in told
    assert not (tmp_path / "r").exists()


def test_a_record_of_another_sweep_is_none_of_the_rest(partly, tmp_path):
    sweep, out = partly
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    maker = Consistent(read(sweep), refused=REJECTED)
    maker.cell(copy, replace(next(iter(maker.sweep.of("coverage"))), seed=9))
    code, told = invoke("verify", sweep, copy, *WANTED)
    assert code == 1
    assert "not of this sweep (1)" in told


def test_a_rejected_backbone_is_reported(partly, where):
    code, told = invoke("verify", partly[0], where, "--backbone", "swin")
    assert code == 0, told
    assert told.startswith("20 cells verified, 20 of them rejected")
    assert told.endswith("Of the sweep's 171 cells: all of swin.")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backbone", "r51"], "there is no backbone of every called 'r51': did you mean 'r50'?"),
        (["--only", "corruptions"], "there is no study 'corruptions': choose from estimators,"),
        (["--only", "layers"], "every has no cells of the study layers"),
        (["--only", "cost", "--backbone", "vit"], "every has no cells of the study cost for vit"),
    ],
)
def test_a_part_that_there_is_not_has_one_line(partly, tmp_path, words, told):
    sweep, out = partly
    code, said = invoke("report", sweep, out, *words, "-o", tmp_path / "r")
    assert code == 1
    assert said.startswith(f"caster: {told}")
    assert invoke("verify", sweep, out, *words) == (1, said)
    assert invoke("plan", sweep, tmp_path / "nothing", *words) == (1, said)


@pytest.mark.parametrize(
    ("only", "backbones", "words"),
    [
        ((), (), ""),
        ((), ("swin", "vit", "r50", "r18-b", "r18-a"), ""),
        (("gate",), (), "study gate"),
        (("gate", "cost"), (), "studies gate, cost"),
        (("cost",), ("r50",), "study cost"),  # there is no other in it
        ((), ("vit", "swin"), "all of vit, swin"),
        (("gate",), ("vit",), "study gate of vit"),
    ],
)
def test_which_part_it_is(results, only, backbones, words):
    part = restrict(results, select(results.sweep, only, backbones))
    assert part.part == (f"Of the sweep's 171 cells: {words}." if words else "")
    assert (reporting.summary(part) == reporting.summary(results)) is (not words)
    own = {
        spec
        for spec, studies in results.sweep.cells.items()
        if (not only or studies & {*only}) and (not backbones or spec.backbone in backbones)
    }
    assert (
        set(part.scores) | set(part.rejected)
        == own
        == set(part.provenance)
        == set(part.sweep.cells)
    )
    if only:
        assert [section.name for section in reporting.sections(part)] == [*only]


def test_the_report_of_all_backbones_is_that_of_the_sweep(results, run):
    sweep, _ = run
    part = restrict(results, select(sweep, (), list(sweep.backbones)))
    assert reporting.as_text(part, []) == reporting.as_text(results, [])
    assert "Of the sweep" not in reporting.as_text(part, [])
