"""An evaluation in plain words."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from caster.report import noun
from caster.report.metrics import expected_classes

if TYPE_CHECKING:
    from caster.report.evaluation_results import Evaluation

# Of the classes a batch drawn at random would hold, the share below which a stream is called
# ordered. With two classes an ordered batch has 1 of 2; a random one seldom less than 1 of 1.5.
FEW = 0.6
SMALL = 0.01  # of accuracy: a gain whose whole interval is closer to 0 makes no difference


def points(difference: float) -> str:
    """A difference of shares, in points.

    >>> points(0.0721), points(-0.0004)
    ('+7.2', '+0.0')
    """
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0, or nearly nothing would be -0.0


def conclusion(found: Evaluation) -> str:
    """Whether to use it, by how much, and how sure that is: decided on the figures it prints."""
    adapted, baseline = found.mechanism.noun, noun(found.baseline)
    if not found.reasons.get("accepted", 0):
        return (
            "It makes no difference here: the gate rejects every batch, and every answer is that "
            f"of {baseline}."
        )
    interval, size = found.gain_interval, f"{abs(100 * found.gain):.1f} points"
    verb = "loses" if points(found.gain).startswith("-") else "gains"
    over = "to" if verb == "loses" else "over"
    if interval is None:
        return (
            f"One batch cannot tell whether to use it: there, {adapted} {verb} {size} {over} "
            f"{baseline}, and has no interval. Evaluate more batches."
        )
    low, high = points(interval.low), points(interval.high)
    change = f"{adapted} {verb} {size} {over} {baseline} (95 % interval {low} to {high})"
    if float(low) > 0:
        return f"Use it here: {change}."
    if float(high) < 0:
        return f"Do not use it here: {change}."
    if max(-interval.low, interval.high) <= SMALL:
        return f"It makes no difference here: {change}."
    return f"It is not clear whether to use it here: {change}. More labelled samples would tell."


def summary(found: Evaluation) -> str:
    """What came, what every classifier got right, and what the gate did to it."""
    baseline, gated = noun(found.baseline), found.scores["gated"]
    adapted = found.mechanism.noun
    n, accepted = len(found.batches), found.reasons.get("accepted", 0)
    batches = f"{n:,} batches of {found.batch_size:,}" if n > 1 else "one batch"
    words = (
        f"On {found.size:,} samples in {batches}, {baseline} gets "
        f"{found.scores[found.baseline].accuracy:.1%} right, {adapted} without the gate "
        f"{found.scores['ungated'].accuracy:.1%} and with it {gated.accuracy:.1%}"
    )
    if not accepted:
        words += f": the gate rejected every batch, and all answers are those of {baseline}."
    else:
        words += (
            f". The gate accepted {accepted:,} of {n:,}; of all samples, {gated.help:.1%} turned "
            f"from wrong to right and {gated.harm:.1%} from right to wrong."
        )
    if found.baseline != "frozen":
        words += " No logits were given: Source-GDA takes the frozen head's place."
    return words


def warning(found: Evaluation) -> str | None:
    """A sentence if the median batch holds far fewer classes than one drawn at random."""
    counts = np.array([c.size for c in found.classes])
    sizes = {batch.size for batch in found.batches}
    expected = {size: expected_classes(counts, size) for size in sizes}
    if median(batch.classes / expected[batch.size] for batch in found.batches) >= FEW:
        return None
    return (
        "The stream looks ordered by class: the median batch holds "
        f"{median(batch.classes for batch in found.batches):g} of {len(counts):,} classes, where "
        f"about {median(expected[batch.size] for batch in found.batches):.1f} would come at "
        "random. The moments of such a batch say who came, not how the data shifted: "
        "mix the classes, and do not trust what the gate accepted."
    )
