"""caster data list, check and get."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from caster_bench.data.corruptions import CORRUPTIONS
from caster_bench.data.sets import SETS
from caster_bench.data.sets.dataset import Archive, SplitGroup
from tests.support import publish
from tests.support.command_line import cli, refusal
from tests.support.publish import md5, tar
from tests.support.server import serving

run = partial(cli, "data")


def error_of(*arguments) -> str:
    return refusal(run(*arguments))


def test_list():
    done = run("list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[::3]] == list(SETS)
    first = lines.index("cifar10          CIFAR-10: train 50,000, test 10,000 images, 10 classes")
    assert "https://www.cs.toronto.edu" in lines[first + 1]
    assert "(caster data get cifar10)" in lines[first + 1]
    assert "licence: none stated" in lines[first + 2]
    assert "95 of CORRUPTION-SEVERITY each 50,000 images, 1,000 classes" in done.stdout
    for data in SETS.values():
        assert data.page in done.stdout
        assert data.licence in done.stdout


@pytest.fixture
def food(tmp_path, monkeypatch):
    publish.food101(tmp_path)
    small = (SplitGroup(("train",), 2), SplitGroup(("test",), 2))
    monkeypatch.setitem(SETS, "food101", replace(SETS["food101"], splits=small, classes=2))
    return tmp_path


def test_check_of_a_complete_set(food):
    done = run("check", "food101", "--data-root", food)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["train", "2", "of", "2", "images"]
    assert f"food101 in {food / 'food-101'}: 2 of 2 splits complete" in lines
    assert lines[-1] == "complete"


def test_check_finds_the_root_in_the_environment(food, monkeypatch):
    monkeypatch.setenv("CASTER_DATA", str(food))
    assert run("check", "food101:test").exit_code == 0
    monkeypatch.delenv("CASTER_DATA")
    assert "set CASTER_DATA or pass --data-root" in error_of("check", "food101:test")


def test_check_lists_what_is_missing(food):
    (food / "food-101/images/waffles/9.jpg").unlink()
    done = run("check", "food101", "--data-root", food)
    assert done.exit_code == 1
    assert f"missing: {food / 'food-101/images/waffles/9.jpg'}" in done.stdout.splitlines()
    assert "0 of 2 splits complete" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not complete")


def test_check_lists_every_file(tmp_path):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    done = run("check", "cifar10-c", "--data-root", tmp_path)
    assert done.exit_code == 1
    missing = [line for line in done.stdout.splitlines() if line.startswith("missing: ")]
    files = {f"{name}.npy" for name in CORRUPTIONS} - {"fog.npy"}
    assert sorted(missing) == sorted(f"missing: {tmp_path / 'CIFAR-10-C' / x}" for x in files)
    assert "cifar10-c:fog-1 has 4 images instead of 10,000" in done.stdout
    changed = f"not the published file, its MD5 differs: {tmp_path / 'CIFAR-10-C/fog.npy'}"
    assert changed in done.stdout.splitlines()


def test_a_terminal_shows_eight_and_counts_the_rest(tmp_path, monkeypatch):
    publish.corrupted_arrays(tmp_path, "CIFAR-10-C", ["fog"])
    monkeypatch.setattr("caster_bench.cli.data.output", Console(force_terminal=True))
    lines = run("check", "cifar10-c", "--data-root", tmp_path).stdout.splitlines()
    assert sum(line.startswith("missing: ") for line in lines) == 8
    assert "and 10 more: pipe the output to see them" in lines


def test_check_of_a_set_that_is_not_there(tmp_path):
    done = run("check", "pacs", "--data-root", tmp_path)
    assert done.exit_code == 1
    styles = ("art_painting", "cartoon", "photo", "sketch")
    assert done.stdout.splitlines() == [
        "pacs is not there",
        *(f"missing: {tmp_path / 'PACS' / style}/" for style in styles),
    ]


def test_unknown_names():
    assert error_of("check", "mnist").startswith("there is no set 'mnist': choose from")
    assert "choose cifar10:train or cifar10:test" in error_of("get", "cifar10:val")


def test_get(tmp_path, monkeypatch):
    publish.food101(tmp_path / "made")
    files = {
        str(path.relative_to(tmp_path / "made")): path.read_bytes()
        for path in (tmp_path / "made").rglob("*")
        if path.is_file()
    }
    with serving({"food.tar.gz": tar(files)}) as server:
        content = server.content["food.tar.gz"]
        url = server.url("food.tar.gz")
        archive = Archive(url, md5(content), "the test", ("food-101",), len(content))
        small = replace(
            SETS["food101"], splits=(SplitGroup(("test",), 2),), classes=2, archives=(archive,)
        )
        monkeypatch.setitem(SETS, "food101", small)
        done = run("get", "food101", "--data-root", tmp_path)
        assert done.exit_code == 0, done.output
        assert "food.tar.gz: its MD5 matches the one from the test" in done.stdout
        assert done.stdout.splitlines()[-1] == "complete"
        assert len(server.asked) == 1
        assert run("get", "food101", "--data-root", tmp_path).exit_code == 0
        assert len(server.asked) == 1


def test_get_leaves_existing_files(food):
    (food / "food-101/images/waffles/9.jpg").unlink()
    done = run("get", "food101", "--data-root", food)
    assert done.exit_code == 1
    assert "remove the wrong ones and get the set again" in done.stdout.splitlines()[-1]


def test_get_without_a_network(tmp_path, monkeypatch):
    with serving({}) as server:
        archive = Archive(server.url("x.tar"), md5(b""), "the test", ("food-101",))
    monkeypatch.setitem(SETS, "food101", replace(SETS["food101"], archives=(archive,)))
    line = error_of("get", "food101", "--data-root", tmp_path)
    assert line.startswith("cannot reach 127.0.0.1: ")


def test_get_of_a_set_that_needs_permission(tmp_path):
    line = error_of("get", "imagenet", "--data-root", tmp_path)
    assert "get it from https://image-net.org" in line


def test_an_interrupted_get_can_resume(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("caster_bench.data.sets.download.get", interrupted)
    done = run("get", "cifar10", "--data-root", tmp_path)
    assert done.exit_code == 130
    assert done.stderr.strip() == "caster: interrupted, run it again to resume"
