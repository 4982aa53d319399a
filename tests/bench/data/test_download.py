"""Downloads from a server on this machine: breaks, resumption, digests, hostile archives."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caster import CasterError
from caster.io import silent as quiet
from caster_bench.data.sets import SETS
from caster_bench.data.sets.dataset import Archive, DataSet, Layout, SplitGroup
from caster_bench.data.sets.download import download, get, obtain, unpack
from tests.support.messages import error_line
from tests.support.publish import md5, tar, zipped
from tests.support.server import serving

CONTENT = bytes(range(256)) * 40_000  # ten chunks
FILES = {"set/a.txt": b"first", "set/below/b.txt": b"second"}


@pytest.fixture
def server():
    with serving({"a.tar": CONTENT}) as server:
        yield server


def load(server, folder: Path, digest: str = md5(CONTENT), size: int | None = None) -> Path:
    return download(server.url("a.tar"), folder / "a.tar", digest, size, quiet)


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_whole_file(server, tmp_path, size):
    seen = []
    path = tmp_path / "a.tar"
    digest = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
    part = download(server.url("a.tar"), path, digest, size, lambda *a: seen.append(a))
    assert part.read_bytes() == CONTENT
    assert os.listdir(tmp_path) == ["a.tar.part"]
    assert ("downloading a.tar", 0, len(CONTENT)) in seen
    assert ("downloading a.tar", len(CONTENT), len(CONTENT)) in seen
    assert server.asked == [None]
    assert download(server.url("a.tar"), path, digest, size, quiet) == part
    part.rename(path)
    assert download(server.url("a.tar"), path, digest, size, quiet) == path
    if size is not None:
        assert server.asked == [None]  # a complete file is not requested


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_broken_download_resumes_by_itself(server, tmp_path, size):
    server.breaks = [1_000_000, 2_500_001]
    assert load(server, tmp_path, size=size).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000000-", "bytes=3500001-"]


def test_a_broken_download_resumes_in_another_run(server, tmp_path):
    server.breaks = [3_000_000, 0]
    with pytest.raises(CasterError, match="broke off after 3,000,000 bytes: run it again"):
        load(server, tmp_path)
    assert (tmp_path / "a.tar.part").read_bytes() == CONTENT[:3_000_000]
    assert load(server, tmp_path).read_bytes() == CONTENT
    assert server.asked[2] == "bytes=3000000-"


def test_an_interruption_keeps_the_download(server, tmp_path):
    def stop(_stage: str, done: int, _total: int) -> None:
        if done > 4_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.url("a.tar"), tmp_path / "a.tar", md5(CONTENT), None, stop)
    kept = (tmp_path / "a.tar.part").read_bytes()
    assert 4_000_000 < len(kept) < len(CONTENT)
    assert kept == CONTENT[: len(kept)]
    assert load(server, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={len(kept)}-"


def test_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    (tmp_path / "a.tar.part").write_bytes(b"x" * 1000)
    assert load(server, tmp_path).read_bytes() == CONTENT


def test_a_server_that_does_not_state_the_size(server, tmp_path):
    server.counted = False
    assert load(server, tmp_path).read_bytes() == CONTENT


def test_a_break_without_a_stated_size(server, tmp_path):
    """It looks like the end: only the published size tells."""
    server.counted = False
    server.breaks = [3_000_000]
    assert load(server, tmp_path, size=len(CONTENT)).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=3000000-"]


def test_more_than_is_published(server, tmp_path):
    server.counted = False
    with pytest.raises(CasterError, match="the download was removed"):
        load(server, tmp_path, digest=md5(CONTENT[:-1]), size=len(CONTENT) - 1)
    assert os.listdir(tmp_path) == []
    assert len(server.asked) == 1


def test_a_server_that_resumes_elsewhere(server, tmp_path):
    server.shift = 7
    (tmp_path / "a.tar.part").write_bytes(CONTENT[:1000])
    with pytest.raises(CasterError, match="resumed at another byte"):
        load(server, tmp_path)
    assert (tmp_path / "a.tar.part").read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_part_that_is_complete(server, tmp_path, size):
    (tmp_path / "a.tar.part").write_bytes(CONTENT)
    assert load(server, tmp_path, size=size).read_bytes() == CONTENT


def test_a_part_that_is_too_long(server, tmp_path):
    (tmp_path / "a.tar.part").write_bytes(CONTENT + b"x")
    assert load(server, tmp_path, size=len(CONTENT)).read_bytes() == CONTENT


def test_a_wrong_digest_leaves_nothing(server, tmp_path):
    with pytest.raises(CasterError, match=f"{md5(CONTENT)} instead of {md5(b'')}"):
        load(server, tmp_path, digest=md5(b""))
    assert os.listdir(tmp_path) == []


def test_a_part_of_another_file_is_detected(server, tmp_path):
    (tmp_path / "a.tar.part").write_bytes(b"x" * 1000)
    with pytest.raises(CasterError, match="the download was removed"):
        load(server, tmp_path)
    assert load(server, tmp_path).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_checked(server, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"x")
    with pytest.raises(CasterError, match="remove it to download it again"):
        load(server, tmp_path)
    assert (tmp_path / "a.tar").read_bytes() == b"x"
    assert server.asked == []


def test_another_size_is_rejected_before_the_download(server, tmp_path):
    with pytest.raises(CasterError, match="has 10,240,000 bytes instead of 7"):
        load(server, tmp_path, size=7)
    assert os.listdir(tmp_path) == []


def test_a_file_that_the_server_lacks(server, tmp_path):
    with pytest.raises(CasterError, match="the server answers 404"):
        download(server.url("b.tar"), tmp_path / "b.tar", md5(b""), None, quiet)


def test_no_network(tmp_path):
    with serving({}) as server:
        url = server.url("a.tar")
    with pytest.raises(
        CasterError, match=r"cannot reach 127.0.0.1: .*; without a network"
    ) as error:
        download(url, tmp_path / "a.tar", md5(b""), None, quiet)
    assert "\n" not in str(error.value)
    with pytest.raises(CasterError, match="cannot reach no-such-host"):
        download("http://no-such-host.invalid/a", tmp_path / "a", md5(b""), None, quiet)


def test_a_full_disk(server, tmp_path, monkeypatch):
    assert "cannot write" in error_line(load, server, tmp_path / "absent")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "has 1,000 bytes free, and 10,240,000 are needed" in error_line(load, server, tmp_path)
    (tmp_path / "a.tar.part").write_bytes(CONTENT[:-1000])  # needs little more room
    assert load(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "packed",
    [tar(FILES), tar(FILES, "w"), tar(FILES, "w:xz"), zipped(FILES)],
    ids=["gz", "plain", "xz", "zip"],
)
def test_unpack(tmp_path, packed):
    archive, into = tmp_path / "archive", tmp_path / "into"
    archive.write_bytes(packed)
    into.mkdir()
    seen = []
    unpack(archive, into, lambda *a: seen.append(a))
    assert {n: (into / n).read_bytes() for n in FILES} == FILES
    assert all(0 <= done <= total == len(packed) for _, done, total in seen)


def link(kind: bytes, name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


HOSTILE = {
    "above": tar({"../out.txt": b"x"}),
    "above, deeper": tar({"set/../../out.txt": b"x"}),
    "absolute": tar({"/tmp/caster-out.txt": b"x"}),
    "symbolic link": tar({}, extra=[link(tarfile.SYMTYPE, "set/l", "/etc")]),
    "symbolic link and a file through it": tar(
        {"l/out.txt": b"x"}, extra=[link(tarfile.SYMTYPE, "l", "..")]
    ),
    "hard link": tar({}, extra=[link(tarfile.LNKTYPE, "set/l", "/etc/passwd")]),
    "device": tar({}, extra=[link(tarfile.CHRTYPE, "set/d", "")]),
    "pipe": tar({}, extra=[link(tarfile.FIFOTYPE, "set/p", "")]),
    "zip above": zipped({"../out.txt": b"x"}),
    "zip absolute": zipped({"/tmp/caster-out.txt": b"x"}),
    "zip with backslashes": zipped({"..\\out.txt": b"x"}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives(tmp_path, kind):
    (tmp_path / "in/into").mkdir(parents=True)
    archive = tmp_path / "archive"
    archive.write_bytes(HOSTILE[kind])
    with pytest.raises(CasterError, match="archive is rejected: ") as error:
        unpack(archive, tmp_path / "in/into", quiet)
    assert "\n" not in str(error.value)
    outside = [p for p in tmp_path.rglob("*") if p.is_symlink() or p.name.endswith("out.txt")]
    assert [p for p in outside if not p.is_relative_to(tmp_path / "in/into")] == []
    assert not Path("/tmp/caster-out.txt").exists()


@given(st.text("./ab\\\0", min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_no_name_leads_out_of_the_folder(tmp_path_factory, name):
    base = tmp_path_factory.mktemp("x")
    (base / "into").mkdir()
    (base / "archive").write_bytes(tar({name: b"x"}, "w"))
    with suppress(CasterError):
        unpack(base / "archive", base / "into", quiet)
    assert sorted(os.listdir(base)) == ["archive", "into"]


LETTERS = bytes(random.Random(0).choices(b"abcdefgh", k=400_000))  # more than is read at once
SPOILT = bytearray(tar({"letters": LETTERS}, "w:xz"))
SPOILT[len(SPOILT) // 2] ^= 255


@pytest.mark.parametrize(
    "content", [b"", b"no archive", tar(FILES)[:-30], zipped(FILES)[:-30], bytes(SPOILT)]
)
def test_damaged_archives(tmp_path, content):
    (tmp_path / "into").mkdir()
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(CasterError, match="is damaged, or not an archive"):
        unpack(tmp_path / "archive", tmp_path / "into", quiet)


def encrypted(content: bytes) -> bytes:
    """Set the encryption flag in the headers of all members of a .zip."""
    flagged = bytearray(content)
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = -1
        while (place := content.find(signature, place + 1)) >= 0:
            flagged[place + flags] |= 1
    return bytes(flagged)


@given(
    st.sampled_from([tar(FILES), tar(FILES, "w"), tar(FILES, "w:xz"), zipped(FILES)]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
@example(encrypted(zipped(FILES)), [])
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_is_rejected_in_one_line_or_harmless(tmp_path_factory, packed, changes):
    base = tmp_path_factory.mktemp("x")
    (base / "into").mkdir()
    damaged = bytearray(packed)
    for place, byte in changes:
        damaged[place % len(damaged)] = byte
    (base / "archive").write_bytes(damaged)
    with suppress(CasterError):
        unpack(base / "archive", base / "into", quiet)
    assert sorted(os.listdir(base)) == ["archive", "into"]


def made(server, name: str, content: bytes, gives: tuple[str, ...], **more) -> Archive:
    server.content[name] = content
    return Archive(server.url(name), md5(content), "the test", gives, len(content), **more)


def test_obtain(server, tmp_path):
    archive = made(server, "set.tar.gz", tar(FILES), ("below/set",))
    (tmp_path / ".set.tar.gz.unpacking").mkdir()  # left by an interrupted run
    (tmp_path / ".set.tar.gz.unpacking/old").touch()
    assert obtain(archive, tmp_path, quiet)
    assert (tmp_path / "below/set/below/b.txt").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["below"]
    assert not obtain(archive, tmp_path, quiet)
    assert len(server.asked) == 1


def test_pieces_in_the_only_folder_of_an_archive(server, tmp_path):
    archive = made(server, "set.zip", zipped(FILES), ("home/a.txt", "home/below"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/a.txt").write_bytes(b"mine")
    assert obtain(archive, tmp_path, quiet)
    assert (tmp_path / "home/a.txt").read_bytes() == b"mine"  # existing files stay
    assert (tmp_path / "home/below/b.txt").read_bytes() == b"second"


def test_pieces_in_one_folder_of_two_are_not_taken(server, tmp_path):
    archive = made(server, "set.zip", zipped({**FILES, "other/a": b""}), ("home/below",))
    with pytest.raises(CasterError, match=r"set\.zip does not contain below"):
        obtain(archive, tmp_path, quiet)


def test_a_plain_file(server, tmp_path):
    assert obtain(made(server, "x.mat", b"content", ("home/x.mat",)), tmp_path, quiet)
    assert (tmp_path / "home/x.mat").read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["home"]


def test_an_archive_of_something_else_changes_nothing(server, tmp_path):
    archive = made(server, "set.tar", tar({"other/a": b""}), ("set",))
    with pytest.raises(CasterError, match="does not contain set"):
        obtain(archive, tmp_path, quiet)
    assert os.listdir(tmp_path) == ["set.tar.part"]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_leaves_no_folder(server, tmp_path, kind):
    archive = made(server, "set.tar", HOSTILE[kind], ("set",))
    with pytest.raises(CasterError, match="is rejected"):
        obtain(archive, tmp_path, quiet)
    assert os.listdir(tmp_path) == ["set.tar.part"]


def test_an_interruption_while_unpacking_leaves_nothing_for_good(server, tmp_path):
    archive = made(server, "set.tar", tar(FILES), ("set",))

    def stop(stage: str, _done: int, _total: int) -> None:
        if stage.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        obtain(archive, tmp_path, stop)
    assert os.listdir(tmp_path) == ["set.tar.part"]
    assert obtain(archive, tmp_path, quiet)
    assert os.listdir(tmp_path) == ["set"]


def test_an_archive_put_there_by_hand_is_used_and_kept(server, tmp_path):
    archive = made(server, "set.tar.gz", tar(FILES), ("set",))
    (tmp_path / "set.tar.gz").write_bytes(tar(FILES))
    server.content.clear()
    assert obtain(archive, tmp_path, quiet)
    assert sorted(os.listdir(tmp_path)) == ["set", "set.tar.gz"]
    assert server.asked == []


def test_get(server, tmp_path, monkeypatch):
    archives = [
        made(server, f"{x}.tar", tar({f"{x}/f": b""}), (f"home/{x}",), splits=(x,)) for x in "ab"
    ]
    layout = Layout("home", lambda split: (f"{split}/f",), lambda part: pytest.fail("opened"))
    data = DataSet("S", (SplitGroup(("a", "b"), 1),), 1, (layout,), "http://page", "free", archives)
    monkeypatch.setitem(SETS, "s", data)
    assert get("s:b", tmp_path / "new/root") == archives[1:]
    assert os.listdir(tmp_path / "new/root/home") == ["b"]
    assert get("s", tmp_path / "new/root") == archives[:1]
    assert get("s", tmp_path / "new/root") == []
    (tmp_path / "file").touch()
    with pytest.raises(CasterError, match="cannot write to"):
        get("s", tmp_path / "file")


def test_sets_without_a_public_download(tmp_path):
    with pytest.raises(CasterError) as error:
        get("imagenet:val", tmp_path)
    assert "get it from https://image-net.org" in str(error.value)
    assert f"put it into {tmp_path / 'imagenet'} or" in str(error.value)
