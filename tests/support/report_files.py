"""Files of a report: digests, LaTeX, and another machine to write them on."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

SOURCES = [
    Path(__file__).parents[2] / "packages" / name / "src" for name in ("caster", "caster-bench")
]
ELSEWHERE = {  # environment of a different machine, as far as it can be simulated
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "ignore",  # NumPy tells of features that it does not know
    "TZ": "Asia/Tokyo",
    "LC_ALL": "C",
    "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
}


def files(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_balanced(text: str) -> None:
    """Check that braces, math and environments of LaTeX are balanced."""
    plain = re.sub(r"\\[&%$#_{}\\]", "", text)
    assert plain.count("$") % 2 == 0
    depth = 0
    for sign in plain:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
