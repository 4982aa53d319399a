"""The report as one HTML page that loads nothing else, and as one Markdown file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from caster._version import __version__
from caster.config import recorded
from caster.report import html
from caster_bench.studies.provenance import tables as origin_tables
from caster_bench.studies.results import Results
from caster_bench.studies.section import Picture, Section
from caster_bench.studies.tables import Table, as_markdown, cells, in_markdown

WORDS = ' class="words"'
CLOSING = {"refused": "Refused cells", "records": "What it was made from"}
NONE_REFUSED = "None: every backbone was admitted on its data."


def render(
    results: Results,
    sections: Sequence[Section],
    drawn: Mapping[str, str],  # name of a picture: its element
) -> str:
    """The page's HTML."""
    titles = {section.name: section.title for section in sections} | CLOSING
    body = html.fill(
        "caster_bench.studies",
        "page.html",
        title=escape(results.sweep.title),
        summary=escape(summary(results)),
        contents="\n".join(
            f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in titles.items()
        ),
        sections="\n".join(_section(section, drawn) for section in sections),
        refused=_refused(results),
        sweep=results.sweep.sha256,
        origin="\n".join(as_html(table) for table in origin_tables(results)),
        constants=html.constants(recorded(results.sweep.constants), "Of caster, as run with."),
        version=escape(__version__),
    )
    return html.page(f"caster bench: {results.sweep.title}", body)


def summary(results: Results) -> str:
    """The sweep in a line."""
    refused = f"; {len(results.refused):,} refused" if results.refused else ""
    samples = sum(score.n for score in results.scores.values())
    part = f" {results.part}" if results.part else ""
    return (
        f"Sweep {results.sweep.name}: {cells(len(results.scores))} with {samples:,} predictions"
        f"{refused}.{part} All records were verified before anything here was computed."
    )


def _section(section: Section, drawn: Mapping[str, str]) -> str:
    parts = [f'<h2 id="{section.name}">{escape(section.title)}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in section.found]
    parts += [as_html(table) for table in section.tables]
    for each in section.pictures:
        caption = f"<figcaption>{escape(each.caption)}</figcaption>"
        parts.append(f"<figure>\n{drawn[each.name]}\n{caption}\n</figure>")
    parts.append(f"<p><small>How it is computed. {escape(section.how)}</small></p>")
    return "\n".join(parts)


def as_html(table: Table) -> str:
    """A table that scrolls where it is wider than the page."""
    heads = "".join(
        f'<th scope="col"{"" if column.format else WORDS}>{escape(column.title)}</th>'
        for column in table.columns
    )
    rows = "\n".join(
        html.row(
            texts[0],
            *(
                html.number(text) if column.format else html.words(text)
                for column, text in zip(table.columns[1:], texts[1:], strict=True)
            ),
        )
        for texts in table.texts()
    )
    return (
        f'<div class="wide" tabindex="0">\n<table>\n<caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _refused(results: Results) -> str:
    lines = refusals(results)
    if not lines:
        return f"<p>{NONE_REFUSED}</p>"
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def refusals(results: Results) -> list[str]:
    """A line for every backbone that was refused on data."""
    counts: dict[str, int] = {}
    for spec, reason in results.refused.items():
        line = f"{spec.backbone} on {spec.data}: {reason}"
        counts[line] = counts.get(line, 0) + 1
    return [f"{line} ({cells(count)})" for line, count in counts.items()]


def linked(picture: Picture, folder: str) -> str:
    """A picture in Markdown, and its caption.

    SVG, not PNG: how well pixels are compressed depends on the processor.
    """
    alt, caption = in_markdown(picture.alt), in_markdown(picture.caption)
    return f"![{alt}]({folder}/{picture.name}.svg)\n\n{caption}"


def as_text(results: Results, sections: Sequence[Section]) -> str:
    """The report in Markdown, its pictures linked."""
    parts = [f"# {in_markdown(results.sweep.title)}", in_markdown(summary(results))]
    for section in sections:
        parts += [f"## {in_markdown(section.title)}", *map(in_markdown, section.found)]
        parts += [as_markdown(table).rstrip() for table in section.tables]
        parts += [linked(each, "figures") for each in section.pictures]
        parts.append(f"How it is computed. {in_markdown(section.how)}")
    parts.append(f"## {CLOSING['refused']}")
    parts += [f"- {in_markdown(line)}" for line in refusals(results)] or [NONE_REFUSED]
    parts += [f"## {CLOSING['records']}", f"SHA-256 of the sweep's file: `{results.sweep.sha256}`."]
    parts += [as_markdown(table).rstrip() for table in origin_tables(results)]
    return "\n\n".join(parts) + "\n"
