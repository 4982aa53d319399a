"""Feature files: whole, in chunks, and what is rejected."""

from __future__ import annotations

import io
import sys
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.lib import format as npy

from caster.config import Limits
from caster.errors import LimitError
from caster.io.feature_files import open_features
from tests.support.messages import error_line, flipped_bits

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


def rejection(path, *required) -> str:
    return error_line(lambda: list(open_features(path, *required).chunks(("features",), 10)))


def test_missing_arrays_are_named(path):
    message = rejection(path, "features", "weights")
    assert "no `weights`" in message
    assert "features, labels, logits" in message


def test_truncated(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "truncated" in rejection(path)


def test_damaged_inside(tmp_path):
    path = tmp_path / "features.npz"
    np.savez(path, features=np.zeros((4000, 3)))
    content = bytearray(path.read_bytes())
    content[50_000] ^= 0xFF
    path.write_bytes(content)
    assert "damaged" in rejection(path)


@pytest.mark.slow
def test_a_file_with_a_flipped_bit_is_read_or_rejected_in_one_line(path):
    def read(path):
        list(open_features(path, "features").chunks(("features",), 10))

    assert len(flipped_bits(path, read)) > 20


def test_columns_of_other_shapes(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"features": [{"a": 1.0}]}), path)
    assert "lists of numbers" in rejection(path)
    pq.write_table(pa.table({"features": [[[1.0]]]}), path)
    assert "lists of numbers" in rejection(path)
    columns = [pa.array([[1.0]]), pa.array([[2.0]])]
    pq.write_table(pa.Table.from_arrays(columns, ["features", "features"]), path)
    assert "two columns" in rejection(path)


def test_chunks_larger_than_any_file(path):
    ((features,),) = open_features(path).chunks(("features",), 10**22)
    assert len(features) == 25


def test_missing_files_and_other_kinds(tmp_path):
    assert "does not exist" in rejection(tmp_path / "none.npz")
    (tmp_path / "features.csv").write_text("1,2\n")
    assert ".npz or .parquet" in rejection(tmp_path / "features.csv")


def test_unequal_rows(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES, labels=LABELS[:-1])
    assert "25 of `features`, 24 of `labels`" in rejection(tmp_path / "f.npz")


def test_other_arrays_may_have_any_shape(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES, names=np.array(["a"]), version=np.array(3))
    assert open_features(tmp_path / "f.npz", "features").rows == 25


def test_python_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.array([[1, "x"]], dtype=object), allow_pickle=True)
    assert "never unpickles" in rejection(tmp_path / "f.npz")


def test_arrays_by_column(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.asfortranarray(FEATURES))
    assert "ascontiguousarray" in rejection(tmp_path / "f.npz")


def test_no_rows(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES[:0])
    assert "no rows" in rejection(tmp_path / "f.npz")
    np.savez(tmp_path / "g.npz", features=np.float64(3.0))
    assert "no rows" in rejection(tmp_path / "g.npz")


def test_not_an_array_inside(tmp_path):
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("features.npy", b"nonsense")
    assert "not a plain NumPy array" in rejection(tmp_path / "f.npz")


def test_ragged_and_missing_rows(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"features": [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]]}), path)
    assert "differ in length" in rejection(path)
    pq.write_table(pa.table({"features": [[1.0], None]}), path)
    assert "missing values" in rejection(path)
    pq.write_table(pa.table({"features": [[1.0], [None]]}), path)
    assert "missing values" in rejection(path)


def test_without_pyarrow(monkeypatch, tmp_path):
    (tmp_path / "f.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "caster-tta[parquet]" in rejection(tmp_path / "f.parquet")


# limits


def crafted(path, name="features", descr="<f4", shape=(2, 3), content=b"", version=(1, 0)):
    """An .npz file with one compressed member and any header."""
    header = io.BytesIO()
    write = npy.write_array_header_1_0 if version == (1, 0) else npy.write_array_header_2_0
    write(header, {"descr": descr, "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", header.getvalue() + content)
    return path


def over_limit(path, name="features", **limits) -> str:
    """The message of a read that fails without taking much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(LimitError) as caught:
            open_features(path, limits=Limits(**limits)).read(name)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_array_that_expands(tmp_path):
    path = crafted(tmp_path / "f.npz", shape=(100, 10_000), content=bytes(4_000_000))
    assert open_features(path).read("features").shape == (100, 10_000)
    assert "takes 4,000,000 bytes, over the limit" in over_limit(path, array_bytes=10**6)
    with pytest.raises(LimitError, match="over the limit"):
        list(open_features(path, limits=Limits(array_bytes=10**6)).chunks(("features",), 50))


def test_an_array_as_large_as_its_file_is_always_allowed(tmp_path):
    np.savez(tmp_path / "f.npz", features=FEATURES)
    assert len(open_features(tmp_path / "f.npz", limits=Limits(array_bytes=1)).read("features"))


@pytest.mark.parametrize("shape", [(2, 2**40), (2, 2**62, 2**62), (1, 2**14 + 1)])
def test_headers_of_wide_features(tmp_path, shape):
    path = crafted(tmp_path / "f.npz", shape=shape)
    assert "over the limit of 16,384 features" in over_limit(path)


def test_headers_of_many_rows(tmp_path):
    path = crafted(tmp_path / "f.npz", shape=(2**40, 3))
    assert "over the limit of 4,294,967,296 bytes" in over_limit(path)


def test_wide_logits(path):
    assert "over the limit of 3 classes" in over_limit(path, "logits", classes=3)


@pytest.mark.parametrize("descr", ["<U100000000", "|S100000000"])
def test_headers_of_long_labels(tmp_path, descr):
    path = crafted(tmp_path / "f.npz", "labels", descr, (10,), bytes(1000))
    assert "over the limit" in over_limit(path, "labels")
    assert "of 1,024 characters" in over_limit(path, "labels", array_bytes=2**60)


def test_one_long_label_does_not_widen_all_rows(tmp_path):
    path = tmp_path / "f.parquet"
    labels = ["a"] * 20_000 + ["b" * 2_000]
    pq.write_table(pa.table({"features": [[1.0]] * 20_001, "labels": labels}), path)
    assert "a text of 2,000 characters, over the limit" in over_limit(path, "labels")


def test_a_long_header_is_not_read(tmp_path):
    path = tmp_path / "f.npz"
    header = b"\x93NUMPY\x02\x00" + (50_000_000).to_bytes(4, "little") + b" " * 50_000_000
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", header)
    del header
    tracemalloc.start()
    try:
        assert "not a plain NumPy array" in rejection(path)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header", ["{'shape': ('\n", "(" * 9000, "{'descr': '<f4', 'shape': (-1,)}"]
)
def test_invalid_headers(tmp_path, header):
    text = header.encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("features.npy", content)
    assert "not a plain NumPy array" in rejection(tmp_path / "f.npz")
    crafted(tmp_path / "g.npz", shape=(-1, 3))
    assert "not a plain NumPy array" in rejection(tmp_path / "g.npz")


def test_page_checksums_detect_every_flipped_bit(tmp_path):
    path = tmp_path / "f.parquet"
    features = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
    pq.write_table(pa.table({"features": list(features)}), path, write_page_checksum=True)
    assert np.array_equal(open_features(path).read("features"), features)
    original = path.read_bytes()
    for at in np.random.default_rng(0).choice(len(original) // 2, 30, replace=False) + 100:
        damaged = bytearray(original)
        damaged[at] ^= 1 << int(at % 8)
        path.write_bytes(damaged)
        assert "damaged" in rejection(path)
