"""The leaderboard, against records as any other program would read them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from caster_bench.engine.pack import pack
from caster_bench.records.store import Pack
from caster_bench.studies.leaderboard import (
    Cost,
    Ranking,
    board_table,
    costs_of,
    merge,
    overview_tables,
    rank,
)
from caster_bench.studies.results import load_recorded
from caster_bench.sweeps import Spec, read
from tests.bench.studies.conftest import REJECTED
from tests.support.browser import browsing, serving_folder
from tests.support.command_line import cli
from tests.support.consistent_records import SWEEP, Consistent

GRID = """
[[grid]]
study = "corruption"
data = ["cifar10"]
corruptions = ["fog"]
severities = [5]
seeds = [0, 1]
batch_sizes = [16]
methods = ["frozen", "roid"]
"""
ALONE = SWEEP[SWEEP.rindex("[[grid]]") :].replace('"caster", "tent"', '"roid"')  # timed cells
BOTH = GRID.replace('"roid"]', '"roid", "tent"]')
EXTRA = GRID.replace("seeds = [0, 1]", "seeds = [0, 1, 2]")  # streams that the board does not have
PARTIAL = GRID.replace("seeds = [0, 1]", "seeds = [0]")
ORDERS = GRID.replace("seeds = [0, 1]", 'orders = ["shuffled", "by-class"]')
CONTINUAL = GRID.replace("[5]", "[4, 5]").replace(
    "seeds = [0, 1]", 'schedule = "continual"\nbackbones = ["vit"]'
)
LONG = GRID.replace('"cifar10"', '"imagenet"').replace("seeds = [0, 1]", 'backbones = ["vit"]')


def submission(grid: str) -> str:
    """A sweep of one more method, with the backbones and data of the other."""
    head = SWEEP.partition("[[grid]]")[0]
    return head.replace('"every"', '"mine"') + grid


@pytest.fixture(scope="module")
def place(run, tmp_path_factory) -> Path:
    """A repository with one sweep and its packed records."""
    sweep, out = run
    root = tmp_path_factory.mktemp("leaderboard")
    shutil.copy(out.parent / "every.toml", root)
    (root / "records").mkdir()
    assert pack(sweep, out, Pack(root / "records" / "every"))[1] == []
    return root


def invoke(place: Path, *sweeps: str):
    words = [*(place / name for name in sweeps), "--records", place / "records", "-o", place]
    return cli("bench", "leaderboard", *words)


def with_submission(place: Path, folder: Path, grid: str, n: int = 96) -> Path:
    """The same repository and the records of another sweep, on streams of n images."""
    shutil.copytree(place, folder, dirs_exist_ok=True)
    (folder / "mine.toml").write_text(submission(grid))
    sweep = read(folder / "mine.toml")
    out = Consistent(sweep, n=n, refused=REJECTED).make(folder / "run")
    assert pack(sweep, out, Pack(folder / "records" / "mine"))[1] == []
    return folder


def all_ranked(place: Path, *sweeps: str) -> tuple[Ranking, ...]:
    found = []
    for name in sweeps:
        sweep = read(place / name)
        recorded, problems = load_recorded(sweep, Pack(place / "records" / sweep.name))
        assert problems == []
        found.append(recorded.results)
    return rank(merge(found))


def ranked(place: Path, *sweeps: str) -> dict[str, Ranking]:
    """Rankings by family of CIFAR-10-C* at severity 5."""
    return {
        ranking.board.family: ranking
        for ranking in all_ranked(place, *sweeps)
        if (ranking.board.data, ranking.board.severities) == ("CIFAR-10-C*", (5,))
    }


def test_rows_are_those_of_the_raw_records(place, raw):
    """Spare corruptions, which this board's streams have too, do not count."""
    ranking = ranked(place, "every.toml")["LN"]
    means = [standing.entry.mean.value for standing in ranking.standings]
    assert means == sorted(means, reverse=True)
    for standing in ranking.standings:
        cell = ("vit", "cifar10", "fog-5", standing.method)  # swin is refused
        group = [r for r in raw if (r.backbone, r.data, r.condition, r.method) == cell]
        assert len(group) == 2  # seeds
        assert standing.entry.mean.value == pytest.approx(fmean(r.accuracy for r in group))
        assert standing.entry.harm == pytest.approx(fmean(r.harm for r in group))
        assert standing.gain == pytest.approx(fmean(r.gain for r in group))
        worst = max(0.0, *(-record.gain for record in group))
        assert max(0.0, *standing.entry.worst.values()) == pytest.approx(worst)


def test_a_method_that_lacks_streams_is_named_and_not_ranked(place, tmp_path):
    both = with_submission(place, tmp_path, PARTIAL)
    ranking = ranked(both, "every.toml", "mine.toml")["LN"]
    assert "roid" not in [standing.method for standing in ranking.standings]
    assert "roid (1 cell)" in ranking.left_out


def test_a_submission_with_another_checkpoint_is_on_no_board(place, tmp_path):
    """The digest of the weights decides; the page and the command say so."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    other = re.sub(r"^(\S+) = {family", r"own-\1 = {family", submission(BOTH), flags=re.MULTILINE)
    (tmp_path / "mine.toml").write_text(other)
    sweep = read(tmp_path / "mine.toml")
    made = Consistent(sweep, n=96).make(tmp_path / "run")
    assert pack(sweep, made, Pack(tmp_path / "records" / "mine"))[1] == []
    done = invoke(tmp_path, "every.toml", "mine.toml")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "mine.toml: on no board, because none has these streams" in said
    assert "ran on them: roid, tent." in said  # although another sweep's tent is ranked
    text = (tmp_path / "leaderboard.md").read_text()
    assert "ran on them: roid, tent." in " ".join(text.split())
    assert ">tent<" in (tmp_path / "leaderboard.html").read_text()
    assert "| roid |" not in text


@pytest.mark.parametrize("device", ["a processor", "a GPU", "another device than the board's"])
def test_a_board_has_the_costs_of_one_stream_on_its_kind_of_device(place, tmp_path, device):
    """A submission timed on the same stream of a slower machine keeps its share."""
    both = with_submission(place, tmp_path, GRID + ALONE)
    found, expected = [], {}
    for number, name in enumerate(("every.toml", "mine.toml")):
        sweep = read(both / name)
        results = load_recorded(sweep, Pack(both / "records" / sweep.name))[0].results
        found.append(results)
        for spec, own in results.provenance.items():
            runs_on = "a processor" if not spec.alone and device.startswith("another") else device
            hardware = (("cpu", "a processor"), ("device", runs_on))
            results.provenance[spec] = replace(own, hardware=hardware)
        timed = {}
        for i, (spec, score) in enumerate(results.scores.items()):
            if spec.alone:
                slow = replace(score.batches, seconds=(1 + 9 * number) * score.batches.seconds)
                timed[spec.method] = replace(score, batches=slow, memory=100.0 + i)
                results.scores[spec] = timed[spec.method]
        total = {method: sum(score.batches.seconds) for method, score in timed.items()}
        for method, score in timed.items():
            memory = 100 * score.memory / timed["frozen"].memory if device == "a GPU" else None
            expected[method] = 100 * total["frozen"] / total[method], memory
    pool = merge(found)
    (ranking,) = (
        each
        for each in rank(pool)
        if (each.board.family, each.board.data) == ("BN", "CIFAR-10-C*")
        and each.board.severities == (5,)
    )
    table = board_table(ranking)
    titles = [column.title for column in table.columns]
    places = [titles.index(title) for title in ("speed, %", "memory, %") if title in titles]
    shown = {row[0]: [row[i] for i in places] for row in table.rows}
    if device.startswith("another"):
        assert places == []
        return
    assert set(expected) - {"roid"} == {"frozen", "caster", "tent"} < set(shown)
    assert f"Costs: r50, shuffled, batches of 16, on {device}." in table.caption
    for method, values in shown.items():
        known = [value for value in expected.get(method, ()) if value is not None]
        assert [value for value in values if value is not None] == pytest.approx(known)
    own = costs_of(pool.costs, "BN", on_gpu=device == "a GPU").items()
    (roid,) = (cost for (method, _), cost in own if method == "roid")
    assert 100 * roid.speed == pytest.approx(expected["roid"][0])


def test_costs_are_of_the_stream_on_which_most_methods_were_timed():
    def cost(method, speed, network, family="BN", on_gpu=True, backward=True):
        stream = Spec(network, "data", "frozen", alone=True)
        place = {"stream": stream, "where": network, "family": family, "on_gpu": on_gpu}
        return Cost(method=method, backward=backward, speed=speed, memory=None, **place)

    costs = [
        *(cost("tent", 0.1, "small", on_gpu=False), cost("tent", 0.2, "large")),
        *(cost("tent", 0.3, "vit", "LN"), cost("tent", 0.9, "vit", "LN", backward=False)),
        *(cost("tent", 0.4, "small"), cost("sar", 0.5, "small"), cost("sar", 0.6, "small")),
    ]
    found = {
        (family, on_gpu): {key: c.speed for key, c in costs_of(costs, family, on_gpu).items()}
        for family in ("BN", "LN")
        for on_gpu in (True, False)
    }
    assert found == {
        ("BN", True): {("tent", True): 0.4, ("sar", True): 0.5},  # not the large network's
        ("BN", False): {("tent", True): 0.1},
        ("LN", True): {("tent", True): 0.3, ("tent", False): 0.9},
        ("LN", False): {},
    }


def test_streams_that_a_submission_adds_change_nothing_for_others(place, tmp_path):
    before = ranked(place, "every.toml")["LN"]
    after = ranked(with_submission(place, tmp_path, EXTRA), "every.toml", "mine.toml")["LN"]
    assert after.streams == before.streams
    kept = [standing for standing in after.standings if standing.method != "roid"]
    assert [s.entry for s in kept] == [s.entry for s in before.standings]
    assert len(after.standings) == len(before.standings) + 1


def test_rows_have_the_revisions_of_their_records(place):
    sweep = read(place / "every.toml")
    recorded, _ = load_recorded(sweep, Pack(place / "records" / sweep.name))
    results = recorded.results
    for spec, own in results.provenance.items():
        if spec.method == "caster" and sweep.backbones[spec.backbone].family == "layer":
            results.provenance[spec] = replace(own, revision=2)
    rankings = rank(merge([results]))
    shown = {
        (ranking.board.family, row[0]): row[-1]
        for ranking in rankings
        for row in board_table(ranking).rows
    }
    assert (shown["LN", "caster"], shown["BN", "caster"], shown["LN", "frozen"]) == ("2", "1", "1")


def test_the_published_protocol_is_first(place, tmp_path):
    """Although other boards compare more methods, and a later sweep has it."""
    both = with_submission(place, tmp_path, LONG, n=10_000)
    first, *others = all_ranked(both, "every.toml", "mine.toml")
    assert first.board.protocol == "10,000 images, severity 5"
    assert [standing.method for standing in first.standings].count("frozen") == 1
    assert len(first.standings) == 2 < max(len(each.standings) for each in others)
    assert not any(each.board.is_published for each in others)


def test_a_continual_stream_has_a_board_of_its_own(place, tmp_path):
    both = with_submission(place, tmp_path, CONTINUAL)
    before = [(each.board, each.standings) for each in all_ranked(place, "every.toml")]
    rankings = all_ranked(both, "every.toml", "mine.toml")
    (found,) = [each for each in rankings if each.board.order == "shuffled, continual"]
    assert [each for each in rankings if each is not found and each.streams == 1] == []
    assert {standing.method for standing in found.standings} == {"frozen", "roid"}
    table = board_table(found)
    assert table.name == f"{found.networks} on {found.board.data}, continual"
    assert table.caption == "LN, shuffled, continual, batches of 16: one stream."
    others = [each for each in rankings if each is not found]
    assert [(each.board, each.standings) for each in others] == before
    names = [board_table(each).name for each in others]
    assert not any("continual" in name for name in names)


def test_an_overview_has_the_accuracies_of_its_boards(place, tmp_path):
    rankings = all_ranked(with_submission(place, tmp_path, ORDERS), "every.toml", "mine.toml")
    tables = overview_tables(rankings)
    assert tables
    for table in tables:
        boards = [
            ranking
            for ranking in rankings
            if table.name == f"{ranking.networks} on {ranking.board.data}: {ranking.board.protocol}"
        ]
        for column, ranking in zip(table.columns[1:-1], boards, strict=True):
            assert column.title.startswith(ranking.board.order)
        assert {row[-1] for row in table.rows} == {"1"}  # revisions
        shown = {row[0]: row[1:-1] for row in table.rows}
        for column, ranking in enumerate(boards):
            means = {each.method: each.entry.mean.value for each in ranking.standings}
            for method, row in shown.items():
                mean = means.get(method)
                assert row[column] == (
                    None if mean is None else pytest.approx(100 * mean, abs=1e-9)
                )


def test_the_command_writes_both_pages_or_nothing(place, tmp_path):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    done = invoke(tmp_path, "every.toml")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "leaderboard.md").read_text()
    assert "Only short streams are recorded so far" in text
    assert "on no board, because rejected at admission: swin." in text
    assert "## Submit a method" in text
    (tmp_path / "leaderboard.md").unlink()
    path = next((tmp_path / "records" / "every").glob("*--*.parquet"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = invoke(tmp_path, "every.toml")
    assert done.exit_code == 1
    assert "problem" in done.output
    assert not (tmp_path / "leaderboard.md").exists()
    shutil.rmtree(tmp_path / "records")
    done = invoke(tmp_path, "every.toml")
    assert done.exit_code == 1
    assert "has no folder of packed records named every" in " ".join(done.output.split())


SORTED = """(() => {
  const shown = [...document.querySelector("table").tBodies[0].rows].filter(row => !row.hidden);
  return shown.map(row => [...row.cells].map(cell => cell.textContent));
})()"""


def test_the_page_sorts_and_filters_in_a_browser(place, tmp_path):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    assert invoke(tmp_path, "every.toml").exit_code == 0
    page_text = (tmp_path / "leaderboard.html").read_text()
    assert not re.search(r"(src|href)=\"(https?:)?//", page_text)  # nothing from elsewhere
    with serving_folder(tmp_path) as address, browsing() as page:
        page.open(address + "leaderboard.html")
        headings = "[...document.querySelectorAll('th[scope=col]')]"
        titles = page.evaluate(f"{headings}.map(heading => heading.textContent)")
        first = page.evaluate(SORTED)
        assert len({tuple(row[:5]) for row in first}) == 1  # one board
        column = titles.index("harm, %")
        press = f"document.querySelectorAll('th[scope=col] button')[{column}].click()"
        for sign in (-1, 1):
            page.evaluate(press)
            values = [float(row[column]) for row in page.evaluate(SORTED)]
            assert values == sorted(values, key=lambda value: sign * value)
            assert len(set(values)) > 2
        page.evaluate(
            "document.querySelectorAll('select').forEach("
            "s => { s.value = 'all'; s.dispatchEvent(new Event('change')); })"
        )
        everything = page.evaluate(SORTED)
        assert len({tuple(row[:5]) for row in everything}) > 2
        speeds = [row[titles.index("speed, %")] for row in everything]
        page.evaluate(press.replace(f"[{column}]", f"[{titles.index('speed, %')}]"))
        after = [row[titles.index("speed, %")] for row in page.evaluate(SORTED)]
        assert "-" in after
        assert after == sorted(after, key=lambda x: (x == "-", 0 if x == "-" else -float(x)))
        assert sorted(after) == sorted(speeds)
        assert not [error for error in page.errors if "favicon" not in error]
