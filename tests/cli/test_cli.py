"""The commands, as a user types them: exit status, output, and one line for bad input."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.main import get_command

import caster
from caster import state as states
from caster.cli.app import app
from tests.conftest import problem
from tests.support import command_line
from tests.support.command_line import cli as run

pytestmark = pytest.mark.usefixtures("listed_figures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    h, y = problem(n=900)
    np.savez(folder / "source.npz", features=h, labels=y)
    np.savez(folder / "target.npz", features=1.3 * h[:150] + 1, logits=5.0 * np.eye(5)[y[:150]])
    assert run("fit", folder / "source.npz", "-o", folder / "s.caster").exit_code == 0
    return folder


def refusal(*arguments) -> str:
    return command_line.refusal(run(*arguments))


def test_fit_says_what_it_made(folder):
    result = run("fit", folder / "source.npz", "-o", folder / "again.caster", "--k-max", 2)
    assert result.exit_code == 0
    assert "920 samples of 5 classes, 12 features -> 2 directions" in result.stdout
    assert caster.load(folder / "again.caster").get_params()["k_max"] == 2


def test_predict_summarises_and_writes(folder):
    result = run("predict", folder / "s.caster", folder / "target.npz", "-o", folder / "out.csv")
    assert result.exit_code == 0
    assert "150 rows in 3 batches" in result.stdout
    assert (
        "predictions of 150 in compared and accepted batches differ from the frozen head's"
        in result.stdout
    )
    assert len((folder / "out.csv").read_text().splitlines()) == 151


def test_predict_warns_of_answers_that_changed_for_no_reason_it_knows(folder, tmp_path):
    with np.load(folder / "target.npz") as file:
        given = dict(file)
    wrong = np.roll(given["logits"], 1, axis=1)
    np.savez(tmp_path / "wrong.npz", features=given["features"], logits=wrong)
    result = run("predict", folder / "s.caster", tmp_path / "wrong.npz", "-o", tmp_path / "o.csv")
    assert result.exit_code == 0
    assert "in compared and accepted batches differ from the frozen head's (" in result.stdout
    assert "check on labelled data with `caster evaluate`" in result.stderr
    result = run("predict", folder / "s.caster", folder / "target.npz", "-o", tmp_path / "o.csv")
    assert result.stderr == ""


def test_predict_options(folder):
    out = folder / "out.parquet"
    result = run(
        "predict", folder / "s.caster", folder / "target.npz", "-o", out,
        "--batch-size", 30, "--tau", 1e-6, "--no-gate",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "150 rows in 5 batches" in result.stdout
    assert "rejected: ratio" in result.stdout
    assert "Gate off" in result.stdout


def test_inspect_shows_what_is_held(folder):
    result = run("inspect", folder / "s.caster")
    assert result.exit_code == 0
    moments = caster.load(folder / "s.caster").moments_
    for part in ("920", "12 -> 4", f"{moments.margin:.4g}", "tau 0.8", "covariances", "not bound"):
        assert part in result.stdout
    assert states.digest(states.load(folder / "s.caster"))[:40] in result.stdout
    for label, count in enumerate(moments.counts):
        assert re.search(rf"^ +{label} +{count} *$", result.stdout, re.MULTILINE)


def test_inspect_lists_many_classes_when_asked_to(tmp_path):
    h, y = problem(n_classes=30, n=300)
    caster.Caster().fit(h, [f"[bold]kind {c}[/]" for c in y]).save(tmp_path / "run[a].caster")
    short = run("inspect", tmp_path / "run[a].caster").stdout
    assert "run[a].caster" in "".join(short.split())  # however the title is wrapped
    assert "10 more" in short
    assert short.count("[bold]kind") == 20
    assert run("inspect", tmp_path / "run[a].caster", "--classes").stdout.count("[bold]kind") == 30


def test_tables_share_one_look_and_fit_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    h, y = problem(n=900)
    names = np.array([f"{c} {'long name ' * 12}{'unbroken' * 12}" for c in "abcde"])
    np.savez("source.npz", features=h, labels=names[y])
    np.savez("target.npz", features=h, labels=names[y], logits=5.0 * np.eye(5)[(y + 1) % 5])
    assert run("fit", "source.npz", "-o", "s.caster").exit_code == 0
    for command, prose in (
        (
            ("predict", "s.caster", "target.npz", "-o", "out.csv"),
            ("Mechanism", "Order", "Median", "Writ"),
        ),
        (
            ("evaluate", "s.caster", "target.npz"),
            ("Use it", "Feature transport", "On 920", "Verdicts", "Order", "Writ"),
        ),
        (("inspect", "s.caster"), ()),
        (("methods",), ()),
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
        table = [line for line in result.stdout.splitlines() if not line.startswith(prose or "\0")]
        assert max(map(len, table)) <= 80
        assert any(set(line.strip()) == {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"} for line in table)
        assert not any(set(line) & set("┃│┏└") for line in table)
        assert "…" not in result.stdout  # nothing is cut off


def test_doctor_speaks(folder):
    result = run("doctor", folder / "s.caster", "--batch-size", 4)
    assert result.exit_code == 0
    assert "diagonal map" in result.stdout
    assert "single class" in result.stdout
    assert "\n- N = 920 source samples" in result.stdout
    assert result.stdout.count("\n- ") == 8


def test_demo_prints_and_writes(tmp_path):
    result = run("demo", "-o", tmp_path / "page.html")
    assert result.exit_code == 0
    for part in ("Clean, shuffled", "Shifted by haze", "sorted by class", "The verdict costs"):
        assert part in result.stdout
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "command",
    [
        (),
        *((name,) for name in ("fit", "predict", "evaluate", "inspect", "doctor", "demo")),
        ("cache", "clear"),
    ],
)
def test_every_command_explains_itself(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert "bool" not in result.stdout  # a flag takes no value


def test_without_arguments_the_first_steps_are_commands_that_exist():
    result = run()
    assert result.exit_code == 0
    lines = re.findall(r"^  (caster \w+.*?)(?:  .*)$", result.stdout, re.MULTILINE)
    assert [line.split()[1] for line in lines] == ["demo", "fit", "doctor", "evaluate", "predict"]
    assert max(map(len, result.stdout.splitlines())) <= 80
    for line in lines:  # a usage error would exit with 2; a missing file exits with 1
        if "demo" not in line:
            command = run(*line.replace("--model M", "--model none.onnx").split()[1:])
            assert command.exit_code == 1, command.output


def test_a_command_of_the_benchmark_says_what_to_install():
    commands = get_command(app)
    del commands.commands["bench"]  # as without caster-bench
    with pytest.raises(Exception, match="pip install caster-bench"):
        commands.get_command(typer.Context(commands), "bench")


def test_version():
    assert run("--version").stdout == f"caster {caster.__version__}\n"


def test_bad_input_is_one_line(folder, tmp_path):
    source, target, state = (folder / n for n in ("source.npz", "target.npz", "s.caster"))
    out = tmp_path / "out.csv"
    assert "does not exist" in refusal("fit", tmp_path / "none.npz", "-o", tmp_path / "s")
    assert "has no `labels`" in refusal("fit", target, "-o", tmp_path / "s")
    assert "no folder" in refusal("fit", source, "-o", tmp_path / "no" / "s")
    assert "has the name of an ONNX file" in refusal("fit", source, "-o", tmp_path / "s.onnx")
    assert "k_max must be" in refusal("fit", source, "-o", tmp_path / "s", "--k-max", 0)
    assert "not a caster state" in refusal("predict", source, target, "-o", out)
    assert "does not exist" in refusal("predict", tmp_path / "none", target, "-o", out)
    assert "must end in" in refusal("predict", state, target, "-o", tmp_path / "out.xls")
    assert "tau must be" in refusal("predict", state, target, "-o", out, "--tau", -1)
    assert "not a caster state" in refusal("inspect", target)
    assert "does not exist" in refusal("doctor", tmp_path / "none")
    assert "it is a folder" in refusal("demo", "-o", tmp_path)
    before = source.read_bytes()
    assert "is an input" in refusal("fit", source, "-o", source)
    assert source.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_wrong_width_is_one_line(folder, tmp_path):
    np.savez(tmp_path / "narrow.npz", features=np.zeros((70, 3)))
    message = refusal(
        "predict", folder / "s.caster", tmp_path / "narrow.npz", "-o", tmp_path / "out.csv"
    )
    assert "a batch must be (samples, 12), not (64, 3)" in message


def test_ctrl_c_ends_in_one_line_and_leaves_nothing(folder, tmp_path, monkeypatch):
    def interrupted(self, batch, head_logits=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(caster.Caster, "adapt", interrupted)
    result = run("predict", folder / "s.caster", folder / "target.npz", "-o", tmp_path / "out.csv")
    assert result.exit_code == 130
    assert result.stderr == "caster: interrupted, nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_state_ends_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "s.caster").touch()
    monkeypatch.setattr("os.access", lambda path, mode, **options: False)  # root may read anything
    for command in ("doctor", "inspect"):
        assert "is truncated, damaged or not" in refusal(command, tmp_path / "s.caster")


def parameters(command):
    yield from command.get_params(typer.Context(command))
    for inner in getattr(command, "commands", {}).values():
        yield from parameters(inner)


def test_no_path_is_checked_before_the_command_runs(folder, tmp_path, monkeypatch):
    file = tmp_path / "s.caster"
    file.touch()
    monkeypatch.setattr("os.access", lambda path, mode, **options: mode != os.R_OK)
    commands = get_command(app)
    paths = [each for each in parameters(commands) if "Path" in str(each.type_descriptor)]
    assert paths
    for path in paths:
        many = path.multiple or path.nargs == -1
        path.process_value(typer.Context(commands), [str(file)] if many else str(file))
    assert run("fit", folder / "source.npz", "-o", file).exit_code == 0  # replaces it


def test_the_module_runs_as_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "caster", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"caster {caster.__version__}\n"
