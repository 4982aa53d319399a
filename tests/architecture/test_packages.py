"""What the packages say of themselves agrees; `make package` builds and tries them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    project["name"]: project
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))
    for project in [tomllib.loads(path.read_text())["project"]]
}
EXTRAS = {name: set(project["optional-dependencies"]) for name, project in PROJECTS.items()}
TEXTS = [
    ROOT / "README.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("packages/*/pyproject.toml"),
    *ROOT.glob("packages/*/src/**/*.py"),
]


@pytest.mark.parametrize("name", PROJECTS)
def test_every_extra_is_documented(name):
    (table,) = re.findall(
        rf"\| `{name}\[...\]` \| adds \|\n\|---\|---\|\n((?:\|.*\n)+)",
        (ROOT / "docs" / "install.md").read_text(),
    )
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == EXTRAS[name]


def test_every_extra_that_is_named_exists():
    named = {
        (package, extra)
        for path in TEXTS
        for package, extras in re.findall(
            r"\b(caster-tta|caster-bench)\[([\w,]+)\]", path.read_text()
        )
        for extra in extras.split(",")
    }
    assert len(named) > 8
    assert [pair for pair in sorted(named) if pair[1] not in EXTRAS[pair[0]]] == []


def test_the_workflow_runs_on_every_supported_python():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    grids = re.findall(r'python: \[(".*")\]', workflow)
    for project in PROJECTS.values():
        supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
        assert [re.findall(r"[\d.]+", grid) for grid in grids] == [supported, supported]
        assert project["requires-python"] == f">={supported[0]}"
