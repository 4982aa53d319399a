"""Layers on the command line: fitted, kept and resumed, answered with, and refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import softmax

import caster
from caster import CasterError, wrap
from caster import state as states
from caster.adapt import image_features, prediction
from caster.core.channels import MEASURED
from caster.core.stream_labels import StreamLabels
from caster_bench.methods.registry import create, find
from tests.support import command_line
from tests.support.colours import CAST, NAMES, TOML, patches, write_folder, write_model
from tests.support.command_line import cli
from tests.support.sampling import sampled
from tests.support.tables import read_table

pytestmark = pytest.mark.usefixtures("listed_figures")

REPEAT = 6  # 6 pixels to 36: a network that downsamples by 32 has one left


def large(pixels):
    return pixels.repeat(REPEAT, axis=1).repeat(REPEAT, axis=2)


SOURCE, TRUTH = patches(12)
SHIFTED, TARGET = patches(16, seed=1, cast=CAST)


def prepared(pixels):
    scaled = (large(pixels).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    return torch.tensor(scaled, dtype=torch.float32)


def network(name):
    """A network at random that has seen the source: BatchNorms measured, its head fitted."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=len(NAMES))
    with torch.no_grad():
        net.train()
        for layer in net.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = None
        net(prepared(SOURCE))
        net.eval()
        features = net.forward_head(net.forward_features(prepared(SOURCE)), pre_logits=True)
        rows = torch.cat([features, torch.ones(len(features), 1)], 1).double()
        gram = rows.T @ rows
        gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
        wanted = 10 * torch.eye(len(NAMES)).double()[TRUTH]
        fitted = torch.linalg.solve(gram, rows.T @ wanted).float()
        head = net.get_classifier()
        head.weight.copy_(fitted[:-1].T)
        head.bias.copy_(fitted[-1])
    return net


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    write_folder(folder / "source", large(SOURCE), TRUTH)
    write_folder(folder / "target", large(SHIFTED), TARGET)
    (folder / "p.toml").write_text(TOML)
    for kind in ("resnet", "convnext"):
        save_file(network(f"test_{kind}").state_dict(), folder / f"{kind}.safetensors")
    write_model(folder / "m.onnx", size=6 * REPEAT)
    return folder


@pytest.fixture
def typed(made, tmp_path, monkeypatch):
    """Types a command in an empty folder; BN stands for a ResNet, LN for a ConvNeXt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))
    monkeypatch.setenv("COLUMNS", "80")

    def typed(line):
        line = line.replace("BN ", "resnet ").replace("LN ", "convnext ")
        timm = r"--model timm:test_\1 --checkpoint @\1.safetensors --preprocessing @p.toml "
        line = re.sub(r"\b(resnet|convnext) ", timm, line)
        line = line.replace("ONNX ", "--model @m.onnx --preprocessing @p.toml ")
        return cli(*line.replace("@", f"{made}/").split())

    for model in ("BN", "LN"):
        if not (made / f"{model}.caster").exists():
            assert typed(f"fit {model} @source --layers -o @{model}.caster").exit_code == 0
    if not (made / "plain.caster").exists():
        assert typed("fit LN @source --no-layers -o @plain.caster").exit_code == 0
        assert typed("fit ONNX @source -o @onnx.caster").exit_code == 0
    return typed


@pytest.fixture
def refusal(typed, tmp_path):
    def refusal(line):
        said = command_line.refusal(typed(line))
        assert list(tmp_path.glob("out*")) == []
        return said

    return refusal


def model_of(made, kind):
    return wrap(
        f"timm:test_{kind}",
        checkpoint=made / f"{kind}.safetensors",
        preprocessing=made / "p.toml",
    )


def counted(monkeypatch, module, name, interrupted=None, error=KeyboardInterrupt):
    """Sizes of the batches that go through a function; an error comes with the so-many-th."""
    function, calls = getattr(module, name), []

    def counting(first, batch, *rest):
        calls.append(len(batch.rows))
        if len(calls) == interrupted:
            raise error
        return function(first, batch, *rest)

    monkeypatch.setattr(module, name, counting)
    return calls


def ran(monkeypatch, **options):
    """Batches that fit has run."""
    return counted(monkeypatch, image_features, "run", **options)


def answered(monkeypatch, **options):
    """Batches that predict has answered."""
    return counted(monkeypatch, prediction, "answer_images", **options)


def rows_of(path="out.csv"):
    return read_table(Path(path))


# fit


def test_fit_says_what_it_measured(typed):
    result = typed("fit LN @source --layers -o s.caster")
    assert (result.exit_code, result.stderr.count("\n")) == (0, result.stderr.count("caster: "))
    channels = sum(len(found.mean) for found in states.load("s.caster").layers.values())
    assert (
        f"Layers, aligned by default: 14 sites with {channels:,} channels in total, "
        in result.stdout
    )
    result = typed("fit BN @source --layers -o s.caster")
    layers = states.load("s.caster").layers
    assert len(layers) == 15  # of BatchNorms
    channels = sum(len(found.mean) for found in layers.values())
    assert (
        f"Layers, aligned by default: 15 sites with {channels:,} channels in total, "
        in result.stdout
    )
    assert "Layers, aligned by default: 14 sites" in typed("fit LN @source -o s.caster").stdout
    assert "Layers" not in typed("fit LN @source --no-layers -o s.caster").stdout
    assert states.load("s.caster").layers is None


def test_layers_are_measured_on_features_kept_without_them(typed, monkeypatch):
    assert typed("fit LN @source --cache c --no-layers -o plain.caster").exit_code == 0
    calls = ran(monkeypatch)
    assert typed("fit LN @source --cache c --layers -o s.caster").exit_code == 0
    assert sum(calls) == len(SOURCE)
    assert len(states.load("s.caster").layers) == 14
    for more in (
        "--layers",
        "--no-layers",
        "--k-max 3",
    ):  # neither asks the model again
        assert typed(f"fit LN @source --cache c {more} -o t.caster").exit_code == 0
        assert (states.load("t.caster").layers is None) == (more == "--no-layers")
    assert sum(calls) == len(SOURCE)
    one, other = states.load("s.caster"), states.load("t.caster")
    for site, found in one.layers.items():
        np.testing.assert_array_equal(found.mean, other.layers[site].mean)


def test_an_interrupted_fit_goes_on_with_its_layers(typed, monkeypatch):
    line = "fit LN @source --layers --batch-size 30"
    assert typed(f"{line} --cache whole -o whole.caster").exit_code == 0
    with monkeypatch.context() as patched:
        ran(patched, interrupted=3)
        assert typed(f"{line} --cache c -o s.caster").exit_code == 130
    with monkeypatch.context() as patched:
        calls = ran(patched)
        assert typed(f"{line} --cache c -o s.caster").exit_code == 0
        assert calls == [30, 6]
    assert states.digest(states.load("s.caster")) == states.digest(states.load("whole.caster"))


@pytest.mark.parametrize(
    ("first", "then", "left"),
    [
        ("--no-layers", "--layers", 96),
        ("--layers", "--no-layers", 36),
    ],
)
def test_a_fit_that_goes_on_otherwise_has_what_it_was_asked_for(
    typed, monkeypatch, first, then, left
):
    line = "fit LN @source --cache c --batch-size 30 -o s.caster"
    with monkeypatch.context() as patched:
        ran(patched, interrupted=3)
        assert typed(f"{line} {first}").exit_code == 130
    calls = ran(monkeypatch)
    assert typed(f"{line} {then}").exit_code == 0
    assert sum(calls) == left
    if then == "--layers":
        assert {found.count for found in states.load("s.caster").layers.values()} == {96.0}
    else:  # and what is kept must not be taken for layers of all images
        assert states.load("s.caster").layers is None
        assert typed(f"{line} --layers").exit_code == 0
        assert {found.count for found in states.load("s.caster").layers.values()} == {96.0}


def damaged(layers):
    layers["sites"][3][2] = layers["sites"][3][3]  # a mean


def measured_otherwise(layers):
    """As before class tokens were left out."""
    assert layers["of"] == MEASURED
    layers |= {"of": "all sites", "sites": [["norm", "in", 1, 2.0, [0.0], [1.0]]]}


@pytest.mark.parametrize("change", [damaged, measured_otherwise])
def test_layers_that_cannot_be_used_are_made_again(typed, change):
    line = "fit LN @source --layers --cache c -o s.caster"
    assert typed(line).exit_code == 0
    before = states.digest(states.load("s.caster"))
    (note,) = Path("c").glob("*/note.json")
    kept = json.loads(note.read_text())
    change(kept["layers"])
    note.write_text(json.dumps(kept))
    result = typed(line)
    assert ("were damaged" in result.stderr) == (change is damaged)
    assert result.exit_code == 0
    assert states.digest(states.load("s.caster")) == before


def test_unreadable_images_are_in_no_layer(typed, made):
    folder = write_folder(made / "spoilt", large(SOURCE), TRUTH)
    for name in ("azure/001.png", "brown/013.png"):
        (folder / name).write_bytes(b"")
    line = "fit LN @spoilt --skip-unreadable --layers --batch-size 12 -o s.caster"
    assert typed(line).exit_code == 0
    assert {found.count for found in states.load("s.caster").layers.values()} == {94.0}


def test_layers_that_cannot_be_fitted(refusal, made):
    np.savez(made / "f.npz", features=np.zeros((4, 3)), labels=[0, 0, 1, 1])
    said = refusal("fit @f.npz --layers -o out.caster")
    assert said == "--layers requires --model"
    said = refusal("fit LN @source --layers --no-head -o out.caster")
    assert "model's own classes" in said


# predict


def by_hand(made, kind, order, size=32, **settings):
    """Labels of frozen, ungated and gated layer transport, and the certificate, in batches."""
    model = model_of(made, kind)
    state = states.load(made / {"resnet": "BN.caster", "convnext": "LN.caster"}[kind])
    names = ("frozen", "mixture-transport-ungated", "mixture-transport")
    methods = [create(n, model, state, **(settings if n == names[2] else {})) for n in names]
    found = []
    shifted = prepared(SHIFTED)
    for start in range(0, len(order), size):
        batch = shifted[order[start : start + size]]
        given = [method.predict(batch) for method in methods]
        answers = [np.array(NAMES)[np.asarray(p.logits).argmax(1)] for p in given]
        found += [(*row, given[2]) for row in zip(*answers, strict=True)]
    return found


@pytest.mark.parametrize(
    ("kind", "state", "tau", "sites"),
    [("resnet", "BN", None, 15), ("convnext", "LN", 2.0, 14)],
)
def test_predictions_are_those_of_the_method(typed, made, kind, state, tau, sites):
    more = "" if tau is None else f" --tau {tau}"
    line = f"predict {state} @{state}.caster @target --shuffle 0 --batch-size 32 -o out.csv{more}"
    result = typed(line)
    assert result.exit_code == 0, result.output
    assert (
        "of the answers in compared and accepted batches differ" in result.stderr
    )  # the shift is strong
    order = np.random.default_rng(0).permutation(len(TARGET))
    expected = by_hand(made, kind, order, **({} if tau is None else {"tau": tau}))
    rows = rows_of()
    assert [int(row["row"]) for row in rows] == order.tolist()
    assert "mixture-transport" in {row["method"] for row in rows}
    for row, (frozen, _, gated, judged) in zip(rows, expected, strict=True):
        assert (row["prediction"], row["frozen"]) == (gated, frozen)
        assert row["reason"] == judged.reason
        assert row["verdict"] == ("accepted" if judged.accepted else "rejected")
        assert row["method"] == ("mixture-transport" if judged.accepted else "frozen")
        assert float(row["ratio"]) == pytest.approx(judged.ratio, rel=1e-4)
    where = f"at {sites} sites"  # the source is too small for full maps
    assert f"Mechanism: layers, aligned {where}.\n" in result.stdout


def test_rejected_batches_keep_the_frozen_answer_unless_the_gate_is_off(typed, made):
    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 32 --tau 0.001 -o out.csv"
    assert typed(line).exit_code == 0
    rows = rows_of()
    assert {(row["reason"], row["method"]) for row in rows} == {("ratio", "frozen")}
    assert all(row["prediction"] == row["frozen"] for row in rows)
    result = typed(f"{line} --no-gate")
    assert "rejected batches were adapted too" in result.stdout
    rows = rows_of()
    assert {(row["verdict"], row["method"]) for row in rows} == {("rejected", "mixture-transport")}
    order = np.random.default_rng(0).permutation(len(TARGET))
    ungated = [row[1] for row in by_hand(made, "convnext", order)]
    assert [row["prediction"] for row in rows] == ungated


def error(p):
    return (1 - p.max(axis=1)).mean()


def at_equal_temperature(after, before):
    logs = [np.log(logits.std(axis=1)).mean() for logits in (after, before)]
    return after * np.exp(logs[1] - logs[0])


def test_every_batch_is_judged_by_the_images_so_far(typed, made):
    """By nuclear norms while they come shuffled, as the source's do, for both models."""
    line = "predict BN @BN.caster @target --shuffle 0 --batch-size 8 --tau 0.85 -o out.csv"
    assert typed(line).exit_code == 0
    order = np.random.default_rng(0).permutation(len(TARGET))
    model, state = model_of(made, "resnet"), states.load(made / "BN.caster")
    aligned, frozen = (create(n, model, state) for n in ("mixture-transport-ungated", "frozen"))
    seen = StreamLabels.start(aligned.transport._start.labels.chain.prior)
    past, was_in_runs = [], False
    rows = rows_of()[::8]
    for row, images in zip(rows, np.split(order, 16), strict=True):
        batch = prepared(SHIFTED)[images]
        scores, logits = (m.predict(batch).logits.double().numpy() for m in (aligned, frozen))
        seen = seen.observe(softmax(logits, axis=1)).advance(softmax(logits, axis=1))
        labels = aligned.transport._classes.labels
        in_runs = labels.chain.is_correlated
        prior = np.log(labels.prior / labels.chain.prior)
        past = [] if in_runs != was_in_runs else past  # a stream that turns starts a new window
        past.append((scores if in_runs else scores - prior, logits))
        was_in_runs = in_runs
        after, before = (np.concatenate(part) for part in zip(*past, strict=True))
        if not in_runs:
            after = at_equal_temperature(after, before)
        p = softmax(before, axis=1)
        expected = error(softmax(after + (0 if in_runs else prior), axis=1)) / error(p)
        if labels.kind == "source":
            norms = np.linalg.norm(p, "nuc") / np.linalg.norm(softmax(after, axis=1), "nuc")
            expected = 0.98 * norms if seen.kind == "source" else max(0.98 * norms, expected / 1.1)
        assert float(row["ratio"]) == pytest.approx(expected, rel=1e-3)
        assert row["reason"] == ("accepted" if expected <= 0.85 else "ratio")
    assert {row["reason"] for row in rows} == {"accepted", "ratio"}


def test_without_layers_the_last_features_are_transported(typed, made):
    line = "@target --shuffle 0 -o"
    assert typed(f"predict LN @LN.caster {line} with.csv --mechanism features").exit_code == 0
    result = typed(f"predict LN @plain.caster {line} plain.csv")
    assert "Mechanism: features, transported.\n" in result.stdout
    assert rows_of("with.csv") == rows_of("plain.csv")


def test_features_are_answered_when_told_to_forgo_layers(typed, made):
    model = model_of(made, "convnext")
    features = model(prepared(SHIFTED)).features.numpy()
    np.savez("h.npz", features=features, labels=np.array(NAMES)[TARGET])
    result = typed("predict @LN.caster h.npz --mechanism features -o out.csv")
    assert result.exit_code == 0, result.output
    assert {row["method"] for row in rows_of()} <= {"caster", "source-gda"}
    result = typed("evaluate @LN.caster h.npz --mechanism features -o out.html")
    assert result.exit_code == 0, result.output


def test_layers_that_cannot_be_answered_with(typed, refusal, made):
    np.savez(made / "h.npz", features=np.zeros((40, 512)), labels=np.array(NAMES * 5))
    for line in ("predict @LN.caster @h.npz -o out.csv", "evaluate @LN.caster @h.npz -o out.html"):
        said = refusal(f"{line} --mechanism layers")
        assert said == "features have passed all layers: give images and --model"
    for line in (
        "predict LN @plain.caster @target --shuffle 0 -o out.csv",
        "evaluate LN @plain.caster @target -o out.html",
    ):
        assert refusal(f"{line} --mechanism layers").startswith("the state has no layers")
    line = "@LN.caster @target --shuffle 0 -o out.csv --allow-other-model"
    assert "has no tensor of the state's site" in refusal(f"predict ONNX {line}")
    assert "has no layer of the state's site" in refusal(f"predict BN {line}")
    headless = caster.fit(model_of(made, "convnext"), [(prepared(SOURCE), TRUTH)], use_head=False)
    headless.save(made / "headless.caster")
    line = "predict LN @headless.caster @target --shuffle 0 -o out.csv --mechanism layers"
    assert refusal(line).startswith("the state has no layers")
    said = refusal("predict LN @LN.caster @target --shuffle 0 --tau 0 -o out.csv")
    assert said.startswith("tau must be")


@pytest.mark.parametrize(
    "command", ["predict LN --shuffle 0 -o out.csv", "evaluate LN -o out.html"]
)
def test_images_of_several_sizes_share_no_map(refusal, tmp_path, command):
    pixels = [p[:, :32] if i < 20 else p for i, p in enumerate(large(SHIFTED))]
    write_folder(tmp_path / "sizes", pixels, TARGET)
    said = refusal(f"{command} @LN.caster sizes")
    found = re.match(
        r"images of several sizes cannot be aligned together \(such as \w+/(\d+).png and "
        r"\w+/(\d+).png\): add a `resize` and its `interpolation` to the preprocessing and fit "
        r"again, or set --mechanism to features if the model takes any size",
        said,
    )
    assert [int(number) < 20 for number in found.groups()].count(True) == 1


# evaluate, inspect, doctor


def test_evaluate_scores_layer_transport(typed, made):
    result = typed("evaluate BN @BN.caster @target --batch-size 32 -o page.html")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(Path("page.json").read_text())
    order = np.random.default_rng(0).permutation(len(TARGET))
    frozen, ungated, gated, judged = zip(*by_hand(made, "resnet", order), strict=True)
    truth = np.array(NAMES)[TARGET[order]]
    for name, answers in (("frozen", frozen), ("ungated", ungated), ("gated", gated)):
        assert found["scores"][name]["accuracy"] == np.mean(np.array(answers) == truth)
    assert found["scores"]["gated"]["accuracy"] > found["scores"]["frozen"]["accuracy"] + 0.1
    assert (found["mechanism"], found["method"]) == ("layers", "mixture-transport")
    own = find("mixture-transport").options()
    shown = {"prior", "memory", "depth", "maps", "tau", "window"}
    assert found["settings"] == {name: own[name] for name in shown}
    for batch, first in zip(found["batches"], judged[::32], strict=True):
        assert batch["verdict"] | {"confident": 0, "classes": 0} == {
            "accepted": first.accepted,
            "reason": first.reason,
            "ratio": pytest.approx(first.ratio, rel=1e-4) if np.isfinite(first.ratio) else None,
            "confident": 0,
            "classes": 0,
        }
    lines = result.stdout.splitlines()
    assert any(line.strip().startswith("mixture transport, gated") for line in lines)
    expected = "4 batches cannot tell whether to use it: on these, mixture transport gains"
    assert lines[0].startswith(expected)
    table = lines[1 : lines.index(next(line for line in lines if line.startswith("On ")))]
    assert max(map(len, table)) <= 80
    assert "mixture transport without the gate" in found["summary"]


def test_the_page_names_and_explains_what_answered(typed):
    assert typed("evaluate LN @LN.caster @target -o layers.html --tau 2").exit_code == 0
    assert typed("evaluate LN @LN.caster @target -o last.html --mechanism features").exit_code == 0
    layers, last = Path("layers.html").read_text(), Path("last.html").read_text()
    assert "mixture transport, gated" in layers
    assert "mixture transport," not in last.lower()
    for words in ("<dt>Mixture transport</dt>", "&tau;&nbsp;=&nbsp;2 is accepted", ">memory<"):
        assert words in layers
    for words in (">transport, gated<", "safeguards"):
        assert words in last
        assert words not in layers
    assert json.loads(Path("last.json").read_text())["mechanism"] == "features"


def test_inspect_lists_the_sites(typed, made):
    shown = re.sub(r"[│\s]+", " ", typed("inspect @LN.caster").stdout)
    held = states.load(made / "LN.caster")
    listed = ", ".join(f"{site} ({len(found.mean)})" for site, found in held.layers.items())
    assert listed.replace(" ", "") in shown.replace(" ", "")
    assert "layers not measured" in re.sub(r"[│\s]+", " ", typed("inspect @plain.caster").stdout)
    states.save(replace(held, layers={}), made / "own.caster")  # as it was of a BatchNorm network
    shown = re.sub(r"[│\s]+", " ", typed("inspect @own.caster").stdout)
    assert "BatchNorm inputs, whose statistics are stored in the model" in shown


def test_doctor_says_which_transport_it_speaks_of(typed):
    layers, features = typed("doctor @LN.caster").stdout.split("Features, transported instead")
    assert layers.startswith("Layers, aligned by default")
    assert "- Sites: 14, " in layers
    assert "Sites" not in features
    assert "- N = " in features
    assert typed("doctor @plain.caster").stdout.startswith("Layers: none in this state")


def test_features_that_are_kept_stay_until_others_take_their_place(typed, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "wrong.txt").write_text("one\ntwo\n")
    assert typed(f"fit LN @source --cache {cache} --no-layers -o s.caster").exit_code == 0
    before = {path.name: path.read_bytes() for path in cache.glob("*/*")}
    refused = typed(f"fit LN --layers --classes wrong.txt @source --cache {cache} -o t.caster")
    assert refused.exit_code == 1
    assert {path.name: path.read_bytes() for path in cache.glob("*/*")} == before
    assert typed(f"fit LN --layers @source --cache {cache} -o t.caster").exit_code == 0
    after = {path.name: path.read_bytes() for path in cache.glob("*/*")}
    assert after.keys() == before.keys()
    assert after["note.json"] != before["note.json"]


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_help_has_the_threshold_of_the_method(typed, command):
    tau = find("mixture-transport").options()["tau"]
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", typed(f"{command} --help").output).split())
    assert "--mechanism" in words
    assert f"the state's; {tau:g} for layers" in words


# interrupted and continued


@pytest.mark.parametrize("mechanism", ["layers", "features"])
def test_interrupted_predictions_continue_as_if_nothing_had_been(typed, monkeypatch, mechanism):
    line = f"predict LN @LN.caster @target --shuffle 0 --batch-size 24 --mechanism {mechanism} -o"
    assert typed(f"{line} whole.csv").exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr("caster.adapt.prediction.SNAPSHOT_EVERY", 0.0)
        answered(patched, interrupted=3)
        result = typed(f"{line} out.csv")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "48 of 128 images are answered in out.csv.partial" in result.stderr
    assert not Path("out.csv").exists()
    assert len(rows_of("out.csv.partial")) == 48
    with monkeypatch.context() as patched:
        calls = answered(patched)
        result = typed(f"{line} out.csv")
    assert result.exit_code == 0, result.output
    assert "Continued an interrupted run, after 48 rows." in result.stdout
    assert sum(calls) == len(TARGET) - 48
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert sorted(path.name for path in Path().glob("*.csv*")) == ["out.csv", "whole.csv"]


def test_a_killed_run_continues_from_its_last_snapshot(typed, monkeypatch):
    class Killed(BaseException):
        """Nothing more is written."""

    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 32 -o"
    assert typed(f"{line} whole.csv").exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr("caster.adapt.prediction.SNAPSHOT_EVERY", 0.0)
        answered(patched, interrupted=3, error=Killed)
        with pytest.raises(Killed):
            typed(f"{line} out.csv")
    with Path("out.csv.partial").open("a") as torn:
        torn.write("half a row,wi")
    assert typed(f"{line} out.csv").exit_code == 0
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


@pytest.fixture
def interrupted(typed, monkeypatch) -> str:
    """The line of a run that was interrupted after two batches."""
    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 32 -o out.csv"
    with monkeypatch.context() as patched:
        patched.setattr("caster.adapt.prediction.SNAPSHOT_EVERY", 0.0)
        answered(patched, interrupted=3)
        assert typed(line).exit_code == 130
    return line


def test_another_run_leaves_the_rows_of_an_interrupted_one(typed, interrupted):
    before = {path.name: path.read_bytes() for path in Path().glob("out*")}
    result = typed(f"{interrupted} --tau 0.5")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "has the 64 answers of an interrupted run with another model, state, images or" in said
    assert {path.name: path.read_bytes() for path in Path().glob("out*")} == before
    assert typed(interrupted).exit_code == 0
    assert [path.name for path in Path().glob("out*")] == ["out.csv"]


def test_a_run_that_cannot_be_continued_starts_again_and_says_so(typed, interrupted, monkeypatch):
    Path("out.csv.partial.stream").write_bytes(b"damaged")
    with monkeypatch.context() as patched:
        calls = answered(patched)
        result = typed(interrupted)
        assert result.exit_code == 0
        assert "out.csv.partial cannot be continued: starting again" in result.stderr
    assert sum(calls) == len(TARGET)
    assert [path.name for path in Path().glob("out*")] == ["out.csv"]


STEPS = {  # of one batch, and where an interrupt may come
    "answer": ("caster.adapt.prediction", "answer_images"),
    "columns": ("caster.adapt.prediction", "host_probabilities"),
    "rows": ("caster.io.prediction_table.CsvTable", "write"),
    "snapshot": ("caster.io.signed_tensors", "write"),
}


@pytest.mark.parametrize(("step", "after"), sampled(product(STEPS, [False, True]), 3))
def test_an_interrupt_at_any_step_of_a_batch_costs_no_row(typed, monkeypatch, step, after):
    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 24 -o"
    assert typed(f"{line} whole.csv").exit_code == 0
    module, name = STEPS[step]
    owner, calls = resolve_name(module), []
    original = getattr(owner, name)

    def interrupting(*arguments, **options):
        calls.append(1)
        if len(calls) == 3 and not after:
            raise KeyboardInterrupt
        found = original(*arguments, **options)
        if len(calls) == 3 and after:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr("caster.adapt.prediction.SNAPSHOT_EVERY", 0.0)
        patched.setattr(owner, name, interrupting)
        assert typed(f"{line} out.csv").exit_code == 130
    assert typed(f"{line} out.csv").exit_code == 0
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_a_full_disk_for_the_snapshot_loses_no_row(typed, monkeypatch):
    def full(*arguments):
        raise CasterError("cannot write the snapshot: No space left on device")

    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 32 -o"
    assert typed(f"{line} whole.csv").exit_code == 0
    monkeypatch.setattr("caster.adapt.prediction.SNAPSHOT_EVERY", 0.0)
    monkeypatch.setattr("caster.io.signed_tensors.write", full)
    result = typed(f"{line} out.csv")
    assert result.exit_code == 0, result.output
    assert "no snapshot was written" in result.stderr
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_a_linked_output_stays_a_link(typed):
    Path("real.csv").write_text("old")
    Path("out.csv").symlink_to("real.csv")
    assert typed("predict LN @LN.caster @target --shuffle 0 -o out.csv").exit_code == 0
    assert Path("out.csv").is_symlink()
    assert len(rows_of("real.csv")) == len(TARGET)


def test_two_runs_do_not_share_a_partial_file(typed, monkeypatch):
    from caster.io.files import locked

    line = "predict LN @LN.caster @target --shuffle 0 -o out.csv"
    with locked(Path("out.csv.partial.lock"), "held"):
        result = typed(line)
    assert result.exit_code == 1
    assert "another run writes" in result.stderr
    assert typed(line).exit_code == 0


def test_the_first_row_is_written_when_the_first_batch_is_answered(typed, monkeypatch):
    sizes, answer = [], prediction.answer_images

    def looking(*arguments):
        sizes.append(Path("out.csv.partial").stat().st_size)
        return answer(*arguments)

    monkeypatch.setattr(prediction, "answer_images", looking)
    line = "predict LN @LN.caster @target --shuffle 0 --batch-size 32 -o out.csv"
    assert typed(line).exit_code == 0
    assert sizes == sorted({*sizes})
    assert sizes[0] == 0


def test_ctrl_c_in_an_evaluation_promises_nothing(typed, monkeypatch):
    from caster.report import evaluation

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "answer_images", stop)
    result = typed("evaluate LN @LN.caster @target")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "caster: interrupted, no output was written\n"


# covariances and classes


def values_by_hand(made, pixels):
    """Values at every site of the ConvNeXt: (n, ..., c)."""
    net = model_of(made, "convnext").module
    seen = {}
    for site in states.load(made / "LN.caster").layers:

        def keep(module, inputs, output, site=site):
            values = (inputs[0] if site.side == "in" else output).double().movedim(site.axis, -1)
            seen[site] = values.numpy()

        net.get_submodule(site.module).register_forward_hook(keep)
    with torch.no_grad():
        net(prepared(pixels))
    return seen


def test_fit_measures_every_site(typed, made):
    layers = states.load(made / "LN.caster").layers
    values = values_by_hand(made, SOURCE)
    assert list(layers) == list(values)
    assert len(layers) == 14
    for site, found in layers.items():
        rows = values[site].reshape(-1, len(found.mean))
        assert found.count == len(SOURCE)
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-3, atol=1e-5)
        assert (found.covariance is None) == (values[site].ndim == 2)
        if found.covariance is not None:
            expected = np.cov(rows, rowvar=False, bias=True)
            np.testing.assert_allclose(found.covariance, expected, rtol=1e-3, atol=1e-4)


def test_fit_measures_every_class(made):
    state = states.load(made / "LN.caster")
    values = values_by_hand(made, SOURCE)
    for site, found in state.layers.items():
        unit = np.sqrt(found.variance)
        for c, label in enumerate(state.classes):
            own = values[site][np.array(NAMES)[TRUTH] == label]
            assert found.classes.counts[c] == len(own)
            rows = own.reshape(-1, len(unit))
            step = (found.classes.means[c] - rows.mean(axis=0)) / unit
            np.testing.assert_allclose(step, 0, atol=2e-3)
            ratio = (found.classes.variances[c] - rows.var(axis=0)) / found.variance
            np.testing.assert_allclose(ratio, 0, atol=4e-3)


def test_fit_and_inspect_say_which_sites_have_them(typed, made):
    layers = states.load(made / "LN.caster").layers
    count = sum(found.covariance is not None for found in layers.values())
    result = typed("fit LN @source --cache c -o s.caster")
    words = f"in total, {count} with covariances, {len(layers)} with moments per class"
    assert f" channels {words}.\n" in result.stdout
    shown = re.sub(r"[│\s]+", "", typed("inspect s.caster").stdout)
    assert "".join(words.split()) in shown
