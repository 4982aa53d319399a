"""Time the demo, the notebook's cells and every example of the gallery, each in its own process.

    python benchmarks/examples.py

The limits are a minute of wall time for an example and 30 seconds of processor time for the demo,
on two cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "examples" / "gallery"


def commands(folder: Path) -> dict[str, list[str]]:
    """What to run, by name."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code")
    (folder / "notebook.py").write_text("\n".join(cells))
    found = {"caster demo": ["-m", "caster", "demo", "-o", str(folder / "demo.html")]}
    scripts = [folder / "notebook.py", *sorted(GALLERY.glob("plot_*.py"))]
    return found | {path.stem: [str(path)] for path in scripts}


def processor_seconds() -> float:
    """Processor time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    print("| | wall, s | processor, s |\n|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MPLBACKEND": "agg"}
        for name, arguments in commands(Path(folder)).items():
            start, used = time.perf_counter(), processor_seconds()
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder, env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            took = f"{time.perf_counter() - start:.1f} | {processor_seconds() - used:.1f}"
            if done.returncode:
                took = f"failed: {done.stderr.strip().splitlines()[-1]} |"
            print(f"| {name} | {took} |", flush=True)


if __name__ == "__main__":
    main()
