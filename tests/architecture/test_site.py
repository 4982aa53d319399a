"""The site's pages, without building it: all are reachable, their code runs, examples compile."""

from __future__ import annotations

import ast
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import caster
from caster.core.verdict import Reason
from tests.support import problem

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GALLERY = ROOT / "examples" / "gallery"
EXAMPLES = sorted(GALLERY.glob("plot_*.py"))
GENERATED = DOCS / "gallery" / "index.md"


def listed(page: Path) -> list[Path]:
    """The pages in a page's tables of contents."""
    tables = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for table in tables for line in table.splitlines() if line]
    entries = [line for line in lines if not line.startswith(":")]
    names = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]  # title <page>, or page
    return [(page.parent / f"{name}.md").resolve() for name in names]


def test_every_page_is_in_exactly_one_table_of_contents():
    entries = [entry for page in DOCS.glob("*.md") for entry in listed(page)]
    assert len(entries) == len(set(entries))
    missing = [str(entry) for entry in entries if entry != GENERATED and not entry.exists()]
    assert not missing
    reached, queue = {DOCS / "index.md"}, [DOCS / "index.md"]
    while queue:
        page = queue.pop()
        found = listed(page) if page.exists() else []
        reached |= set(found)
        queue += found
    outside = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "reproduction" / "README.md"]
    reports = (ROOT / "reproduction" / "report").glob("*/report.md")
    readmes = (ROOT / "examples").glob("*/README.md")
    pages = {*DOCS.glob("*.md"), *outside, *reports, *readmes, GENERATED}
    assert reached == pages


def test_examples_are_listed_in_order_and_share_one_module():
    others = {path.name for path in GALLERY.glob("*.py")} - {path.name for path in EXAMPLES}
    assert others == {"digits.py"}  # what docs/conf.py leaves out of the gallery
    assert [int(path.name.split("_")[1]) for path in EXAMPLES] == [*range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_compile_and_have_a_title_and_labelled_axes(path):
    text = path.read_text()
    compile(text, path, "exec")
    title, rule, *_ = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert rule == "=" * len(title)
    assert "xlabel=" in text
    assert "ylabel=" in text
    assert "plt.show()" in text
    for other in re.findall(r"sphx_glr_docs_gallery_(\w+\.py)", text):
        assert (GALLERY / other).exists()


def test_an_example_runs(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib

    matplotlib.use("agg")
    names = runpy.run_path(str(GALLERY / "plot_6_tabular.py"))
    frozen, transported, returned = np.transpose(names["accuracies"])
    assert frozen[0] > 0.95 > frozen[-1]
    assert (transported > 0.95).all()
    for verdict, *answers in zip(names["verdicts"], frozen, transported, returned, strict=True):
        assert answers[2] == answers[1 if verdict.accepted else 0]
    reasons = [verdict.reason for verdict in names["verdicts"]]
    assert reasons == sorted(reasons)  # accepted, then class_order: as the example says
    assert set(reasons) == {"accepted", "class_order"}
    names["plt"].close("all")


def test_every_cell_of_the_notebook_runs_and_ends_in_what_a_notebook_shows(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, object] = {}
    shown = []
    for cell in cells:
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    titles = [re.findall("<b>(.*?)</b>", v._repr_html_()) for v in shown if v is not None]
    assert titles == [["Adapter"], ["Adaptation"], ["Verdict"], ["Stream"]]
    assert np.mean(names["adapted"]) > np.mean(names["frozen"]) + 0.1
    names["plt"].close("all")


def test_the_diagram_of_layers_is_the_one_that_import_linter_checks():
    drawn = runpy.run_path(str(DOCS / "make_architecture.py"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for package, layers in (("caster", drawn["CASTER"]), ("caster_bench", drawn["BENCH"])):
        (checked,) = (
            c["layers"] for c in contracts["contracts"] if c.get("containers") == [package]
        )
        boxes = [{title for title, _ in layer} for layer in layers]
        assert boxes == [set(layer.split(" | ")) for layer in checked]


@pytest.mark.parametrize(
    "page",
    [
        *("index", "torch", "streams-of-one", "correlated-streams", "features"),
        *("mixture-transport", "layer-transport"),
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = problem.make_images(400, seed=2)
    target, _ = problem.make_images(64, seed=3, shift=0.5)
    model = problem.model()
    outputs = model(images)
    features, logits = np.asarray(outputs.features), np.asarray(outputs.logits)
    names = {
        "caster": caster,
        "net": model.module,
        "module": model.module,
        "model": model,
        "images": target,
        "clients": ["first", "second"],
        "client": "second",
        "labelled_batches": list(zip(np.split(images, 8), np.split(labels, 8), strict=True)),
        "batches": np.split(target, 2),
        "features": features,
        "labels": labels,
        "source_logits": logits,
        "batch": features[:32],
        "logits": logits[:32],
        "embed": lambda batch: tuple(np.asarray(value) for value in model.run(batch)),
    }
    for code in re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL):
        exec(code, names)
    assert names["out"].verdict.reason in get_args(Reason)


def test_the_start_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (DOCS / "start.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec("\n".join(code), names)
    assert names["adapted"] > names["frozen"] + 100
    assert "Verdict(accepted=True" in capsys.readouterr().out
