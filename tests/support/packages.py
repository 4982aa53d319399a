"""Pinned packages that only single tests need: installed once, into the user's cache."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from platformdirs import user_cache_path


def installed(package: str, command: Sequence[str]) -> Path:
    """The folder that a command, which ends in the option for a folder, installs a package in."""
    folder = user_cache_path("caster-tests", appauthor=False) / "packages" / package
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, "package")
            made.mkdir()
            try:
                run = [*command, str(made), package]
                subprocess.run(run, check=True, capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip(f"no {command[0]} to install {package} with")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot install {package}: {error.stderr.strip()[:200]}")
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    return folder
