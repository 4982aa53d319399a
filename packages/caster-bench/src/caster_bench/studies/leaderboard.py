"""The leaderboard: all methods on all kinds of streams, from the verified records of sweeps.

A board is a set of streams on which methods are compared. Only methods that ran on all of them have
a row, and streams that a later sweep adds do not count: nobody gains by leaving out a stream or
drops the others by adding one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from caster.errors import CasterError
from caster.report import html
from caster_bench.studies.corruption import FAMILIES, FROZEN, Entry, entry, unequal
from caster_bench.studies.layers_streams import is_other, is_spare
from caster_bench.studies.naming import STAR, STAR_NOTE, names, order_of, titles
from caster_bench.studies.report import as_html
from caster_bench.studies.results import Recorded, Results, shown
from caster_bench.studies.score import Score
from caster_bench.studies.tables import Column, Table, Value, as_markdown, in_markdown, points
from caster_bench.sweeps import Spec, Sweep

TEXT, PAGE = "leaderboard.md", "leaderboard.html"
PUBLISHED = 10_000  # images of a stream in most published tables
HARDEST = 5  # their severity
SHUFFLED = "shuffled"  # their order
MIN_METHODS = 5  # methods besides the frozen model that a board needs to appear in the text
COST_ON = "cost on"  # the stream and the device that speed and memory were measured on
PLACE = (Column("protocol"), Column("stream"), Column("B", "d"), Column("family"), Column("data"))
EXTENT = (Column("networks"), Column("streams", "d"))
RESULTS = (
    *(Column("method"), Column("top-1", ".2f"), Column("95 %", ".2f"), Column("gain", "+.2f")),
    *(Column("harm, %", ".2f"), Column("worst loss", ".2f"), Column("backward pass")),
    *(Column("speed, %", ".0f"), Column("memory, %", ".0f"), Column(COST_ON)),
    Column("revision"),
)


@dataclass(frozen=True)
class Board:
    """What the streams of a comparison have in common."""

    images: int  # of the target set
    severities: tuple[int, ...]  # empty: clean
    order: str  # of the stream, with its schedule
    batch_size: int
    family: str
    data: str

    @property
    def protocol(self) -> str:
        """Images and severities.

        >>> Board(1024, (1, 3, 5), "shuffled", 64, "BN", "CIFAR-10-C*").protocol
        '1,024 images, severities 1, 3, 5'
        """
        few = "severity" if len(self.severities) == 1 else "severities"
        words = f"{few} {', '.join(map(str, self.severities))}" if self.severities else "clean"
        return f"{self.images:,} images, {words}"

    @property
    def is_published(self) -> bool:
        """Whether it has the size and the severity of most published tables."""
        return self.images >= PUBLISHED and self.severities == (HARDEST,)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed and memory of a method timed alone, relative to the frozen model on its stream."""

    method: str
    backward: bool
    speed: float
    memory: float | None  # None on a CPU: that of the process hardly depends on the method
    stream: Spec  # with digests for names
    where: str  # the stream and the device in words
    family: str
    on_gpu: bool


@dataclass(frozen=True)
class Standing:
    """A method on a board."""

    method: str
    entry: Entry
    gain: float
    backward: bool
    cost: Cost | None  # None: not measured
    revisions: tuple[int, ...]  # of the method, in these records


@dataclass(frozen=True)
class Ranking:
    """A board, its methods from best to worst, and those that lack streams of it."""

    board: Board
    standings: tuple[Standing, ...]
    left_out: str  # a sentence; empty if there are none
    cells: frozenset[Spec]  # in the pool, also those of methods that are left out

    @property
    def streams(self) -> int:
        """Number of its streams."""
        return self.standings[0].entry.mean.cells

    @property
    def networks(self) -> str:
        """Its networks, seeds counted once."""
        return "; ".join(self.standings[0].entry.backbones)


@dataclass(frozen=True)
class Pool:
    """The results of several sweeps."""

    results: Results
    homes: dict[Spec, int]  # stream: number of the first sweep that has it
    owners: dict[Spec, int]  # cell: number of the sweep whose result counts
    costs: list[Cost]  # of all sweeps in turn


def merge(recorded: Sequence[Results]) -> Pool:
    """Pool sweeps by the digests of weights and test sets, regardless of their names.

    Of a cell that several sweeps have, the first one counts, so that none replaces another's. Costs
    are relative to the frozen model of the same sweep, which ran on the same machine.
    """
    whole = Sweep("leaderboard", "Leaderboard", {}, {}, {}, {}, "")
    pool = Pool(Results(whole, whole, {}, {}, {}), {}, {}, [])
    for number, results in enumerate(recorded):
        pool.costs.extend(measure_cost(results))
        sweep, title = results.sweep, titles(results.sweep)
        for spec, score in results.scores.items():
            own, same = results.provenance[spec], _by_digests(spec, results)
            whole.backbones.setdefault(same.backbone, sweep.backbones[spec.backbone])
            named = replace(sweep.data[spec.data], name=title[spec.data])
            whole.data.setdefault(same.data, named)
            whole.cells[same] = whole.cells.get(same, frozenset()) | sweep.cells[spec]
            pool.results.scores.setdefault(same, replace(score, spec=same))
            pool.results.provenance.setdefault(same, own)
            pool.homes.setdefault(same.stream, number)
            pool.owners.setdefault(same, number)
    return pool


def _by_digests(spec: Spec, results: Results) -> Spec:
    """The cell with the digests of its weights and test set for their names."""
    own = results.provenance[spec]
    return replace(spec, backbone=str(own.weights), data=str(own.target).partition(", ")[2])


def rank(pool: Pool) -> tuple[Ranking, ...]:
    """Rank the methods of every board; boards without two comparable methods are left out."""
    results = pool.results
    scores = [score for spec, score in results.scores.items() if _counts(spec, score)]
    method_of = names(score.spec for score in scores)
    found = []
    for board, group in _boards(scores, pool).items():
        methods = defaultdict(list)
        for score in group:
            methods[method_of[score.spec]].append(score)
        streams = len({score.spec.stream for score in group})
        entries = {method: entry(own, results, streams) for method, own in methods.items()}
        whole = {method: each for method, each in entries.items() if each.whole}
        if FROZEN not in whole or len(whole) < 2:
            continue
        costs = costs_of(pool.costs, board.family, _on_gpu(group[0].spec, results))
        standings = []
        for method, each in whole.items():
            own = methods[method]
            backward = any(score.backward for score in own)
            standings.append(
                Standing(
                    method,
                    each,
                    each.mean.value - whole[FROZEN].mean.value,
                    backward,
                    costs.get((own[0].spec.method, backward)),
                    tuple(sorted({results.provenance[score.spec].revision for score in own})),
                )
            )
        standings.sort(key=lambda standing: (-standing.entry.mean.value, standing.method))
        cells = frozenset(score.spec for score in group)
        found.append(Ranking(board, tuple(standings), unequal(entries), cells))
    return _in_order(found)


def _in_order(rankings: Sequence[Ranking]) -> tuple[Ranking, ...]:
    """Order boards by protocol, then stream, each with those that compare most methods first.

    The published protocol precedes all others, and shuffled streams those in another order.
    """
    most: dict[str, int] = defaultdict(int)
    for ranking in rankings:
        protocol = ranking.board.protocol
        most[protocol] = max(most[protocol], len(ranking.standings))

    def place(ranking: Ranking) -> tuple[object, ...]:
        board, methods = ranking.board, len(ranking.standings)
        easier = board.severities != (HARDEST,)
        return (
            *(not board.is_published, -most[board.protocol], -board.images, easier, board.protocol),
            *(board.order != SHUFFLED, board.order, -methods, -board.batch_size),
            *(board.data, board.family),
        )

    return tuple(sorted(rankings, key=place))


def _counts(spec: Spec, score: Score) -> bool:
    """Whether a cell can be ranked.

    It needs a head to compare with. Streams of only spare corruptions, on which settings are
    chosen, and other settings of layer and mixture transport are reported elsewhere.
    """
    return not (spec.alone or score.frozen is None or is_spare(spec) or is_other(spec))


def _boards(scores: Sequence[Score], pool: Pool) -> dict[Board, list[Score]]:
    """Scores of every board: at the hardest severity, and at all of them if there are more."""
    sizes: dict[str, int] = defaultdict(int)
    for score in scores:
        if score.spec.schedule == "each":
            sizes[score.spec.data] = max(sizes[score.spec.data], score.n)
    groups = defaultdict(list)
    for score in scores:
        groups[_board(score.spec, pool.results, sizes)].append(score)
    found: dict[Board, list[Score]] = defaultdict(list)
    for board, every in groups.items():
        home = min(pool.homes[score.spec.stream] for score in every)
        group = [score for score in every if pool.homes[score.spec.stream] == home]
        severities = {severity for s in group for _, severity in s.spec.conditions}
        found[replace(board, severities=tuple(sorted(severities)))] += group
        hardest = [s for s in group if {severity for _, severity in s.spec.conditions} == {HARDEST}]
        if hardest and severities != {HARDEST}:
            found[replace(board, severities=(HARDEST,))] += hardest
    return found


def _board(spec: Spec, results: Results, sizes: Mapping[str, int]) -> Board:
    """The board of a stream, before it is divided by severity; clean streams have their own."""
    data = results.sweep.data[spec.data].name + (STAR if spec.conditions else "")
    family = FAMILIES[results.sweep.backbones[spec.backbone].family]
    return Board(sizes[spec.data], (), order_of(spec), spec.batch_size, family, data)


def costs_of(costs: Sequence[Cost], family: str, on_gpu: bool) -> dict[tuple[str, bool], Cost]:
    """Costs of a family by method and whether it ran a backward pass, all on one stream.

    It is the stream on which most methods were timed on a GPU, or on a CPU.
    """
    own = [each for each in costs if (each.family, each.on_gpu) == (family, on_gpu)]
    timed = Counter(each.stream for each in own)
    most = max(timed, key=lambda stream: timed[stream], default=None)
    return {(c.method, c.backward): c for c in reversed(own) if c.stream == most}


def measure_cost(results: Results) -> list[Cost]:
    """Costs of all methods that a sweep timed alone next to the frozen model."""
    found = []
    for score in results.of("cost"):
        spec = score.spec
        frozen = results.scores.get(spec.stream)
        if not spec.alone or frozen is None:
            continue
        on_gpu, base = _on_gpu(spec, results), frozen.memory
        device = dict(results.provenance[spec].hardware)["device"]
        found.append(
            Cost(
                method=spec.method,
                backward=score.backward,
                speed=_throughput(score) / _throughput(frozen),
                memory=score.memory / base if on_gpu and score.memory and base else None,
                stream=_by_digests(spec, results).stream,
                where=f"{results.title(spec)}, {order_of(spec)}, batches of {spec.batch_size}, "
                f"on {device}",
                family=FAMILIES[results.sweep.backbones[spec.backbone].family],
                on_gpu=on_gpu,
            )
        )
    return found


def _throughput(score: Score) -> float:
    """Images per second over a whole stream, whose batches may take very different times."""
    return float(score.batches.size.sum() / score.batches.seconds.sum())


def _on_gpu(spec: Spec, results: Results) -> bool:
    hardware = dict(results.provenance[spec].hardware)
    return hardware["device"] != hardware["cpu"]  # a CPU is its own device


def board_table(ranking: Ranking) -> Table:
    """Tabulate one board, without empty columns and, for its width, the network of the cost.

    Its name has the kind of its streams unless they are plainly shuffled.
    """
    board, rows = ranking.board, [_values(standing) for standing in ranking.standings]
    kept = [
        i
        for i, column in enumerate(RESULTS)
        if any(row[i] is not None for row in rows) and column.title != COST_ON
    ]
    streams = "one stream" if ranking.streams == 1 else f"{ranking.streams:,} streams"
    caption = (
        f"{board.family}, {board.order}, batches of {board.batch_size}: {streams}. "
        f"{ranking.left_out}"
    )
    if costs := [standing.cost for standing in ranking.standings if standing.cost]:
        caption = f"{caption.strip()} Costs: {costs[0].where}."
    kind = "" if board.order == SHUFFLED else f", {board.order.removeprefix(f'{SHUFFLED}, ')}"
    return Table(
        f"{ranking.networks} on {board.data}{kind}",
        caption.strip(),
        tuple(RESULTS[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
    )


def overview_tables(rankings: Sequence[Ranking]) -> list[Table]:
    """Tabulate accuracy by kind of stream, where the same networks ran on several kinds.

    Methods that ran on most kinds come first, and of those the most accurate.
    """
    groups: dict[tuple[str, str, str, str], list[Ranking]] = defaultdict(list)
    for each in rankings:
        board = each.board
        groups[board.protocol, board.data, board.family, each.networks].append(each)
    return [_overview(*place, own) for place, own in groups.items() if len(own) > 1]


def _overview(
    protocol: str, data: str, family: str, networks: str, rankings: Sequence[Ranking]
) -> Table:
    accuracy: dict[str, dict[int, float]] = defaultdict(dict)  # method: column: top-1
    revisions: dict[str, list[int]] = defaultdict(list)
    for column, ranking in enumerate(rankings):
        for standing in ranking.standings:
            accuracy[standing.method][column] = standing.entry.mean.value
            revisions[standing.method] += standing.revisions
    rows = sorted(accuracy.items(), key=lambda row: (-len(row[1]), -fmean(row[1].values()), row[0]))
    (usual, _), *_ = Counter(each.board.batch_size for each in rankings).most_common()
    columns = [Column(_kind(each.board, usual), ".1f") for each in rankings]
    most = max(each.streams for each in rankings)
    extent = "one stream" if most == 1 else f"the mean of up to {most} streams"
    return Table(
        f"{networks} on {data}: {protocol}",
        f"{family}. Top-1 accuracy in percent by kind of stream, in batches of {usual} unless it "
        f"says otherwise. A cell is {extent}.",
        (Column("method"), *columns, Column("revision")),
        tuple(
            (
                method,
                *(_percent(found.get(column)) for column in range(len(columns))),
                _numbers(revisions[method]),
            )
            for method, found in rows
        ),
    )


def _kind(board: Board, usual: int) -> str:
    """Order of a stream in short, with its batch size if that is unusual.

    >>> _kind(Board(1024, (5,), "dirichlet, concentration 0.1, mixed", 8, "BN", "CIFAR-10-C*"), 64)
    'Dirichlet 0.1, mixed, B = 8'
    """
    order = board.order.replace("dirichlet, concentration", "Dirichlet")
    return order if board.batch_size == usual else f"{order}, B = {board.batch_size}"


def _percent(accuracy: float | None) -> float | None:
    """Percent without floating-point noise, so that ties round as those of CSV tables do.

    >>> 100 * 0.1145, _percent(0.1145)
    (11.450000000000001, 11.45)
    """
    return None if accuracy is None else round(100 * accuracy, 9)


def whole_table(rankings: Sequence[Ranking]) -> Table:
    """Tabulate all boards, which every row names."""
    rows = [
        (
            *(ranking.board.protocol, ranking.board.order, ranking.board.batch_size),
            *(ranking.board.family, ranking.board.data),
            *(*_values(standing), ranking.networks, ranking.streams),
        )
        for ranking in rankings
        for standing in ranking.standings
    ]
    caption = f"{len(rankings):,} boards. {STAR_NOTE}"
    return Table("leaderboard", caption, (*PLACE, *RESULTS, *EXTENT), tuple(rows))


def _values(standing: Standing) -> tuple[Value, ...]:
    found, cost = standing.entry, standing.cost
    measured = (points(cost.speed), points(cost.memory), cost.where) if cost else (None, None, None)
    return (
        *(standing.method, *shown(found.mean), points(standing.gain), points(found.harm)),
        *(points(max(0.0, *found.worst.values())), standing.backward),
        *(*measured, _numbers(standing.revisions)),
    )


def _numbers(revisions: Iterable[int]) -> str:
    """Distinct revisions in order.

    >>> _numbers([6, 1, 6])
    '1, 6'
    """
    return ", ".join(map(str, sorted(set(revisions))))


def write_leaderboard(
    recorded: Sequence[Recorded], files: Sequence[str], folder: Path
) -> list[str]:
    """Write the page and its text to a folder, replacing earlier ones; return what is missing."""
    results = [each.results for each in recorded if each.results is not None]
    pool = merge(results)
    rankings = rank(pool)
    if not rankings:
        raise CasterError("no sweep has two methods on the same streams: there is nothing to rank")
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(recorded, files, rankings, unranked(pool, rankings))
    html.write(_markdown(rankings, summary, files, results), folder / TEXT)
    page = html.fill(
        "caster_bench.studies",
        "leaderboard.html",
        summary=summary,
        places=len(PLACE),
        table=as_html(whole_table(rankings)),
    )
    html.write(page, folder / PAGE)
    return summary


def summarise(
    recorded: Sequence[Recorded],
    files: Sequence[str],
    rankings: Sequence[Ranking],
    nowhere: Mapping[int, Sequence[str]],
) -> list[str]:
    """Sentences about what is recorded, what is not, and what is on no board."""
    found = []
    if not any(ranking.board.is_published for ranking in rankings):
        sizes = sorted({ranking.board.images for ranking in rankings}, reverse=True)
        found.append(
            "Only short streams are recorded so far, of test sets of "
            f"{_listed([f'{size:,}' for size in sizes])} images. Most published tables have "
            f"{PUBLISHED:,} images per stream, which gives methods that learn far more batches to "
            "learn from, so rankings here need not hold there."
        )
    number = 0  # of the sweep, among those that are recorded
    for each, file in zip(recorded, files, strict=True):
        pending = sorted({name for names in each.pending.values() for name in names})
        if each.results is None:
            found.append(f"{file} is not recorded yet.")
            continue
        if pending:
            found.append(f"{file}: not ranked, because not fully recorded: {', '.join(pending)}.")
        if rejected := sorted({spec.backbone for spec in each.results.rejected}):
            found.append(
                f"{file}: on no board, because rejected at admission: {_listed(rejected)}."
            )
        if nowhere.get(number):
            found.append(
                f"{file}: on no board, because none has these streams (the same checkpoint, test "
                "set, order and batch size), or no frozen model ran on them: "
                f"{', '.join(nowhere[number])}."
            )
        number += 1
    return found


def unranked(pool: Pool, rankings: Sequence[Ranking]) -> dict[int, list[str]]:
    """Methods of every sweep, by its number, of which no cell is on a board."""
    ranked = {spec for ranking in rankings for spec in ranking.cells}
    found: dict[int, dict[str, bool]] = defaultdict(dict)
    for spec, number in pool.owners.items():
        if spec.method != FROZEN and _counts(spec, pool.results.scores[spec]):
            found[number][spec.method] = found[number].get(spec.method, False) or spec in ranked
    return {n: sorted(m for m, on_board in own.items() if not on_board) for n, own in found.items()}


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _markdown(
    rankings: Sequence[Ranking],
    summary: Sequence[str],
    files: Sequence[str],
    results: Sequence[Results],
) -> str:
    full = [ranking for ranking in rankings if ranking.board.is_published]
    overviews = overview_tables(
        [each for each in rankings if each not in full and len(each.standings) > MIN_METHODS]
    )
    return html.fill(
        "caster_bench.studies",
        "leaderboard.md",
        summary=" ".join(map(in_markdown, summary)),
        boards=[_section(board_table(ranking)) for ranking in full],
        overviews=[_section(table) for table in overviews],
        many=MIN_METHODS,
        every=len(rankings),
        star=in_markdown(STAR_NOTE),
        files=" ".join(files),
        digests=[(each.sweep.name, f"{len(each.scores):,}", each.whole.sha256) for each in results],
    )


def _section(table: Table) -> str:
    """A table below its name and caption."""
    below = as_markdown(replace(table, caption="")).rstrip()
    return f"### {in_markdown(table.name)}\n{in_markdown(table.caption)}\n\n{below}\n"
