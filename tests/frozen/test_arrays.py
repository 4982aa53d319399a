"""Feature files: what is read, in what pieces, and what is refused."""

from __future__ import annotations

import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caster import CasterError
from caster.frozen.arrays import open_features

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((25, 3)).astype(np.float32)
LOGITS = RNG.standard_normal((25, 4))
LABELS = np.array([f"class {i % 4}" for i in range(25)])


@pytest.fixture(params=["npz", "compressed.npz", "parquet", "fixed.parquet", "groups.parquet"])
def path(request, tmp_path):
    path = tmp_path / f"features.{request.param}"
    if path.suffix == ".npz":
        save = np.savez_compressed if "compressed" in path.name else np.savez
        save(path, features=FEATURES, labels=LABELS, logits=LOGITS)
        return path
    features = pa.array(list(FEATURES))
    if "fixed" in path.name:
        features = pa.FixedSizeListArray.from_arrays(FEATURES.ravel(), 3)
    table = pa.table({"features": features, "labels": LABELS, "logits": list(LOGITS)})
    pq.write_table(table, path, row_group_size=4 if "groups" in path.name else None)
    return path


@pytest.mark.parametrize("rows", [1, 7, 25, 100])
def test_chunks_are_the_whole_in_order(path, rows):
    file = open_features(path, "features", "labels")
    chunks = list(file.chunks(("features", "logits"), rows))
    assert file.rows == 25
    assert all(len(chunk[0]) == rows for chunk in chunks[:-1])
    features, logits = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    assert np.array_equal(features, FEATURES)
    assert features.dtype == np.float32
    assert np.array_equal(logits, LOGITS)


def test_reading_whole(path):
    assert np.array_equal(open_features(path).read("labels"), LABELS)


def test_reading_again(path):
    file = open_features(path)
    for _ in range(2):
        assert sum(len(f) for (f,) in file.chunks(("features",), 10)) == 25


def refusal(path, *required) -> str:
    with pytest.raises(CasterError) as caught:
        file = open_features(path, *required)
        list(file.chunks(("features",), 10))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_arrays_are_named(path):
    message = refusal(path, "features", "weights")
    assert "no `weights`" in message
    assert "features, labels, logits" in message


def test_truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "truncated" in refusal(path)


def test_damaged_inside(tmp_path):
    path = tmp_path / "features.npz"
    np.savez(path, features=np.zeros((4000, 3)))
    content = bytearray(path.read_bytes())
    content[50_000] ^= 0xFF
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_any_flipped_bit_is_read_or_refused_in_one_line(path):
    original, refusals = path.read_bytes(), []
    rng = np.random.default_rng(0)
    for at in rng.choice(len(original), 150, replace=False):
        damaged = bytearray(original)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            file = open_features(path, "features")
            list(file.chunks(("features",), 10))
        except CasterError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert not any("\n" in refusal for refusal in refusals)


def test_columns_of_other_shapes(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"features": [{"a": 1.0}]}), path)
    assert "lists of numbers" in refusal(path)
    pq.write_table(pa.table({"features": [[[1.0]]]}), path)
    assert "lists of numbers" in refusal(path)
    columns = [pa.array([[1.0]]), pa.array([[2.0]])]
    pq.write_table(pa.Table.from_arrays(columns, ["features", "features"]), path)
    assert "two columns" in refusal(path)


def test_chunks_larger_than_any_file(path):
    ((features,),) = open_features(path).chunks(("features",), 10**22)
    assert len(features) == 25


def test_not_there_and_other_kinds(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none.npz")
    (tmp_path / "features.csv").write_text("1,2\n")
    assert ".npz or .parquet" in refusal(tmp_path / "features.csv")


def test_unequal_rows(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES, labels=LABELS[:-1])
    assert "25 of `features`, 24 of `labels`" in refusal(tmp_path / "f.npz")


def test_other_arrays_may_have_any_shape(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES, names=np.array(["a"]), version=np.array(3))
    assert open_features(tmp_path / "f.npz", "features").rows == 25


def test_python_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.array([[1, "x"]], dtype=object), allow_pickle=True)
    assert "never unpickles" in refusal(tmp_path / "f.npz")


def test_arrays_by_column(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.asfortranarray(FEATURES))
    assert "ascontiguousarray" in refusal(tmp_path / "f.npz")


def test_no_rows(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES[:0])
    assert "no rows" in refusal(tmp_path / "f.npz")
    np.savez(tmp_path / "g.npz", features=np.float64(3.0))
    assert "no rows" in refusal(tmp_path / "g.npz")


def test_not_an_array_inside(tmp_path):
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("features.npy", b"nonsense")
    assert "not a plain NumPy array" in refusal(tmp_path / "f.npz")


def test_ragged_and_missing_rows(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"features": [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]]}), path)
    assert "differ in length" in refusal(path)
    pq.write_table(pa.table({"features": [[1.0], None]}), path)
    assert "missing values" in refusal(path)
    pq.write_table(pa.table({"features": [[1.0], [None]]}), path)
    assert "missing values" in refusal(path)


def test_without_pyarrow(monkeypatch, tmp_path):
    (tmp_path / "f.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "caster-tta[parquet]" in refusal(tmp_path / "f.parquet")
