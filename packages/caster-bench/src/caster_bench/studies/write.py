"""The whole report, in one folder: a page, a text, tables and figures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from caster.errors import CasterError
from caster.io.files import move_into_place
from caster_bench.studies import figures as pictures
from caster_bench.studies import page
from caster_bench.studies.each import (
    certificate,
    corruption,
    cost,
    coverage,
    estimators,
    gate,
    layers,
    specificity,
)
from caster_bench.studies.naming import explained
from caster_bench.studies.results import Results
from caster_bench.studies.section import Section
from caster_bench.studies.tables import as_csv, as_latex, as_markdown

STUDIES = (  # the paper's order, then what is ours alone
    *(estimators, certificate, gate, corruption, coverage, specificity, cost),
    layers,
)
PAGE, TEXT, TABLES, FIGURES = "index.html", "report.md", "tables", "figures"
FORMATS = {"md": as_markdown, "tex": as_latex, "csv": as_csv}


def sections(results: Results) -> list[Section]:
    """Of every study the sweep has cells for."""
    found = []
    for study in STUDIES:
        section = study.section(results)
        if section is not None:
            refused = results.refusals(section.name)
            found.append(explained(replace(section, found=(*section.found, *refused))))
    if not found:
        raise CasterError(f"no study of {results.sweep.name} has a cell that can be reported")
    return found


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier report, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise CasterError(f"cannot write {folder}: it is not a folder")
    if not folder.parent.is_dir():
        raise CasterError(f"cannot write {folder}: there is no folder {folder.parent}")
    if folder.is_dir():
        others = {path.name for path in folder.iterdir()} - {PAGE, TEXT, TABLES, FIGURES}
        if others:
            raise CasterError(
                f"{folder} holds {min(others)}, which is no part of a report: name another folder"
            )


def write(results: Results, folder: Path) -> list[Section]:
    """Write the report in place of an earlier one, whole or not at all."""
    check_folder(folder)
    made = sections(results)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        whole = Path(temporary) / "report"
        _fill(whole, results, made)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            move_into_place(whole, folder)
        except OSError as error:
            raise CasterError(f"cannot write {folder}: {error.strerror}") from None
    return made


def _fill(folder: Path, results: Results, made: Sequence[Section]) -> None:
    drawn = fill(folder, results, made, tuple(FORMATS), pictures.FORMATS)
    (folder / PAGE).write_text(page.render(results, made, drawn), encoding="utf-8")


def fill(
    folder: Path,
    results: Results,
    made: Sequence[Section],
    tables: tuple[str, ...],
    figures: tuple[str, ...],
) -> dict[str, str]:
    """A new folder with text, tables and figures, these in some formats; pictures for a page."""
    for part in (folder, folder / TABLES, folder / FIGURES):
        part.mkdir()
    drawn = {}
    for section in made:
        for table in section.tables:
            for ending in tables:
                path = folder / TABLES / f"{table.name}.{ending}"
                path.write_text(FORMATS[ending](table), encoding="utf-8")
        for picture in section.pictures:
            drawn[picture.name] = pictures.save(picture, folder / FIGURES, figures)
    (folder / TEXT).write_text(page.as_text(results, made), encoding="utf-8")
    return drawn
