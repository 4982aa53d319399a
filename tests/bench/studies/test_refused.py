"""A backbone without a checkpoint: verified, reported, and nothing lost of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from caster_bench.studies import report as reporting
from caster_bench.studies.provenance import provenance_tables
from caster_bench.studies.results import load
from tests.support.command_line import cli
from tests.support.consistent_records import NO_CHECKPOINT, Consistent, sweep_of
from tests.support.record_maker import sha

pytestmark = pytest.mark.usefixtures("listed_figures")

TEXT = """
name = "two"
title = "Two backbones, one of them not there"

[backbones]
vit = {family = "layer", checkpoint = "vit"}
r18 = {family = "batch", checkpoint = "r18"}

[data.cifar10]
source = "cifar10:train"
target = "cifar10:test"
threshold = 0.5

[[grid]]
study = ["corruption", "gate"]
corruptions = ["fog"]
severities = [5]
batch_sizes = [16]
methods = ["frozen", "caster", "caster-ungated"]
"""


def made(folder: Path, missing: tuple[str, ...]) -> tuple:
    sweep = sweep_of(folder, TEXT)
    return sweep, Consistent(sweep, missing=missing).make(folder / "run")


@pytest.mark.parametrize("missing", ["vit", "r18"])  # before and after the one that is there
def test_the_data_of_the_others_stay(tmp_path, missing):
    results, problems = load(*made(tmp_path, (missing,)))
    assert problems == []
    assert len(results.rejected) == len(results.scores) == 3
    found = {table.name: table for table in provenance_tables(results)}
    assert found["data"].rows == (
        ("cifar10", "source", f"cifar10:train, 960 images, {sha('data', 'cifar10:train')}"),
        ("cifar10", "target", f"cifar10:test, 96 images, {sha('data', 'cifar10:test')}"),
    )
    rows = {row[0]: row[2:] for row in found["checkpoints"].rows}
    assert rows[missing] == (None, None, None)
    (there,) = rows.keys() - {missing}
    assert rows[there][0] == pytest.approx(51.0)
    assert all(isinstance(digest, str) for digest in rows[there][1:])


def test_the_report_names_it(tmp_path):
    results, _ = load(*made(tmp_path, ("vit",)))
    reporting.write_report(results, tmp_path / "report")
    for name in ("index.html", "report.md"):
        text = (tmp_path / "report" / name).read_text()
        assert f"vit on cifar10: {NO_CHECKPOINT} (3 cells)" in text
        assert "cifar10:test, 96 images" in text


def test_the_commands_go_on(tmp_path):
    _, out = made(tmp_path, ("vit",))
    file = str(tmp_path / "every.toml")
    done = cli("bench", "verify", file, "--out", out)
    assert done.exit_code == 0, done.output
    assert "6 cells verified, 3 of them rejected" in " ".join(done.output.split())
    done = cli("bench", "report", file, "--out", out, "-o", tmp_path / "r")
    assert done.exit_code == 0, done.output
    assert "Pooled over 1 cell, " in done.output
    assert f"vit on cifar10 was rejected: {NO_CHECKPOINT}" in " ".join(done.output.split())


def test_with_all_rejected_there_is_a_word_and_no_report(tmp_path):
    _, out = made(tmp_path, ("vit", "r18"))
    file = str(tmp_path / "every.toml")
    done = cli("bench", "verify", file, "--out", out)
    assert done.exit_code == 0, done.output
    done = cli("bench", "report", file, "--out", out, "-o", tmp_path / "r")
    assert done.exit_code != 0
    assert not (tmp_path / "r").exists()
