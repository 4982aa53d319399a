"""REPRODUCTION.md is what `make reproduction` makes of the records, byte for byte."""

from __future__ import annotations

import ast
import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from caster_bench.studies.claims.evidence import Evidence, gather
from caster_bench.studies.claims.outcome import judged
from caster_bench.studies.claims.parse import read as read_claims
from caster_bench.studies.claims.rules import NOT_RUN
from caster_bench.studies.claims.values import look_up
from caster_bench.studies.claims.write import write
from caster_bench.studies.read import load
from caster_bench.studies.write import sections
from caster_bench.sweeps import Sweep, read
from tests.bench.studies.test_layers import Layered

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "claims.toml"
CLAIMS = read_claims(FILE)
TELLING = {("fog", 5)}  # enough for every row that claims name


def first_difference(committed: Path, made: Path, name: str) -> str:
    """A line that says what is not the same, or nothing."""
    if not (committed / name).exists():
        return f"{name} is not there: `make reproduction` writes it"
    if not (made / name).exists():
        return f"{name} is there, and `make reproduction` does not write it"
    ours, theirs = ((folder / name).read_bytes().splitlines() for folder in (committed, made))
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            return f"{name}, line {place}, is not what `make reproduction` writes: {other[:80]!r}"
    same = (committed / name).read_bytes() == (made / name).read_bytes()
    return "" if same else f"{name} has another end than `make reproduction` writes"


def names(folder: Path) -> set[str]:
    """Document and reports below a folder."""
    reports = [path for path in (folder / CLAIMS.reports).rglob("*") if path.is_file()]
    return {CLAIMS.document, *(str(path.relative_to(folder)) for path in reports)}


def test_what_is_committed_is_what_the_records_give(tmp_path):
    evidence, problems = gather(CLAIMS, ROOT)
    assert problems == []
    write(CLAIMS, evidence, tmp_path)
    told = [first_difference(ROOT, tmp_path, name) for name in names(ROOT) | names(tmp_path)]
    assert [line for line in told if line] == []


def test_a_difference_is_told_in_a_line(tmp_path):
    for folder, text in (("a", "one\ntwo\n"), ("b", "one\nthree\n"), ("c", "one\ntwo")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.md").write_text(text)
    a, b, c = (tmp_path / folder for folder in "abc")
    assert first_difference(a, a, "x.md") == ""
    told = first_difference(a, b, "x.md")
    assert told == "x.md, line 2, is not what `make reproduction` writes: b'three'"
    assert "another end" in first_difference(a, c, "x.md")
    assert "is not there" in first_difference(tmp_path, a, "x.md")
    assert "does not write it" in first_difference(a, tmp_path, "x.md")


def test_what_a_note_counts_in_words_is_what_its_table_has():
    """Of E1: the one note whose figures no table has a place for."""
    table = ROOT / "docs" / "reproduction" / "reproduction" / "tables" / "estimators.csv"
    with table.open() as file:
        rows = [
            (row["backbone"], row["data"], float(row["margin"])) for row in csv.DictReader(file)
        ]
    own = [margin for backbone, data, margin in rows if data.startswith(f"{trained_on(backbone)} ")]
    lost = [margin for *_, margin in rows if margin < 0]
    lost_own = [margin for margin in own if margin < 0]
    others, won = len(rows) - len(own), len(rows) - len(own) - (len(lost) - len(lost_own))
    words = {6: "six", 8: "eight"}
    (note,) = (c.note for part in CLAIMS.parts for c in part.claims if c.id == "E1")
    text = " ".join(note.split())
    assert f"k-NN wins {words[len(lost)]} settings, none by three points" in text
    assert min(lost) > -3
    assert f"and {words[len(lost_own)]} of them on the very data" in text
    assert f"Of the {others} settings on other data" in text
    assert f"Source-GDA wins {won}:" in text


def trained_on(backbone: str) -> str:
    """The data of a backbone's checkpoint, as tables name both: "ViT-B, CIFAR-100"."""
    return backbone.partition(", ")[2]


def test_every_proof_is_a_test():
    proofs = [claim.proof for part in CLAIMS.parts for claim in part.claims if claim.proof]
    assert len(proofs) >= 2
    for proof in proofs:
        file, _, name = proof.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def cut_short(sweep: Sweep) -> Sweep:
    """One corruption, and one of the backbones that are in the same studies of the same data."""
    groups: dict[str, set[object]] = defaultdict(set)
    for spec, studies in sweep.cells.items():
        groups[spec.backbone] |= {spec.data, sweep.backbones[spec.backbone].family, *studies}
    kept = {frozenset(group): name for name, group in reversed(groups.items())}.values()
    cells = {
        spec: studies
        for spec, studies in sweep.cells.items()
        if spec.backbone in kept and (spec.alone or set(spec.conditions) <= TELLING)
    }
    return replace(sweep, cells=cells)


@pytest.mark.parametrize("name", list(CLAIMS.sweeps))
def test_every_figure_that_claims_name_is_in_the_reports(name, tmp_path):
    """Of a sweep cut short, with records that were never run: its tables have the same rows."""
    sweep = cut_short(read(ROOT / CLAIMS.sweeps[name]))
    cells = sweep.cells
    run = Layered(sweep).make(tmp_path / "run")
    results, problems = load(sweep, run)
    assert problems == []
    recorded = {study: len(sweep.of(study)) for studies in cells.values() for study in studies}
    made = tuple(sections(results))
    evidence = {name: Evidence(CLAIMS.sweeps[name], sweep, recorded, {}, results, made)}
    reports = {name: evidence[name].tables}
    for part in CLAIMS.parts:
        for claim in part.claims:
            if all(test.figure.sweeps <= {name} for test in claim.tests):
                assert judged(claim, evidence, reports).verdict != NOT_RUN
        if part.sweep == name:
            assert set(part.tables) <= reports[name].keys()
            drawn = {each.name for section in made for each in section.images}
            assert set(part.figures) <= drawn
    for figure in CLAIMS.values.values():
        if figure.sweeps <= {name}:
            look_up(figure, reports)
