"""Write the report of a sweep: one HTML page, one Markdown file, tables and figures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams

from caster._version import __version__
from caster.config import Settings
from caster.errors import CasterError
from caster.io.files import move_into_place
from caster.report import html
from caster_bench.studies import (
    certificate,
    corruption,
    coverage,
    estimators,
    gate_policies,
    layers,
    runtime_cost,
    specificity,
    tuning,
)
from caster_bench.studies.naming import STAR, STAR_NOTE
from caster_bench.studies.provenance import mixed_revisions, provenance_tables
from caster_bench.studies.results import Results
from caster_bench.studies.tables import (
    Section,
    StudyFigure,
    Table,
    as_csv,
    as_latex,
    as_markdown,
    cells,
    in_markdown,
)

STUDIES = (  # in the paper's order, then aligned layers and how settings were chosen
    *(estimators, certificate, gate_policies, corruption, coverage, specificity, runtime_cost),
    *(layers, tuning),
)
PAGE, TEXT, TABLES, FIGURES = "index.html", "report.md", "tables", "figures"
TABLE_FORMATS = {"md": as_markdown, "tex": as_latex, "csv": as_csv}
CLOSING = {"rejected": "Rejected cells", "records": "Provenance"}
NONE_REJECTED = "None: every backbone was admitted on its data."
_UNDATED: dict[str, dict[str, Any]] = {  # the same records give the same bytes
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}
FIGURE_FORMATS = tuple(_UNDATED)


def sections(results: Results) -> list[Section]:
    """Build a section for every study the sweep has cells for."""
    found = []
    for study in STUDIES:
        section = study.section(results)
        if section is not None:
            notes = (*results.rejections(section.name), *mixed_revisions(results, section.name))
            found.append(explain_star(replace(section, found=(*section.found, *notes))))
    if not found:
        raise CasterError(f"no study of {results.sweep.name} has a cell that can be reported")
    return found


def check_folder(folder: Path) -> None:
    """Reject a folder that holds anything but an earlier report, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise CasterError(f"cannot write {folder}: not a folder")
    if not folder.parent.is_dir():
        raise CasterError(f"cannot write {folder}: there is no folder {folder.parent}")
    if folder.is_dir():
        others = {path.name for path in folder.iterdir()} - {PAGE, TEXT, TABLES, FIGURES}
        if others:
            raise CasterError(
                f"{folder} holds {min(others)}, which is not part of a report: choose another "
                "folder"
            )


def write_report(results: Results, folder: Path) -> list[Section]:
    """Write the report beside its folder first, then replace an earlier one."""
    check_folder(folder)
    made = sections(results)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        whole = Path(temporary) / "report"
        drawn = fill(whole, results, made, tuple(TABLE_FORMATS), FIGURE_FORMATS)
        (whole / PAGE).write_text(render(results, made, drawn), encoding="utf-8")
        try:
            if folder.exists():
                shutil.rmtree(folder)
            move_into_place(whole, folder)
        except OSError as error:
            raise CasterError(f"cannot write {folder}: {error.strerror}") from None
    return made


def fill(
    folder: Path,
    results: Results,
    made: Sequence[Section],
    tables: tuple[str, ...],
    figures: tuple[str, ...],
) -> dict[str, str]:
    """Write text, tables and figures to a new folder; return the figures as HTML elements."""
    for part in (folder, folder / TABLES, folder / FIGURES):
        part.mkdir()
    drawn = {}
    for section in made:
        for table in section.tables:
            for ending in tables:
                path = folder / TABLES / f"{table.name}.{ending}"
                path.write_text(TABLE_FORMATS[ending](table), encoding="utf-8")
        for each in section.figures:
            drawn[each.name] = save_figure(each, folder / FIGURES, figures)
    (folder / TEXT).write_text(as_text(results, made), encoding="utf-8")
    return drawn


def explain_star(section: Section) -> Section:
    """Append a note on the star to every starred table, and then to all figures."""
    starred = [
        any(STAR in text for text in (table.caption, *chain.from_iterable(table.texts())))
        for table in section.tables
    ]
    return replace(
        section,
        tables=tuple(
            replace(table, caption=f"{table.caption} {STAR_NOTE}") if star else table
            for table, star in zip(section.tables, starred, strict=True)
        ),
        figures=tuple(
            replace(each, caption=f"{each.caption} {STAR_NOTE}") if any(starred) else each
            for each in section.figures
        ),
    )


def render(
    results: Results,
    sections: Sequence[Section],
    drawn: Mapping[str, str],  # figure name: HTML element
) -> str:
    """Render the page as HTML."""
    titles = {section.name: section.title for section in sections} | CLOSING
    return html.fill(
        "caster_bench.studies",
        "page.html",
        title=escape(results.sweep.title),
        summary=escape(summary(results)),
        contents="\n".join(
            f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in titles.items()
        ),
        sections="\n".join(_section_html(section, drawn) for section in sections),
        rejected=_rejected_html(results),
        sweep=results.sweep.sha256,
        origin="\n".join(as_html(table) for table in provenance_tables(results)),
        constants=html.constants(
            Settings(**results.sweep.constants), "Constants of caster used in the runs."
        ),
        version=escape(__version__),
    )


def summary(results: Results) -> str:
    """Summarise the sweep in a line."""
    rejected = f"; {len(results.rejected):,} rejected" if results.rejected else ""
    samples = sum(score.n for score in results.scores.values())
    part = f" {results.part}" if results.part else ""
    return (
        f"Sweep {results.sweep.name}: {cells(len(results.scores))} with {samples:,} predictions"
        f"{rejected}.{part} All records were verified before anything here was computed."
    )


def _section_html(section: Section, drawn: Mapping[str, str]) -> str:
    parts = [f'<h2 id="{section.name}">{escape(section.title)}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in section.found]
    parts += [as_html(table) for table in section.tables]
    for each in section.figures:
        caption = f"<figcaption>{escape(each.caption)}</figcaption>"
        parts.append(f"<figure>\n{drawn[each.name]}\n{caption}\n</figure>")
    parts.append(f"<p><small>Method. {escape(section.how)}</small></p>")
    return "\n".join(parts)


def as_html(table: Table) -> str:
    """Format a table as HTML, scrolling if it is wider than the page."""
    columns = [(column.title, not column.format) for column in table.columns]
    return html.table(table.caption, columns, table.texts())


def _rejected_html(results: Results) -> str:
    lines = rejections(results)
    if not lines:
        return f"<p>{NONE_REJECTED}</p>"
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def rejections(results: Results) -> list[str]:
    """List every backbone that was rejected on data."""
    counts: dict[str, int] = {}
    for spec, reason in results.rejected.items():
        line = f"{spec.backbone} on {spec.data}: {reason}"
        counts[line] = counts.get(line, 0) + 1
    return [f"{line} ({cells(count)})" for line, count in counts.items()]


def linked(each: StudyFigure, folder: str) -> str:
    """Link a figure in Markdown, with its caption.

    SVG rather than PNG, whose compression depends on the processor.
    """
    alt, caption = in_markdown(each.alt), in_markdown(each.caption)
    return f"![{alt}]({folder}/{each.name}.svg)\n\n{caption}"


def as_text(results: Results, sections: Sequence[Section]) -> str:
    """Render the report as Markdown with linked figures."""
    parts = [f"# {in_markdown(results.sweep.title)}", in_markdown(summary(results))]
    for section in sections:
        parts += [f"## {in_markdown(section.title)}", *map(in_markdown, section.found)]
        parts += [as_markdown(table).rstrip() for table in section.tables]
        parts += [linked(each, "figures") for each in section.figures]
        parts.append(f"Method. {in_markdown(section.how)}")
    parts.append(f"## {CLOSING['rejected']}")
    parts += [f"- {in_markdown(line)}" for line in rejections(results)] or [NONE_REJECTED]
    parts += [f"## {CLOSING['records']}", f"SHA-256 of the sweep file: `{results.sweep.sha256}`."]
    parts += [as_markdown(table).rstrip() for table in provenance_tables(results)]
    return "\n\n".join(parts) + "\n"


def save_figure(each: StudyFigure, folder: Path, formats: tuple[str, ...]) -> str:
    """Draw a figure, write it in these formats on white, and return it as an HTML element."""
    with rc_context():
        rcdefaults()  # ignore the user's matplotlibrc
        rcParams["svg.hashsalt"] = "caster"
        figure = html.drawn(each.draw, each.height)
        element = html.embedded(figure, each.alt)
        figure.patch.set_alpha(1)
        for kind in formats:
            html.save(figure, folder / f"{each.name}.{kind}", kind, _UNDATED[kind])
    return element
