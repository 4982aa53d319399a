"""States of impossible meaning are rejected, whatever their digest; every fit is accepted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as to_safetensors

import caster
from caster import Caster, StateError
from caster import state as states
from caster.core.channels import ChannelMoments, Site
from caster.core.types import SourceMoments
from caster.io.labels import to_json
from caster.io.signed_tensors import HEADER_BYTES, content_digest
from caster.state.file import _content
from tests.conftest import problem
from tests.support.command_line import cli
from tests.support.tensor_files import with_array, with_entry


@pytest.fixture(scope="module")
def plain():
    """A state with layers, one of them with its covariance."""
    clf = Caster().fit(*problem())
    covariance = np.array([[2.0, 1.0], [1.0, 3.0]], dtype=np.float32)
    variance = np.diag(covariance).copy()
    zeros = np.zeros(2, dtype=np.float32)
    layers = {
        Site("norm", "in", 1): ChannelMoments(30.0, zeros, variance, covariance),
        Site("block", "out", -1): ChannelMoments(30.0, zeros, np.zeros(2, dtype=np.float32)),
    }
    state = states.State(
        clf.moments_, clf.classes_, clf.settings, head=(4, 3, 2, 1, 0), layers=layers
    )
    return _content(state)


def sealed(arrays, metadata) -> bytes:
    """Serialise these contents with a matching digest."""
    return to_safetensors(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        metadata | {"content_sha256": content_digest(arrays, metadata)},
    )


def changed(plain, change) -> bytes:
    arrays = {name: array.copy() for name, array in plain[0].items()}
    metadata = dict(plain[1])
    change(arrays, metadata)
    return sealed(arrays, metadata)


def text(name, value):
    """Replace a metadata entry."""

    def change(arrays, metadata):
        metadata[name] = value if isinstance(value, str) else json.dumps(value)

    return change


def setting(name, value):
    def change(arrays, metadata):
        metadata["settings"] = json.dumps({**json.loads(metadata["settings"]), name: value})

    return change


def labels(values, dtype="<i8"):
    return text("classes", {"dtype": dtype, "labels": values})


def site(at, value, row=0):
    def change(arrays, metadata):
        rows = json.loads(metadata["layers"])
        rows[row][at] = value
        metadata["layers"] = json.dumps(rows)

    return change


def everything(*changes):
    def change(arrays, metadata):
        for each in changes:
            each(arrays, metadata)

    return change


def both_counts(make):
    """Change the counts and the number of samples alike."""

    def change(arrays, metadata):
        arrays["counts"] = make(arrays["counts"])
        metadata["samples"] = str(int(arrays["counts"].sum()))

    return change


FIVE = ["a", "b", "c", "d", "e"]
DEEP = "[" * 100_000 + "]" * 100_000
IMPOSSIBLE = {
    # covariances
    "an indefinite covariance": with_entry("covariances", (0, 1), 1e3),
    "a negative variance": with_entry("covariances", (2, 0), -1.0),
    "an indefinite covariance at a site": with_entry("layer_covariances", 1, 9.0),
    "a negative channel variance": with_entry("layer_variances", 1, -1e-3),
    "class covariances as one": with_array("covariances", lambda a: a[:1]),
    "a pooled covariance beyond float32": with_entry("means", (0, 0), 3e38),
    # other numbers
    "a check of another kind": text("source_check", "3"),
    "a check that lacks a field": text("source_check", '{"samples": 3}'),
    "NaN in U": with_entry("U", (0, 0), np.nan),
    "infinity in the means": with_entry("means", (0, 0), np.inf),
    "a direction without length": with_entry("U", (slice(None), 1), 0.0),
    # counts
    "a count of zero": both_counts(lambda a: a * np.array([0, 1, 1, 1, 1])),
    "a negative count": both_counts(lambda a: a * np.array([-1, 2, 2, 2, 2])),
    "counts with fractions": both_counts(lambda a: a.astype(np.float32) + 0.5),
    "counts that wrap around": both_counts(lambda a: np.full(5, 2**62)),
    "other samples": text("samples", "7"),
    # shapes that would broadcast
    "one mean for all": with_array("means", lambda a: a[:1]),
    "one count for all": both_counts(lambda a: a[:1]),
    "a scalar count": with_array("counts", lambda a: np.array(500)),
    "means with an axis more": with_array("means", lambda a: a[:, None]),
    "U of one feature": everything(with_array("U", lambda a: a[:1]), text("features", "1")),
    "more directions than classes less one": everything(
        with_array("U", lambda a: np.eye(12, 5, dtype=np.float32)),
        with_array("means", lambda a: np.eye(5, dtype=np.float32)),
        with_array("covariances", lambda a: np.ones((5, 15), dtype=np.float32)),
    ),
    "no class": everything(
        *(with_array(name, lambda a: a[:0]) for name in ("means", "covariances", "counts")),
        labels([]),
        text("samples", "0"),
    ),
    "directions of nothing": everything(
        with_array("means", lambda a: np.empty((0, 2**40), np.float32)), labels([])
    ),
    # types
    "means in float64": with_array("means", lambda a: a.astype(np.float64)),
    "means in float16": with_array("means", lambda a: a.astype(np.float16)),
    "means in int32": with_array("means", lambda a: a.astype(np.int32)),
    "counts in int32": with_array("counts", lambda a: a.astype(np.int32)),
    "counts that are true": both_counts(lambda a: a > 0),
    "layers in float64": with_array("layer_means", lambda a: a.astype(np.float64)),
    # constants
    "tau below zero": setting("tau", -1.0),
    "a confidence above one": setting("confidence", 2.0),
    "k_max of a half": setting("k_max", 0.5),
    "k_max that is true": setting("k_max", True),
    "an infinite lam": setting("lam", float("inf")),
    "a lam beyond float64": setting("lam", 10**400),
    "tau as text": setting("tau", "0.8"),
    "constants as a list": text("settings", [1]),
    # labels
    "a label twice": labels([0, 1, 2, 3, 3]),
    "a label twice, as a number and as true": labels([0, 1, True, 3, "x"], "|O"),
    "a label too few": labels([0, 1, 2, 3]),
    "labels of 400 MB each": labels(FIVE, "<U100000000"),
    "labels of a width beyond int64": labels(FIVE, "<U99999999999999999999"),
    "labels cut by their type": labels(["one", "two", "three", "four", "five"], "<U3"),
    "labels of bytes": labels(FIVE, "|S1"),
    "labels of a structure": labels(FIVE, "i4,i4"),
    "labels of an unwritten type": labels(FIVE, None),
    "labels beyond their type": labels([0, 1, 2, 3, 300], "|i1"),
    "labels beyond int64": labels([0, 1, 2, 3, 10**30]),
    "labels that are fractions": labels([0.0, 1.0, 2.0, 3.0, 3.5], "<f8"),
    "labels that are NaN": labels([0.0, 1.0, 2.0, 3.0, float("nan")], "<f8"),
    "a NaN among objects": labels([0, 1, 2, 3, float("nan")], "|O"),
    "whole labels as fractions": labels([0.0, 1.0, 2.0, 3.0, 4.0], "<i8"),
    "labels that are tables": labels([{"a": 1}, 1, 2, 3, 4], "|O"),
    "labels that are tables inside": labels([[{"a": 1}], 1, 2, 3, 4], "|O"),
    "labels as text": labels("abcde", "<U1"),
    "deep labels": text("classes", '{"dtype": "|O", "labels": ' + DEEP + "}"),
    # head
    "a column of a half": text("head", [0.5, 1, 2, 3, 4]),
    "a negative column": text("head", [-1, 1, 2, 3, 4]),
    "a column twice": text("head", [1, 1, 2, 3, 4]),
    "a column that is true": text("head", [True, 0, 2, 3, 4]),
    "a column beyond any model": text("head", [2**62, 1, 2, 3, 4]),
    "a column too few": text("head", [0, 1, 2, 3]),
    "a head in words": text("head", '"abcde"'),
    "a head by name": text("head", {"0": 1}),
    "a deep head": text("head", DEEP),
    # layers
    "a site twice": site(slice(0, 2), ["block", "out"]),
    "a site of another width": site(3, 3),
    "a site of 10^30 channels": site(3, 10**30),
    "a site of no sample": site(4, 0),
    "a site of half a sample": site(4, 0.5),
    "a site of samples and a half": site(4, 30.5),
    "a site of a sample that is true": site(4, True),
    "a site of infinite samples": site(4, float("inf")),
    "an axis that is true": site(2, True),
    "an axis of 1.0": site(2, 1.0),
    "a side that is a list": site(1, ["in"]),
    "sites as a number": text("layers", "3"),
    "a row too short": text("layers", [["norm", "in"]]),
    "deep layers": text("layers", DEEP),
    # the rest
    "features as text": text("features", "twelve"),
    "features beyond int64": text("features", "1" + "0" * 30),
    "features of 5,000 digits": text("features", "1" * 5000),
    "no settings": lambda arrays, metadata: metadata.pop("settings"),
    "an array too many": lambda arrays, metadata: arrays.update(means2=arrays["means"]),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.filterwarnings("error")
def test_an_impossible_state_is_rejected_in_one_line(tmp_path, plain, change):
    path = tmp_path / "s.caster"
    path.write_bytes(changed(plain, change))
    with pytest.raises(StateError) as caught:
        states.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "not a usable state file" in message
    assert len(message) < 2000
    assert message.isprintable()


def test_the_unchanged_state_loads(tmp_path, plain):
    path = tmp_path / "s.caster"
    path.write_bytes(changed(plain, lambda arrays, metadata: None))
    assert states.digest(states.load(path)) == content_digest(*plain)


def test_a_state_that_cannot_be_loaded_is_not_saved(tmp_path, plain):
    clf = Caster().fit(*problem())
    clf.save(tmp_path / "s.caster")
    before = (tmp_path / "s.caster").read_bytes()
    parts = {name: getattr(clf.moments_, name) for name in ("U", "means", "covariances", "counts")}
    parts["covariances"] = -parts["covariances"]
    bad = states.State(SourceMoments(**parts), clf.classes_, clf.settings)
    with pytest.raises(StateError, match="semidefinite"):
        states.save(bad, tmp_path / "s.caster")
    assert (tmp_path / "s.caster").read_bytes() == before
    with pytest.raises(caster.CasterError, match="MiB"):
        to_json(np.zeros(2, dtype="<U9999999"))


DTYPES = ["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]


@st.composite
def array_changes(draw):
    """Change one array at random: values, type, shape, or all of it."""
    name = draw(st.sampled_from(["U", "means", "covariances", "counts", "layer_means"]))
    kind = draw(st.sampled_from(["value", "scale", "dtype", "shape", "bits"]))
    number = draw(st.floats(width=32) | st.integers(-3, 3))
    place = draw(st.integers(0, 10**6))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))

    def change(arrays, metadata):
        array = arrays[name]
        with np.errstate(all="ignore"):
            if kind == "value":
                array.flat[place % array.size] = (
                    np.nan_to_num(number, posinf=9) if (array.dtype.kind == "i") else number
                )
            elif kind == "scale":
                arrays[name] = (array * number).astype(array.dtype)
            elif kind == "dtype":
                arrays[name] = array.astype(dtype)
            elif kind == "shape":
                arrays[name] = (
                    np.resize(array, shape) if shape else array.reshape(-1)[0].reshape(())
                )
            else:
                array.view(np.uint8).flat[place % array.nbytes] ^= 1 << place % 8
        if name == "counts" and place % 2:
            metadata["samples"] = str(int(np.nan_to_num(arrays[name].sum())))

    return change


@settings(max_examples=120, deadline=None)
@given(array_changes())
def test_a_random_change_is_rejected_or_means_what_it_says(tmp_path_factory, plain, change):
    path = tmp_path_factory.getbasetemp() / "random.caster"
    path.write_bytes(changed(plain, change))
    try:
        loaded = states.load(path)
    except StateError:
        return
    arrays, metadata = _content(loaded)
    again = {name: plain[0][name].copy() for name in plain[0]}
    text = dict(plain[1])
    change(again, text)
    assert content_digest(arrays, metadata) == content_digest(again, text)


@st.composite
def sources(draw):
    """Features that make odd covariances: few samples, constant features, tiny or huge scales."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_classes, d = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(2, 9), min_size=n_classes, max_size=n_classes))
    y = np.repeat(np.arange(n_classes), counts)
    spread = np.power(10.0, rng.integers(-6, 7, size=(n_classes, d)))
    h = rng.normal(size=(len(y), d)) * spread[y] + rng.normal(size=(n_classes, d))[y]
    h[:, rng.random(d) < draw(st.sampled_from([0.0, 0.5]))] = 3.0
    if draw(st.booleans()):
        h[y == 0] = h[0]  # a class that does not vary
    scale = 10.0 ** draw(st.integers(-12, 12))
    return (scale * h).astype(draw(st.sampled_from([np.float32, np.float64]))), y


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sources())
def test_every_fit_comes_back(tmp_path_factory, source):
    path = tmp_path_factory.getbasetemp() / "fit.caster"
    try:
        clf = Caster(k_max=4).fit(*source)
    except caster.CasterError:
        return  # features that cannot be fitted
    clf.save(path)
    loaded = caster.load(path)
    for name in ("U", "means", "covariances", "counts"):
        np.testing.assert_array_equal(getattr(loaded.moments_, name), getattr(clf.moments_, name))
    assert loaded.source_check_ == clf.source_check_


def test_a_class_with_fewer_samples_than_directions_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(40), 2)
    h = rng.normal(size=(80, 64)).astype(np.float32) + 3 * np.eye(40, 64, dtype=np.float32)[y]
    clf = Caster().fit(h, y)
    clf.save(tmp_path / "s.caster")
    assert caster.load(tmp_path / "s.caster").moments_.rank == 39


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F64"])
def test_arrays_of_types_that_numpy_lacks(tmp_path, dtype):
    size = {"BF16": 2, "F8_E4M3": 1, "F64": 8}[dtype]
    entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * size]}
    metadata = {"format": "caster-state", "version": "1"}
    header = json.dumps({"__metadata__": metadata, "means": entry}).encode()
    path = tmp_path / "s.caster"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * size))
    with pytest.raises(StateError):
        states.load(path)


def test_a_long_header_is_rejected_before_it_is_parsed(tmp_path):
    path = tmp_path / "s.caster"
    with path.open("wb") as file:
        file.write((HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(HEADER_BYTES + 100)
    with pytest.raises(StateError, match="header is too long"):
        states.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_rejected_at_once(tmp_path):
    os.mkfifo(tmp_path / "s.caster")
    with pytest.raises(StateError, match="not a regular file"):
        states.load(tmp_path / "s.caster")


def test_no_allocation_beyond_the_file(tmp_path, plain):
    """In a process without memory for one."""
    for name in ("labels of 400 MB each", "directions of nothing"):
        (tmp_path / name).write_bytes(changed(plain, IMPOSSIBLE[name]))
    code = """
import pathlib, resource, sys
from caster import StateError, state
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in pathlib.Path(sys.argv[1]).iterdir():
    try:
        state.load(path)
    except StateError as error:
        print("memory" in str(error))
"""
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "False"], ran.stderr


HOSTILE = ["\x1b[31mred\x1b]0;title\x07", "[bold]b[/bold]", "two\nlines", "\u202eabc", "\ud800"]


def test_hostile_labels_load_and_print_harmlessly(tmp_path, capsys):
    """Labels are the user's text: stored unchanged, and escaped when printed."""

    h, y = problem()
    clf = Caster().fit(h, [HOSTILE[i] for i in y])
    clf.save(tmp_path / "s.caster")
    assert sorted(caster.load(tmp_path / "s.caster").classes_.tolist()) == sorted(HOSTILE)
    shown = cli("inspect", tmp_path / "s.caster")
    assert shown.exit_code == 0
    assert "[bold]b[/bold]" in shown.stdout
    assert "␛[31mred␛]0;title␇" in shown.stdout
    assert "two␊lines" in shown.stdout
    assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(shown.stdout)


def test_hostile_metadata_in_an_error(tmp_path, plain):
    path = tmp_path / "s.caster"
    path.write_bytes(changed(plain, everything(text("version", "9"), text("caster", "\x1b[2J\n"))))
    with pytest.raises(StateError, match="state format 9") as caught:
        states.load(path)
    assert str(caught.value).isprintable()
