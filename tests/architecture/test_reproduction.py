"""The committed files of reproduction/ are what its records give, byte for byte."""

from __future__ import annotations

import ast
import csv
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from caster_bench.studies.claims.claim_file import read_claims
from caster_bench.studies.claims.document import COMMITTED, write_document
from caster_bench.studies.claims.rules import NOT_RUN, look_up
from caster_bench.studies.claims.verdicts import Evidence, gather, judged
from caster_bench.studies.report import fill, sections
from caster_bench.studies.results import load
from caster_bench.sweeps import Sweep, read
from tests.support.consistent_records import Layered
from tests.support.report_files import files

ROOT = Path(__file__).parents[2]
CLAIMS = read_claims(ROOT / "reproduction" / "claims.toml")
CONDITIONS = {("fog", 5)}  # enough for every row that claims name
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)


def first_difference(committed: Path, made: Path, name: str) -> str:
    """A line that says where two files differ, or nothing."""
    if not (committed / name).exists():
        return f"{name} is missing: `make reproduction` writes it"
    if not (made / name).exists():
        return f"{name} is committed, and `make reproduction` does not write it"
    ours, theirs = ((folder / name).read_bytes().splitlines() for folder in (committed, made))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            return f"{name}, line {number}, is not what `make reproduction` writes: {other[:80]!r}"
    same = (committed / name).read_bytes() == (made / name).read_bytes()
    return "" if same else f"{name} ends differently from what `make reproduction` writes"


def names(folder: Path) -> set[str]:
    """The document and all files of reports below a folder."""
    reports = [path for path in (folder / CLAIMS.reports).rglob("*") if path.is_file()]
    return {CLAIMS.document, *(str(path.relative_to(folder)) for path in reports)}


def differences(folder: Path, made: Path, among: set[str]) -> list[str]:
    return [line for name in among if (line := first_difference(folder, made, name))]


@pytest.mark.slow
@pytest.mark.whole
def test_committed_files_are_what_the_records_give(tmp_path):
    evidence, problems = gather(CLAIMS, ROOT)
    assert problems == []
    write_document(CLAIMS, evidence, tmp_path)
    assert differences(ROOT, tmp_path, names(ROOT) | names(tmp_path)) == []


@pytest.mark.slow
def test_committed_reports_of_the_smaller_sweeps_are_what_the_records_give(tmp_path):
    """All but the sweep of the paper, which has five cells in six and takes a minute to verify."""
    sweeps = {name: file for name, file in CLAIMS.sweeps.items() if name != "reproduction"}
    evidence, problems = gather(replace(CLAIMS, sweeps=sweeps), ROOT)
    assert problems == []
    for each in evidence.values():
        fill(tmp_path / each.name, each.results, each.sections, *COMMITTED)
        committed, made = ROOT / CLAIMS.reports / each.name, tmp_path / each.name
        assert differences(committed, made, {*files(committed), *files(made)}) == []


@pytest.mark.slow
@pytest.mark.whole
def test_the_committed_leaderboard_is_what_the_records_give(tmp_path):
    (command,) = re.findall(r"caster (bench leaderboard .*)", (ROOT / "Makefile").read_text())
    words = shlex.split(command)
    words[-1] = str(tmp_path)
    subprocess.run([sys.executable, "-m", "caster", *words], cwd=ROOT, check=True, timeout=900)
    assert differences(ROOT / "docs", tmp_path, {"leaderboard.md", "leaderboard.html"}) == []


def test_the_leaderboard_has_the_figures_of_the_reports():
    """A quick check, against tables that another study makes of the same records."""
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    tables = ROOT / CLAIMS.reports / "field" / "tables"
    blocks = text.split("\n\n")
    for data, families in (("CIFAR-10-C", ("BN", "BN, plain", "LN")), ("CIFAR-100-C", ("BN",))):
        with (tables / f"corruption-fifteen-{data}-star.csv").open() as file:
            reported = list(csv.DictReader(file))
        for family in families:
            start = rf"### .* on {data}\\\*\n{family}, shuffled, batches of 200: 15 streams"
            at = next(i for i, block in enumerate(blocks) if re.match(start, block))
            rows = [line.strip("| ").split(" | ") for line in blocks[at + 1].splitlines()[2:]]
            accuracy = {method: value for method, value, *_ in rows}
            own = [row for row in reported if row[family] and "(tau" not in row["method"]]
            assert len(own) > 5
            for row in own:
                assert accuracy[row["method"]] == f"{float(row[family]):.2f}"


def test_the_leaderboards_overviews_have_the_figures_of_the_reports():
    """A quick check, rounding the unrounded means of another study."""
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    with (ROOT / CLAIMS.reports / "mixture" / "tables" / "layers-methods.csv").open() as file:
        reported = list(csv.DictReader(file))
    for data in ("CIFAR-10", "CIFAR-100"):
        heading = f"### ResNet-18, {data} on {data}-C\\*: 2,000 images, severity 5\n"
        table = text.partition(heading)[2].split("\n\n")[1].splitlines()
        kinds, _, *rows = [line.strip("| ").split(" | ") for line in table]
        shown = {
            (kind, row[0].partition(" (")[0]): value
            for row in rows
            for kind, value in zip(kinds, row, strict=True)
        }
        own = [
            row
            for row in reported
            if row["backbone"] == f"ResNet-18, {data} on {data}" and "clean" not in row["stream"]
        ]
        assert (kinds[0], kinds[-1]) == ("method", "revision")
        assert len(own) == len(rows) * len(kinds[1:-1])
        for row in own:
            kind = row["stream"].replace("dirichlet, concentration", "Dirichlet")
            kind += "" if row["B"] == "64" else f", B = {row['B']}"
            assert shown[kind, row["method"]] == f"{float(row['top-1']):.1f}", (kind, row["method"])


def test_the_leaderboard_is_of_these_sweeps():
    """A quick check that whoever edits a recorded sweep runs `make reproduction`."""
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    for name in ("field", "mixture", "reproduction"):
        assert read(ROOT / CLAIMS.sweeps[name]).sha256 in text


def test_committed_files_are_of_these_claims_and_sweeps():
    """A quick check that whoever edits the claims or a sweep runs `make reproduction`."""
    document = (ROOT / CLAIMS.document).read_text()
    for part in CLAIMS.parts:
        assert f"## {part.title}" in document
        for claim in part.claims:
            texts = (claim.says, claim.limits, claim.why)
            assert all(text is None or text in document for text in texts), claim.id
    for file in CLAIMS.sweeps.values():
        sweep = read(ROOT / file)
        assert sweep.sha256 in (ROOT / CLAIMS.reports / sweep.name / "report.md").read_text()


def test_the_first_page_has_eight_claims():
    document = (ROOT / CLAIMS.document).read_text()
    first = document.partition("\n## ")[0]
    core = [claim for part in CLAIMS.parts for claim in part.claims if claim.core]
    assert len(core) == 8
    assert re.findall(r"^\| \*\*(\w+)\.\*\*", first, re.MULTILINE) == [claim.id for claim in core]
    assert len(first.split()) < 200 * 10  # words read in ten minutes


def test_a_difference_is_one_line(tmp_path):
    for folder, text in (("a", "one\ntwo\n"), ("b", "one\nthree\n"), ("c", "one\ntwo")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.md").write_text(text)
    a, b, c = (tmp_path / folder for folder in "abc")
    assert first_difference(a, a, "x.md") == ""
    line = first_difference(a, b, "x.md")
    assert line == "x.md, line 2, is not what `make reproduction` writes: b'three'"
    assert "ends differently" in first_difference(a, c, "x.md")
    assert "is missing" in first_difference(tmp_path, a, "x.md")
    assert "does not write it" in first_difference(a, tmp_path, "x.md")


def test_counts_typed_in_a_note_are_those_of_its_table():
    """E1 counts settings, for which no table has a cell."""
    table = ROOT / CLAIMS.reports / "reproduction" / "tables" / "estimators.csv"
    with table.open() as file:
        rows = [
            (row["backbone"], row["data"], float(row["margin"])) for row in csv.DictReader(file)
        ]
    own = [margin for backbone, data, margin in rows if data.startswith(f"{trained_on(backbone)} ")]
    lost = [margin for *_, margin in rows if margin < 0]
    lost_own = [margin for margin in own if margin < 0]
    others, won = len(rows) - len(own), len(rows) - len(own) - (len(lost) - len(lost_own))
    text = text_of("E1", "note")
    assert f"k-NN wins {NUMBERS[len(lost)]} settings, each by less than three points" in text
    assert min(lost) > -3
    assert f"; {NUMBERS[len(lost_own)]} of them are on the very data" in text
    assert f"Of the {others} settings on other data" in text
    assert f"Source-GDA wins {won}: all but {NUMBERS[others - won]}" in text
    assert f"wins all settings but {NUMBERS[others - won]};" in text_of("E1", "core")


def test_counts_typed_in_limits_and_notes_are_those_of_the_sweep():
    """Which backbones have clean streams, and how many stand behind a deviation."""
    sweep = read(ROOT / CLAIMS.sweeps["reproduction"])
    judged = [spec for spec in sweep.cells if spec.data in ("cifar10", "cifar100")]
    names = {spec.backbone for spec in judged}
    clean = {spec.backbone for spec in judged if not spec.conditions}
    among = f"{NUMBERS[len(clean)]} of the {NUMBERS[len(names)]} checkpoints only"
    assert among in text_of("T11", "limits")
    for data in ("cifar10", "cifar100"):
        own = {spec.backbone for spec in judged if spec.data == data}
        batch = [name for name in own if sweep.backbones[name].family == "batch"]
        assert f"that of {NUMBERS[len(batch)]} networks" in text_of("T12", "note")


def text_of(claim: str, kind: str) -> str:
    """A text of a claim, on one line."""
    (found,) = (each for part in CLAIMS.parts for each in part.claims if each.id == claim)
    return " ".join(getattr(found, kind).split())


def trained_on(backbone: str) -> str:
    """The training data of a backbone, as in tables: "ViT-B, CIFAR-100"."""
    return backbone.partition(", ")[2]


def test_every_proof_is_a_test():
    proofs = [claim.proof for part in CLAIMS.parts for claim in part.claims if claim.proof]
    assert len(proofs) >= 2
    for proof in proofs:
        file, _, name = proof.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def shortened(sweep: Sweep) -> Sweep:
    """Clean streams and one corruption; all cells that are timed alone or choose settings."""
    cells = {
        spec: studies
        for spec, studies in sweep.cells.items()
        if spec.alone or "tuning" in studies or set(spec.conditions) <= CONDITIONS
    }
    return replace(sweep, cells=cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CLAIMS.sweeps))
@pytest.mark.whole
def test_every_figure_named_in_claims_is_in_the_reports(name, tmp_path):
    """On made-up records of a shortened sweep, whose tables have the same rows."""
    sweep = shortened(read(ROOT / CLAIMS.sweeps[name]))
    results, problems = load(sweep, Layered(sweep).make(tmp_path / "run"))
    assert problems == []
    assert results is not None
    recorded = {study: len(sweep.of(study)) for own in sweep.cells.values() for study in own}
    made = tuple(sections(results))
    evidence = {name: Evidence(CLAIMS.sweeps[name], sweep, recorded, {}, results, made)}
    reports = {name: evidence[name].tables}
    for part in CLAIMS.parts:
        for claim in part.claims:
            if all(test.figure.sweeps <= {name} for test in claim.tests):
                assert judged(claim, evidence, reports).verdict != NOT_RUN
        if part.sweep == name:
            assert set(part.tables) <= reports[name].keys()
            assert set(part.figures) <= {each.name for section in made for each in section.figures}
    for figure in CLAIMS.values.values():
        if figure.sweeps <= {name}:
            look_up(figure, reports)
