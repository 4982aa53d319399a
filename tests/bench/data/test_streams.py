"""Streams: order, batches and conditions of images."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import groupby, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caster import CasterError
from caster.io.labels import as_labels, encode, is_by_class
from caster_bench.data.corruptions import CORRUPTIONS
from caster_bench.data.streams import Condition, StreamSettings, make_stream
from caster_bench.sweeps.spec import SEVERITIES
from tests.support.messages import error_line

FOG, SNOW, SNOW5 = Condition("fog", 1), Condition("snow", 1), Condition("snow", 5)
# Orders that keep all images, and reject none.
WHOLE = ["shuffled", "by-class", "dirichlet", "runs", "turning"]

label = st.one_of(
    st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.none(), st.just(("a", 1))
)
labels = st.lists(label, min_size=1, max_size=40)
sizes = st.integers(1, 45)
seeds = st.integers(0, 2**70)


def stream(labels, **options):
    return make_stream(labels, StreamSettings(**options))


def all_conditions(corruptions, severities):
    return tuple(Condition(*pair) for pair in product(corruptions, severities))


def plain(batches):
    """Batches as values that can be compared."""
    return [(b.index, b.rows.tolist(), b.condition, b.starts_segment) for b in batches]


def rows(stream):
    return np.concatenate([batch.rows for batch in stream])


error_of = partial(error_line, stream)


@given(labels, sizes, seeds, st.sampled_from(WHOLE), st.sampled_from(["keep", "drop"]))
def test_every_image_once_in_every_segment(labels, batch_size, seed, order, last):
    n = len(labels)
    if last == "drop" and n < batch_size:
        assert "set last='keep'" in error_of(labels, batch_size=batch_size, last="drop")
        return
    conditions = (FOG, SNOW, SNOW5)
    made = stream(
        labels, batch_size=batch_size, seed=seed, order=order, last=last, conditions=conditions
    )
    segments, number = [], 0
    for batch in made:
        assert batch.index == number
        assert batch.rows.dtype == np.int64
        number += 1
        if batch.starts_segment:
            segments.append([])
        segments[-1].append(batch)
    assert number == len(made)
    assert [s[0].condition for s in segments] == list(conditions)
    full, rest = divmod(n, batch_size)
    expected = [batch_size] * full + ([rest] if rest and last == "keep" else [])
    for segment in segments:
        assert len({batch.condition for batch in segment}) == 1
        assert [len(batch.rows) for batch in segment] == expected
        seen = [row for batch in segment for row in batch.rows.tolist()]
        assert len(set(seen)) == len(seen) == sum(expected)
        assert set(seen) <= set(range(n))


@given(labels, sizes, seeds, st.sampled_from(["continual", "mixed", "gradual"]), st.data())
def test_labels_and_settings_determine_a_stream(labels, batch_size, seed, schedule, data):
    options = {
        "batch_size": batch_size,
        "seed": seed,
        "order": data.draw(st.sampled_from(WHOLE)),
        "schedule": schedule,
        "conditions": all_conditions(["fog", "snow"], [1, 3]),
    }
    made = stream(labels, **options)
    assert plain(made) == plain(made) == plain(stream(list(labels), **options))


@pytest.mark.parametrize("order", WHOLE)
def test_seeds_differ_and_so_do_conditions(order):
    labels = np.arange(200) % 5
    one = rows(stream(labels, order=order))
    assert np.array_equal(one, rows(stream(labels, order=order)))
    assert not np.array_equal(one, rows(stream(labels, order=order, seed=1)))
    both = rows(stream(labels, order=order, conditions=(FOG, SNOW)))
    assert not np.array_equal(both[:200], both[200:])
    # A segment is the same whatever else is run: a cell of a benchmark is a stream of its own.
    assert np.array_equal(both[200:], rows(stream(labels, order=order, conditions=(SNOW,))))
    fog_again = stream(labels, order=order, schedule="continual", conditions=(FOG, SNOW, FOG))
    parts = rows(fog_again).reshape(3, 200)
    assert np.array_equal(parts[:2].ravel(), both)
    assert not np.array_equal(parts[0], parts[2])


@pytest.mark.parametrize(
    ("orders", "digest"),
    [
        (("shuffled", "by-class", "dirichlet", "long-tailed"), "808cfde09a7ac6e8"),
        (("runs", "turning"), "3197c1df6a5c765b"),
    ],
)
def test_streams_are_reproducible_across_versions(orders, digest):
    """Recorded runs resume from these streams: NumPy may change its numbers, we must not."""
    sha256 = hashlib.sha256()
    for order in orders:
        options = {"imbalance": 4} if order == "long-tailed" else {}
        for schedule in ("each", "mixed"):
            made = stream(
                np.arange(100) % 7,
                order=order,
                schedule=schedule,
                conditions=(FOG, SNOW),
                batch_size=8,
                **options,
            )
            sha256.update(repr(plain(made)).encode())
    assert sha256.hexdigest()[:16] == digest


WORKER = """
import sys
from caster_bench.data.streams import Condition, StreamSettings, make_stream

conditions = (Condition("fog", 1), Condition("snow", 5))
labels = ["cat", "dog", ("a", 1), None, True, 3] * 20
settings = StreamSettings(batch_size=7, order="dirichlet", schedule="mixed", conditions=conditions)
worker, workers = map(int, sys.argv[1:])
stream = make_stream(labels, settings)
for batch in list(stream)[worker::workers]:
    print(batch.index, batch.rows.tolist(), batch.condition)
"""


def test_workers_share_one_stream():
    """Neither hash randomisation nor the number of workers may change a stream."""
    found = {}
    for workers in (1, 2):
        lines = []
        for worker in range(workers):
            command = [sys.executable, "-c", WORKER, str(worker), str(workers)]
            environment = os.environ | {"PYTHONHASHSEED": str(worker + workers)}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            lines += done.stdout.splitlines()
        found[workers] = sorted(lines)
    assert found[1] == found[2]
    assert len(found[1]) == -(-240 // 7)


def test_batches_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        next(iter(stream([0, 1] * 9))).rows[0] = 3


@given(labels, seeds)
def test_by_class_sorts_by_class(labels, seed):
    made = stream(labels, order="by-class", seed=seed, batch_size=3)
    met = [labels[row] for row in rows(made)]
    runs = [key for key, _ in groupby(met)]
    assert len(runs) == len(set(labels))
    assert runs == made.classes.tolist()


def test_the_file_order_is_that_of_the_file():
    labels = [0, 1, 2, 0, 2, 1, 1, 0, 2, 1, 2, 0]
    made = stream(labels, order="file", batch_size=5, conditions=(FOG, SNOW))
    assert [b.rows.tolist() for b in made] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]] * 2
    assert not made.is_class_ordered


BY_CLASS = {
    "ten classes": np.repeat(np.arange(10), 100),
    "two classes": np.repeat([0, 1], 50),
    "pets: twice through": np.tile(np.repeat(np.arange(37), 50), 2),
    "ImageNet: five of each": np.repeat(np.arange(1000), 5),
    "two classes at a time": np.repeat(np.arange(20).reshape(10, 1, 2), 50, axis=1).ravel(),
}


@pytest.mark.parametrize("batch_size", [2, 64])
@pytest.mark.parametrize("labels", BY_CLASS.values(), ids=BY_CLASS.keys())
def test_files_sorted_by_class_are_rejected(labels, batch_size):
    if batch_size == 2 and labels[0] != labels[1]:
        return  # every batch has both classes
    message = error_of(labels, order="file", batch_size=batch_size)
    assert "sorted by class" in message
    assert "order='shuffled', or order='by-class' if that is intended" in message
    assert stream(labels, order="by-class", batch_size=batch_size).is_class_ordered
    assert not stream(labels, batch_size=batch_size).is_class_ordered


def test_mixed_conditions_do_not_mix_classes():
    labels = BY_CLASS["ten classes"]
    mixed = {"batch_size": 64, "schedule": "mixed", "conditions": (FOG, SNOW)}
    assert "sorted by class" in error_of(labels, order="file", **mixed)
    assert stream(labels, order="by-class", **mixed).is_class_ordered
    assert not stream(labels, **mixed).is_class_ordered


@pytest.mark.parametrize(
    ("labels", "batch_size"),
    [
        (np.zeros(100), 10),  # one class: no order would help
        (np.zeros(100), 1),
        ([3], 1),
        (np.repeat([0, 1], 50), 100),  # one batch of all there is
        (np.repeat([0, 1], 50), 128),
        (np.repeat(np.arange(10), 10)[np.arange(100) * 7 % 100], 8),
        (np.tile(np.arange(10), 20), 5),
        (np.repeat(np.tile(np.arange(10), 50), 2), 64),  # pairs, which batches even out
        (np.arange(50), 7),
    ],
)
def test_files_that_are_mixed_enough(labels, batch_size):
    assert len(stream(labels, order="file", batch_size=batch_size)) == -(len(labels) // -batch_size)


def test_batches_of_one_image_use_the_rule_for_data_sets():
    labels = np.repeat(np.arange(4), 10)
    assert is_by_class(labels)
    assert "sorted by class" in error_of(labels, order="file", batch_size=1)
    assert len(stream(np.tile(np.arange(4), 10), order="file", batch_size=1)) == 40


@given(labels, sizes, seeds, st.sampled_from(WHOLE))
def test_diversity_by_counting(labels, batch_size, seed, order):
    made = stream(labels, batch_size=batch_size, seed=seed, order=order, conditions=(FOG, SNOW))
    found = made.diversity
    totals = Counter(labels)
    for i, batch in enumerate(made):
        size = len(batch.rows)
        held = Counter(labels[row] for row in batch.rows)
        assert found.sizes[i] == size
        assert found.classes[i] == len(held)
        pairs = [labels[a] != labels[b] for a in batch.rows for b in batch.rows if a != b]
        assert found.unlike[i] == pytest.approx(np.mean(pairs) if pairs else 0.0)
        at_random = sum(
            1 - Fraction(comb(len(labels) - n, size), comb(len(labels), size))
            for n in totals.values()
        )
        assert found.expected[i] == pytest.approx(float(at_random), abs=1e-9)
    assert len(found.classes) == len(made)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "mixed", "conditions": (FOG, SNOW)},
        {"order": "long-tailed", "imbalance": 3},
        {"last": "drop"},
    ],
)
def test_diversity_counts_only_streamed_images(options):
    labels = np.repeat(np.arange(4), [9, 12, 15, 18])
    made = stream(labels, batch_size=7, **options)
    whole = stream(labels, batch_size=7, **(options | {"last": "keep"}))
    totals, n = np.bincount(labels[rows(whole)]), len(rows(whole))
    found = made.diversity
    for i, batch in enumerate(made):
        size = len(batch.rows)
        assert found.classes[i] == len(set(labels[batch.rows]))
        at_random = sum(1 - comb(n - c, size) / comb(n, size) for c in totals.tolist())
        assert found.expected[i] == pytest.approx(at_random)
    assert len(found.sizes) == len(made)


def test_a_last_batch_of_one_image_is_no_pair():
    made = stream([0, 1] * 2 + [0], order="file", batch_size=2)
    assert made.diversity.sizes.tolist() == [2, 2, 1]
    assert made.diversity.unlike.tolist() == [1, 1, 0]
    assert made.diversity.relative_unlike == pytest.approx(1 / (2 * 2 * 3 / 20))  # of five in all


def test_shuffled_batches_are_as_diverse_as_expected():
    labels = np.repeat(np.arange(100), np.arange(1, 101))  # of all sizes
    classes = [stream(labels, seed=seed).diversity.classes[:-1] for seed in range(30)]
    expected = stream(labels).diversity.expected[0]
    error = np.std(classes) / np.sqrt(np.size(classes))
    assert np.mean(classes) == pytest.approx(expected, abs=4 * error)
    with_replacement = np.sum(1 - (1 - np.arange(1, 101) / 5050) ** 64)
    assert expected == pytest.approx(with_replacement, rel=0.01)


DIRICHLET = {"order": "dirichlet", "batch_size": 50}
HUNDRED = np.arange(10_000) % 100
SHORT = 4 * 10_000 // 50  # four slots to a batch


def test_dirichlet_limits():
    tight = stream(HUNDRED, concentration=1e-6, **DIRICHLET)
    assert len(list(groupby(HUNDRED[rows(tight)]))) == 100  # whole classes, one after the other
    assert tight.is_class_ordered
    for slots in (None, SHORT):
        relative = [
            stream(HUNDRED, concentration=c, slots=slots, **DIRICHLET).diversity.relative
            for c in (1e-3, 1e-1, 1.0, 1e6)
        ]
        assert relative == sorted(relative)
        assert relative[0] < 0.1
    loose = stream(HUNDRED, concentration=1e6, slots=SHORT, **DIRICHLET)
    assert loose.diversity.relative == pytest.approx(1, abs=0.03)
    assert loose.diversity.relative_unlike == pytest.approx(1, abs=0.01)
    assert not loose.is_class_ordered


def test_the_published_dirichlet_is_never_iid():
    """CIFAR-10: ten slots of a thousand, and in each the ten classes take turns."""
    made = stream(np.arange(10_000) % 10, order="dirichlet", concentration=1e6, batch_size=64)
    runs = [len(list(run)) for _, run in groupby(rows(made) % 10)]
    assert len(runs) == pytest.approx(100, abs=10)
    assert np.mean(runs) == pytest.approx(100, abs=10)
    assert made.diversity.classes.mean() < 2


def test_dirichlet_shares():
    """A class's shares of the slots have the variance of their distribution."""
    slots, classes, each, concentration = 5, 400, 200, 0.5
    labels = np.repeat(np.arange(classes), each)
    met = labels[rows(stream(labels, order="dirichlet", concentration=concentration, slots=slots))]
    # Within a slot every class has one run at most: a class that comes again is in a later slot.
    first_runs = Counter(key for key, _ in groupby(met))
    present = np.mean(list(first_runs.values()))
    # The chance of no row of 200 in a slot: E[(1 - q)^200] with q ~ Beta(a, (K - 1) a).
    a, b, absent = concentration, (slots - 1) * concentration, 1.0
    for i in range(each):
        absent *= (b + i) / (a + b + i)
    assert present == pytest.approx(slots * (1 - absent), abs=0.15)


def test_default_slots_are_those_of_rotta():
    """As many as classes, and at most a hundred."""
    for classes, slots in ((20, 20), (300, 100)):
        labels = np.arange(900) % classes
        assert np.array_equal(
            rows(stream(labels, **DIRICHLET)), rows(stream(labels, slots=slots, **DIRICHLET))
        )


def test_default_concentration_is_that_of_note():
    assert StreamSettings(order="dirichlet").concentration == 0.1
    given_one = stream(HUNDRED, concentration=0.1, **DIRICHLET)
    assert np.array_equal(rows(stream(HUNDRED, **DIRICHLET)), rows(given_one))


@given(st.lists(st.integers(30, 60), min_size=1, max_size=6), st.floats(1, 20), seeds)
def test_long_tail(counts, imbalance, seed):
    labels = [name for name, n in zip("abcdef", counts, strict=False) for _ in range(n)]
    made = stream(labels, order="long-tailed", imbalance=imbalance, seed=seed, batch_size=7)
    seen = rows(made).tolist()
    assert len(set(seen)) == len(seen)
    kept = Counter(labels[row] for row in seen)
    sizes = [kept[name] for name in "abcdef"[: len(counts)]]
    last = max(len(counts) - 1, 1)
    shape = [imbalance ** (-c / last) for c in range(len(counts))]
    scale = min(n / s for n, s in zip(counts, shape, strict=True))
    assert sizes == [pytest.approx(scale * s, abs=0.5 + 1e-9) for s in shape]
    assert any(size == n for size, n in zip(sizes, counts, strict=True))  # no more could be kept


def test_long_tail_of_cifar():
    labels = np.repeat(np.arange(10), 1000)
    made = stream(labels, order="long-tailed", imbalance=100, conditions=(FOG, SNOW), batch_size=64)
    sizes = np.bincount(labels[rows(made)]) // 2
    assert sizes.tolist() == [1000, 599, 359, 215, 129, 77, 46, 28, 17, 10]
    assert not made.is_class_ordered
    half = len(rows(made)) // 2
    fog, snow = rows(made)[:half], rows(made)[half:]
    assert set(fog) == set(snow)  # the same target, however it is corrupted
    other = stream(labels, order="long-tailed", imbalance=100, seed=1)
    assert set(rows(other)) != set(fog)


def test_a_tail_too_long():
    message = error_of(np.repeat([0, 1], 20), order="long-tailed", imbalance=100)
    assert "an imbalance of 100 leaves some of the 2 classes without images" in message
    error_of(np.repeat([0, 1], 20), order="long-tailed", imbalance=1e12)


def lengths(labels, made):
    """Lengths of the stretches of one class, by class."""
    return [(key, len(list(run))) for key, run in groupby(np.asarray(labels)[rows(made)])]


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 6), seeds)
def test_runs_are_no_shorter_than_asked_for(shortest, more, classes, seed):
    """Two runs of one class may meet, and the last run of a class has what is left."""
    labels = np.arange(40 * classes) % classes
    made = stream(labels, order="runs", shortest=shortest, longest=shortest + more, seed=seed)
    assert sorted(rows(made)) == list(range(40 * classes))
    met = lengths(labels, made)
    last = {key: i for i, (key, _) in enumerate(met)}
    assert all(n >= shortest for i, (key, n) in enumerate(met) if i != last[key])


def test_runs_have_all_lengths_between_the_bounds():
    """With many classes runs rarely meet: their lengths are uniform, both bounds included."""
    labels = np.arange(30_000) % 300
    met = lengths(labels, stream(labels, order="runs", shortest=3, longest=7))
    last = {key: i for i, (key, _) in enumerate(met)}
    whole = [n for i, (key, n) in enumerate(met) if i != last[key]]
    share = np.bincount(whole, minlength=8)[3:8] / len(whole)
    assert share == pytest.approx(np.full(5, 0.2), abs=0.02)
    first = [key for key, _ in met[:3000]]
    assert np.bincount(first, minlength=300).std() == pytest.approx(np.sqrt(10), rel=0.15)


def test_default_runs_depend_on_the_number_of_classes():
    for classes, bounds in ((10, (20, 60)), (30, (20, 60)), (31, (4, 16)), (100, (4, 16))):
        labels = np.arange(6000) % classes
        options = dict(zip(("shortest", "longest"), bounds, strict=True))
        made = stream(labels, order="runs")
        assert np.array_equal(rows(made), rows(stream(labels, order="runs", **options)))
        assert made.is_class_ordered


@given(labels, seeds)
def test_turning_is_shuffled_and_then_sorted(labels, seed):
    made = stream(labels, order="turning", seed=seed, batch_size=3)
    half = len(labels) // 2
    met = encode(as_labels(labels), made.classes)[rows(made)]
    assert np.all(np.diff(met[half:]) >= 0)
    # The first half does not depend on the labels.
    other = stream(np.arange(len(labels)), order="turning", seed=seed, batch_size=3)
    assert np.array_equal(rows(made)[:half], rows(other)[:half])


def test_resets():
    labels, conditions = np.arange(30) % 3, (FOG, SNOW, SNOW5)
    for schedule, starts in [("each", [0, 3, 6]), ("continual", [0]), ("mixed", [0])]:
        made = stream(labels, batch_size=12, schedule=schedule, conditions=conditions)
        assert [b.index for b in made if b.starts_segment] == starts
    each, continual = (
        stream(labels, batch_size=12, schedule=schedule, conditions=conditions)
        for schedule in ("each", "continual")
    )
    assert np.array_equal(rows(each), rows(continual))
    assert [b.condition for b in continual] == [FOG] * 3 + [SNOW] * 3 + [SNOW5] * 3
    clean = stream(labels, batch_size=12)
    assert [(b.condition, b.starts_segment) for b in clean] == [
        (None, True),
        (None, False),
        (None, False),
    ]


def test_gradual_severities():
    made = stream(
        np.arange(20) % 2,
        batch_size=10,
        schedule="gradual",
        conditions=all_conditions(["fog", "snow"], SEVERITIES),
    )
    ramp = [s for s in (1, 2, 3, 4, 5, 4, 3, 2, 1) for _ in range(2)]  # two batches each
    assert [b.condition.severity for b in made] == ramp * 2
    assert [b.condition.corruption for b in made] == ["fog"] * 18 + ["snow"] * 18
    assert [b.index for b in made if b.starts_segment] == [0]
    any_way = all_conditions(["fog", "snow"], [4, 1, 5, 3, 2])
    again = stream(np.arange(20) % 2, batch_size=10, schedule="gradual", conditions=any_way)
    assert plain(again) == plain(made)
    up, down = rows(made)[20:40], rows(made)[140:160]  # severity 2 on the way up, and down
    assert sorted(up) == sorted(down) == list(range(20))
    assert not np.array_equal(up, down)


@pytest.mark.parametrize("order", ["shuffled", "by-class", "dirichlet", "file"])
def test_mixed(order):
    labels = np.arange(600) % 6
    conditions = all_conditions(["fog", "snow"], [1, 5])
    made = stream(
        labels, order=order, batch_size=50, schedule="mixed", conditions=conditions, last="drop"
    )
    pairs = Counter()
    for batch in made:
        shares = Counter(batch.condition)
        assert sum(shares.values()) == 50
        assert set(shares) == set(conditions)
        assert max(shares.values()) < 30  # 12.5 of 50 on average, with a deviation of 3
        pairs.update(zip(batch.rows.tolist(), batch.condition, strict=True))
    assert len(pairs) == 4 * 600
    assert set(pairs.values()) == {1}
    if order == "file":
        assert np.array_equal(rows(made), np.tile(np.arange(600), 4))


@given(st.lists(st.sampled_from([FOG, SNOW, SNOW5]), min_size=1, max_size=9))
def test_parts_of_a_batch(per_row):
    labels = list(range(len(per_row)))
    made = stream(
        labels * 2, batch_size=9, schedule="mixed", conditions=tuple(dict.fromkeys(per_row))
    )
    for batch in made:
        back = {}
        for condition, places in batch.parts():
            back |= dict.fromkeys(places.tolist(), condition)
        under = batch.condition
        expected = under if isinstance(under, tuple) else [under] * len(batch.rows)
        assert [back[i] for i in range(len(batch.rows))] == list(expected)


def test_the_part_of_a_clean_batch():
    ((condition, places),) = next(iter(stream([0, 1, 2]))).parts()
    assert condition is None
    assert places.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "file"},
        {"order": "by-class"},
        {"order": "dirichlet"},
        {"order": "long-tailed", "imbalance": 50},
        {"last": "drop", "batch_size": 1},
        {"schedule": "mixed", "conditions": (FOG,)},
    ],
)
def test_one_image(options):
    (batch,) = stream(["cat"], **options)
    assert batch.rows.tolist() == [0]
    assert batch.starts_segment
    made = stream(["cat"], **options)
    assert (made.diversity.classes, made.diversity.expected) == (1, 1)
    assert not made.is_class_ordered


@pytest.mark.parametrize("order", [*WHOLE, "file"])
def test_one_class(order):
    made = stream(["cat"] * 10, order=order, batch_size=4)
    assert sorted(rows(made)) == list(range(10))
    assert made.diversity.classes.tolist() == [1, 1, 1]
    assert made.diversity.relative == 1
    assert not made.is_class_ordered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer (int) of at least 1, not 0"),
        ({"batch_size": 2.0}, "batch_size must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"order": "random"}, "no order 'random': choose from shuffled, file, by-class, dirichlet"),
        ({"schedule": "all"}, "no schedule 'all'"),
        ({"last": "pad"}, "no last 'pad': choose from keep, drop"),
        ({"schedule": "continual"}, "the schedule 'continual' needs conditions"),
        ({"conditions": ("fog",)}, "conditions must be Condition(corruption, severity)"),
        ({"conditions": (FOG, SNOW, FOG)}, "fog at severity 1 is listed twice"),
        ({"conditions": (FOG, FOG), "schedule": "mixed"}, "only the schedule 'continual'"),
        (
            {"conditions": (FOG, SNOW, SNOW5), "schedule": "gradual"},
            "fog has only severity 1",
        ),
        ({"concentration": 1}, "concentration belongs to the order 'dirichlet', not to 'shuffled'"),
        ({"slots": 4}, "slots belongs to the order 'dirichlet'"),
        ({"imbalance": 4}, "imbalance belongs to the order 'long-tailed'"),
        ({"longest": 4}, "longest belongs to the order 'runs', not to 'shuffled'"),
        ({"order": "runs", "longest": 4}, "takes both shortest and longest, or neither"),
        ({"order": "runs", "shortest": 0, "longest": 4}, "shortest must be an integer (int) of at"),
        ({"order": "runs", "shortest": 5, "longest": 4}, "longest must be an integer (int) of at"),
        ({"order": "runs", "shortest": 2.0, "longest": 4}, "shortest must be an integer"),
        ({"order": "long-tailed"}, "needs an imbalance"),
        ({"order": "long-tailed", "imbalance": 0.5}, "imbalance must be a number of at least 1"),
        ({"order": "long-tailed", "imbalance": float("nan")}, "imbalance must be"),
        ({"order": "dirichlet", "concentration": 0}, "concentration must be a number above 0"),
        ({"order": "dirichlet", "concentration": float("inf")}, "concentration must be"),
        ({"order": "dirichlet", "concentration": 10**400}, "concentration must be"),
        ({"order": "dirichlet", "slots": 0}, "slots must be"),
    ],
)
def test_invalid_settings(options, message):
    assert message in error_of([0, 1, 2, 1], **options)


@pytest.mark.parametrize("severity", [0, 6, 2.0, True, "3"])
def test_invalid_severities(severity):
    with pytest.raises(CasterError, match="from 1 to 5"):
        Condition("fog", severity)


@pytest.mark.parametrize("corruption", ["", None, 3, "Fog", "clean"])
def test_invalid_corruptions(corruption):
    with pytest.raises(CasterError, match=f"there is no corruption {corruption!r}: "):
        Condition(corruption, 1)


def test_all_nineteen_are_conditions():
    assert len(set(all_conditions(CORRUPTIONS, SEVERITIES))) == 95
    with pytest.raises(CasterError, match="did you mean 'fog'"):
        Condition("fogg", 1)


@pytest.mark.parametrize("labels", [[], np.array([], dtype=int)])
def test_no_images(labels):
    assert "needs at least one image" in error_of(labels)


def test_settings_are_values():
    made = StreamSettings(conditions=[FOG, SNOW])
    assert made == replace(made) == StreamSettings(conditions=(FOG, SNOW))
    assert hash(made) == hash(replace(made))


@settings(max_examples=20)
@given(st.sampled_from([1e-300, 1e-12, 1e12]), st.integers(1, 300), seeds)
def test_extreme_concentrations(concentration, slots, seed):
    made = stream(
        np.arange(50) % 5, order="dirichlet", concentration=concentration, slots=slots, seed=seed
    )
    assert sorted(rows(made)) == list(range(50))
