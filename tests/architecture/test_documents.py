"""The documents' code runs, and their links, options and tables match the program."""

from __future__ import annotations

import csv
import math
import re
import runpy
import shlex
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

import caster
from caster import Caster, config
from caster import state as states
from caster.adapt.adapter import Adapter
from caster.adapt.prediction import predict_file, predict_images
from caster.cli.app import app
from caster.core import certificate, discriminant, moments, proposal, subspace, transport, verdict
from caster_bench import methods
from caster_bench.methods import checks
from caster_bench.records.store import Pack, described, read, scan
from tests.support import problem
from tests.support.colours import CAST, NAMES, TOML, patches, write_folder, write_model
from tests.support.command_line import cli
from tests.support.fakes import FakeImages, answers, model

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reproduction/README.md")
DOCUMENTS = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_adapts_a_model(tmp_path, monkeypatch, capsys):
    (code, *_) = python_blocks("README.md")
    monkeypatch.chdir(tmp_path)
    images, labels = problem.make_images(400, seed=2)
    target, truth = problem.make_images(320, seed=3, shift=0.5)
    names = {
        "net": problem.model().module,
        "labelled_batches": list(zip(np.split(images, 8), np.split(labels, 8), strict=True)),
        "batches": np.split(target, 10),
    }
    exec(code, names)
    assert (tmp_path / "model.caster").exists()
    assert capsys.readouterr().out.count("Verdict(accepted=") == 10
    out, last = names["out"], truth[-32:]
    assert np.asarray(out.probabilities).shape == (32, 4)
    assert (np.asarray(out.labels) == last).mean() >= 0.5
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_the_commands_of_two_pages_run_as_they_are(tmp_path, monkeypatch):
    """On a small ONNX model and folders of the names that the pages use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "model.onnx")
    Path("model.toml").write_text(TOML)
    for name, cast in (("source", 0.0), ("labelled", CAST), ("new", CAST)):
        write_folder(tmp_path / "photos" / name, *patches(12, seed=len(name), cast=cast))
    lines, others = (
        re.findall(r"^caster (.*model\.onnx.*)$", (ROOT / page).read_text(), re.MULTILINE)
        for page in ("README.md", "docs/models.md")
    )
    assert lines == others
    assert [line.split()[0] for line in lines] == ["fit", "evaluate", "predict", "compile"]
    for line in lines:
        result = cli(*shlex.split(line, comments=True))
        assert result.exit_code == 0, result.output
    assert len(Path("out.csv").read_text().splitlines()) == 1 + 8 * 12
    assert caster.wrap("adaptive.onnx").classes.tolist() == sorted(NAMES)


def test_the_readme_adapts_features():
    (*_, code) = python_blocks("README.md")
    labels = np.arange(5_000) % 10
    features = np.random.default_rng(0).normal(size=(5_000, 64)) + 5 * np.eye(10, 64)[labels]
    batch, logits = 1.6 * features[:64] - 2, features[:64, :10]
    names = {"caster": caster} | {
        "features": features, "labels": labels, "batch": batch, "logits": logits,
    }  # fmt: skip
    exec(code, names)
    assert names["out"].verdict.accepted
    assert (names["out"].proposed == labels[:64]).mean() > 0.95


def test_the_readme_has_the_table_of_the_records():
    made = runpy.run_path(str(ROOT / "docs" / "make_results.py"))["table"]()
    assert made in (ROOT / "README.md").read_text(), "run `python docs/make_results.py`"


def test_the_readme_table_has_the_figures_of_single_networks():
    """Read from another file of the report than docs/make_results.py reads."""
    report = ROOT / "reproduction/report/field/tables/corruption-fifteen-backbones.csv"
    found: dict[str, dict[str, str]] = {}
    with report.open() as file:
        for row in csv.DictReader(file):
            name = re.sub(r" \(preset.*\)|, preset [\w-]+", "", row["method"])
            name = re.sub(r" \(lr.*\)", ", tuned", name)
            own = found.setdefault(row["backbone"], {})
            own[name] = f"{float(row['top-1']):.1f}"
    names = ("frozen", "bn-adapt", "lame", "t3a", "sar", "eata", "tent", "pea", "cotta", "roid")
    names += (
        "deyo, tuned",
        "roid, tuned",
        "caster",
        "mixture-transport",
        "mixture-transport-ungated",
    )
    networks = ("ResNet-18, plainly trained, CIFAR-10", "ResNet-18, CIFAR-10")
    networks += ("ResNet-18, CIFAR-100", "ViT-B, CIFAR-10")
    rows = table_after((ROOT / "README.md").read_text(), "| accuracy, % |")
    assert len(rows) == len(names)
    for name, (title, *cells) in zip(names, rows, strict=True):
        assert cells == [found[network].get(name, "-") for network in networks], title


KINDS = {  # in documents, and in records
    "sorted by class": "by-class",
    "clean, sorted by class": "clean, by-class",
    "turning: shuffled, then sorted": "turning",
    "Dirichlet 0.1": "dirichlet, concentration 0.1",
    "Dirichlet 1": "dirichlet, concentration 1.0",
    "Dirichlet 0.1, recurring": "dirichlet, concentration 0.1, recurring",
    "Dirichlet 0.1, mixed": "dirichlet, concentration 0.1, mixed",
    "long-tailed": "long-tailed, imbalance 20",
}


@pytest.fixture(scope="module")
def streams() -> dict[tuple[str, str, str], dict[str, dict[str, str]]]:
    """Rows of the records by network, kind of stream and batch size, and then by method."""
    found: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with (ROOT / "reproduction/report/mixture/tables/layers-methods.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["backbone"].partition(" on ")[0], row["stream"], row["B"]
            found.setdefault(key, {})[row["method"].partition(" (")[0]] = row
    return found


def table_after(text: str, heading: str) -> list[list[str]]:
    """Cells of the rows of a table that starts with this heading."""
    lines = text.partition(heading)[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def top1(row: dict[str, str]) -> str:
    return f"{float(row['top-1']):.1f}"


def test_figures_of_streams_in_sentences_are_those_of_the_records(streams):
    def both(kind, method):
        names = ("ResNet-18, CIFAR-10", "ResNet-18, CIFAR-100")
        return [top1(streams[name, kind, "64"][method]) for name in names]

    guide = " ".join((ROOT / "docs" / "correlated-streams.md").read_text().split())
    frozen, ours, tent = (both("by-class", own) for own in ("frozen", "mixture-transport", "tent"))
    assert (
        f"from {frozen[0]} to {ours[0]} % on CIFAR-10 and from {frozen[1]} to {ours[1]} %" in guide
    )
    assert f"where Tent falls to {tent[0]} and {tent[1]} %" in guide


def test_weak_places_in_sentences_are_those_of_the_records(streams):
    """Rejected batches, points that the certificate costs, long tails, and the worst losses."""
    mixed = "ResNet-18, CIFAR-10", "shuffled, mixed", "64"
    loose = "ResNet-18, CIFAR-100", KINDS["Dirichlet 1"], "64"
    tails = "ResNet-18, CIFAR-10", KINDS["long-tailed"], "64"

    def rejected(key):
        return f"{100 - float(streams[key]['mixture-transport']['accepted, %']):.0f}"

    def points(key, better, worse):
        return float(streams[key][better]["top-1"]) - float(streams[key][worse]["top-1"])

    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"it rejects {rejected(loose)} and {rejected(mixed)} % of the batches" in readme
    text = " ".join((ROOT / "docs" / "mixture-transport.md").read_text().split())
    gated, ungated = "mixture-transport", "mixture-transport-ungated"
    costs = points(mixed, ungated, gated)
    assert (
        f"rejects {rejected(mixed)} % of the batches, where alignment would add {costs:.0f}" in text
    )
    assert f"would add {points(loose, ungated, gated):.0f} points" in text
    behind = [points(tails, "layer-transport", own) for own in (gated, ungated)]
    assert f"{behind[0]:.0f} points behind plain layer transport, {behind[1]:.0f} ungated" in text


def test_the_worst_losses_in_sentences_are_those_of_the_records(streams):
    """On CIFAR, on ImageNet, and under the field's protocol."""
    kept: dict[str, dict[str, tuple[float, ...]]] = {}
    for sweep in ("mixture", "field"):
        with (ROOT / f"reproduction/report/{sweep}/tables/mixture-kept.csv").open() as file:
            names = ("streams", "worst loss, gated", "worst loss, ungated", "gated")
            kept[sweep] = {
                row["backbone"]: tuple(float(row[name]) for name in names)
                for row in csv.DictReader(file)
            }
    small, large = (
        [own for name, own in kept["mixture"].items() if name.endswith(data)]
        for data in (("CIFAR-10", "CIFAR-100"), "ImageNet")
    )
    text, limits = (
        " ".join((ROOT / "docs" / page).read_text().split())
        for page in ("mixture-transport.md", "limits.md")
    )
    count, loss = sum(own[0] for own in small), max(own[1] for own in small)
    assert f"None of the {count:.0f} streams of CIFAR loses more than {loss:.2f} points" in text
    assert f"more than {loss:.2f} points" in limits
    ungated = [max(own[2] for own in part) for part in (large, small)]
    assert f"losses are {ungated[0]:.1f} points on ImageNet and {ungated[1]:.1f} on CIFAR" in text
    assert kept["field"]["all"][1] == 0
    assert f"none of the {kept['field']['all'][0]:.0f} under the field's protocol loses" in text
    names = ("ResNet-50, ImageNet on ImageNet", "EfficientNet-Lite0, ImageNet on ImageNet")
    large = [kept["mixture"][name] for name in names]
    fifty, lite = (own[1] for own in large)
    shuffled = [
        streams[name, "shuffled", "64"]
        for name in ("ResNet-50, ImageNet", "EfficientNet-Lite0, ImageNet")
    ]
    points = [float(row["mixture-transport"]["gain"]) for row in shuffled]
    gains = " and ".join(f"{gain:.0f}" for gain in points) + " points"
    assert f"ResNet-50 loses {fifty:.1f} points to the frozen model on clean images" in text
    assert f"and EfficientNet-Lite0 {lite:.1f} under shot noise" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    pea = [float(row["pea"]["gain"]) for row in shuffled]
    for page, verb in ((limits, "gains "), (readme, "")):
        assert f"{fifty:.1f} points" in page
        assert gains in page
        assert f"PEA {verb}{' and '.join(f'{gain:.0f}' for gain in pea)}" in page
    (ahead,) = {f"{theirs - ours:.0f}" for theirs, ours in zip(pea, points, strict=True)}
    assert f"PEA is ahead of it by {ahead} points on both networks" in text


def test_the_table_of_the_continual_protocol_has_the_figures_of_the_records():
    names = {"ROID": "roid", "CoTTA": "cotta", "PEA": "pea", "layer transport": "layer-transport"}
    names |= {"mixture transport": "mixture-transport", "frozen": "frozen", "Tent": "tent"}
    names |= {"mixture transport, ungated": "mixture-transport-ungated"}
    found: dict[tuple[str, str, str], str] = {}
    with (ROOT / "reproduction/report/field/tables/layers-methods.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["backbone"].partition(" on ")[0], row["stream"], row["method"]
            found[key] = top1(row)
    networks = ("ResNet-18, CIFAR-10", "ResNet-18, CIFAR-100")
    text = (ROOT / "docs" / "mixture-transport.md").read_text()
    rows = table_after(text, "| | ResNet-18, CIFAR-10 | with resets |")
    assert {title for title, *_ in rows} == names.keys()
    for title, *cells in rows:
        streams = [(n, s) for n in networks for s in ("shuffled, continual", "shuffled")]
        assert cells == [found[*stream, names[title]] for stream in streams], title


def test_streams_without_resets_in_sentences_are_those_of_the_records():
    """Corruption by corruption, beside the same corruption after a reset."""
    after_reset: dict[tuple[str, str], float] = {}
    continual = {}
    for where in scan(Pack(ROOT / "reproduction/records/field")).records:
        _, spec = described(where)
        if spec.method == "mixture-transport" and spec.backbone.startswith("resnet18-cifar"):
            found = read(where)
            if spec.schedule == "continual":
                continual[spec.data] = found, [name for name, _ in spec.conditions]
            else:
                ((name, _),) = spec.conditions
                samples = found.samples
                after_reset[spec.data, name] = 100 * np.mean(samples.prediction == samples.label)
    assert continual.keys() == {"cifar10", "cifar100"}
    below_reset, largest = 0.0, {}
    for data, (found, names) in continual.items():
        samples = found.samples
        shares = [
            np.bincount(samples.prediction[samples.batch == i]).max() / 200 for i in range(750)
        ]
        largest[data] = 100 * max(np.asarray(shares)[found.batches.accepted])
        for position, name in enumerate(names):
            rows = samples.batch // 50 == position
            frozen, ours = (
                100 * np.mean(given[rows] == samples.label[rows])
                for given in (samples.frozen, samples.prediction)
            )
            assert ours >= frozen, name
            below_reset = max(below_reset, after_reset[data, name] - ours)
    text, limits = (
        " ".join((ROOT / "docs" / page).read_text().split())
        for page in ("mixture-transport.md", "limits.md")
    )
    assert f"and {below_reset:.1f} on any corruption" in text
    assert f"it loses at most {below_reset:.1f} points to a reset" in limits
    ten, hundred = (f"{math.ceil(largest[data])} %" for data in ("cifar10", "cifar100"))
    assert f"No class gets more than {ten} of an accepted batch on CIFAR-10, or {hundred}" in text
    with (ROOT / "reproduction/report/field/tables/layers-methods.csv").open() as file:
        top = {(row["backbone"], row["stream"], row["method"]): row for row in csv.DictReader(file)}
    networks = ("ResNet-18, CIFAR-10 on CIFAR-10", "ResNet-18, CIFAR-100 on CIFAR-100")

    def both(stream, method):
        return [top[network, stream, method] for network in networks]

    def pair(stream, method):
        return " and ".join(top1(row) for row in both(stream, method))

    ours, reset = (
        both(stream, "mixture-transport") for stream in ("shuffled, continual", "shuffled")
    )
    average = max(float(r["top-1"]) - float(o["top-1"]) for o, r in zip(ours, reset, strict=True))
    assert f"{average:.1f} points at most on average" in text
    for network in range(2):
        ahead = {
            m
            for (n, s, m), row in top.items()
            if (n, s) == (networks[network], "shuffled, continual")
            and float(row["top-1"]) > float(ours[network]["top-1"])
        }
        expected = {"roid", "tent", "pea", "deyo", "layer-transport"} if network == 0 else {"roid"}
        assert {m for m in ahead if not m.endswith("-ungated")} == expected
    readme = " ".join((ROOT / "README.md").read_text().split())
    own = pair("shuffled, continual", "mixture-transport")
    assert f"it reaches {own} % on two ResNet-18s" in readme
    assert f"against {pair('shuffled', 'mixture-transport')} with resets" in readme
    assert f"reaches {pair('shuffled, continual', 'roid')}." in readme


def test_the_kept_share_of_the_gain_is_that_of_the_records():
    text = " ".join((ROOT / "docs" / "mixture-transport.md").read_text().split())
    with (ROOT / "reproduction/report/field/tables/mixture-kept.csv").open() as file:
        kept = {row["backbone"]: f"{float(row['kept, %']):.0f}" for row in csv.DictReader(file)}
    networks = ("ResNet-18, CIFAR-10 on CIFAR-10", "ResNet-18, CIFAR-100 on CIFAR-100")
    networks += ("ResNet-18, plainly trained, CIFAR-10 on CIFAR-10", "ViT-B, CIFAR-10 on CIFAR-10")
    first, second, third, last = (kept[network] for network in networks)
    assert f"it keeps {first}, {second}, {third} and {last} % of the gain" in text


def test_the_tables_of_layer_transport_have_the_figures_of_the_records():
    text = (ROOT / "docs" / "layer-transport.md").read_text()
    tables = ROOT / "reproduction/report/mixture/tables"
    kept: dict[str, list[str]] = {}
    for method in ("layers", "mixture"):
        with (tables / f"{method}-kept.csv").open() as file:
            for row in csv.DictReader(file):
                gains = [f"{float(row[name]):+.2f}" for name in ("ungated", "gated")]
                losses = [f"{float(row[f'worst loss, {own}']):.2f}" for own in ("ungated", "gated")]
                share = f"{float(row['kept, %']):.0f} %"
                own = [row["streams"], *gains, share, *losses]
                title = row["backbone"].partition(" on ")[0]
                if method == "layers":
                    kept[title] = own
                elif title != "ViT-B, CIFAR-10":  # layer transport was not run on it
                    kept[title] += [gains[1]]
    rows = table_after(text, "| | streams | gain, ungated |")
    assert {title: cells for title, *cells in rows} == {k: v for k, v in kept.items() if k != "all"}
    found: dict[tuple[str, str], str] = {}
    with (tables / "layers-streams.csv").open() as file:
        for row in csv.DictReader(file):
            if row["B"] == "64":
                accuracies = [f"{float(row[own]):.1f}" for own in ("frozen", "ungated", "gated")]
                key = row["backbone"].partition(" on ")[0], row["stream"]
                found[key] = " / ".join(accuracies)
    kinds = {
        "long-tailed, 20": KINDS["long-tailed"],
        "mixed within batches, shuffled": "shuffled, mixed",
        "mixed within batches, Dirichlet 0.1": KINDS["Dirichlet 0.1, mixed"],
        "clean, sorted by class": "clean, by-class",
    }
    networks = ("ResNet-18, CIFAR-10", "ResNet-18, CIFAR-100")
    for title, *cells in table_after(text, "in batches of 64: frozen / ungated / gated.\n\n"):
        kind = kinds.get(title, KINDS.get(title, title))
        assert cells == [found[network, kind] for network in networks], title


def test_layer_transport_beside_methods_that_learn_is_that_of_the_records():
    """Table and sentences: accuracy and worst loss, leads, and what the gate keeps."""
    tables = ROOT / "reproduction/report/reproduction/tables"
    found: dict[str, dict[str, dict[str, str]]] = {}
    with (tables / "corruption-all-backbones.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(row["backbone"], {})[row["method"].partition(" (")[0]] = row
    text = (ROOT / "docs" / "layer-transport.md").read_text()
    rows = table_after(text, "| | frozen | BatchNorm adaptation |")
    assert {title for title, *_ in rows} == {
        k for k, own in found.items() if "layer-transport" in own
    }
    leads, kept = {}, {}
    for title, *cells in rows:
        own = found[title]
        frozen = float(own["frozen"]["top-1"])

        def cell(method, own=own):
            accuracy, loss = (float(own[method][name] or 0) for name in ("top-1", "worst loss"))
            return f"{accuracy:.2f} ({loss:.1f})"

        names = {"tent": "Tent ", "eata": "EATA ", "sar": "SAR "}
        best = max(names, key=lambda method: float(own[method]["top-1"]))
        assert cells == [
            f"{frozen:.2f}",
            cell("bn-adapt"),
            names[best] + cell(best),
            *map(cell, ("caster", "layer-transport-ungated", "layer-transport")),
        ], title
        accuracy, ungated = (
            float(own[f"layer-transport{ending}"]["top-1"]) for ending in ("", "-ungated")
        )
        leads[title] = accuracy - float(own[best]["top-1"])
        kept[title] = 100 * (accuracy - frozen) / (ungated - frozen)
    text = " ".join(text.split())
    low, high = min(leads.values()), max(leads.values())
    assert f"ahead of the best of Tent, EATA and SAR by {low:.1f} to {high:.1f} points" in text
    low, high = min(kept.values()), max(kept.values())
    assert f"The gate keeps {low:.0f} to {high:.0f} % of the ungated gain" in text
    with (tables / "corruption-fifteen-backbones.csv").open() as file:
        severe = {(row["backbone"], row["method"]): top1(row) for row in csv.DictReader(file)}
    ours, tent = (severe["ResNet-50, CIFAR-100", own] for own in ("layer-transport", "tent"))
    assert f"behind Tent on the ResNet-50 of CIFAR-100, {ours} against {tent} %" in text


@pytest.mark.parametrize(
    ("network", "kinds"),
    [
        ("ResNet-18, CIFAR-10", 13),
        ("ResNet-18, CIFAR-100", 11),
        ("ViT-B, CIFAR-10", 4),
        ("ResNet-50, ImageNet", 3),
        ("EfficientNet-Lite0, ImageNet", 3),
    ],
)
def test_the_table_of_every_kind_of_stream_has_the_figures_of_the_records(streams, network, kinds):
    text = (ROOT / "docs" / "mixture-transport.md").read_text()
    rows = table_after(text, f"| {network} | frozen | best other |")
    assert len(rows) == kinds
    for title, *cells in rows:
        kind, _, size = title.partition(", B = ")
        found = streams[network, KINDS.get(kind, kind), size or "64"]
        others = [m for m in found if m != "frozen" and "-transport" not in m]
        plain = found.get("layer-transport")
        assert (plain is None) == (network == "ViT-B, CIFAR-10"), title
        best = max(others, key=lambda method: float(found[method]["top-1"]))
        gated = found["mixture-transport"]
        assert [cell.replace("*", "") for cell in cells] == [
            top1(found["frozen"]),
            f"{top1(found[best])} ({best.upper() if best != 'tent' else 'Tent'})",
            "" if plain is None else top1(plain),
            top1(gated),
            f"{float(gated['accepted, %']):.0f} %",
            top1(found["mixture-transport-ungated"]),
        ], title


def test_the_table_of_fair_settings_has_the_figures_of_the_records():
    networks = [
        f"ResNet-18, {name}" for name in ("CIFAR-10", "plainly trained, CIFAR-10", "CIFAR-100")
    ]
    found: dict[str, dict[str, list[float]]] = {}
    with (ROOT / "reproduction/report/tuning/tables/tuning.csv").open() as file:
        for row in csv.DictReader(file):
            own = found.setdefault(row["method"], {}).setdefault(row["backbone"], [])
            own.append(float(row["accuracy"]))
    text = (ROOT / "docs" / "methods.md").read_text().partition("## Fair settings")[2]
    rows = table_after(text, "| | CIFAR-10 |")
    assert {name.lower() for name, *_ in rows} == found.keys()
    for name, *cells in rows:
        tried = [found[name.lower()].get(network) for network in networks]
        expected = ["" if own is None else f"{own[0]:.1f} → {max(own):.1f}" for own in tried]
        assert [cell.replace("*", "") for cell in cells] == expected, name


def test_the_readme_is_short_and_has_one_figure():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)) == 1


@pytest.mark.parametrize("repository", [None, "https://git.example/caster"])
def test_the_package_index_can_resolve_every_link_of_the_readme(repository):
    """As `make package` checks in the wheel; here also with a repository, which there will be."""
    text = (ROOT / "README.md").read_text()
    written = re.findall(r"\]\(([^)]+)\)", text)
    described = runpy.run_path(str(ROOT / "packages/caster/hatch_build.py"))["described"]
    text = described(text, repository)
    found = re.findall(r"\]\(([^)]+)\)", text)
    assert {link[1:] for link in found if link.startswith("#")} <= anchors(text)
    if repository is None:
        assert all(link.startswith("#") for link in found)
        return
    for link, own in zip(found, written, strict=True):
        kind = "raw" if own.endswith(".png") else "blob"
        assert link == (own if own.startswith("#") else f"{repository}/{kind}/main/{own}")


@pytest.mark.parametrize("repository", [None, "https://git.example/caster"])
def test_only_relative_links_are_rewritten_for_the_package_index(repository):
    described = runpy.run_path(str(ROOT / "packages/caster/hatch_build.py"))["described"]
    targets = ["http://a.example", "https://a.example/b.md", "mailto:a@b.example", "#results"]
    text = "".join(f"[text]({target}), " for target in targets)
    assert described(text, repository).strip() == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no long description"),
        ("[x](docs/a.md) [y](https://a.example) [z](#b)" + 200 * " ", r"resolve: \['docs/a.md'\]"),
    ],
)
def test_a_wheel_without_description_and_one_with_dead_links_differ(tmp_path, text, message):
    check = runpy.run_path(str(ROOT / "packages/check.py"))["check_description"]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a.dist-info/METADATA", f"Name: a\n\n{text}")
    with pytest.raises(SystemExit, match=message):
        check(tmp_path / "a.whl")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert len(path.read_text().splitlines()) > 5
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_the_documents_is_python(path):
    for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        compile(code, path.name, "exec")


def test_every_command_and_option_named_in_the_documents_exists():
    commands = get_command(app).commands
    text = "".join(path.read_text() for path in DOCUMENTS)
    words = (
        "fit|predict|evaluate|compile|serve|inspect|doctor|monitor|methods|data|corrupt|cache|bench"
        "|demo"
    )
    named = set(re.findall(rf"caster ({words})\b", text))
    assert named == set(commands)
    below = [inner for c in commands.values() for inner in getattr(c, "commands", {}).values()]
    params = [param for command in (*commands.values(), *below) for param in command.params]
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    for option in re.findall(r"`(--[a-z-]+)[ `]", (ROOT / "docs/command-line.md").read_text()):
        assert option in known | {"--help"}, option


@pytest.mark.parametrize("group", ["bench", "data"])
def test_the_commands_of_caster_bench_are_all_listed(group):
    text = (ROOT / "docs/command-line.md").read_text().split("## Commands of caster-bench")[1]
    (listed,) = re.findall(rf"^- \*\*`caster {group} (.*?)\*\*", text, re.MULTILINE)
    named = re.findall(r"`(\w+)[^`]*`", f"`{listed}")
    assert sorted(named) == sorted(get_command(app).commands[group].commands)


def test_only_the_command_that_rejects_backbones_speaks_of_it():
    bench = get_command(app).commands["bench"].commands
    assert "rejected" in bench["run"].help
    shared = [
        param.help
        for command in bench.values()
        for param in command.params
        if "--backbone" in param.opts
    ]
    assert len(shared) >= 4
    assert not any("reject" in text for text in shared)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("image_files", [True, False])
def test_columns_of_predict_come_in_the_documented_order(tmp_path, suffix, image_files):
    text = (ROOT / "docs/command-line.md").read_text().split("## `caster predict")[1]
    table = text.split("| column | |")[1].split("\n\n")[0]
    documented = re.findall(r"^\| `([\w:]+)` \|", table, re.MULTILINE)
    assert len(documented) == len(table.splitlines()) - 2  # one column per row
    images, out = FakeImages(40), tmp_path / f"out.{suffix}"
    features, logits = answers(images, range(40))
    state = Caster().fit(features, np.array(["ant", "bee"])[images.labels])._state
    if image_files:
        adapter = Adapter(
            model(),
            replace(state, head=(0, 1)),
            allow_other_model=True,
            allow_other_preprocessing=True,
        )
        predict_images(adapter, images, out, batch_size=20, probabilities=True)
    else:
        documented.remove("image")
        states.save(state, tmp_path / "s.caster")
        np.savez(tmp_path / "target.npz", features=features, logits=logits)
        files = (tmp_path / "s.caster", tmp_path / "target.npz", out)
        predict_file(*files, batch_size=20, probabilities=True)
    assert documented.pop() == "p:LABEL"
    if suffix == "csv":
        written = next(csv.reader(out.read_text().splitlines()))
    else:
        written = pq.read_schema(out).names
    assert written == [*documented, "p:ant", "p:bee"]


def test_every_function_the_method_names_exists():
    table = (ROOT / "docs/method.md").read_text().split("`proposal.propose`")[0]
    modules = (subspace, moments, transport, discriminant, certificate, verdict, proposal)
    homes = {module.__name__.rsplit(".", 1)[1]: module for module in modules}
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    assert len(named) >= 12
    for module, function in named:
        if module in homes:
            assert hasattr(homes[module], function), f"{module}.{function}"


def test_the_coverage_constants_are_the_documented_ones():
    text = (ROOT / "docs/coverage.md").read_text()
    for name in ("min_samples", "min_classes"):
        assert f"**`{name}` = {getattr(config.Settings, name)}" in text or (
            f"`{name}` = {getattr(config.Settings, name)}**" in text
        )


def test_the_table_of_methods_is_the_catalogue():
    table, cards = (ROOT / "docs/methods.md").read_text().split("## Method cards")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [entry.name for entry in methods.entries()]
    for row, entry in zip(rows, methods.entries(), strict=True):
        assert row[1], entry.name
        assert row[2] == (", ".join(entry.needs) or "-")
        assert row[3].startswith("yes" if entry.gradients else "no")
    carded = re.findall(r"^\| `([\w-]+)` \| \d", cards, re.MULTILINE)
    ours = ("caster", "layer-transport", "mixture-transport")
    rivals = {entry.name for entry in methods.entries() if not entry.name.startswith(ours)}
    others = {"frozen", "source-gda", "coral", "linear-tca", "eta"}
    assert set(carded) == {name for name in rivals - others if "+" not in name}


def test_every_check_is_in_the_document():
    text = (ROOT / "docs/methods.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.MULTILINE) == list(checks.ALL)


def test_every_constant_says_who_chose_it():
    for name, default, origin, why in config.describe():
        assert origin in ("paper", "project"), name
        assert why
        assert default == getattr(config.Settings, name)
