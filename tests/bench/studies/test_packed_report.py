"""A report from packed records is the report from the run, byte for byte, on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from caster_bench.records.store import Pack
from caster_bench.studies import report as reporting
from caster_bench.studies.results import load
from tests.support.command_line import cli
from tests.support.report_files import ELSEWHERE, files

pytestmark = pytest.mark.usefixtures("listed_figures")


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory) -> Path:
    _, out = run
    folder = tmp_path_factory.mktemp("packed") / "records"
    words = ["bench", "pack", str(out.parent / "every.toml"), "-o", str(folder)]
    done = cli(*words, "--out", out)
    assert done.exit_code == 0, done.output
    cells = len(run[0].cells)
    assert f"{cells} cells in {folder}, {cells} of them new. 11 files" in done.output
    return folder


@pytest.mark.whole
def test_the_report_of_a_pack_made_elsewhere_is_the_runs(
    run, results, packed, tmp_path, rendered_figures
):
    _, out = run
    reporting.write_report(results, tmp_path / "here")
    (tmp_path / "matplotlibrc").write_text("font.size: 14\nsvg.fonttype: none\n")
    words = ["bench", "report", out.parent / "every.toml", "--records", packed]
    command = [sys.executable, "-m", "caster", *words, "-o", tmp_path / "there"]
    environment = os.environ | ELSEWHERE
    environment |= {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run(list(map(str, command)), env=environment, check=True, timeout=120)
    first = files(tmp_path / "here")
    assert len(first) > 50
    assert files(tmp_path / "there") == first


def test_scores_of_a_pack_are_those_of_the_run(run, results, packed):
    sweep, _ = run
    again, problems = load(sweep, Pack(packed))
    assert problems == []
    assert list(again.scores) == list(results.scores)
    for spec, score in results.scores.items():
        assert plain(again.scores[spec]) == plain(score)
    assert again.rejected == results.rejected
    assert again.provenance == results.provenance


def plain(score: Any) -> dict[str, Any]:
    """A score in values that can be compared, to the last bit."""
    told = {name: value for name, value in vars(score).items() if name != "batches"}
    columns = vars(score.batches).items()
    return told | {name: c if isinstance(c, tuple) else c.tobytes() for name, c in columns}


DRAWN = """
import numpy as np
from caster_bench.studies.results import correlation_interval, spearman
from caster.report.intervals import bootstrap

rng = np.random.default_rng(0)
counts, sizes = rng.random((301, 7)), rng.integers(1, 99, 301).astype(float)
found = [*bootstrap(counts, sizes), *bootstrap(counts, np.ones(301))]
found.append(correlation_interval(counts[:, 0], sizes))
print([x.hex() for one in found for x in (one.low, one.high)])
print(spearman(counts[:, 1], sizes).hex())
"""


def test_intervals_have_the_same_bits_on_other_processors():
    """Figures in a report are rounded, which would hide most of it."""
    said = []
    for other in ({}, ELSEWHERE):
        environment = os.environ | other | {"PYTHONPATH": ELSEWHERE["PYTHONPATH"]}
        command = [sys.executable, "-c", DRAWN]
        done = subprocess.run(command, env=environment, check=True, timeout=120, stdout=-1)
        said.append(done.stdout)
    assert said[0] == said[1] != b""


def test_the_command_verifies_a_pack(run, packed, tmp_path):
    _, out = run
    sweep = str(out.parent / "every.toml")
    done = cli("bench", "verify", sweep, "--records", packed)
    assert done.exit_code == 0
    assert "no problems found" in done.output
    both = ["bench", "verify", sweep, "--records", str(packed), "--out", str(out)]
    told = cli(*both)
    assert told.exit_code == 1
    assert "use --out or --records, not both" in " ".join(told.output.split())
    none = cli("bench", "verify", sweep, "--records", tmp_path / "no")
    assert none.exit_code == 1
    assert f"there is no folder {tmp_path / 'no'}" in " ".join(none.output.split())


def test_the_command_says_why_it_packs_nothing(run, tmp_path):
    _, out = run
    other = tmp_path / "other.toml"
    text = (out.parent / "every.toml").read_text()
    other.write_text(text.replace('"frozen", "caster", "tent"]\nalone', '"frozen"]\nalone'))
    words = ["bench", "pack", str(other), "--out", str(out), "-o", str(tmp_path / "records")]
    told = cli(*words)
    assert told.exit_code == 1
    said = " ".join(told.output.split())
    assert "the sweep does not have 2 of the recorded cells, such as " in said
    assert "leave them out with --prune" in said
    assert not (tmp_path / "records").exists()
