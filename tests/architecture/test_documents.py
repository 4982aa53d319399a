"""The documents' code runs, and their links, options and tables match the program."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
import shlex
import zipfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt
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


@pytest.fixture(scope="module")
def maker():
    return runpy.run_path(str(ROOT / "docs" / "make_pages.py"))


def test_the_pages_have_the_figures_of_the_records(maker):
    pages = {path.name: path.read_text() for path in maker["PAGES"]}
    values = {**maker["figures"](), **maker["tables"](), **maker["statements"]()}
    filled = maker["fill"](pages, values)
    assert [name for name in pages if filled[name] != pages[name]] == [], "run `make reproduction`"


def test_no_reader_sees_a_marker(maker):
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    for path in maker["PAGES"]:
        text = path.read_text()
        plain, rendered = (re.sub("<!--=.*?-->", "", own) for own in (text, markdown.render(text)))
        assert rendered == markdown.render(plain), path


def test_the_smoothed_frozen_model_is_another_method(maker, monkeypatch):
    accuracies = {"frozen": 50.0, "smoothed-frozen": 70.0, "tent": 60.0}
    accuracies |= {"mixture-transport": 80.0, "mixture-transport-ungated": 90.0}
    row = {"backbone": "net", "stream": "runs", "B": 64.0, "accepted, %": 100.0}
    found = [row | {"method": name, "top-1": top1} for name, top1 in accuracies.items()]
    monkeypatch.setitem(maker["rows"].__globals__, "report", lambda table: found)
    assert maker["kind_row"]("net", "runs")[1] == "70.0 (SMOOTHED-FROZEN)"


PAGE = """About 1.50<!--=share--> % of CIFAR-10, and none loses<!--=none-loses-->.

| CIFAR-10<!--=twice--> | twice | |
|---|--:|---|
| ab | old | |
"""
NO_MARKER = "a.md, line 1: a comment must be a marker, `<!--=NAME-->` on one line"


@pytest.fixture
def values(maker):
    twice = maker["Table"](lambda title: [2 * title, ""], {"AB"})
    return {"share": 2050.125, "none-loses": True, "twice": twice}


def test_figures_and_tables_are_written_where_a_page_marks_them(maker, values):
    expected = PAGE.replace("1.50", "2,050.12").replace("old", "abab")
    assert maker["fill"]({"a.md": PAGE}, values) == {"a.md": expected}
    assert maker["fill"]({"a.md": expected}, values) == {"a.md": expected}


def test_figures_may_stand_anywhere_in_a_table(maker):
    page = "| 7<!--=share--> | none<!--=none--> |\n|---|---|\n| 8<!--=share--> | 9<!--=share--> |\n"
    found = maker["fill"]({"a.md": page}, {"share": 5, "none": True})
    assert found["a.md"] == re.sub("[789]", "5", page)


def test_a_column_without_figures_has_no_best_one(maker):
    assert maker["emphasized"](["", "1.0 → 2.0", "3.0"]) == ["", "1.0 → 2.0", "**3.0**"]
    assert maker["emphasized"](["", "-"]) == ["", "-"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("=share", "=sharp", "a.md, line 1: nothing is called 'sharp'"),
        ("1.50<!--=share-->", "1.50", "no page marks share"),
        ("share-->", "share", NO_MARKER),
        ("<!--=none", "<!-- =none", NO_MARKER),
        ("of", "of 9<!--share-->", NO_MARKER),
        ("of", "of <!-- some of -->", NO_MARKER),
        ("| twice", "| 2<!--share-->", "a.md, line 3: the table of 'twice' has other comments"),
        ("1.50<", "Few<", "a.md, line 1: 'share' must follow its figure"),
        ("|---|--:|---|\n", "", "a.md, line 3: 'twice' must stand in the header of its table"),
        ("--:|", "--:|--:|", "a.md, line 3: 'twice' has 3 columns, and its header has others"),
        ("| ab |", "| ac |", "a.md, line 3: 'twice' leaves out AB"),
        ("none-loses", "all-lose", "a.md, line 1: the records contradict the statement 'all-lose'"),
        ("=share", "=lead", "a.md, line 1: the records contradict the sentence: 'lead' is -0.5"),
        ("=share", "=gap", "a.md, line 1: the records contradict the sentence: 'gap' is nan"),
    ],
)
def test_a_page_that_cannot_be_right_is_one_line(maker, values, old, new, message):
    wrong = {"all-lose": False, "lead": -0.5, "gap": math.nan}
    values |= {own: value for own, value in wrong.items() if own in new}
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        maker["fill"]({"a.md": PAGE.replace(old, new)}, values)


CHOICES = {"results": 15, "layers-field": 5, "layers-kinds": 2}  # rows that may be left out


def test_no_table_can_leave_out_a_row_that_reports_have(maker):
    text, optional = "\n".join(path.read_text() for path in maker["PAGES"]), Counter()
    for name, table in maker["tables"]().items():
        header, rows = re.findall(rf"(\|.*<!--={name}-->.*\n\|.*\n)((?:\|.*\n)+)", text)[0]
        for row in rows.splitlines(keepends=True):
            with suppress(SystemExit):
                maker["fill"]({"a.md": header + rows.replace(row, "")}, {name: table})
                optional[name] += 1
    assert optional == CHOICES


METHODS, FIELD, TUNING = "mixture/layers-methods", "field/layers-methods", "tuning/tuning"
METHODS_SMALL = "small/layers-methods"
KEPT, PAPER = "mixture/layers-kept", "reproduction/corruption-all-backbones"
TEN, HUNDRED = (f"ResNet-18, {data} on {data}" for data in ("CIFAR-10", "CIFAR-100"))
SMALL, FIFTY = "ResNet-18, CIFAR-10", "ResNet-50, ImageNet on ImageNet"
SWIN = "Swin-T, CIFAR-100 on CIFAR-100"
MINI, MINI_VIT = (f"mini-{name}, CIFAR-10 on CIFAR-10" for name in ("ResNet", "ViT"))
DIRICHLET, BURSTS = (f"dirichlet, concentration {number}" for number in ("1.0", "0.1"))
CLEAN = f"clean, {BURSTS}"
OURS, LAYERS, CONTINUAL = "mixture-transport", "layer-transport", "shuffled, continual"


def digits_of(shown: str, name: str, column: str, where: tuple[str, ...]) -> str:
    """A cell of a report's table, by others of its row, with as many digits as are shown."""
    sweep, table = name.split("/")
    with (ROOT / f"reproduction/report/{sweep}/tables/{table}.csv").open() as file:
        (row,) = (row for row in csv.DictReader(file) if set(where) <= set(row.values()))
    return f"{float(row[column]):.{len(shown.partition('.')[2])}f}"


@pytest.mark.parametrize(
    ("name", "title", "position", "table", "column", "where"),
    [
        ("kinds-10", "sorted by class", 4, METHODS, "top-1", (TEN, "by-class", OURS)),
        ("kinds-10", "shuffled, mixed", 4, METHODS, "top-1", (TEN, "shuffled, mixed", OURS)),
        ("kinds-10", "runs, B = 8", 3, METHODS, "top-1", (TEN, "runs", "8", LAYERS)),
        ("kinds-100", "Dirichlet 1", 2, METHODS, "top-1", (HUNDRED, DIRICHLET, "pea")),
        ("kinds-100", "Dirichlet 1", 4, METHODS, "top-1", (HUNDRED, DIRICHLET, OURS)),
        ("kinds-100", "Dirichlet 1", 5, METHODS, "accepted, %", (HUNDRED, DIRICHLET, OURS)),
        ("kinds-swin", "runs", 4, METHODS, "top-1", (SWIN, "runs", OURS)),
        ("kinds-50", "clean, shuffled", 4, METHODS, "top-1", (FIFTY, "clean, shuffled", OURS)),
        ("continual", "ROID", 3, FIELD, "top-1", (HUNDRED, CONTINUAL, "roid")),
        ("continual", "EATA", 3, FIELD, "top-1", (HUNDRED, CONTINUAL, "eata (preset cifar100)")),
        ("layers-kept", "ResNet-50, ImageNet", 6, KEPT, "worst loss, gated", (FIFTY,)),
        ("layers-kinds", "Dirichlet 1", 2, METHODS, "top-1", (HUNDRED, DIRICHLET, "frozen")),
        ("layers-field", "Tent", 3, FIELD, "top-1", (HUNDRED, "shuffled", "tent")),
        ("layers-learning", SMALL, 6, PAPER, "top-1", (SMALL, LAYERS)),
        ("tuning", "NOTE", 1, TUNING, "accuracy", (SMALL, '"note"')),
        ("small-bursts", "RoTTA", 1, METHODS_SMALL, "top-1", (MINI, BURSTS, "rotta")),
        (
            "small-bursts",
            "NOTE, tuned",
            1,
            METHODS_SMALL,
            "top-1",
            (MINI, BURSTS, "note (lr 0.001)"),
        ),
        ("small-bursts", "mixture transport", 3, METHODS_SMALL, "top-1", (MINI, CLEAN, OURS)),
    ],
)
def test_single_cells_are_those_of_the_reports(name, title, position, table, column, where):
    """Read with other code than docs/make_pages.py has."""
    text = "".join(path.read_text() for path in DOCUMENTS).partition(f"<!--={name}-->")[2]
    row = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
    shown = row.split("|")[1 + position].replace("*", "").split()[0]
    assert shown == digits_of(shown, table, column, where)


@pytest.mark.parametrize(
    ("name", "table", "column", "where"),
    [
        ("sorted-100", METHODS, "top-1", (HUNDRED, "by-class", OURS)),
        ("clean-sorted", METHODS, "top-1", (HUNDRED, "clean, by-class", OURS)),
        ("gain-pea-50", METHODS, "gain", (FIFTY, "shuffled", "pea")),
        ("loss-50", "mixture/mixture-kept", "worst loss, gated", (FIFTY,)),
        ("streams-field", "field/mixture-kept", "streams", ("all",)),
        ("continual-100", FIELD, "top-1", (HUNDRED, CONTINUAL, OURS)),
        ("small-foa", METHODS_SMALL, "top-1", (MINI_VIT, "shuffled", "foa")),
        ("small-vit-loss", METHODS_SMALL, "worst loss", (MINI_VIT, "shuffled", OURS)),
    ],
)
def test_single_figures_in_sentences_are_those_of_the_reports(name, table, column, where):
    text = "".join(path.read_text() for path in DOCUMENTS)
    found = set(re.findall(rf"([\d.]+)<!--={name}-->", text))
    assert found
    assert found == {digits_of(shown, table, column, where) for shown in found}


def test_the_readme_table_has_the_figures_of_single_networks():
    """Read from another file of the report than docs/make_pages.py reads."""
    report = ROOT / "reproduction/report/field/tables/corruption-fifteen-backbones.csv"
    found: dict[str, dict[str, str]] = {}
    with report.open() as file:
        for row in csv.DictReader(file):
            name = re.sub(r" \(preset.*\)|, preset [\w-]+", "", row["method"])
            name = re.sub(r" \(lr.*\)", ", tuned", name)
            found.setdefault(row["backbone"], {})[name] = f"{float(row['top-1']):.1f}"
    names = "frozen/bn-adapt/t3a/sar/eata/tent/pea/cotta/roid/tent, tuned/deyo, tuned/roid, tuned"
    names += "/caster/mixture-transport/mixture-transport-ungated"
    networks = ("ResNet-18, plainly trained, CIFAR-10", "ResNet-18, CIFAR-10")
    networks += ("ResNet-18, CIFAR-100", "ViT-B, CIFAR-10")
    table = (ROOT / "README.md").read_text().partition("<!--=results-->")[2].partition("\n\n")[0]
    for name, line in zip(names.split("/"), table.splitlines()[2:], strict=True):
        title, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        assert cells == [found[network].get(name, "-") for network in networks], title


def named_rows(path: Path, name: str):
    """Rows of a file of records by one of their columns; null is what the row above has."""
    table, row = pq.read_table(path), {}
    for i in range(len(table)):
        cells = {column: table[column][i] for column in table.column_names}
        row = row | {column: cell for column, cell in cells.items() if cell.is_valid}
        yield row[name].as_py(), row


def field_answers(backbone: str, data: str, methods: set[str]):
    """Cells of field.toml, straight from Parquet: frozen answers change labels, others those."""
    folder = ROOT / "reproduction/records/field"
    streams = dict(named_rows(folder / f"{data}.parquet", "stream"))
    for cell, row in named_rows(folder / f"{backbone}--{data}.parquet", "cell"):
        spec = json.loads(cell)["identity"]["spec"]
        if spec["method"] in methods:
            stream = streams[row["stream"].as_py()]
            label, batch = (np.array(stream[name].as_py()) for name in ("label", "batch"))
            answer = label.copy()
            for name in ("frozen", "prediction"):
                gaps = np.array(row[f"{name}_gaps"].as_py(), int)
                answer[np.cumsum(gaps + 1) - 1] = row[name].as_py()
            yield spec, label, batch, answer, row


def marked() -> dict[str, str]:
    """All figures that pages mark, by name."""
    text = "".join(map(Path.read_text, DOCUMENTS))
    return {name: figure for figure, name in re.findall(r"([\d.]+)<!--=([\w-]+)-->", text)}


@pytest.mark.slow
def test_figures_of_streams_without_resets_follow_from_the_records():
    shown, worst = marked(), 0.0
    for classes in (10, 100):
        accuracy: dict[str, dict[str, float]] = {"each": {}, "continual": {}}
        cells = field_answers(f"resnet18-cifar{classes}", f"cifar{classes}", {OURS})
        for spec, label, batch, answer, row in cells:
            for i, (name, _) in enumerate(spec["conditions"]):
                part = batch * len(spec["conditions"]) // (batch.max() + 1) == i
                accuracy[spec["schedule"]][name] = 100 * np.mean(answer[part] == label[part])
            if spec["schedule"] == "continual":
                accepted = np.flatnonzero(row["batches_accepted"].as_py())
                most = max(np.bincount(answer[batch == i]).max() / 200 for i in accepted)
                assert shown[f"continual-class-{classes}"] == str(math.ceil(100 * most))
        means = (f"{np.mean([*accuracy[own].values()]):.1f}" for own in ("each", "continual"))
        assert (shown[f"resets-{classes}"], shown[f"continual-{classes}"]) == tuple(means)
        losses = (own - accuracy["continual"][name] for name, own in accuracy["each"].items())
        worst = max(worst, *losses)
    assert shown["continual-worst"] == f"{worst:.1f}"


@pytest.mark.slow
def test_methods_are_compared_on_the_streams_of_the_vit_that_they_ran_on():
    shown, right = marked(), {name: {} for name in ("frozen", OURS, "pea", "foa")}
    for spec, label, _, answer, _ in field_answers("vit_base-cifar10", "cifar10", {*right}):
        right[spec["method"]][spec["conditions"][0][0]] = 100 * np.mean(answer == label)
    for name in ("pea", "foa"):
        assert shown[f"vit-{name}-streams"] == str(len(right[name]))
        for method in ("frozen", OURS, name):
            mean = np.mean([right[method][stream] for stream in right[name]])
            assert shown[f"vit-{method}-on-{name}-streams"] == f"{mean:.1f}"
    leads = {stream: right[OURS][stream] - pea for stream, pea in right["pea"].items()}
    assert shown["vit-pea-behind"] == f"{np.mean([*leads.values()]):.1f}"
    assert shown["vit-pea-ahead-streams"] == str(sum(lead < 0 for lead in leads.values()))
    assert shown["vit-pea-behind-contrast"] == f"{leads.pop('contrast'):.1f}"
    assert shown["vit-pea-behind-others"] == f"{np.mean([*leads.values()]):.1f}"


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
