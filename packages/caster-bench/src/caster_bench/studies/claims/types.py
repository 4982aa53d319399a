"""A file of claims in memory."""

from __future__ import annotations

from dataclasses import dataclass

from caster_bench.studies.claims.rules import Rule
from caster_bench.studies.claims.values import Figure, Printed


@dataclass(frozen=True)
class Comparison:
    """A figure of ours, the paper's beside it where it has one, and how they are judged."""

    what: str
    figure: Figure
    paper: Printed | None
    rule: Rule


@dataclass(frozen=True)
class Claim:
    """Something the paper says, in our words, and how it can be told whether it holds."""

    id: str
    says: str
    where: str  # in the paper
    tests: tuple[Comparison, ...]
    why: str | None  # it cannot be tested here; then there are no tests
    proof: str | None  # the test of this repository that shows it without any data
    needs: tuple[str, ...]  # data without which its figures would be of another pool
    limits: str | None  # what our test of it is not: known before any run
    note: str | None  # what came out otherwise than the paper has it, and why


@dataclass(frozen=True)
class Part:
    """Claims of one section of the paper, with what is shown beside them."""

    title: str
    sweep: str  # whose tables and figures they are
    text: str | None
    tables: tuple[str, ...]
    figures: tuple[str, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Claims:
    """All of them, and where their evidence is; paths are relative to one root."""

    title: str
    intro: str
    records: str  # folder: in it a pack for every sweep, by its name
    document: str  # file to write
    reports: str  # folder to write: in it a report for every sweep, by its name
    sweeps: dict[str, str]  # name: file
    values: dict[str, Figure]  # figures that texts may name
    parts: tuple[Part, ...]
