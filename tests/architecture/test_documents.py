"""What the documents say is run or compared with the code."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from caster import Caster, config
from caster import state as states
from caster.adapt.adapter import Adapter
from caster.cli.app import app
from caster.core import certificate, discriminant, gate, moments, proposal, subspace, transport
from caster.report.predict_job import predict_file, predict_images
from caster_bench import methods
from caster_bench.methods import checks
from tests.support.fakes import FakeImages, answers, model

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "REPRODUCTION.md")
DOCUMENTS = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_example_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    assert names["out"].verdict.accepted
    assert (names["out"].predictions == names["labels"][:64]).mean() > 0.95
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_figures_of_the_readme_are_those_of_the_records():
    tables = ROOT / "docs" / "reproduction" / "reproduction" / "tables"

    def has(method: str, family: str, sentence: str) -> str:
        """What a method has right on both data sets, as a sentence says it."""
        told = []
        for data in ("CIFAR-10", "CIFAR-100"):
            with (tables / f"corruption-all-{data}-C-star.csv").open() as file:
                rows = {row["method"]: row for row in csv.DictReader(file)}
            told.append(f"{float(rows[method][family]):.1f}")
        return sentence.format(*told)

    text = " ".join((ROOT / "README.md").read_text().split())
    for sentence in (
        has("layer-transport", "BN", "ResNets have {} % of CIFAR-10 and {} of CIFAR-100 right"),
        has("frozen", "BN", "where the frozen models have {} and {}, and Tent"),
        has("tent", "BN", "and Tent {} and {};"),
        has("layer-transport", "LN", "ViT-B and DeiT-B have {} and {}, where"),
        has("frozen", "LN", "where the frozen models have {} and {}, and SAR"),
        has("sar", "LN", "and SAR {} and {} ("),
    ):
        assert sentence in text


def anchors(path: Path) -> set[str]:
    """What headings are linked by: in small letters, hyphens for spaces, and no other signs."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert len(path.read_text().splitlines()) > 5
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_command_and_option_named_in_the_documents_exists():
    commands = get_command(app).commands
    text = "".join(path.read_text() for path in DOCUMENTS)
    words = "fit|predict|evaluate|inspect|doctor|methods|data|corrupt|cache|bench|demo"
    named = set(re.findall(rf"caster ({words})\b", text))
    assert named == set(commands)
    below = [inner for c in commands.values() for inner in getattr(c, "commands", {}).values()]
    params = [param for command in (*commands.values(), *below) for param in command.params]
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    for option in re.findall(r"`(--[a-z-]+)[ `]", (ROOT / "docs/command-line.md").read_text()):
        assert option in known | {"--help"}, option


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("images", [True, False])
def test_columns_of_predict_come_in_the_documented_order(tmp_path, suffix, image_files):
    text = (ROOT / "docs/command-line.md").read_text().split("## `caster predict")[1]
    table = text.split("| column | |")[1].split("\n\n")[0]
    documented = re.findall(r"^\| `([\w:]+)` \|", table, re.MULTILINE)
    assert len(documented) == len(table.splitlines()) - 2  # a column a row
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
    modules = (subspace, moments, transport, discriminant, certificate, gate, proposal)
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


def test_every_method_is_in_its_document_as_the_catalogue_has_it():
    table = (ROOT / "docs/methods.md").read_text().split("## The protocol")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [entry.name for entry in methods.entries()]
    for row, entry in zip(rows, methods.entries(), strict=True):
        assert row[1] == entry.line
        assert row[2] == (", ".join(entry.needs) or "-")
        assert row[3].startswith("yes" if entry.gradients else "no")


def test_every_check_is_in_the_document():
    text = (ROOT / "docs/methods.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.MULTILINE) == list(checks.ALL)


def test_every_constant_says_who_chose_it():
    for name, default, origin, why in config.describe():
        assert origin in ("paper", "project"), name
        assert why
        assert default == getattr(config.Settings, name)
