"""caster cache: entries are listed and removed, and nothing else."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from caster.adapt.image_features import extract
from caster.io.feature_cache import list_entries, lock_entry, remove_entries
from tests.support.command_line import cli
from tests.support.fakes import FakeImages, model

STRANGE = "f" * 64


def stop(stage, seen, total):
    if seen == 8:
        raise KeyboardInterrupt


run = partial(cli, columns=80)


def aged(entry, days):
    then = time.time() - days * 86_400
    for path in (*entry.folder.iterdir(), entry.folder):
        os.utime(path, (then, then))


@pytest.fixture
def store(tmp_path):
    """A cache with two complete entries of 12 images, one ten days old, and half of a third."""
    root = tmp_path / "store"
    for name in ("old", "new"):
        extract(model(), FakeImages(12, sha256=name), root, batch_size=4)
        if name == "old":
            aged(list_entries(root)[0], 10)
    with pytest.raises(KeyboardInterrupt):
        extract(model(), FakeImages(12, sha256="half"), root, batch_size=4, progress=stop)
    return root


def test_entries_are_described(store):
    found = list_entries(store)
    assert [entry.complete for entry in found].count(True) == 2
    assert {entry.manifest.description for entry in found} == {f"{model().name} on fakes"}
    assert sorted(entry.manifest.seen for entry in found) == [8, 12, 12]
    for entry in found:
        assert entry.bytes == sum(file.stat().st_size for file in entry.folder.iterdir())
    assert found[-1].age == pytest.approx(10 * 86_400, abs=60)
    result = run("cache", "--cache", store)
    assert result.exit_code == 0
    assert result.stdout.count(" on fakes") == 3
    assert result.stdout.count("(unfinished)") == 1
    assert " 10 d" in result.stdout
    assert "3 entries" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert len(list_entries(store)) == 3


def test_damage_is_listed_and_cleared(store):
    (list_entries(store)[0].folder / "note.json").write_text("{")
    assert "(damaged)" in run("cache", "--cache", store).stdout
    assert run("cache", "clear", "--cache", store).exit_code == 0
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("before", [True, False])
def test_clearing_by_age_keeps_what_is_younger(store, before):
    options = ("--cache", store)
    command = ("cache", *options, "clear") if before else ("cache", "clear", *options)
    assert "Removed 1 entry" in run(*command, "--older-than", 9).stdout
    assert len(list_entries(store)) == 2
    assert "Removed 2 entries" in run(*command).stdout
    assert "No features are cached" in run("cache", "--cache", store).stdout


def test_nothing_but_entries_is_removed(store, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "note.json").write_text("mine")
    (store / "README").write_text("mine")
    (store / ("e" * 64)).write_text("a file")
    (store / "notes").mkdir()
    (store / STRANGE).mkdir()
    (store / STRANGE / "thesis.tex").write_text("mine")
    (store / ("a" * 64)).symlink_to(precious)
    (store / ("b" * 64)).mkdir()
    (store / ("b" * 64) / "rows.npy").symlink_to(precious / "note.json")
    before = set(store.rglob("*")) - {
        p for e in list_entries(store) for p in (e.folder, *e.folder.iterdir())
    }
    removed, in_use = remove_entries(store)
    assert (len(removed), in_use) == (3, [])
    assert set(store.rglob("*")) == before
    assert (precious / "note.json").read_text() == "mine"


def test_an_entry_in_use_is_named_and_not_removed(store):
    key = next(entry.key for entry in list_entries(store) if not entry.complete)
    with lock_entry(store, key):
        result = run("cache", "clear", "--cache", store)
    assert result.exit_code == 0
    assert "another caster is using it" in result.stderr
    assert "Removed 2 entries" in result.stdout
    assert [entry.key for entry in list_entries(store)] == [key]


def test_the_default_cache_and_one_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert f"{tmp_path}/caster" in run("cache").stdout
    assert "Removed 0 entries" in run("cache", "clear").stdout
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    result = run("cache", "--cache", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("caster: cannot read ")


def test_an_entry_without_a_description_is_listed_by_its_key(store):
    entry = list_entries(store)[-1]
    manifest = entry.folder / "note.json"
    manifest.write_text(manifest.read_text().replace(f', "of": "{entry.manifest.description}"', ""))
    assert list_entries(store)[0].manifest.description == ""
    assert f"entry {entry.key[:12]}" in run("cache", "--cache", store).stdout
