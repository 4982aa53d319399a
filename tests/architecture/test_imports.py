"""Import contracts hold, and importing the package loads no heavy library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import caster

ROOT = Path(__file__).parents[2]
OPTIONAL = "torch", "timm", "onnx", "onnxruntime", "PIL", "matplotlib", "pyarrow", "ray"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_importing_caster_imports_nothing_heavy():
    heavy = "numpy", "scipy", "sklearn", "typer", "rich", *OPTIONAL
    loaded = python(f"import sys, caster; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_command_line_starts_without_the_mathematics():
    """Otherwise every --help would wait for it."""
    heavy = "numpy", "scipy", "sklearn", *OPTIONAL
    loaded = python(f"import sys, caster.cli; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


HELP = """
import sys
started = set(sys.modules)
sys.argv = ["caster", "--help"]
import caster.cli
try:
    caster.cli.main()
except SystemExit:
    new = set(sys.modules) - started
    print("\\n", *(name for name in new if name.split(".")[0] not in sys.stdlib_module_names))
"""


def test_help_imports_the_command_line_alone():
    """Everything that --help waits for: the commands, typer, and what renders typer's help."""
    loaded = set(python(HELP).splitlines()[-1].split())
    ours = {name for name in loaded if name.startswith("caster") and ".cli" not in name}
    assert ours <= {
        "caster", "caster._version", "caster.config", "caster.errors",
        "caster.io", "caster.io.files", "caster.report", "caster_bench",
    }  # fmt: skip
    rendering = "typer", "rich", "markdown_it", "mdurl", "pygments", "shellingham", "attr"
    libraries = {name.split(".")[0] for name in loaded} - {"caster", "caster_bench"}
    assert libraries <= {*rendering, "annotated_doc", "click"}  # of other versions of typer
    assert "rich.progress" not in loaded


def test_the_estimator_needs_no_optional_library():
    # scikit-learn loads pandas where it is installed, and pandas pyarrow.
    optional = "typer", "rich", *(name for name in OPTIONAL if name != "pyarrow")
    loaded = python(
        f"import sys, caster; caster.Caster; print([m for m in {optional} if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_every_public_name_resolves():
    for name in caster.__all__:
        assert getattr(caster, name) is not None
    assert set(caster.__all__) <= set(dir(caster))


def test_layers():
    """Runs import-linter on the contracts in pyproject.toml."""
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
