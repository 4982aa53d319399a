"""The log of a stream: what is stored, what survives a crash, and what is rejected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import caster
from caster import CasterError
from caster.adapt.prediction import predict_images
from caster.core.betting import BettingTest
from caster.monitor import log as logs
from caster.monitor import page
from caster.monitor.log import StreamLog, names, read
from tests.support import problem
from tests.support.fakes import FakeImages, answers
from tests.support.fakes import model as fake_model
from tests.support.messages import error_line
from tests.support.monitored import N_CLASSES, PRIORS, adapter, draw

BATCH = 64


def batches(count: int, seed: int = 0, priors=PRIORS, shift: float = 0.0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        z, _, y = draw(rng, BATCH, priors, shift)
        yield z, y


def write(folder, name="s", count=5, first=0, **options) -> StreamLog:
    stream = adapter().new_stream()
    log = StreamLog(folder, name, adapter().state)
    for i, (z, _) in enumerate(batches(count, **options)):
        log.append(stream(z), position=(first + i) * BATCH, time=float(first + i))
    return log


def lines(folder) -> list[dict]:
    (path,) = Path(folder).glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_what_the_answer_says(tmp_path):
    stream = adapter().new_stream()
    ((z, _),) = batches(1)
    out = stream(z)
    log = StreamLog(tmp_path, "s", adapter().state)
    log.append(out, position=0, time=12.5)
    header, line = lines(tmp_path)
    assert header["classes"] == [str(c) for c in range(N_CLASSES)]
    assert (line["position"], line["samples"], line["time"]) == (0, BATCH, 12.5)
    assert (line["accepted"], line["reason"]) == (out.verdict.accepted, out.verdict.reason)
    assert line["ratio"] == pytest.approx(out.verdict.ratio, rel=1e-5)
    assert line["changed"] == out.disputed.sum()
    counts = {str(c): int(n) for c, n in enumerate(np.bincount(out.labels)) if n}
    assert line["predicted"] == counts
    sketch = adapter().state.sketch
    for name, scores in (("frozen", out.frozen), ("adapted", out.adapted)):
        p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        mean, above = line["confidence"][name]
        assert mean == pytest.approx(p.max(axis=1).mean(), abs=1e-5)
        assert above == (1 - p.max(axis=1) > sketch.calibrations[name].threshold).sum()


def test_lines_are_small_and_windows_are_compared_now_and_then(tmp_path):
    write(tmp_path, count=40)
    _, *rest = lines(tmp_path)
    assert max(len(json.dumps(line)) for line in rest) < 1_200
    compared = [line["position"] // BATCH for line in rest if line["drift"]]
    assert compared == [3, 19, 35]  # 256 samples, then 768 that are not compared
    (tmp_path / "s.000001.jsonl").unlink()
    write(tmp_path, count=12, shift=2.0)
    assert [line["position"] // BATCH for line in lines(tmp_path)[1:] if line["drift"]] == [
        3,
        7,
        11,
    ]


def test_reading_gives_where_the_writer_stood(tmp_path):
    written = write(tmp_path, "camera/7 é", count=9)
    assert names(tmp_path) == ["camera/7 é"]
    assert read(tmp_path, "camera/7 é").snapshot() == written.monitor.snapshot()


def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path):
    before = write(tmp_path, count=4).monitor.snapshot()
    path = tmp_path / "s.000001.jsonl"
    whole = path.read_bytes()
    for cut in (1, 40, 300):
        path.write_bytes(whole + whole.splitlines()[-1][:-cut])
        assert read(tmp_path, "s").snapshot() == before
    write(tmp_path, count=1, first=4)
    assert [line["position"] for line in lines(tmp_path)[1:]] == [BATCH * i for i in range(5)]


def test_a_damaged_log_is_an_error(tmp_path):
    write(tmp_path, count=3)
    path = tmp_path / "s.000001.jsonl"
    content = path.read_text().splitlines()
    for bad in ("{", '{"kind": "batch"}', "[1]", ""):
        path.write_text("\n".join([content[0], bad, content[2]]) + "\n")
        assert "not a caster-log 1 file, or damaged" in error_line(read, tmp_path, "s")
    path.write_text(content[0].replace("caster-log 1", "caster-log 9") + "\n")
    assert "not a caster-log 1 file, or damaged" in error_line(read, tmp_path, "s")
    message = error_line(read, tmp_path, "other")
    assert "no log of a stream 'other'; it has logs of: 's'" in message
    assert "not a folder of logs" in error_line(names, tmp_path / "missing")


def test_segments_rotate_and_old_ones_go(tmp_path, monkeypatch):
    expected = write(tmp_path / "whole", count=40).monitor.snapshot()
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 3_000)
    monkeypatch.setattr(logs, "SEGMENTS", 3)
    write(tmp_path / "rotated", count=40)
    found = sorted((tmp_path / "rotated").iterdir())
    assert len(found) == 3
    assert found[0].name != "s.000001.jsonl"
    assert read(tmp_path / "rotated", "s").snapshot() == expected


def test_a_stream_continues_and_counts_what_it_repeats(tmp_path):
    write(tmp_path, count=6)
    resumed = write(tmp_path, count=4, first=4).monitor  # the last snapshot was two batches older
    assert (resumed.batches, resumed.repeated, resumed.position) == (8, 2, 8 * BATCH)
    assert write(tmp_path, count=2).monitor.batches == 2  # position 0: a new stream


def test_another_state_begins_another_segment(tmp_path):
    write(tmp_path, count=3)
    log = StreamLog(tmp_path, "s")
    assert log.monitor.batches == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path, "s").calibrations is None


@pytest.mark.parametrize("name", ["", "x" * 201, "é" * 40])
def test_an_id_that_is_no_file_name_is_rejected(tmp_path, name):
    with pytest.raises(CasterError, match="a stream id has"):
        StreamLog(tmp_path, name)


@pytest.mark.parametrize("name", ["..", "a/b", "a.b.000001", "%2F", "con\n"])
def test_any_other_id_stays_in_its_folder(tmp_path, name):
    StreamLog(tmp_path / "logs", name)
    assert names(tmp_path / "logs") == [name]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    stream, (z, _) = adapter().new_stream(), next(batches(1))
    log = StreamLog(tmp_path, "s", adapter().state)
    log.append(stream(z), position=0, time=0.0)
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:100]))
    with pytest.raises(CasterError, match="No space left"):
        log.append(stream(z), position=BATCH, time=1.0)
    monkeypatch.undo()
    log.append(stream(z), position=BATCH, time=2.0)
    assert [line.get("time") for line in lines(tmp_path)] == [None, 0.0, 2.0]


WRITER = """
import itertools, sys
import numpy as np
from tests.support.monitored import adapter, draw
from caster.monitor.log import StreamLog
stream, rng = adapter().new_stream(), np.random.default_rng(0)
log = StreamLog(sys.argv[1], "s", adapter().state)
for i in itertools.count():
    log.append(stream(draw(rng, 64)[0]), position=i * 64, time=float(i))
"""


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_was_logged(tmp_path):
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=root)
    path, deadline = tmp_path / "s.000001.jsonl", time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    monitor = read(tmp_path, "s")
    assert monitor.batches == path.read_bytes().count(b"\n") - 1 >= 19
    assert write(tmp_path, count=1, first=monitor.batches).monitor.batches == monitor.batches + 1


# Labels


def test_labels_are_compared_with_the_logged_answers(tmp_path):
    stream = adapter().new_stream()
    log = StreamLog(tmp_path, "s", adapter().state)
    for i, (z, truth) in enumerate(batches(3)):
        out, y = stream(z), truth
        log.append(out, position=i * BATCH, time=0.0)
    ids = out.ids[::2]
    stream.feedback(ids, y[::2])
    log.feedback(ids, y[::2], betting=stream.betting, time=1.0)
    assert log.monitor.labels == len(ids)
    assert log.monitor.labelled_errors == (out.labels[::2] != y[::2]).sum()
    assert log.monitor.betting["position"] == stream.betting.position
    log = StreamLog(tmp_path, "s", adapter().state)  # it did not log those answers
    log.feedback(ids, y[::2], betting=stream.betting, time=2.0)
    assert log.monitor.labels == len(ids)
    assert read(tmp_path, "s").labels == len(ids)


def test_labels_need_a_state(tmp_path):
    log = StreamLog(tmp_path, "s")
    with pytest.raises(CasterError, match="labels can be logged"):
        log.feedback([0], [0], betting=BettingTest(), time=0.0)


# Mechanisms


def test_aligned_layers_are_logged_with_the_frozen_features(tmp_path):
    images, labels = problem.make_images(400, seed=2)
    labelled = zip(np.split(images, 8), np.split(labels, 8), strict=True)
    fitted = caster.fit(problem.model(), list(labelled))
    assert fitted.mechanism == "layers"
    stream = fitted.new_stream()
    log = StreamLog(tmp_path, "s", fitted.state)
    for i in range(8):
        out = stream(problem.make_images(64, seed=i, shift=0.5)[0])
        assert out.features.shape == (64, 16)
        log.append(out, position=64 * i, time=0.0)
    assert log.monitor.drift["given_mixture"]["p"] <= 0.01
    assert {alarm.kind for alarm in log.monitor.active} & {"images", "risk"}
    assert all(line["layers"] for line in lines(tmp_path)[1:])


def test_predict_reports_every_batch_of_images_and_its_position(tmp_path):
    images = FakeImages(50)
    features, _ = answers(images, range(50))
    state = replace(caster.Caster().fit(features, images.labels)._state, head=(0, 1))
    allowed = {"allow_other_model": True, "allow_other_preprocessing": True}
    seen = []
    predict_images(
        caster.Adapter(fake_model(), state, **allowed),
        images,
        tmp_path / "out.csv",
        batch_size=20,
        observe=lambda out, position: seen.append((position, out.ids[0], len(out.labels))),
    )
    assert seen == [(0, 0, 20), (20, 20, 20), (40, 40, 10)]


def test_a_damaged_log_is_set_aside_and_named(tmp_path):
    write(tmp_path, count=2)
    write(tmp_path, count=2, name="other")
    (path,) = (p for p in tmp_path.iterdir() if p.name.startswith("s."))
    path.write_text("damaged\n" + path.read_text())
    data = page.from_folder(tmp_path)
    assert [stream["name"] for stream in data["streams"]] == ["other"]
    assert path.name in data["damaged"][0]
    assert write(tmp_path, count=2).monitor.batches == 2
    assert page.from_folder(tmp_path)["damaged"] == []


def test_a_label_counts_once(tmp_path):
    """Repeated ones would not be losses that the past does not know."""
    log = write(tmp_path, count=1)
    label = adapter().state.classes[0]
    for _ in range(3):
        log.feedback([1, 1, 2], [label] * 3, betting=BettingTest(), time=0.0)
    assert log.monitor.labels == 2
