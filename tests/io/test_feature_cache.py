"""The feature cache: complete, resumed wherever a run ended, and never trusted when damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from caster import CasterError
from caster.adapt.image_features import extract
from caster.io import feature_cache
from caster.io.appendable_array import AppendableArray, DamagedError, read_checked
from caster.io.feature_cache import default_store, entry_key, find_entry, write_entry
from tests.support.fakes import FakeImages, answers, model

KEY = "k" * 64


def fill(root, columns, key=KEY, total=None):
    count = len(next(iter(columns.values())))
    rows = np.arange(count, dtype=np.int64)
    with write_entry(root, key, total or count) as partial:
        partial.append({"rows": rows, **columns}, {})


def run(root, images, batch_size=4, **options):
    return extract(options.pop("model", model()), images, root, batch_size=batch_size, **options)


def check(found, images, rows=None):
    """Features, logits and labels are those of the images, computed by hand."""
    rows = list(range(len(images))) if rows is None else rows
    features, logits = answers(images, rows)
    assert found.rows == len(rows)
    assert found.image_rows.tolist() == rows
    np.testing.assert_allclose(found.read("features"), features, rtol=1e-6)
    np.testing.assert_allclose(found.read("logits"), logits, rtol=1e-6, atol=1e-4)
    assert found.read("labels").tolist() == [images.labels[row] for row in rows]


def names(root):
    return sorted(path.name for path in root.iterdir())


# entries


def test_every_part_of_the_key_counts():
    keys = {entry_key(*parts) for parts in ("abc", "xbc", "axc", "abx")}
    assert len(keys) == 4
    assert entry_key("a", "b", "c") in keys
    assert entry_key("ab", "", "c") != entry_key("a", "b", "c")


def test_each_model_preprocessing_and_data_has_its_own_entry(tmp_path):
    run(tmp_path, FakeImages(5))
    run(tmp_path, FakeImages(5), model=model(version="model-2"))
    run(tmp_path, FakeImages(5, sha256="images-2"))
    other = model()
    other.preprocessing = type(other.preprocessing)(1.0, (0.5,) * 3, (1.0,) * 3, "NHWC")
    run(tmp_path, FakeImages(5), model=other)
    narrow = model()
    narrow.bf16 = True  # the same weights, but different features
    run(tmp_path, FakeImages(5), model=narrow)
    assert len(names(tmp_path)) == 5


def test_a_complete_entry_is_used_without_reading_an_image(tmp_path):
    images = FakeImages(10)
    check(run(tmp_path, images), images)
    assert sorted(images.reads) == list(range(10))
    again = FakeImages(10)
    found = run(tmp_path, again)
    check(found, images)
    assert again.reads == []
    assert isinstance(found.read("features"), np.memmap)
    assert [len(name) for name in names(tmp_path)] == [64]  # no lock, nothing partial


def test_only_a_complete_entry_gets_the_final_name(tmp_path):
    with write_entry(tmp_path, KEY, 2) as partial:
        partial.append({"rows": np.array([0]), "features": np.ones((1, 3))}, {})
        assert find_entry(tmp_path, KEY, 2) is None
        assert names(tmp_path) == [f"{KEY}.lock", f"{KEY}.partial"]
        partial.append({"rows": np.array([1]), "features": np.ones((1, 3))}, {})
    assert names(tmp_path) == [KEY]
    assert find_entry(tmp_path, KEY, 2).manifest.kept == 2
    assert find_entry(tmp_path, KEY, 3) is None


def test_a_model_without_logits(tmp_path):
    images = FakeImages(6)
    found = run(tmp_path, images, model=model(logits=False))
    assert found.names == ("features", "labels")
    np.testing.assert_allclose(found.read("features"), answers(images, range(6))[0], rtol=1e-6)


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store() == tmp_path / "caster"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/anna")
    assert default_store() == Path("/home/anna/.cache/caster")


def test_a_user_without_a_home_must_name_a_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(CasterError, match="no home folder") as caught:
        default_store()
    assert caught.value.phrased("--cache").endswith("with --cache")


# resuming


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("done", [0, 4, 8, 12, 15])
def test_a_run_resumes_where_the_last_one_ended(tmp_path, error, done):
    whole = run(tmp_path / "whole", FakeImages(15))

    def stop(stage, seen, total):
        if seen == done:
            raise error

    images = FakeImages(15)
    with pytest.raises(error):
        run(tmp_path / "cut", images, progress=stop)
    left = 0 if done == 0 else 1
    assert len(names(tmp_path / "cut")) == left  # an empty entry is removed
    images.reads.clear()
    found = run(tmp_path / "cut", images)
    assert sorted(images.reads) == list(range(done, 15))
    for name in ("features", "logits", "labels"):
        assert np.array_equal(found.read(name), whole.read(name))


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_batch_that_the_model_fails_on_is_not_cached(tmp_path, stopped):
    calls = []

    def failing(batch):
        calls.append(len(batch))
        if len(calls) > stopped:
            raise KeyboardInterrupt
        return model().function(batch)

    images = FakeImages(10)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, images, model=model(failing))
    images.reads.clear()
    check(run(tmp_path, images), images)
    assert sorted(images.reads) == list(range(4 * stopped, 10))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5])
def test_ctrl_c_between_two_arrays_of_a_batch(tmp_path, monkeypatch, batch_size):
    """Some rows are written but not in the manifest: the next run overwrites them."""
    images = FakeImages(12)
    append, calls = AppendableArray.append, []

    def interrupted(self, values):
        calls.append(values)
        if len(calls) == 5:  # rows, features, logits, rows, features
            append(self, values)
            raise KeyboardInterrupt
        return append(self, values)

    monkeypatch.setattr(AppendableArray, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, images)
    monkeypatch.undo()
    monkeypatch.setattr(feature_cache, "SAVE_EVERY", -1)  # after every batch
    images.reads.clear()
    check(run(tmp_path, images, batch_size), images)
    assert sorted(images.reads) == list(range(4, 12))


KILLED = """
import os, sys
from pathlib import Path
from caster.io import feature_cache
from tests.io.test_feature_cache import FakeImages, run
feature_cache.SAVE_EVERY = float(sys.argv[2])
run(Path(sys.argv[1]), FakeImages(20), progress=lambda s, n, t: os._exit(9) if n == 12 else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "kept"), [(-1, 12), (1e6, 0)])
def test_a_killed_process_loses_only_what_was_not_saved(tmp_path, save_every, kept):
    command = [sys.executable, "-c", KILLED, tmp_path, str(save_every)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 9
    images = FakeImages(20)
    check(run(tmp_path, images), images)
    assert sorted(images.reads) == list(range(kept, 20))
    assert [len(name) for name in names(tmp_path)] == [64]


def test_another_batch_size_resumes_too(tmp_path):
    def stop(stage, seen, total):
        if seen == 6:
            raise KeyboardInterrupt

    images = FakeImages(10)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, images, 3, progress=stop)
    check(run(tmp_path, images, 4), images)


def test_progress_starts_where_the_run_resumes(tmp_path):
    def stop(stage, seen, total):
        if seen == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeImages(10), progress=stop)
    steps = []
    run(tmp_path, FakeImages(10), progress=lambda *step: steps.append(step))
    assert steps == [("through the model", 8, 10), ("through the model", 10, 10)]


# one process at a time

HOLDER = """
import fcntl, sys, time
handle = open(sys.argv[1], "a")
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_rejected_and_a_killed_one_blocks_nobody(tmp_path):
    images = FakeImages(5)
    run(tmp_path, images)
    (key,) = names(tmp_path)
    shutil.rmtree(tmp_path / key)
    lock = tmp_path / f"{key}.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(CasterError, match="another caster is reading these images"):
                run(tmp_path, images)
            assert lock.exists()
        finally:
            os.kill(holder.pid, signal.SIGKILL)
    assert lock.exists()
    check(run(tmp_path, images), images)
    assert names(tmp_path) == [key]


def test_a_second_thread_is_rejected_and_the_first_goes_on(tmp_path):
    images = FakeImages(8)
    inside, go = threading.Event(), threading.Event()

    def wait(stage, seen, total):
        if seen == 4:
            inside.set()
            assert go.wait(10)

    found = []
    first = threading.Thread(target=lambda: found.append(run(tmp_path, images, progress=wait)))
    first.start()
    assert inside.wait(10)
    with pytest.raises(CasterError, match="another caster"):
        run(tmp_path, FakeImages(8))
    go.set()
    first.join()
    check(found[0], images)


def test_an_entry_that_another_process_completed_is_not_overwritten(tmp_path):
    fill(tmp_path, {"features": np.ones((3, 2))})
    with pytest.raises(CasterError, match="another caster"), write_entry(tmp_path, KEY, 3):
        raise AssertionError
    assert find_entry(tmp_path, KEY, 3).arrays["features"].tolist() == [[1.0, 1.0]] * 3


def test_a_lock_file_removed_while_it_is_opened_is_not_held(tmp_path, monkeypatch):
    """Its holder removes the file between our opening and our locking it."""
    import fcntl

    path, flock, opened = tmp_path / f"{KEY}.lock", fcntl.flock, []

    def late(handle, how):
        opened.append(handle)
        if len(opened) == 1:
            path.unlink()
        return flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with write_entry(tmp_path, KEY, 1) as partial:
        assert len(opened) == 2
        assert os.path.samestat(path.stat(), os.fstat(opened[-1]))
        partial.append({"rows": np.array([0]), "features": np.ones((1, 2))}, {})


# disks


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk_is_one_line(tmp_path):
    partial = tmp_path / f"{KEY}.partial"
    partial.mkdir()
    (partial / "features.npy").symlink_to("/dev/full")
    with pytest.raises(CasterError) as caught:
        fill(tmp_path, {"features": np.ones((3, 2))})
    assert f"features in {tmp_path}: {os.strerror(errno.ENOSPC)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.argument == "cache"


def test_a_disk_that_fills_up_keeps_what_was_saved(tmp_path, monkeypatch):
    images, append = FakeImages(12), AppendableArray.append

    def full(self, values):
        if self._file.name.endswith("features.npy") and self._file.tell() > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, values)

    monkeypatch.setattr(AppendableArray, "append", full)
    with pytest.raises(CasterError, match="No space left on device"):
        run(tmp_path, images)
    monkeypatch.undo()
    images.reads.clear()
    check(run(tmp_path, images), images)
    assert sorted(images.reads) == list(range(8, 12))


def test_a_cache_that_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CasterError, match=r"cannot cache features in .* cache="):
            run(root, FakeImages(5))


# damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path, at=-3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def manifest_with(**changes):
    def change(folder):
        manifest = json.loads((folder / "note.json").read_text())
        (folder / "note.json").write_text(json.dumps(manifest | changes))

    return change


DAMAGE = {
    "manifest truncated": lambda folder: cut(folder / "note.json"),
    "manifest empty": lambda folder: (folder / "note.json").write_bytes(b""),
    "manifest not text": lambda folder: (folder / "note.json").write_bytes(b"\xff\xfe\x00"),
    "manifest a list": lambda folder: (folder / "note.json").write_text("[1, 2]"),
    "manifest with other keys": lambda folder: (folder / "note.json").write_text('{"rows": 3}'),
    "manifest without numbers": manifest_with(seen="8"),
    "manifest without arrays": manifest_with(checksums={}),
    "manifest with a list of arrays": manifest_with(checksums=[1, 2]),
    "manifest with an extra array": manifest_with(checksums={"rows": 1, "features": 2, "more": 3}),
    "manifest with fewer rows": manifest_with(seen=4, kept=4),
    "manifest with more rows": manifest_with(seen=9, kept=9),
    "manifest with negative rows": manifest_with(seen=-1, kept=-1),
    "manifest with another image": manifest_with(kept=7, unreadable={"2": "cannot read it"}),
    "manifest with a row that is not a number": manifest_with(
        kept=7, unreadable={"two": "cannot read it"}
    ),
    "features truncated": lambda folder: cut(folder / "features.npy"),
    "features empty": lambda folder: (folder / "features.npy").write_bytes(b""),
    "features missing": lambda folder: (folder / "features.npy").unlink(),
    "features flipped": lambda folder: flip(folder / "features.npy"),
    "features replaced": lambda folder: np.save(folder / "features.npy", np.zeros((8, 3), "f")),
    "features pickled": lambda folder: np.save(folder / "features.npy", np.array([{}, None])),
    "logits flipped": lambda folder: flip(folder / "logits.npy"),
    "logits missing": lambda folder: (folder / "logits.npy").unlink(),
    "rows flipped": lambda folder: flip(folder / "rows.npy"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("partly", [False, True], ids=["whole", "partial"])
def test_a_damaged_entry_is_computed_again(tmp_path, damage, partly, caplog):
    def stop(stage, seen, total):
        if partly and seen == 8:
            raise KeyboardInterrupt

    images = FakeImages(12 if partly else 8)
    try:
        run(tmp_path, images, progress=stop)
    except KeyboardInterrupt:
        assert partly
    (folder,) = tmp_path.iterdir()
    damage(folder)
    images.reads.clear()
    found = run(tmp_path, images)
    check(found, images)
    assert sorted(images.reads) == list(range(len(images)))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("caster.io.feature_cache", logging.WARNING)
    assert f"{folder} were damaged" in record.getMessage()
    images.reads.clear()
    check(run(tmp_path, images), images)
    assert images.reads == []


def test_no_flipped_bit_changes_the_numbers(tmp_path):
    """A flipped bit anywhere, header included, is detected or changes nothing."""
    path, values = tmp_path / "a.npy", np.arange(6, dtype=np.float32).reshape(3, 2)
    array = AppendableArray(path, values)
    checksum = array.append(values)
    array.sync(3)
    array.close()
    content = path.read_bytes()
    assert len(content) == 128 + 24
    assert np.array_equal(read_checked(path, 3, checksum), values)
    detected = 0
    for at, bit in product(range(len(content)), (0, 1, 5)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        path.write_bytes(bytes(damaged))
        try:
            found = read_checked(path, 3, checksum)
        except DamagedError:
            detected += 1
        else:
            assert found.dtype == values.dtype
            assert np.array_equal(found, values)
    assert detected > 3 * 24


def test_a_missing_folder_or_manifest(tmp_path):
    assert find_entry(tmp_path, KEY, 3) is None
    (tmp_path / KEY).mkdir()
    assert find_entry(tmp_path, KEY, 3) is None
    fill(tmp_path, {"features": np.ones((3, 2))})
    assert find_entry(tmp_path, KEY, 3).manifest.kept == 3


# what a model must not do


def test_outputs_that_change_between_batches(tmp_path):
    def narrower(batch):
        return np.ones((len(batch), 3 if len(batch) == 4 else 2), dtype=np.float32)

    with pytest.raises(CasterError, match=r"gives float32 \(2,\), where it gave float32 \(3,\)"):
        run(tmp_path, FakeImages(6), model=model(narrower))

    def forgetful(batch):
        features = np.ones((len(batch), 3))
        return (features, features) if len(batch) == 4 else features

    with pytest.raises(CasterError, match="logits with some batches and not with others"):
        run(tmp_path, FakeImages(6), model=model(forgetful, "forgetful"))


def test_a_model_that_changed_leaves_no_features(tmp_path):
    changed = model()

    def verify():
        raise CasterError("the model changed")

    changed.verify = verify
    with pytest.raises(CasterError, match="the model changed"):
        run(tmp_path, FakeImages(6), model=changed)
    assert names(tmp_path) == []


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_features_that_are_not_finite_name_their_image(tmp_path, broken):
    def sometimes(batch):
        features = batch.mean(axis=(1, 2))
        features[batch[:, 0, 0, 0] == 255, 1] = broken
        return features

    images = FakeImages(6)
    for i, pixels in enumerate(images.pixels):
        pixels[0, 0, 0] = 255 if i == 5 else 0
    with pytest.raises(CasterError, match=r"gives NaN or infinity for fake5\.png"):
        run(tmp_path, images, model=model(sometimes))


def test_a_model_without_a_version_is_not_cached(tmp_path):
    with pytest.raises(CasterError, match="has no version"):
        run(tmp_path, FakeImages(6), model=model(version=None))


def test_the_first_batch_is_checked_before_the_rest(tmp_path):
    images = FakeImages(20)

    def reject(outputs):
        assert outputs.logits.shape == (4, 2)
        raise CasterError("not these")

    with pytest.raises(CasterError, match="not these"):
        run(tmp_path, images, check=reject)
    assert set(images.reads) <= set(range(8))  # the first batch and the one read ahead
    assert names(tmp_path) == []
    checked = []
    run(tmp_path, images, check=checked.append)
    assert len(checked) == 1


# unreadable images


def test_unreadable_images_are_skipped_only_on_request(tmp_path):
    images = FakeImages(10, broken=[0, 5, 9])
    with pytest.raises(CasterError, match=r"cannot read fake0\.png: it is broken: repair"):
        run(tmp_path, images)
    found = run(tmp_path, images, skip_unreadable=True)
    check(found, images, [1, 2, 3, 4, 6, 7, 8])
    assert found.unreadable == [f"cannot read fake{i}.png: it is broken" for i in (0, 5, 9)]
    with pytest.raises(CasterError, match=r"fake0\.png.*skip_unreadable="):
        run(tmp_path, images)
    images.reads.clear()
    assert run(tmp_path, images, skip_unreadable=True).unreadable == found.unreadable
    assert set(images.reads) <= images.broken


def test_a_batch_without_a_readable_image(tmp_path):
    images = FakeImages(12, broken=[0, 1, 2, 3, 8, 9, 10, 11])
    check(run(tmp_path, images, skip_unreadable=True), images, [4, 5, 6, 7])
    none = FakeImages(3, broken=range(3), sha256="none")
    with pytest.raises(CasterError, match="none of the images of fakes can be read"):
        run(tmp_path, none, skip_unreadable=True)


def test_a_resumed_run_rejects_at_once_what_the_first_skipped(tmp_path):
    def stop(stage, seen, total):
        if seen == 8:
            raise KeyboardInterrupt

    images = FakeImages(20, broken=[2])
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, images, skip_unreadable=True, progress=stop)
    images.reads.clear()
    with pytest.raises(CasterError, match=r"fake2\.png"):
        run(tmp_path, images)
    assert images.reads == [2]
    check(run(tmp_path, images, skip_unreadable=True), images, [0, 1, *range(3, 20)])


@pytest.mark.parametrize("partly", [False, True])
def test_an_image_that_became_readable_is_not_skipped(tmp_path, partly):
    """Granting a permission or installing a decoder does not change the digest."""

    def stop(stage, seen, total):
        if partly and seen == 8:
            raise KeyboardInterrupt

    images = FakeImages(12, broken=[2])
    try:
        run(tmp_path, images, skip_unreadable=True, progress=stop)
    except KeyboardInterrupt:
        assert partly
    images.broken.clear()
    check(run(tmp_path, images), images)


def test_the_manifest_is_saved_in_time(tmp_path, monkeypatch):
    saved = []
    save = feature_cache.EntryWriter.save

    def counting(self):
        saved.append(self.manifest.seen)
        save(self)

    monkeypatch.setattr(feature_cache.EntryWriter, "save", counting)
    clock = iter(range(0, 1000, 2))  # two seconds per batch
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    columns = {"features": np.ones((1, 2))}
    with write_entry(tmp_path, KEY, 12) as partial:
        for row in range(12):
            partial.append({"rows": np.array([row]), **columns}, {})
    assert saved[-1] == 12
    assert saved[:-1]
    assert all(later - earlier <= 4 for earlier, later in pairwise(saved))
