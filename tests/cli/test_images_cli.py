"""Fit, predict and evaluate on images, as a user types them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import caster
from caster import state as states
from caster.cli import console
from caster.cli.predict import _warn_of_order
from caster.io.images import open_images
from caster.models.onnx import OnnxModel
from caster.models.onnx.model import Input
from caster_bench.data.corruptions import corrupt
from tests.support import command_line
from tests.support.colours import CAST, NAMES, TOML, patches, write_folder, write_model
from tests.support.command_line import cli
from tests.support.onnx_export import exported, seeded
from tests.support.tables import read_table

pytestmark = pytest.mark.usefixtures("listed_figures")

PIXELS, TRUTH = patches(20)
SHIFTED, TARGET = patches(10, seed=1, cast=CAST)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    write_folder(folder / "source", PIXELS, TRUTH)
    write_folder(folder / "target", SHIFTED, TARGET)
    write_model(folder / "m.onnx")
    (folder / "p.toml").write_text(TOML)
    (folder / "names.txt").write_text("".join(f"{name}\n" for name in NAMES))
    np.savez(folder / "features.npz", features=np.zeros((4, 3)), labels=[0, 0, 1, 1])
    return folder


@pytest.fixture
def typed(made, tmp_path, monkeypatch):
    """Types a command in an empty folder, with a cache of its own; M stands for the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))
    monkeypatch.delenv("CASTER_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    model = f"--model {made}/m.onnx --preprocessing {made}/p.toml"

    def typed(line):
        words = line.replace("M ", f"{model} ").replace("@", f"{made}/").split()
        return cli(*words)

    if not (made / "s.caster").exists():
        assert typed("fit M @source -o @s.caster").exit_code == 0
    return typed


@pytest.fixture
def refusal(typed, tmp_path):
    """The one line that a command ends in, having written nothing."""

    def refusal(line):
        before = sorted(path.name for path in tmp_path.iterdir())
        said = command_line.refusal(typed(line))
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return said

    return refusal


def no_reading(monkeypatch):
    def read(self, index):
        raise AssertionError(f"image {index} was read")

    monkeypatch.setattr("caster.io.image_files.FileImages.read", read)


# the three commands


def test_fit_says_what_it_made_and_reads_no_image_twice(typed, made, monkeypatch):
    no_reading(monkeypatch)
    result = typed("fit M @source --k-max 2 -o two.caster")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("160 samples of 8 classes, 3 features -> 2 directions, margin")
    assert result.stderr == ""
    held = states.load("two.caster")
    assert (held.settings.k_max, held.head) == (2, tuple(range(8)))
    assert held.model_sha256 == OnnxModel(made / "m.onnx").sha256


def test_fit_says_how_the_head_fares_and_warns_if_it_is_mixed_up(typed, tmp_path):
    good = typed("fit M @source -o good.caster")
    assert re.search(r"the frozen head reaches 9\d\.\d%", good.stdout)
    assert good.stderr == ""
    order = [3, 1, 4, 0, 5, 7, 2, 6]
    write_model(tmp_path / "n.onnx", order)
    names = tmp_path / "order.txt"
    names.write_text("\n".join(NAMES[c] for c in order))
    mixed = typed(f"fit M @source --model {tmp_path}/n.onnx -o mixed.caster")
    said = " ".join(mixed.stderr.split())
    assert re.search(r"reaches 1\d\.\d%, and 9\d\.\d% .*: 'azure' to 'denim', 'coral' to", said)
    assert "`--classes`" in said
    named = typed(f"fit M @source --model {tmp_path}/n.onnx --classes {names} -o named.caster")
    assert named.stderr == ""
    assert states.load("named.caster").head == tuple(order.index(c) for c in range(8))


def test_every_command_that_uses_a_state_warns_of_mixed_up_outputs(typed, tmp_path, monkeypatch):
    order = [3, 1, 4, 0, 5, 7, 2, 6]
    write_model(tmp_path / "n.onnx", order)
    (tmp_path / "order.txt").write_text("\n".join(NAMES[c] for c in order))
    monkeypatch.setattr("caster.serve.serve", lambda *args, **options: None)
    commands = (
        "predict M STATE @target --model n.onnx --mechanism features --batch-size 80 -o o.csv",
        "compile n.onnx STATE --preprocessing @p.toml --mechanism features -o c.onnx",
        "doctor STATE",
        "serve M --model n.onnx STATE",
    )
    typed("fit M @source --model n.onnx -o mixed.caster")
    typed("fit M @source --model n.onnx --classes order.txt -o named.caster")
    for command in commands:
        result = typed(command.replace("STATE", "mixed.caster"))
        assert result.exit_code == 0, result.output
        said = " ".join(result.stderr.split())
        assert re.search(r"right on only 1\d\.\d% of the source, .*\(--classes\)", said)
        assert typed(command.replace("STATE", "named.caster")).stderr == ""


def test_predict_warns_of_sorted_images_and_mixes_them_if_told_to(typed):
    result = typed("predict M @s.caster @target --mechanism features -o out.csv")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"caster: .*target is sorted by class, .*--shuffle 0\n", result.stderr)
    assert "80 rows in 2 batches" in result.stdout
    line = "predict M @s.caster @target --mechanism features --shuffle 0 --no-safeguards"
    mixed = typed(f"{line} -o out.csv")
    assert mixed.exit_code == 0
    assert "accepted" in mixed.stdout
    rows = [line.split(",") for line in Path("out.csv").read_text().splitlines()[1:]]
    assert len(rows) == 80
    assert np.mean([row[1].split("/")[0] == row[3] for row in rows]) > 0.9
    changed = sum(row[3] != row[5] for row in rows)
    assert f"{changed} predictions of 80 in compared and accepted batches differ" in mixed.stdout


def test_images_of_another_size_than_the_models_are_resized_as_advised(typed, refusal, made):
    large = np.kron(SHIFTED, np.ones((2, 2, 1), np.uint8))
    write_folder(made / "large", large, TARGET)
    said = refusal("predict M @s.caster @large --shuffle 0 -o out.csv")
    found = re.match(r"the model takes .*, not \(64, 3, 12, 12\): add `(resize = [^`]+)`", said)
    resized = made / "resized.toml"
    resized.write_text(f'{TOML}{found[1]}\ninterpolation = "bilinear"\n')
    line = f"M --preprocessing {resized}"
    assert typed(f"fit {line} @source -o resized.caster").exit_code == 0
    result = typed(f"predict {line} resized.caster @large --shuffle 0 -o out.csv")
    assert result.exit_code == 0, result.output


def test_one_batch_of_everything_is_no_cause_for_a_warning(typed):
    result = typed("predict M @s.caster @target --mechanism features --batch-size 80 -o out.csv")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "80 rows in 1 batch\n" in re.sub(" +\n", "\n", result.stdout)


def test_predict_on_files(typed):
    names = " ".join(f"@target/{NAMES[c]}/{i:03}.png" for i, c in enumerate(TARGET) if c < 3)
    result = typed(f"predict M @s.caster {names} --mechanism features -o out.parquet")
    assert result.exit_code == 0, result.output
    assert "30 rows in 1 batch" in result.stdout
    assert result.stderr == ""


def test_evaluate_prints_and_writes(typed, made):
    result = typed(
        "evaluate M @s.caster @target --mechanism features --batch-size 40 --seed 2 "
        "--no-safeguards -o page.html"
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(Path("page.json").read_text())
    assert "80 samples in 2 batches" in result.stdout
    for name, label in (
        ("frozen", "frozen head"),
        ("source_gda", "Source-GDA"),
        ("ungated", "transport, ungated"),
        ("gated", "transport, gated"),
    ):
        score = found["scores"][name]
        (line,) = (x for x in result.stdout.splitlines() if x.strip().startswith(label + " "))
        numbers = line.split(label)[1].split()
        assert numbers[0] == f"{100 * score['accuracy']:.1f}"
        assert numbers[1:] == [  # two batches give no interval
            f"{100 * score['harm']:.1f}",
            f"{100 * score['help']:.1f}",
            f"{score['nll']:.3f}",
            f"{100 * score['calibration_error']:.1f}",
        ]
        assert len(line) <= 80
    assert found["scores"]["gated"]["accuracy"] > found["scores"]["frozen"]["accuracy"] + 0.5
    assert "Verdicts: 2 accepted; median ratio" in result.stdout
    assert "Written: page.html, page.json" in result.stdout
    assert found["digests"]["state"] == states.digest(states.load(made / "s.caster"))
    assert "<svg" in Path("page.html").read_text()


def test_by_default_the_layers_of_a_graph_are_aligned(typed):
    result = typed("predict M @s.caster @target -o out.csv")
    assert result.exit_code == 0, result.output
    assert "Mechanism: layers, aligned at 1 site" in result.stdout
    assert "is sorted by class, and aligned layers use that order, so accuracy" in result.stderr
    assert {row["method"] for row in read_table(Path("out.csv"))} == {"mixture-transport"}
    result = typed("evaluate M @s.caster @target --batch-size 40 --seed 2 -o page.html")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("page.json").read_text())
    assert found["scores"]["gated"]["accuracy"] > found["scores"]["frozen"]["accuracy"] + 0.5
    assert "mixture transport, gated" in result.stdout


@pytest.mark.parametrize(
    ("mechanism", "method", "effect"),
    [
        ("layers", "mixture-transport", "accuracy can be higher than on a shuffled stream; pass"),
        ("layers", "layer-transport", "few classes mislead layer transport: shuffle with"),
        ("features", "caster", "few classes mislead feature transport: shuffle with"),
    ],
)
def test_what_sorted_images_do_depends_on_the_method(made, capsys, mechanism, method, effect):
    adapter = SimpleNamespace(mechanism=mechanism, method=method)
    _warn_of_order(open_images(made / "target"), 8, adapter)
    assert f"{effect} --shuffle 0" in capsys.readouterr().err


def test_evaluate_in_order_scores_the_answers_of_predict(typed):
    shuffled = typed("evaluate M @s.caster @target -o page.html")
    assert "shuffled with seed 0" in shuffled.stdout
    assert "Order: shuffled. `caster predict` keeps" in shuffled.stdout
    kept = typed("evaluate M @s.caster @target --in-order -o page.html")
    assert "in their own order" in kept.stdout
    assert "Order: " not in kept.stdout
    found = json.loads(Path("page.json").read_text())
    predicted = typed("predict M @s.caster @target --every 1 -o out.csv")
    assert "Order: that of the inputs" in predicted.stdout
    rows = read_table(Path("out.csv"))
    right = [row["prediction"] == row["image"].split("/")[0] for row in rows]
    assert np.mean(right) == found["scores"]["gated"]["accuracy"]
    ratios = [batch["verdict"]["ratio"] for batch in found["batches"]]
    assert sorted({float(row["ratio"]) for row in rows}) == sorted(ratios)


def test_evaluate_in_order_warns(typed):
    result = typed("evaluate M @s.caster @target --mechanism features --in-order --batch-size 20")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("caster-evaluation.json").read_text())
    assert found["reasons"] == {"class_order": 4}
    assert "Verdicts: 4 rejected (class_order); median ratio inf." in result.stdout
    assert "caster: The stream looks ordered by class" in result.stderr
    assert os.path.exists("caster-evaluation.html")


def test_inspect_shows_the_head(typed, made):
    def head(path):
        words = typed(f"inspect {path}").stdout
        return re.search(r"\n head  (.*?)\n layers ", words, re.DOTALL)[1].split()

    assert " ".join(head("@s.caster")) == "logits 0 to 7, in the order of the classes"
    some = np.isin(TRUTH, [1, 4, 6])
    write_folder(made / "some", PIXELS[some], TRUTH[some])
    assert typed("fit M @some --classes @names.txt -o some.caster").exit_code == 0
    assert " ".join(head("some.caster")) == "logits 1, 4, 6"
    assert typed("fit M @some --no-head -o none.caster").exit_code == 0
    assert " ".join(head("none.caster")).startswith("no head: Source-GDA answers")


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate"])
def test_help_shows_every_option_in_full(typed, command):
    result = typed(f"{command} --help")
    assert result.exit_code == 0
    cache = () if command == "predict" else ("--cache",)
    for option in ("--model", "--preprocessing", "--skip-unreadable", *cache, "--data-root"):
        assert re.search(rf"{option}\s", result.stdout)
    if command != "fit":
        assert re.search(r"--allow-other-preprocessing\s", result.stdout)
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


# one line for bad input


def test_images_without_a_model(refusal):
    wanted = "for images, name the model with --model"
    assert refusal("fit @source -o s").endswith(f"source is not a feature file: {wanted}")
    assert refusal("fit cifar10:train -o s") == f"cifar10:train is not a feature file: {wanted}"
    assert wanted in refusal("predict @s.caster @target/azure/000.png -o o.csv")
    assert wanted in refusal("evaluate @s.caster @target")


def test_an_npz_of_images_without_a_model(refusal, made):
    np.savez(made / "shots.npz", images=SHIFTED, labels=TARGET)
    wanted = "holds images: name the model with --model"
    for line in ("fit @shots.npz -o s", "predict @s.caster @shots.npz -o o.csv"):
        assert refusal(line).endswith(wanted)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("fit @features.npz -o s --head fc", "--head"),
        ("fit @features.npz -o s --preprocessing in-graph", "--preprocessing"),
        ("fit @features.npz -o s --provider CPUExecutionProvider", "--provider"),
        ("fit @features.npz -o s --channels-last", "--channels-last"),
        ("fit @features.npz -o s --no-head", "--no-head"),
        ("fit @features.npz -o s --classes @names.txt", "--classes"),
        ("fit @features.npz -o s --batch-size 8", "--batch-size"),
        ("fit @features.npz -o s --cache .", "--cache"),
        ("predict @s.caster @features.npz -o o.csv --every 4", "--every"),
        ("predict @s.caster @features.npz -o o.csv --shuffle 0", "--shuffle"),
        ("predict @s.caster @features.npz -o o.csv --skip-unreadable", "--skip-unreadable"),
        ("evaluate @s.caster @features.npz --allow-other-model", "--allow-other-model"),
        ("evaluate @s.caster @features.npz --data-root .", "--data-root"),
    ],
)
def test_options_of_images_without_a_model(refusal, line, option):
    assert refusal(line) == f"{option} requires --model"


def test_names_of_outputs_that_are_ignored_are_rejected(refusal):
    said = refusal("fit M @some --no-head --classes @names.txt -o s")
    assert said == "--classes names the model's outputs, which --no-head ignores: omit one"


def test_comparisons_are_for_layers_only(refusal):
    said = refusal("predict M @s.caster @target --mechanism features --every 4 -o o.csv")
    assert said == "--every is for layers, and this adapter transports features: omit it"


def test_models_that_will_not_do(refusal, made):
    prepared = f"--preprocessing {made}/p.toml @source -o s"
    assert "model.pt is not a model" in refusal(f"fit --model model.pt {prepared}")
    assert "none.onnx: No such file" in refusal(f"fit --model none.onnx {prepared}")
    (made / "text.onnx").write_text("no model")
    assert "text.onnx is truncated, damaged or not" in refusal(f"fit --model @text.onnx {prepared}")
    assert "no provider Gpu: onnxruntime here has" in refusal("fit M @source -o s --provider Gpu")
    said = refusal("fit M @source -o s --device cuda")
    assert said.startswith("--device does not apply to")
    assert "use `--provider CUDAExecutionProvider`" in said
    assert refusal("fit M @source -o s --channels-last").startswith(
        "--channels-last does not apply"
    )
    assert "no output, node or tensor is named 'nose'" in refusal("fit M @source -o s --head nose")


def test_a_classifier_that_must_be_named_is_asked_for_as_it_is_typed(refusal, made):
    several = onnx.load(made / "m.onnx")
    several.graph.output.append(onnx.helper.make_tensor_value_info("h", 1, ["N", 3]))
    onnx.save(several, made / "several.onnx")
    line = "fit --model @several.onnx --preprocessing @p.toml @source -o s"
    said = refusal(line)
    assert "--head" in said
    assert "`y`, `h`" in said


def test_preprocessing_that_will_not_do(refusal, made):
    wanted = "give --preprocessing FILE.toml, which states range, mean, std, layout"
    for line in (
        "fit @source -o s",
        "predict @s.caster @target -o o.csv",
        "evaluate @s.caster @source",
    ):
        told = refusal(f"{line} --model @m.onnx")
        assert "does not define its preprocessing: give --preprocessing" in told
        assert wanted in told
    fit = "fit --model @m.onnx @source -o s --preprocessing"
    assert "cannot read none.toml" in refusal(f"{fit} none.toml")
    (made / "bytes.toml").write_text('range=255\nmean=0\nstd=1\nlayout="NCHW"\ndtype="uint8"')
    assert "takes float32, the preprocessing makes uint8" in refusal(f"{fit} @bytes.toml")
    (made / "last.toml").write_text(TOML.replace("NCHW", "NHWC"))
    assert "the preprocessing makes (any, any, any, 3) (NHWC)" in refusal(f"{fit} @last.toml")
    (made / "large.toml").write_text(TOML + "crop = 9\n")
    said = refusal(f"{fit} @large.toml")
    assert "the preprocessing makes (any, 3, 9, 9)" in said
    assert "set `crop` to [6, 6] in --preprocessing" in said


def test_an_image_of_the_wrong_size_is_named(refusal, made):
    tall = write_folder(made / "tall", [np.repeat(p, 2, axis=0) for p in PIXELS], TRUTH)
    said = refusal(f"fit M {tall} -o s")
    assert "takes (any, 3, 6, 6), not (64, 3, 12, 6): add `resize = [6, 6]`" in said
    assert said.endswith("(on azure/000.png and 63 more)")
    (made / "crop.toml").write_text(TOML + "crop = 6\n")
    small = write_folder(made / "small", PIXELS[:, :3], TRUTH)
    said = refusal(f"fit --model @m.onnx --preprocessing @crop.toml {small} -o s")
    assert said.startswith("azure/000.png: an image of 6x3 ")


def test_timm_without_a_network(refusal, monkeypatch):
    def create_model(name, pretrained=False, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")

    offline = SimpleNamespace(create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", offline)
    said = refusal("fit --model timm:resnet50 @source -o s")
    assert "weights of timm:resnet50" in said
    assert said.endswith("--checkpoint")


def test_an_unreadable_image_is_named_and_skipped_when_asked_to(typed, refusal, made):
    folder = write_folder(made / "spoilt", SHIFTED, TARGET)
    for name in ("azure/001.png", "fawn/055.png"):
        (folder / name).write_bytes(b"")
    for line in (
        f"fit M {folder} -o s",
        f"predict M @s.caster {folder} --shuffle 0 -o o.csv",
        f"evaluate M @s.caster {folder}",
    ):
        said = refusal(line)
        assert said.startswith(f"cannot read {folder}/azure/001.png: it is empty, damaged or")
        assert said.endswith("repair or remove it, or leave it out with --skip-unreadable")
        result = typed(f"{line} --skip-unreadable")
        assert result.exit_code == 0, result.output
        lines = [line for line in result.stderr.splitlines() if "head is right" not in line]
        assert lines[0] == "caster: skipped 2 unreadable images:"
        assert [re.search(r"\w+/\d+\.png", line).group() for line in lines[1:3]] == [
            "azure/001.png",
            "fawn/055.png",
        ]


def test_files_that_are_no_images_are_named(typed, made, tmp_path):
    folder = write_folder(tmp_path / "mixed", SHIFTED, TARGET)
    (folder / "Thumbs.db").touch()
    (folder / "azure/clip.mp4").touch()
    for line in (
        "fit M mixed -o s",
        "predict M @s.caster mixed --shuffle 0 -o o.csv",
        "evaluate M @s.caster mixed",
        "corrupt mixed out --corruption contrast --severity 5 --workers 1",
    ):
        result = typed(line)
        assert result.exit_code == 0, result.output
        said = "caster: skipped 2 files that are not images: Thumbs.db, azure/clip.mp4"
        assert result.stderr.splitlines()[0] == said


def test_many_skipped_images_are_counted(typed, made):
    folder = write_folder(made / "ruined", SHIFTED, TARGET)
    for i in range(7):
        (folder / "azure" / f"{i:03}.png").write_bytes(b"")
    result = typed(f"evaluate M @s.caster {folder} --skip-unreadable")
    lines = result.stderr.splitlines()
    assert lines[0] == "caster: skipped 7 unreadable images:"
    assert len(lines) == 7
    assert lines[-1] == "  and 2 more"


def test_names_are_printed_as_they_are(refusal):
    assert refusal("fit M sets:x -o s").startswith("sets:x does not exist: DATA is")
    assert refusal("fit M [red]sets -o s").startswith("[red]sets does not exist: DATA is")


def test_data_that_will_not_do(refusal, made):
    assert "nowhere does not exist: DATA is" in refusal("fit M nowhere -o s")
    assert refusal("fit M pets:test -o s") == (
        "no data folder for pets:test: set CASTER_DATA or pass --data-root"
    )
    assert "has no labels" in refusal("fit M @target/azure -o s")
    assert "has no labels" in refusal("evaluate M @s.caster @target/azure")
    few = write_folder(made / "few", PIXELS[:60], TRUTH[:60])
    said = refusal(f"fit M {few} -o s")
    assert "8 logits" in said
    assert "--classes" in said
    assert "cannot read the class names in none.txt" in refusal(
        f"fit M {few} --classes none.txt -o s"
    )


def test_another_model_or_preprocessing_names_the_option_that_allows_it(typed, refusal, made):
    write_model(made / "other.onnx", bias=1.0)
    (made / "other.toml").write_text(TOML.replace("0.5", "0.4"))
    model = "--model @other.onnx --preprocessing @p.toml"
    toml = "--model @m.onnx --preprocessing @other.toml"
    for command in ("predict @s.caster @target --shuffle 1 -o o.csv", "evaluate @s.caster @target"):
        said = refusal(f"{command} {model}")
        assert "the state was fitted with another model (digest" in said
        assert said.endswith("fit again with this one, or allow it with --allow-other-model")
        said = refusal(f"{command} {toml}")
        assert said.endswith("or allow it with --allow-other-preprocessing")
        assert typed(f"{command} {model} --allow-other-model").exit_code == 0
        assert typed(f"{command} {toml} --allow-other-preprocessing").exit_code == 0
        for path in ("o.csv", "caster-evaluation.html", "caster-evaluation.json"):
            if os.path.exists(path):
                os.unlink(path)


def test_outputs_that_will_not_do(refusal, made):
    assert "page.txt must end in .html" in refusal("evaluate M @s.caster @target -o page.txt")
    assert "must end in .csv or .parquet" in refusal("predict M @s.caster @target -o o.xls")
    assert "no folder no" in refusal("fit M @source -o no/s.caster")
    assert "has the name of an image" in refusal("fit M @source -o s.png")
    assert "has the name of an ONNX file" in refusal("fit M @source -o adaptive.onnx")
    assert "it is a folder" in refusal("fit M @source -o @source")


@pytest.mark.parametrize(
    "line",
    [
        "fit M @source -o @m.onnx",
        "fit M @source -o @p.toml",
        "fit M @source --classes @names.txt -o @names.txt",
        "predict M @state.csv @target -o @state.csv",
        "evaluate M @state.html @target -o @state.html",
        "evaluate M @state.json @target -o @state.html",
    ],
)
def test_no_output_takes_the_place_of_an_input(refusal, made, line):
    for suffix in ("csv", "html", "json"):
        (made / f"state.{suffix}").write_bytes((made / "s.caster").read_bytes())
    before = {path: path.read_bytes() for path in made.iterdir() if path.is_file()}
    assert refusal(line).endswith("is an input: write to another file")
    assert before == {path: path.read_bytes() for path in made.iterdir() if path.is_file()}


def test_a_cache_that_cannot_be_written(refusal, made):
    said = refusal(
        "evaluate M @s.caster @target --mechanism features -o o.html --cache @p.toml/below"
    )
    assert said.startswith(f"cannot cache features in {made}/p.toml/below: ")
    assert said.endswith("--cache")


def test_a_damaged_cache_is_reported_and_made_again(typed, made):
    assert typed("fit M @source -o s.caster --cache c").exit_code == 0
    before = states.digest(states.load("s.caster"))
    (folder,) = os.listdir("c")
    with open(f"c/{folder}/features.npy", "r+b") as stream:
        stream.truncate(200)
    result = typed("fit M @source -o s.caster --cache c")
    assert result.exit_code == 0, result.output
    assert f"c/{folder} were damaged" in result.stderr
    assert states.digest(states.load("s.caster")) == before


@pytest.mark.parametrize(
    "line",
    [
        "predict M @s.caster @target -o o.csv --shuffle -1",
        "evaluate M @s.caster @target --seed -1",
        "fit M @source -o s --batch-size 0",
    ],
)
def test_numbers_out_of_range(typed, line):
    result = typed(line)
    assert result.exit_code == 2
    assert re.search(r"greater than or equal|not in the range", result.output)


# progress and Ctrl-C


def test_progress_on_a_terminal(typed, made, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(console, "errors", terminal)
    assert typed("fit M @source -o s.caster --cache c").exit_code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    for stage in ("through the model", "pass 1 of 2: subspace", "pass 2 of 2: moments"):
        assert re.search(rf"{stage}\s.*160/160", shown)
    assert "Traceback" not in shown


def test_progress_starts_where_an_earlier_run_ended(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=screen, force_terminal=True, width=80))
    with console.progress_bar() as progress:
        progress("through the model", 128, 200)
    assert "128/200" in screen.getvalue()


def interrupted_at(monkeypatch, call):
    """Ctrl-C while the model has its so-many-th batch."""
    place, calls = Input.prepared, []

    def interrupted(self, batch):
        calls.append(len(batch))
        if len(calls) == call:
            raise KeyboardInterrupt
        return place(self, batch)

    monkeypatch.setattr(Input, "prepared", interrupted)
    return calls


@pytest.mark.parametrize(
    ("line", "outputs"),
    [
        ("fit M @source --batch-size 40 -o s.caster", ["s.caster"]),
        ("fit M @source --no-layers --batch-size 40 -o s.caster", ["s.caster"]),
        (
            "evaluate M @s.caster @target --mechanism features --batch-size 20 -o e.html",
            ["e.html", "e.json"],
        ),
    ],
)
def test_ctrl_c_leaves_nothing_half_written_and_the_next_run_goes_on(
    typed, tmp_path, monkeypatch, line, outputs
):
    calls = interrupted_at(monkeypatch, 3)
    result = typed(f"{line} --cache c")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == (
        "caster: interrupted, no output was written; run the same command to continue\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert len(calls) == 3
    result = typed(f"{line} --cache c")
    assert result.exit_code == 0, result.output
    assert len(calls) == 5  # the third batch again, and the fourth
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["c", *outputs])


def test_ctrl_c_before_the_first_batch_of_a_prediction_promises_nothing(typed, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("caster.cli.predict.load_adapter", interrupted)
    result = typed("predict M @s.caster @target -o out.csv")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "caster: interrupted, nothing was written\n"


def test_a_folder_of_several_data_sets_is_noticed(typed, made, tmp_path):
    for name in ("new", "source"):
        shutil.copytree(made / "source", tmp_path / "photos" / name)
    (tmp_path / "photos/spare").mkdir()
    (tmp_path / "photos/spare/x.png").write_bytes(b"")
    line = "fit M photos -o s.caster --no-head --skip-unreadable --limit 20"
    assert "give one of them" not in typed(line).stderr
    shutil.rmtree(tmp_path / "photos/spare")
    said = typed(line).stderr
    assert "every class folder of photos (new, source) has its images in subfolders only" in said
    assert "give one of them instead, such as photos/new" in said


def test_class_folders_with_their_images_in_one_folder_are_no_data_sets(typed, made, tmp_path):
    for folder in (made / "source").iterdir():  # as in Tiny ImageNet
        shutil.copytree(folder, tmp_path / "tiny" / folder.name / "images")
        (tmp_path / "tiny" / folder.name / "boxes.txt").touch()
    said = typed("fit M tiny -o s.caster --no-head --skip-unreadable --limit 20").stderr
    assert "give one of them" not in said


SLOW = """
import sys, time
from caster.cli import main
from caster.models.onnx import OnnxModel
from caster.models.onnx.model import Input
place = OnnxModel.placed
def slow(self, batch):
    print("batch", flush=True)
    time.sleep(0.3)
    return place(self, batch)
OnnxModel.placed = slow
sys.argv = ["caster", *sys.argv[1:]]
main()
"""


def test_a_real_ctrl_c(made, tmp_path):
    options = ["--model", made / "m.onnx", "--preprocessing", made / "p.toml", "--batch-size", "8"]
    command = ["fit", *options, made / "source", "-o", tmp_path / "s", "--cache", tmp_path / "c"]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *command], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        for _ in range(3):
            assert process.stdout.readline() == "batch\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("caster: interrupted, no output was written")
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (partial,) = (tmp_path / "c").iterdir()
    assert json.loads((partial / "note.json").read_text())["seen"] in (16, 24)


# hostile files


def test_an_image_over_the_limit_counts_as_unreadable(typed, refusal, made):
    folder = write_folder(made / "large", SHIFTED, TARGET)
    Image.new("RGB", (40, 30)).save(folder / "azure" / "001.png")
    for line in (
        f"fit M {folder} -o s",
        f"predict M @s.caster {folder} --shuffle 0 -o o.csv",
        f"evaluate M @s.caster {folder}",
    ):
        said = refusal(f"{line} --max pixels=1199")
        assert "001.png: it has 40 x 30 pixels, over the limit of 1,199 pixels" in said
        assert "--max pixels=1200" in said
        assert said.endswith("leave it out with --skip-unreadable")
        result = typed(f"{line} --max pixels=1199 --skip-unreadable")
        assert result.exit_code == 0, result.output
        assert "skipped 1 unreadable image" in result.stderr
        assert "--max pixels=1200" in result.stderr


def test_a_raised_limit_reads_what_was_skipped_before(typed, made):
    folder = write_folder(made / "raised", SHIFTED, TARGET)
    Image.new("RGB", (6, 60)).save(folder / "azure" / "001.png")
    (made / "resized.toml").write_text(f'{TOML}resize = 6\ninterpolation = "box"\ncrop = 6\n')
    model = f"--model {made}/m.onnx --preprocessing {made}/resized.toml"
    skipped = typed(f"fit {model} {folder} -o a.caster --max pixels=359 --skip-unreadable")
    assert skipped.exit_code == 0, skipped.output
    assert "skipped 1" in skipped.stderr
    assert skipped.stdout.startswith("79 samples")
    again = typed(f"fit {model} {folder} -o b.caster --max pixels=360")
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith("80 samples")


@pytest.mark.parametrize("given", ["pixels", "pixels=", "pixels=1e9", "pixels=-1", "rows=3", "=3"])
def test_limits_that_are_none(refusal, given):
    assert "use NAME=NUMBER" in refusal(f"fit @features.npz -o s --max {given}")


def test_limits_of_feature_files(typed, refusal):
    assert "--max features=3" in refusal("fit @features.npz -o s --max features=2")
    assert "--max classes=2" in refusal("fit @features.npz -o s --max classes=1")
    assert "--max features=3" in refusal(
        "predict @s.caster @features.npz -o o.csv --max features=2"
    )
    assert "--max features=3" in refusal("evaluate @s.caster @features.npz --max features=2")


@pytest.mark.parametrize(
    "line",
    [
        "fit --model M.onnx --preprocessing pipe @source -o s",
        "fit --model pipe.onnx --preprocessing @p.toml @source -o s",
        "fit M @source --classes pipe -o s",
        "fit pipe.npz -o s",
        "fit M pipe.png -o s",
        "predict M pipe @target -o o.csv",
        "predict pipe @features.npz -o o.csv",
        "inspect pipe",
        "bench plan pipe",
    ],
)
def test_no_command_waits_for_a_pipe(refusal, made, line):
    for name in ("pipe", "pipe.npz", "pipe.onnx", "pipe.png"):
        os.mkfifo(name)
    said = refusal(line.replace("M.onnx", f"{made}/m.onnx"))
    assert re.search("not a regular file|is not a file|pipe.png does not exist", said)


def test_names_and_classes_that_are_not_utf8(typed, made):
    folder = write_folder(made / "odd", SHIFTED, TARGET)
    (folder / "azure").rename(os.fsdecode(os.fsencode(folder) + b"/azur\xe9"))
    odd = os.fsdecode(b"azur\xe9")
    (folder / odd / "000.png").rename(folder / odd / os.fsdecode(b"\xff.png"))
    assert typed(f"fit M {folder} -o odd.caster").exit_code == 0
    for suffix in ("csv", "parquet"):
        result = typed(f"predict M odd.caster {folder} --shuffle 0 --no-gate -o o.{suffix}")
        assert result.exit_code == 0, result.output
    text = Path("o.csv").read_text(encoding="utf-8")
    assert ",azur\\udce9/\\udcff.png," in text
    result = typed(f"evaluate M odd.caster {folder} --no-safeguards")
    assert result.exit_code == 0, result.output
    assert "azur\\udce9" in Path("caster-evaluation.html").read_text(encoding="utf-8")


def test_an_output_whose_name_is_not_utf8_is_said(made, tmp_path):
    code = "import sys; from caster.cli.app import main; sys.argv[0] = 'caster'; main()"
    name = os.fsencode(tmp_path) + b"/\xe9.csv"
    words = ["predict", f"{made}/s.caster", f"{made}/features.npz", "-o", name, "--batch-size", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, env=environment, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "\\udce9.csv" in done.stdout
    assert os.path.exists(name)


def test_formulas_are_neutralised_on_request(typed, made):
    folder = write_folder(made / "formulas", SHIFTED, TARGET)
    (folder / "azure").rename(folder / "=azure")
    assert typed(f"fit M {folder} -o f.caster").exit_code == 0
    line = f"predict M f.caster {folder} --shuffle 0 -o"
    assert typed(f"{line} plain.csv").exit_code == 0
    assert typed(f"{line} safe.csv --spreadsheet-safe").exit_code == 0
    plain, safe = Path("plain.csv").read_text(), Path("safe.csv").read_text()
    assert ",=azure" in plain
    assert ",=azure" not in safe
    assert safe.replace(",'=", ",=") == plain


# what caster corrupt wrote


@pytest.fixture
def corrupted(typed, made):
    """Writes a corrupted copy of the target to a folder, from an array or a folder of files."""

    def corrupted(out, options, files=False):
        data = made / ("target" if files else "target.npz")
        if not files:
            np.savez(data, images=SHIFTED, labels=np.array(NAMES)[TARGET])
        result = typed(f"corrupt {data} {out} --workers 1 {options}")
        assert result.exit_code == 0, result.output

    return corrupted


@pytest.mark.parametrize("files", [False, True])
def test_evaluate_what_corrupt_wrote(typed, corrupted, files):
    corrupted("any-name", "--corruption contrast --severity 5", files)
    result = typed("evaluate M @s.caster any-name -o one.html")
    assert result.exit_code == 0, result.output
    assert "caster: any-name has 80 images: contrast-5\n" in result.stderr
    assert json.loads(Path("one.json").read_text())["name"] == "any-name:contrast-5"


@pytest.mark.parametrize(("severities", "count"), [("2,4", 2), ("1-5", 5)])
@pytest.mark.parametrize("files", [False, True])
def test_several_severities(corrupted, caplog, files, severities, count):
    corrupted("out", f"--corruption contrast,brightness --severity {severities}", files)
    for data, size in (
        ("out", 160 * count), ("out:brightness", 80 * count), ("out:contrast-2", 80)
    ):  # fmt: skip
        caplog.clear()
        images = open_images(data, labelled=True)
        assert (images.name, len(images)) == (data, size)
        assert set(Counter(images.labels.tolist()).values()) == {size // 8}
        assert ("for one of them give out:" in caplog.text) == (size > 80)


def test_a_severity_is_the_one_that_was_made(corrupted):
    corrupted("five", "--corruption contrast --severity 1-5")
    corrupted("two", "--corruption contrast --severity 2,4")
    expected = corrupt(SHIFTED, "contrast", severity=4, seed=0)
    for folder in ("five", "two"):
        images = open_images(f"{folder}:contrast-4", labelled=True)
        assert np.array_equal(np.stack([images.read(i) for i in range(80)]), expected)
        assert images.labels.tolist() == [NAMES[c] for c in TARGET]
    both = open_images("two")
    assert np.array_equal(both.read(80 + 7), expected[7])
    assert both.sha256 != open_images("two:contrast-4").sha256


def test_a_condition_that_is_not_there(refusal, corrupted):
    corrupted("out", "--corruption contrast --severity 2,4")
    assert refusal("evaluate M @s.caster out:fog").endswith("contrast-2, contrast-4")
    assert "out:contrast-2, or save" in refusal("evaluate M @s.caster out/contrast-2.npy")


# some of the data


def test_limits(typed, made):
    def limited(line):
        result = typed(line)
        assert result.exit_code == 0, result.output
        return result

    assert "24 samples of 8 classes" in limited("fit M @source --limit 24 -o s").stdout
    assert (states.load("s").moments.counts == 3).all()
    result = limited("predict M @s.caster @target --mechanism features --limit 12 -o o.csv")
    assert "is sorted by class" in result.stderr
    table = read_table(Path("o.csv"))
    assert [row["row"] for row in table] == [str(i) for i in range(12)]
    limited("predict M @s.caster @target --limit 12 --shuffle 1 -o o.csv")
    table = read_table(Path("o.csv"))
    names = open_images(made / "target").names
    assert [names[int(row["row"])] for row in table] == [row["image"] for row in table]
    assert len({row["image"].split("/")[0] for row in table}) > 3
    limited("evaluate M @s.caster @target --limit 50 --seed 1 -o page.html")
    assert json.loads(Path("page.json").read_text())["samples"] == 50


@pytest.fixture
def features(made):
    """Feature files of six classes, and a state that knows four of them."""
    h, y = np.random.default_rng(0).normal(size=(300, 4)), np.arange(300) % 6
    h += 5 * np.eye(6, 4)[y]
    names = np.array(["ant", "bee", "cat", "dog", "elk", "fox"])
    np.savez("all.npz", features=h, labels=names[y])
    np.savez("numbers.npz", features=h, labels=y)
    np.savez("known.npz", features=h[y < 4], labels=names[y[y < 4]])
    caster.Caster().fit(h[y < 4], names[y[y < 4]]).save("four.caster")


def test_limits_on_features(typed, features):
    assert "30 samples of 6 classes" in typed("fit all.npz --limit 30 -o s").stdout
    assert typed("predict four.caster known.npz --limit 70 -o o.csv").exit_code == 0
    assert len(read_table(Path("o.csv"))) == 70
    assert typed("evaluate four.caster known.npz --limit 70 -o p.html").exit_code == 0
    assert json.loads(Path("p.json").read_text())["samples"] == 70
    assert typed("fit all.npz --limit 0 -o s").exit_code == 2


def test_a_limit_that_leaves_a_class_without_a_covariance(refusal, features):
    assert refusal("fit all.npz --limit 11 -o s").endswith("--limit to at least 12")


def test_classes_that_the_state_lacks(typed, refusal, features):
    said = refusal("evaluate four.caster all.npz")
    assert "does not know the class 'elk'" in said
    assert said.endswith("skip such samples with --known-classes-only")
    result = typed("evaluate four.caster all.npz --known-classes-only -o some.html")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0] == (
        "caster: left out 100 of 300 samples, of classes that the state lacks: "
        "'elk' (50), 'fox' (50)"
    )
    assert typed("evaluate four.caster known.npz -o known.html").exit_code == 0
    some, known = (json.loads(Path(f"{name}.json").read_text()) for name in ("some", "known"))
    assert some["scores"] == known["scores"]
    assert (some["left_out"], known["left_out"]) == ({"elk": 50, "fox": 50}, {})


def test_classes_of_images_that_the_state_lacks(typed, made):
    strange = write_folder(made / "ivory", SHIFTED, TARGET, [*NAMES[:7], "ivory"])
    result = typed(f"evaluate M @s.caster {strange} --known-classes-only --limit 40 -o p.html")
    assert result.exit_code == 0, result.output
    assert "left out 10 of 80 samples" in result.stderr
    found = json.loads(Path("p.json").read_text())
    assert (found["samples"], len(found["classes"])) == (40, 7)


@pytest.mark.parametrize("option", ["", " --known-classes-only"])
def test_numbers_against_names_get_a_hint(refusal, features, option):
    said = refusal(f"evaluate four.caster numbers.npz{option}")
    assert "its labels are numbers: save names instead (labels=np.array(names)[labels])" in said


@pytest.mark.parametrize(
    "line", ["fit f.csv -o s", "predict four.caster f.csv -o o.csv", "evaluate four.caster f.csv"]
)
def test_a_csv_file_of_features(refusal, features, line):
    Path("f.csv").write_text("a,b\n1,2\n")
    said = refusal(line)
    assert ".npz or .parquet" in said
    assert said.endswith("np.savez('features.npz', features=X, labels=y)")


def test_grey_images_through_a_model_of_one_channel(typed, tmp_path):
    net = seeded(lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    ))  # fmt: skip
    onnx.save(exported(net, torch.zeros(2, 1, 8, 8)), "grey.onnx")
    Path("grey.toml").write_text(
        'range = 1\nmean = 0.5\nstd = 0.5\nlayout = "NCHW"\nchannels = "grey"\n'
    )
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    pixels = (rng.integers(0, 80, (60, 8, 8)) + 80 * labels[:, None, None]).astype(np.uint8)
    write_folder(tmp_path / "png", pixels, labels)
    np.savez("grey.npz", images=pixels, labels=np.array(NAMES)[labels])
    session = onnxruntime.InferenceSession("grey.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": pixels[:, None].astype(np.float32) / 127.5 - 1})
    expected = np.array(sorted(NAMES[:3]))[logits.argmax(axis=1)]
    model = "--model grey.onnx --preprocessing grey.toml"
    for data in ("png", "grey.npz"):
        for line in (
            f"fit {model} {data} -o s.caster",
            f"predict {model} s.caster grey.npz -o out.csv",
            f"evaluate {model} s.caster {data}",
        ):
            result = typed(line)
            assert result.exit_code == 0, result.output
        assert [row["frozen"] for row in read_table(Path("out.csv"))] == expected.tolist()
