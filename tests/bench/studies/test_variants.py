"""Methods with several settings, and methods that met unequal cells."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from scipy.stats import spearmanr

from caster_bench.studies import certificate, corruption, coverage, gate_policies, specificity
from caster_bench.studies.certificate import thinned
from caster_bench.studies.corruption import ALL, FIFTEEN, averaged
from caster_bench.studies.naming import label, names
from caster_bench.studies.results import load, mean_of_means
from caster_bench.sweeps import Spec
from caster_bench.sweeps.spec import REPORTED
from tests.bench.studies.conftest import raw_records
from tests.support.consistent_records import Consistent, sweep_of

pytestmark = pytest.mark.usefixtures("listed_figures")

HEAD = """
name = "variants"
title = "Variants"

[backbones]
r18 = {family = "batch", checkpoint = "r18"}
r50 = {family = "batch", checkpoint = "r50"}

[data.cifar10]
source = "cifar10:train"
target = "cifar10:test"
threshold = 0.5
"""
SETTINGS = """
[[grid]]
study = ["certificate", "gate", "specificity"]
backbones = ["r50"]
corruptions = ["fog", "snow", "contrast", "frost"]
severities = [1, 5]
batch_sizes = [16]
methods = [
    "frozen", "caster", {method = "caster", tau = 3.0}, "caster-ungated",
    {method = "caster", lam = 0.5}, {method = "caster-ungated", lam = 0.5},
    {method = "tent", lr = 0.1}, {method = "tent", lr = 0.2},
    {method = "tent+certificate", lr = 0.1}, {method = "tent+certificate", lr = 0.2},
    {method = "tent+referee", lr = 0.2, gate = {agreement = 0.8}},
]
"""


class Good(Consistent):
    """Where all methods gain, so that gates have something to keep."""

    def skill(self, spec: Spec) -> float:
        return 0.75 + 0.25 * super().skill(spec)


def run_of(folder, text, maker=Consistent):
    sweep = sweep_of(folder, HEAD + text)
    out = maker(sweep).make(folder / "run")
    results, problems = load(sweep, out)
    assert problems == []
    return results, raw_records(out)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("settings"), SETTINGS, Good)


def by_hand(raw, method, **settings):
    """Records of a method with these settings, by condition."""
    return {
        record.condition: record
        for record in raw
        if record.method == method and dict(record.spec["settings"]) == settings
    }


def test_every_gate_is_held_against_its_own_mechanism(settings):
    results, raw = settings
    (found,) = specificity.measure(results)
    assert found.cells == 8
    relations = {relation.gated: relation for relation in found.relations}
    expected = {
        "caster": "caster-ungated",
        "caster (tau 3.0)": "caster-ungated",
        "caster (lam 0.5)": "caster-ungated (lam 0.5)",
        "tent+certificate (lr 0.1)": "tent (lr 0.1)",
        "tent+certificate (lr 0.2)": "tent (lr 0.2)",
        "tent+referee": "tent (lr 0.2)",
    }
    assert {name: each.mechanism for name, each in relations.items()} == expected
    assert [name for name, each in relations.items() if each.own] == list(relations)[:3]
    gated, alone = by_hand(raw, "tent+certificate", lr=0.2), by_hand(raw, "tent", lr=0.2)
    accepts = [float(gated[c].batches["accepted"].mean()) for c in gated]
    gains = [alone[c].gain for c in gated]
    one = relations["tent+certificate (lr 0.2)"]
    assert one.correlation == pytest.approx(spearmanr(accepts, gains)[0])
    policies = {policy.name: policy for policy in found.policies}
    for name, method, mechanism, given in (
        ("tent+certificate (lr 0.2)", "tent+certificate", "tent", {"lr": 0.2}),
        ("caster (lam 0.5)", "caster", "caster-ungated", {"lam": 0.5}),
    ):
        part = mean(record.gain for record in by_hand(raw, method, **given).values())
        whole = mean(record.gain for record in by_hand(raw, mechanism, **given).values())
        assert policies[name].kept == pytest.approx(part / whole)
    assert all(policies[name].kept == 1 for name in expected.values())
    assert policies["frozen"].kept is None
    assert specificity.section(results).figures[0].height > 6  # six panels in two rows


def test_every_gate_has_its_row(settings):
    results, raw = settings
    found = gate_policies.measure(results)
    pooled = {row.method: row for row in found.pooled}
    assert pooled.keys() == {"caster", "caster (tau 3.0)", "caster (lam 0.5)"}
    for name, given, transport in (
        ("caster", {}, {}),
        ("caster (tau 3.0)", {"tau": 3.0}, {}),
        ("caster (lam 0.5)", {"lam": 0.5}, {"lam": 0.5}),
    ):
        always = by_hand(raw, "caster-ungated", **transport)
        gated = by_hand(raw, "caster", **given)
        assert pooled[name].gated.cells == 8
        assert pooled[name].always.value == pytest.approx(mean(r.accuracy for r in always.values()))
        assert pooled[name].gated.value == pytest.approx(mean(r.accuracy for r in gated.values()))
    section = gate_policies.section(results)
    assert {row[0] for row in section.tables[0].rows} == pooled.keys()
    assert len(section.found) == 3


def test_every_transport_has_its_certificates(settings):
    results, raw = settings
    found = {each.method: each for each in certificate.measure(results)}
    assert found.keys() == {"caster-ungated", "caster-ungated (lam 0.5)"}
    for name, given in (("caster-ungated", {}), (list(found)[1], {"lam": 0.5})):
        cells = by_hand(raw, "caster-ungated", **given)
        assert found[name].pooled.cells == len(cells) == 8
        assert found[name].pooled.ungated.value == pytest.approx(
            mean(record.gain for record in cells.values())
        )
    assert found["caster-ungated"].taus == (0.8, 3.0)
    section = certificate.section(results)
    files = [table.name for table in section.tables] + [p.name for p in section.figures]
    assert len(set(files)) == len(files) == 12


def test_a_transport_with_a_threshold_of_its_own_is_gated_at_it(tmp_path):
    results, _ = run_of(
        tmp_path,
        """
[[grid]]
study = "certificate"
backbones = ["r18"]
corruptions = ["fog"]
severities = [1, 5]
methods = ["caster-ungated"]

[[grid]]
study = "certificate"
backbones = ["r50"]
corruptions = ["fog"]
severities = [1, 5]
methods = [{method = "caster-ungated", tau = 3.0}]
""",
    )
    found = {each.method: each for each in certificate.measure(results)}
    assert {name: each.tau for name, each in found.items()} == {
        "caster-ungated, τ 0.8": 0.8,
        "caster-ungated, τ 3": 3.0,
    }
    for each in found.values():
        assert each.pooled.gated.value == pytest.approx(each.curve.at(each.tau))


UNEQUAL = """
[[grid]]
study = ["corruption", "coverage"]
corruptions = ["fog", "snow"]
severities = [5]
batch_sizes = [16]
methods = ["frozen", "caster"]

[[grid]]
study = ["corruption", "coverage"]
backbones = ["r18"]
corruptions = ["fog"]
severities = [5]
batch_sizes = [16]
methods = ["tent"]
"""


class Easy(Consistent):
    """Where Tent is always right, on the one stream it met."""

    def skill(self, spec: Spec) -> float:
        return 1.0 if spec.method == "tent" else super().skill(spec)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unequal"), UNEQUAL, Easy)[0]


def test_a_method_on_fewer_cells_is_not_ranked(unequal):
    section = corruption.section(unequal)
    (sentence,) = section.found
    assert "tent is best" not in sentence
    assert " is best with " in sentence
    assert sentence.endswith("Not compared because of fewer cells: tent (1 cell).")
    first = corruption.measure(unequal).conventions[0]
    assert first.entries["CIFAR-10-C*", "tent", "batch"].mean.value > 0.99
    assert {method for _, method, _ in first.comparable().entries} == {"frozen", "caster"}
    table = section.tables[0]
    place = [column.title for column in table.columns].index("BN cells")
    assert {row[0]: row[place] for row in table.rows} == {"frozen": 4, "caster": 4, "tent": 1}
    assert "BN: Not compared because of fewer cells: tent (1 cell)." in table.caption


def test_without_a_method_on_all_cells_there_is_no_highest(tmp_path):
    grid = "[[grid]]\nstudy = 'corruption'\nseverities = [5]\nbackbones = ['r18']\n"
    text = f"{grid}corruptions = ['fog']\nmethods = ['tent']\n"
    text += f"{grid}corruptions = ['snow']\nmethods = ['eata']\n"
    section = corruption.section(run_of(tmp_path, text)[0])
    assert section.found == ("On CIFAR-10-C*, BN: no method ran on all cells.",)
    assert section.figures == ()


def test_low_coverage_does_not_draw_unequal_cells_together(unequal):
    rows = {row.method: row for row in coverage.measure(unequal)}
    assert (rows["caster"].whole, rows["tent"].whole) == (True, False)
    caption = coverage.section(unequal).tables[0].caption
    assert "because of fewer cells: tent on r18, CIFAR-10-C*." in caption


def test_low_coverage_is_told_of_every_backbone(unequal):
    """Two networks in one row would be the mean of none."""
    rows = coverage.measure(unequal)
    assert {row.setting for row in rows} == {"r18, CIFAR-10-C*", "r50, CIFAR-10-C*"}


OTHER_STREAMS = """
[[grid]]
study = "certificate"
corruptions = ["fog", "snow"]
severities = [1, 5]
methods = ["frozen", "caster-ungated", "caster"]
[[grid]]
study = "certificate"
corruptions = ["fog"]
severities = [5]
batch_sizes = [16]
methods = ["frozen", "caster-ungated", "caster"]
"""


def test_other_streams_are_pooled_apart(tmp_path):
    """The paper pools shuffled streams of one batch size: what else was run must not move that."""
    results, raw = run_of(tmp_path, OTHER_STREAMS)
    usual, others = certificate.measure(results)
    sizes = {record.spec["batch_size"]: 0 for record in raw}
    for record in raw:
        sizes[record.spec["batch_size"]] += record.method == "caster-ungated"
    most = max(sizes, key=lambda size: sizes[size])
    assert usual.pooled.cells == sizes[most] == 8
    assert others.pooled.cells == sizes[16] == 2
    assert others.method == "caster-ungated, other streams"
    assert list(others.by_setting) == ["CIFAR-10-C*, shuffled, batches of 16"]
    gains = [
        record.gain
        for record in raw
        if record.method == "caster-ungated" and record.spec["batch_size"] == most
    ]
    assert usual.pooled.ungated.value == pytest.approx(mean(gains))
    names = [table.name for table in certificate.section(results).tables]
    assert len(names) == len(set(names)) == 8


def words(folder, corruptions, severities):
    results, _ = run_of(
        folder,
        f"""
[[grid]]
study = "corruption"
backbones = ["r18"]
corruptions = {corruptions}
severities = {severities}
methods = ["frozen"]
""",
    )
    return {each.name: averaged(each) for each in corruption.measure(results).conventions}


@pytest.mark.parametrize(
    ("corruptions", "severities", "all_words", "fifteen_words"),
    [
        (
            '"all"',
            "[1, 2, 3, 4, 5]",
            "all nineteen corruptions at five severities, as in the",
            "the f",
        ),
        (
            '"reported"',
            "[5]",
            "15 of the paper's 95 pairs",
            "the fifteen reported corruptions at severity",
        ),
        ('["fog", "saturate"]', "[4, 5]", "4 of the paper's 95 pairs", "1 of the fifteen reported"),
    ],
)
def test_a_convention_is_named_only_where_it_is_whole(
    tmp_path, corruptions, severities, all_words, fifteen_words
):
    told = words(tmp_path, corruptions, severities)
    assert told[ALL].startswith(all_words)
    assert told[FIFTEEN].startswith(fifteen_words)
    assert ("as in the paper" in told[ALL]) == (corruptions == '"all"')


def test_fourteen_are_not_the_fifteen(tmp_path):
    told = words(tmp_path, list(REPORTED[1:]), "[5]")
    assert told[FIFTEEN] == "14 of the fifteen reported corruptions at severity 5"


def test_unequal_conditions_are_not_counted_as_one(unequal):
    first, second = corruption.measure(unequal).conventions
    assert averaged(first) == "varying pairs of corruption and severity"
    assert averaged(second).startswith("varying subsets of the fifteen")
    assert averaged(first.comparable()).startswith("2 of the paper's 95 pairs")


def test_the_interval_is_of_the_mean_over_groups():
    """Beside another bootstrap; over all values alike it would be around 0.29, not 0.5."""
    rng = np.random.default_rng(3)
    parallel_map, few = rng.normal(0.2, 0.02, 60), rng.normal(0.8, 0.02, 10)
    found = mean_of_means([parallel_map, few])
    assert found.value == pytest.approx((parallel_map.mean() + few.mean()) / 2)
    other = np.random.default_rng(9)
    drawn = [
        (other.choice(parallel_map, len(parallel_map)).mean() + other.choice(few, len(few)).mean())
        / 2
        for _ in range(8_000)
    ]
    expected = np.quantile(drawn, [0.025, 0.975])
    assert [found.interval.low, found.interval.high] == pytest.approx(expected, abs=6e-4)
    assert found.interval.low < found.value < found.interval.high


def test_a_group_of_one_has_no_interval():
    assert mean_of_means([[0.1, 0.2], [0.9]]).interval is None


def test_lists_among_settings_are_words():
    one = Spec("r", "d", "tent", settings=(("lr", 0.1), ("norms", ("batch",))))
    two = replace(one, settings=(("norms", ("batch", "layer")),))
    assert names([one, two]) == {one: "tent (lr 0.1, norms batch)", two: label(two)}
    assert label(two) == "tent (norms batch and layer)"
    gated = Spec("r", "d", "t+g", settings=(("gate", (("kinds", ("a", "b")), ("least", 0.9))),))
    assert label(gated) == "t+g (kinds a and b, least 0.9)"


def test_a_curve_is_thinned_where_nothing_is_seen():
    rng = np.random.default_rng(0)
    x = np.sort(np.exp(rng.normal(size=50_000)))
    y = np.cumsum(rng.normal(size=50_000))
    kept = thinned(x, y)
    assert len(kept) < 8_000
    assert {0, 49_999, int(y.argmin()), int(y.argmax())} <= set(kept.tolist())
    few = np.array([1.0, 2.0, 4.0, 8.0])
    assert thinned(few, few).tolist() == [0, 1, 2, 3]
