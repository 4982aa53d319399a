"""Every study's numbers beside arithmetic of its own, on rows read without caster."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import mean, median, stdev
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import spearmanr

from caster_bench.studies import (
    certificate,
    corruption,
    coverage,
    estimators,
    gate_policies,
    runtime_cost,
    specificity,
)
from caster_bench.studies.corruption import difference
from caster_bench.studies.results import correlation_interval, interval_of
from caster_bench.studies.score import gated_gain
from caster_bench.sweeps import Spec


def of(raw, sweep, study, *methods):
    """Raw records of a study by stream and method."""
    wanted = {
        (tuple(map(tuple, s.conditions)), s.backbone, s.data, s.seed, s.method, s.alone)
        for s in sweep.of(study)
    }
    found = defaultdict(dict)
    for record in raw:
        spec = record.spec
        key = (
            tuple((name, severity) for name, severity in spec["conditions"]),
            spec["backbone"],
            spec["data"],
            spec["seed"],
            spec["method"],
            spec["alone"],
        )
        if key in wanted and (not methods or record.method in methods):
            found[record.stream][record.method] = record
    return list(found.values())


def right(record):
    return record.prediction == record.label


def test_estimators(results, raw, run):
    found = estimators.measure(results)
    pairs = of(raw, run[0], "estimators")
    margins = {m["knn"].backbone: m["source-gda"].accuracy - m["knn"].accuracy for m in pairs}
    assert len(margins) == 2
    assert {s.backbone: pytest.approx(s.margin) for s in found.settings} == margins
    assert found.wins == sum(margin > 0 for margin in margins.values())
    assert found.margin.value == pytest.approx(mean(margins.values()))
    ratios = [
        sum(m["knn"].cell["method"]["retained"].values())
        / sum(m["source-gda"].cell["method"]["retained"].values())
        for m in pairs
    ]
    assert found.ratio == pytest.approx(median(ratios))
    assert median(ratios) != 1


def gated_by_hand(record, tau, classes, constants):
    """Accuracy if batches with enough confident samples and a small ratio are transported."""
    held = record.batches
    hits = 0
    for batch in held["batch"]:
        rows = record.batch == batch
        enough = held["confident"][batch] >= constants["min_samples"]
        enough &= held["confident_classes"][batch] >= min(constants["min_classes"], classes)
        taken = enough and held["ratio"][batch] <= tau
        answers = record.prediction if taken else record.frozen
        hits += (answers == record.label)[rows].sum()
    return hits / len(record.label)


def test_certificate(results, raw, run):
    (found,) = certificate.measure(results)
    cells = [met["caster-ungated"] for met in of(raw, run[0], "certificate")]
    constants = cells[0].cell["identity"]["constants"]
    certificates = [float(np.median(c.batches["ratio"])) for c in cells]
    gains = [c.gain for c in cells]
    assert found.pooled.cells == len(cells) == 18
    assert found.pooled.ungated.value == pytest.approx(mean(gains))
    losing = [c for c, gain in zip(certificates, gains, strict=True) if gain < -0.1]
    harmless = [c for c, gain in zip(certificates, gains, strict=True) if gain >= 0]
    assert found.pooled.lowest_losing == pytest.approx(min(losing))
    assert found.pooled.highest_losing == pytest.approx(max(filter(math.isfinite, losing)))
    finite = [c for c in harmless if math.isfinite(c)]
    assert found.pooled.highest_harmless == pytest.approx(max(finite))
    assert found.pooled.harmless_without == len(harmless) - len(finite)
    regime = [(c, g) for c, g in zip(certificates, gains, strict=True) if c < min(losing)]
    assert found.pooled.regime == len(regime)
    assert found.pooled.correlation == pytest.approx(spearmanr(*zip(*regime, strict=True))[0])
    never = [float((c.frozen == c.label).mean()) for c in cells]
    for tau in (0.0, 0.3, 0.8, 1.7, 5.0, 1e9):
        gated = [gated_by_hand(c, tau, 4, constants) for c in cells]
        expected = mean(np.subtract(gated, never))
        assert found.curve.at(tau) == pytest.approx(expected, abs=1e-12)
    assert found.pooled.gated.value == pytest.approx(found.curve.at(0.8))


def test_ranks_within_backbones_and_over_all(results, raw, run):
    """With SciPy's correlation of the medians of raw ratios."""
    found = certificate.measure(results)[0]
    groups = defaultdict(list)
    always = [spec.plain() for spec in run[0].of("certificate") if spec.method == "caster-ungated"]
    for record in (record for record in raw if record.spec in always):
        title = run[0].backbones[record.backbone].title
        groups[title].append((np.median(record.batches["ratio"]), record.gain))
    every = [pair for group in groups.values() for pair in group]
    expected = {title: spearmanr(np.array(own)).statistic for title, own in groups.items()}
    assert len(expected) > 2
    for title, value in expected.items():
        assert found.ranks[title].value == pytest.approx(value)
    single = list(expected.values())
    assert found.ranks["one backbone, mean"].value == pytest.approx(mean(single))
    assert found.ranks["all backbones"].value == pytest.approx(spearmanr(np.array(every)).statistic)


def test_the_best_threshold_of_every_data_set(results):
    """Against a loop over all thresholds that change anything, and none."""
    (found,) = certificate.measure(results)
    always = [s for s in results.of("certificate") if s.spec.method == "caster-ungated"]
    held = defaultdict(list)
    for point, score in zip(found.points, always, strict=True):
        held[point.setting].append(score)
    assert list(found.best) == list(held) == list(found.by_setting)
    for place, scores in held.items():
        taus = {0.0, *(float(tau) for s in scores for tau in s.batches.min_tau if tau < math.inf)}
        gains = [mean(gated_gain(score, tau) for score in scores) for tau in taus]
        assert found.best[place] == pytest.approx(max(gains), abs=1e-12)
    table = certificate.data_table(found)
    columns = [column.title for column in table.columns]
    told = [row[columns.index("best")] for row in table.rows]
    assert told == [pytest.approx(100 * best) for best in found.best.values()]
    apart = [mean(gated_gain(s, 0.8) - s.gain for s in scores) for scores in held.values()]
    told = [row[columns.index("over always")] for row in table.rows]
    assert told == [pytest.approx(100 * difference) for difference in apart]


def test_recorded_gated_cells_are_the_recomputed_ones(results, raw, run):
    pairs = of(raw, run[0], "gate", "caster", "caster-ungated")
    constants = pairs[0]["caster"].cell["identity"]["constants"]
    for met in pairs:
        by_hand = gated_by_hand(met["caster-ungated"], 0.8, 4, constants)
        assert met["caster"].accuracy == by_hand


def test_mixed_metric(results, raw, run):
    (measured,) = certificate.measure(results)
    found = measured.mixed["caster-mixed-metric"]
    pairs = [m for m in of(raw, run[0], "certificate") if "caster-mixed-metric" in m]
    assert found.cells == len(pairs) == 2
    gains = [m["caster-mixed-metric"].gain for m in pairs]
    assert found.gated.value == pytest.approx(mean(gains))
    assert found.ungated.value == pytest.approx(mean(m["caster-ungated"].gain for m in pairs))
    ratios = [float(np.median(m["caster-mixed-metric"].batches["ratio"])) for m in pairs]
    losing = [r for r, m in zip(ratios, pairs, strict=True) if m["caster-ungated"].gain < -0.1]
    assert found.lowest_losing == (pytest.approx(min(losing)) if losing else None)


def test_gate(results, raw, run):
    found = gate_policies.measure(results)
    streams = of(raw, run[0], "gate")
    (pooled,) = found.pooled
    assert pooled.gated.cells == len(streams)
    assert pooled.gated.value == pytest.approx(mean(m["caster"].accuracy for m in streams))
    assert pooled.always.value == pytest.approx(mean(m["caster-ungated"].accuracy for m in streams))
    frozen = [float((m["caster"].frozen == m["caster"].label).mean()) for m in streams]
    assert pooled.never.value == pytest.approx(mean(frozen))
    accepts = [float(m["caster"].batches["accepted"].mean()) for m in streams]
    assert pooled.accept == pytest.approx(mean(accepts))
    rows = {(row.backbone, row.setting): row for row in found.rows}
    assert rows.keys() == {
        ("r18", "CIFAR-10-C*"),
        ("r50", "CIFAR-10-C*"),
        ("vit", "CIFAR-10-C*"),
        ("r50", "ImageNet-C*"),
    }
    mine = [m for m in streams if m["caster"].backbone.startswith("r18")]
    over = [m["caster"].accuracy - m["caster-ungated"].accuracy for m in mine]
    assert rows["r18", "CIFAR-10-C*"].over_always.value == pytest.approx(mean(over))
    gains = [m["caster-ungated"].gain for m in streams]
    assert pooled.always_over_never.value == pytest.approx(mean(gains))
    assert len(mine) == 8


def test_an_interval_is_the_bootstrap_over_cells(results, raw, run):
    (row,) = gate_policies.measure(results).pooled
    values = np.array([m["caster"].accuracy for m in of(raw, run[0], "gate")])
    rng = np.random.default_rng(5)
    means = rng.choice(values, (20_000, len(values))).mean(axis=1)
    expected = np.quantile(means, [0.025, 0.975])
    assert [row.gated.interval.low, row.gated.interval.high] == pytest.approx(expected, abs=0.004)


@pytest.mark.parametrize(
    ("name", "conditions"),
    [("all", {"fog-5", "saturate-5"}), ("fifteen", {"fog-5"})],
)
def test_corruption(results, raw, run, name, conditions):
    found = {c.name: c for c in corruption.measure(results).conventions}[name]
    accuracies = defaultdict(lambda: defaultdict(list))
    losses = defaultdict(lambda: [0.0])
    for met in of(raw, run[0], "corruption"):
        for method, record in met.items():
            if record.condition in conditions:
                title = record.backbone.removesuffix("-a").removesuffix("-b")
                accuracies[method, title][record.condition].append(record.accuracy)
                losses[title, method].append(-record.gain)
    backbones = {
        key: mean(mean(seeds) for seeds in held.values()) for key, held in accuracies.items()
    }
    for method in ("frozen", "source-gda", "tent", "caster", "caster-ungated"):
        values = [backbones[method, "r18"], backbones[method, "r50"]]
        entry = found.entries["CIFAR-10-C*", method, "batch"]
        assert entry.mean.value == pytest.approx(mean(values))
        assert entry.sd == pytest.approx(stdev(values))
        assert entry.mean.cells == 6 * len(conditions)  # r18 twice and r50, two seeds each
        assert entry.whole
        alone = found.entries["CIFAR-10-C*", method, "layer"]
        assert alone.mean.value == pytest.approx(backbones[method, "vit"])
        assert alone.sd is None  # swin was refused
        assert alone.inert == (method == "tent")
    tables = {table.name: table for table in corruption.all_tables(corruption.measure(results))}
    rows = tables[f"corruption-{name}-backbones"].rows
    worst = {(row[2], row[3]): row[5] for row in rows if row[0] == "CIFAR-10-C*"}
    assert worst["r18", "frozen"] is None
    for (title, method), lost in losses.items():
        if method != "frozen":  # of any seed: a mean of seeds would hide it
            assert worst[title, method] == pytest.approx(100 * max(lost))


def test_coverage(results, raw, run):
    rows = {row.method: row for row in coverage.measure(results)}
    streams = of(raw, run[0], "coverage")
    assert rows.keys() == streams[0].keys() - {"frozen"}
    for method, row in rows.items():
        held = [met[method] for met in streams]
        assert row.gain.value == pytest.approx(mean(record.gain for record in held))
        assert row.harm == pytest.approx(mean(record.harm for record in held))
        accepts = [float(record.batches["accepted"].mean()) for record in held]
        assert row.accept == pytest.approx(mean(accepts))


def test_specificity(results, raw, run):
    (found,) = specificity.measure(results)
    streams = of(raw, run[0], "specificity")
    assert found.cells == len(streams) == 9
    policies = {policy.name: policy for policy in found.policies}
    for name, policy in policies.items():
        held = [met[name] for met in streams]
        assert policy.accuracy.value == pytest.approx(mean(r.accuracy for r in held))
        assert policy.gain.value == pytest.approx(mean(r.gain for r in held))
        assert policy.harm.value == pytest.approx(mean(r.harm for r in held))
    whole = mean(met["tent"].gain for met in streams)
    part = mean(met["tent+certificate"].gain for met in streams)
    kept = policies["tent+certificate"].kept
    assert kept == (pytest.approx(part / whole) if whole > 0 else None)
    assert policies["frozen"].kept is None
    relations = {relation.gated: relation for relation in found.relations}
    assert relations.keys() == {"caster", "tent+certificate", "tent+referee"}
    for gated, mechanism in (("caster", "caster-ungated"), ("tent+certificate", "tent")):
        accepts = [float(met[gated].batches["accepted"].mean()) for met in streams]
        gains = [met[mechanism].gain for met in streams]
        assert len(set(accepts)) < len(accepts)  # ties, which average ranks are for
        assert relations[gated].correlation == pytest.approx(spearmanr(accepts, gains)[0])


def test_differences_of_policies_are_of_the_same_cells(results, raw, run):
    (found,) = specificity.measure(results)
    streams = of(raw, run[0], "specificity")
    pairs = {(pair.one, pair.other): pair for pair in found.differences}
    gated = {("tent+certificate", "tent"), ("tent+referee", "tent"), ("caster", "caster-ungated")}
    assert pairs.keys() == gated  # of one that learns there is no other to stand beside
    for (one, other), pair in pairs.items():
        apart = [met[one].accuracy - met[other].accuracy for met in streams]
        assert pair.accuracy.value == pytest.approx(mean(apart))
        assert pair.accuracy.interval.low <= mean(apart) <= pair.accuracy.interval.high
        harmed = [met[one].harm - met[other].harm for met in streams]
        assert pair.harm.value == pytest.approx(mean(harmed))
    table = next(t for t in specificity.all_tables((found,)) if t.name.endswith("differences"))
    for row, pair in zip(table.rows, found.differences, strict=True):
        assert row[1:3] == (pair.one, pair.other)
        assert row[4] == pytest.approx(100 * pair.accuracy.value)
        assert row[5].low == pytest.approx(100 * pair.accuracy.interval.low)
        assert row[6] == pytest.approx(100 * pair.harm.value)
        assert row[7].high == pytest.approx(100 * pair.harm.interval.high)


def test_policies_that_learn_stand_beside_the_first_behind_the_same_gate():
    other = (("gate", (("agreement", 0.9),)),)
    quick = (("lr", 0.1),)
    specs = {
        "frozen": Spec("r", "d", "frozen"),
        "tent": Spec("r", "d", "tent"),
        "tent+referee": Spec("r", "d", "tent+referee"),
        "eata (lr 0.1)": Spec("r", "d", "eata", settings=quick),
        "eata+referee (lr 0.1)": Spec("r", "d", "eata+referee", settings=quick),
        "eata+referee (agreement 0.9)": Spec("r", "d", "eata+referee", settings=other),
    }
    met = {n: SimpleNamespace(spec=spec, gradients=n != "frozen") for n, spec in specs.items()}
    assert specificity._alike(met) == [
        ("eata (lr 0.1)", "tent"),
        ("eata+referee (lr 0.1)", "tent+referee"),
    ]


def test_cost(results, raw, run):
    rows = {row.method: row for row in runtime_cost.measure(results)}
    (met,) = of(raw, run[0], "cost")
    assert met["frozen"].spec["alone"]
    for method, row in rows.items():
        held = met[method].batches
        rates = held["size"] / held["seconds"]  # batches before the first are not in the records
        assert row.rate == pytest.approx(median(rates))
        assert row.share == pytest.approx(row.rate / rows["frozen"].rate)
    assert rows["tent"].backward
    assert not rows["caster"].backward


def test_rejected_backbones_are_named(results):
    assert len(results.rejected) == 20
    for study in ("corruption", "gate", "certificate"):
        (line,) = results.rejections(study)
        assert line.startswith("swin on cifar10 was rejected: ")
    assert results.rejections("cost") == []


def test_the_regime_is_chosen_by_certificate():
    """A cell that loses little above the lowest losing one is not in it; one below it is."""
    cells = [(0.3, 0.01), (0.5, 0.03), (0.9, 0.02), (2.0, -0.2), (3.0, 0.5), (math.inf, 0.1)]
    found = certificate.bands([certificate.Point("d", r, gain, 0.0) for r, gain in cells])
    assert (found.lowest_losing, found.highest_harmless, found.harmless_without) == (2.0, 3.0, 1)
    assert found.regime == 3
    assert found.correlation == pytest.approx(0.5)  # ranks 1 2 3 and 1 3 2


def test_losing_cells_have_a_lowest_and_a_highest_finite_certificate():
    cells = [(0.3, 0.01), (2.5, -0.3), (2.0, -0.2), (math.inf, -0.4), (9.0, -0.1)]
    found = certificate.bands([certificate.Point("d", r, gain, 0.0) for r, gain in cells])
    assert (found.losing, found.lowest_losing, found.highest_losing) == (3, 2.0, 2.5)


def test_bands_without_a_losing_cell():
    cells = [(0.3, 0.0), (0.5, -0.1), (math.inf, -0.05)]
    found = certificate.bands([certificate.Point("d", r, gain, 0.0) for r, gain in cells])
    assert (found.lowest_losing, found.highest_losing) == (None, None)
    assert (found.highest_harmless, found.regime) == (0.3, 2)
    assert found.correlation is None


def summary_of(results, plateau):
    (found,) = certificate.measure(results)
    table = certificate.all_tables(replace(found, plateau=plateau), "")[0]
    return {row[0]: table.columns[1].text(row[1]) for row in table.rows}


@pytest.mark.parametrize(
    ("plateau", "expected"),
    [
        ((0.5, 2.0), ["0.5", "2", "4"]),
        ((0.5, math.inf), ["0.5", "no upper end", "no upper end"]),
        ((0.0, 2.0), ["0", "2", "from zero"]),
    ],
)
def test_both_ends_of_the_plateau_are_told(results, plateau, expected):
    rows = summary_of(results, plateau)
    names = ("plateau from", "plateau to", "plateau, highest over lowest")
    assert [rows[name] for name in names] == expected


def test_differences_are_of_the_same_cells(results, raw, run):
    (first, *_) = corruption.measure(results).conventions
    entries = {method: e for (_, method, family), e in first.entries.items() if family == "batch"}
    found = difference(entries["tent"], entries["frozen"])
    streams = of(raw, run[0], "corruption")
    apart: dict[tuple[str, str], list[float]] = {}
    for met in streams:
        if met["tent"].backbone.startswith("r"):
            key = met["tent"].backbone[:3], met["tent"].condition
            apart.setdefault(key, []).append(met["tent"].accuracy - met["frozen"].accuracy)
    assert len(apart) == 4  # two backbones, two conditions, seeds taken together
    assert found.value == pytest.approx(mean(mean(values) for values in apart.values()))
    r18, r50 = (
        [mean(values) for (name, _), values in apart.items() if name == own]
        for own in ("r18", "r50")
    )
    rng = np.random.default_rng(9)
    drawn = (rng.choice(r18, (20_000, 2)).mean(1) + rng.choice(r50, (20_000, 2)).mean(1)) / 2
    ends = np.quantile(drawn, [0.025, 0.975])
    assert [found.interval.low, found.interval.high] == pytest.approx(ends, abs=0.01)


def test_ratios_of_cost(results, raw, run):
    (table,) = [t for t in runtime_cost.section(results).tables if t.name == "cost-ratios"]
    (met,) = of(raw, run[0], "cost")
    titles = [column.title for column in table.columns]
    rows = {row[2]: dict(zip(titles, row, strict=True)) for row in table.rows}
    assert rows.keys() == {"frozen", "tent"}
    rates = {name: r.batches["size"] / r.batches["seconds"] for name, r in met.items()}
    assert rows["tent"]["rate"] == pytest.approx(median(rates["caster"]) / median(rates["tent"]))
    low, high = rows["tent"]["95 %"].low, rows["tent"]["95 %"].high
    assert low <= rows["tent"]["rate"] <= high


def test_an_interval_of_a_statistic_is_the_bootstrap():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(40, 1))
    found = interval_of(rows, lambda drawn: np.median(drawn, axis=(1, 2)))
    places = np.random.default_rng(4).integers(40, size=(20_000, 40))
    expected = np.quantile(np.median(rows[:, 0][places], axis=1), [0.025, 0.975])
    assert [found.low, found.high] == pytest.approx(expected, abs=0.06)
    assert interval_of(rows[:1], lambda drawn: drawn[:, 0, 0]) is None
    assert interval_of(rows, lambda drawn: np.full(len(drawn), np.nan)) is None


def test_the_interval_of_a_correlation_holds_it():
    rng = np.random.default_rng(1)
    first = rng.normal(size=60)
    second = first + rng.normal(size=60)
    found = correlation_interval(first, second)
    assert found.low < spearmanr(first, second)[0] < found.high < 1
    places = np.random.default_rng(4).integers(60, size=(3_000, 60))
    drawn = [spearmanr(first[place], second[place])[0] for place in places]
    expected = np.quantile(drawn, [0.025, 0.975])
    assert [found.low, found.high] == pytest.approx(expected, abs=0.03)
    assert correlation_interval([1, 1, 1], [1, 2, 3]) is None
