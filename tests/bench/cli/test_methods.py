"""caster methods."""

from __future__ import annotations

import pytest

from caster_bench.methods.registry import entries, names
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


@pytest.mark.parametrize(("typed", "meant"), [("tnet", "tent"), ("PEA", "pea"), ("Tnet", "tent")])
def test_unknown_method_gives_a_one_line_error(typed, meant):
    line = refusal(cli("methods", typed))
    assert line == f"there is no method {typed!r}: did you mean {meant!r}?"
