"""Claims held against packed records, whole or in part."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack, described, scan
from caster_bench.studies import report as reporting
from caster_bench.studies.claims.claim_file import read_claims
from caster_bench.studies.claims.document import write_document
from caster_bench.studies.claims.verdicts import gather
from caster_bench.sweeps import Spec
from tests.support.command_line import cli
from tests.support.report_files import ELSEWHERE, files

pytestmark = pytest.mark.usefixtures("listed_figures")

CLAIMS = """
title = "What it claims"
summary = "The first page."
intro = "The gate gains {gain} points."
records = "records"
document = "CLAIMS.md"
reports = "docs/reports"
sweeps.every = "every.toml"
sweeps.later = "later.toml"
values.gain = {sweep = "every", table = "gate", row = {data = "pooled"}, column = "over never"}

[[part]]
title = "The gate"
sweep = "every"
text = "Accepted: {gain}."
tables = ["gate"]
figures = ["gate"]

[[part.claim]]
id = "G1"
says = "It gains."
where = "Sec. 4.4"
limits = "Made up."
note = "It came to {gain}."
core = "Because of {gain}."
tests = [
    {what = "over never", CELL "over never", interval = "over never, 95 %", least = -100},
    {what = "over always", CELL "over always", paper = ["gate", "pooled", "gated"], near = 0.5},
]

[[part]]
title = "The rest"
sweep = "every"

[[part.claim]]
id = "R1"
says = "It is quick."
where = "Table 3"
tests = [
 {what = "rate", table = "cost-ratios", row = {"other method" = "tent"}, column = "rate", least = 0}
]

[[part.claim]]
id = "R2"
says = "It will be run."
where = "Table 9"
tests = [{what = "x", sweep = "later", CELL "gated", least = 0}]

[[part.claim]]
id = "R3"
says = "It flies."
where = "Sec. 9"
why = "No wings."

[[part.claim]]
id = "R4"
says = "It is so."
where = "Sec. 3"
proof = "tests/x.py::test_x"
""".replace("CELL", 'table = "gate", row = {data = "pooled"}, column =')


@pytest.fixture(scope="module")
def place(run, tmp_path_factory) -> Path:
    """A repository with claims, their sweep, and its packed records."""
    sweep, out = run
    root = tmp_path_factory.mktemp("claims")
    shutil.copy(out.parent / "every.toml", root)
    (root / "claims.toml").write_text(CLAIMS)
    (root / "records").mkdir()
    done, problems = pack(sweep, out, Pack(root / "records" / "every"))
    assert problems == []
    assert done.missing == 0
    return root


def invoke(place: Path, *words: object):
    return cli("bench", "claims", place / "claims.toml", "--root", place, *words)


@pytest.fixture(scope="module")
def document(place) -> str:
    done = invoke(place, "-o", place)
    assert done.exit_code == 0, done.output
    assert "1 claim not run yet" in done.output
    return (place / "CLAIMS.md").read_text()


def test_every_claim_is_there_with_its_verdict(document):
    told = dict(re.findall(r"^### (\w+): (.*)$", document, re.MULTILINE))
    assert set(told) == {"G1", "R1", "R2", "R3", "R4"}
    assert told["R1"] == told["R4"] == "reproduced"
    assert (told["R2"], told["R3"]) == ("not run yet", "not testable here")
    assert "Of 5 claims: " in document
    assert "*Not testable here.* No wings." in document
    assert "*Limits.* Made up." in document
    assert "caster bench run every.toml --only gate" in document
    assert "| `later.toml` | - | - | 0 | no sweep yet |" in document


def test_core_claims_are_on_the_first_page(document):
    first = document.partition("\n## ")[0]
    (gain,) = re.findall(r"The gate gains (\S+) points", document)
    (row,) = (line for line in first.splitlines() if line.startswith("| **"))
    assert row.startswith("| **G1.** It gains. | over never: paper -, ours ")
    assert "<br>over always: paper 60.05, ours " in row
    assert row.endswith(f"reproduced** | Because of {gain}. |")
    assert "Of 5 claims: " in first


def test_digests_are_last(document, raw):
    headings = re.findall(r"^## (.*)$", document, re.MULTILINE)
    assert headings[-1] == "Checkpoints and data"
    last = document.rpartition("\n## ")[2]
    assert {record.cell["identity"]["checkpoint"] for record in raw} <= set(last.split())
    assert not re.search(r"[0-9a-f]{64}", document.removesuffix(last))


def test_figures_are_those_of_the_raw_records(document, raw, run):
    sweep, _ = run
    cells = [spec.plain() for spec in sweep.of("gate") if spec.method == "caster"]
    gains = [100 * record.gain for record in raw if record.spec in cells]
    assert len(gains) == 18
    expected = f"{np.mean(gains):+.2f}"
    assert f"The gate gains {expected} points." in document
    assert f"*What we found.* It came to {expected}." in document
    row = next(line for line in document.splitlines() if line.startswith("| over never |"))
    assert re.search(rf"\| - \| {re.escape(expected)} \([+-]\d+\.\d\d to [+-]\d+\.\d\d\) \|", row)


def test_links_lead_to_reports_and_figures(document, place):
    links = re.findall(r"\]\(([^)]+)\)", document)
    assert "docs/reports/every/figures/gate.svg" in links
    assert "docs/reports/every/report.md" in links
    for link in links:
        assert (place / link).is_file()
    text = (place / "docs/reports/every/report.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (place / "docs/reports/every" / link).is_file()


def test_reports_are_those_of_the_report_command(document, place, results, tmp_path):
    reporting.write_report(results, tmp_path / "report")
    whole = files(tmp_path / "report")
    kept = files(place / "docs/reports/every")
    assert {Path(name).suffix for name in kept} == {".md", ".csv", ".svg"}
    assert kept == {
        name: digest
        for name, digest in whole.items()
        if name == "report.md" or name.endswith((".csv", ".svg"))
    }


@pytest.mark.whole
def test_another_machine_writes_the_same_bytes(place, tmp_path, rendered_figures):
    assert invoke(place, "-o", tmp_path / "here").exit_code == 0
    words = ["bench", "claims", place / "claims.toml", "--root", place, "-o", tmp_path / "there"]
    environment = os.environ | ELSEWHERE
    command = [sys.executable, "-m", "caster", *words]
    subprocess.run(list(map(str, command)), env=environment, check=True, timeout=120)
    made = files(tmp_path / "here")
    assert "CLAIMS.md" in made
    assert files(tmp_path / "there") == made


def without(place: Path, run, tmp_path: Path, is_gone: Callable[[Spec], bool]) -> Path:
    """The same repository, of a run that lacks the first cell of which this holds."""
    sweep, out = run
    for name in ("claims.toml", "every.toml"):
        shutil.copy(place / name, tmp_path)
    shutil.copytree(out, tmp_path / "run")
    folders = scan(tmp_path / "run").cells
    shutil.rmtree(next(where for where in folders if is_gone(described(where)[1])))
    (tmp_path / "records").mkdir()
    assert pack(sweep, tmp_path / "run", Pack(tmp_path / "records" / "every"))[1] == []
    return tmp_path


@pytest.fixture
def parts(place, run, tmp_path) -> Path:
    """The study of cost is not finished, of the only backbone it is of."""
    return without(place, run, tmp_path, lambda spec: spec.alone and spec.method == "tent")


def test_a_study_that_is_not_complete_is_not_run_yet(parts):
    claims = read_claims(parts / "claims.toml")
    evidence, problems = gather(claims, parts)
    assert problems == []
    counted = write_document(claims, evidence, parts)
    text = (parts / "CLAIMS.md").read_text()
    assert "### R1: not run yet" in text
    assert "### G1: not run yet" not in text
    assert "*Not run yet*: its cells are not recorded" in text
    assert "*So far*:" not in text
    assert "| `every.toml` | cost | 3 | 2 | not run yet |" in text
    assert counted["not run yet"] == 2
    assert not list((parts / "docs/reports/every/tables").glob("cost*"))
    assert list((parts / "docs/reports/every/tables").glob("gate*"))
    report = (parts / "docs/reports/every/report.md").read_text()
    recorded = "estimators, certificate, gate, corruption, coverage, specificity"
    assert f"Of the sweep's 171 cells: studies {recorded}." in report
    assert "| 168 |" in report  # cells of that software: the two of the study of cost are left out


LATE = "vit"


@pytest.fixture(scope="module")
def late(place, run, tmp_path_factory) -> Path:
    """The study of the gate lacks a cell of one backbone."""
    gate, folder = run[0].of("gate"), tmp_path_factory.mktemp("late")
    return without(place, run, folder, lambda spec: spec in gate and spec.backbone == LATE)


def linked(place: Path, folder: Path, claims: str = CLAIMS) -> Path:
    """A repository with other claims on the same records."""
    for name in ("every.toml", "records"):
        (folder / name).symlink_to(place / name)
    (folder / "claims.toml").write_text(claims)
    return folder


def test_a_study_that_awaits_a_backbone_is_judged_on_the_others(late, run, tmp_path, raw):
    gate, folder = run[0].of("gate"), linked(late, tmp_path)
    done = invoke(folder, "-o", folder)
    assert done.exit_code == 0, done.output
    text = (folder / "CLAIMS.md").read_text()
    assert re.search(r"^### G1: .*reproduced so far$", text, re.MULTILINE)
    assert "### R1: reproduced\n" in text  # of another study
    assert f"*So far:* the study gate is not recorded yet for {LATE}." in text
    assert "*So far*: some backbones of its study" in text
    assert "*Not run yet*:" in text  # of a claim about a sweep that is to come
    held = [spec for spec in gate if spec.method == "caster" and spec.backbone != LATE]
    gains = [100 * record.gain for record in raw if record.spec in [s.plain() for s in held]]
    assert f"It came to {np.mean(gains):+.2f}." in text
    claims = folder / "claims.toml"
    row = 'row = {data = "pooled"}, column = "over always"'
    assert row in claims.read_text()
    claims.write_text(claims.read_text().replace(row, row.replace("pooled", "to come")))
    assert invoke(folder, "-o", folder).exit_code == 0
    assert "### G1: not run yet\n" in (folder / "CLAIMS.md").read_text()


@pytest.mark.slow
def test_a_figure_of_one_family_does_not_await_backbones_of_another(place, run, tmp_path):
    claim = """
[[part.claim]]
id = "{0}1"
says = "It has an accuracy."
where = "Table 1"
tests = [
 {{what = "x", table = "corruption-all-differences", row = {1}, column = "difference", least = -9}}
]
"""
    row = '{{family = "{}", method = "caster", less = "frozen", data = "CIFAR-10-C*"}}'
    more = "".join(claim.format(family, row.format(family)) for family in ("BN", "LN"))
    corrupted = run[0].of("corruption")
    for name, verdicts in (
        (LATE, {"BN": "reproduced", "LN": "not run yet"}),
        ("r18-a", {"BN": "reproduced so far", "LN": "reproduced"}),
    ):
        is_gone = partial(lambda spec, name: spec in corrupted and spec.backbone == name, name=name)
        folder = tmp_path / name
        folder.mkdir()
        without(place, run, folder, is_gone)
        (folder / "claims.toml").write_text(CLAIMS + more)
        done = invoke(folder, "-o", folder)
        assert done.exit_code == 0, done.output
        text = (folder / "CLAIMS.md").read_text()
        for family, verdict in verdicts.items():
            assert f"### {family}1: {verdict}\n" in text


@pytest.mark.parametrize(("data", "verdict"), [("cifar10", "not run yet"), ("pets", " so far")])
def test_a_claim_that_needs_data_is_judged_once_they_are_there(late, tmp_path, data, verdict):
    needs = CLAIMS.replace('id = "G1"', f'id = "G1"\nneeds = ["{data}"]')
    folder = linked(late, tmp_path, needs)
    assert invoke(folder, "-o", folder).exit_code == 0
    text = (folder / "CLAIMS.md").read_text()
    assert re.search(rf"^### G1: .*{verdict}$", text, re.MULTILINE)
    assert (" so far), " in text) == (verdict == " so far")


def test_a_claim_that_needs_unknown_data_stops_it(place, tmp_path):
    needs = CLAIMS.replace('id = "G1"', 'id = "G1"\nneeds = ["cifar"]')
    done = invoke(linked(place, tmp_path, needs), "-o", tmp_path)
    assert done.exit_code == 1
    assert "G1: data of every called 'cifar'" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ("least = -100 | least = 100", "partly reproduced"),
        ("least = -100 | least = 100, main = true", "not reproduced"),
        ("least = -100, main = true | least = 100", "partly reproduced"),
    ],
)
def test_a_claim_needs_its_main_figure(place, tmp_path, rules, verdict):
    cell = 'table = "gate", row = {data = "pooled"}, column = "over never"'
    tests = ", ".join(f'{{what = "x", {cell}, {rule}}}' for rule in rules.split(" | "))
    claim = f'[[part.claim]]\nid = "M1"\nsays = "Both."\nwhere = "Sec. 1"\ntests = [{tests}]\n'
    linked(place, tmp_path, f"{CLAIMS}\n{claim}")
    assert invoke(tmp_path, "-o", tmp_path).exit_code == 0
    text = (tmp_path / "CLAIMS.md").read_text()
    assert f"### M1: {verdict}" in text
    assert ("; main figure |" in text) == ("main" in rules)


def test_a_part_may_have_words_and_no_claims(place, tmp_path):
    more = '[[part]]\ntitle = "More"\nsweep = "every"\ntables = ["cost"]\n'
    linked(place, tmp_path, f'{CLAIMS}\n{more}text = "Also {{gain}}."\n')
    assert invoke(tmp_path, "-o", tmp_path).exit_code == 0
    text = (tmp_path / "CLAIMS.md").read_text().partition("## More")[2]
    assert "caster bench run every.toml --only cost" in text
    assert "| method |" in text
    other = f'{CLAIMS}\n{more}text = "x"\n'.replace('tables = ["cost"]\n', "")
    (tmp_path / "claims.toml").write_text(other)
    assert invoke(tmp_path, "-o", tmp_path).exit_code == 0
    text = (tmp_path / "CLAIMS.md").read_text().partition("## More")[2]
    assert "```\ncaster bench run every.toml\n```" in text
    (tmp_path / "claims.toml").write_text(CLAIMS + more)
    assert "there is no [[claim]]" in " ".join(invoke(tmp_path, "-o", tmp_path).output.split())


def test_without_records_nothing_is_run_yet(place, tmp_path):
    for name in ("claims.toml", "every.toml"):
        shutil.copy(place / name, tmp_path)
    done = invoke(tmp_path, "-o", tmp_path)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "CLAIMS.md").read_text()
    assert "The gate gains (not run yet) points." in text
    assert text.count(": not run yet") == 3
    assert not (tmp_path / "docs").exists()


def test_records_that_are_wrong_stop_it(place, tmp_path):
    shutil.copytree(place, tmp_path / "copy")
    path = next((tmp_path / "copy" / "records" / "every").glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    shutil.rmtree(tmp_path / "copy" / "docs", ignore_errors=True)
    (tmp_path / "copy" / "CLAIMS.md").unlink(missing_ok=True)
    done = invoke(tmp_path / "copy", "-o", tmp_path / "copy")
    assert done.exit_code == 1
    assert "changed or cut off after it was written" in " ".join(done.output.split())
    assert not (tmp_path / "copy" / "CLAIMS.md").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('table = "cost-ratios"', 'table = "cost-rations"', "R1: every: cost-rations"),
        ('"other method" = "tent"', '"other method" = "sar"', "the table has no such row"),
        ('tables = ["gate"]', 'tables = ["gates"]', "has no table 'gates'"),
        ('figures = ["gate"]', 'figures = ["gates"]', "has no figure 'gates'"),
    ],
)
def test_a_claim_that_names_what_is_not_there_stops_it(place, tmp_path, old, new, told):
    done = invoke(linked(place, tmp_path, CLAIMS.replace(old, new)), "-o", tmp_path)
    assert done.exit_code == 1
    assert told in " ".join(str(done.exception or done.output).split()) + done.output
    assert not (tmp_path / "CLAIMS.md").exists()


def test_a_folder_of_something_else_is_left_alone(place, tmp_path):
    (tmp_path / "docs" / "reports").mkdir(parents=True)
    (tmp_path / "docs" / "reports" / "mine.txt").write_text("mine")
    done = invoke(place, "-o", tmp_path)
    assert done.exit_code == 1
    assert (tmp_path / "docs" / "reports" / "mine.txt").read_text() == "mine"
