"""Alarms of the monitor on simulated streams, and estimated accuracy on shifted digits.

    python benchmarks/monitor.py [risk] [drift] [alarms] [accuracy] [cost]

risk: false alarms of 2,000 streams whose risk is exactly the largest that must not ring, and
samples until an alarm after errors become more frequent. The source's 512 samples are drawn again
for every stream. drift: shares of windows of 256 samples that differ at the 1 % and 5 % levels from
a sketch of 512, drawn again for every window. alarms: streams like the source that ring. accuracy:
errors of estimated accuracy on scikit-learn's digits, shifted in six ways. cost: of the log. Takes
ten minutes on one core.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from sklearn.model_selection import train_test_split

import caster
from caster import Caster
from caster.config import Settings
from caster.core.discriminant import probabilities
from caster.core.estimated_accuracy import Calibration, estimate
from caster.core.risk import RiskTest
from caster.core.types import SourceMoments
from caster.monitor.log import StreamLog
from caster.monitor.stream_monitor import TOLERANCE, StreamMonitor, limits
from caster.monitor.summary import compare
from caster.report.digits_demo import SEVERITIES, SHIFTS, generator, shifted, split_digits, train
from caster.state import Sketch, State
from measure import machine

ALPHA = 0.05
STREAMS, BATCH, BATCHES = 2_000, 64, 200
SOURCE = 512
ERROR = 0.08  # of the simulated model on its source
RIGHT, WRONG = (1, 20), (3, 3)  # Beta distributions of uncertainty of right and wrong answers

Floats = NDArray[np.float64]


# --- risk ----------------------------------------------------------------------------------------


def calibrated(rng: np.random.Generator) -> Calibration:
    wrong = rng.random(SOURCE) < ERROR
    u = np.where(wrong, rng.beta(*WRONG, SOURCE), rng.beta(*RIGHT, SOURCE))
    return Calibration.of(u, wrong)


def tests(rng: np.random.Generator) -> tuple[RiskTest, RiskTest, Calibration]:
    """Both tests of a stream, without and with labels."""
    found = calibrated(rng)
    both = limits({"frozen": found, "adapted": found}, TOLERANCE, ALPHA)
    return RiskTest(both[0], ALPHA / 2), RiskTest(both[1], ALPHA / 2), found


def share_above(threshold: float, error: float) -> float:
    """Share of uncertain answers at an error rate, if uncertainty keeps its meaning."""
    return error * beta.sf(threshold, *WRONG) + (1 - error) * beta.sf(threshold, *RIGHT)


def risk() -> None:
    rng = np.random.default_rng(0)
    false = np.zeros(2)
    for _ in range(STREAMS):
        *both, found = tests(rng)
        uncertain = (1 - ERROR) * beta.sf(found.threshold, *RIGHT)
        for i, (test, p) in enumerate(
            zip(both, (uncertain + ERROR + TOLERANCE, ERROR + TOLERANCE), strict=True)
        ):
            for losses in rng.binomial(BATCH, p, BATCHES):
                test = test.after(BATCH, int(losses))
            false[i] += test.alarm
    print(
        f"\n{STREAMS:,} streams of {BATCH * BATCHES:,} samples at the largest risk that must not "
        f"ring: {100 * false[0] / STREAMS:.1f} % false alarms without labels, "
        f"{100 * false[1] / STREAMS:.1f} % with; at most {100 * ALPHA:.0f} % are allowed\n"
    )
    print("| error rate rises to | after | labels | alarm | running mean alone |")
    print("|--:|--:|:--|--:|--:|")
    for error in (0.2, 0.3, 0.5):
        for before in (0, 100):
            for labelled in (False, True):
                delays = np.array([delay(rng, error, before, labelled) for _ in range(100)])
                cells = " | ".join(shown(column) for column in delays.T)
                words = "all" if labelled else "none"
                print(
                    f"| {100 * error:.0f} % | {before * BATCH:,} | {words} | {cells} |", flush=True
                )


def delay(
    rng: np.random.Generator, error: float, before: int, labelled: bool
) -> tuple[float, float]:
    """Samples until the alarm, and until the lower confidence sequence exceeds the limit."""
    unlabelled, with_labels, found = tests(rng)
    test = with_labels if labelled else unlabelled
    found_at = [np.inf, np.inf]
    for i in range(before + BATCHES):
        now = ERROR if i < before else error
        p = now if labelled else share_above(found.threshold, now)
        test = test.after(BATCH, int(rng.binomial(BATCH, p)))
        for kind, rung in enumerate((test.alarm, test.lower > test.limit)):
            if rung and np.isinf(found_at[kind]):
                found_at[kind] = max(0, i + 1 - before) * BATCH
        if not np.isinf(found_at).any():
            break
    return found_at[0], found_at[1]


def shown(delays: Floats) -> str:
    middle, late = np.quantile(delays, [0.5, 0.9], method="higher")
    return " ".join(
        text.format(f"{value:,.0f}" if np.isfinite(value) else "never")
        for text, value in (("{}", middle), ("({})", late))
    )


# --- drift ---------------------------------------------------------------------------------------

CLASSES, DIRECTIONS, SPREAD = 10, 9, 1.1
WINDOW, WINDOWS = 256, 400
STREAMS_WATCHED, WINDOWS_WATCHED = 100, 40
MEANS = SPREAD * np.random.default_rng(1).standard_normal((CLASSES, DIRECTIONS))


def drawn(rng: np.random.Generator, n: int, priors: Floats, shift: float = 0.0) -> tuple:
    """Features, probabilities by the source's densities, labels."""
    y = rng.choice(CLASSES, n, p=priors)
    z = MEANS[y] + rng.standard_normal((n, DIRECTIONS))
    z[:, 0] += shift
    scores = -0.5 * ((z[:, None] - MEANS) ** 2).sum(axis=2)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return z, p / p.sum(axis=1, keepdims=True), y


def state(rng: np.random.Generator) -> State:
    z, p, y = drawn(rng, SOURCE, np.full(CLASSES, 1 / CLASSES))
    wrong = np.stack([p.argmax(axis=1) != y] * 2, axis=1).astype(np.uint8)
    u = np.stack([1 - p.max(axis=1)] * 2, axis=1).astype(np.float32)
    sketch = Sketch(z.astype(np.float32), p.astype(np.float16), y, u, wrong)
    eye = np.eye(DIRECTIONS, dtype=np.float32)
    moments = SourceMoments(eye, MEANS, np.stack([eye] * CLASSES), np.full(CLASSES, 51))
    return State(moments, np.arange(CLASSES), Settings(), sketch=sketch)


def drift() -> None:
    even = np.full(CLASSES, 1 / CLASSES)
    long_tail = 0.6 ** np.arange(CLASSES)
    three = np.where(np.arange(CLASSES) < 3, 1 / 3, 0.0)
    cases = {
        "like the source": (even, 0.0),
        "long tail of classes": (long_tail / long_tail.sum(), 0.0),
        "three of ten classes": (three, 0.0),
        "one direction moved by 0.3 deviations": (even, 0.3),
        "by 0.6": (even, 0.6),
        "three classes, and by 0.6": (three, 0.6),
    }
    print("\n| windows | KS | MMD | PSI | KS given mixture | MMD given mixture | both |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    rng = np.random.default_rng(0)
    for words, (priors, shift) in cases.items():
        found = []
        for _ in range(WINDOWS):
            z, p, _ = drawn(rng, WINDOW, priors, shift)
            one = compare((z, p), state(rng), rng)
            given = one["given_mixture"]
            found.append(
                [one["ks_p"], one["mmd_p"], one["psi_p"], given["ks_p"], given["mmd_p"], given["p"]]
            )
        shares = [
            f"{100 * np.mean(column <= 0.01):.1f}, {100 * np.mean(column <= 0.05):.1f}"
            for column in np.array(found).T
        ]
        print(f"| {words} | {' | '.join(shares)} |", flush=True)


def alarms() -> None:
    """Streams like the source, each with a sketch of its own that all of its windows share."""
    rng = np.random.default_rng(0)
    even = np.full(CLASSES, 1 / CLASSES)
    rung = {"images": 0, "classes": 0}
    for _ in range(STREAMS_WATCHED):
        source = state(rng)
        watched = StreamMonitor("s", [], None)
        for i in range(WINDOWS_WATCHED):
            z, p, _ = drawn(rng, WINDOW, even)
            found = compare((z, p), source, rng)
            batch = {"kind": "batch", "position": i * WINDOW, "samples": WINDOW, "time": 0.0}
            verdict = {"accepted": True, "reason": "accepted", "ratio": None, "confidence": {}}
            watched.update(batch | verdict | {"drift": found})
        for kind in rung:
            rung[kind] += any(alarm.kind == kind for alarm in watched.alarms)
    print(
        f"\n{STREAMS_WATCHED} streams of {WINDOWS_WATCHED} windows like the source: images rang in "
        f"{rung['images']}, classes in {rung['classes']}"
    )


def cost() -> None:
    """Processor time that the log of a batch takes."""
    rng = np.random.default_rng(0)
    source = state(rng)
    transport = Caster.from_state(source)
    batches = [drawn(rng, BATCH, np.full(CLASSES, 1 / CLASSES)) for _ in range(64)]
    outs = [transport.adapt(z, np.log(p + 1e-30)) for z, p, _ in batches]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        log = StreamLog(folder, "s", source)
        for i, out in enumerate(outs * 4):
            begin = time.process_time()
            log.append(out, position=i * BATCH, time=0.0)
            drift_too = log.monitor.points[-1]["drift"] is not None
            times.append((drift_too, time.process_time() - begin))
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / len(times)
    plain, whole = (1e3 * np.median([t for d, t in times if d == kind]) for kind in (False, True))
    mean = 1e3 * np.mean([t for _, t in times])
    print(
        f"\nlog of a batch of {BATCH}, {CLASSES} classes: {plain:.1f} ms, with a window "
        f"{whole:.0f} ms, {mean:.1f} ms on average; {size:.0f} bytes"
    )


# --- estimated accuracy --------------------------------------------------------------------------


def accuracy() -> None:
    data = split_digits()
    images, held_out, labels, truth = train_test_split(
        data.source, data.source_labels, test_size=450, random_state=0, stratify=data.source_labels
    )
    network = train(images, labels)
    adapter = caster.fit(caster.wrap(network, version="digits-1"), [(held_out, truth)])
    sketch = adapter.state.sketch
    assert sketch is not None
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    cases = [("clean", 0), *((shift, severity) for shift in SHIFTS for severity in SEVERITIES)]
    for shift, severity in cases:
        target = shifted(data.target, shift, severity) if severity else data.target
        batches = np.split(generator("monitor", shift, severity).permutation(len(target)), 14)
        outs = [(adapter(target[rows]), data.target_labels[rows]) for rows in batches]
        for answer in ("frozen", "adapted"):
            scores = np.concatenate([getattr(out, answer) for out, _ in outs]).astype(np.float64)
            u = 1 - probabilities(scores).max(axis=1)
            true = np.mean(scores.argmax(axis=1) == np.concatenate([y for _, y in outs]))
            calibration = sketch.calibrations[answer]
            above = int((u > calibration.threshold).sum())
            e = estimate(calibration, len(u), above, float(1 - u.mean()))
            row = (true, e.value - true, e.atc - true, e.doc - true, e.low <= true <= e.high)
            found.setdefault((shift, answer), []).append(row)
    print("\n| shift | answers | accuracy | estimate | ATC | difference of confidences | inside |")
    print("|:--|:--|--:|--:|--:|--:|--:|")
    for (shift, answer), rows in found.items():
        true, *errors, inside = np.array(rows).T
        cells = [f"{100 * e.mean():+.0f} ({100 * e[np.abs(e).argmax()]:+.0f})" for e in errors]
        span = "-".join(f"{100 * t:.0f}" for t in sorted({true.min(), true.max()}))
        cells.append(f"{inside.sum():.0f} of {len(rows)}")
        print(f"| {shift} | {answer} | {span} | {' | '.join(cells)} |")
    for answer in ("frozen", "adapted"):
        every = np.concatenate([rows for (_, a), rows in found.items() if a == answer])
        sizes = [f"{100 * np.abs(column).mean():.1f}" for column in every.T[1:4]]
        inside = f"{every[:, 4].sum():.0f} of {len(every)} intervals hold the accuracy"
        print(f"{answer}, mean absolute error in points: {', '.join(sizes)}; {inside}")


def main() -> None:
    print(machine())
    parts = {"risk": risk, "drift": drift, "alarms": alarms, "accuracy": accuracy, "cost": cost}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
