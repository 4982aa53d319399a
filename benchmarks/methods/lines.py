"""Results as JSON lines: written as they come, so that a run that is cut off can go on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KEYS = ("model", "method", "condition")


def key_of(line: Line) -> tuple[str, ...]:
    """What tells a line from others."""
    return tuple(line[key] for key in KEYS)


def append(path: Path, line: Line) -> None:
    """Write a line at once, as others may at the same time, and tell of it."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)
    known = ("accuracy", "accepted", "harm", "seconds", "rate", "share", "error")
    told = {name: line[name] for name in known if name in line}
    words = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items()]
    print(" | ".join([*key_of(line), *words]), flush=True)


class Lines:
    """What a file holds; of lines with equal keys the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # without a line that was cut off
        self.all = {key_of(line): line for line in map(json.loads, whole.splitlines())}

    def repair(self) -> None:
        """Write the file anew, one line a result, before others write to it."""
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.all.values()))

    def done(self, *key: str, settings: dict[str, Any]) -> bool:
        """Whether a result is there, with these settings, and not a failure, tried again."""
        line = self.all.get(key, {"error": "not there"})
        return "error" not in line and line["settings"] == settings

    def check(self, model: str, sha256: str) -> None:
        """Refuse to mix results of two trainings of a model."""
        others = {line["sha256"] for line in self.all.values() if line["model"] == model}
        if others - {sha256}:
            sys.exit(f"{self.path} has results of another {model}: name another --out")

    @property
    def failed(self) -> dict[tuple[str, ...], str]:
        """What went wrong where."""
        return {key: line["error"] for key, line in self.all.items() if "error" in line}

    def conclude(self, left: int) -> None:
        """Exit with what went wrong or is not done, if anything."""
        for key, error in self.failed.items():
            print("failed:", *key, "-", error)
        if left or self.failed:
            again = f"{left} left to do: run it again; " if left else ""
            sys.exit(f"{self.path}: {again}{len(self.failed)} failed")


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
