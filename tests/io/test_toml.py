"""Odd TOML, in every kind of file that is TOML: read correctly, or rejected in one line."""

from __future__ import annotations

import copy
import os
import tomllib
from datetime import date, datetime, time
from itertools import product

import pytest

from caster.errors import CasterError
from caster.io.files import TOML_BYTES, read_toml
from caster.models.preprocessing import Preprocessing
from caster_bench.studies.claims.claim_file import read_claims
from caster_bench.sweeps.parse import read as read_sweep
from tests.support.sampling import sampled

PREPROCESSING = """
range = 1
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]
layout = "NCHW"
resize = [32, 32]
interpolation = "bilinear"
crop = [28, 28]
channels = "RGB"
dtype = "float32"
"""
SWEEP = """
name = "one"
title = "One"
constants = {tau = 0.9, k_max = 3}
backbones.r = {family = "batch", checkpoint = "r.safetensors", group = "g"}
data.d = {source = "cifar10:train", target = "cifar10:test", threshold = 0.8, source_limit = 9}
[[grid]]
study = ["corruption"]
backbones = ["r"]
data = ["d"]
corruptions = ["fog", "clean"]
severities = [1, 3]
methods = ["frozen", {method = "tent+referee", lr = 0.1, gate = {least = 0.9}, sizes = [1, 2]}]
seeds = [0, 1]
batch_sizes = [64]
orders = ["shuffled", {order = "dirichlet", concentration = 0.1}]
schedule = "each"
last = "keep"
alone = false
"""
CLAIMS = """
title = "Claims"
summary = "Few words."
intro = "Gain {gain}."
records = "records"
document = "CLAIMS.md"
reports = "reports"
sweeps = {s = "s.toml"}
[values.gain]
sweep = "s"
table = "t"
row = {method = "caster", seeds = [1, 2]}
column = "accuracy"
take = "most"
interval = "95 %"
less = {row = {method = "frozen"}}
[[part]]
title = "First"
sweep = "s"
text = "Words"
tables = ["t"]
figures = ["f"]
[[part.claim]]
id = "1"
says = "It gains"
where = "Sec. 1"
needs = ["x"]
limits = "none"
note = "a note"
tests = [{what = "gain", table = "t", row = {method = "a"}, column = "c", NEAR}]
"""
FILES = {
    "not UTF-8": (b"\nx = '\xff'", "UTF-8"),
    "UTF-16": ("x = 1".encode("utf-16"), "UTF-8"),
    "no TOML": (b"\nx = = 1", "TOML"),
    "a key twice": (b"\nx = 1\nx = 2", "TOML"),
    "deep lists": (b"\nx = " + b"[" * 50_000 + b"]" * 50_000, "nested too deeply"),
    "deep keys": (b"\nx" + b".y" * 500 + b" = 1", "nested too deeply"),
    "many digits": (b"\nx = " + b"1" * 5_000, "TOML"),
    "many hexadecimal digits": (b"\nx = 0x" + b"f" * 5_000, "64 bits"),
    "65 bits": (b"\nx = 9223372036854775808", "64 bits"),
    "an invalid date": (b"\nx = 2026-02-30", "TOML"),
    "an invalid time": (b"\nx = 25:00:00", "TOML"),
    "NUL": (b"\nx = '\0'", "TOML"),
    "too long": (b"\n#" + b" " * TOML_BYTES, "bytes"),
}
CLAIMS = CLAIMS.replace("NEAR", 'near = 1, partly = 2, paper = ["certificate", "gated"]')
READERS = {
    "preprocessing": (Preprocessing.from_toml, PREPROCESSING),
    "sweep": (read_sweep, SWEEP),
    "claims": (read_claims, CLAIMS),
}
ODD = [
    *(True, 0, -1, 0.5, 2**63 - 1, float("nan"), float("inf"), -float("inf"), 1e308),
    *("", "odd", "\x1b[31m", date(2026, 1, 1), time(1, 2), datetime(2026, 1, 1)),
    *([], [[]], [None], {}, {"odd": 1}, [{}], [0.5], [True], ["odd"], [float("nan")], [["x"], 1]),
    *(["certificate"], ["estimators", "wins", "x"], ["corruption", 99]),
]


def plain(value) -> str:
    """Format a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)} = {plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(plain(v) for v in value if v is not None) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(value: str) -> str:
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in value) + '"'


def nodes(value, path=()):
    """Yield the path of every value in a document."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, own in inner:
        yield (*path, key)
        yield from nodes(own, (*path, key))


def changed(table, path, odd):
    table = copy.deepcopy(table)
    inside = table
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = odd
    return table


def read(reader, path) -> str | None:
    """Return the message of the rejection, or None if the file was read."""
    try:
        reader(path)
    except CasterError as error:
        assert str(path) in str(error)  # noqa: PT017
        assert str(error).isprintable()  # noqa: PT017
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "text"), READERS.values(), ids=READERS)
def test_an_odd_value_anywhere(tmp_path, reader, text):
    path = tmp_path / "odd.toml"
    path.write_text(text)
    assert read(reader, path) is None
    table = tomllib.loads(text)
    rejected = 0
    for place, odd in sampled(product(nodes(table), ODD), 500):
        document = changed(table, place, odd)
        path.write_text("".join(f"{_text(k)} = {plain(v)}\n" for k, v in document.items()))
        rejected += read(reader, path) is not None
    assert rejected > 200


@pytest.mark.parametrize(("reader", "text"), READERS.values(), ids=READERS)
@pytest.mark.parametrize(("more", "words"), FILES.values(), ids=FILES)
def test_an_odd_file(tmp_path, reader, text, more, words):
    path = tmp_path / "odd.toml"
    path.write_bytes(text.encode() + more)
    assert words in (read(reader, path) or "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    for name in ("fifo.toml", ".", "none.toml"):
        with pytest.raises(CasterError, match="cannot read"):
            read_toml(tmp_path / name)
