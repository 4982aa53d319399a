"""Claims from their TOML file: every fault is one line that says where it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from caster.errors import CasterError
from caster.io.files import read_toml
from caster_bench.studies.claims.comparisons import read_comparison, read_figure
from caster_bench.studies.claims.fields import check, inner, listed, maybe, text, texts, within
from caster_bench.studies.claims.types import Claim, Claims, Part
from caster_bench.studies.claims.values import Figure
from caster_bench.sweeps.names import known

TOP = ("title", "intro", "records", "document", "reports", "sweeps", "values", "part")
PART = ("title", "sweep", "text", "tables", "figures", "claim")
CLAIM = ("id", "says", "where", "tests", "why", "proof", "needs", "limits", "note")
TYPED = re.compile(r"\d[.,]\d|\d ?%")  # a figure typed by hand: decimals, thousands, percent
FREE = re.compile(
    r"`[^`]*`|\{[^}]*\}|Secs?\. \d\.\d"
)  # settings, named figures, the paper's sections


def read(path: Path) -> Claims:
    """The claims of a file."""
    return within(str(path), partial(_claims, read_toml(path)[0]))


def _claims(table: dict[str, Any]) -> Claims:
    check(table, TOP)
    sweeps = {name: text(inner(table, "sweeps"), name) for name in inner(table, "sweeps")}
    if not sweeps:
        raise CasterError("there are no [sweeps]")
    values = {
        name: within(f"values.{name}", partial(read_figure, own, {}, sweeps))
        for name, own in inner(table, "values").items()
    }
    parts = tuple(
        within(f"part {place}", partial(_part, own, sweeps))
        for place, own in enumerate(listed(table, "part"), 1)
    )
    ids = [claim.id for part in parts for claim in part.claims]
    if twice := [each for each in ids if ids.count(each) > 1]:
        raise CasterError(f"there are two claims {twice[0]}")
    made = Claims(
        title=text(table, "title"),
        intro=text(table, "intro"),
        records=text(table, "records"),
        document=text(table, "document"),
        reports=text(table, "reports"),
        sweeps=sweeps,
        values=values,
        parts=parts,
    )
    for place, words in _written(made):
        within(place, partial(_check_text, words, values))
    return made


def _written(claims: Claims) -> Iterable[tuple[str, str]]:
    """What is written after the runs, where measured figures are named, never typed."""
    yield "intro", claims.intro
    for part in claims.parts:
        yield part.title, part.text or ""
        yield from ((claim.id, claim.note or "") for claim in part.claims)


def _check_text(words: str, values: dict[str, Figure]) -> None:
    for name in re.findall(r"\{([^}]*)\}", words):
        known(name, values, "value")
    plain = FREE.sub("", words)
    if typed := TYPED.search(plain):
        around = plain[max(0, typed.start() - 20) : typed.end() + 5].strip()
        raise CasterError(
            f"a figure is typed by hand: '{around}': name it in [values] and write {{NAME}}; "
            "settings go in backticks"
        )


def _part(table: dict[str, Any], sweeps: dict[str, str]) -> Part:
    check(table, PART)
    sweep = known(text(table, "sweep"), sweeps, "sweep")
    found = listed(table, "claim") if "claim" in table or "text" not in table else ()
    claims = tuple(  # of a part with words of its own there may be none
        within(_name(own, place), partial(_claim, own, sweep, sweeps))
        for place, own in enumerate(found, 1)
    )
    shown = {key: texts(table, key) for key in ("tables", "figures")}
    return Part(text(table, "title"), sweep, maybe(table, "text"), claims=claims, **shown)


def _name(claim: Any, place: int) -> str:
    return str(claim["id"]) if isinstance(claim, dict) and "id" in claim else f"claim {place}"


def _claim(table: dict[str, Any], sweep: str, sweeps: dict[str, str]) -> Claim:
    check(table, CLAIM)
    tests = tuple(
        within(f"test {place}", partial(read_comparison, own, sweep, sweeps))
        for place, own in enumerate(listed(table, "tests") if "tests" in table else (), 1)
    )
    if sum(key in table for key in ("tests", "why", "proof")) != 1:
        raise CasterError("a claim has tests, or a proof, or says why it has none")
    return Claim(
        id=text(table, "id"),
        says=text(table, "says"),
        where=text(table, "where"),
        tests=tests,
        why=maybe(table, "why"),
        proof=maybe(table, "proof"),
        needs=texts(table, "needs"),
        limits=maybe(table, "limits"),
        note=maybe(table, "note"),
    )
