"""Source-GDA against k-NN on the same frozen features (Sec. 4.2, Fig. 2)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from caster.report.figures import BLUE, VERMILLION, dress
from caster.report.intervals import Interval
from caster_bench.studies.naming import data_labels
from caster_bench.studies.paper import number, printed
from caster_bench.studies.results import Mean, Results, by_stream, interval_of, mean, shown
from caster_bench.studies.tables import Section, StudyFigure, Table, points

OURS, RIVAL = "source-gda", "knn"
MIB = 2**20
TITLE = "Frozen-feature estimators"
HOW = (
    "Both classify the same frozen features. A setting is a backbone on a data set, averaged over "
    "seeds and conditions. Retained: what a method stores in addition to the backbone, which is "
    "the bank of source features for k-NN and the class moments for Source-GDA. The ratio is "
    "k-NN's state divided by Source-GDA's."
)


@dataclass(frozen=True)
class Setting:
    """Both estimators on one backbone and data set; accuracies as shares, states in bytes."""

    backbone: str
    data: str
    rival: str
    accuracy: float
    rival_accuracy: float
    retained: float
    rival_retained: float

    @property
    def margin(self) -> float:
        """Accuracy margin of Source-GDA."""
        return self.accuracy - self.rival_accuracy

    @property
    def ratio(self) -> float:
        """Ratio of retained states; above one, Source-GDA's is smaller."""
        return self.rival_retained / self.retained


@dataclass(frozen=True)
class Estimators:
    """All settings and their summary."""

    settings: tuple[Setting, ...]
    wins: int
    won: Mean  # share of settings
    ratio: float  # median
    ratio_interval: Interval | None
    margin: Mean


def measure(results: Results) -> Estimators | None:
    """Measure the study; None if no setting has both estimators."""
    scores = results.of("estimators")
    where = data_labels((score.spec for score in scores), results.sweep)
    groups = defaultdict(list)
    for by_method in by_stream(scores).values():
        for rival, theirs in by_method.items():
            if theirs.spec.method == RIVAL and OURS in by_method:
                key = results.title(theirs.spec), where[theirs.spec], rival
                groups[key].append((by_method[OURS], theirs))
    settings = tuple(
        Setting(
            *key,
            accuracy=fmean(ours.accuracy for ours, _ in pairs),
            rival_accuracy=fmean(theirs.accuracy for _, theirs in pairs),
            retained=fmean(ours.retained for ours, _ in pairs),
            rival_retained=fmean(theirs.retained for _, theirs in pairs),
        )
        for key, pairs in groups.items()
    )
    if not settings:
        return None
    wins = [setting.margin > 0 for setting in settings]
    ratios = np.array([[setting.ratio] for setting in settings])
    return Estimators(
        settings,
        wins=sum(wins),
        won=mean(wins),
        ratio=float(np.median(ratios)),
        ratio_interval=interval_of(ratios, lambda drawn: np.median(drawn, axis=(1, 2))),
        margin=mean([setting.margin for setting in settings]),
    )


def section(results: Results) -> Section | None:
    """Build the section of this study."""
    found = measure(results)
    if found is None:
        return None
    inverted = [f"{s.backbone} on {s.data}" for s in found.settings if s.ratio < 1]
    smaller = f"; k-NN's is smaller on {', '.join(inverted)}" if inverted else ""
    sentences = (
        f"Source-GDA is more accurate than k-NN in {found.wins} of {len(found.settings)} settings; "
        f"the median k-NN state is {found.ratio:.3g} times as large{smaller}.",
    )
    figure = StudyFigure(
        "estimators",
        "Left: one point per backbone and data set; above the diagonal, Source-GDA is more "
        "accurate. Right: state of k-NN as a multiple of Source-GDA's, log scale, by data set, one "
        "point per backbone; left of one, k-NN's is smaller.",
        f"Scatter of accuracies, and retained state by data set. {sentences[0]}",
        max(3.8, 0.9 + 0.3 * len({s.data for s in found.settings})),
        lambda figure, ink: draw(figure, found, ink),
    )
    return Section("estimators", TITLE, sentences, HOW, _tables(found), (figure,))


def _tables(found: Estimators) -> tuple[Table, ...]:
    settings = Table.of(
        "estimators",
        "Top-1 accuracy in percent and retained state, on identical frozen features.",
        "backbone | data | Source-GDA:.2f | rival | k-NN:.2f | margin:+.2f | Source-GDA, MiB:.3f | "
        "k-NN, MiB:.3f | ratio:.3g",
        (
            (
                *(s.backbone, s.data, points(s.accuracy), s.rival, points(s.rival_accuracy)),
                *(points(s.margin), s.retained / MIB, s.rival_retained / MIB, s.ratio),
            )
            for s in found.settings
        ),
    )
    largest = max(setting.rival_retained for setting in found.settings) / MIB
    figures = (  # and the key of the paper's
        ("settings", len(found.settings), None, "settings"),
        ("settings won", found.wins, None, "wins"),
        ("settings won, %", *shown(found.won), "won"),
        ("mean margin, points", *shown(found.margin), "margin"),
        ("median ratio of retained state", found.ratio, found.ratio_interval, "ratio"),
        ("largest k-NN bank, MiB", largest, None, "largest_bank"),
    )
    summary = Table.of(
        "estimators-summary",
        f"Compared with the paper ({printed('estimators', 'where')}: four ImageNet backbones, "
        "seven data sets). Intervals are bootstrapped over settings.",
        "figure | ours:.2f | 95 %:+.2f | paper:.4g",
        ((*ours, number("estimators", key)) for *ours, key in figures),
    )
    return summary, settings


def draw(figure: Figure, found: Estimators, ink: str) -> None:
    """Draw accuracies against each other, and ratios of retained state."""
    left, right = figure.subplots(1, 2)
    x = [100 * s.rival_accuracy for s in found.settings]
    y = [100 * s.accuracy for s in found.settings]
    low, high = min(x + y) - 2, max(x + y) + 2
    left.plot([low, high], [low, high], color=ink, lw=0.8, ls=":")
    left.scatter(x, y, s=30, c=BLUE, alpha=0.7, linewidths=0)
    left.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    left.set_xlabel("k-NN, top-1 %", color=ink)
    left.set_ylabel("Source-GDA, top-1 %", color=ink)
    ratios: dict[str, list[float]] = defaultdict(list)
    for s in found.settings:
        ratios[s.data].append(s.ratio)
    ranked = sorted(ratios, key=lambda data: float(np.median(ratios[data])))
    for row, data in enumerate(ranked):
        colours = [BLUE if ratio >= 1 else VERMILLION for ratio in ratios[data]]
        right.scatter(ratios[data], [row] * len(colours), s=30, c=colours, alpha=0.5, linewidths=0)
    right.set_yticks(range(len(ranked)), ranked)
    right.set_xscale("log")
    right.axvline(1, color=ink, lw=0.8)
    right.set_xlabel("state of k-NN\nover Source-GDA's, log scale", color=ink)
    right.margins(y=0.1)
    dress(left, ink)
    dress(right, ink, "x")
