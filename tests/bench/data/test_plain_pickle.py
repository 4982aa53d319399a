"""Pickles read without being run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from caster import CasterError
from caster_bench.data.plain_pickle import read_plain_pickle
from tests.support.image_files import noise
from tests.support.messages import error_line
from tests.support.publish import python_2_batch
from tests.support.sampling import sampled

BATCH = {
    "data": noise(4, 3072),
    "labels": [6, 9, 300, 70000, -1],
    "names": ["a", "ü" * 300],
    "flags": (True, False, None, ()),
    b"bytes": b"\x00\xff",
    7: {"pair": (1, 2), "single": (1,)},
}


def written(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "batch").write_bytes(content)
    return tmp_path / "batch"


def error_of(path: Path) -> str:
    line = error_line(read_plain_pickle, path)
    assert str(path) in line
    return line


def test_the_hand_built_batch_is_one_that_python_reads(tmp_path):
    pixels = noise(3, 3072)
    content = python_2_batch(pixels, [6, 9, 9])
    theirs = pickle.loads(content, encoding="bytes")
    ours = read_plain_pickle(written(tmp_path, content))
    assert ours.keys() == theirs.keys() == {b"batch_label", b"labels", b"data", b"filenames"}
    assert np.array_equal(ours.pop(b"data"), theirs.pop(b"data"))
    assert ours == theirs


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_this_python_writes(tmp_path, protocol):
    content = pickle.dumps(BATCH, protocol=protocol)
    values = read_plain_pickle(written(tmp_path, content))
    assert np.array_equal(values.pop("data"), BATCH["data"])
    assert values == {key: value for key, value in BATCH.items() if key != "data"}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["?", "u1", "<i4", ">i4", "<f8", "<u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays(tmp_path, protocol, dtype, order):
    array = np.asarray(noise(3, 4) % 2, dtype=dtype, order=order)
    both = {"first": array, "second": array[:1].copy(), "again": array, "other": array + 1.0}
    values = read_plain_pickle(written(tmp_path, pickle.dumps(both, protocol=protocol)))
    for name, expected in both.items():
        assert values[name].dtype == expected.dtype
        assert np.array_equal(values[name], expected)
    assert values["again"] is values["first"]


def test_long_bytes_are_views_and_pixels_stay_on_disk(tmp_path):
    content = python_2_batch(noise(3, 3072), [6, 9, 9])
    array = read_plain_pickle(written(tmp_path, content))[b"data"]
    assert not array.flags.owndata
    assert not array.flags.writeable


class Trap:
    """Unpickled, it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_traps_do_not_spring(tmp_path, protocol):
    sprung = tmp_path / "sprung"
    content = pickle.dumps({"data": Trap(sprung), "labels": [1]}, protocol=protocol)
    message = error_of(written(tmp_path, content))
    assert "cannot read" in message
    if protocol >= 2:
        assert "it names 'posix.system', and caster never runs a pickle" in message
    assert not sprung.exists()
    pickle.loads(content)  # it would run
    assert sprung.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a pickle"),
        (b".", "not a pickle"),
        (b"\x80\x04", "not a pickle"),
        (b"\x80\x02}U\x05dat", "not a pickle"),  # ends within a value
        (b"T\xff\xff\xff\xff.", "not a pickle"),  # of negative length
        (b"h\x00.", "not a pickle"),  # never memoized
        (b"K\x01e.", "not a pickle"),  # no mark
        (b"\x86.", "not a pickle"),  # nothing to take
        (b"K\x01K\x02a.", "not a pickle"),  # not a list
        (b"K\x01K\x02K\x03s.", "not a pickle"),  # not a dict
        (b"}(K\x01u.", "not a pickle"),  # a key without a value
        (b"}](K\x01eK\x02s.", "not a pickle"),  # a key that cannot be one
        (b"})K\x02s.", "not a pickle"),
        (b"K\x01K\x02R.", "not a pickle"),  # nothing to call
        (b"K\x01K\x02b.", "not a pickle"),  # nothing to build
        (b"cnumpy\nndarray\nK\x00\x85R.", "not a pickle"),
        (b"cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x01?NNNtb.", "not a pickle"),
        (b"cnumpy\ndtype\nU\x02O8\x85R.", "something other than numbers"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.", "not a pickle"),
        (b"c_codecs\nencode\nK\x01X\x06\x00\x00\x00latin1\x86R.", "not a pickle"),
        (b"cnumpy.core.numeric\n_frombuffer\n(C\x02abU\x02u1K\x02\x85U\x01CtR.", "not a pickle"),
        (b"cnumpy.core.multiarray\nscalar\n.", "it names 'numpy.core.multiarray.scalar'"),
        (b"cbuiltins\neval\n.", "it names 'builtins.eval'"),
        (b"\x8c\x02a\n\x8c\x01b\x93.", "it names 'a\\n.b'"),
        (b"c" + b"x" * 300, "not a pickle"),
        (b"}\x81.", "its opcode b'\\x81'"),  # NEWOBJ
        (b"P1\n.", "its opcode b'P'"),  # PERSID
    ],
)
def test_rejected_opcodes(tmp_path, content, message):
    assert message in error_of(written(tmp_path, content))


def test_not_there(tmp_path):
    assert "No such file" in error_of(tmp_path / "gone")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_any_flipped_bit_is_read_or_rejected_in_one_line(tmp_path, protocol):
    original = pickle.dumps({**BATCH, "data": noise(4, 8)}, protocol=protocol)
    rng, errors = np.random.default_rng(0), []
    flips = sampled(
        [(int(rng.integers(len(original))), int(rng.integers(8))) for _ in range(2000)], 400
    )
    for place, bit in flips:
        damaged = bytearray(original)
        damaged[place] ^= 1 << bit
        try:
            read_plain_pickle(written(tmp_path, damaged))
        except CasterError as error:
            errors.append(str(error))
    assert len(errors) > len(flips) / 20
    assert not any("\n" in error for error in errors)
