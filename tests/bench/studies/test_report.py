"""The whole report: from verified records alone, whole, the same every time."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from caster.errors import CasterError
from caster_bench.studies import gate_policies
from caster_bench.studies import report as reporting
from caster_bench.studies.naming import names
from caster_bench.studies.results import load
from caster_bench.sweeps import Spec
from tests.bench.studies.conftest import REJECTED, raw_records
from tests.support.altered_records import FAULTS, altered
from tests.support.command_line import cli
from tests.support.consistent_records import Consistent
from tests.support.report_files import assert_balanced, files


@pytest.fixture(scope="module")
def report(results, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reports") / "report"
    reporting.write_report(results, folder)
    return folder


def test_a_second_run_gives_the_same_bytes(report, results, tmp_path):
    reporting.write_report(results, tmp_path / "again")
    first = files(report)
    assert files(tmp_path / "again") == first
    assert {Path(name).suffix for name in first} == {
        *(".html", ".md", ".tex", ".csv", ".pdf", ".svg", ".png")
    }


def test_every_study_has_tables_and_figures(report):
    tables = {path.stem for path in (report / "tables").iterdir()}
    figures = {path.stem for path in (report / "figures").iterdir()}
    for study in (
        *("estimators", "certificate", "gate", "corruption", "coverage", "specificity", "cost"),
    ):
        assert any(name.startswith(study) for name in tables)
        assert any(name.startswith(study) for name in figures)


def test_latex_is_balanced_and_plain(report):
    for path in (report / "tables").glob("*.tex"):
        text = path.read_text()
        assert_balanced(text)
        assert text.isascii()
        counts = {line.count(" & ") for line in text.splitlines() if line.endswith(r"\\")}
        assert len(counts) == 1


def test_csv_has_the_numbers_of_the_page(report, results):
    rows = list(csv.DictReader(io.StringIO((report / "tables" / "gate.csv").read_text())))
    pooled = next(row for row in rows if row["data"] == "pooled")
    scores = [s for s in results.of("gate") if s.spec.method == "caster"]
    expected = 100 * np.mean([score.accuracy for score in scores])
    assert float(pooled["gated"]) == pytest.approx(expected)
    told = next(row for row in rows if row["data"].startswith("pooled, the paper"))
    assert [float(told[policy]) for policy in ("never", "always", "gated")] == [59.05, 55.7, 60.05]


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors, self.targets, self.sources, self.open = set(), set(), [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given["id"]} if "id" in given else set()
        self.targets |= {given["href"]} if "href" in given else set()
        self.sources += [given["src"]] if "src" in given else []
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_holds_everything_and_loads_nothing(report, results):
    text = (report / "index.html").read_text()
    page = Links()
    page.feed(text)
    assert page.open == []
    assert page.targets == {f"#{name}" for name in page.anchors}
    assert len(page.anchors) == 9  # seven studies, refusals, origin
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert len(page.sources) == len(list((report / "figures").glob("*.svg")))
    drawn = base64.b64decode(page.sources[0].partition(",")[2]).decode()
    assert "currentColor" in drawn
    assert not re.search(r"<(script|link)\b|https?://(?!www\.w3\.org)", text)
    assert results.sweep.sha256 in text
    for origin in results.provenance.values():
        assert origin.checkpoint in text
    assert "swin on cifar10: clean accuracy is below the threshold (20 cells)" in text


@pytest.fixture
def one_study(monkeypatch):
    """A report of one study, where the others would only take their time."""
    monkeypatch.setattr(reporting, "STUDIES", (gate_policies,))


@pytest.mark.usefixtures("one_study")
def test_the_command_writes_the_report(run, tmp_path):
    _, out = run
    file = out.parent / "every.toml"
    done = cli("bench", "report", file, "-o", tmp_path / "r", "--out", out)
    assert done.exit_code == 0, done.output
    assert "Pooled over 18 cells" in done.output
    assert (tmp_path / "r" / "index.html").is_file()


def test_nothing_is_written_from_records_that_do_not_verify(run, tmp_path):
    _, out = run
    broken = tmp_path / "run"
    shutil.copytree(out, broken)
    shutil.rmtree(next((broken / "cells").iterdir()))
    file = str(out.parent / "every.toml")
    for command in (["verify"], ["report", "-o", str(tmp_path / "r")]):
        done = cli("bench", command[0], file, *command[1:], "--out", broken)
        assert done.exit_code == 1
        assert "missing (1)" in done.output
        assert "1 problem in the records of" in done.output.replace("\n", " ")
        assert "`caster bench run` continues the run" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "r").exists()


def test_verify_says_what_to_do_about_incomplete_and_damaged_records(run, tmp_path):
    _, out = run
    broken = tmp_path / "run"
    shutil.copytree(out, broken)

    def last() -> str:
        done = cli("bench", "verify", out.parent / "every.toml", "--out", broken)
        assert done.exit_code == 1
        return done.stderr.splitlines()[-1]

    first, second, *_ = sorted((broken / "cells").iterdir())
    shutil.rmtree(first)
    (broken / "cells" / f".{'0' * 32}.x.tmp").mkdir()
    next((broken / "sources").glob("*.caster")).with_suffix(".json").unlink()
    next((broken / "sources").glob("*.caster")).unlink()
    assert "`caster bench run` continues the run" in last()
    (second / "cell.json").write_text("{}")
    assert "folders of cells listed as damaged, and `caster bench run` makes them again" in last()
    shutil.rmtree(second)
    assert "`caster bench run` continues the run" in last()
    (broken / "cells" / "notes.txt").write_text("!")
    assert last().endswith(f"in the records of {broken}")


def test_verify_says_that_nothing_is_wrong(run):
    sweep, out = run
    file = str(out.parent / "every.toml")
    done = cli("bench", "verify", file, "--out", out)
    assert done.exit_code == 0
    cells = len(sweep.cells)
    assert " ".join(done.output.split()) == (
        f"{cells} cells verified, 20 of them rejected, 0 of 5 checkpoint files compared: "
        "no problems found."
    )


@pytest.mark.usefixtures("one_study")
def test_an_earlier_report_is_replaced_and_nothing_else(results, tmp_path):
    folder = tmp_path / "mine"
    (folder / "tables").mkdir(parents=True)
    (folder / "tables" / "stale.csv").write_text("old")
    reporting.write_report(results, folder)
    assert not (folder / "tables" / "stale.csv").exists()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CasterError, match=r"holds thesis\.tex, which is not part of a report"):
        reporting.write_report(results, folder)
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def gated_cell(sweep, maker) -> Spec:
    """One that accepts some batch."""
    return next(
        s
        for s in sweep.cells
        if (s.method, s.data, s.alone) == ("caster", "cifar10", False)
        and (s.backbone, s.data) not in REJECTED
        and maker.columns(s)[1]["accepted"].any()
    )


@pytest.mark.parametrize(("change", "kinds"), FAULTS)
def test_a_gate_that_does_not_follow_from_its_transport_is_a_problem(run, tmp_path, change, kinds):
    sweep, out = run
    maker = Consistent(sweep, refused=REJECTED)
    spec = gated_cell(sweep, maker)
    copy = altered(out, tmp_path, maker, spec, change)
    results, problems = load(sweep, copy)
    assert results is None
    assert {problem.kind for problem in problems} == kinds
    assert {problem.where for problem in problems} == {spec.full}


def test_an_unaltered_gate_is_none(run, tmp_path):
    sweep, out = run
    maker = Consistent(sweep, refused=REJECTED)
    spec = gated_cell(sweep, maker)
    copy = altered(out, tmp_path, maker, spec, lambda samples, batches: None)
    _, problems = load(sweep, copy)
    assert problems == []


def test_processes_read_the_same(run, monkeypatch, results):
    monkeypatch.setattr("caster_bench.studies.verify.FEW_CELLS", 0)
    again, _ = load(*run)
    assert list(again.scores) == list(results.scores)
    for spec, score in results.scores.items():
        assert again.scores[spec].accuracy == score.accuracy
        np.testing.assert_array_equal(again.scores[spec].batches.min_tau, score.batches.min_tau)
    assert again.provenance == results.provenance


def test_scores_are_the_raw_rows(results, raw):
    by_key = {(r.method, r.stream): r for r in raw}
    assert len(by_key) == len(raw) == len(results.scores)
    for spec, score in results.scores.items():
        assert score.spec == spec
    accuracies = sorted(score.accuracy for score in results.scores.values())
    assert accuracies == pytest.approx(sorted(record.accuracy for record in raw))


def test_a_score_without_a_head_has_no_gain(results):
    score = next(score for score in results.scores.values() if score.spec.data == "pets")
    assert score.frozen is None
    with pytest.raises(CasterError, match="has no head to compare with"):
        _ = score.gain
    with pytest.raises(CasterError, match="no certificate was measured"):
        _ = score.certificate


def test_methods_are_named_with_settings_only_where_they_differ():
    plain = Spec("r", "d", "caster")
    other = replace(plain, settings=(("tau", 3.0),))
    tent = Spec("r", "d", "tent", settings=(("preset", "cifar10"),))
    assert names([plain, tent]) == {plain: "caster", tent: "tent"}
    assert names([plain, other, tent]) == {plain: "caster", other: other.label, tent: "tent"}


def test_raw_records_leave_out_the_rejected(run):
    assert len(raw_records(run[1])) == len(run[0].cells) - 20
