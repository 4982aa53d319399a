"""caster methods."""

from __future__ import annotations

import re

import pytest

from caster_bench.methods import registry
from caster_bench.methods.protocol import Frozen
from caster_bench.methods.registry import Entry, entries, names
from tests.support.command_line import cli, refusal


def test_methods_are_listed_with_needs_and_gradients():
    done = cli("methods")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip() and line[1] != " "}
    assert set(names()) <= set(rows)
    assert rows["tent"].split()[-1] == "yes"
    assert rows["caster"].split()[-2:] == ["state", "no"]
    for entry in entries():
        assert entry.summary.split()[0] in rows[entry.name]


@pytest.mark.parametrize("name", names())
def test_method_is_described(name):
    done = cli("methods", name)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{name}: ")
    assert "gradients" in done.stdout
    assert ">>>" not in done.stdout


def test_settings_presets_and_gate_of_one_method():
    words = " ".join(cli("methods", "tent+referee").stdout.split())
    assert "setting norms = ('batch',)" in words
    assert "preset imagenet: optimizer = 'sgd', lr = 0.00025" in words
    assert "gate agreement = 0." in words


def test_a_summary_that_is_the_whole_docstring_is_printed_once(monkeypatch):
    class Mine(Frozen):
        """Do nothing."""

    entry = Entry("mine", "Do nothing.", Mine)
    monkeypatch.setattr(registry, "METHODS", (*registry.METHODS, entry))
    done = cli("methods", "mine")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("Do nothing.") == 1


def test_a_method_that_cannot_be_loaded_is_one_line(monkeypatch, tmp_path):
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[caster_bench.methods]\nbroken = nowhere.at_all:E\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken", "broken+referee"):
        line = refusal(cli("methods", name))
        assert line.startswith("broken cannot be loaded from nowhere.at_all:E: No module named")
    assert re.search(r"^ broken +broken cannot", cli("methods").stdout, re.MULTILINE)


@pytest.mark.parametrize(("typed", "meant"), [("tnet", "tent"), ("PEA", "pea"), ("Tnet", "tent")])
def test_unknown_method_gives_a_one_line_error(typed, meant):
    line = refusal(cli("methods", typed))
    assert line == f"there is no method {typed!r}: did you mean {meant!r}?"
