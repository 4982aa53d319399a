"""From the miniature's run to a document of claims: packed, judged, written twice."""

from __future__ import annotations

import re
import shutil

import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack
from caster_bench.sweeps import STUDIES
from tests.architecture.test_reproduction import first_difference
from tests.support.miniature import SWEEP, caster
from tests.support.report_files import files

FIGURES = {  # a claim for every study: table, row, column, interval and rule
    "E1": 'table = "estimators-summary", row = {figure = "settings won, %"}, column = "ours"',
    "C1": 'table = "certificate-summary", row = {figure = "mean gain, gated"}, column = "ours"',
    "G1": 'table = "gate", row = {data = "pooled"}, column = "over never"',
    "T1": (
        'table = "corruption-all-differences", row = {data = "digits-C*", family = "BN", method = '
        '"tent", less = "frozen"}, column = "difference", interval = "95 %"'
    ),
    "I1": 'table = "coverage", row = {method = "t3a"}, column = "gain"',
    "S1": (
        'table = "specificity-digits-C-star", row = {policy = "tent+certificate"}, column = '
        '"kept, %", interval = "kept 95 %"'
    ),
    "K1": 'table = "cost-ratios", row = {"other method" = "tent"}, column = "rate", '
    'interval = "95 %"',
}
PAPERS = [study for study in STUDIES if study not in ("layers", "tuning")]
HEAD = """
title = "The miniature's claims"
summary = "The first page."
intro = "In small."
records = "records"
document = "REPRODUCTION.md"
reports = "docs/reproduction"
sweeps.miniature = "miniature.toml"

[[part]]
title = "All"
sweep = "miniature"
figures = ["estimators", "certificate", "threshold", "gate", "corruption", "coverage", "cost"]
"""
CLAIM = """
[[part.claim]]
id = "{id}"
says = "Something."
where = "nowhere"
tests = [{{what = "it", {figure}, least = -1000}}]
"""


pytestmark = [pytest.mark.slow, pytest.mark.whole]  # runs the miniature


@pytest.fixture(scope="module")
def root(miniature, tmp_path_factory):
    """A repository with the miniature's records and claims."""
    sweep, out = miniature
    root = tmp_path_factory.mktemp("reproduction")
    shutil.copy(SWEEP, root)
    (root / "records").mkdir()
    done, problems = pack(sweep, out, Pack(root / "records" / "miniature"), out.parent)
    assert problems == []
    assert done.missing == 0
    claims = [CLAIM.format(id=id, figure=figure) for id, figure in FIGURES.items()]
    (root / "claims.toml").write_text(HEAD + "".join(claims), encoding="utf-8")
    return root


def test_every_study_is_judged_and_written_the_same_twice(root, tmp_path):
    for folder in (root, tmp_path):
        caster("claims", root / "claims.toml", "--root", root, "-o", folder)
    text = (root / "REPRODUCTION.md").read_text()
    verdicts = dict(re.findall(r"^### (\w+): (.*)$", text, re.MULTILINE))
    assert verdicts.keys() == FIGURES.keys()
    assert set(verdicts.values()) == {"reproduced"}
    assert len(FIGURES) == len(PAPERS)
    assert r"digits-C\*" in text
    assert r"\* Not the published -C files" in text
    made = files(tmp_path)
    assert sum(name.endswith(".svg") for name in made) >= len(PAPERS)
    assert [line for name in made if (line := first_difference(root, tmp_path, name))] == []
    # what the repository's own test says of an edited file
    path = root / "docs/reproduction/miniature/tables/gate.csv"
    path.write_text(path.read_text().replace("pooled", "polled", 1))
    difference = first_difference(root, tmp_path, str(path.relative_to(root)))
    assert re.search(r"gate\.csv, line \d+, is not what `make reproduction` writes", difference)
