"""Signed states: whoever asks for a key gets a state that its holder signed, or an error."""

from __future__ import annotations

import numpy as np
import pytest

import caster
from caster import Adapter, Caster, CasterError, StateError, wrap
from caster import state as states
from tests.conftest import problem
from tests.support.command_line import cli
from tests.support.tensor_files import rewrite

KEY, OTHER = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2


@pytest.fixture(scope="module")
def clf():
    return Caster().fit(*problem())


@pytest.fixture
def signed(tmp_path, clf):
    clf.save(tmp_path / "s.caster", key=KEY)
    return tmp_path / "s.caster"


def test_a_signed_state_loads_with_its_key_and_without(signed):
    assert np.array_equal(caster.load(signed, key=KEY).classes_, caster.load(signed).classes_)


def test_signing_changes_no_content(signed, clf, tmp_path):
    clf.save(tmp_path / "plain.caster")
    plain, with_signature = (
        states.digest(states.load(p)) for p in (tmp_path / "plain.caster", signed)
    )
    assert plain == with_signature


def test_an_unsigned_state_is_rejected(tmp_path, clf):
    clf.save(tmp_path / "s.caster")
    with pytest.raises(StateError, match="not signed"):
        caster.load(tmp_path / "s.caster", key=KEY)


def test_another_key_is_rejected(signed):
    with pytest.raises(StateError, match="not signed with this key"):
        caster.load(signed, key=OTHER)


FORGERIES = {
    "a mean": lambda a, m: a["means"].__setitem__((0, 0), 9),
    "a count": lambda a, m: a["counts"].__setitem__(slice(0, 2), a["counts"][1::-1]),
    "a constant": lambda a, m: m.update(settings=m["settings"].replace("0.8", "0.9")),
    "a label": lambda a, m: m.update(classes=m["classes"].replace("[0, 1", "[9, 1")),
    "the model": lambda a, m: m.update(model_sha256="0" * 64),
    "the writer": lambda a, m: m.update(caster="9"),
    "an entry more": lambda a, m: m.update(more="x"),
    "no signature": lambda a, m: m.pop("signature"),
    "an empty signature": lambda a, m: m.update(signature=""),
    "a signature that is not ASCII": lambda a, m: m.update(signature="\u00e9"),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_the_signature_covers_everything(signed, change):
    rewrite(signed, change)
    with pytest.raises(StateError, match="signed"):
        caster.load(signed, key=KEY)
    caster.load(signed)  # its digest is right: only the key tells


def test_a_key_in_a_file(tmp_path, clf, signed):
    (tmp_path / "key").write_bytes(KEY + b"\n")
    clf.save(tmp_path / "t.caster", key=tmp_path / "key")
    caster.load(tmp_path / "t.caster", key=KEY)
    caster.load(signed, key=str(tmp_path / "key"))


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 31, b"x" * 5000])
def test_a_key_of_another_length(tmp_path, clf, content):
    (tmp_path / "key").write_bytes(content)
    for key in (content, tmp_path / "key"):
        with pytest.raises(CasterError, match="32 to 4096 bytes"):
            clf.save(tmp_path / "s.caster", key=key)
    assert not (tmp_path / "s.caster").exists()


def test_no_key_file(tmp_path, signed):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CasterError, match="no key file"):
            caster.load(signed, key=path)


def test_an_adapter(tmp_path):
    images, labels = problem()
    model = wrap(lambda batch: (batch, batch[:, :5]), version="example-1")
    fitted = caster.fit(model, [(images, labels)], use_head=False)
    fitted.save(tmp_path / "s.caster", key=KEY)
    Adapter(model, tmp_path / "s.caster", key=KEY)
    with pytest.raises(StateError, match="not signed with this key"):
        Adapter(model, tmp_path / "s.caster", key=OTHER)
    with pytest.raises(CasterError, match="already in memory"):
        Adapter(model, fitted.state, key=KEY)


def test_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features, labels = problem()
    np.savez("d.npz", features=features, labels=labels)
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / name).write_bytes(key)

    def run(*words):
        return cli(*words)

    assert run("fit", "d.npz", "-o", "signed.caster", "--key", "key").exit_code == 0
    assert run("fit", "d.npz", "-o", "plain.caster").exit_code == 0
    commands = {
        "inspect": (),
        "doctor": ("--batch-size", "8"),
        "predict": ("d.npz", "-o", "out.csv"),
        "evaluate": ("d.npz", "-o", "page.html"),
    }
    for command, rest in commands.items():
        for state, key, words in (
            ("plain.caster", "key", "not signed"),
            ("signed.caster", "other", "not signed with this key"),
            ("signed.caster", "none", "no key file"),
        ):
            result = run(command, state, *rest, "--key", key)
            assert result.exit_code == 1
            assert words in result.stderr
    assert not (tmp_path / "out.csv").exists()
    assert run("predict", "signed.caster", *commands["predict"], "--key", "key").exit_code == 0
    assert "valid, by key" in run("inspect", "signed.caster", "--key", "key").stdout
    result = run("fit", "d.npz", "-o", "none.caster", "--key", "none")
    assert result.exit_code == 1
    assert not (tmp_path / "none.caster").exists()
