"""Subsets of images and of feature files."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet
import pytest

from caster.errors import CasterError
from caster.io.feature_files import open_features
from caster.io.subset import balanced_rows, first_rows, random_rows, select_features, select_images
from tests.support.fakes import FakeImages


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_rows_of_a_file_in_chunks(tmp_path, suffix, size):
    features, labels = np.arange(60.0).reshape(30, 2), np.arange(30) % 4
    path = tmp_path / f"f{suffix}"
    if suffix == ".npz":
        np.savez(path, features=features, labels=labels)
    else:
        table = pyarrow.table({"features": features.tolist(), "labels": labels})
        pyarrow.parquet.write_table(table, path)
    rows = np.array([2, 3, 4, 11, 20, 21, 28])
    some = select_features(open_features(path), rows)
    chunks = list(some.chunks(("features", "labels"), size))
    assert [len(h) for h, _ in chunks[:-1]] == [size] * (len(chunks) - 1)
    assert np.array_equal(np.concatenate([h for h, _ in chunks]), features[rows])
    assert np.array_equal(np.concatenate([y for _, y in chunks]), labels[rows])
    assert np.array_equal(some.read("features"), features[rows])
    assert some.rows == 7


def test_images():
    whole = FakeImages(10)
    some = select_images(whole, np.array([1, 4, 7]))
    assert list(some.names) == ["fake1.png", "fake4.png", "fake7.png"]
    assert some.labels.tolist() == [1, 0, 1]
    assert np.array_equal(some.read(2), whole.pixels[7])
    other = select_images(whole, np.array([1, 4, 8]))
    assert len({whole.sha256, some.sha256, other.sha256}) == 3
    assert select_images(whole, first_rows(10, 10)) is whole


def test_balanced_rows():
    rng = np.random.default_rng(0)
    labels = np.repeat(["a", "b", "c"], [50, 3, 20])[rng.permutation(73)]
    rows = balanced_rows(labels, 15)
    assert {c: int(np.sum(labels[rows] == c)) for c in "abc"} == {"a": 6, "b": 3, "c": 6}
    assert np.all(np.diff(rows) > 0)
    for c in "ac":
        assert np.array_equal(rows[labels[rows] == c], np.flatnonzero(labels == c)[:6])
    assert len(balanced_rows(labels, 73)) == len(balanced_rows(labels, None)) == 73
    with pytest.raises(CasterError, match="at least 6"):
        balanced_rows(labels, 5)


def test_random_rows():
    rows = random_rows(1000, 100, seed=3)
    assert len(set(rows.tolist())) == 100
    assert np.array_equal(rows, random_rows(1000, 100, seed=3))
    assert not np.array_equal(rows, random_rows(1000, 100, seed=4))
    assert 400 < rows.mean() < 600
