"""Pinned packages that only single tests need: installed once, into the user's cache."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from platformdirs import user_cache_path


def installed(what: str, package: str, command: Sequence[str]) -> Path:
    """The folder that a command, which ends in the option for a folder, installs a package in.

    Skip the test if it fails, as it does offline, and say what could not be installed.
    """
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
                pytest.skip(f"{what} could not be installed: no {command[0]}")
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip()[:200]
                pytest.skip(f"{what} could not be installed ({package}): {reason}")
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    return folder
