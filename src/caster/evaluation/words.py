"""An evaluation in plain words."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from caster.evaluation.metrics import expected_classes
from caster.report import noun

if TYPE_CHECKING:
    from caster.evaluation.results import Evaluation

# Of the classes a batch drawn at random would hold, the share below which a stream is called
# ordered. With two classes an ordered batch has 1 of 2; a random one seldom less than 1 of 1.5.
FEW = 0.6


def points(difference: float) -> str:
    """A difference of shares, in points.

    >>> points(0.0721), points(-0.0004)
    ('+7.2', '+0.0')
    """
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0, or nearly nothing would be -0.0


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
        words += f": the gate refused every batch, and all answers are those of {baseline}."
    else:
        words += (
            f", {points(found.gain)} points against {baseline}{_interval(found)}. The gate "
            f"accepted {accepted:,} of {n:,}; of all samples, {gated.help:.1%} turned from wrong "
            f"to right and {gated.harm:.1%} from right to wrong."
        )
    if found.baseline != "frozen":
        words += " No logits were given: Source-GDA takes the frozen head's place."
    return words


def _interval(found: Evaluation) -> str:
    interval = found.gain_interval
    if interval is None:
        return ""
    unclear = ", which includes no change" if interval.low <= 0 <= interval.high else ""
    return f" (95% interval {points(interval.low)} to {points(interval.high)}{unclear})"


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
