"""Build both packages twice and try them in clean environments: `make package`.

    python packages/check.py [PYTHON ...]

The sdists and wheels stay in dist/. Each PYTHON (by default the one that runs this) gets an
environment with the wheels and their dependencies only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"caster": "caster", "caster-bench": "caster_bench"}  # folder of a package: its module
DIGITS = """
import numpy as np
from sklearn.datasets import load_digits

X, y = load_digits(return_X_y=True)
train, new = np.split(np.random.default_rng(0).permutation(len(X)), [1200])
np.savez("train", features=X[train], labels=y[train])
np.savez("new", features=0.8 * X[new] + 1)
"""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command without this checkout on its path; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(command, cwd=cwd, env=clean, text=True, check=False, **pipes)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}")
    return result.stdout


def tracked(*paths: str) -> list[str]:
    """List the files below some paths that git tracks."""
    return run("git", "ls-files", *paths).split()


def build(folder: Path, time: str) -> dict[str, bytes]:
    """Build sdists, and wheels from them, from a copy of the tracked files in `folder`."""
    for name in tracked("packages", "README.md", ".gitignore"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    for package in MODULES:
        source = folder / "packages" / package
        run(
            sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source,
            SOURCE_DATE_EPOCH=time,
        )  # fmt: skip
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def check_contents(wheel: Path, package: str) -> int:
    """Compare a wheel's files with the tracked ones, and return their number."""
    source = f"packages/{package}/src/"
    expected = {name.removeprefix(source) for name in tracked(source)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if names != expected or f"{MODULES[package]}/py.typed" not in names:
        sys.exit(f"{wheel.name} should differ in {sorted(names ^ expected) or 'py.typed'}")
    return len(names)


def check_description(wheel: Path) -> None:
    """Check that there is a long description, and that the package index resolves its links."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode().partition("\n\n")[2]
    if len(text) < 200:
        sys.exit(f"{wheel.name} has no long description: {len(text)} characters")
    dead = re.findall(r"\]\((?!https?:|mailto:|#)([^)]*)\)", text)
    if dead:
        sys.exit(f"{wheel.name} has links that the package index cannot resolve: {dead}")


def try_wheels(python: str, wheels: list[Path], folder: Path) -> str:
    """Fit, predict and diagnose in an environment with the wheels only."""
    library, bench = wheels
    run(python, "-m", "venv", folder)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, library)
    run(binaries / "python", "-c", DIGITS, cwd=folder)
    caster = binaries / "caster"
    run(caster, "fit", "train.npz", "-o", "digits.caster", cwd=folder)
    run(caster, "predict", "digits.caster", "new.npz", "-o", "out.csv", cwd=folder)
    rows = (folder / "out.csv").read_text().splitlines()[1:]
    if len(rows) != 597 or not any(",accepted," in row for row in rows):
        sys.exit(f"caster predict answered {len(rows)} of 597 samples, or accepted none")
    run(caster, "doctor", "digits.caster", cwd=folder)
    run(*pip, bench, library)
    run(caster, "methods", cwd=folder)
    return run(binaries / "python", "--version").strip()


def main(pythons: list[str]) -> None:
    """Print a line for each thing checked; exit with a message at the first that fails."""
    time = run("git", "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as work:
        built = build(Path(work, "first"), time)
        if build(Path(work, "another", "depth"), time) != built:
            sys.exit("Two builds of the same files differ")
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        shutil.copytree(Path(work, "first", "dist"), dist)
        for name, content in built.items():
            print(f"{hashlib.sha256(content).hexdigest()}  {name}: the same bytes in two builds")
        run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
        print("twine check --strict: passed")
        wheels = [next(dist.glob(f"{stem}-*.whl")) for stem in ("caster_tta", "caster_bench")]
        for package, wheel in zip(MODULES, wheels, strict=True):
            count = check_contents(wheel, package)
            check_description(wheel)
            print(f"{wheel.name}: the {count} tracked files, with py.typed, and no other")
        for number, python in enumerate(pythons):
            version = try_wheels(python, wheels, Path(work, f"environment{number}"))
            print(f"{version}: fit, predict and doctor with caster-tta alone, methods with both")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
