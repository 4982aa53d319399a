"""Map logits to classes: by name, by number, by order, or reject."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from caster import CasterError
from caster.io.labels import as_labels
from caster.models.heads import MIXED_UP, Columns, better_names, head_columns
from tests.support.messages import error_line

# NumPy drops a trailing NUL, so two texts that differ only by it are equal.
TEXT = st.text(st.characters(exclude_characters="\0"), max_size=5)
NAMES = st.one_of(TEXT, st.integers(-9, 9), st.tuples(TEXT, st.integers(0, 3)))


rejection = partial(error_line, head_columns)


# --- laws ------------------------------------------------------------------------------------


@given(names=st.lists(NAMES, min_size=1, max_size=12, unique=True), data=st.data())
def test_every_class_gets_the_logit_of_its_name(names, data):
    """The names at the selected columns are the classes."""
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    columns = head_columns(as_labels(chosen), len(names), names)
    assert [names[column] for column in columns] == chosen


@given(names=st.lists(NAMES, min_size=2, max_size=8, unique=True), data=st.data())
def test_permuting_the_names_permutes_the_columns(names, data):
    order = data.draw(st.permutations(range(len(names))))
    shuffled = [names[i] for i in order]
    classes = as_labels(names)
    before = head_columns(classes, len(names), names)
    after = head_columns(classes, len(names), shuffled)
    assert before == tuple(range(len(names)))
    assert [order[column] for column in after] == list(before)


@given(st.integers(1, 40), st.data())
def test_numbers_are_columns(n_logits, data):
    chosen = data.draw(st.lists(st.integers(0, n_logits - 1), min_size=1, unique=True))
    for dtype in (np.int64, np.int8, np.uint16):
        assert head_columns(np.array(chosen, dtype=dtype), n_logits) == tuple(chosen)


@given(st.lists(NAMES, min_size=2, max_size=8, unique=True), st.integers(0, 12))
def test_every_class_gets_its_own_column_or_the_labels_are_rejected(classes, n_logits):
    try:
        columns = head_columns(as_labels(classes), n_logits)
    except CasterError:
        return
    assert len(columns) == len(set(columns)) == len(classes)
    assert all(type(column) is int and 0 <= column < n_logits for column in columns)


# --- cases -----------------------------------------------------------------------------------


def test_no_logits_no_columns():
    assert head_columns(np.array([0, 1]), None) is None
    assert head_columns(np.array(["a", "b"]), None, ["a", "b"]) is None


@pytest.mark.parametrize(
    "classes", [["cat", "dog"], [True, False], [1.0, 2.0], [("a", 1), ("b", 2)]], ids=str
)
def test_other_labels_are_taken_in_order_if_the_counts_match(classes):
    assert head_columns(as_labels(classes), 2) == (0, 1)
    message = rejection(as_labels(classes), 3)
    named = ", ".join(map(str, classes))
    expected = f"the model has 3 logits and the data has 2 classes ({named}): list the"
    assert message.startswith(expected)


def test_a_rejection_names_the_first_of_many_classes():
    assert "(a, b, c, ...)" in rejection(as_labels(list("abcde")), 3)


@pytest.mark.parametrize("classes", [[-1, 0], [0, 10], [10], [7, 1000]], ids=str)
def test_numbers_beyond_the_columns(classes):
    message = rejection(np.array(classes), 10)
    assert message.startswith(f"labels {min(classes)} to {max(classes)} are not columns of 10")
    assert "list the model's classes" in message


@pytest.mark.parametrize(
    "names", [["dog", "owl", "cat"], np.array(["dog", "owl", "cat"]), ("dog", "owl", "cat")]
)
def test_names_in_any_container(names):
    assert head_columns(np.array(["cat", "dog"]), 3, names) == (2, 0)


def test_names_decide_over_numbers():
    assert head_columns(np.array([3, 1]), 4, [0, 1, 2, 3]) == (3, 1)
    assert head_columns(np.array([3, 1]), 4, [3, 2, 1, 0]) == (0, 2)


def test_names_that_are_rejected():
    classes = np.array(["a", "b"])
    assert "2 classes are named" in rejection(classes, 3, ["a", "b"])
    assert rejection(classes, 3, ["a", "b", "a"]) == "the model's class 'a' is named twice"
    assert "the class 'b' of the data is not one of" in rejection(classes, 2, ["a", "c"])
    assert "the class 0 of the data is not one of" in rejection(np.array([0, 1]), 2, ["0", "1"])
    assert "one-dimensional" in rejection(classes, 2, np.array([["a", "b"]]))


def test_folders_named_by_numbers_are_columns():
    folders = as_labels(sorted(str(i) for i in range(12)))  # '0', '1', '10', '11', '2' ...
    assert head_columns(folders, 12) == (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)
    with pytest.raises(CasterError, match="labels 1 to 12 are not columns"):
        head_columns(as_labels([str(i) for i in range(1, 13)]), 12)
    assert head_columns(as_labels(["00", "01"]), 2) == (0, 1)


def test_select_the_logits_of_classes():
    logits = np.arange(6.0).reshape(2, 3)
    assert Columns(None)(logits) is Columns((0, 1, 2))(logits) is logits
    assert Columns((2, 0))(logits).tolist() == [[2.0, 0.0], [5.0, 3.0]]
    with pytest.raises(CasterError, match="at least 4 per sample"):
        Columns((3, 0))(logits)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.floats(0.6, 1.0))
def test_better_names_are_those_of_the_best_assignment(seed, C, accuracy):
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(C), 60))
    answers = np.where(rng.random(len(truth)) < accuracy, truth, rng.integers(C, size=len(truth)))
    assert better_names(answers, truth, C) is None
    mixed = rng.permutation(C)[answers]
    counts = np.zeros((C, C), dtype=int)
    np.add.at(counts, (truth, mixed), 1)
    _, output = linear_sum_assignment(-counts)
    found = better_names(mixed, truth, C)
    if np.mean(output[truth] == mixed) - np.mean(truth == mixed) > MIXED_UP + 0.1:
        assert found.outputs == tuple(sorted((o, c) for c, o in enumerate(output) if c != o))
        assert found.renamed == pytest.approx(np.mean(output[truth] == mixed), abs=1e-9)
    elif (output == np.arange(C)).all():
        assert found is None


def test_a_collapsed_or_random_head_has_no_better_names():
    rng = np.random.default_rng(0)
    truth = rng.integers(10, size=500)
    for answers in (np.full(500, 3), rng.integers(10, size=500), truth // 2 * 2):
        assert better_names(answers, truth, 10) is None


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.6, 0.1, 0.3), (0.7, 0.1, 0.2)])
def test_a_head_that_prefers_a_rare_class_has_no_better_names(shares):
    """Though renaming that class to the most frequent one makes more answers right."""
    rng = np.random.default_rng(0)
    truth = rng.choice(len(shares), size=400, p=shares)
    often = np.where(rng.random(400) < 0.7, 1, truth)
    for answers in (np.full(400, 1), often):
        assert better_names(answers, truth, len(shares)) is None
