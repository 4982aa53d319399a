"""Corrupted sets: published layouts, reproducible bytes, digests."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caster import CasterError
from caster.io.files import file_digest, locked
from caster.io.images import open_images
from caster_bench.data import corrupt_job as job
from caster_bench.data import corrupted_writer as writer
from caster_bench.data import worker_processes
from caster_bench.data.corrupt_job import corrupt_images
from caster_bench.data.corruptions import CORRUPTIONS, corrupt
from caster_bench.data.corruptions.constants import CIFAR, IMAGENET
from caster_bench.data.sets import SETS
from caster_bench.data.sets.published import class_names
from tests.support.messages import error_line

FEW = ("shot_noise", "contrast")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(40, 220, size=(11, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([3, 8, 0, 9, 6, 1, 1, 2, 5, 0, 4])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(path, images=PIXELS, labels=LABELS)
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    """Three chunks per severity: four, four and three images."""
    monkeypatch.setattr(job, "CHUNK_VALUES", 4 * 32 * 32 * 3)


@pytest.fixture
def makes(monkeypatch):
    """Record every chunk made in this process."""
    calls, make = [], job.Chunk.make

    def counting(chunk):
        calls.append((chunk.corruption, chunk.severity, chunk.start))
        return make(chunk)

    monkeypatch.setattr(job.Chunk, "make", counting)
    return calls


def run(source, out, **options):
    images = open_images(source, labelled=True)
    return corrupt_images(images, out, **{"corruptions": FEW, **options})


error_of = partial(error_line, run)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_folder(folder, sizes, suffix=".png"):
    """Write one image per size, alternating between two classes."""
    for i, (width, height) in enumerate(sizes):
        path = folder / ("cat", "dog")[i % 2] / f"p{i}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


class Stop:
    """Progress that interrupts the run at its n-th report on corrupting."""

    def __init__(self, at):
        self.at, self.reports = at, []

    def __call__(self, stage, done, total):
        if stage == job.CORRUPTING:
            self.reports.append((done, total))
            if len(self.reports) == self.at:
                raise KeyboardInterrupt


# arrays


def test_the_files_are_what_numpy_saves(data, tmp_path, small_chunks):
    done = run(data, tmp_path / "out", seed=5)
    found = content(tmp_path / "out")
    assert set(found) == {"shot_noise.npy", "contrast.npy", "labels.npy", "manifest.json"}
    for name in FEW:
        expected = np.concatenate([corrupt(PIXELS, name, s, seed=5) for s in range(1, 6)])
        assert found[f"{name}.npy"] == npy(expected)
    assert found["labels.npy"] == npy(np.tile(LABELS, 5).astype(np.uint8))
    assert (done.images, done.made, done.existing, done.layout) == (11, 10, 0, "CIFAR-C")
    assert done.size == sum(len(found[f"{name}.npy"]) for name in FEW)


def test_the_set_can_be_opened_as_cifar10_c(data, tmp_path):
    run(data, tmp_path / "CIFAR-10-C")
    found = open_images("cifar10-c:contrast-3", tmp_path)
    assert len(found) == 11
    assert np.array_equal(found.read(7), corrupt(PIXELS[7:8], "contrast", 3)[0])
    assert found.classes[3] == "cat"
    assert found.labels.tolist() == found.classes[LABELS].tolist()


def test_two_processes_write_the_same_bytes(data, tmp_path, small_chunks):
    options = {"corruptions": ("elastic_transform", "jpeg_compression")}
    run(data, tmp_path / "one", **options)
    run(data, tmp_path / "two", workers=2, **options)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_fewer_severities_have_a_file_each(data, tmp_path):
    run(data, tmp_path / "CIFAR-10-C", severities=(5, 2))
    found = content(tmp_path / "CIFAR-10-C")
    assert sorted(name for name in found if name.startswith("contrast")) == [
        "contrast-2.npy",
        "contrast-5.npy",
    ]
    assert found["contrast-5.npy"] == npy(corrupt(PIXELS, "contrast", 5))
    assert found["labels.npy"] == npy(LABELS.astype(np.uint8))
    with pytest.raises(CasterError, match=r"is missing contrast\.npy"):
        open_images("cifar10-c:contrast-2", tmp_path)


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (np.array(["dog", "cat"]), np.array([1, 0], dtype=np.uint8), ["cat", "dog"]),
        (np.array([300, 2]), np.array([300, 2]), []),
        (np.array([-1, 2], dtype=np.int8), np.array([-1, 2]), []),
    ],
)
def test_labels(tmp_path, labels, numbers, classes):
    np.savez(tmp_path / "two.npz", images=PIXELS[:2], labels=labels)
    run(tmp_path / "two.npz", tmp_path / "out", severities=[1])
    assert content(tmp_path / "out")["labels.npy"] == npy(numbers)
    assert manifest(tmp_path / "out")["classes"] == classes


def test_grey_images_get_three_equal_channels(tmp_path):
    np.savez(tmp_path / "grey.npz", images=PIXELS[..., 0], labels=LABELS)
    run(tmp_path / "grey.npz", tmp_path / "out", corruptions=["contrast"], severities=[1])
    expected = corrupt(np.repeat(PIXELS[..., :1], 3, axis=3), "contrast", 1)
    assert np.array_equal(np.load(tmp_path / "out/contrast-1.npy"), expected)


# manifest


def test_the_manifest_says_how_it_was_made(data, tmp_path):
    run(data, tmp_path / "out", corruptions=("frost", "snow"), seed=3)
    said, found = manifest(tmp_path / "out"), content(tmp_path / "out")
    assert said["begun_from"] == str(data)
    assert (said["seed"], said["severities"], said["layout"]) == (3, [1, 2, 3, 4, 5], "CIFAR-C")
    assert said["versions"]["numpy"] == np.__version__
    assert set(said["versions"]) == {"caster", "numpy", "scipy", "pillow"}
    assert said["source"]["shape"] == [11, 32, 32, 3]
    assert [said["constants"]["snow"][str(s)] for s in range(1, 6)] == list(
        map(list, CIFAR["snow"])
    )
    assert said["constants"]["frost"]["textures"] == "textures drawn by caster"
    assert said["begun"] == {}
    assert set(said["written"]) == set(found) - {"manifest.json"}
    for name, noted in said["written"].items():
        assert noted == {"sha256": sha256(found[name]), "bytes": len(found[name])}


def test_the_source_is_identified_by_pixels_and_labels(data, tmp_path):
    os.utime(data, (1, 1))  # a copy elsewhere has other times
    run(data, tmp_path / "a", severities=[1])
    other = tmp_path / "other.npz"
    np.savez_compressed(other, images=PIXELS, labels=LABELS)
    run(other, tmp_path / "b", severities=[1])
    np.savez(other, images=PIXELS, labels=LABELS[::-1])
    run(other, tmp_path / "c", severities=[1])
    digests = [manifest(tmp_path / name)["source"]["sha256"] for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


# resuming


@pytest.mark.parametrize("at", [1, 4, 5, 10, 16, 17, 31])
def test_an_interrupted_run_resumes_to_the_same_bytes(data, tmp_path, small_chunks, makes, at):
    run(data, tmp_path / "whole")
    makes.clear()
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "out", progress=Stop(at))
    first = makes.copy()
    assert not (tmp_path / "out/.images.npy").exists()
    done = run(data, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    finished = (
        max(at - 2, 0) // 3
    )  # severities of three chunks each; a chunk is reported before it is written
    assert (done.made, done.existing) == (10 - finished, finished)
    assert len(makes) - len(first) == 3 * (10 - finished)
    assert not set(first[: 3 * finished]) & set(makes[len(first) :])


def test_a_run_that_is_complete_makes_nothing(data, tmp_path, makes):
    run(data, tmp_path / "out")
    before, calls = content(tmp_path / "out"), len(makes)
    reports = []
    done = run(data, tmp_path / "out", progress=lambda *report: reports.append(report))
    assert (done.made, done.existing, len(makes)) == (0, 10, calls)
    assert content(tmp_path / "out") == before
    assert reports[-1] == (job.CORRUPTING, 110, 110)


def test_corruptions_can_be_added(data, tmp_path, makes):
    run(data, tmp_path / "out", corruptions=["contrast"])
    makes.clear()
    run(data, tmp_path / "out", corruptions=["fog", "contrast"])
    assert {corruption for corruption, _, _ in makes} == {"fog"}
    run(data, tmp_path / "both", corruptions=["contrast", "fog"])
    assert content(tmp_path / "out") == content(tmp_path / "both")


@pytest.mark.parametrize("target", ["fog.npy", "cat"])
def test_a_run_that_ended_before_the_renaming(tmp_path, data, target, makes, monkeypatch):
    source = data if target == "fog.npy" else write_folder(tmp_path / "photos", [(40, 40)] * 3)
    run(source, tmp_path / "whole", corruptions=["fog"])

    def killed(part, path):
        if Path(path).name in ("fog.npy", "1"):
            raise KeyboardInterrupt
        return replace(part, path)

    replace = os.replace
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.os, "replace", killed)
        run(source, tmp_path / "out", corruptions=["fog"])
    makes.clear()
    done = run(source, tmp_path / "out", corruptions=["fog"])
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert ("fog", 1, 0) not in makes
    assert done.existing == (5 if target == "fog.npy" else 1)


def test_a_run_that_ended_before_the_note(data, tmp_path, monkeypatch):
    def killed(path):
        if path.name == "contrast.npy.part":
            raise KeyboardInterrupt
        return file_digest(path)

    run(data, tmp_path / "whole", corruptions=["contrast"])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "file_digest", killed)
        run(data, tmp_path / "out", corruptions=["contrast"])
    assert run(data, tmp_path / "out", corruptions=["contrast"]).made == 1
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_damaged_part_is_not_resumed(data, tmp_path, small_chunks, makes):
    run(data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "out", progress=Stop(9))
    part = tmp_path / "out/shot_noise.npy.part"
    bytes_ = bytearray(part.read_bytes())
    bytes_[5000] ^= 1
    part.write_bytes(bytes_)
    assert run(data, tmp_path / "out").made == 10
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_file_that_was_removed_is_made_again(data, tmp_path):
    run(data, tmp_path / "out")
    before = content(tmp_path / "out")
    (tmp_path / "out/contrast.npy").unlink()
    (tmp_path / "out/labels.npy").unlink()
    assert run(data, tmp_path / "out").made == 5
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["contrast.npy", "labels.npy"])
@pytest.mark.parametrize("how", ["longer", "one bit"])
def test_a_changed_file_is_rejected(data, tmp_path, name, how):
    run(data, tmp_path / "out")
    path = tmp_path / "out" / name
    damaged = bytearray(path.read_bytes())
    if how == "longer":
        damaged += b"more"
    else:
        damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert error_of(data, tmp_path / "out") == (
        f"{path} was changed since it was written: remove it to make it again"
    )
    path.unlink()
    run(data, tmp_path / "out")
    expected = np.concatenate([corrupt(PIXELS, "contrast", s) for s in range(1, 6)])
    found = content(tmp_path / "out")
    assert found["contrast.npy"] == npy(expected)
    assert found["labels.npy"] == npy(np.tile(LABELS, 5).astype(np.uint8))


def test_a_file_damaged_before_its_renaming_is_made_again(data, tmp_path):
    run(data, tmp_path / "out")
    before = content(tmp_path / "out")
    part = (tmp_path / "out/contrast.npy").rename(tmp_path / "out/contrast.npy.part")
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)
    assert run(data, tmp_path / "out").made == 5
    assert content(tmp_path / "out") == before


def test_foreign_labels_are_left_alone(data, tmp_path):
    run(data, tmp_path / "out", severities=[1])
    said = manifest(tmp_path / "out")
    del said["written"]["labels.npy"]
    (tmp_path / "out/manifest.json").write_text(json.dumps(said))
    assert error_of(data, tmp_path / "out", severities=[1]).endswith(
        "labels.npy does not belong to this set: move it away"
    )


def test_a_folder_with_a_missing_file_is_rejected(tmp_path):
    source = write_folder(tmp_path / "photos", [(40, 40)] * 3)
    run(source, tmp_path / "out", corruptions=["contrast"])
    (tmp_path / "out/contrast/2/cat/p0.JPEG").unlink()
    assert error_of(source, tmp_path / "out", corruptions=["contrast"]).endswith(
        "contrast/2 was changed since it was written: remove it to make it again"
    )


SCRIPT = """
import sys
from caster.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed_and_the_next_resumes(data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["corrupt", data, tmp_path / "out", "--corruption", "glass_blur", "--workers", "2"]
    np.savez(tmp_path / "many.npz", images=np.tile(PIXELS, (90, 1, 1, 1)), labels=[1] * 990)
    command[1] = tmp_path / "many.npz"
    with subprocess.Popen([sys.executable, script, *map(str, command)]) as process:
        try:
            below = []
            while len(below) < 2:
                assert process.poll() is None
                time.sleep(0.02)
                below = _workers(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_lives(child) for child in below):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run(tmp_path / "many.npz", tmp_path / "out", corruptions=["glass_blur"], severities=range(1, 6))
    pixels = np.load(tmp_path / "out/glass_blur.npy")
    assert np.array_equal(pixels[990 * 2 + 17], corrupt(PIXELS[6:7], "glass_blur", 3)[0])
    assert set(content(tmp_path / "out")) == {"glass_blur.npy", "labels.npy", "manifest.json"}


def _workers(parent: int) -> list[int]:
    """Children that run chunks, without the resource tracker."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [c for c in map(int, children) if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]


def _lives(child: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


# errors


def test_other_settings_are_rejected(data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(data, out)
    before = content(out)
    another = f"{out} was made with"
    assert error_of(data, out, seed=1) == f"{another} seed 0, not seed 1: write to another " + (
        "folder"
    )
    assert "severities 1, 2, 3, 4, 5, not severities 3" in error_of(data, out, severities=[3])
    np.savez(tmp_path / "other.npz", images=PIXELS[::-1], labels=LABELS)
    assert error_of(tmp_path / "other.npz", out) == (
        f"{out} was made from other images or labels: write to another folder"
    )
    monkeypatch.setattr("caster_bench.data.corrupted_writer.__version__", "9.9")
    assert error_of(data, out).startswith(f"{another} caster ")
    assert content(out) == before


def test_other_textures_are_rejected(data, tmp_path):
    write_folder(tmp_path / "ice", [(200, 200)] * 2)
    options = {"corruptions": ["frost"], "severities": [1]}
    run(data, tmp_path / "out", **options, textures=tmp_path / "ice/cat")
    noted = manifest(tmp_path / "out")["constants"]["frost"]["textures"]
    assert noted == {"p0.png": sha256((tmp_path / "ice/cat/p0.png").read_bytes())}
    expected = corrupt(PIXELS, "frost", 1, textures=tmp_path / "ice/cat")
    assert np.array_equal(np.load(tmp_path / "out/frost-1.npy"), expected)
    for other in (tmp_path / "ice/dog", None):
        assert error_of(data, tmp_path / "out", **options, textures=other) == (
            f"{tmp_path / 'out'} has frost made with other textures: write to another folder"
        )
    assert "less than an image of 32 x 32" in error_of(
        data, tmp_path / "new", **options, textures=write_folder(tmp_path / "s", [(9, 9)]) / "cat"
    )
    assert error_of(data, tmp_path / "new", textures=tmp_path / "ice/cat") == (
        "textures are for frost, which is not among the corruptions"
    )
    assert not (tmp_path / "new").exists()


def test_foreign_folders_are_left_alone(data, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("dear reader")
    assert error_of(data, out).startswith(
        f"{out} contains thesis.txt and no manifest.json: give a new"
    )
    (out / "manifest.json").write_text("[1]")
    assert "is not a manifest of a corrupted set" in error_of(data, out)
    (out / "manifest.json").unlink()
    assert content(out) == {"thesis.txt": b"dear reader"}
    (out / "thesis.txt").unlink()
    run(data, out, corruptions=["contrast"])
    (out / "fog.npy").write_text("mine")
    assert error_of(data, out, corruptions=["fog"]).endswith(
        "fog.npy does not belong to this set: move it away"
    )
    assert "it is not a folder" in error_of(data, out / "fog.npy")
    assert "there is no folder" in error_of(data, tmp_path / "none/out")


@pytest.mark.parametrize(
    "change",
    [
        {"written": {"contrast.npy": {"bytes": 5}}},
        {"written": {"contrast.npy": "whole"}},
        {"begun": {"contrast.npy": {"rows": "11", "checksum": 1}}},
        {"constants": {"contrast": [0.75]}},
        {"constants": None},
        {"format": None},
    ],
)
def test_a_manifest_that_was_edited_is_rejected_in_one_line(data, tmp_path, change):
    run(data, tmp_path / "out", corruptions=["contrast"])
    path = tmp_path / "out/manifest.json"
    path.write_text(json.dumps({**manifest(tmp_path / "out"), **change}))
    said = error_of(data, tmp_path / "out", corruptions=["contrast"])
    if "format" in change:
        assert said == f"{path} was written by another version of caster: write to another folder"
    else:
        assert said == f"{path} is not a manifest of a corrupted set: write to another folder"


@pytest.mark.parametrize("held", [{}, [], {"extra": "3"}])
def test_a_manifest_of_other_versions(data, tmp_path, held):
    run(data, tmp_path / "out", corruptions=["contrast"])
    said = manifest(tmp_path / "out")
    if held:
        held = {**said["versions"], **held}  # a library that is not there any more
    (tmp_path / "out/manifest.json").write_text(json.dumps({**said, "versions": held}))
    was, this = ("extra 3", "extra none") if held else ("caster none", "caster 0")
    assert f"was made with {was}, not {this}" in error_of(
        data, tmp_path / "out", corruptions=["contrast"]
    )


def test_two_runs_cannot_write_to_one_folder(data, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out/.lock", ""):
        assert "another caster is writing" in error_of(data, tmp_path / "out")


def test_invalid_arguments(data, tmp_path):
    assert "did you mean 'fog'" in error_of(data, tmp_path / "o", corruptions=["fogg"])
    assert "there is no severity 6" in error_of(data, tmp_path / "o", severities=[1, 6])
    assert "there is nothing to make" in error_of(data, tmp_path / "o", severities=[])
    assert error_of(data, tmp_path / "o", seed=1.7) == "seed is 1.7: it must be an integer"
    assert error_of(data, tmp_path / "o", workers=0) == "workers is 0: it must be at least 1"
    assert error_of(data, tmp_path / "o", workers=2.5) == "workers is 2.5: it must be an integer"
    assert not (tmp_path / "o").exists()


def test_requirements_are_checked_before_images_are_read(data, tmp_path, monkeypatch):
    def reading(*_):
        raise AssertionError("images must not be read")

    monkeypatch.setattr(job, "read_source", reading)
    options = {"corruptions": ["frost"], "textures": tmp_path / "none"}
    assert "cannot read the textures in" in error_of(data, tmp_path / "o", **options)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name in ("pixelate", "jpeg_compression"):
        assert "need Pillow: pip install" in error_of(data, tmp_path / "o", corruptions=[name])
    assert not (tmp_path / "o").exists()


def test_an_error_elsewhere_is_not_blamed_on_the_output(data, tmp_path, monkeypatch):
    def lost(chunk):
        raise OSError(5, "Input/output error", str(data))

    monkeypatch.setattr(job.Chunk, "make", lost)
    assert error_of(data, tmp_path / "out") == f"cannot read {data}: Input/output error"


# interrupts


def handled(handler) -> None:
    """Send SIGINT to the block under a handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with worker_processes._defer_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_block():
    with pytest.raises(KeyboardInterrupt):
        handled(signal.default_int_handler)


def test_ignored_ctrl_c_stays_ignored():
    handled(signal.SIG_IGN)


def test_ctrl_c_reaches_its_handler():
    came = []
    handled(lambda number, frame: came.append(number))
    assert came == [signal.SIGINT]


# folders


def test_large_files_become_imagenet_c(tmp_path):
    source = write_folder(tmp_path / "photos", [(500, 375), (300, 512), (224, 224), (90, 90)])
    done = run(source, tmp_path / "out", corruptions=["contrast", "fog"], severities=[2, 4], seed=1)
    assert (done.made, done.layout) == (4, "ImageNet-C")
    names = ["cat/p0", "cat/p2", "dog/p1", "dog/p3"]
    places = [f"{c}/{s}/{n}.JPEG" for c in ("contrast", "fog") for s in (2, 4) for n in names]
    found = content(tmp_path / "out")
    assert set(found) == {*places, "manifest.json"}
    for name in names:
        image = Image.open(source / f"{name}.png")
        short = min(image.size)
        width, height = (int(256 * side / short) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - 224) / 2), round((height - 224) / 2)
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)))
        file = io.BytesIO()
        made = corrupt(pixels[np.newaxis], "fog", 4, seed=1)[0]
        Image.fromarray(made).save(file, "JPEG", quality=85, optimize=True)
        assert found[f"fog/4/{name}.JPEG"] == file.getvalue()
    said = manifest(tmp_path / "out")
    assert said["constants"]["contrast"] == {
        "2": IMAGENET["contrast"][1],
        "4": IMAGENET["contrast"][3],
    }
    for target in ("contrast/2", "fog/4"):
        lines = [f"{sha256(found[f'{target}/{n}.JPEG'])}  {n}.JPEG\n" for n in names]
        assert said["written"][target] == {
            "sha256": sha256("".join(lines).encode()),
            "files": 4,
            "bytes": sum(len(found[f"{target}/{n}.JPEG"]) for n in names),
        }
    opened = open_images(tmp_path / "out/fog/4", labelled=True)
    assert opened.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert opened.read(3).shape == (224, 224, 3)


def test_small_files_keep_their_size_as_in_tiny_imagenet_c(tmp_path):
    source = write_folder(tmp_path / "photos", [(64, 64)] * 3, suffix=".jpg")
    run(source, tmp_path / "two", corruptions=["pixelate"], workers=2)
    opened = open_images(tmp_path / "two/pixelate/5", labelled=True)
    assert opened.names == ("cat/p0.JPEG", "cat/p2.JPEG", "dog/p1.JPEG")
    assert opened.read(0).shape == (64, 64, 3)
    run(source, tmp_path / "one", corruptions=["pixelate"])
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_an_interrupted_folder_resumes(tmp_path, makes):
    source = write_folder(tmp_path / "photos", [(40, 40)] * 3)
    run(source, tmp_path / "whole", corruptions=["contrast"])
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", corruptions=["contrast"], progress=Stop(4))
    assert set(content(tmp_path / "out")) >= {"contrast/2/cat/p0.JPEG", "manifest.json"}
    assert not (tmp_path / "out/contrast/3").exists()
    makes.clear()
    assert run(source, tmp_path / "out", corruptions=["contrast"]).existing == 2
    assert {severity for _, severity, _ in makes} == {3, 4, 5}
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list((tmp_path / "out").rglob("*.part"))


def test_unsuitable_folders(tmp_path):
    mixed = write_folder(tmp_path / "mixed", [(40, 40), (40, 41)])
    assert error_of(mixed, tmp_path / "out") == (
        "dog/p1.png has 40 x 41 pixels and the first image 40 x 40: images of up to 64 pixels "
        "must all have the same size"
    )
    twins = write_folder(tmp_path / "twins", [(40, 40), (40, 40)])
    Image.open(twins / "cat/p0.png").save(twins / "cat/p0.bmp")
    assert "cat/p0.bmp and cat/p0.png would both become cat/p0.JPEG" in error_of(
        twins, tmp_path / "out"
    )
    broken = write_folder(tmp_path / "broken", [(40, 40), (40, 40)])
    (broken / "dog/p1.png").write_bytes(b"no image")
    assert error_of(broken, tmp_path / "out").endswith(": repair or remove it")
    assert "among the images" in error_of(mixed, mixed / "out")
    long = write_folder(tmp_path / "long", [(40, 40)], suffix=f"{'x' * 249}.png")
    assert error_of(long, tmp_path / "out").endswith(
        ".JPEG, longer than the 255 bytes of a file name: rename it"
    )
    assert not (tmp_path / "out").exists()
    assert not (mixed / "out").exists()


def test_an_output_among_the_images_of_a_named_set(tmp_path):
    """Its paths start at the data root, which may contain the output."""
    for wnid in class_names("imagenet-a"):
        (tmp_path / "imagenet-a" / wnid).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "imagenet-a" / wnid / "p.jpeg")
    images = open_images("imagenet-a:test", tmp_path)
    options = {"corruptions": ["contrast"], "severities": [1]}
    with pytest.raises(CasterError, match="imagenet-a, among the images: write to another"):
        corrupt_images(images, tmp_path / "imagenet-a/out", **options)
    assert corrupt_images(images, tmp_path / "out", **options).images == 200


def test_a_full_disk_is_one_line_and_the_rest_is_kept(data, tmp_path, monkeypatch):
    def full(self, values):
        if self.dtype == np.uint8 and self._file.name.endswith("contrast.npy.part"):
            raise OSError(28, "No space left on device")
        return append(self, values)

    append = writer.AppendableArray.append
    with monkeypatch.context() as patch:
        patch.setattr(writer.AppendableArray, "append", full)
        assert error_of(data, tmp_path / "out") == (
            f"cannot write to {tmp_path / 'out'}: No space left on device"
        )
    assert run(data, tmp_path / "out").existing == 5


def test_all_nineteen_by_default(data, tmp_path):
    images = open_images(data, labelled=True)
    done = corrupt_images(images, tmp_path / "out", severities=[1])
    assert done.made == len(CORRUPTIONS) == 19


@pytest.mark.skipif(not os.environ.get("CASTER_DATA"), reason="CASTER_DATA names no folder")
def test_the_labels_of_cifar10_are_the_published_ones_of_cifar10_c(tmp_path):
    try:
        images = open_images("cifar10:test")
    except CasterError as error:
        pytest.skip(str(error))
    corrupt_images(images, tmp_path / "out", corruptions=["contrast"])
    (layout,) = SETS["cifar10-c"].layouts
    assert file_digest(tmp_path / "out/labels.npy", "md5") == layout.md5["labels.npy"]
