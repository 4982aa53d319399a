"""The document of claims and the reports that it leads to, from packed records."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import move_into_place, replacing
from caster_bench.studies import write as reporting
from caster_bench.studies.claims.document import Writer
from caster_bench.studies.claims.evidence import Evidence
from caster_bench.studies.claims.types import Claims

TABLES, FIGURES = ("csv",), ("svg",)  # formats that are kept: text, which repositories can compare


def write(claims: Claims, evidence: Mapping[str, Evidence], into: Path) -> Counter[str]:
    """Write document and reports below a folder, in place of earlier ones; verdicts counted.

    The files of a report are those of `caster bench report`, byte for byte, less the formats that
    a repository has no use for.
    """
    writer = Writer.of(claims, evidence)
    text = writer.document()  # whatever is wrong with the claims ends it here
    reports = into / claims.reports
    _check(reports)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".claims.") as temporary:
        made = Path(temporary) / "reports"
        made.mkdir()
        for each in evidence.values():
            if each.results is not None:
                folder = made / each.name
                reporting.fill(folder, each.results, each.sections, TABLES, FIGURES)
        if reports.exists():
            shutil.rmtree(reports)
        if any(made.iterdir()):
            reports.parent.mkdir(parents=True, exist_ok=True)
            move_into_place(made, reports)
    with replacing(into / claims.document) as document:
        document.write_text(text, encoding="utf-8")
    return Counter(writer.outcome(claim).verdict for part in claims.parts for claim in part.claims)


def _check(reports: Path) -> None:
    """Refuse to replace a folder that holds anything but reports."""
    for path in sorted(reports.iterdir()) if reports.is_dir() else ():
        if not path.is_dir():
            raise CasterError(f"{path} is no report: name another folder for them")
        reporting.check_folder(path)
