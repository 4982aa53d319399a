"""The state file: what it holds, and every way in which one is rejected."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save as to_safetensors

import caster
from caster import Caster, StateError
from caster import state as states
from caster.io.files import replacing
from caster.io.signed_tensors import content_digest
from tests.conftest import problem
from tests.support.messages import error_line


@pytest.fixture(scope="module")
def clf():
    return Caster().fit(*problem())


@pytest.fixture
def path(tmp_path, clf):
    clf.save(tmp_path / "state.caster")
    return tmp_path / "state.caster"


def contents(path):
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, file.metadata()


def rewrite(path, arrays, metadata, *, sealed=True):
    """Write other contents, with a matching digest if sealed."""
    if sealed:
        metadata = metadata | {"content_sha256": content_digest(arrays, metadata)}
    path.write_bytes(to_safetensors(arrays, metadata))


def rejection(path) -> str:
    message = error_line(caster.load, path, kind=StateError)
    assert str(path) in message
    return message


def test_the_file_is_plain_safetensors(path, clf):
    arrays, metadata = contents(path)
    assert sorted(arrays) == ["U", "counts", "covariances", "means"]
    assert arrays["U"].dtype == arrays["covariances"].dtype == np.float32
    assert arrays["covariances"].shape == (5, 4 * 5 // 2)
    assert metadata["format"] == "caster-state"
    assert metadata["version"] == "1"
    assert metadata["caster"] == caster.__version__
    assert json.loads(metadata["settings"])["tau"] == 0.8
    assert json.loads(metadata["classes"])["labels"] == [0, 1, 2, 3, 4]
    assert (metadata["features"], metadata["samples"]) == ("12", str(len(problem()[0])))


def test_packing_keeps_the_upper_triangles(path, clf):
    packed = contents(path)[0]["covariances"]
    for c, covariance in enumerate(clf.moments_.covariances):
        assert np.array_equal(covariance, covariance.T)
        assert np.array_equal(packed[c], covariance[np.triu_indices(4)])


@pytest.mark.parametrize(("n_classes", "d", "k_max"), [(40, 64, 128), (40, 20, 128)])
def test_covariances_take_half_the_bytes_of_full_ones(tmp_path, n_classes, d, k_max):
    """At most half of the full class, pooled and global covariances, which all follow from them."""
    h, y = problem(n=n_classes * 12, d=d, n_classes=n_classes, dtype=np.float32)
    clf = Caster(k_max=k_max).fit(h, y)
    clf.save(tmp_path / "s.caster")
    moments = caster.load(tmp_path / "s.caster").moments_
    full = sum(a.nbytes for a in (moments.covariances, moments.within, moments.covariance))
    assert contents(tmp_path / "s.caster")[0]["covariances"].nbytes <= full / 2


def test_the_diagonal_matters_beyond_two_classes_per_direction(tmp_path):
    """Packed triangles take (k + 1) / 2k of full class covariances."""
    h, y = problem(n=600, d=20, n_classes=60, dtype=np.float32)
    Caster(k_max=10).fit(h, y).save(tmp_path / "s.caster")
    moments = caster.load(tmp_path / "s.caster").moments_
    packed = contents(tmp_path / "s.caster")[0]["covariances"].nbytes
    assert packed == moments.covariances.nbytes * 11 / 20


def test_the_digest_and_the_bytes_identify_the_content(tmp_path, clf):
    clf.save(tmp_path / "a.caster")
    clf.save(tmp_path / "b.caster")
    assert (tmp_path / "a.caster").read_bytes() == (tmp_path / "b.caster").read_bytes()
    a, b = (states.load(tmp_path / f"{name}.caster") for name in "ab")
    assert states.digest(a) == states.digest(b)
    assert states.digest(replace(a, model_sha256="0" * 64)) != states.digest(a)


def test_any_single_flipped_byte_is_rejected(path):
    original = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(8), *rng.choice(len(original), 200, replace=False)]:
        damaged = bytearray(original)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(StateError):
            caster.load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "truncated" in rejection(path)


def test_trailing_bytes(path):
    path.write_bytes(path.read_bytes() + b"more")
    rejection(path)


def test_another_version(path):
    arrays, metadata = contents(path)
    rewrite(path, arrays, metadata | {"version": "5", "caster": "9.1"})
    assert "state format 5, not 1" in (message := rejection(path))
    assert "9.1" in message


def test_another_kind_of_safetensors_file(path):
    rewrite(path, {"weight": np.zeros(3)}, {"format": "pt"}, sealed=False)
    assert "not a caster state file" in rejection(path)


def test_an_edited_array(path):
    arrays, metadata = contents(path)
    arrays["means"] = arrays["means"] + 1
    rewrite(path, arrays, metadata, sealed=False)
    assert "does not match its own digest" in rejection(path)


def test_an_edited_constant(path):
    arrays, metadata = contents(path)
    metadata["settings"] = metadata["settings"].replace("0.8", "8.0")
    rewrite(path, arrays, metadata, sealed=False)
    assert "digest" in rejection(path)


@pytest.mark.parametrize("name", ["U", "means", "covariances"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_arrays(path, name, bad):
    arrays, metadata = contents(path)
    arrays[name] = arrays[name].copy()
    arrays[name][0, 0] = bad
    rewrite(path, arrays, metadata)
    assert "NaN or infinity" in rejection(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda a, m: a.pop("U"),
        lambda a, m: a.update(extra=np.zeros(2)),
        lambda a, m: a.update(U=a["U"][:, :3]),
        lambda a, m: a.update(counts=a["counts"][:4]),
        lambda a, m: a.update(counts=a["counts"] * 0),
        lambda a, m: a.update(covariances=a["covariances"][:, :9]),
        lambda a, m: a.update(means=a["means"].ravel()),
        lambda a, m: m.update(settings='{"tau": -1}'),
        lambda a, m: m.update(settings='{"unheard": 1}'),
        lambda a, m: m.update(settings="{"),
        lambda a, m: m.update(classes='{"dtype": "<i8", "labels": [0]}'),
        lambda a, m: m.update(source_check='"much"'),
        lambda a, m: m.pop("features"),
    ],
)
def test_contents_that_do_not_fit_together(path, edit):
    arrays, metadata = contents(path)
    edit(arrays, metadata)
    rewrite(path, {n: np.ascontiguousarray(a) for n, a in arrays.items()}, metadata)
    assert "not a usable state file" in rejection(path)


def test_missing_and_unreadable(tmp_path):
    assert "does not exist" in rejection(tmp_path / "none.caster")
    rejection(tmp_path)  # a folder


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "trap.npy").rename(tmp_path / "trap.caster")
    rejection(tmp_path / "trap.caster")
    assert not (tmp_path / "sprung").exists()


def test_digests_of_model_and_preprocessing_are_kept_and_checked(tmp_path, clf):
    path = tmp_path / "s.caster"
    clf.save(path, model_sha256="a" * 64, preprocessing_sha256="b" * 64)
    caster.load(path)
    caster.load(path, model_sha256="a" * 64, preprocessing_sha256="b" * 64)
    assert "another model" in error_line(caster.load, path, model_sha256="c" * 64, kind=StateError)
    with pytest.raises(StateError, match="another preprocessing"):
        caster.load(path, preprocessing_sha256="c" * 64)
    clf.save(path)
    assert "names no model" in error_line(caster.load, path, model_sha256="a" * 64, kind=StateError)


def test_labels_that_cannot_be_stored(tmp_path):
    h, y = problem()
    clf = Caster().fit(h, [frozenset([int(c)]) for c in y])
    with pytest.raises(caster.CasterError, match="frozenset cannot be stored"):
        clf.save(tmp_path / "s.caster")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(path):
    before = path.read_bytes()
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_unwritable_path(tmp_path, clf):
    with pytest.raises(caster.CasterError, match="cannot write"):
        clf.save(tmp_path / "no" / "such" / "folder.caster")
    (tmp_path / "folder.caster").mkdir()
    with pytest.raises(caster.CasterError, match="it is a folder"):
        clf.save(tmp_path / "folder.caster")


@pytest.mark.parametrize("name", ["model.onnx", "MODEL.ONNX"])
def test_the_name_of_an_onnx_file(tmp_path, clf, name):
    with pytest.raises(caster.CasterError, match="has the name of an ONNX file: choose another"):
        clf.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_has_ordinary_permissions(path):
    plain = path.parent / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode
