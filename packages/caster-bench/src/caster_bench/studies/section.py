"""What a study gives to the report: words, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caster_bench.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A drawing, not drawn yet."""

    name: str  # of its files
    caption: str
    alt: str  # for those who cannot see it
    height: float  # inches, of a width that all have
    draw: Callable[[Figure, str], None]  # on a figure, in an ink


@dataclass(frozen=True)
class Section:
    """A study of the report."""

    name: str
    title: str
    found: tuple[str, ...]  # what came out, a sentence each
    how: str  # how it is computed
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...]
