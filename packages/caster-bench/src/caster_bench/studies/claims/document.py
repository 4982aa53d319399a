"""Judged claims as one Markdown document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from caster.errors import CasterError
from caster_bench.studies.claims.evidence import Evidence, study_of
from caster_bench.studies.claims.outcome import Judged, Outcome, figure_of, judged
from caster_bench.studies.claims.rules import NOT_RUN, VERDICTS
from caster_bench.studies.claims.types import Claim, Claims, Part
from caster_bench.studies.claims.values import Reports
from caster_bench.studies.naming import EXPLAINED
from caster_bench.studies.page import linked
from caster_bench.studies.tables import NONE, as_markdown, in_markdown
from caster_bench.studies.write import FIGURES, TEXT

HOW = (
    "A figure of ours stands with its 95 % interval where there is one, from cells drawn anew; "
    "extremes, counts, s.d.s and exact values have none, nor have differences and ratios that no "
    "table pairs. "
    "*Within*: our interval, or the figure where it has none, comes so near to the paper's figure. "
    "*At least*, *at most*, *positive*, *negative*: the figure and all of its interval are. "
    "*Partly* is judged by the figure alone. A claim of several figures is reproduced if all of "
    "them are, not reproduced if none is even partly, and partly otherwise. *Not testable here* "
    "says why."
)
NOT_RUN_MEANS = (
    "*Not run yet*: what it is about is not recorded, or not the data that it cannot be told "
    "without."
)
SO_FAR_MEANS = (
    "*So far*: backbones of its study are still to be recorded, which its section names; the "
    "verdict is on the others."
)
SHOWN = "shown by a test of the mathematics, which takes no data"


@dataclass(frozen=True)
class Writer:
    """All that the document is made of."""

    claims: Claims
    evidence: Mapping[str, Evidence]
    reports: Reports

    @classmethod
    def of(cls, claims: Claims, evidence: Mapping[str, Evidence]) -> Writer:
        """Of claims and their evidence."""
        return cls(claims, evidence, {name: each.tables for name, each in evidence.items()})

    def outcome(self, claim: Claim) -> Outcome:
        """The verdict on a claim."""
        return judged(claim, self.evidence, self.reports)

    def document(self) -> str:
        """The text of the file."""
        parts = self.claims.parts
        outcomes = {part: [self.outcome(claim) for claim in part.claims] for part in parts}
        blocks = [
            "<!-- Written by `caster bench claims`; what people wrote of it is in its file. -->",
            f"# {self.claims.title}",
            self._filled(self.claims.intro),
            "## Verdicts",
            *_summary([each for held in outcomes.values() for each in held]),
            _overview(outcomes),
        ]
        for part, held in outcomes.items():
            blocks += self._part(part, held)
        blocks += ["## Records", self._sweeps(), self._checks(), EXPLAINED.replace("*", r"\*")]
        return "\n\n".join(blocks) + "\n"

    def _filled(self, text: str) -> str:
        """A text, every figure that it names in its place."""

        def figure(match: re.Match[str]) -> str:
            found = figure_of(self.claims.values[match[1]], self.evidence, self.reports)
            return f"({NOT_RUN})" if found is None else in_markdown(found.text)

        return re.sub(r"\{([^}]*)\}", figure, text)

    def _part(self, part: Part, outcomes: Sequence[Outcome]) -> Iterable[str]:
        yield f"## {part.title}"
        if part.text is not None:
            yield self._filled(part.text)
        yield self._commands(part)
        yield from self._awaited(part)
        for outcome in outcomes:
            yield from self._claim(outcome)
        evidence = self.evidence[part.sweep]
        yield from self._tables(part, evidence)
        yield from self._figures(part, evidence)

    def _claim(self, outcome: Outcome) -> Iterable[str]:
        claim = outcome.claim
        yield f"### {claim.id}: {outcome.words}"
        yield f"{claim.says} *({claim.where})*"
        if outcome.judged:
            yield _comparisons(outcome.judged)
        for words, text in (
            ("Not testable here", claim.why),
            ("Proof", None if claim.proof is None else f"`{claim.proof}`, {SHOWN}."),
            ("Limits", claim.limits),
            ("What we found", claim.note),
        ):
            if text is not None:
                yield f"*{words}.* {self._filled(text) if words == 'What we found' else text}"

    def _commands(self, part: Part) -> str:
        """What runs the cells of its claims."""
        lines = [
            f"caster bench run {self.claims.sweeps[sweep]} --only {study}"
            for sweep, study in _studies(part)
        ]
        return "\n".join(["```", *lines, "```"])

    def _awaited(self, part: Part) -> Iterable[str]:
        """Which backbones are still to come."""
        for sweep, study in _studies(part):
            evidence = self.evidence[sweep]
            if evidence.awaits(study) and evidence.is_recorded(study):
                names = in_markdown(", ".join(evidence.awaited[study]))
                yield f"*So far:* the study {study} has yet to be recorded for {names}."

    def _checks(self) -> str:
        """What packs, verifies and reports all records."""
        lines = []
        for each in self.evidence.values():
            records = f"{self.claims.records}/{each.name}"
            lines += [
                f"caster bench pack {each.file} -o {records}",
                f"caster bench verify {each.file} --records {records}",
                f"caster bench report {each.file} --records {records} -o report",
            ]
        return "\n".join(["```", *lines, "```"])

    def _tables(self, part: Part, evidence: Evidence) -> Iterable[str]:
        tables = evidence.tables
        for name in part.tables:
            if name in tables:
                yield as_markdown(tables[name]).rstrip()
            elif evidence.is_whole:
                raise CasterError(f"{part.title}: {evidence.file} gives no table {name!r}")

    def _figures(self, part: Part, evidence: Evidence) -> Iterable[str]:
        folder = f"{self.claims.reports}/{evidence.name}/{FIGURES}"
        pictures = {each.name: each for section in evidence.sections for each in section.pictures}
        for name in part.figures:
            if name in pictures:
                yield linked(pictures[name], folder)
            elif evidence.is_whole:
                raise CasterError(f"{part.title}: {evidence.file} gives no figure {name!r}")

    def _sweeps(self) -> str:
        lines = ["| sweep | study | cells | recorded | report |", "| --- | --- | --: | --: | --- |"]
        for each in self.evidence.values():
            if each.sweep is None:
                lines.append(f"| `{each.file}` | {NONE} | {NONE} | 0 | there is no sweep yet |")
                continue
            report = f"{self.claims.reports}/{each.name}/{TEXT}"
            for study, count in each.recorded.items():
                told = f"[report]({report})" if each.is_recorded(study) else NOT_RUN
                whole = f"{len(each.sweep.of(study)):,} | {count:,}"
                lines.append(f"| `{each.file}` | {study} | {whole} | {told} |")
        return "\n".join(lines)


def _studies(part: Part) -> list[tuple[str, str]]:
    """The sweeps and studies that a part is of."""
    cells = [cell for claim in part.claims for test in claim.tests for cell in test.figure.cells]
    pairs = [(cell.sweep, study_of(cell.table)) for cell in cells]
    pairs += [(part.sweep, study_of(table)) for table in part.tables]
    return list(dict.fromkeys((sweep, study) for sweep, study in pairs if study is not None))


def _summary(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """How many claims have which verdict, and what the words mean that stand there."""
    how = [HOW]
    if any(outcome.verdict == NOT_RUN for outcome in outcomes):
        how.append(NOT_RUN_MEANS)
    if any(outcome.is_so_far for outcome in outcomes):
        how.append(SO_FAR_MEANS)
    return _counts(outcomes), " ".join(how)


def _counts(outcomes: Sequence[Outcome]) -> str:
    found = Counter(outcome.verdict for outcome in outcomes)
    so_far = Counter(outcome.verdict for outcome in outcomes if outcome.is_so_far)
    counts = [
        f"{found[verdict]} {verdict}" + (f" ({so_far[verdict]} so far)" if so_far[verdict] else "")
        for verdict in VERDICTS
        if verdict in found
    ]
    return f"Of {len(outcomes)} claims: {', '.join(counts)}."


def _overview(outcomes: Mapping[Part, Sequence[Outcome]]) -> str:
    lines = ["| claim | | verdict |", "| --- | --- | --- |"]
    for held in outcomes.values():
        for outcome in held:
            says = outcome.claim.says.replace("|", r"\|").replace("\n", " ")
            lines.append(f"| {outcome.claim.id} | {says} | {outcome.words} |")
    return "\n".join(lines)


def _comparisons(held: Sequence[Judged]) -> str:
    lines = ["| figure | paper | ours | rule | verdict |", "| --- | --: | --: | --- | --- |"]
    for each in held:
        paper = NONE if each.test.paper is None else each.test.paper.text
        ours = NONE if each.found is None else each.found.text
        words = (each.test.what, paper, ours, each.test.rule.words(), each.verdict)
        lines.append(f"| {' | '.join(map(in_markdown, words))} |")
    return "\n".join(lines)
