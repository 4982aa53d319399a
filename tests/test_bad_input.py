"""Whatever is wrong with its input, a Caster says so in one line."""

from __future__ import annotations

import warnings

import array_api_strict
import jax
import numpy as np
import pandas
import pytest
import scipy.sparse
import torch

from caster import Caster, CasterError, load
from tests.conftest import problem

H, Y = problem(n=60, d=4, n_classes=3)
N = len(H)
CLF = Caster().fit(H, Y)
RECURSIVE: list[object] = [1]
RECURSIVE.append(RECURSIVE)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates what it still gives
    QUANTISED = torch.quantize_per_tensor(torch.zeros(N, 4), 0.1, 0, torch.qint8)
    SPARSE_ROWS = torch.zeros(N, 4).to_sparse_csr()

# Neither features nor logits nor labels nor a stream, a path or a digest.
BAD = {
    "scalar": np.float64(3),
    "0-d": np.array(3.0),
    "0-d tensor": torch.tensor(1.0),
    "1-d strict": array_api_strict.zeros(4),
    "3-d": np.zeros((N, 4, 1)),
    "3-d tensor": torch.zeros(N, 4, 1),
    "no rows": np.zeros((0, 4)),
    "no rows, tensor": torch.zeros(0, 4),
    "no columns": np.zeros((N, 0)),
    "width": np.zeros((N, 5)),
    "width, jax": jax.numpy.zeros((N, 5)),
    "list": [],
    "ragged": [[1, 2], [1]],
    "recursive": RECURSIVE,
    "masked": np.ma.masked_less(H, 0),
    "masked column": np.ma.masked_equal(Y[:, None], 0),
    "mask": np.ma.masked,
    "text": np.full((N, 4), "a"),
    "bytes": np.full((N, 4), b"a"),
    "objects": np.full((N, 4), object()),
    "dictionaries": [[{}] * 4] * N,
    "integers beyond floats": [[10**400] * 4] * N,
    "numbers beyond float64": np.full((N, 4), np.longdouble("1e4000")),
    "complex": H + 0j,
    "complex column": Y[:, None] + 0j,
    "complex tensor": torch.zeros(N, 4, dtype=torch.complex64),
    "sparse": scipy.sparse.csr_array(H),
    "sparse matrix": scipy.sparse.csr_matrix(H),
    "sparse tensor": torch.zeros(N, 4).to_sparse(),
    "sparse rows": SPARSE_ROWS,
    "quantised": QUANTISED,
    "meta": torch.zeros(N, 4, device="meta"),
    "gradients": [torch.zeros(4, requires_grad=True)] * N,
    "keys": jax.random.split(jax.random.key(0), N),
    "times": np.zeros((N, 4), "datetime64[s]"),
    "spans": np.zeros((N, 4), "timedelta64[s]"),
    "structured": np.zeros(N, [("a", float), ("b", float)]),
    "frame of text": pandas.DataFrame(np.full((N, 4), "a")),
    "frame of times": pandas.DataFrame(np.zeros((N, 4), "datetime64[s]")),
    "series": pandas.Series(np.full(N, 0.5)),
    "NaN": np.full((N, 4), np.nan),
    "NA": [pandas.NA] * N,
    "tuples of lists": [([1],)] * N,
    "number": 5,
    "mapping": {"a": 1},
    "type": int,
    "ellipsis": ...,
}

USES = {
    "fit X": lambda bad: Caster().fit(bad, Y),
    "fit y": lambda bad: Caster().fit(H, bad),
    "stream": lambda bad: Caster().fit_stream(bad, [0, 1, 2]),
    "chunk": lambda bad: Caster().fit_stream([bad], [0, 1, 2]),
    "features of a chunk": lambda bad: Caster().fit_stream([(bad, Y)], [0, 1, 2]),
    "labels of a chunk": lambda bad: Caster().fit_stream([(H, bad)], [0, 1, 2]),
    "classes": lambda bad: Caster().fit_stream([(H, Y)], bad),
    "adapt": CLF.adapt,
    "predict": CLF.predict,
    "source_scores": CLF.source_scores,
    "logits": lambda bad: CLF.adapt(H, bad),
    "path": CLF.save,
    "load": load,
    "digest": lambda bad: CLF.save("never.caster", model_sha256=bad),
}


@pytest.mark.parametrize("use", USES)
def test_bad_input_is_rejected_in_one_line(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, bad in BAD.items():
        with pytest.raises(CasterError) as raised:
            USES[use](bad)
            pytest.fail(f"{use} takes {name}")
        message = str(raised.value)
        assert message, name
        assert "\n" not in message, name
        assert len(message) < 300, name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "use", ["fit X", "fit y", "features of a chunk", "labels of a chunk", "adapt", "predict"]
)
def test_masked_arrays_are_named(use):
    with pytest.raises(CasterError, match="masked"):
        USES[use](BAD["masked"])


@pytest.mark.parametrize("path", ["null\0byte", "long" * 2000])
def test_names_no_file_can_have(path):
    for use in (CLF.save, load):
        with pytest.raises(CasterError):
            use(path)


def test_matrices_are_arrays():
    """np.matrix keeps two dimensions whatever it is indexed by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = np.asmatrix(H)
    assert np.array_equal(CLF.adapt(matrix).adapted, CLF.adapt(H).adapted)
